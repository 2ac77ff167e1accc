"""Copies to and from the host and disks are in order with everything else that a device does, in every schedule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from shardwise.device.staging import Copied, CopyStream
from shardwise.offload.host import HostPlace
from shardwise.optim import AdamW
from shardwise.zero.model import ShardedModel
from tests.device import checking
from tests.device.recorded import imagined, record, record_all, recording_now
from tests.device.recording import COMPUTE, Event, Trace, recording
from tests.harness import thorough
from tests.harness.training import Setting, start
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


@pytest.mark.parametrize(("world", "place"), [(2, "parameters on disk"), thorough(1, "parameters on host")])
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


def test_the_host_waits_for_who_reads_what_it_works_on() -> None:
    """A copy that a pass has launched on its own stream may still be under way when the host steps."""
    with recording() as recorder:
        stored = HostPlace(torch.device("cpu")).keep(torch.ones(64))
        stored.give_back(written=True)
        stored.copy_to(torch.empty(64))
        stored.in_place()
    kinds = [(event.kind, event.stream, event.number) for event in recorder.trace.events]
    (*_, copied) = (place for place, event in enumerate(recorder.trace.events) if event.name == "copy_")
    marks = [number for kind, stream, number in kinds[copied:] if kind == "mark" and stream == COMPUTE]
    assert any(kind == "block" and number in marks for kind, _, number in kinds[copied:])


class Asked(torch.Tensor):
    """A number on a device, which the host cannot see without waiting; counts how often it does."""

    waits = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in (torch.Tensor.to, torch.Tensor.item, torch.Tensor.__float__, torch.Tensor.cpu):
                cls.waits += 1
                return func(args[0].clone(), *args[1:], **(kwargs or {}))
            return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("optimizer", [AdamW, torch.optim.AdamW])
def test_the_host_waits_for_the_factor_once_in_a_step(
    optimizer: type[torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES["gpt"]
    monkeypatch.setattr("tests.harness.training.make_optimizer", lambda name, p, lr: optimizer(list(p), lr=lr))
    monkeypatch.setattr(Asked, "waits", 0)
    clip = ShardedModel.clip_factor
    monkeypatch.setattr(ShardedModel, "clip_factor", lambda self, *how: clip(self, *how).as_subclass(Asked))
    stepped = ShardedModel.step

    def on_device(self: ShardedModel, factor: Any = 1.0) -> None:
        stepped(self, factor.as_subclass(Asked) if isinstance(factor, torch.Tensor) else factor)

    monkeypatch.setattr(ShardedModel, "step", on_device)
    zero = tuple(offload("optimizer on host", "").items())
    with imagined(1, 0), played_device():
        engine = start(case, Setting(2, clip=0.1, optimizer="AdamW", precision="bf16", zero=zero))
        assert len(engine.sharded.units) > 2
        for step in range(2):
            engine.backward(case.loss(engine, case.data(step, 0, 0, torch.bfloat16)))
            before = Asked.waits
            engine.step()
            assert Asked.waits - before == 1
        engine.destroy()


def nothing(*_: object) -> None:
    """Do not wait."""


@pytest.mark.parametrize(
    ("what", "name", "place"),
    [
        thorough(CopyStream, "follow", "optimizer on host"),
        thorough(Copied, "synchronize", "optimizer on host"),
        thorough(Copied, "wait", "optimizer on host"),
        thorough(Copied, "wait", "parameters on host"),
        (CopyStream, "follow", "parameters on host"),
    ],
)
def test_a_wait_that_is_missing_is_found(tmp_path: Path, what: type, name: str, place: str) -> None:
    with mock.patch.object(what, name, nothing):
        assert problems(tmp_path, 3, place)
