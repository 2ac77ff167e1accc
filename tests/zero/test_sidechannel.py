"""The side channel: shards of real size, who is named in errors, what its thread does, and how engines end together."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.comm import p2p, stall_watchdog
from shardwise.comm.communicator import Communicator
from shardwise.comm.domain import Domain
from shardwise.comm.ledger import Ledger
from shardwise.comm.rank_status import Here
from shardwise.device.streams import streams_of
from shardwise.errors import PeerLostError, ShardwiseError, UsageError
from shardwise.zero.passes import sidechannel
from shardwise.zero.passes.sidechannel import SideChannel
from shardwise.zero.units.unit import Unit, UnitState
from tests.device.recording import recording
from tests.harness import on_ranks, run_ranks
from tests.harness.training import SGD, Setting, digest, engine_of, masters, start, take_steps
from tests.models import CASES
from tests.zero.elsewhere import forced

CPU = torch.device("cpu")


def step(engine: Any, number: int) -> None:
    case = CASES["gpt"]
    take_steps(engine, case, [number])


# -- how long, and what stays ------------------------------------------------------------------------------------------


class Silent(SideChannel):
    """Its thread answers nobody."""

    def _answer(self, peer: Any, kind: int, *more: Any) -> None:
        """Do nothing."""


def fetch_from_nobody() -> tuple[str, float]:
    engine = start(CASES["gpt"], Setting(stage=3))
    comm = engine.job
    comm.timeout = timedelta(seconds=0.5)
    channel = Silent(comm, [unit for unit in engine.sharded.units if unit.sharded])
    begin = time.monotonic()
    message = ""
    if comm.rank == 0:
        unit = engine.sharded.units[0]
        for section in unit.sections:
            section.allocate()
        with pytest.raises(PeerLostError) as caught:
            channel.fetch(unit)
        message = str(caught.value)
    waited = time.monotonic() - begin
    comm.barrier()
    channel.close()
    engine.destroy()
    return message, waited


def test_a_peer_that_does_not_answer_is_named_within_the_groups_limit() -> None:
    message, waited = run_ranks(fetch_from_nobody, 2)[0]
    assert "rank 0 of 2 has waited 0.5 s for rank 1 in fetch 'tokens'" in message
    assert "and rank 1 has not answered" in message
    assert 0.4 < waited < 30


def unit_of(domain: Domain) -> Any:
    """A unit that nobody has."""
    return SimpleNamespace(index=99999, name="nothing", sections=[], domain=domain, level=1)


def refused() -> tuple[str, str]:
    """Rank 0 asks for what there is not."""
    comm = Communicator(None, Ledger(), CPU)
    channel = SideChannel(comm, [])
    asked = ""
    if comm.rank == 0:
        with pytest.raises(PeerLostError) as caught:
            channel.fetch(unit_of(Domain(comm)))  # type: ignore[arg-type]
        asked = f"{caught.value} {caught.value.__cause__}"
    comm.barrier()
    helped = ""
    try:
        channel.raise_helper_error()
    except UsageError as error:
        helped = str(error)
    channel.close()
    comm.destroy()
    return asked, helped


def test_what_cannot_be_answered_names_who_has_asked() -> None:
    (asked, nothing), (unasked, helped) = run_ranks(refused, 2)
    reason = "rank 0 has asked rank 1 for unit 99999; it has units []"
    assert reason in asked and "fetch 'nothing'" in asked
    assert (nothing, unasked) == ("", "")
    assert reason in helped


def garbled() -> str:
    """A peer that says what is no message."""
    comm = Communicator(None, Ledger(), CPU)
    channel = SideChannel(comm, [])
    if comm.rank == 0:
        with contextlib.suppress(OSError):
            for _ in range(100):  # many more bytes than are kept
                channel._links.to(1, time.monotonic() + 10).sendall(b"\xff" * (1 << 16))
    found = ""
    deadline = time.monotonic() + 10
    while comm.rank == 1 and not found and time.monotonic() < deadline:
        time.sleep(0.01)
        try:
            channel.raise_helper_error()
        except UsageError as error:
            found = str(error)
    comm.barrier()
    channel.close()
    comm.destroy()
    return found


def test_what_is_no_message_is_refused_by_its_length() -> None:
    found = run_ranks(garbled, 2)[1]
    assert found == "rank 0 has sent a message of 4294967295 bytes; at most 4096 are allowed"


def fetch_ahead() -> list[float]:
    """Rank 0 has stepped, and asks rank 1 for values of that step before rank 1 has written them."""
    engine = start(CASES["gpt"], Setting(stage=3))
    channel, unit = engine.sharded.channel, engine.sharded.units[0]
    found = []
    if engine.job.rank == 0:
        channel.shards_written(engine.sharded.domain.gathers.mark())
        for section in unit.sections:
            section.allocate()
        dist.barrier()
        channel.fetch(unit)
        begin, end = unit.sections[0].layout.range_of(1, unit.level)
        found = unit.sections[0].full[begin:end].unique().tolist()
    else:
        dist.barrier()
        time.sleep(0.5)
        unit.sections[0].shard.fill_(7.0)
        channel.shards_written(engine.sharded.domain.gathers.mark())
    dist.barrier()
    engine.destroy()
    return found


def test_a_rank_that_is_a_step_ahead_gets_the_values_of_that_step() -> None:
    """As on CUDA, where the host does not wait for collectives."""
    assert run_ranks(fetch_ahead, 2, timeout=60)[0] == [7.0]


class Event:
    """A CUDA event of which the test says when the device gets there."""

    there = False

    def reached(self) -> bool:
        return self.there


def block(mark: Event, limit: timedelta) -> bool:
    """See `shardwise.device.streams.CudaStreams.block`."""
    deadline = time.monotonic() + limit.total_seconds()
    while not mark.reached():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def fetch_in_two_steps(accumulation: int) -> list[list[float]]:
    """Ranks 0 and 1 have launched a step that waits on the device for rank 2; ranks 0 and 2 ask rank 1 for values."""
    engine = start(CASES["gpt"], Setting(stage=3, accumulation=accumulation))
    channel, unit, rank = engine.sharded.channel, engine.sharded.units[0], engine.job.rank
    engine.job.timeout = timedelta(seconds=40)
    step(engine, 0)
    for section in unit.sections:
        section.allocate()
    word, found = torch.zeros(1), []
    begin, end = unit.sections[0].layout.range_of(1, unit.level)

    def fetch() -> None:
        channel.fetch(unit)
        found.append(unit.sections[0].full[begin:end].unique().tolist())

    if rank == 1:
        step_ends = Event()
        unit.sections[0].shard.fill_(7.0)
        with mock.patch.object(channel._streams, "block", block, create=True):
            channel.shards_written(step_ends)
            dist.barrier()
            deadline = time.monotonic() + 5
            while not channel._awaited and time.monotonic() < deadline:
                time.sleep(0.001)
            dist.send(word, 2)
            dist.recv(word, 2)  # it has launched the step, too
            unit.sections[0].shard.fill_(8.0)
            step_ends.there = True
            dist.barrier()
    elif rank == 0:
        channel.shards_written(engine.sharded.domain.gathers.mark())
        dist.barrier()
        fetch()
        dist.barrier()
    else:
        dist.barrier()
        dist.recv(word, 1)
        fetch()
        channel.shards_written(engine.sharded.domain.gathers.mark())
        dist.send(word, 1)
        dist.barrier()
    unit.reshard()
    engine.sharded.channel.close()
    engine.job.destroy()
    return found


def test_a_rank_that_is_behind_is_answered_while_the_device_still_writes_for_one_that_is_ahead() -> None:
    """Else three ranks wait for each other: the step on the device is that of all ranks."""
    assert run_ranks(fetch_in_two_steps, 3, 2, timeout=120) == [[[8.0]], [], [[7.0]]]


# -- failures ----------------------------------------------------------------------------------------------------------


def fail_to_help() -> tuple[str, list[int]]:
    """Rank 1's thread runs out of memory when rank 0 asks for a gather."""
    engine = start(CASES["gpt"], Setting(stage=3))
    step(engine, 0)
    channel = engine.sharded.channel
    asked: list[int] = []

    def no_memory(number: int, place: int) -> None:
        if number == 99:  # not what the step before may still ask for
            asked.append(place)
        if asked == [2]:
            raise torch.OutOfMemoryError("no memory for the gather")

    channel.on_want(no_memory)
    dist.barrier()
    message = ""
    if dist.get_rank() == 0:
        channel.want(99, 2)
        channel.want(99, 3)
    else:
        deadline = time.monotonic() + 10
        while len(asked) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    try:
        with torch.no_grad():
            engine(CASES["gpt"].data(0, 0, 1, torch.float32)["tokens"][:, :-1])
    except torch.OutOfMemoryError as error:
        message = str(error)
    engine.destroy()
    return message, asked


