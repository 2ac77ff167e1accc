"""The sections on signals and on copies in memory."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.config import resolve
from shardwise.errors import ConfigError, ConflictError


def resolved(**checkpoint: Any) -> Any:
    return resolve({"train_batch_size": 2, "checkpoint": checkpoint}).config.checkpoint


def test_both_are_off_unless_asked_for() -> None:
    found = resolved()
    assert found.on_signal is None and found.memory_copies is None
    found = resolved(on_signal={"save_dir": "runs"}, memory_copies={"every": 5})
    assert (found.on_signal.exit_on, found.on_signal.save_on) == (["SIGTERM"], ["SIGUSR1"])
    assert (found.memory_copies.replicas, found.memory_copies.directory) == (1, None)
    assert resolved(memory_copies={}).memory_copies.every == 10


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"on_signal": {}}, "checkpoint.on_signal.save_dir"),
        ({"on_signal": {"save_dir": ""}}, "checkpoint.on_signal.save_dir"),
        ({"on_signal": {"save_dir": "a", "exit_on": ["SIGKILL"]}}, "checkpoint.on_signal.exit_on"),
        ({"on_signal": {"save_dir": "a", "exit_on": ["SIGUSR1"]}}, "cannot both end and go on"),
        ({"on_signal": {"save_dir": "a", "exit_on": [], "save_on": []}}, "names no signal"),
        ({"on_signal": {"save_dir": "a", "exit": []}}, "checkpoint.on_signal.exit"),
        ({"memory_copies": {"every": 0}}, "checkpoint.memory_copies.every"),
        ({"memory_copies": {"every": 1, "replicas": -1}}, "checkpoint.memory_copies.replicas"),
        ({"memory_copies": {"every": 1, "directory": ""}}, "checkpoint.memory_copies.directory"),
    ],
)
def test_mistakes_are_named(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        resolved(**section)


def test_one_signal_cannot_mean_both() -> None:
    with pytest.raises(ConflictError, match=r"on_signal\.save_on"):
        resolved(on_signal={"save_dir": "a", "save_on": ["SIGTERM"]})
