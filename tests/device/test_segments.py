"""Segments that grow: what torch is asked for, and when nothing is."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import shardwise
from shardwise.device.segments import VARIABLES, let_segments_grow
from tests.device.recorded import imagined
from tests.harness.training import Setting, start
from tests.models import CASES

CUDA = torch.device("cuda", 0)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch's allocator is told."""
    told: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: "", raising=False)
    return told


def test_torch_is_told(asked: list[str], caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings(), caplog.at_level("INFO", "shardwise"):
        warnings.simplefilter("error")  # torch warns of older names
        assert let_segments_grow(CUDA, {})
    assert asked == ["expandable_segments:True"]
    assert ["expandable_segments" in record.message for record in caplog.records] == [True]


def test_other_devices_have_none(asked: list[str]) -> None:
    assert not let_segments_grow(torch.device("cpu"), {})
    assert asked == []


@pytest.mark.parametrize("name", VARIABLES)
@pytest.mark.parametrize("value", ["expandable_segments:False", "max_split_size_mb:512"])
def test_users_have_the_last_word(asked: list[str], name: str, value: str) -> None:
    assert not let_segments_grow(CUDA, {name: value})
    assert asked == []
    assert let_segments_grow(CUDA, {name: ""})


def test_what_a_script_has_set_stays(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: "garbage_collection_threshold:0.8")
    assert not let_segments_grow(CUDA, {})
    assert asked == []


@pytest.mark.parametrize(
    ("stage", "switch", "grows"), [(1, {}, False), (3, {}, True), (3, {"expandable_segments": False}, False)]
)
def test_engines_that_release_parameters_ask_for_it(
    stage: int, switch: dict[str, bool], grows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices: list[Any] = []
    monkeypatch.setattr("shardwise.engine.build.let_segments_grow", devices.append)
    with imagined(2, 0):
        engine = start(CASES["gpt"], Setting(stage, extra=tuple(switch.items())))
        engine.destroy()
    assert devices == [torch.device("cpu")] * grows
    assert isinstance(engine, shardwise.Engine)
