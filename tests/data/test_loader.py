"""A restored loader goes on exactly as an uninterrupted one would have."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    get_worker_info,
)

from shardwise.data import EngineDataLoader, TokenBatches
from shardwise.errors import CheckpointError, ConfigError, UsageError
from tests.harness import thorough


class Numbers(Dataset[int]):
    """The numbers 0 to count - 1."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Noise(Numbers):
    """Random numbers of all three generators, as augmentation would draw them."""

    def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]
        return torch.tensor([index, torch.rand(()).item(), random.random(), numpy.random.rand()], dtype=torch.float64)


class Stream(IterableDataset[int]):
    """Numbers that depend on the epoch, in order."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        return iter(range(1000 * self.epoch, 1000 * self.epoch + self.count))


class NoisyStream(Stream):
    def __iter__(self) -> Iterator[Any]:
        for number in super().__iter__():
            yield torch.tensor([number, torch.rand(()).item(), random.random(), numpy.random.rand()])


class OwnShards(Stream):
    """Yields this worker's samples by itself; each rank is given its own instance."""

    shards_itself = True

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return islice(super().__iter__(), first, None, step)


def as_list(batch: Any) -> list[Any]:
    return list(batch)


def stream_of(loader: EngineDataLoader, epochs: int) -> list[list[Any]]:
    """All batches of that many iterations, with a mark between epochs."""
    seen: list[list[Any]] = []
    for _ in range(epochs):
        seen += [*loader, ["end"]]
    return seen


def first(loader: EngineDataLoader, count: int) -> list[list[Any]]:
    """The first `count` entries of `stream_of`, leaving the loader just there."""
    seen: list[list[Any]] = []
    while len(seen) < count:
        for batch in loader:
            seen.append(batch)
            if len(seen) == count:
                return seen
        seen.append(["end"])
    return seen


def saved(loader: EngineDataLoader) -> dict[str, Any]:
    return json.loads(json.dumps(loader.state_dict()))


def check_resume(make: Any, stop: int, epochs: int = 3) -> None:
    expected = stream_of(make(), epochs)
    stop = min(stop, len(expected))
    early = make()
    seen = first(early, stop)
    late = make()
    late.load_state_dict(saved(early))
    assert saved(late) == saved(early)
    ends = sum(batch == ["end"] for batch in seen)
    assert seen + stream_of(late, epochs - ends) == expected


CASES = {
    "count": st.integers(1, 25),
    "batch": st.integers(1, 5),
    "world": st.integers(1, 4),
    "drop_last": st.booleans(),
    "stop": st.integers(0, 40),
}


def enough(count: int, batch: int, world: int, drop_last: bool) -> int:
    return max(count, batch * world) if drop_last else count


@given(**CASES, kind=st.sampled_from(["in order", "shuffled", "stream", "sharded stream"]))
def test_resuming_is_exact(count: int, batch: int, world: int, drop_last: bool, stop: int, kind: str) -> None:
    for rank in range(world):

        def make(rank: int = rank) -> EngineDataLoader:
            options = {"rank": rank, "world_size": world, "drop_last": drop_last, "collate_fn": as_list}
            if "stream" in kind:
                return EngineDataLoader((Stream if kind == "stream" else OwnShards)(count), batch, **options)
            data = Numbers(enough(count, batch, world, drop_last))
            return EngineDataLoader(data, batch, shuffle=kind == "shuffled", **options)

        check_resume(make, stop)


@given(count=st.integers(1, 25), batch=st.integers(1, 5), drop_last=st.booleans(), stop=st.integers(0, 40))
def test_user_samplers_resume(count: int, batch: int, drop_last: bool, stop: int) -> None:
    data = Numbers(count)

    def shares() -> DistributedSampler[int]:
        return DistributedSampler(data, num_replicas=2, rank=1)

    def sampler() -> EngineDataLoader:
        return EngineDataLoader(data, batch, data_sampler=shares(), drop_last=drop_last, collate_fn=as_list)

    def batch_sampler() -> EngineDataLoader:
        batches = BatchSampler(shares(), batch, drop_last)
        return EngineDataLoader(data, 1, data_sampler=batches, collate_fn=as_list)

    for make in (sampler, batch_sampler):
        check_resume(make, stop)
        assert len(make()) == len(list(make()))
    assert stream_of(sampler(), 2) == stream_of(batch_sampler(), 2)


@pytest.mark.parametrize(("workers", "stop"), [(1, 9), (2, 1)])
def test_worker_processes_do_not_move_the_position(workers: int, stop: int) -> None:
    def of(data: Any, **options: Any) -> Any:
        return lambda: EngineDataLoader(data, 2, num_workers=workers, collate_fn=as_list, **options)

    check_resume(of(Numbers(11), rank=1, world_size=2), stop, epochs=2)
    check_resume(of(OwnShards(7)), stop, epochs=2)
    if workers == 1:
        check_resume(of(Stream(11), rank=1, world_size=2), stop, epochs=2)


