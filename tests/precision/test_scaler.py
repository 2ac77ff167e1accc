"""The loss scale against an automaton written from its description alone."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import CheckpointError, ConfigError, LossScaleError, ShardwiseError
from shardwise.precision import LossScaler

SETTINGS = st.fixed_dictionaries(
    {
        "initial_scale_power": st.integers(2, 8),
        "loss_scale_window": st.integers(1, 5),
        "hysteresis": st.integers(1, 4),
        "consecutive_hysteresis": st.booleans(),
        "min_loss_scale": st.sampled_from([0.25, 1.0, 3.0, 4.0]),
    }
)
STEPS = st.lists(st.booleans(), max_size=60)


def reference(steps: list[bool], settings: dict[str, Any]) -> list[float | str]:
    """Scales after each step, found by looking back over the history instead of keeping counters."""
    scale = 2.0 ** settings["initial_scale_power"]
    limit, window = settings["hysteresis"], settings["loss_scale_window"]
    scales: list[float | str] = []
    restored = 0  # first step whose overflow counts against the tolerance
    counted = 0  # first step that counts towards the window
    for now, overflow in enumerate(steps):
        if overflow:
            counted = now + 1
            if sum(steps[restored : now + 1]) >= limit:
                if scale == settings["min_loss_scale"]:
                    return [*scales, "error"]
                scale = max(scale / 2, settings["min_loss_scale"])
        else:
            grown = now + 1 - counted == window
            if grown:
                scale, counted = scale * 2, now + 1
            if grown or settings["consecutive_hysteresis"]:
                restored = now + 1
        scales.append(scale)
    return scales


def observed(steps: list[bool], scaler: LossScaler) -> list[float | str]:
    scales: list[float | str] = []
    for overflow in steps:
        try:
            scaler.update(overflow)
        except LossScaleError:
            return [*scales, "error"]
        scales.append(scaler.scale)
    return scales


@given(steps=STEPS, settings=SETTINGS)
def test_equals_the_reference(steps: list[bool], settings: dict[str, Any]) -> None:
    assert observed(steps, LossScaler(**settings)) == reference(steps, settings)


@given(steps=STEPS, settings=SETTINGS, cut=st.integers(0, 60))
def test_resume_goes_on_exactly(steps: list[bool], settings: dict[str, Any], cut: int) -> None:
    first = LossScaler(**settings)
    done = observed(steps[:cut], first)
    if done[-1:] == ["error"]:
        return
    second = LossScaler(**settings)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.scale == first.scale
    assert done + observed(steps[cut:], second) == reference(steps, settings)


def test_overflow_at_the_minimum_explains_what_to_do() -> None:
    scaler = LossScaler(initial_scale_power=1, min_loss_scale=1.5, hysteresis=1)
    scaler.update(True)
    assert scaler.scale == 1.5
    with pytest.raises(LossScaleError, match=r"min_loss_scale 1\.5.*learning rate.*gradient_clipping.*bf16"):
        scaler.update(True)
    assert issubclass(LossScaleError, ShardwiseError)


def test_scale_stays_an_fp32_number() -> None:
    scaler = LossScaler(initial_scale_power=126, loss_scale_window=1)
    assert observed([False] * 3, scaler) == [2.0**127] * 3


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"loss_scale": -1.0}, "loss_scale"),
        ({"loss_scale": float("inf")}, "loss_scale"),
        ({"loss_scale_window": 0}, "loss_scale_window"),
        ({"hysteresis": 0}, "hysteresis"),
        ({"min_loss_scale": 0.0}, "min_loss_scale"),
        ({"initial_scale_power": 3, "min_loss_scale": 16.0}, "initial_scale_power"),
        ({"initial_scale_power": 200}, "initial_scale_power"),
    ],
)
def test_settings_without_meaning(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"fp16\.{key}: "):
        LossScaler(**settings)


def test_settings_win_over_the_saved_state_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    saved = LossScaler(initial_scale_power=2, hysteresis=4, loss_scale_window=100)
    for overflow in [False] * 50:
        saved.update(overflow)
    static = LossScaler(loss_scale=64.0)
    with caplog.at_level(logging.WARNING, "shardwise"):
        static.load_state_dict(saved.state_dict())
    assert static.scale == 64.0
    assert "goes on at 64 as configured, not at 4 as saved" in caplog.text
    tighter = LossScaler(min_loss_scale=8.0, hysteresis=1, loss_scale_window=10)
    with caplog.at_level(logging.WARNING, "shardwise"):
        tighter.load_state_dict(saved.state_dict())
    assert "min_loss_scale 8; 4 was saved" in caplog.text
    assert observed([False, True, True], tighter) == [16.0, 8.0, "error"]


@pytest.mark.parametrize(
    ("change", "words"),
    [({"scale": "8"}, "'scale'"), ({"tolerance": None}, "'tolerance'"), ({"scale": float("nan")}, "out of range")],
)
def test_damaged_state_is_refused(change: dict[str, Any], words: str) -> None:
    scaler = LossScaler()
    with pytest.raises(CheckpointError, match=words):
        scaler.load_state_dict({**scaler.state_dict(), **change})
