"""What one rank receives to agree on a load, if ranks have different layers, does not grow with ranks x names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.checkpoint.agree import held_by_any, on_first_rank
from shardwise.checkpoint.load import Options, _elsewhere
from shardwise.checkpoint.manifest import PARAMETER, Manifest, StoredTensor
from shardwise.checkpoint.selection import Renamed, Selection
from shardwise.comm.communicator import Handle
from tests.scale.test_bytes import Rank

STAGES, LAYERS = 8, 200


class Counting(Rank):
    """A rank that counts the bytes of all its collectives, and receives what the others send: nothing."""

    def _launch(self, op: str, size: int, sent: int, label: str, kind: str, *launch: Any) -> Handle:
        self.calls += 1
        self.received += size - size // self.world
        return super()._launch(op, size, sent, label, kind, *launch)


def names_of(stage: int) -> list[str]:
    return [f"model.layers.{stage * LAYERS + number}.attention.weight" for number in range(LAYERS)]


def agreed(world: int) -> tuple[int, int, frozenset[str]]:
    comm = Counting(world, 0)
    tensors = [SimpleNamespace(name=name, aliases=()) for name in names_of(0)]
    model: Any = SimpleNamespace(comm=comm, registry=tensors, module=nn.Module())
    stored = [StoredTensor(n, PARAMETER, (2,), "float32", ()) for stage in range(STAGES) for n in names_of(stage)]
    manifest = Manifest("a", 0.0, {}, {}, {}, {}, stored)
    selection = Selection.of(exclude=["model.layers.0.*", "gone.*"])
    found = _elsewhere(model, Renamed(manifest), Options(selection=selection), "a", 1)
    return comm.received, comm.calls, found.names


@pytest.mark.parametrize("world", [8, 1024, 4096])
def test_ranks_mark_the_names_that_they_have(world: int) -> None:
    received, calls, names = agreed(world)
    assert names == frozenset()  # the others of this test have none
    assert calls == 3  # a digest of the request; a sum over ranks
    assert received <= 16 * world + 2 * 4 * (STAGES * LAYERS + 2 + world)


def test_names_of_any_rank_are_found_on_all() -> None:
    comm = Counting(8, 0)

    def summed(flat: torch.Tensor, label: str, out: Any = None) -> Any:
        flat[2] += 3
        return SimpleNamespace(wait=lambda: None)

    comm.sum_large = summed  # type: ignore[method-assign]
    assert held_by_any(comm, ["a", "b", "c", "d"], {"b", "other"}, "names") == {"b", "c"}


@pytest.mark.parametrize("world", [8, 1024])
def test_other_ranks_than_the_first_receive_no_descriptions(world: int) -> None:
    comm = Counting(world, 1)
    assert on_first_rank(comm, names_of(0), "weights") == []
    assert comm.received <= (20 + 44) * world + 2 * world * len(str(names_of(0))) // world
