"""Samples by difficulty, and micro-batches by tokens: the same batches on any number of ranks, and after any resume."""

from __future__ import annotations

from collections import Counter
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.data import CurriculumSampler, EngineDataLoader, TokenBatches
from shardwise.data.indexed import write_rows
from shardwise.errors import CheckpointError, ConfigError, UsageError

COUNT = 60
LENGTHS = [1 + 11 * index % 30 for index in range(COUNT)]
RARITY = [7 * index % COUNT for index in range(COUNT)]


def files(path: Path, name: str, values: list[int]) -> dict[str, str]:
    order = np.argsort(values, kind="stable")
    different, counts = np.unique(values, return_counts=True)
    write_rows(str(path / f"{name}_samples"), order, counts)
    write_rows(str(path / f"{name}_values"), different, np.ones(len(different), np.int32))
    return {"index_to_sample_path": f"{path / name}_samples", "index_to_metric_path": f"{path / name}_values"}


def metric(kind: str, least: int, most: int, steps: int = 6, **more: Any) -> dict[str, Any]:
    return {
        "difficulty_type": kind,
        "clustering_type": "schedule_based",
        "min_difficulty": least,
        "max_difficulty": most,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": steps, "difficulty_step": 1},
        **more,
    }


def section(metrics: dict[str, Any], **sampling: Any) -> dict[str, Any]:
    return {
        "enabled": True,
        "data_sampling": {
            "enabled": True,
            "num_epochs": 4,
            "curriculum_learning": {"enabled": True, "curriculum_metrics": metrics},
            **sampling,
        },
    }


def loaders(given: dict[str, Any], ranks: int, micro: int, steps: int = 2, workers: int = 0) -> list[EngineDataLoader]:
    return [
        EngineDataLoader(
            list(range(COUNT)),
            micro,
            rank=rank,
            world_size=ranks,
            collate_fn=list,
            num_workers=workers,
            data_sampler=CurriculumSampler(given, COUNT, micro, rank, ranks, gradient_accumulation_steps=steps),
        )
        for rank in range(ranks)
    ]


def flat(of: list[EngineDataLoader], number: int | None = None, iterators: Any = None) -> list[int]:
    """Return the samples of all ranks in the order of micro-batches."""
    iterators = [iter(loader) for loader in of] if iterators is None else iterators
    rounds = islice(zip(*iterators, strict=True), number)
    return [sample for batches in rounds for batch in batches for sample in batch]


def in_steps(samples: list[int], size: int = 8) -> list[list[int]]:
    return [samples[start : start + size] for start in range(0, len(samples), size)]


