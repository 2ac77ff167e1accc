"""Copies to and from the host and disks are in order with everything else that a device does, in every schedule."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from shardwise.device.hostmemory import HostMemory, HostPool
from shardwise.engine import Engine
from shardwise.memory import Accountant, Category
from shardwise.memory.places import TieredTensors
from shardwise.offload import Disks, disk
from shardwise.offload.host import HostPlace
from tests.device import checking
from tests.device.recorded import record, record_all, recording_now
from tests.device.recording import COMPUTE, Event, Trace, recording
from tests.harness import thorough
from tests.harness.training import Setting
from tests.models import CASES
from tests.offload.settings import FROM_STAGE_1, PLACES, offload, played_device


def problems(directory: Path, stage: int, place: str, *, world: int = 2) -> list[str]:
    zero = offload(place, str(directory))
    setting = Setting(stage, clip=1.0, optimizer="AdamW", precision="bf16", accumulation=2, zero=tuple(zero.items()))
    with played_device():
        traces = record_all(CASES["gpt"], setting, world=world)
    assert any("copies" in event.stream for event in traces[0].events)
    return [str(problem) for problem in checking.check(traces)]


@pytest.mark.parametrize("world", [thorough(1), 2])
@pytest.mark.parametrize("place", [p if p == "some parameters near" else thorough(p) for p in PLACES])
def test_every_schedule_is_in_order(tmp_path: Path, place: str, world: int) -> None:
    assert problems(tmp_path, 3, place, world=world) == []


@pytest.mark.parametrize("place", [p if p == "gradients on disk" else thorough(p) for p in FROM_STAGE_1])
def test_schedules_of_stage_1_are_in_order(tmp_path: Path, place: str) -> None:
    assert problems(tmp_path, 1, place) == []


@pytest.mark.parametrize("ordered", [True, False])
def test_memory_that_another_stream_copies_from_is_copied_to_after_that(tmp_path: Path, ordered: bool) -> None:
    """Shards are gathered by one stream, and stored by another one, through the same host memory."""
    kept = mock.patch.object(disk, "HostPool", functools.partial(HostPool, keep=True))  # as on a CUDA device
    precede = HostMemory.precede if ordered else lambda *_: None
    with recording() as recorder, played_device(), kept, mock.patch.object(HostMemory, "precede", precede):
        home, out = Disks().place(tmp_path, torch.device("cpu"), None), torch.empty(1000)
        tensors = [torch.ones(1000), torch.ones(1000)]
        first, second = (home.keep(tensor) for tensor in tensors)
        with recorder.silent():  # a thread of the disk waits for this copy, which the trace does not show
            first.give_back(written=True)
            first.settle()
        first.look_ahead()
        with recorder.using("gathers"):
            first.copy_to(out)
        second.give_back(written=True)
        second.settle()
        problems = [str(problem) for problem in checking.check_order(recorder.trace)]
        home.close()
    assert any("'gathers' reads" in problem for problem in problems) == (not ordered), problems


@pytest.mark.parametrize(
    ("place", "stage"),
    [
        ("gradients on disk", 3),
        *(
            thorough(place, stage)
            for place in FROM_STAGE_1
            for stage in (1, 3)
            if "gradients" not in place or stage == 1
        ),
        thorough("parameters on host", 3),
        thorough("all on host", 3),
        thorough("all on disk", 3),
    ],
)
def test_the_host_does_not_wait_for_the_device_in_a_backward_pass(tmp_path: Path, place: str, stage: int) -> None:
    """From the second step on; threads of a disk wait for copies before they write them."""
    case, begun, ends = CASES["gpt"], [], []
    zero = tuple(offload(place, str(tmp_path)).items())
    setting = Setting(stage, clip=1.0, optimizer="AdamW", precision="bf16", accumulation=2, zero=zero)
    step = Engine.step

    def loss(engine: Any, micro: int, rank: int) -> torch.Tensor:
        found = case.loss(engine, case.data(micro, 0, rank, torch.bfloat16))
        begun.append(len(recording_now().trace.events))
        return found

    def stepped(self: Engine, *given: Any) -> None:
        ends.append(len(recording_now().trace.events))
        step(self, *given)

    with played_device(), mock.patch.object(Engine, "step", stepped):
        trace = record(case, setting, 0, world=2, steps=3, loss=loss)
    passes = [trace.events[first:last] for first, last in zip(begun, ends, strict=True)][setting.accumulation :]
    assert len(passes) == 4
    for events in passes:
        assert any("copies" in event.stream for event in events) or place.startswith(("optimizer", "parameters"))
        assert [event for event in events if event.kind in ("block", "read")] == []


def test_memory_of_a_tensor_that_leaves_its_tier_is_reused_after_its_readers() -> None:
    """It belongs to the stream of copies, which brings other tensors there."""
    with recording() as recorder:
        home, accountant = HostPlace(torch.device("cpu")), Accountant()
        first, second = (TieredTensors(home, accountant) for _ in range(2))
        tensors = [torch.ones(1000), torch.ones(1000)]
        for tiered, tensor in zip((first, second), tensors, strict=True):
            tiered.keep(Category.GRADIENTS, tensor)
        del tensor
        others = [torch.empty(1000) for _ in range(4)]  # they take the addresses that the tensors had
        first.acquire()
        total = tensors[0].sum()
        first.forget(tensors[0])
        del tensors[0]
        second.acquire()
        total += tensors[0].sum()
        del others
    assert checking.check_order(recorder.trace) == []


def from_host(trace: Trace) -> Callable[[Event], bool]:
    """Return what finds copies from memory of the host to the device."""
    host = {e.number for e in trace.events if e.kind == "take" and e.stream.startswith("host.")}
    return lambda event: (
        any(span.memory in host for span in event.reads) and not any(span.memory in host for span in event.writes)
    )


@pytest.mark.parametrize(("world", "place"), [(1, "parameters on host"), thorough(2, "parameters on disk")])
def test_parameters_are_copied_while_the_unit_before_computes(tmp_path: Path, world: int, place: str) -> None:
    """Each copy but that of the first unit overlaps with kernels: the second step knows what comes next."""
    setting = Setting(3, optimizer="momentum", precision="bf16", zero=tuple(offload(place, str(tmp_path)).items()))
    begun: list[int] = []

    def begin(engine: Any) -> None:
        begun.append(len(recording_now().trace.events))

    with played_device():
        trace = record(CASES["gpt"], setting, 0, world=world, steps=2, between=begin)
    second = set(map(id, trace.events[begun[0] :]))
    copies = [(e.stream, n) for e, n in checking.overlaps(trace, from_host(trace)) if id(e) in second]
    assert len(copies) > 6
    assert COMPUTE not in {stream for stream, _ in copies}
    assert [kernels for _, kernels in copies].count(0) <= 1
