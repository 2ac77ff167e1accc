"""Saves in the background: the same files as in the foreground, whatever training, disks and signals do meanwhile."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpoint import agree, async_save, directory, verify
from shardwise.checkpoint import save as saving
from shardwise.checkpoint.listing import CheckpointDirectory
from shardwise.errors import CheckpointError, UsageError
from shardwise.memory import Category, MemoryLimit
from tests.checkpoint.job import Run, barrier, config, differences, rank
from tests.harness import on_ranks, thorough
from tests.harness.logs import logged
from tests.harness.training import ADAMW, engine_of

ASYNC = {"async_save": True}


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


CASES = [(2, "bf16", "Adafactor"), (3, "bf16", "AdamW"), thorough(0, "fp16", "AdamW"), thorough(1, "fp32", "SGD")]


@pytest.mark.parametrize(("stage", "dtype", "optimizer"), CASES)
@on_ranks(2)
def test_the_files_are_those_of_a_save_in_the_foreground_and_training_resumes_exactly(
    stage: int, dtype: str, optimizer: str, tmp_path: Path
) -> None:
    where, frozen_left_out = str(tmp_path), stage == 3
    client = {"values": torch.arange(3), "pair": (1, 2.5), "epoch": 7}
    options = {"client_state": client, "exclude_frozen_parameters": frozen_left_out}
    run = started(where, config(stage, dtype, optimizer))
    run.engine.save_checkpoint(where, tag="sync", **options)
    before = run.fingerprint()
    with standing():
        run.engine.save_checkpoint(where, tag="async", asynchronous=True, **options)
        assert differences(before, run.fingerprint()) == []
        run.step()  # in the memory that is being saved
        barrier()
        assert run.engine.checkpoint_pending and not os.path.exists(f"{where}/async")
    assert run.engine.wait_for_checkpoint() == f"{where}/async"
    assert not run.engine.checkpoint_pending
    assert CheckpointDirectory(where).latest() == "async"
    assert content(f"{where}/async") == content(f"{where}/sync")
    verify(f"{where}/async")
    other = Run(config(stage, dtype, optimizer), seed=9)
    assert other.load(where)[1]["epoch"] == 7
    found = differences(before, other.fingerprint())
    assert all("bias" in name for name in found) and bool(found) is frozen_left_out
    other.step()
    assert frozen_left_out or differences(run.fingerprint(), other.fingerprint()) == []
    barrier()
    assert sorted(os.listdir(where)) == ["async", "first", "latest", "sync"]


@on_ranks(2)
def test_whoever_comes_while_a_save_is_written_waits_for_it(tmp_path: Path) -> None:
    path = str(tmp_path)
    engine = started(path, config(2, checkpoint=ASYNC)).engine
    actions: dict[str, Callable[[str], Any]] = {
        "a0": lambda tag: engine.save_checkpoint(path, tag="b"),
        "a1": lambda tag: engine.save_checkpoint(path, tag="b", asynchronous=False),
        "a2": lambda tag: engine.load_checkpoint(path, tag=tag),
        "a3": lambda tag: engine.load_weights(path, tag=tag),
        "a4": lambda tag: engine.resume(path),
        "a5": lambda tag: engine.wait_for_checkpoint(),
    }
    for tag, action in actions.items():
        with standing() as go:
            engine.save_checkpoint(path, tag=tag)
            assert engine.checkpoint_pending and engine.last_async_save.written is None
            threading.Timer(0.3, go.set).start()
            action(tag)
        verify(f"{path}/{tag}")
        engine.wait_for_checkpoint()
    assert engine.resumed.path == f"{path}/a4"
    assert not engine.checkpoint_pending
    engine.save_checkpoint(path, tag="a")
    engine.save_checkpoint(path, tag="c")
    report = engine.last_async_save
    assert report.path == f"{path}/c" and min(report.waited, report.blocked) > 0.0
    engine.wait_for_checkpoint()
    assert report.written > 0.0 and report.error is None
    assert report.size == next(Path(report.path).glob(f"rank{rank():05d}*")).stat().st_size
    barrier()
    assert sorted(os.listdir(path)) == ["a", *actions, "b", "c", "first", "latest"]


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
        barrier()
        for draft in Path(path).glob("*.partial") if rank() == victim else ():
            shutil.rmtree(draft)
        barrier()
    return "not there on this rank"


@pytest.mark.parametrize(
    ("fail", "victim", "told_by"),
    [(fail_by_disk, 0, "save"), (fail_by_disk, 1, "wait"), (fail_by_removal, 0, "destroy")],
)
@on_ranks(2)
def test_a_failure_in_the_background_is_raised_on_all_ranks_and_nothing_else_is_lost(
    fail: Callable[[Run, str, int], str], victim: int, told_by: str, tmp_path: Path
) -> None:
    where = str(tmp_path)
    run = started(where, config(2))
    engine = run.engine
    expected = fail(run, where, victim)
    run.step()  # training does not mind
    with pytest.raises(CheckpointError, match=rf"/b: .* in the background failed on rank {victim}.*{expected}"):
        if told_by == "save":
            engine.save_checkpoint(where, tag="c", asynchronous=True)
        elif told_by == "wait":
            engine.wait_for_checkpoint()
        else:
            engine.destroy()
    if told_by == "destroy":
        assert engine.sharded.closed
    else:
        # It is told once, and the next save works.
        assert engine.wait_for_checkpoint() is None
        assert run.load(where)[1] == {"n": "first"}
        engine.save_checkpoint(where, tag="d", asynchronous=True)
        assert engine.wait_for_checkpoint() == f"{where}/d"
        barrier()
        assert sorted(os.listdir(where)) == ["d", "first", "latest"]
        verify(f"{where}/d")
    verify(f"{where}/first")


@on_ranks(2)
def test_what_cannot_be_saved_is_refused_before_anything_is_pending(tmp_path: Path) -> None:
    run = Run(config(1), seed=1)
    engine = run.engine
    with pytest.raises(UsageError, match="asynchronous is False on rank 0 and True on rank 1"):
        engine.save_checkpoint(tmp_path, asynchronous=rank() == 1)
    with pytest.raises(UsageError, match="exclude_frozen_parameters is False on rank 0 and True on rank 1"):
        engine.save_checkpoint(tmp_path, exclude_frozen_parameters=rank() == 1)
    with pytest.raises(CheckpointError, match=r"client_state: expected a dictionary, found an object of .*list"):
        engine.save_checkpoint(tmp_path, asynchronous=True, client_state=["x"])
    told = "are free for it" if rank() == 1 else "failed on rank 1"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError, match=told):
        if rank() == 1:
            patch.setattr(async_save, "memory_limit", lambda device, n: MemoryLimit("the test", 1000, 900, 900, n))
        engine.save_checkpoint(tmp_path, asynchronous=True)
    with pytest.raises(CheckpointError, match=r"client_state\['x'\]"):
        engine.save_checkpoint(tmp_path, asynchronous=True, client_state={"x": print})
    assert engine.wait_for_checkpoint() is None and not engine.checkpoint_pending
    barrier()
    assert os.listdir(tmp_path) == []
    engine.save_checkpoint(tmp_path, asynchronous=True)
    run.step()
    engine.save_checkpoint(tmp_path, asynchronous=True)  # of more than before
    engine.destroy()
    verify(f"{tmp_path}/global_step1")
    with pytest.raises(UsageError, match="wait_for_checkpoint"):
        engine.wait_for_checkpoint()
    barrier()
    assert sorted(os.listdir(tmp_path)) == ["global_step0", "global_step1", "latest"]


@on_ranks(2)
def test_a_script_may_change_its_working_directory_after_a_save(tmp_path: Path) -> None:
    engine = Run(config(1), seed=1).engine
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        engine.checkpoint_on_signal("runs", save_on=["SIGUSR2"])
        engine.save_checkpoint("runs", "first", asynchronous=True)
    assert engine.wait_for_checkpoint() == f"{tmp_path}/runs/first"
    os.kill(os.getpid(), signal.SIGUSR2)
    engine.check_signals()
    verify(f"{tmp_path}/runs/global_step0")


@on_ranks(2)
def test_the_snapshot_is_planned_and_counted(tmp_path: Path) -> None:
    engine = engine_of(torch.nn.Linear(1000, 700), 2, ADAMW, rows=1, checkpoint=ASYNC)
    planned = engine._checkpoints.background.snapshot_bytes(700 * 1001 * 8 // 2)
    report = engine.memory_report()
    assert report.row(Category.OTHER).planned >= planned > report.row(Category.OTHER).floor  # none has been saved
    assert any("its snapshot takes" in note for note in report.notes)
    engine.backward(engine(torch.randn(1, 1000)).sum())
    engine.step()
    before = engine.accountant.live[Category.OTHER]
    engine.save_checkpoint(tmp_path)
    held = engine.accountant.live[Category.OTHER] - before
    assert held == engine._checkpoints.background.saving.size
    engine.save_checkpoint(tmp_path)
    assert engine.accountant.live[Category.OTHER] - before == held  # reused
    assert engine.memory_report().row(Category.OTHER).planned >= held
    accountant = engine.accountant
    engine.destroy()
    assert accountant.live[Category.OTHER] <= before
    share = 700 * 1001 * 12 // 2  # values and two moments, half of them
    assert share <= held <= 1.1 * share
    assert abs(planned - share) <= 0.01 * share


# -- processes that end ------------------------------------------------------------------------------------------------


@on_ranks(1)
def test_a_child_leaves_the_parents_save_alone(tmp_path: Path) -> None:
    run = started(str(tmp_path), config(1))
    with standing():
        run.engine.save_checkpoint(tmp_path, tag="c", asynchronous=True)
        child = os.fork()
        if child == 0:
            os._exit(int(run.engine.checkpoint_pending))  # the parent's, not the child's
        assert os.waitpid(child, 0)[1] == 0
        assert run.engine.checkpoint_pending
    assert run.engine.wait_for_checkpoint() == f"{tmp_path}/c"


@on_ranks(2)
def test_the_end_of_a_script_waits_for_ranks_with_slow_disks(tmp_path: Path) -> None:
    engine = started(str(tmp_path), config(1)).engine
    with standing((1,)) as go, pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_save, "_EXIT_S", 0.2)
        patch.setattr(async_save, "_LOOK_S", 0.1)
        patch.setattr(async_save, "SLOWEST", 1000.0)  # bytes a second: the part of a rank has some thousand
        patch.setattr(threading, "main_thread", threading.Thread)  # one that does not run
        engine.save_checkpoint(tmp_path, tag="last", asynchronous=True)
        threading.Timer(1.0, go.set).start()
        assert engine.wait_for_checkpoint() == str(tmp_path / "last")
    verify(str(tmp_path / "last"))


EXIT = """
import sys, time, torch, shardwise
import shardwise.checkpoint.async_save as async_save

