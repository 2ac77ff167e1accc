"""The side channel: shards of real size, who is named in errors, what its thread does, and how engines end together."""

from __future__ import annotations

import contextlib
import os
import re
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.comm import p2p
from shardwise.errors import PeerLostError, ShardwiseError
from shardwise.zero.units.unit import Unit, UnitState
from tests.harness import of_all_ranks, on_ranks, run_ranks
from tests.harness.engines import forget_engines
from tests.harness.training import SGD, Setting, digest, engine_of, masters, start, take_steps
from tests.models import CASES


def step(engine: Any, number: int) -> None:
    case = CASES["gpt"]
    take_steps(engine, case, [number])


# -- how long, and what stays ------------------------------------------------------------------------------------------


@on_ranks(2, timeout=60)
def test_a_rank_that_is_a_step_ahead_gets_the_values_of_that_step() -> None:
    """Rank 0 asks before rank 1 has written them, as on CUDA, where the host does not wait for collectives."""
    engine = start(CASES["gpt"], Setting(stage=3))
    channel, unit = engine.sharded.channel, engine.sharded.units[0]
    if dist.get_rank() == 0:
        channel.shards_written(engine.sharded.domain.gathers.mark())
        for section in unit.sections:
            section.allocate()
        dist.barrier()
        channel.fetch(unit)
        begin, end = unit.sections[0].layout.range_of(1, unit.level)
        assert unit.sections[0].full[begin:end].unique().tolist() == [7.0]
    else:
        dist.barrier()
        time.sleep(0.5)
        unit.sections[0].shard.fill_(7.0)
        channel.shards_written(engine.sharded.domain.gathers.mark())
    dist.barrier()


@on_ranks(2, timeout=60)
def test_what_fails_in_the_thread_is_raised_by_the_next_pass() -> None:
    """Rank 1's thread runs out of memory when rank 0 asks for a gather."""
    engine = start(CASES["gpt"], Setting(stage=3))
    step(engine, 0)
    asked: list[int] = []

    class Handler:
        def no_memory(self, number: int, place: int) -> None:
            if number == 99:  # not what the step before may still ask for
                asked.append(place)
                raise torch.OutOfMemoryError("no memory for the gather")

    handler = Handler()
    engine.sharded.channel.on_want(handler.no_memory)
    dist.barrier()
    if dist.get_rank() == 0:
        engine.sharded.channel.want(99, 2)
    deadline = time.monotonic() + 10
    while dist.get_rank() and not asked and time.monotonic() < deadline:
        time.sleep(0.01)
    failing = pytest.raises(torch.OutOfMemoryError, match=r"rank 1 .*forward\(\): no memory for the gather")
    with failing if dist.get_rank() else contextlib.nullcontext(), torch.no_grad():
        engine(CASES["gpt"].data(0, 0, 1, torch.float32)["tokens"][:, :-1])


# -- engines that leave ------------------------------------------------------------------------------------------------


@on_ranks(2, timeout=60)
def test_a_model_that_is_wrapped_again_leaves_no_groups_and_no_connections() -> None:
    before = len(dist.distributed_c10d._world.pg_map)
    model = CASES["gpt"].make()
    counts, files, engines = [], [], []
    for _ in range(5):
        engines.append(start(CASES["gpt"], Setting(stage=3), model))
        step(engines[-1], 0)
        counts.append(len(dist.distributed_c10d._world.pg_map))
        files.append(len(os.listdir("/proc/self/fd")))
    for engine in engines:  # the old ones once more
        engine.destroy()
    after = len(dist.distributed_c10d._world.pg_map)
    assert counts == [before + 3] * 5  # gather, reduce, small
    assert files[4] <= files[1] + 1  # Gloo closes the sockets of a group a little later
    assert after == before


@on_ranks(3)
def test_ranks_that_do_the_same_open_no_connection() -> None:
    """Train a model whose ranks do the same, and count the connections that are made for it."""
    made, call = [], p2p._call

    def calls(*args: Any) -> Any:
        made.append(args)
        return call(*args)

    p2p._call = calls
    try:
        engine = start(CASES["gpt"], Setting(stage=3))
        for number in range(2):
            step(engine, number)
        engine.destroy()
    finally:
        p2p._call = call
    assert len(made) == 0


# -- real sizes --------------------------------------------------------------------------------------------------------