def noise(loader: EngineDataLoader, count: int) -> torch.Tensor:
    return torch.cat([batch for batch in first(loader, count) if not isinstance(batch, list)])


@pytest.mark.parametrize(("data", "workers"), [(Noise(12), 2), (NoisyStream(12), 1)])
def test_random_numbers_of_workers_resume_too(data: Any, workers: int) -> None:
    whole, early, late = (EngineDataLoader(data, 2, num_workers=workers) for _ in range(3))
    seen = noise(early, 4)
    late.load_state_dict(saved(early))
    assert torch.equal(torch.cat([seen, noise(late, 5)]), noise(whole, 9))
    assert len(set(seen[:, 1].tolist())) == len(seen)


def test_random_numbers_and_batches_by_tokens_have_seeds_of_their_own() -> None:
    def make(seed: int) -> EngineDataLoader:
        batches = TokenBatches([1] * 12, 2, order="random", seed=seed)
        return EngineDataLoader(Noise(12), 2, num_workers=1, data_sampler=batches)

    whole, early, late = make(5), make(5), make(6)
    seen = noise(early, 4)
    late.load_state_dict(saved(early))
    assert torch.equal(torch.cat([seen, noise(late, 5)]), noise(whole, 9))


@pytest.mark.parametrize("make", [Noise, NoisyStream])
def test_random_numbers_of_the_main_process_resume_with_its_states(make: Any) -> None:
    whole, early, late = (EngineDataLoader(make(12), 2) for _ in range(3))

    def start() -> None:
        torch.manual_seed(1)
        random.seed(1)
        numpy.random.seed(1)

    start()
    expected = noise(whole, 9)
    start()
    seen = noise(early, 4)
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    noise(EngineDataLoader(make(12), 2), 1)
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    numpy.random.set_state(states[2])
    late.load_state_dict(saved(early))
    assert torch.equal(torch.cat([seen, noise(late, 5)]), expected)


def test_loading_draws_no_random_numbers_of_its_own() -> None:
    before = torch.get_rng_state(), random.getstate()
    stream_of(EngineDataLoader(Numbers(6), 2, num_workers=1), 2)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()


@given(
    count=st.integers(1, 40),
    batch=st.integers(1, 4),
    world=st.integers(1, 5),
    drop_last=st.booleans(),
    make=st.sampled_from([Numbers, Stream]),
)
def test_ranks_have_equally_many_and_miss_nothing(
    count: int, batch: int, world: int, drop_last: bool, make: Any
) -> None:
    count = enough(count, batch, world, drop_last)
    loaders = [
        EngineDataLoader(make(count), batch, rank=rank, world_size=world, drop_last=drop_last, collate_fn=as_list)
        for rank in range(world)
    ]
    shares = [list(loader) for loader in loaders]
    sizes = {tuple(len(batch) for batch in share) for share in shares}
    assert len(sizes) == 1
    assert {len(loader) for loader in loaders} == {len(shares[0])}
    seen = Counter(number for share in shares for batch in share for number in batch)
    if drop_last:
        assert set(seen.values()) <= {1}
        assert set(sizes.pop()) <= {batch}
        assert count - len(seen) < batch * world
    else:
        assert set(seen) == set(range(count))
        assert sum(seen.values()) - count < world


@given(
    count=st.integers(1, 60),
    before=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    after=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stop=st.integers(0, 20),
    make=st.sampled_from([Numbers, Stream]),
)
def test_another_number_of_ranks_sees_the_rest(
    count: int, before: tuple[int, int], after: tuple[int, int], stop: int, make: Any
) -> None:
    """Each sample of the epoch is seen, and again only those that fill the last round of the ranks."""

    def loaders(world: int, batch: int) -> list[EngineDataLoader]:
        return [
            EngineDataLoader(make(count), batch, rank=rank, world_size=world, collate_fn=as_list)
            for rank in range(world)
        ]

    early = loaders(*before)
    seen: Counter[int] = Counter()
    for loader in early:
        seen.update(number for batch in islice(loader, min(stop, len(loader))) for number in batch)
    late = loaders(*after)
    for loader in late:
        loader.load_state_dict(saved(early[0]))
        seen.update(number for batch in loader for number in batch)
    assert set(seen) == set(range(count))
    assert sum(seen.values()) - count < max(before[0], after[0])


