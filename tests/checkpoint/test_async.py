"""Saves in the background: the same files as in the foreground, whatever training, disks and signals do meanwhile."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpoint import background, checksums, directory, file_writer, snapshot, verify, writer
from shardwise.errors import CheckpointError, UsageError
from shardwise.memory import Category, MemoryLimit
from tests.checkpoint import test_kill
from tests.checkpoint.job import Run, config, differences, on_ranks
from tests.checkpoint.test_kill import ROOT, Job, end, events, instrument, listed_later, same, what_is_left
from tests.harness import thorough

ASYNC = {"async_save": True}


def rank() -> int:
    return torch.distributed.get_rank()


def meet() -> None:
    torch.distributed.barrier()


def process_of(run: Run) -> int:
    """Return the id of this rank's process that writes; there is one after the first asynchronous save."""
    saving = run.engine._checkpoints.background.saving
    assert saving is not None and saving.pid is not None
    return saving.pid


def started(path: str, settings: dict[str, Any], seed: int = 1) -> Run:
    """Return a run whose process that writes is there."""
    run = Run(settings, seed=seed)
    run.step()
    run.engine.save_checkpoint(path, tag="first", asynchronous=True, client_state={"n": "first"})
    assert run.engine.wait_for_checkpoint() == f"{path}/first"
    return run


@contextlib.contextmanager
def standing(run: Run, ranks: tuple[int, ...] = (0, 1)) -> Iterator[None]:
    """Let the processes of some ranks that write stand still."""
    process = process_of(run)
    if rank() in ranks:
        os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)


def soon(function: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(0.3, function)
    timer.start()
    return timer


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
        with standing(run):
            run.engine.save_checkpoint(
                where, tag="async", client_state=client, exclude_frozen_parameters=number == 3, asynchronous=True
            )
            assert differences(before, run.fingerprint()) == []
            run.step()  # in the memory that is being saved
            meet()
            assert run.engine.checkpoint_pending and not os.path.exists(f"{where}/async")
        assert run.engine.wait_for_checkpoint() == f"{where}/async"
        assert not run.engine.checkpoint_pending
        assert directory.read_latest(where) == "async"
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
        process = process_of(run)
        os.kill(process, signal.SIGSTOP)
        engine.save_checkpoint(path, tag="a")
        assert engine.checkpoint_pending and engine.last_async_save.written is None
        timer = soon(lambda process=process: os.kill(process, signal.SIGCONT))  # type: ignore[misc]
        action()
        timer.join()
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
    assert process_of(run) == process  # one for all of them
    meet()
    return sorted(os.listdir(path))


def test_whoever_comes_while_a_save_is_written_waits_for_it(tmp_path: Path) -> None:
    assert on_ranks(overlapping, 2, str(tmp_path)) == [["a", "b", "c", "first", "latest"]] * 2


# -- what goes wrong -------------------------------------------------------------------------------------------------


def fail_by_size(run: Run, path: str, victim: int) -> str:
    process = process_of(run)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank() == victim:
        resource.prlimit(process, resource.RLIMIT_FSIZE, (5000, limit[1]))
    run.engine.save_checkpoint(path, tag="b", asynchronous=True)
    run.engine._checkpoints.background.saving.wait()
    if rank() == victim:
        resource.prlimit(process, resource.RLIMIT_FSIZE, limit)
    return r"File too large \(errno 27\)"


def fail_by_kill(run: Run, path: str, victim: int) -> str:
    with standing(run, (victim,)):
        run.engine.save_checkpoint(path, tag="b", asynchronous=True)
        if rank() == victim:
            os.kill(process_of(run), signal.SIGKILL)
        run.engine._checkpoints.background.saving.wait()
    # Rank 0's process sees that the lock has gone, or what the other rank has written: whichever is first.
    return r"was ended by signal 9 \(SIGKILL\)|has ended without finishing it \(was it killed"


def fail_by_kill_unseen(run: Run, path: str, victim: int) -> str:
    """As on a file system whose locks do not reach other machines: the rank whose process was killed says so."""
    original = directory.is_locked
    directory.is_locked = lambda path: False  # type: ignore[assignment]
    try:
        fail_by_kill(run, path, victim)
    finally:
        directory.is_locked = original  # type: ignore[assignment]
    return r"was ended by signal 9 \(SIGKILL\)"


def fail_by_removal(run: Run, path: str, victim: int) -> str:
    with standing(run):
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
    for number, how in enumerate((fail_by_size, fail_by_kill, fail_by_kill_unseen, fail_by_removal)):
        where = f"{path}/{number}"
        run = started(where, config(2))
        engine = run.engine
        expected = how(run, where, number % 2)
        run.step()  # training does not mind
        with pytest.raises(CheckpointError) as caught:
            if number % 3 == 0:
                engine.save_checkpoint(where, tag="c", asynchronous=number == 0)
            elif number % 3 == 1:
                engine.wait_for_checkpoint()
            else:
                engine.destroy()
        message = str(caught.value)
        assert f"{where}/b: writing this checkpoint in the background failed on rank" in message
        assert re.search(expected, message), message
        messages.append(message.replace(path, ""))
        if number % 3 == 2:
            assert engine.sharded.closed
            engine.destroy()
        else:
            # It is told once, and the next save works, with a new process where the old one is gone.
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
    assert [message.count("failed on rank 0") for message in one] == [1, 0, 1, 1]
    assert "MB are free" in one[0]


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
    assert "failed on rank 1" in first[1] and "0.0 MB are free for it (the test, shared by 2 ranks)" in second[1]
    assert "client_state['x']" in first[2]


def counted(path: str) -> tuple[int, int]:
    settings = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2},
        "checkpoint": ASYNC,
    }
    import shardwise

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


