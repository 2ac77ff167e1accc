"""A disk that does not answer: said after seconds, and given up at a limit."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpoint import agree, async_save, directory, verify
from shardwise.checkpoint import save as saving
from shardwise.errors import CheckpointError
from tests.checkpoint.job import Run, as_ranks, config
from tests.checkpoint.test_async import standing, started
from tests.harness import thorough
from tests.harness.logs import logged


@as_ranks(2)
def test_a_disk_that_hangs_is_given_up_and_the_next_save_works(tmp_path: Path) -> None:
    engine, answers = started(str(tmp_path), config(2, checkpoint={"async_save": True})).engine, threading.Event()
    saver, write = engine._checkpoints.background.saving, async_save.write_part

    def hanging(*args: Any, **more: Any) -> list[int]:
        answers.wait(60.0)
        return write(*args, **more)

    saver._limit = 1.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_save, "SLOWEST", 1e12)
        if torch.distributed.get_rank() == 1:
            patch.setattr(async_save, "write_part", hanging)
        engine.save_checkpoint(tmp_path, tag="a")
        with pytest.raises(CheckpointError, match="failed on rank 1: its part is not complete after"):
            engine.save_checkpoint(tmp_path, tag="next")
    saver._limit = 60.0
    engine.save_checkpoint(tmp_path, tag="c")
    assert engine.wait_for_checkpoint() == f"{tmp_path}/c"
    verify(f"{tmp_path}/c")
    answers.set()
    engine.destroy()
    torch.distributed.barrier()
    names = {name for name in os.listdir(tmp_path) if not name.startswith(".")}
    assert names == {"c", "first", "latest"}


@as_ranks(1)
def test_the_failure_of_a_save_that_a_load_gave_up_is_raised_by_the_next_wait(tmp_path: Path) -> None:
    engine = started(str(tmp_path), config(1, checkpoint={"async_save": True})).engine
    saver = engine._checkpoints.background.saving
    saver._limit = 0.5
    with standing(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_save, "SLOWEST", 1e12)
        patch.setattr(async_save, "_LOOK_S", 0.1)
        engine.save_checkpoint(tmp_path, tag="a")
        engine.load_checkpoint(tmp_path, tag="first")
        assert saver.wait() is saver.report
        with pytest.raises(CheckpointError, match="It is given up"):
            engine.wait_for_checkpoint()


@pytest.mark.parametrize("where", ["before the parts", thorough("before the rename"), "before latest"])
@as_ranks(2)
def test_a_save_that_rank_0_gave_up_does_not_undo_a_later_one(tmp_path: Path, where: str) -> None:
    settings = config(2, checkpoint={"async_save": True, "keep_last": 1})
    run, answers, late = started(str(tmp_path), settings), threading.Event(), list[threading.Thread]()
    engine, saver = run.engine, run.engine._checkpoints.background.saving
    module, name = {
        "before the parts": (async_save, "write_part"),
        "before the rename": (directory, "sync_directory"),
        "before latest": (directory, "write_file"),
    }[where]
    real = getattr(module, name)

    def hanging(path: str, *args: Any, **more: Any) -> Any:
        done = real(path, *args, **more)
        if not late and (where != "before latest" or path.endswith("/latest")):  # the first call only
            late.append(threading.current_thread())
            answers.wait(60.0)
        return done

    saver._limit = 1.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_save, "SLOWEST", 1e12)
        patch.setattr(async_save, "_LOOK_S", 0.1)
        if torch.distributed.get_rank() == 0:
            patch.setattr(module, name, hanging)
        engine.save_checkpoint(tmp_path, tag="global_step1")
        with pytest.raises(CheckpointError, match="failed on rank 0: its part is not written after"):
            engine.wait_for_checkpoint()
        saver._limit = 60.0
        run.step()
        engine.save_checkpoint(tmp_path, tag="global_step2")
        assert engine.wait_for_checkpoint() == f"{tmp_path}/global_step2"
        answers.set()
        for thread in late:
            thread.join(60.0)
    torch.distributed.barrier()
    assert (tmp_path / "latest").read_text() == "global_step2"
    names = {name for name in os.listdir(tmp_path) if not name.startswith(".")}
    assert names == {"first", "global_step2", "latest"}
    verify(f"{tmp_path}/global_step2")
    engine.destroy()


@as_ranks(2)
def test_a_slow_disk_is_said_while_everybody_waits(tmp_path: Path) -> None:
    run, write = Run(config(1), seed=1), saving.write_part
    with logged() as told, pytest.MonkeyPatch.context() as patch:
        patch.setattr(agree, "WARN_AFTER_S", 0.1)
        if torch.distributed.get_rank() == 1:
            patch.setattr(saving, "write_part", lambda *args, **more: (time.sleep(0.7), write(*args, **more))[1])
        run.engine.save_checkpoint(tmp_path)
    lines = [line for line in told.lines if "writes its part: it has taken" in line]
    assert len(lines) >= 2 if torch.distributed.get_rank() == 1 else lines == []


@as_ranks(1)
def test_a_save_that_fails_after_its_publication_leaves_no_staging_directory(tmp_path: Path) -> None:
    engine, sync = started(str(tmp_path), config(1)).engine, directory.sync_directory
    manifest = (tmp_path / "first" / "manifest.json").read_bytes()

    def failing(path: str) -> None:
        sync(path)
        if path == str(tmp_path / "first") and (tmp_path / "first" / "manifest.json").read_bytes() != manifest:
            raise OSError(5, "Input/output error", path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(directory, "sync_directory", failing)
        engine.save_checkpoint(tmp_path, tag="first", asynchronous=True)
        with pytest.raises(CheckpointError, match="this checkpoint is complete, but a later step failed"):
            engine.wait_for_checkpoint()
    assert sorted(os.listdir(tmp_path)) == ["first", "latest"]
