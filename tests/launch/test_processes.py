"""Starting, watching and ending processes, without torch."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from shardwise.errors import LaunchError
from shardwise.launch import processes
from shardwise.launch.processes import Streams, Worker, WorkerGroup
from tests.harness.jobs import is_alive

DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); signal.signal(2, signal.SIG_IGN)\n"
DEAF_CHILD = DEAF + "print('up', flush=True); time.sleep(600)"
FAMILY = f"""
{DEAF}
import os, subprocess, sys
for own_group in (False, True):
    # In the worker's process group, and in one of its own.
    child = subprocess.Popen(
        [sys.executable, "-c", {DEAF_CHILD!r}],
        stdout=subprocess.PIPE,
        preexec_fn=(lambda: os.setpgid(0, 0)) if own_group else None,
    )
    child.stdout.readline()
    print(child.pid, flush=True)
print("ready", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def _gang(*scripts: str) -> Iterator[tuple[WorkerGroup, list[int]]]:
    """A started gang and the descriptors on which its workers' standard output can be read."""
    gang = WorkerGroup(
        [Worker(rank, [sys.executable, "-c", text], dict(os.environ)) for rank, text in enumerate(scripts)]
    )
    nothing = os.open(os.devnull, os.O_RDWR)
    readers, streams = [], {}
    for rank in range(len(scripts)):
        reader, writer = os.pipe()
        readers.append(reader)
        streams[rank] = Streams(nothing, writer, nothing)
    gang.start(streams)
    for given in streams.values():
        os.close(given.stdout)
    try:
        yield gang, readers
    finally:
        gang.stop(signal.SIGKILL, 0)
        for descriptor in (nothing, *readers):
            os.close(descriptor)


def _wait(gang: WorkerGroup) -> None:
    deadline = time.monotonic() + 10
    while not gang.finished() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert gang.finished()


def _read_until(reader: int, word: bytes) -> bytes:
    text = b""
    while word not in text:
        chunk = os.read(reader, 4096)
        assert chunk, text
        text += chunk
    return text


def test_stop_ends_those_that_do_not_listen_and_their_children() -> None:
    with _gang(FAMILY, FAMILY) as (gang, readers):
        pids = list(gang.pids().values())
        for reader in readers:
            pids += [int(word) for word in _read_until(reader, b"ready").split()[:-1]]
        assert len(pids) == 6 and all(map(is_alive, pids))
        began = time.monotonic()
        assert gang.stop(signal.SIGTERM, 0.5) == []
        assert 0.5 <= time.monotonic() - began < 60  # they sleep for ten minutes
        assert not any(map(is_alive, pids))
        assert all(end.code == -9 and end.stopped for end in gang.exits.values())
        assert gang.stop(signal.SIGTERM, 5) == []  # nothing left to do


SAVING = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"],
                         stdout=subprocess.PIPE)
child.stdout.readline()
def save(*_):
    time.sleep(0.3)
    print("child", "lives" if child.poll() is None else "is gone", flush=True)
    os._exit(0)
signal.signal(15, save)
print("ready", child.pid, ".", flush=True)
time.sleep(600)
"""


def test_children_are_told_after_a_worker_that_handles_the_signal() -> None:
    with _gang(SAVING, "import time; print('ready', flush=True); time.sleep(600)") as (gang, readers):
        child = int(_read_until(readers[0], b".").split()[1])
        _read_until(readers[1], b"ready")
        assert gang.handles(signal.SIGTERM) and not gang.handles(signal.SIGUSR2)
        assert not gang.forward(signal.SIGUSR2)  # it would kill them
        began = time.monotonic()
        gang.stop(signal.SIGTERM, 60)
        assert time.monotonic() - began < 30
        assert _read_until(readers[0], b"\n").strip() == b"child lives"
        assert not is_alive(child)
        assert (gang.exits[0].code, gang.exits[1].code) == (0, -15)


SAVES = """
import os, signal, time
def save(*_):
    time.sleep({seconds})
    print("saved", flush=True)
    os._exit(7)
signal.signal({sig}, save)
signal.signal(10, lambda *_: print("asked", flush=True))
print("ready", flush=True)
while True:
    time.sleep(600)
"""
BY_A_SHELL = "import os; os.execlp('sh', 'sh', '-c', '{python} -c \"$0\"; exit $?', {program!r})"


@pytest.mark.parametrize(
    ("sig", "seconds", "codes", "killed"),
    [
        (signal.SIGTERM, 0.3, {7}, []),
        (signal.SIGTERM, 600, {-9}, [0]),
        (signal.SIGINT, 0.3, {7, -2}, []),  # bash exits with the code of the program, dash by SIGINT
    ],
)
def test_a_program_that_a_shell_script_has_started_saves(
    sig: signal.Signals, seconds: float, codes: set[int], killed: list[int]
) -> None:
    text = BY_A_SHELL.format(python=sys.executable, program=SAVES.format(seconds=seconds, sig=int(sig)))
    with _gang(text) as (gang, (reader,)):
        _read_until(reader, b"ready")
        assert gang.handles(sig) and gang.forward(signal.SIGUSR1)
        _read_until(reader, b"asked")
        gang.stop(sig, 0.5 if killed else 60)
        assert gang.exits[0].code in codes and list(gang.killed) == killed
        if not killed:
            _read_until(reader, b"saved")


def test_a_loader_worker_that_handles_a_signal_is_not_the_rank() -> None:
    forks = "import os, signal, time\nif not os.fork():\n    signal.signal(15, lambda *_: None)\n"
    with _gang(forks + "    print('ready', flush=True)\nwhile True: time.sleep(600)") as (gang, (reader,)):
        _read_until(reader, b"ready")
        assert not gang.handles(signal.SIGTERM) and not gang.forward(signal.SIGTERM)
        gang.stop(signal.SIGTERM, 0.5)
        assert gang.exits[0].code == -15 and not gang.killed


def test_children_left_by_a_worker_that_has_ended_are_found() -> None:
    leave = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    with _gang(leave + "\nprint(p.pid, 'ready', flush=True)") as (gang, (reader,)):
        child = int(_read_until(reader, b"ready").split()[0])
        _wait(gang)
        assert not gang.failed() and is_alive(child)
        gang.stop(signal.SIGTERM, 2)
        assert not is_alive(child)


def test_a_program_that_cannot_be_started_fails_alone() -> None:
    gang = WorkerGroup([Worker(0, ["/nonexistent/program"], {})])
    reader, writer = os.pipe()
    gang.start({0: Streams(0, writer, writer)})
    os.close(writer)
    _wait(gang)
    assert gang.exits[0].code == 1
    assert b"cannot start /nonexistent/program: No such file" in os.read(reader, 4096)
    gang.stop(signal.SIGTERM, 1)
    os.close(reader)


def test_other_systems_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(processes.sys, "platform", "darwin")
    with pytest.raises(LaunchError, match="torchrun"):
        WorkerGroup([])


def test_the_kernel_ends_workers_whose_launcher_is_killed(tmp_path) -> None:
    script = """
import os, sys
from shardwise.launch.processes import WorkerGroup, Streams, Worker
gang = WorkerGroup([Worker(0, [sys.executable, "-c", "import time; time.sleep(600)"], dict(os.environ))])
gang.start({0: Streams(0, 1, 2)})
print(gang.pids()[0], flush=True)
import time; time.sleep(600)
"""
    launcher = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    worker = int(launcher.stdout.readline())
    time.sleep(0.3)  # until the leash has asked the kernel
    assert is_alive(worker)
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    deadline = time.monotonic() + 5
    while is_alive(worker) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_alive(worker)
