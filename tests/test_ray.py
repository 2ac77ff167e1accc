"""Refusals of shardwise.ray, with a stand-in for Ray Train; tests/slow/test_ray.py runs the real one."""

from __future__ import annotations

import sys
from types import SimpleNamespace as Stub
from typing import Any

import pytest

import shardwise
from shardwise.errors import UsageError


def engine(keep_last: int | None = None) -> Any:
    return Stub(config={"checkpoint": {"keep_last": keep_last}}, resume=lambda directory: {"from": directory})


def install(monkeypatch: pytest.MonkeyPatch, kind: str = "local", **names: Any) -> None:
    storage = Stub(storage_filesystem=Stub(type_name=kind), experiment_fs_path="bucket/runs/a")
    train = Stub(get_context=lambda: Stub(get_storage=lambda: storage), **names)
    monkeypatch.setitem(sys.modules, "ray.train", train)  # type: ignore[arg-type]


def test_without_ray_the_error_has_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray.train", None)
    with pytest.raises(UsageError, match=r'pip install "ray\[train\]"'):
        shardwise.ray.report(engine(), {"loss": 1.0})


def test_an_old_ray_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    with pytest.raises(UsageError, match=r"Install ray 2\.51"):
        shardwise.ray.resume(engine())


def test_where_checkpoints_cannot_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "s3", CheckpointUploadMode=None)
    with pytest.raises(UsageError, match=r"'s3' \(bucket/runs/a\).*Give a directory that all workers see"):
        shardwise.ray.resume(engine())
    install(monkeypatch, CheckpointUploadMode=None)
    with pytest.raises(UsageError, match=r"leave it out, and set RunConfig"):
        shardwise.ray.resume(engine(keep_last=2))
    assert shardwise.ray.resume(engine()) == {"from": "bucket/runs/a"}