def test_batches_have_samples_up_to_the_difficulty(tmp_path: Path) -> None:
    given = section({"length": {**metric("value", 5, 30), **files(tmp_path, "length", LENGTHS)}})
    steps = in_steps(flat(loaders(given, 1, 4)))
    assert len(steps) == 4 * COUNT // 8
    for step, batch in enumerate(steps, 1):
        most = min(30, 5 + 25 * step // 6)
        assert len(batch) == 8 and max(LENGTHS[sample] for sample in batch) <= most
    assert max(LENGTHS[sample] for sample in steps[4]) > 20
    # Each cluster is seen completely before any of its samples is seen again.
    seen = Counter(chain.from_iterable(steps))
    easy = [sample for sample in range(COUNT) if LENGTHS[sample] <= 9]
    assert {seen[sample] for sample in easy} <= {min(seen[s] for s in easy), min(seen[s] for s in easy) + 1}
    assert set(seen) == set(range(COUNT))


def test_percentiles_and_several_metrics(tmp_path: Path) -> None:
    given = section(
        {
            "rarity": {**metric("percentile", 20, 100), **files(tmp_path, "rarity", RARITY)},
            "length": {**metric("value", 15, 30), **files(tmp_path, "length", LENGTHS)},
        }
    )
    rank_of = {sample: place for place, sample in enumerate(np.argsort(RARITY, kind="stable").tolist())}
    (loader,) = loaders(given, 1, 4)
    for step, batch in enumerate(in_steps(flat([loader])), 1):
        percent, most = min(100, 20 + 80 * step // 6), min(30, 15 + 15 * step // 6)
        allowed = {s for s in range(COUNT) if rank_of[s] < -(-COUNT * percent // 100) and LENGTHS[s] <= most}
        assert set(batch) <= allowed
    assert set(flat([loader], 40)) == set(range(COUNT))  # the next epoch goes on at the largest difficulty


def both(path: Path) -> dict[str, Any]:
    return section(
        {
            "rarity": {**metric("percentile", 20, 100, steps=20), **files(path, "rarity", RARITY)},
            "shape": metric("value", 2, 9, steps=9, clustering_type="single_cluster"),
        }
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_the_samples_do_not_depend_on_ranks(workers: int, tmp_path: Path) -> None:
    given = both(tmp_path)
    whole = flat(loaders(given, 1, 4))
    assert flat(loaders(given, 2, 2)) == whole
    assert flat(loaders(given, 4, 1, workers=workers), 20) == whole[:80]
    assert flat(loaders(given, 1, 2, steps=4)) == whole


@pytest.mark.parametrize("stop", [0, 1, 2, 5, 8, 59, 60])
@pytest.mark.parametrize("other", [(1, 4, 2), (2, 2, 2), (2, 1, 4), (1, 2, 4)])
def test_positions_resume_on_any_ranks(stop: int, other: tuple[int, int, int], tmp_path: Path) -> None:
    given = both(tmp_path)
    whole = flat(loaders(given, 2, 2))
    of = loaders(given, 2, 2)
    iterators = [iter(loader) for loader in of]
    seen = flat(of, stop, iterators)
    state = of[1].state_dict()
    again = loaders(given, *other)
    for loader in again:
        loader.load_state_dict(state)
        assert loader.state_dict()["curriculum"]["clusters"] == again[0].state_dict()["curriculum"]["clusters"]
        assert loader.state_dict()["curriculum"]["seen"] == state["curriculum"]["seen"]
    assert seen + flat(again) == whole or stop == 60


@pytest.mark.parametrize("workers", [0, 1])
def test_a_position_after_an_epoch_keeps_the_difficulty(workers: int, tmp_path: Path) -> None:
    given = both(tmp_path)
    of = loaders(given, 2, 2, workers=workers)
    flat(of)
    state = of[0].state_dict()
    assert state["curriculum"]["step"] == 4 * COUNT // 8
    assert state["curriculum"]["current_difficulties"] == {"rarity": 100, "shape": 9}
    (again,) = loaders(given, 1, 4)
    again.load_state_dict(state)
    assert flat([again], 12) == flat(of, 12)


@pytest.mark.parametrize("stop", [0, 1, 3, 4])
def test_batches_that_workers_have_prepared_are_not_lost(stop: int, tmp_path: Path) -> None:
    given = both(tmp_path)
    whole = flat(loaders(given, 1, 4))
    of = loaders(given, 1, 4, workers=2)
    iterators = [iter(loader) for loader in of]
    seen = flat(of, stop, iterators)
    (again,) = loaders(given, 1, 4)
    again.load_state_dict(of[0].state_dict())
    (third,) = loaders(given, 1, 4)
    third.load_state_dict(again.state_dict())
    assert seen + flat([third]) == whole


def test_another_batch_size_goes_on_between_steps(tmp_path: Path) -> None:
    given = both(tmp_path)
    of = loaders(given, 2, 2)
    iterators = [iter(loader) for loader in of]
    seen = flat(of, 4, iterators)
    (again,) = loaders(given, 1, 6, steps=1)
    again.load_state_dict(of[0].state_dict())
    rest = flat([again])
    assert len(rest) == 4 * COUNT // 6 * 6 - len(seen) // 6 * 6
    flat(of, 1, iterators)
    with pytest.raises(CheckpointError, match="it was saved after 4 of 8 samples of a step"):
        again.load_state_dict(of[0].state_dict())


@pytest.mark.parametrize("known", [True, False])
def test_positions_of_another_analysis_are_refused(known: bool, tmp_path: Path) -> None:
    def sampler(count: int, seed: int = 1234) -> CurriculumSampler:
        rarity = {**metric("percentile", 20, 100), **files(tmp_path, f"{count}", RARITY[:count])}
        return CurriculumSampler({**section({"rarity": rarity}), "seed": seed}, count, 4)

    whole = list(sampler(COUNT))
    early = sampler(COUNT)
    list(islice(early, 12))
    state = early.state_dict()
    if not known:  # as earlier versions have saved it
        state = {name: value for name, value in state.items() if name not in ("samples", "seed", "sizes")}
    for other in (sampler(COUNT // 2), sampler(COUNT // 6)):
        with pytest.raises(CheckpointError, match=r"position in the curriculum: it was saved with .* samples"):
            other.load_state_dict(state)
    again = sampler(COUNT, seed=5 if known else 1234)
    again.load_state_dict(state)
    assert list(again) == whole[12:]


def test_an_iteration_that_was_left_goes_on(tmp_path: Path) -> None:
    given = both(tmp_path)
    whole = flat(loaders(given, 1, 4))
    (loader,) = loaders(given, 1, 4)
    left = flat([loader], 5)
    assert (left + flat([loader]))[: len(whole)] == whole


def test_a_function_makes_batches_of_the_state(tmp_path: Path) -> None:
    (loader,) = loaders(both(tmp_path), 1, 4, workers=1)
    loader.post_process = lambda batch, state: state["current_difficulties"]["shape"]
    assert list(islice(loader, 8)) == [2, 2, 3, 3, 4, 4, 5, 5]


def test_custom_schedules(tmp_path: Path) -> None:
    lengths = files(tmp_path, "length", LENGTHS)
    custom = metric("value", 5, 30, schedule_type="custom", schedule_config={}, **lengths)
    (loader,) = loaders(section({"length": custom}), 1, 4)
    loader.sampler.schedules["length"].set_custom_get_difficulty(lambda step: [6, 9, 4][step - 1])
    iterators = [iter(loader)]
    assert max(LENGTHS[s] for s in flat([loader], 2, iterators)) <= 6
    flat([loader], 2, iterators)
    with pytest.raises(UsageError, match="the difficulty 'length' falls from 9 to 4"):
        flat([loader], 1, iterators)


def test_bad_files_are_refused(tmp_path: Path) -> None:
    lengths = files(tmp_path, "length", LENGTHS)
    at = "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.length"
    given = section({"length": {**metric("value", 5, 30), **lengths}})
    with pytest.raises(ConfigError, match=f"{at}.index_to_sample_path: has 60 samples, and the dataset has 61"):
        CurriculumSampler(given, 61, 2)
    other = files(tmp_path, "other", RARITY)
    mixed = {**metric("value", 5, 30), **lengths, "index_to_metric_path": other["index_to_metric_path"]}
    with pytest.raises(ConfigError, match="take both files of one analysis"):
        CurriculumSampler(section({"length": mixed}), COUNT, 2)
    with pytest.raises(ConfigError, match="no indexed dataset can be read there"):
        CurriculumSampler(section({"length": {**mixed, "index_to_sample_path": "nowhere"}}), COUNT, 2)
    with pytest.raises(ConfigError, match=f"{at}.max_difficulty: is 200; percentiles end at 100"):
        CurriculumSampler(section({"length": {**metric("percentile", 5, 200), **lengths}}), COUNT, 2)
    with pytest.raises(ConfigError, match="data_efficiency: a curriculum needs `enabled` true"):
        CurriculumSampler({"enabled": True}, COUNT, 2)
    late = section({"length": {**metric("value", 1, 30), **files(tmp_path, "late", [n + 20 for n in LENGTHS])}})
    with pytest.raises(UsageError, match="no sample has length <= 5, the difficulty of step 1"):
        flat(loaders(late, 1, 4))


# -- batches by tokens -------------------------------------------------------------------------------------------------


def by_tokens(ranks: int, steps: int = 2, **more: Any) -> list[EngineDataLoader]:
    return [
        EngineDataLoader(
            list(range(COUNT)),
            2,
            rank=rank,
            world_size=ranks,
            collate_fn=list,
            data_sampler=TokenBatches(LENGTHS, 40, rank=rank, world_size=ranks, steps=steps, **more),
        )
        for rank in range(ranks)
    ]


def rounds(of: list[EngineDataLoader], number: int | None = None, iterators: Any = None) -> list[list[int]]:
    iterators = [iter(loader) for loader in of] if iterators is None else iterators
    return [batch for batches in islice(zip(*iterators, strict=True), number) for batch in batches]


@pytest.mark.parametrize("order", ["dataloader", "seqlen", "random"])
def test_micro_batches_have_a_number_of_tokens(order: str) -> None:
    found = rounds(by_tokens(1, 1, order=order))
    assert sorted(chain.from_iterable(found)) == list(range(COUNT))
    totals = [sum(LENGTHS[sample] for sample in batch) for batch in found]
    assert max(totals) <= 40
    for batch, following in pairwise(found):  # none has room for the next sample
        assert sum(LENGTHS[s] for s in batch) + LENGTHS[following[0]] > 40
    again = rounds(by_tokens(1, 1, order=order))
    assert again == found
    assert rounds(by_tokens(2, 1, order=order)) == found[: len(found) // 2 * 2]
    small = rounds(by_tokens(1, 1, order=order, least=2, most=3))
    assert {len(batch) for batch in small} <= {2, 3}
    epochs = by_tokens(1, 1, order=order)
    assert (rounds(epochs) == rounds(epochs)) == (order != "random")


@pytest.mark.parametrize("stop", [0, 1, 3, 8])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_micro_batches_resume_on_any_ranks(stop: int, ranks: int) -> None:
    whole = rounds(by_tokens(1, 1, order="random"))
    of = by_tokens(2, order="random")
    iterators = [iter(loader) for loader in of]
    seen = rounds(of, stop, iterators)
    again = by_tokens(ranks, 1, order="random", seed=5)
    for loader in again:
        loader.load_state_dict(of[0].state_dict())
    rest = rounds(again)
    assert seen + rest == whole[: len(seen) + len(rest)]
    assert len(whole) - len(seen) - len(rest) < (4 if ranks == 2 else ranks)
    following = rounds(again, 3)
    assert following == rounds(by_tokens(ranks, 1, order="random"), 3) or following != rest[: len(following)]


def test_samples_of_a_window_over_two_epochs_are_counted() -> None:
    (loader,) = by_tokens(1)
    sizes = [len(batch) for count in (3, 1) for batch in islice(loader, count)]
    assert loader.claim_samples(4) == sum(sizes)


def test_what_forms_no_batches_is_refused() -> None:
    with pytest.raises(ConfigError, match="1 micro-batches of at most 4000 tokens make no step of 2 ranks"):
        TokenBatches(LENGTHS, 4000, world_size=2)
    of = by_tokens(1)
    state = of[0].state_dict()
    other = EngineDataLoader(list(range(COUNT)), 2, collate_fn=list, data_sampler=TokenBatches(LENGTHS, 41))
    with pytest.raises(CheckpointError, match="saved with other lengths or settings of dynamic batching"):
        other.load_state_dict(state)
    next(iter(of[0]))
    with pytest.raises(UsageError, match="1 batches were taken"):
        of[0].claim_samples(2)
