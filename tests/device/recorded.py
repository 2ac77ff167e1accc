"""Steps of real engines on a recorded device, by one process for each of several imagined ranks in turn."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from shardwise.zero.passes.unshard import Unsharder
from shardwise.zero.units.unit import Unit
from tests.device.recording import Recorder, Trace, current, recording
from tests.harness.training import DTYPES, Setting, start
from tests.models import Case

ANSWERS = "answers"
"""The stream on which helpers copy shards."""

Loss = Callable[[Any, int, int], torch.Tensor]
"""Of an engine, the number of the micro-batch, and the rank."""


class RecordedChannel:
    """Help between imagined ranks: it is written down who asks for what."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._version = 0
        self.shards_written(recorder.mark())

    def shards_written(self, mark: Any) -> None:
        self._version += 1
        self._recorder.say("written", self._version, mark.number)

    def fetch(self, unit: Unit) -> None:
        self._recorder.say("fetch", self._version, stream=ANSWERS)
        for section in unit.sections:
            section.full.zero_()

    def want(self, number: int, place: int) -> None:
        self._recorder.say("want", number, place)

    def check_present(self) -> None:
        pass

    def raise_helper_error(self) -> None:
        pass


@contextlib.contextmanager
def _noted(recorder: Recorder) -> Iterator[None]:
    """Write down what `check_progress` has to know of helpers."""
    launch_to, parked = Unsharder._launch_to, Unsharder.blocked

    def noted_launch(self: Unsharder, place: int) -> int:
        launched = 0
        while self.order.next <= place:
            recorder.say(
                "launch", self._backward_passes if self.order.phase.value == "backward" else -1, self.order.next
            )
            launched += launch_to(self, self.order.next)
            recorder.say("launched")
        return launched

    @contextlib.contextmanager
    def noted_park(self: Unsharder) -> Iterator[None]:
        recorder.say("park", self._backward_passes if self.order.phase.value == "backward" else 0)
        with parked(self):
            yield
        recorder.say("unpark")

    with mock.patch.object(Unsharder, "_launch_to", noted_launch), mock.patch.object(Unsharder, "blocked", noted_park):
        yield


def recording_now() -> Recorder:
    """The recorder that stands in for the device."""
    recorder = current()
    assert recorder is not None
    return recorder


def imagined(world: int, rank: int) -> contextlib.AbstractContextManager[None]:
    """Be one of some ranks that do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    @contextlib.contextmanager
    def group() -> Iterator[None]:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            yield
        finally:
            dist.destroy_process_group()

    return group()


def record(
    case: Case,
    setting: Setting,
    rank: int,
    *,
    world: int = 8,
    steps: int = 3,
    loss: Loss | None = None,
    between: Callable[[Any], None] = lambda engine: None,
) -> Trace:
    """Return what a rank does in some steps, and after each of them."""

    def usual(engine: Any, micro: int, rank: int) -> torch.Tensor:
        return case.loss(engine, case.data(micro, 0, rank, DTYPES[setting.precision]))

    loss = loss or usual
    with imagined(world, rank), recording() as recorder, _noted(recorder):
        engine = start(case, setting)
        if any(unit.sharded for unit in engine.sharded.units):
            channel: Any = RecordedChannel(recorder)
            engine.sharded.channel = engine.sharded.unsharder.peers = channel
        for step in range(steps):
            for micro in range(setting.accumulation):
                engine.backward(loss(engine, step * setting.accumulation + micro, rank))
                engine.step()
            between(engine)
        engine.sharded.finish_gathers()
        engine.sharded.channel = engine.sharded.unsharder.peers = None
        with recorder.silent():
            engine.destroy()
    return recorder.trace


def record_all(case: Case, setting: Setting, *, world: int = 8, **how: Any) -> list[Trace]:
    """Return what each rank does."""
    return [record(case, setting, rank, world=world, **how) for rank in range(world)]
