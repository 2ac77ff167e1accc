"""What a load reads, how often and into which memory; damage in every kind of block, in shards of many blocks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.checkpoint import Checkpoint, safetensors_reader
from shardwise.errors import CheckpointError
from shardwise.memory import Accountant, track_activations
from tests.checkpoint.hostile import change_a_byte
from tests.checkpoint.job import first_rank
from tests.harness import on_ranks, run_ranks, thorough
from tests.harness.training import ADAMW, engine_of

WIDTH = 3400
SIZE = 12 * (WIDTH * WIDTH + WIDTH)
"""Bytes of weights and AdamW's state; half of them, and more than 64 MiB, on each of two ranks."""


def make(seed: int, *, trained: bool) -> Any:
    torch.manual_seed(seed)
    engine = engine_of(nn.Linear(WIDTH, WIDTH), 3, ADAMW)
    if trained:
        engine.backward(engine(torch.randn(1, WIDTH)).square().mean())
        engine.step()
    return engine


def save(path: str) -> None:
    engine = make(1, trained=True)
    engine.save_checkpoint(path, tag="a", client_state={"values": torch.arange(1 << 20)})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("saved")
    run_ranks(save, 2, str(path))
    return str(path)


@contextmanager
def counted() -> Iterator[list[int]]:
    """Count the bytes that are read from files of tensors, by any thread."""
    counts: list[int] = []
    fill = safetensors_reader.TensorFile._fill

    def counting(self: Any, out: memoryview, offset: int) -> None:
        counts.append(len(out))
        fill(self, out, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors_reader.TensorFile, "_fill", counting)
        yield counts


def state_of(engine: Any) -> list[torch.Tensor]:
    """Return the optimizer's tensors of one value per element on this rank."""
    return [t for state in engine.optimizer.state.values() for t in state.values() if t.dim()]


def held(engine: Any) -> list[torch.Tensor]:
    """Return copies of the values and the optimizer's state on this rank."""
    values = [view for runs in engine.sharded.state.value_runs().values() for _, _, view in runs]
    return [tensor.clone() for tensor in [*values, *state_of(engine)]]


def load(path: str, trained: bool) -> tuple[int, int]:
    """Load into an engine with other values, compare every value, and return the bytes that were read and taken."""
    engine = make(2, trained=trained)
    before = state_of(engine)
    torch.use_deterministic_algorithms(True)  # memory that is not written holds NaN, so that nobody reads it unnoticed
    try:
        with counted() as counts, track_activations(Accountant()) as accountant:
            engine.load_checkpoint(path, "a")
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(bool(tensor.isfinite().all()) for tensor in state_of(engine)), "between parameters there are zeros"
    with Checkpoint(f"{path}/a") as whole:
        for tensor in engine.sharded.registry:
            for kind in ("parameter", "optimizer/exp_avg", "optimizer/exp_avg_sq"):
                values = whole.read(whole.find(tensor.name, kind)).view(-1)
                key, sharded = kind.partition("/")[2], engine.sharded
                pieces = (
                    sharded.update.state_pieces(tensor.index, key) if key else sharded.state.value_runs()[tensor.index]
                )
                assert all(torch.equal(view, values[first:end]) for first, end, view in pieces), (kind, tensor.name)
    # What was there is still referred to here: other tensors would lie elsewhere.
    assert not trained or [t.data_ptr() for t in before] == [t.data_ptr() for t in state_of(engine)]
    taken = accountant.peak_total - (0 if trained else sum(tensor.nbytes for tensor in state_of(engine)))
    return sum(counts), taken


@pytest.mark.parametrize("world", [thorough(1), thorough(2), 3])
def test_a_resuming_job_reads_optimizer_state_once(saved: str, world: int) -> None:
    """With other cuts than those of the files it is read again, from the page cache."""
    found = run_ranks(load, world, saved, False)
    files = sum(os.path.getsize(f"{saved}/a/{n}") for n in os.listdir(f"{saved}/a") if n.endswith("tensors"))
    trees = world * (files - SIZE)  # client_state, and each rank's random numbers
    read_later = SIZE // 3 if world < 3 else SIZE  # values, and state that the files have in other pieces
    assert max(taken for _, taken in found) < 0.2 * SIZE / world
    assert files + SIZE // 3 <= sum(read for read, _ in found) <= 1.05 * (files + read_later) + trees


def test_state_that_is_there_is_overwritten_in_its_place(saved: str) -> None:
    run_ranks(load, 2, saved, True)


@pytest.mark.parametrize("trained", [thorough(True), False])
@on_ranks(2)
def test_damage_in_any_kind_of_block_is_refused_and_changes_nothing(saved: str, trained: bool) -> None:
    engine = make(2, trained=trained)
    before = held(engine)
    name = min(name for name in os.listdir(f"{saved}/a") if name.endswith("tensors"))
    with safetensors_reader.TensorFile(f"{saved}/a/{name}") as file:
        places = {key: sum(file.span(key)) // 2 for key in file.specs}
        places["the end"] = max(end for _, end in map(file.span, file.specs)) - 1
    assert {"parameter", "optimizer", "client_state['values']", "the end"} <= {key.partition("/")[0] for key in places}
    for key, place in places.items():
        first_rank(change_a_byte, file.path, place)
        with pytest.raises(CheckpointError, match="damaged: the checksum of bytes") as caught:
            engine.load_checkpoint(saved, "a")
        first_rank(change_a_byte, file.path, place)
        after = held(engine)
        assert len(before) == len(after) and all(map(torch.equal, before, after)), key
        assert name in str(caught.value)
    moment = next(place for key, place in places.items() if key.startswith("optimizer/"))
    first_rank(change_a_byte, file.path, moment)
    engine.load_checkpoint(saved, "a", load_module_only=True)  # what is not wanted is not verified
    first_rank(change_a_byte, file.path, moment)
    engine.load_checkpoint(saved, "a")