def test_what_fails_in_the_thread_is_raised_by_the_next_pass_and_the_thread_goes_on() -> None:
    (nothing, unasked), (message, asked) = run_ranks(fail_to_help, 2, timeout=60)
    assert (nothing, unasked, asked) == ("", [], [2, 3])
    assert message.startswith("rank 1 has run out of memory in the engine's forward(): no memory for the gather\n")


def test_help_is_given_on_the_stream_of_the_pass() -> None:
    with recording() as recorder:
        channel = SideChannel.__new__(SideChannel)
        channel._streams, channel._error = streams_of(CPU), None
        channel.on_want(lambda number, place: seen.append(recorder.stream))
        seen: list[str] = []
        peer = SimpleNamespace(rank=1)
        for stream in ("first", "second"):
            with recorder.using(stream):
                channel.raise_helper_error()
            channel._answer(peer, sidechannel._WANT, 1, 1, b"")  # type: ignore[arg-type]
        channel.raise_helper_error()
    assert seen == ["first", "second"]


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


class Wide(nn.Module):
    """One unit with a shard of so many MiB."""

    def __init__(self, mib: int, world: int) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.arange(mib * world << 18, dtype=torch.float32))


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024


@on_ranks(3, timeout=300)
def test_shards_of_real_size_are_fetched_straight_into_place() -> None:
    """All ranks fetch at once; return whether the values are right, and what a fetch and its answers add to memory."""
    mib = 9
    world = dist.get_world_size()
    engine = engine_of(Wide(mib, world))
    unit = next(unit for unit in engine.sharded.units if unit.sharded)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the highest size begins anew
    before = resident("VmRSS")
    for section in unit.sections:
        section.allocate()
    engine.sharded.channel.fetch(unit)
    unit.on_unsharded()
    dist.barrier()
    added = resident("VmHWM") - before
    (section,) = unit.sections
    right = torch.equal(section.full, torch.arange(section.full.numel(), dtype=torch.float32))
    unit.reshard()
    engine.destroy()
    added = added / 2**20
    whole = unit.nbytes / 2**20
    assert right
    assert whole == 9 * 3
    assert added < whole + 16


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
    engine.destroy()
    return values, rescues


