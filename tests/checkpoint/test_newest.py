"""Which checkpoint is the newest: one order for loading, resuming, exporting, inspecting and retention."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import shardwise
from shardwise.checkpoint.listing import CheckpointDirectory, StateNumbers
from tests.checkpoint.test_retention import make


def ordered(parent: Path) -> list[str]:
    return CheckpointDirectory(str(parent)).newest_first().tags


def test_numbers_order_and_times_do_not(tmp_path: Path) -> None:
    for number, (tag, created) in enumerate([("a", 300.0), ("b", 9e9), ("c", 100.0)], 1):
        make(tmp_path, tag, 1, number, created=created)
        os.utime(tmp_path / tag, (9e9 - created, 9e9 - created))
    assert ordered(tmp_path) == ["c", "b", "a"]
    (tmp_path / "latest").write_text("b\nchanged by hand")
    assert ordered(tmp_path) == ["b", "c", "a"]


def test_manifests_without_numbers_come_first_in_time_and_go_by_steps(tmp_path: Path) -> None:
    for tag, steps, number in (("old9", 9, 0), ("old80", 80, 0), ("new1", 1, 1)):
        make(tmp_path, tag, steps, number)
    assert ordered(tmp_path) == ["new1", "old80", "old9"]
    assert CheckpointDirectory(str(tmp_path)).head("old80").steps == 80


def test_what_is_not_finite_or_not_readable_comes_last(tmp_path: Path) -> None:
    for number, tag in enumerate(("a", "b", "c"), 1):
        make(tmp_path, tag, 1, number, finite=tag != "c")
    os.truncate(tmp_path / "b" / "manifest.json", 60)
    assert ordered(tmp_path) == ["a", "b", "c"]


def test_a_latest_that_is_damaged_and_alone_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "latest").write_bytes(b"\xff")
    with pytest.raises(shardwise.errors.CheckpointError, match="latest"):
        CheckpointDirectory(str(tmp_path)).newest_first()


def test_numbers_are_above_those_of_another_job_in_the_directory(tmp_path: Path) -> None:
    numbers = StateNumbers()
    assert numbers.after(str(tmp_path)) == 1
    numbers.see(1)
    make(tmp_path, "other", 1, 7)
    CheckpointDirectory(str(tmp_path)).set_latest("other")
    assert numbers.after(str(tmp_path)) == 8
    make(tmp_path / "earlier", "unnamed", 1, 9)  # and `latest` names nothing
    assert numbers.after(str(tmp_path / "earlier")) == 10
