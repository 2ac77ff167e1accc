"""A disk that does not answer: said after seconds, and given up at a limit."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpoint import async_save, slow_io, verify
from shardwise.checkpoint import save as saving
from shardwise.errors import CheckpointError
from shardwise.utils.logging import logger
from tests.checkpoint.job import Run, config, on_ranks
from tests.checkpoint.test_async import started
from tests.harness.logs import Lines


def slow_writes(seconds: float, *, until: threading.Event | None = None) -> Any:
    write = async_save.write_part

    def slow(*args: Any, **more: Any) -> list[int]:
        (until or threading.Event()).wait(seconds)
        return write(*args, **more)

    return slow


def hanging(path: str) -> list[str]:
    run = started(path, config(2, checkpoint={"async_save": True}))
    engine, answers = run.engine, threading.Event()
    saver = engine._checkpoints.background.saving
    assert saver is not None
    saver._limit = 1.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_save, "SLOWEST", 1e12)
        if torch.distributed.get_rank() == 1:
            patch.setattr(async_save, "write_part", slow_writes(60.0, until=answers))
        engine.save_checkpoint(path, tag="a")
        with pytest.raises(CheckpointError) as caught:
            engine.save_checkpoint(path, tag="next")
    saver._limit = 60.0
    engine.save_checkpoint(path, tag="c")
    assert engine.wait_for_checkpoint() == f"{path}/c"
    verify(f"{path}/c")
    answers.set()
    engine.destroy()
    return [str(caught.value)]


def test_a_disk_that_hangs_is_given_up_and_the_next_save_works(tmp_path: Path) -> None:
    for (error,) in on_ranks(hanging, 2, str(tmp_path)):
        assert "failed on rank 1: its part is not complete after" in error and "rank 1: " in error
    assert sorted(name for name in os.listdir(tmp_path) if not name.startswith(".")) == ["c", "first", "latest"]


def hung(path: str) -> list[str]:
    handler = Lines()
    logger.addHandler(handler)
    run = Run(config(1), seed=1)
    write = saving.write_part
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slow_io, "WARN_AFTER_S", 0.1)
        if torch.distributed.get_rank() == 1:
            patch.setattr(saving, "write_part", lambda *args, **more: (time.sleep(0.7), write(*args, **more))[1])
        run.engine.save_checkpoint(path)
    logger.removeHandler(handler)
    return [line for line in handler.lines if "writes its part: it has taken" in line]


def test_a_slow_disk_is_said_while_everybody_waits(tmp_path: Path) -> None:
    first, second = on_ranks(hung, 2, str(tmp_path))
    assert first == [] and len(second) >= 2 and "rank 1 writes its part: it has taken 0 s so far" in second[0]
