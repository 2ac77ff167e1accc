"""Copies to and from the host and disks are in order with everything else that a device does, in every schedule."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from shardwise.device import checking
from shardwise.device.staging import Copied, CopyStream
from tests.device.recorded import record_all
from tests.models import CASES
from tests.offload.settings import FROM_STAGE_1, PLACES, offload, played_device
from tests.zero.training import Setting

SCHEDULES = [*((1, place) for place in FROM_STAGE_1), *((3, place) for place in PLACES)]


def problems(directory: Path, stage: int, place: str, optimizer: str = "AdamW") -> list[str]:
    zero = tuple(offload(place, str(directory)).items())
    setting = Setting(stage, clip=1.0, optimizer=optimizer, precision="bf16", accumulation=2, zero=zero)
    with played_device():
        traces = record_all(CASES["gpt"], setting, world=2)
    assert any("copies" in event.stream for event in traces[0].events)
    return [str(problem) for problem in checking.check(traces)]


@pytest.mark.parametrize(("stage", "place"), SCHEDULES)
def test_every_schedule_is_in_order(tmp_path: Path, stage: int, place: str) -> None:
    assert problems(tmp_path, stage, place) == []


def nothing(*_: object) -> None:
    """Do not wait."""


@pytest.mark.parametrize(
    ("what", "name", "place"),
    [
        (CopyStream, "follow", "optimizer on host"),
        (Copied, "synchronize", "optimizer on host"),
        (Copied, "wait", "optimizer on host"),
        (Copied, "wait", "parameters on host"),
        (CopyStream, "follow", "parameters on host"),
    ],
)
def test_a_wait_that_is_missing_is_found(tmp_path: Path, what: type, name: str, place: str) -> None:
    with mock.patch.object(what, name, nothing):
        assert problems(tmp_path, 3, place)
