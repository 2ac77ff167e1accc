"""The `checkpoint` section: which keys mean a save in the background, and which change nothing."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.config import resolve
from shardwise.errors import ConfigError, ConflictError


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


@pytest.mark.parametrize(
    ("keys", "path", "message"),
    [
        ({"writer": {"type": "MOCK"}}, "checkpoint.writer.type", "writes nothing"),
        ({"writer": {"decoupled": True}, "async_save": False}, "checkpoint.writer.decoupled", "async_save` is false"),
        ({"keep_every": 5}, "checkpoint.keep_every", "keep_last"),
        ({"keep_last": 0}, "checkpoint.keep_last", "an integer > 0"),
        ({"keep_last": "two"}, "checkpoint.keep_last", "integer"),
        ({"keep_last": 1, "keep_every": -1}, "checkpoint.keep_every", "an integer > 0"),
        ({"keeplast": 1}, "checkpoint.keeplast", "keep_last"),
    ],
)
def test_what_cannot_be_meant_is_refused(keys: dict[str, Any], path: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(with_checkpoint(**keys))
    assert any(problem.path == path for problem in caught.value.problems)
    assert message in str(caught.value)


def test_a_contradiction_is_a_conflict() -> None:
    with pytest.raises(ConflictError):
        resolve(with_checkpoint(keep_every=5))
