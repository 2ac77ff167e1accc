"""The writer process of asynchronous saves. It runs without torch, and starts in 0.1 s.

`shardwise.checkpoint.background` starts it with a socket; every message is one save. Each rank's process writes its own
file and a sidecar file with its part of the manifest. Rank 0's waits for the sidecars of all, and publishes. The
training ranks take no part. Failures, and their detection:

    a file cannot be written     its process writes the reason in place of the sidecar
    a process is killed          rank 0's finds its lock free, and neither sidecar nor reason; where locks do not reach
                                 other machines, heartbeats stop
    rank 0's process is killed   nothing is published; the staging directory is unlocked, and the next save removes it
    the rank is killed           its process sees another parent, and exits at once
    the directory vanishes       the next file cannot be created in it; rank 0's process cannot list it
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from shardwise.checkpoint import directory
from shardwise.checkpoint.checksums import in_words, write_bytes
from shardwise.checkpoint.publish import (
    FACTS,
    FAILURE,
    LOCK,
    CheckpointHeader,
    file_name,
    publish,
    sidecar_path,
    unwritable,
)
from shardwise.errors import CheckpointError

LIMIT = 1 << 17
"""Bytes of one message."""

_MOST_WORDS = 8000
"""Maximum characters of a failure's text, because paths may be long."""

_MOST_NOTES, _MOST_NOTED = 10, 1000
"""Maximum number of notes on older checkpoints, and characters of each."""

SILENCE_S = 180.0
"""Seconds without a heartbeat before an invisible process counts as dead. Shared file systems may be a minute late."""

_BEAT_S = 5.0
_PARENT_S = 0.1
_POLL_S, _LONGEST_POLL_S = 0.02, 1.0
_NOTIFY_S = 1.0
_NICENESS = 5
NOT_FOR_US = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals for a group or session, which are meant for the rank; the rank waits for the save."""


@dataclass(frozen=True)
class WriteJob:
    """One save, for the process of one rank, in the `StagingDirectory` of `parent`, `tag` and `token`.

    Attributes:
        ends: offsets in the shared memory: end of this rank's file, of its part as JSON, on rank 0 of the header as
            JSON.
        memory: bytes of the shared memory.
        unseen: ranks with locks that rank 0 does not see.
        direct: write past the page cache if the file system supports it.
    """

    rank: int
    world: int
    parent: str
    tag: str
    token: str
    ends: Sequence[int]
    memory: int
    unseen: Sequence[int] = ()
    direct: bool = False

    @property
    def path(self) -> str:
        """The staging directory."""
        return directory.StagingDirectory.taken_over(self.parent, self.tag, self.token, None).path

    def file(self, rank: int, ending: str) -> str:
        """Return the path of a rank's file in the staging directory."""
        return os.path.join(self.path, sidecar_path(file_name(rank, self.world, self.token), ending))


@dataclass
class Outcome:
    """Outcome of the save of a job's token. `error` is the reason of the failure on rank `origin`; None: this rank's
    part is written, and on rank 0 the checkpoint is published. `notes` are on older checkpoints. `size` is in bytes of
    this rank's file, `seconds` count from the snapshot.
    """

    token: str
    error: str | None = None
    origin: int = 0
    notes: list[str] = field(default_factory=list)
    size: int = 0
    seconds: float = 0.0


def perform(
    job: WriteJob,
    memory: memoryview,
    part_lock: int | None,
    draft_lock: int | None,
    watchdog: ParentWatchdog,
    on_waiting: Callable[[list[int]], object] = lambda ranks: None,
) -> Outcome:
    """Write this rank's part, and on rank 0 publish when all ranks have written theirs.

    `part_lock` is the descriptor of this rank's lock, closed as soon as its part is written or has failed;
    `draft_lock`, on rank 0, that of the staging directory's. `watchdog` sends heartbeats. `on_waiting` gets the ranks
    of missing parts about every second.
    """
    begun = time.monotonic()
    outcome = Outcome(job.token, origin=job.rank, size=job.ends[0])
    watchdog.beat_on(job.file(job.rank, LOCK))
    try:
        _write_part(job, memory)
    except Exception as error:
        outcome.error = _words(error)
        _leave_failure(job, outcome.error)
    finally:
        watchdog.beat_on(None)
        if part_lock is not None:
            os.close(part_lock)
    if job.rank == 0:
        draft = directory.StagingDirectory.taken_over(job.parent, job.tag, job.token, draft_lock)
        try:
            failed = _await_parts(job, on_waiting)
            if outcome.error is None and failed is not None:
                outcome.origin, outcome.error = failed
            if outcome.error is None:
                notes = publish(draft, CheckpointHeader(**json.loads(bytes(memory[job.ends[1] : job.ends[2]]))))
                outcome.notes = [note[:_MOST_NOTED] for note in notes[:_MOST_NOTES]]
        except Exception as error:
            outcome.error = _words(error)
        finally:
            draft.discard()  # already published
    outcome.seconds = time.monotonic() - begun
    return outcome


def _write_part(job: WriteJob, memory: memoryview) -> None:
    file = file_name(job.rank, job.world, job.token)
    try:
        facts = write_bytes(os.path.join(job.path, file), memory[: job.ends[0]], direct=job.direct)
        # Appended to the JSON text of the part, because parsing a large one is slow.
        known = json.dumps({"facts": [facts.size, list(facts.checksums)]}).encode()
        _leave(job.file(job.rank, FACTS), known[:-1] + b"," + bytes(memory[job.ends[0] + 1 : job.ends[1]]))
    except OSError as error:
        raise unwritable(error, job.path, file, job.ends[0]) from error


