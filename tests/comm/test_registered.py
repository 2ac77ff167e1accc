"""Buffers in registered memory: made in the pool, given up in the end, and refused where nothing registers them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.comm import registered
from shardwise.errors import UsageError
from tests.harness import on_ranks, run_ranks
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


@contextlib.contextmanager
def registering() -> Iterator[tuple[dict[Any, Backend], Sizes]]:
    """Let backends of all groups register memory; yields them, and the sizes that are made in pools."""
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
        yield backends, sizes


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_buffers_are_in_the_pool_until_the_end(stage: int) -> None:
    with registering() as (backends, sizes):
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


def replicated(registers: bool) -> list[Any]:
    """Train two replicas, whose exchange is under way in the end; return losses and parameters of this rank."""
    local = {"enabled": True, "replica_size": 2, "sync_every": 2, "overlap_steps": 1}
    zero = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 5000}
    found: list[Any] = []
    with registering() as (backends, sizes):
        engine = engine_of(model(), 3, ADAMW, zero=zero, local_sgd=local, registered_buffers=registers)
        for step in range(6):
            loss = engine(torch.full((2, 64), 1.0 + step + dist.get_rank())).square().mean()
            engine.backward(loss)
            sizes.found.clear()  # an exchange allocates in steps
            engine.step()
            assert sizes.found == []
            found.append(loss.item())
        assert engine.sharded.update._exchange is not None
        assert bool(backends) == registers
        for group in backends:
            assert dist.get_process_group_ranks(group) == engine.sharded.comm.members  # not of the replicas
        found += [values.tolist() for values in engine.module_state_dict().values()]
        engine.destroy()
        assert not any(backend.pools for backend in backends.values())
    return found


def test_replicas_exchange_through_other_memory_while_they_train() -> None:
    """An exchange runs from one step to another, and beyond the end of the pool."""
    plain, pooled = (run_ranks(replicated, 4, registers) for registers in (False, True))
    assert plain == pooled


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