def agreeing() -> list[Any]:
    run = Run(config(0))
    say = [None, "short", "x" * 600, {"long": "\u00e9" * 5000}, "y" * 504]
    return [run.engine.job.exchange(say[(rank() + turn) % len(say)], "test") for turn in range(len(say))]


def test_ranks_exchange_short_and_long_values() -> None:
    results = on_ranks(agreeing, 3)
    say = [None, "short", "x" * 600, {"long": "\u00e9" * 5000}, "y" * 504]
    assert results == [[[say[(rank + turn) % 5] for rank in range(3)] for turn in range(5)]] * 3


# -- processes -------------------------------------------------------------------------------------------------------


def is_there(process: int) -> bool:
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


def until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("it never came true")


def in_child(function: Callable[[int], None]) -> tuple[int, int, bytes]:
    """Fork; return the child's id, its status, and what the function has written into the pipe that it was given."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            function(into)
        os._exit(7)
    os.close(into)
    with os.fdopen(out, "rb") as stream:
        said = stream.read()
    _, status = os.waitpid(child, 0)
    return child, status, said


def ends(path: str) -> None:
    run = started(path, config(1))
    own = process_of(run)

    def killed(into: int) -> None:
        run.engine.save_checkpoint(path, tag="b", asynchronous=True)
        os.write(into, str(process_of(run)).encode())
        os.kill(os.getpid(), signal.SIGKILL)

    def leaves(into: int) -> None:
        run.engine.save_checkpoint(path, tag="c", asynchronous=True)
        process = process_of(run)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):  # as sent to a whole session
            os.kill(process, number)
        os.write(into, str(process).encode())
        background._wait_at_exit()
        os._exit(0)

    _, status, said = in_child(killed)
    assert os.WTERMSIG(status) == signal.SIGKILL
    until(lambda: not is_there(int(said)))
    assert directory.read_latest(path) in ("first", "b")
    _, status, said = in_child(leaves)
    assert os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0
    assert not is_there(int(said))
    assert directory.read_latest(path) == "c"
    verify(f"{path}/c")
    # The parent's own process has not been touched by the children's.
    assert process_of(run) == own != int(said)
    run.engine.save_checkpoint(path, tag="d", asynchronous=True)
    assert run.engine.wait_for_checkpoint() == f"{path}/d"
    run.engine.destroy()
    until(lambda: not is_there(own))
    assert sorted(name for name in os.listdir(path) if name != "b") == ["c", "d", "first", "latest"]


def test_no_process_is_left_behind_and_an_exit_waits(tmp_path: Path) -> None:
    on_ranks(ends, 1, str(tmp_path))


class Here:
    """What stands for the process that writes, in this one: events can be counted."""

    knows_memory = ended = False
    pid = 0

    def __init__(self, desk: Any) -> None:
        self.desk = desk

    def launch(self, job: writer.WriteJob, given: Mapping[str, int]) -> None:
        copies = {name: os.dup(descriptor) for name, descriptor in given.items()}
        with mmap.mmap(copies["memory"], job.memory, access=mmap.ACCESS_READ) as memory:
            watchdog = writer.ParentWatchdog(os.getppid())
            view = memoryview(memory)
            self.desk.end(writer.perform(job, view, copies["part"], copies.get("draft"), watchdog))
            view.release()

    def dismiss(self) -> None:
        pass

    leave = dismiss


def killed_anywhere(path: str, overwrite: bool) -> list[str]:
    run = Run(config(2, "bf16"), seed=1)
    run.step()
    run.engine.save_checkpoint(path, tag="a", client_state={"n": "old"})
    run.step()
    tag = "a" if overwrite else "b"

    def save(copy: str, number: int) -> None:
        event = events(number)
        instrument(event)
        original = checksums.write_bytes

        def in_two(file: str, data: memoryview, **options: Any) -> checksums.FileFacts:
            Path(file).write_bytes(data[: len(data) // 2])
            event()
            os.unlink(file)
            return original(file, data, **options)

        writer.write_bytes = in_two  # type: ignore[attr-defined]
        background._Process = Here  # type: ignore[assignment,misc]
        run.engine.save_checkpoint(copy, tag=tag, client_state={"n": "new"}, asynchronous=True)
        run.engine.wait_for_checkpoint()
        os._exit(0)

    found = []
    for number in range(1, 1000):
        copy = f"{path}-{number}"
        shutil.copytree(path, copy)
        _, status, _ = in_child(lambda into, copy=copy, number=number: save(copy, number))  # type: ignore[misc]
        found.append(what_is_left(copy))
        if number % 10 == 1:
            run.engine.save_checkpoint(copy, tag=tag, client_state={"n": "next"})
            assert what_is_left(copy) == "next"
            there = sorted(os.listdir(copy))
            assert there == (["a", "latest"] if overwrite else ["a", "b", "latest"]), (number, there)
        shutil.rmtree(copy)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            return found
    raise AssertionError("the save never ended")


@pytest.mark.parametrize("overwrite", [False, thorough(True)])
def test_killed_at_any_moment_there_is_the_old_or_the_new_checkpoint(overwrite: bool, tmp_path: Path) -> None:
    (found,) = on_ranks(killed_anywhere, 1, str(tmp_path / "runs"), overwrite)
    assert len(found) > 30
    change = found.index("new")
    assert found == ["old"] * change + ["new"] * (len(found) - change)


@pytest.mark.thorough
@pytest.mark.limit(900)
def test_a_run_that_is_killed_while_it_saves_in_the_background_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 10
    whole = tmp_path / "whole"
    whole.mkdir()
    Job(whole, steps, seed=1).finish()
    script = test_kill.SCRIPT.replace('config(3, "bf16")', 'config(3, "bf16", checkpoint={"async_save": True})')
    monkeypatch.setattr(test_kill, "SCRIPT", script)
    generator = random.Random(1)
    reached = 0
    for attempt in range(2):
        at = reached + 3
        job = Job(tmp_path, steps, seed=attempt + 1, saving=at)
        job.wait_for(f"step {at}")
        time.sleep(generator.uniform(0.0, 0.3))
        job.kill()
        assert directory.read_latest(str(tmp_path / "runs")) == "last"
        found = verify(str(tmp_path / "runs" / "last")).counters["global_steps"]
        assert found in (at - 1, at)  # the step is printed when its save has begun
        reached = found
    Job(tmp_path, steps, seed=9).finish()
    assert same(end(tmp_path / "runs"), end(whole / "runs"))
    assert listed_later(tmp_path / "runs") == ["last", "latest"]


# -- the process alone -----------------------------------------------------------------------------------------------


def test_the_process_starts_without_torch() -> None:
    program = "import sys; sys.path.append(sys.argv[1]); import shardwise.checkpoint.writer; print(*sys.modules)"
    command = [sys.executable, "-I", "-S", "-c", program, str(ROOT / "src")]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "shardwise.checkpoint.writer" in loaded
    assert not {"torch", "numpy", "pydantic", "shardwise.config"} & set(loaded)


def test_bytes_are_written_in_blocks_with_their_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(2 * checksums.BLOCK + 100)
    sums = checksums.BlockSums()
    sums.feed(memoryview(data))
    flushed: list[int] = []
    monkeypatch.setattr(file_writer, "LARGE", 1)
    monkeypatch.setattr(os, "fdatasync", flushed.append)
    facts = checksums.write_bytes(str(tmp_path / "x"), memoryview(data))
    assert facts == sums.facts() and facts.size == len(data) and len(facts.checksums) == 3
    assert (tmp_path / "x").read_bytes() == data
    with pytest.raises(FileExistsError):
        checksums.write_bytes(str(tmp_path / "x"), memoryview(data))


def alone(tmp_path: Path, world: int, unseen: tuple[int, ...]) -> tuple[writer.WriteJob, directory.StagingDirectory]:
    draft = directory.StagingDirectory(str(tmp_path), "a")
    job = writer.WriteJob(0, world, str(tmp_path), "a", draft.token, (4, 4, 4), 100, unseen)
    return job, draft


def test_a_process_that_gives_no_sign_of_life_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, draft = alone(tmp_path, 3, (1, 2))
    os.close(directory.lock_file(job.file(1, writer.LOCK)))
    now = [1000.0]

    def sleep(seconds: float) -> None:
        now[0] += 30.0
        if now[0] < 1300.0:
            os.utime(job.file(1, writer.LOCK), ns=(int(now[0]), int(now[0])))

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", sleep)
    # The second never shows its file, the first stops giving signs later: the first failure is told.
    failed, words = writer._await_parts(job) or (0, "")
    assert failed == 2 and "no sign of life for 180 s" in words
    assert now[0] >= 1300.0 + 180.0 - 30.0
    draft.discard()


def test_a_failure_is_told_in_the_words_of_the_rank_or_by_an_empty_file(tmp_path: Path) -> None:
    for text, expected in (("No space", "No space"), ("", "nor could the reason")):
        job, draft = alone(tmp_path, 2, ())
        Path(job.file(1, writer.FAILURE)).write_text(text)
        assert expected in (writer._await_parts(job) or (0, ""))[1]
        draft.discard()
        assert "has been removed while it was being written" in (writer._await_parts(job) or (0, ""))[1]


def test_the_memory_is_reused_grows_and_takes_any_tensor() -> None:
    changes: list[int] = []
    taken = snapshot.Snapshot(torch.device("cpu"), resized=changes.append)
    for count in (10, 10, 100_000, 7):
        tensors = {
            "strided": torch.arange(count * 2.0).view(count, 2).t(),
            "half": torch.arange(count).bfloat16(),
            "bits": torch.arange(count) % 2 == 0,
            "number": torch.tensor(3.5, dtype=torch.float64),
            "none": torch.zeros(0, 3),
        }
        image, middle, stop = taken.add(taken.take(tensors, room=3 + 3 * count), [b"one", b"two" * count])
        data = os.pread(taken.descriptor, stop, 0)
        assert data[image:middle] == b"one" and data[middle:] == b"two" * count
        from safetensors.torch import load

        found = load(data[:image])
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensors[name]) for name in found)
        assert all(found[name].dtype is tensors[name].dtype for name in found)
    assert len(changes) == 2 and sum(changes) == taken.size
    taken.close()
    assert sum(changes) == taken.size == 0


def not_handed_over(path: str) -> list[str]:
    run = started(path, config(1, checkpoint={"async_save": True}))
    send, said = background.socket.send_fds, []

    def too_long(*args: Any) -> int:
        raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))

    background.socket.send_fds = too_long  # type: ignore[assignment]
    try:
        run.engine.save_checkpoint(path, tag="lost")
        run.engine.wait_for_checkpoint()
    except CheckpointError as error:
        said.append(str(error))
    finally:
        background.socket.send_fds = send
    run.engine.save_checkpoint(path, tag="next")
    run.engine.wait_for_checkpoint()
    run.engine.destroy()
    return [*said, *sorted(os.listdir(path))]


def test_a_job_that_cannot_be_handed_over_is_an_error_at_once(tmp_path: Path) -> None:
    said, *names = on_ranks(not_handed_over, 1, str(tmp_path))[0]
    assert "could not be given its task" in said and "Message too long" in said
    assert names == ["first", "latest", "next"]
