"""Saves in the background: the same files as in the foreground, whatever training, disks and signals do meanwhile."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise
from shardwise.checkpoint import async_save, snapshot, verify
from shardwise.checkpoint.listing import CheckpointDirectory
from shardwise.errors import CheckpointError, UsageError
from shardwise.memory import Category, MemoryLimit
from tests.checkpoint.job import Run, as_ranks, config, differences, on_ranks

ASYNC = {"async_save": True}


def rank() -> int:
    return torch.distributed.get_rank()


def meet() -> None:
    torch.distributed.barrier()


def started(path: str, settings: dict[str, Any], seed: int = 1) -> Run:
    """Return a run that has saved in the background."""
    run = Run(settings, seed=seed)
    run.step()
    run.engine.save_checkpoint(path, tag="first", asynchronous=True, client_state={"n": "first"})
    assert run.engine.wait_for_checkpoint() == f"{path}/first"
    return run


@contextlib.contextmanager
def standing(ranks: tuple[int, ...] = (0, 1), before: Callable[[], None] = lambda: None) -> Iterator[threading.Event]:
    """Let the threads of some ranks that write wait for the end of the block or the event, then call `before`."""
    write, go = async_save.write_part, threading.Event()

    def waiting(*args: Any, **kwargs: Any) -> list[int]:
        go.wait(60)
        before()
        return write(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        if rank() in ranks:
            patch.setattr(async_save, "write_part", waiting)
        try:
            yield go
        finally:
            go.set()


# -- what is written -------------------------------------------------------------------------------------------------


def content(path: str) -> tuple[list[bytes], str]:
    """Return the bytes of a checkpoint's files, and its manifest without what differs from save to save."""
    files = sorted(name for name in os.listdir(path) if name.endswith(".safetensors"))
    token = files[0].removesuffix(".safetensors").rpartition("-")[2]
    text = (Path(path) / "manifest.json").read_text().replace(token, "TOKEN").partition("\n")[2]
    lines = [line for line in text.splitlines() if not line.startswith(('"created"', '"tag"', '"sequence"'))]
    return [(Path(path) / name).read_bytes() for name in files], "\n".join(lines)


def same_files(path: str) -> int:
    compared = 0
    for number, (stage, dtype, optimizer) in enumerate(
        [(0, "fp16", "AdamW"), (1, "fp32", "SGD"), (2, "bf16", "Adafactor"), (3, "bf16", "AdamW")]
    ):
        where = f"{path}/{number}"
        client = {"values": torch.arange(3), "pair": (1, 2.5), "epoch": number}
        run = started(where, config(stage, dtype, optimizer))
        run.engine.save_checkpoint(where, tag="sync", client_state=client, exclude_frozen_parameters=number == 3)
        before = run.fingerprint()
        with standing():
            run.engine.save_checkpoint(
                where, tag="async", client_state=client, exclude_frozen_parameters=number == 3, asynchronous=True
            )
            assert differences(before, run.fingerprint()) == []
            run.step()  # in the memory that is being saved
            meet()
            assert run.engine.checkpoint_pending and not os.path.exists(f"{where}/async")
        assert run.engine.wait_for_checkpoint() == f"{where}/async"
        assert not run.engine.checkpoint_pending
        assert CheckpointDirectory(where).latest() == "async"
        files, manifest = content(f"{where}/async")
        assert (files, manifest) == content(f"{where}/sync") and len(files) == 2
        verify(f"{where}/async")
        after = run.fingerprint()
        other = Run(config(stage, dtype, optimizer), seed=9)
        assert other.load(where)[1]["epoch"] == number
        assert differences(before, other.fingerprint()) == ([] if number != 3 else differing_frozen(before, other))
        other.step()
        if number != 3:
            assert differences(after, other.fingerprint()) == []
        meet()
        assert sorted(os.listdir(where)) == ["async", "first", "latest", "sync"]
        run.engine.destroy()
        compared += 1
    return compared


def differing_frozen(before: dict[str, Any], other: Run) -> list[str]:
    """Frozen parameters that were left out are those of the other run."""
    found = differences(before, other.fingerprint())
    assert found and all("bias" in name for name in found)
    return found


def test_the_files_are_those_of_a_save_in_the_foreground_and_training_resumes_exactly(tmp_path: Path) -> None:
    assert on_ranks(same_files, 2, str(tmp_path)) == [4, 4]


