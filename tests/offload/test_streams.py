"""Copies to and from the host and disks are in order with everything else that a device does, in every schedule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.device import checking
from tests.device.recorded import record, record_all, recording_now
from tests.device.recording import COMPUTE, Event, Trace
from tests.harness import thorough
from tests.harness.training import Setting
from tests.models import CASES
from tests.offload.settings import PLACES, offload, played_device


def problems(directory: Path, stage: int, place: str, *, world: int = 2) -> list[str]:
    zero = offload(place, str(directory))
    setting = Setting(stage, clip=1.0, optimizer="AdamW", precision="bf16", accumulation=2, zero=tuple(zero.items()))
    with played_device():
        traces = record_all(CASES["gpt"], setting, world=world)
    assert any("copies" in event.stream for event in traces[0].events)
    return [str(problem) for problem in checking.check(traces)]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("place", [p if p == "some parameters near" else thorough(p) for p in PLACES])
def test_every_schedule_is_in_order(tmp_path: Path, place: str, world: int) -> None:
    assert problems(tmp_path, 3, place, world=world) == []


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
