"""What one rank sends to agree on a save or a load grows with the names of the model, not with ranks times names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.checkpoint.collect import TrainingState, _digest, collect, first_holders, own_buffers
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.manifestfile import to_bytes
from shardwise.checkpoint.save import join
from shardwise.data import EngineDataLoader
from tests.scale.test_bytes import WORLDS, Rank


class Job(Rank):
    """One of many ranks; `others` is what all others add to a sum."""

    sent = 0
    sends = True
    others: torch.Tensor | None = None

    def sum_large(self, flat: torch.Tensor, label: str, out: torch.Tensor | None = None) -> Any:
        self.sent += flat.nbytes
        if self.others is not None:
            flat[: self.others.numel()] += self.others
        return SimpleNamespace(wait=lambda: None)


class Statistics(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        for number in range(count):
            self.register_buffer(f"b{number}", torch.full((3,), float(number)))


def model_of(comm: Job, module: nn.Module) -> Any:
    return SimpleNamespace(comm=comm, device=torch.device("cpu"), module=module)


@pytest.mark.parametrize("world", WORLDS)
def test_buffers_are_compared_with_those_of_the_first_rank_by_8_bytes_each(world: int) -> None:
    module, same = Statistics(1000), {"buffers": [f"b{number}" for number in range(1000)]}
    inventories = [same] * world
    assert first_holders(inventories, "buffers") == dict.fromkeys(same["buffers"], 0)
    theirs = torch.tensor([float(part) for buffer in module.buffers() for part in _digest(buffer)])
    module.b7.add_(1)
    comm = Job(world, 5)
    comm.others = theirs
    assert own_buffers(model_of(comm, module), inventories) == {"b7": 5}
    assert 8 * 1000 <= comm.sent <= 8 * 1000 + 4 * world
    first = Job(world, 0)
    assert own_buffers(model_of(first, module), inventories) == dict.fromkeys(same["buffers"])


def test_the_position_in_the_data_is_saved_once() -> None:
    def size(world: int) -> int:
        loader = EngineDataLoader(range(40 * world), 4, world_size=world, drop_last=True, unequal=[4] * world)
        batches = iter(loader)
        for number in range(6):
            next(batches)
            loader.divide([3, 5] * (world // 2) if number % 2 else [5, 3] * (world // 2))
        position = loader.state_dict()
        assert len(position["unequal"]) <= 2
        parts: dict[str, Any] = {}
        for rank in range(world):
            model: Any = SimpleNamespace(
                comm=Job(world, rank), registry=[], fetch=None, value_runs=dict, owned_ranges=dict
            )
            part = collect(model, f"{rank}", TrainingState(loader=position), frozenset())
            parts[f"{rank}"] = {**part.to_json(), "facts": (0, [])}
            part.trees["extra"] = {}
        return len(to_bytes(join(Manifest("a", 0.0, {}, {}, {}, {}, []), parts)))

    assert size(4096) < 4.5 * size(1024)