def overlapping(path: str) -> list[str]:
    run = started(path, config(2, checkpoint=ASYNC))
    engine = run.engine
    for action in (
        lambda: engine.save_checkpoint(path, tag="b"),
        lambda: engine.save_checkpoint(path, tag="b", asynchronous=False),
        lambda: engine.load_checkpoint(path, tag="a"),
        lambda: engine.wait_for_checkpoint(),
    ):
        with standing() as go:
            engine.save_checkpoint(path, tag="a")
            assert engine.checkpoint_pending and engine.last_async_save.written is None
            threading.Timer(0.3, go.set).start()
            action()
        verify(f"{path}/a")
        engine.wait_for_checkpoint()
    assert not engine.checkpoint_pending
    engine.save_checkpoint(path, tag="a")
    engine.save_checkpoint(path, tag="c")
    report = engine.last_async_save
    assert report is not None and report.path == f"{path}/c" and report.waited > 0.0 and report.blocked > 0.0
    engine.wait_for_checkpoint()
    assert report.written is not None and report.written > 0.0 and report.error is None
    assert report.size == os.path.getsize(
        next(entry for entry in os.scandir(report.path) if entry.name.startswith(f"rank{rank():05d}"))
    )
    meet()
    return sorted(os.listdir(path))


def test_whoever_comes_while_a_save_is_written_waits_for_it(tmp_path: Path) -> None:
    assert on_ranks(overlapping, 2, str(tmp_path)) == [["a", "b", "c", "first", "latest"]] * 2


# -- what goes wrong -------------------------------------------------------------------------------------------------


def fail_by_disk(run: Run, path: str, victim: int) -> str:
    def full() -> None:
        raise CheckpointError("No space left, 3 MB are free")

    with standing((victim,), full):
        run.engine.save_checkpoint(path, tag="b", asynchronous=True)
    run.engine._checkpoints.background.saving.wait()
    return "No space left, 3 MB are free"


def fail_by_removal(run: Run, path: str, victim: int) -> str:
    with standing():
        run.engine.save_checkpoint(path, tag="b", asynchronous=True)
        meet()
        if rank() == victim:
            for name in os.listdir(path):
                if name.endswith(".partial"):
                    shutil.rmtree(os.path.join(path, name))
        meet()
    return "not there on this rank"


def failing(path: str) -> list[str]:
    messages = []
    for number, (how, victim) in enumerate([(fail_by_disk, 0), (fail_by_disk, 1), (fail_by_removal, 0)]):
        where = f"{path}/{number}"
        run = started(where, config(2))
        engine = run.engine
        expected = how(run, where, victim)
        run.step()  # training does not mind
        with pytest.raises(CheckpointError) as caught:
            if number == 0:
                engine.save_checkpoint(where, tag="c", asynchronous=True)
            elif number == 1:
                engine.wait_for_checkpoint()
            else:
                engine.destroy()
        message = str(caught.value)
        assert f"{where}/b: writing this checkpoint in the background failed on rank" in message
        assert re.search(expected, message), message
        messages.append(message.replace(path, ""))
        if number == 2:
            assert engine.sharded.closed
            engine.destroy()
        else:
            # It is told once, and the next save works.
            assert engine.wait_for_checkpoint() is None
            assert run.load(where)[1] == {"n": "first"}
            engine.save_checkpoint(where, tag="d", asynchronous=True)
            assert engine.wait_for_checkpoint() == f"{where}/d"
            engine.destroy()
            meet()
            assert sorted(os.listdir(where)) == ["d", "first", "latest"]
            verify(f"{where}/d")
        meet()
        verify(f"{where}/first")
    return messages


def test_a_failure_in_the_background_is_raised_on_all_ranks_and_nothing_else_is_lost(tmp_path: Path) -> None:
    one, other = on_ranks(failing, 2, str(tmp_path))
    assert one == other
    assert [message.count("failed on rank 0") for message in one] == [1, 0, 1]


