"""The `checkpoint` section: which keys mean a save in the background, and which change nothing."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.config import resolve


def with_checkpoint(**keys: Any) -> dict[str, Any]:
    return {"train_batch_size": 1, "checkpoint": keys}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, False),
        ({"async_save": True}, True),
        ({"writer": {}}, False),
        ({"writer": {"type": "FAST", "decoupled": True}}, True),
        ({"async_save": True, "writer": {"decoupled": False}}, True),
    ],
)
def test_either_key_means_saves_in_the_background(keys: dict[str, Any], expected: bool) -> None:
    assert resolve(with_checkpoint(**keys)).config.checkpoint.in_background is expected


def test_signals_and_copies_are_off_unless_asked_for() -> None:
    found = resolve(with_checkpoint()).config.checkpoint
    assert found.on_signal is None and found.memory_copies is None
    asked = with_checkpoint(on_signal={"save_dir": "runs"}, memory_copies={})
    found = resolve(asked).config.checkpoint
    assert (found.on_signal.exit_on, found.on_signal.save_on) == (["SIGTERM"], ["SIGUSR1"])
    assert (found.memory_copies.every, found.memory_copies.replicas) == (10, 1)


def test_hints_for_other_writers_are_accepted_and_listed() -> None:
    writer = {
        "type": "python",
        "decoupled": True,
        "io_buffer_size": 1024,
        "io_buffer_double": False,
        "show_statistics": True,
        "data_parallel": "replica",
        "io_multiplier": 2,
    }
    found = resolve(with_checkpoint(writer=writer, parallel_write={"pipeline_stage": True})).no_effect
    without = {"io_buffer_size", "io_buffer_double", "data_parallel", "io_multiplier"}
    expected = {f"checkpoint.writer.{name}" for name in without} | {"checkpoint.parallel_write.pipeline_stage"}
    assert {note.path for note in found} == expected
