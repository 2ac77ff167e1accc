"""Worker processes of one attempt: start, exit status, and shutdown without leftovers.

Every worker leads its own session, which identifies its child processes. Invariants: an exited worker stays a zombie
until the worker group is stopped, because its process and session id must not be reused; after `stop` no process of any
worker's session is alive.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from shardwise.errors import LaunchError
from shardwise.launch import pdeathsig_exec
from shardwise.launch.cores import Cores, bound

POLL_S = 0.02
STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
"""States of a process that waits for SIGCONT, or for a debugger."""
UNKILLABLE_S = 5.0
"""Seconds to wait after SIGKILL: a process stuck in the kernel (disk, device driver) may never end."""


@dataclass(frozen=True)
class Worker:
    """Command of one rank, without a shell; its complete environment, and cores to bind to (None: unbound)."""

    rank: int
    argv: Sequence[str]
    env: Mapping[str, str]
    cores: Cores | None = None


@dataclass(frozen=True)
class Streams:
    """File descriptors for a worker's standard streams."""

    stdin: int
    stdout: int
    stderr: int


@dataclass(frozen=True)
class Exit:
    """Exit of one worker: `code` is negative for the signal that killed it, `at` in seconds since the epoch, and
    `stopped` means caused by a signal of `WorkerGroup.stop`. `host` is the name of its machine; empty: this one.
    """

    rank: int
    pid: int
    code: int
    at: float
    stopped: bool
    host: str = ""


@dataclass
class WorkerGroup:
    """The workers of one attempt. Start once, stop once."""

    workers: Sequence[Worker]
    exits: dict[int, Exit] = field(default_factory=dict)
    stop_began: float | None = None
    killed: dict[int, str] = field(default_factory=dict)
    """Workers that did not end on the first signal, with their state by psutil's names."""
    skip_grace_period: bool = False
    """Set from a signal handler to end the grace period at once."""

    def __post_init__(self) -> None:
        if not sys.platform.startswith("linux"):
            raise LaunchError(
                f"The launcher follows processes through Linux's /proc; this is {sys.platform}. Use "
                "torchrun here: scripts need no change."
            )
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._sent: dict[int, set[int]] = {worker.rank: set() for worker in self.workers}
        self._changed = threading.Condition()

    def start(self, streams: Mapping[int, Streams]) -> None:
        """Start every worker with the given standard streams (by rank), which stay open. Raises LaunchError if a
        process cannot be started; earlier ones have been stopped.
        """
        for worker in self.workers:
            given = streams[worker.rank]
            with_parent = [sys.executable, "-I", "-S", str(pdeathsig_exec.__file__), str(os.getpid()), *worker.argv]
            try:
                with bound(worker.cores):
                    process = subprocess.Popen(
                        with_parent,
                        env=dict(worker.env),
                        stdin=given.stdin,
                        stdout=given.stdout,
                        stderr=given.stderr,
                        start_new_session=True,
                    )
            except OSError as error:
                self.stop(signal.SIGKILL, 0.0)
                raise LaunchError(f"Cannot start rank {worker.rank} ({worker.argv[0]}): {error}.") from error
            self._processes[worker.rank] = process
            threading.Thread(target=self._watch, args=(worker.rank, process.pid), daemon=True).start()

    def pids(self) -> dict[int, int]:
        """Return the process id by rank."""
        return {rank: process.pid for rank, process in self._processes.items()}

    def failed(self) -> bool:
        """Whether a worker has exited with a code other than 0."""
        with self._changed:
            return any(end.code != 0 for end in self.exits.values())

    def finished(self) -> bool:
        """Whether all workers have exited."""
        with self._changed:
            return len(self.exits) == len(self._processes)

    def stop(self, first: signal.Signals, grace: float) -> list[int]:
        """End every process of every worker's session: `first`, then SIGKILL after `grace` seconds. Return the process
        ids that survive SIGKILL (stuck in the kernel).

        All others of its session get it after the exit of a process that handles `first` (`_handling`), because a save
        may need data loaders, and a shell script passes on the exit code.
        """
        if self.stop_began is None:
            self.stop_began = time.time()
        sessions = self._sessions()
        deadline = time.monotonic() + grace
        signalled: set[int] = set()
        able: set[int] = set()
        waited: set[int] = set()
        while members := _members(sessions):
            able = (able | _handling(members, first)) & members.keys()  # also one that has removed its handler
            waiting = {members[pid] for pid in able}
            # A worker has a moment to end by itself with the exit code of its child.
            now = [pid for pid, session in members.items() if pid in able or session not in waiting | waited]
            self._send(first, sessions, [pid for pid in now if pid not in signalled])
            signalled.update(now)
            waited = waiting
            if time.monotonic() >= deadline or self.skip_grace_period:
                break
            time.sleep(POLL_S)
        self.killed.update(self.states() if first is not signal.SIGKILL else {})
        deadline = time.monotonic() + UNKILLABLE_S
        while (left := _members(sessions)) and time.monotonic() < deadline:
            self._send(signal.SIGKILL, sessions, list(left))
            time.sleep(POLL_S)
        with self._changed:
            self._changed.wait_for(lambda: len(self.exits) + len(left) >= len(sessions), UNKILLABLE_S)
        for process in self._processes.values():
            if process.pid not in left:
                process.wait()
        self._processes.clear()
        return sorted(left)

    def states(self) -> dict[int, str]:
        """Return the state of each running worker, by psutil's names."""
        found = {rank: _state(process.pid) for rank, process in list(self._processes.items())}
        return {rank: state for rank, state in found.items() if state is not None}

    def handles(self, sig: signal.Signals) -> bool:
        """Whether a worker, or a program that it has started, has a handler for a signal."""
        return bool(_handling(_members(self._sessions()), sig))

    def forward(self, sig: signal.Signals) -> bool:
        """Send a signal to the workers, or programs that they have started, that handle it; return whether there are
        any. Safe in a signal handler.
        """
        found = _handling(_members(self._sessions()), sig)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sig)
        return bool(found)

    def _sessions(self) -> dict[int, int]:
        """Return the session of each worker, which is its process id, and the rank."""
        return {process.pid: rank for rank, process in list(self._processes.items())}

    def _send(self, sig: signal.Signals, sessions: Mapping[int, int], pids: Sequence[int]) -> None:
        for pid in pids:
            if pid in sessions:
                self._sent[sessions[pid]].add(sig)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sig)

    def _watch(self, rank: int, pid: int) -> None:
        """Wait for one worker and record its exit time, leaving it a zombie."""
        result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        at = time.time()
        assert result is not None
        code = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        with self._changed:
            stopped = self.stop_began is not None and (code >= 0 or -code in self._sent[rank])
            self.exits[rank] = Exit(rank, pid, code, at, stopped)
            self._changed.notify_all()