def test_a_layer_that_is_needed_once_more_is_fetched_and_trains_to_the_same_bits() -> None:
    whole = {values for values, _ in run_ranks(double, 2, 0, False)}
    for empty in (False, True):
        found = run_ranks(double, 2, 3, empty)
        assert {values for values, _ in found} == whole
        assert all(rescues > 0 for _, rescues in found)
    assert all(rescues >= 3 for _, rescues in found)


def double_on_one_rank() -> tuple[tuple[str, int], tuple[str, int], int]:
    plain = double(0, False)
    with forced(), mock.patch.object(p2p, "_listen", side_effect=AssertionError) as listen:
        return plain, double(3, True), listen.call_count


def test_one_rank_opens_no_port() -> None:
    ((plain, _), (values, rescues), ports) = run_ranks(double_on_one_rank, 1)[0]
    assert values == plain and rescues > 0
    assert ports == 0


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
    rescues = sharded.unsharder.late
    engine.destroy()
    assert rescues == 0
    assert most == pair


# -- the end -----------------------------------------------------------------------------------------------------------


def destroys_first() -> tuple[str, bool]:
    """Rank 1 comes late; return where rank 0 is meanwhile, as the stall watchdog reads it, and whether that runs."""
    engine = start(CASES["gpt"], Setting(stage=3))
    step(engine, 0)
    here, found = Here(thread=threading.get_ident()), []
    look = threading.Timer(
        0.5, lambda: found.append((str(here()), any(one.running for one in stall_watchdog._watching)))
    )
    if dist.get_rank():
        time.sleep(1.0)
    else:
        look.start()
    engine.destroy()
    if dist.get_rank() == 0:
        look.join()
    assert not stall_watchdog._watching
    return found[0] if found else ("", False)


