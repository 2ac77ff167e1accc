"""Buffers in registered memory: made in the pool, given up in the end, and refused where nothing registers them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.comm import registered
from shardwise.errors import UsageError
from tests.harness import on_ranks
from tests.harness.training import ADAMW, engine_of

KEYS = {"registered_buffers": True}


class Backend:
    """Registers pools as NCCL does."""

    mem_allocator = "of the backend"

    def __init__(self) -> None:
        self.pools: list[Any] = []

    def register_mem_pool(self, pool: Any) -> None:
        assert pool not in self.pools
        self.pools.append(pool)

    def deregister_mem_pool(self, pool: Any) -> None:
        self.pools.remove(pool)


class Sizes(TorchDispatchMode):
    """Sizes of the tensors that are made inside of the pool's contexts."""

    found: list[int]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default):
            self.found.append(made.numel())
        return made


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_buffers_are_in_the_pool_until_the_end(stage: int) -> None:
    backends: dict[Any, Backend] = {}
    sizes = Sizes()
    sizes.found = []

    @contextlib.contextmanager
    def use(pool: Any, device: torch.device) -> Iterator[None]:
        assert pool.allocator == Backend.mem_allocator
        with sizes:
            yield

    class Pool:
        def __init__(self, allocator: Any) -> None:
            self.allocator = allocator

    with (
        mock.patch.object(registered, "memory_registry", lambda group, _: backends.setdefault(group, Backend())),
        mock.patch.object(torch.cuda, "MemPool", Pool),
        mock.patch.object(torch.cuda, "use_mem_pool", use),
    ):
        zero = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 5000}
        engine = engine_of(model(), stage, ADAMW, zero=zero, **KEYS)
        assert backends and all(len(backend.pools) == 1 for backend in backends.values())
        assert len({backend.pools[0] for backend in backends.values()}) == 1  # one pool for all groups
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 64)).square().mean())
            engine.step()
        units = [section.layout.numel for unit in engine.sharded.units for section in unit.sections]
        count = {size: sizes.found.count(size) for size in units}
        if stage == 3:  # gathered in both passes, and reduced
            assert all(times >= 4 for times in count.values()), count
        assert sum(count.values()) >= 2 * len(units)
        engine.destroy()
        assert not any(backend.pools for backend in backends.values())


@on_ranks(2)
def test_a_backend_that_registers_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match=r"registered_buffers: the backend gloo on cpu cannot register memory"):
        engine_of(model(), 3, ADAMW, **KEYS)


def test_one_rank_registers_nothing() -> None:
    engine = engine_of(model(), 3, ADAMW, **KEYS)
    engine.backward(engine(torch.ones(2, 64)).square().mean())
    engine.step()
    assert all(unit.sections[0].domain._registered is None for unit in engine.sharded.units)
    engine.destroy()