class Doubling(nn.Module):
    """A layer that is called once, or twice, as the data say; with a shard of 8.5 MiB on two ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(2112, 2112, bias=False)
        self.last = nn.Linear(2112, 4)

    def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
        for _ in range(times):
            x = torch.tanh(self.layer(x))
        return self.last(x).square().mean()


def double(stage: int, empty: bool) -> tuple[str, int]:
    engine = engine_of(Doubling(), stage, SGD, zero={"reduce_bucket_size": 2112 * 2112})
    generator = torch.Generator().manual_seed(dist.get_rank())
    for number in range(3):
        # From the second step on one rank needs the layer more often than any has before.
        times = 1 + (number > 0) * (number + dist.get_rank())
        loss = engine(torch.randn(2, 2112, generator=generator), times)
        if empty:
            engine.empty_partition_cache()
        engine.backward(loss)
        engine.step()
    rescues = engine.sharded.unsharder.late
    values = digest(list(masters(engine.module).values()))
    return values, rescues


@on_ranks(2)
def test_a_layer_that_is_needed_once_more_is_fetched_and_trains_to_the_same_bits() -> None:
    whole, _ = double(0, False)
    for empty, least in ((False, 1), (True, 3)):
        values, rescues = double(3, empty)
        assert of_all_ranks(values) == [whole] * 2 and rescues >= least


# -- modules that are called several times -----------------------------------------------------------------------------


class Repeated(nn.Module):
    """Layers that are shared: one again and again, two in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.other, self.last = (nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(3):
            x = torch.tanh(self.one(x))
        for _ in range(3):
            x = torch.tanh(self.other(self.one(x)))
        return self.last(x).square().mean()


@on_ranks(2)
def test_modules_that_are_called_several_times_are_not_fetched_again_not_even_in_the_first_pass() -> None:
    """Return how often values had to be fetched, and the most elements that were whole in the first pass."""
    pair = 2 * 16 * 16
    engine = engine_of(Repeated(), 3, SGD, zero={"reduce_bucket_size": 1})
    sharded = engine.sharded
    most = 0
    launch = Unit.unshard

    def counted(unit: Unit, *purpose: Any) -> None:
        nonlocal most
        launch(unit, *purpose)
        most = max(most, sum(unit.numel for unit in sharded.units if unit.state is not UnitState.SHARDED))

    with mock.patch.object(Unit, "unshard", counted):
        loss = engine(torch.randn(2, 16))
    engine.backward(loss)
    engine.step()
    for _ in range(2):
        engine.backward(engine(torch.randn(2, 16)))
        engine.step()
    assert sharded.unsharder.late == 0
    assert most == pair


# -- the end -----------------------------------------------------------------------------------------------------------


def fewer_batches(first: int, catch: bool) -> str:
    """Rank 1 destroys its engine while rank 0 trains on; one of them is there first."""
    engine = start(CASES["gpt"], Setting(stage=3))
    step(engine, 0)
    dist.barrier()
    channel, launched = engine.sharded.channel, engine.job.launched()
    deadline = time.monotonic() + 10
    while dist.get_rank() != first and time.monotonic() < deadline:
        if channel._ended if first else channel._where(0, time.monotonic())["launched"] != launched:
            break
    try:
        if dist.get_rank() == 1:
            try:
                if catch:
                    raise ValueError("no more data")
            finally:
                engine.destroy()
        else:
            step(engine, 1)
    except (ShardwiseError, ValueError) as error:
        said = f"{type(error).__name__}: {error}"
    with contextlib.suppress(ShardwiseError):
        engine.destroy()
    return said


@pytest.mark.parametrize(("first", "catch"), [(0, False), (1, True)])
def test_a_rank_that_destroys_its_engine_too_early_is_named(first: int, catch: bool) -> None:
    goes_on, destroys = run_ranks(fewer_batches, 2, first, catch, timeout=60)
    assert re.search(r"DesyncError: .*rank 1.* is in destroy\(\) at .*test_sidechannel.py:\d+", goes_on, re.DOTALL)
    assert "fewer batches" in goes_on
    assert destroys == "ValueError: no more data" if catch else destroys.startswith("DesyncError: ")


@on_ranks(2, timeout=60)
def test_destroying_an_engine_for_a_peer_that_has_gone_leaves_the_first_error() -> None:
    engine = start(CASES["gpt"], Setting(stage=3))
    step(engine, 0)
    if dist.get_rank() == 1:
        engine.sharded.channel.close()
        engine.job.destroy()
        forget_engines()
        return
    with pytest.raises(PeerLostError, match="rank 0 of 2 has lost rank 1"):
        try:
            step(engine, 1)
        finally:
            engine.destroy()


@on_ranks(2)
def test_engines_that_are_destroyed_on_all_ranks_in_an_exception_leave_whole_parameters() -> None:
    engine = start(CASES["gpt"], Setting(stage=3))
    try:
        step(engine, 0)
        raise ValueError("too large")
    except ValueError:
        engine.destroy()
    assert all(bool(p.isfinite().all()) and p.numel() for p in engine.module.parameters())