@pytest.mark.parametrize("workers", [0, thorough(1)])
@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (3, 2), (2, 3), (4, 1), (3, 2, 4, 1)])
@pytest.mark.parametrize("steps", [1, 2])
def test_resizes_in_an_epoch_keep_the_global_batches(sizes: tuple[int, ...], steps: int, workers: int) -> None:
    """With an equal global batch each step has the samples of the run that was not resized; the tail is seen too."""
    count, total = 120, 24

    def loaders(world: int, drop_last: bool) -> list[EngineDataLoader]:
        options: dict[str, Any] = {"world_size": world, "drop_last": drop_last, "num_workers": workers}
        batch = total // world // steps
        return [EngineDataLoader(Numbers(123), batch, rank=r, collate_fn=as_list, **options) for r in range(world)]

    def windows(iterators: list[Iterator[list[int]]], number: int) -> list[set[int]]:
        taken = [[n for it in iterators for batch in islice(it, steps) for n in batch] for _ in range(number)]
        return [set(window) for window in taken]

    for drop_last in (False, True):
        reference = windows([iter(loaders(1, drop_last)[0])], count // total)
        seen: Counter[int] = Counter()
        state: Any = None
        for index, world in enumerate(sizes):
            these = loaders(world, drop_last)
            for loader in these if state is not None else ():
                loader.load_state_dict(state)
            iterators = [iter(loader) for loader in these]
            last = index == len(sizes) - 1
            number = count // total - index if last else 1
            found = windows(iterators, number)
            assert found == reference[index : index + number]
            for window in found:
                assert len(window) == total
                seen.update(window)
            if last:
                rest = Counter(n for it in iterators for batch in it for n in batch)
                full = 3 // world // these[0].batch_size * these[0].batch_size * world
                assert rest.total() == (full if drop_last else -(-3 // world) * world)
                assert drop_last or set(seen + rest) == set(range(123))
            else:
                states = [saved(loader) for loader in these]
                assert states[1:] == states[:-1]
                state = states[0]
        assert set(seen.values()) == {1}


def test_set_epoch_keeps_a_restored_position_in_that_epoch(caplog: pytest.LogCaptureFixture) -> None:
    reference = EngineDataLoader(Numbers(8), 2, collate_fn=as_list)
    epochs = [list(reference) for _ in range(2)]
    early = EngineDataLoader(Numbers(8), 2, collate_fn=as_list)
    first(early, 4 + 1 + 1)
    late = EngineDataLoader(Numbers(8), 2, collate_fn=as_list)
    late.load_state_dict(saved(early))
    late.set_epoch(1)
    assert list(late) == epochs[1][1:]
    late.load_state_dict(saved(early))
    with caplog.at_level(logging.WARNING, "shardwise"):
        late.set_epoch(0)
    assert "set_epoch(0) discards the restored position in epoch 1" in caplog.text
    assert list(late) == epochs[0]


def test_a_position_restored_before_the_first_batch_counts() -> None:
    expected = list(EngineDataLoader(Numbers(8), 2, collate_fn=as_list))
    early, late = (EngineDataLoader(Numbers(8), 2, collate_fn=as_list) for _ in range(2))
    first(early, 2)
    batches = iter(late)
    late.load_state_dict(saved(early))
    assert next(batches) == expected[2]
    late.load_state_dict(saved(early))
    with pytest.raises(UsageError, match="was restored while this iteration ran; begin a new"):
        next(batches)
    batches = iter(late)
    next(batches)
    assert saved(late)["position"] == 6


def test_the_saved_order_wins() -> None:
    early = EngineDataLoader(Numbers(9), 2, seed=5, collate_fn=as_list)
    seen = first(early, 2)
    late = EngineDataLoader(Numbers(9), 2, seed=6, shuffle=False, collate_fn=as_list)
    late.load_state_dict(saved(early))
    assert seen + stream_of(late, 2) == stream_of(EngineDataLoader(Numbers(9), 2, seed=5, collate_fn=as_list), 2)


def test_positions_of_other_data_are_refused() -> None:
    state = saved(EngineDataLoader(Numbers(8), 2))
    with pytest.raises(CheckpointError, match=r"saved in a dataset of 8 samples, this one has 9.*set_epoch\(1\)"):
        EngineDataLoader(Numbers(9), 2).load_state_dict(state)
    with pytest.raises(CheckpointError, match="saved for a dataset, this is a stream"):
        EngineDataLoader(Stream(8), 2).load_state_dict(state)
    sampled = EngineDataLoader(Numbers(8), 2, data_sampler=SequentialSampler(Numbers(8)))
    with pytest.raises(CheckpointError, match="saved for a dataset, this is a sampler"):
        sampled.load_state_dict(state)
    for data, sampler in ((Numbers(8), SequentialSampler(Numbers(8))), (OwnShards(8), None)):
        state = saved(EngineDataLoader(data, 2, data_sampler=sampler, world_size=2))
        with pytest.raises(CheckpointError, match="saved on 2 ranks, this run has 3"):
            EngineDataLoader(data, 2, data_sampler=sampler, world_size=3).load_state_dict(state)


@pytest.mark.parametrize("change", [{"epoch": -1}, {"position": None}, {"world_size": 0}, {"seed": "1"}])
def test_damaged_positions_are_refused(change: dict[str, Any]) -> None:
    loader = EngineDataLoader(Numbers(8), 2)
    with pytest.raises(CheckpointError, match=f"'{next(iter(change))}': expected an integer"):
        loader.load_state_dict({**loader.state_dict(), **change})


def test_a_sampler_without_epochs_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    data = Numbers(8)

    def make(sampler: Any) -> EngineDataLoader:
        return EngineDataLoader(data, 2, data_sampler=sampler, collate_fn=as_list)

    early = make(SequentialSampler(data))
    first(early, 2)
    with caplog.at_level(logging.WARNING, "shardwise"):
        make(SequentialSampler(data)).load_state_dict(saved(early))
        make(DistributedSampler(data, num_replicas=1, rank=0)).load_state_dict(saved(early))
        assert caplog.text == ""
        make(RandomSampler(data)).load_state_dict(saved(early))
    assert "RandomSampler has no set_epoch" in caplog.text


@pytest.mark.parametrize(
    ("data", "batch", "options", "words"),
    [
        (Numbers(8), 0, {}, "batch_size: expected an integer >= 1"),
        (Numbers(0), 2, {}, "0 samples on 1 ranks give no batch of 2$"),
        (iter([1]), 2, {}, "neither a map-style dataset"),
        (Numbers(3), 2, {"world_size": 2, "drop_last": True}, "give no batch of 2; set dataloader_drop_last to false"),
        (Stream(8), 2, {"data_sampler": [0, 1]}, "data_sampler: Stream is an iterable dataset"),
        (Stream(8), 2, {"num_workers": 2}, "num_workers: 2 worker processes would each read all of Stream"),
        (Stream(8), 2, {"rank": 2, "world_size": 2}, "rank: expected 0 to 1"),
    ],
)
def test_arguments_without_meaning(data: Any, batch: int, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineDataLoader(data, batch, **options)


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1


def test_a_stream_without_length_or_end() -> None:
    loader = EngineDataLoader(Endless(), 3, rank=1, world_size=2, collate_fn=as_list)
    with pytest.raises(TypeError, match="Endless"):
        len(loader)
    assert first(loader, 2) == [[1, 3, 5], [7, 9, 11]]
    late = EngineDataLoader(Endless(), 3, rank=1, world_size=2, collate_fn=as_list)
    late.load_state_dict(saved(loader))
    assert first(late, 1) == [[13, 15, 17]]


def test_default_collation_and_batched_fetching() -> None:
    class Batched(Numbers):
        def __getitems__(self, indices: list[int]) -> list[int]:
            assert type(indices) is list or get_worker_info() is None
            return [10 * index for index in indices]

    for workers in (0, 1):
        loader = EngineDataLoader(Batched(4), 2, shuffle=False, num_workers=workers)
        assert [batch.tolist() for batch in loader] == [[0, 10], [20, 30]]


def test_workers_outlive_the_first_signal_of_a_scheduler() -> None:
    loader = EngineDataLoader(Numbers(8), 1, num_workers=1, shuffle=False, collate_fn=as_list)
    iterator = iter(loader)
    seen = next(iterator)
    for worker in multiprocessing.active_children():
        for name in ("SIGTERM", "SIGUSR1"):
            os.kill(worker.pid or 0, getattr(signal, name))
    for batch in iterator:
        seen += batch
    assert seen == list(range(8))


@pytest.mark.parametrize("sizes", [(1, 2), (4, 1), (3, 2, 4, 1)])
def test_blocks_do_not_depend_on_the_number_of_ranks(sizes: tuple[int, ...]) -> None:
    """Each micro-batch has the same samples and random numbers on any rank, also after resizes."""

    def batches(world: int, state: Any, count: int) -> tuple[list[Any], Any]:
        options: dict[str, Any] = {"world_size": world, "blocks": True, "num_workers": 1, "seed": 3}
        loaders = [EngineDataLoader(Noise(26), 2, rank=rank, **options) for rank in range(world)]
        for loader in loaders:
            loader.load_state_dict(state) if state is not None else None
        iterators = [iter(loader) for loader in loaders]
        found = [next(iterator).tolist() for _ in range(count // world) for iterator in iterators]
        return found, saved(loaders[0])

    reference, _ = batches(1, None, 12)
    found: list[Any] = []
    state = None
    for world in sizes:
        more, state = batches(world, state, world)
        found += more
    assert found == reference[: len(found)]
    with pytest.raises(ConfigError, match="sample_seed"):
        EngineDataLoader(Stream(8), 1, blocks=True)