write = async_save.write_part
async_save.write_part = lambda *args, **more: (time.sleep(0.5), write(*args, **more))[1]
engine = shardwise.initialize(model=torch.nn.Linear(2, 2), config={"train_batch_size": 1}).engine
engine.save_checkpoint(sys.argv[1], tag="last", asynchronous=True)
"""


def test_the_interpreter_waits_for_a_save_at_its_end(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", EXIT, str(tmp_path)], check=True, timeout=120)
    verify(str(tmp_path / "last"))


# -- a disk that does not answer ---------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_disk_that_hangs_is_given_up_and_the_next_save_works(tmp_path: Path) -> None:
    engine, answers = started(str(tmp_path), config(2, checkpoint={"async_save": True})).engine, threading.Event()
    saver, write = engine._checkpoints.background.saving, async_save.write_part

    def hanging(*args: Any, **more: Any) -> list[int]:
        answers.wait(60.0)
        return write(*args, **more)

    saver._limit = 1.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_save, "SLOWEST", 1e12)
        if rank() == 1:
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


@on_ranks(1)
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
@on_ranks(2)
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
        if rank() == 0:
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


@on_ranks(2)
def test_a_slow_disk_is_said_while_everybody_waits(tmp_path: Path) -> None:
    run, write = Run(config(1), seed=1), saving.write_part
    with logged() as told, pytest.MonkeyPatch.context() as patch:
        patch.setattr(agree, "WARN_AFTER_S", 0.1)
        if rank() == 1:
            patch.setattr(saving, "write_part", lambda *args, **more: (time.sleep(0.7), write(*args, **more))[1])
        run.engine.save_checkpoint(tmp_path)
    lines = [line for line in told.lines if "writes its part: it has taken" in line]
    assert len(lines) >= 2 if rank() == 1 else lines == []


@on_ranks(1)
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