def refused(path: str) -> list[str]:
    run = Run(config(1), seed=1)
    engine = run.engine
    messages = []
    with pytest.raises(UsageError) as caught:
        engine.save_checkpoint(path, asynchronous=rank() == 1)
    messages.append(str(caught.value))
    original = snapshot.memory_limit
    if rank() == 1:
        snapshot.memory_limit = lambda device, processes: MemoryLimit("the test", 1000, 900, 900, processes)
    try:
        with pytest.raises(CheckpointError) as failed:
            engine.save_checkpoint(path, asynchronous=True)
    finally:
        snapshot.memory_limit = original
    messages.append(str(failed.value))
    with pytest.raises(CheckpointError) as failed:
        engine.save_checkpoint(path, asynchronous=True, client_state={"x": print})
    messages.append(str(failed.value))
    assert engine.wait_for_checkpoint() is None and not engine.checkpoint_pending
    meet()
    assert os.listdir(path) == []
    engine.save_checkpoint(path, asynchronous=True)
    engine.destroy()
    with pytest.raises(UsageError, match="wait_for_checkpoint"):
        engine.wait_for_checkpoint()
    meet()
    assert sorted(os.listdir(path)) == ["global_step0", "latest"]
    return messages


def test_what_cannot_be_saved_is_refused_before_anything_is_pending(tmp_path: Path) -> None:
    first, second = on_ranks(refused, 2, str(tmp_path))
    assert first[0] == second[0] and "asynchronous is False on rank 0 and True on rank 1" in first[0]
    assert "failed on rank 1" in first[1] and "are free for it (the test, shared by 2 ranks)" in second[1]
    assert "client_state['x']" in first[2]


def counted(path: str) -> tuple[int, int]:
    settings = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2},
        "checkpoint": ASYNC,
    }
    engine, *_ = shardwise.initialize(model=torch.nn.Linear(1000, 700), config=settings)
    planned = engine._checkpoints.background.snapshot_bytes(700 * 1001 * 8 // 2)
    report = engine.memory_report()
    assert report.row(Category.OTHER).planned >= planned > report.row(Category.OTHER).floor  # none has been saved
    assert any("its snapshot takes" in note for note in report.notes)
    engine.backward(engine(torch.randn(1, 1000)).sum())
    engine.step()
    before = engine.accountant.live[Category.OTHER]
    engine.save_checkpoint(path)
    held = engine.accountant.live[Category.OTHER] - before
    assert held == engine._checkpoints.background.saving.size
    engine.save_checkpoint(path)
    assert engine.accountant.live[Category.OTHER] - before == held  # reused
    assert engine.memory_report().row(Category.OTHER).planned >= held
    accountant = engine.accountant
    engine.destroy()
    assert accountant.live[Category.OTHER] <= before
    return planned, held


def test_the_snapshot_is_planned_and_counted(tmp_path: Path) -> None:
    for planned, held in on_ranks(counted, 2, str(tmp_path)):
        share = 700 * 1001 * 12 // 2  # values and two moments, half of them
        assert share <= held <= 1.1 * share
        assert abs(planned - share) <= 0.01 * share


# -- processes that end ------------------------------------------------------------------------------------------------


def in_child(function: Callable[[], None]) -> int:
    """Call a function in a forked process; return its status."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            function()
        os._exit(7)
    return os.waitpid(child, 0)[1]


@as_ranks(1)
def test_a_killed_process_publishes_nothing_and_a_child_leaves_the_parents_save_alone(tmp_path: Path) -> None:
    run = started(tmp_path, config(1))

    def killed() -> None:
        with standing():
            run.engine.save_checkpoint(tmp_path, tag="b", asynchronous=True)
            os.kill(os.getpid(), signal.SIGKILL)

    with standing():
        run.engine.save_checkpoint(tmp_path, tag="c", asynchronous=True)
        assert os.WTERMSIG(in_child(killed)) == signal.SIGKILL
        assert in_child(lambda: os._exit(int(run.engine.checkpoint_pending))) == 0  # the parent's, not the child's
        assert run.engine.checkpoint_pending
    assert run.engine.wait_for_checkpoint() == f"{tmp_path}/c"
    run.engine.save_checkpoint(tmp_path, tag="d", asynchronous=True)
    run.engine.destroy()
    assert sorted(os.listdir(tmp_path)) == ["c", "d", "first", "latest"]  # the killed process's draft is removed


EXIT = """
import sys, time
import shardwise.checkpoint.async_save as async_save
from tests.checkpoint.job import Run, config

write = async_save.write_part
async_save.write_part = lambda *args, **more: (time.sleep(0.5), write(*args, **more))[1]
run = Run(config(1), seed=1)
run.engine.save_checkpoint(sys.argv[1], tag="last", asynchronous=True)
"""


def test_the_interpreter_waits_for_a_save_at_its_end(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", EXIT, str(tmp_path)], check=True, timeout=120)
    verify(str(tmp_path / "last"))