def test_a_rank_that_waits_in_destroy_is_watched() -> None:
    where, watched = run_ranks(destroys_first, 2, timeout=60)[0]
    assert re.fullmatch(
        r"waits in meeting 'destroy\(\)' #0 for \d s, in engine\.destroy\(\) at .*_sidechannel.py:\d+", where
    )
    assert watched


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
    reason = ", after ValueError: no more data" if catch else ""
    assert re.search(
        rf"DesyncError: .*rank 1.* is in destroy\(\) at .*test_sidechannel.py:\d+{reason}", goes_on, re.DOTALL
    )
    assert "fewer batches" in goes_on
    if catch:
        assert destroys == "ValueError: no more data"
    elif first == 0:
        assert re.search(
            r"DesyncError: rank 1 is in destroy\(\) at .*, (and )?rank 0 is in "
            r"(\w+ .* at .*/models.py|destroy\(\) at )",  # it may have heard of it, and be there by now
            destroys,
        )
        assert "fewer batches" in destroys
    else:
        # The rank that comes second has made the comparison.
        one, other = (rf"rank {rank} is in destroy\(\) at .*" for rank in (0, 1))
        assert re.search(rf"DesyncError: ({one}, {other}|{other}, {one})same passes", destroys)


def lost_peer() -> str:
    """Rank 1 has gone when rank 0 destroys its engine because of that."""
    engine = start(CASES["gpt"], Setting(stage=3))
    step(engine, 0)
    said = ""
    if dist.get_rank() == 1:
        engine.sharded.channel.close()
        engine.job.destroy()
    else:
        try:
            try:
                step(engine, 1)
            finally:
                engine.destroy()
        except ShardwiseError as error:
            said = f"{type(error).__name__}: {error}"
    return said


def test_destroying_an_engine_for_a_peer_that_has_gone_leaves_the_first_error() -> None:
    said, _ = run_ranks(lost_peer, 2, timeout=60)
    assert re.match(r"PeerLostError: rank 0 of 2 has lost rank 1 in \w+ ", said)


def all_fail() -> list[bool]:
    """All ranks destroy their engines because the same has gone wrong on all."""
    engine = start(CASES["gpt"], Setting(stage=3))
    try:
        step(engine, 0)
        raise ValueError("too large")
    except ValueError:
        engine.destroy()
    return [bool(parameter.isfinite().all()) and parameter.numel() > 0 for parameter in engine.module.parameters()]


def test_engines_that_are_destroyed_on_all_ranks_in_an_exception_leave_whole_parameters() -> None:
    assert all(all(whole) for whole in run_ranks(all_fail, 2))