def handles(pid: int, sig: signal.Signals) -> bool:
    """Whether a process has a handler for a signal.

    >>> handles(os.getpid(), signal.SIGKILL)
    False
    """
    return bool(int(_status(pid).get("SigCgt", "0"), 16) >> (sig - 1) & 1)


def _status(pid: int) -> dict[str, str]:
    """Return the lines of /proc/PID/status by name; empty if the process has exited."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    return {name: value for name, _, value in (line.partition(":") for line in text.splitlines())}


def _handling(members: Mapping[int, int], sig: signal.Signals) -> set[int]:
    """Return the processes that get a signal first in their sessions: a leader that handles the signal, else programs
    that do, started by a process that does not. `members` are of `_members`.

    Because loader workers handle signals to outlive them, forks of a process without a handler do not count. Because
    shells catch SIGINT while they wait for a program, the program gets SIGINT, too.
    """
    able = {pid for pid in members if handles(pid, sig)}
    found = {pid for pid in able if pid == members[pid]}
    first = set() if sig is signal.SIGINT else able
    for pid in able - found:
        parent = int(_status(pid).get("PPid", "0"))
        if parent in members and not first & {members[pid], parent} and _program(pid) != _program(parent):
            found.add(pid)
    return found


def _program(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return ""  # the process has exited


def _members(sessions: Mapping[int, int]) -> dict[int, int]:
    """Return the running processes of some sessions, and the session of each."""
    found = {}
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            session = os.getsid(pid)
            if session in sessions and _state(pid) is not None:
                found[pid] = session
    return found


def _state(pid: int) -> str | None:
    """Return the state of a process, such as psutil.STATUS_STOPPED; None if it has exited."""
    try:
        state = psutil.Process(pid).status()
    except psutil.Error:
        return None
    return None if state in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else state
