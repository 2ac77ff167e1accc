"""A disk or a process that does not answer: said after seconds, and given up at a limit."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from shardwise.checkpoint import save as saving
from shardwise.checkpoint import slow_io, verify
from shardwise.errors import CheckpointError
from shardwise.utils.logging import logger
from tests.checkpoint.job import Run, config, on_ranks
from tests.checkpoint.test_async import process_of, started
from tests.harness.logs import Lines


def frozen(path: str) -> tuple[list[str], list[str]]:
    handler = Lines()
    handler.setLevel(logging.WARNING)
    logger.addHandler(handler)
    slow_io.WARN_AFTER_S, before = 0.3, slow_io.WARN_AFTER_S
    run = started(path, config(2, checkpoint={"async_save": True}))
    engine = run.engine
    told = []
    for tag in ("a", "b"):
        assert engine._checkpoints.background.saving is not None
        engine._checkpoints.background.saving._limit = 1.0
        process = process_of(run)
        if torch.distributed.get_rank() == 1:
            os.kill(process, signal.SIGSTOP)
        engine.save_checkpoint(path, tag=tag)
        with pytest.raises(CheckpointError) as caught:
            # The next save, or the end of the engine, waits for it.
            engine.save_checkpoint(path, tag="next") if tag == "a" else engine.destroy()
        told.append(str(caught.value))
        if tag == "a":
            engine.save_checkpoint(path, tag="c")
            assert engine.wait_for_checkpoint() == f"{path}/c"
            verify(f"{path}/c")
    slow_io.WARN_AFTER_S = before
    logger.removeHandler(handler)
    torch.distributed.barrier()
    return told, handler.lines


def test_a_frozen_process_that_writes_is_said_and_given_up(tmp_path: Path) -> None:
    for told, lines in on_ranks(frozen, 2, str(tmp_path)):
        for error in told:
            assert (
                "failed on rank 1: " in error
                and "which writes the part of rank 1" in error
                and "is stopped (by SIGSTOP" in error
            )
            assert "has written nothing for" in error
        assert any("waiting for" in line and "until it is written" in line for line in lines)
    assert sorted(name for name in os.listdir(tmp_path) if not name.startswith(".")) == ["c", "first", "latest"]


def slow_part(path: str) -> str | None:
    """Rank 1's part takes longer than rank 0's process, which has none to write any more, may do nothing."""
    run = started(path, config(2, checkpoint={"async_save": True}))
    background = run.engine._checkpoints.background.saving
    assert background is not None
    background._limit = 1.5 if torch.distributed.get_rank() == 0 else 60.0
    process = process_of(run)
    if torch.distributed.get_rank() == 1:
        os.kill(process, signal.SIGSTOP)
        threading.Timer(3.0, os.kill, (process, signal.SIGCONT)).start()
    with mock.patch.object(type(background), "turn", 4.0):  # so that rank 0 waits for longer than its limit
        run.engine.save_checkpoint(path, tag="slow")
        return run.engine.wait_for_checkpoint()


def test_a_part_that_takes_long_fails_no_save(tmp_path: Path) -> None:
    assert on_ranks(slow_part, 2, str(tmp_path)) == [f"{tmp_path}/slow"] * 2


def hung(path: str) -> list[str]:
    handler = Lines()
    logger.addHandler(handler)
    slow_io.WARN_AFTER_S, before = 0.1, slow_io.WARN_AFTER_S
    run = Run(config(1), seed=1)
    write = saving.write_tensors
    if torch.distributed.get_rank() == 1:
        saving.write_tensors = lambda *args, **more: (time.sleep(0.7), write(*args, **more))[1]
    run.engine.save_checkpoint(path)
    saving.write_tensors = write
    slow_io.WARN_AFTER_S = before
    logger.removeHandler(handler)
    return [line for line in handler.lines if "writes its part: it has taken" in line]


def test_a_slow_disk_is_said_while_everybody_waits(tmp_path: Path) -> None:
    first, second = on_ranks(hung, 2, str(tmp_path))
    assert first == [] and len(second) >= 2 and "rank 1 writes its part: it has taken 0 s so far" in second[0]