def _leave(path: str, text: bytes) -> None:
    directory.write_file(f"{path}.new", text)
    os.rename(f"{path}.new", path)


def _leave_failure(job: WriteJob, words: str) -> None:
    path = job.file(job.rank, FAILURE)
    try:
        _leave(path, words.encode())
    except OSError:
        # On a full disk there may still be room for a name. If not, the free lock shows the failure.
        with contextlib.suppress(OSError), open(path, "xb"):
            pass


def _await_parts(
    job: WriteJob, on_waiting: Callable[[list[int]], object] = lambda ranks: None
) -> tuple[int, str] | None:
    waiting = set(range(1, job.world))
    failed: tuple[int, str] | None = None
    signs: dict[int, tuple[int, float]] = {}
    last, waited = time.monotonic(), False
    while waiting:
        try:
            names = set(os.listdir(job.path))
        except FileNotFoundError:
            return 0, f"{job.path}: has been removed while it was being written; earlier checkpoints are unchanged"
        for rank in sorted(waiting):
            failure = None
            if os.path.basename(job.file(rank, FACTS)) in names:
                waiting.discard(rank)
            elif os.path.basename(job.file(rank, FAILURE)) in names:
                with open(job.file(rank, FAILURE), encoding="utf-8", errors="replace") as file:
                    failure = file.read(_MOST_WORDS) or "its part could not be written, nor could the reason"
            elif rank in job.unseen:
                failure = _silence(job, rank, signs)
            elif not directory.is_locked(job.file(rank, LOCK)) and not _has_left_something(job, rank):
                failure = "the process that wrote its part has ended without finishing it (was it killed?)"
            if failure is not None:
                waiting.discard(rank)
                failed = failed or (rank, failure)
        if waiting and time.monotonic() - last >= _NOTIFY_S:
            last = time.monotonic()
            on_waiting(sorted(waiting)[:_MOST_NOTES])
            waited = True
        if waiting:  # many are checked less often, because each check is a few calls of the file system
            time.sleep(min(_LONGEST_POLL_S, _POLL_S * len(waiting)))
    if waited:
        on_waiting([])
    return failed


def _has_left_something(job: WriteJob, rank: int) -> bool:
    """Return True if a rank has finished between the looks at the directory and at its lock."""
    return any(os.path.exists(job.file(rank, ending)) for ending in (FACTS, FAILURE))


def _silence(job: WriteJob, rank: int, signs: dict[int, tuple[int, float]]) -> str | None:
    with contextlib.suppress(FileNotFoundError):
        seen = os.stat(job.file(rank, LOCK)).st_mtime_ns
        if signs.get(rank, (None, 0.0))[0] != seen:
            signs[rank] = seen, time.monotonic()
    _, when = signs.setdefault(rank, (0, time.monotonic()))
    if time.monotonic() - when < SILENCE_S:
        return None
    return f"the process that wrote its part has given no sign of life for {SILENCE_S:.0f} s (has its machine gone?)"


def _words(error: BaseException) -> str:
    if not isinstance(error, (OSError, CheckpointError)):
        traceback.print_exception(error)
    return in_words(error)[:_MOST_WORDS]


class ParentWatchdog(threading.Thread):
    """Ends this process after its parent, and sends heartbeats while this process writes.

    The parent is polled, because the kernel's signal (PR_SET_PDEATHSIG) would come at the exit of the starting thread,
    and a socket stays open while another child of the parent has inherited it.
    """

    def __init__(self, parent: int) -> None:
        super().__init__(name="shardwise-parent-watchdog", daemon=True)
        self._parent = parent
        self._path: str | None = None

    def beat_on(self, path: str | None) -> None:
        """Touch a file from time to time; None: stop."""
        self._path = path

    def run(self) -> None:
        """Watch until the process ends."""
        last = 0.0
        while os.getppid() == self._parent:
            path = self._path
            if path is not None and time.monotonic() - last > _BEAT_S:
                last = time.monotonic()
                with contextlib.suppress(OSError):
                    os.utime(path)
            time.sleep(_PARENT_S)
        os._exit(1)


def serve(channel: socket.socket, watchdog: ParentWatchdog) -> None:
    """Run one job after the other until the other end closes the socket."""
    memory: mmap.mmap | None = None
    held = -1
    while True:
        data, descriptors, _, _ = socket.recv_fds(channel, LIMIT, 3)
        if not data:
            return
        message = json.loads(data)
        given = dict(zip(message["descriptors"], descriptors, strict=True))
        job = WriteJob(**message["job"])
        if "memory" in given:
            held = given["memory"]
        if "memory" in given or memory is None or len(memory) != job.memory:
            memory = mmap.mmap(held, job.memory, access=mmap.ACCESS_READ)

        def on_waiting(ranks: list[int]) -> None:
            channel.send(json.dumps({"awaits": ranks}).encode())

        with memoryview(memory) as view:
            outcome = perform(job, view, given.get("part"), given.get("draft"), watchdog, on_waiting)
        channel.send(json.dumps(asdict(outcome)).encode())


def main() -> None:
    """Run as a process: arguments are the descriptor of the socket and the parent's process id."""
    descriptor, parent = int(sys.argv[2]), int(sys.argv[3])
    for number in NOT_FOR_US:
        signal.signal(number, signal.SIG_IGN)
    watchdog = ParentWatchdog(parent)
    watchdog.start()
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    with socket.socket(fileno=descriptor) as channel, contextlib.suppress(ConnectionError):
        serve(channel, watchdog)
