"""The process that writes a rank's checkpoints while training goes on. It runs without torch, and starts in 0.1 s.

Started by `shardwise.checkpoint.background` with a socket. Every message is one save: where to write, and where in the
shared memory the bytes are. Each rank's process writes its own file and then a small one with the facts about it; rank
0's waits for the facts of all, and publishes. So nobody needs the ranks themselves, which are busy training.

What may go wrong, and who notices:

    a file cannot be written     its process leaves a file that says so, instead of the facts
    a process is killed          it holds the lock of a file until it has left one of the two; rank 0's tries that lock.
                                 Where locks do not reach other machines, a sign of life every few seconds is missed
    rank 0's process is killed   nothing is published; the lock of the draft is gone, so the next save removes it
    the rank is killed           its process sees that it has another parent now, and ends at once
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
from shardwise.checkpoint.publish import FACTS, FAILURE, LOCK, Whole, beside, file_name, publish, unwritable
from shardwise.errors import CheckpointError

LIMIT = 1 << 17
"""Bytes of one message."""

_MOST_WORDS = 8000
"""Characters of a failure that are passed on; paths may be long, a message must not be."""

_MOST_NOTES, _MOST_NOTED = 10, 1000
"""Notes on older checkpoints, and characters of each."""

SILENCE_S = 180.0
"""How long a process that cannot be seen by its lock may give no sign of life. File systems that machines share may
show a change of another machine a minute late."""

_BEAT_S = 5.0
_PARENT_S = 0.1
_POLL_S, _LONGEST_POLL_S = 0.02, 1.0
_TELL_S = 1.0
_NICENESS = 5
NOT_FOR_US = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that are sent to a whole group or session and mean the rank, which then waits for what is being written."""


@dataclass(frozen=True)
class WriteJob:
    """One save, for the process of one rank.

    Attributes:
        rank: the rank.
        world: number of ranks that write.
        parent, tag, token: they name the draft; see `shardwise.checkpoint.directory.StagingDirectory`.
        ends: in the shared memory: of this rank's file, with which it begins; of its part as JSON; on rank 0 of what is
            known of the whole as JSON.
        memory: bytes of the shared memory.
        unseen: ranks whose locks rank 0 does not see.
        direct: write past the page cache where the file system can do that.
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
        """Directory of the draft."""
        return directory.StagingDirectory.taken_over(self.parent, self.tag, self.token, None).path

    def file(self, rank: int, ending: str) -> str:
        """Return the path of a file that a rank leaves in the draft."""
        return os.path.join(self.path, beside(file_name(rank, self.world, self.token), ending))


@dataclass
class Outcome:
    """What has become of one save.

    Attributes:
        token: which one.
        error: why it failed; None: this rank's part is written, and on rank 0 the checkpoint stands.
        origin: the rank where it failed.
        notes: what there is to tell about older checkpoints.
        size: bytes of this rank's file.
        seconds: from the snapshot until this was known.
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
    life: Life,
    await_told: Callable[[list[int]], object] = lambda ranks: None,
) -> Outcome:
    """Write this rank's part, and on rank 0 publish when all have done so.

    Args:
        job: what to do.
        memory: the shared memory.
        part_lock: descriptor of this rank's lock; closed as soon as its part is written or has failed.
        draft_lock: rank 0: descriptor of the draft's lock.
        life: gives signs of life.
        await_told: called about every second with ranks whose parts are waited for.
    """
    begun = time.monotonic()
    outcome = Outcome(job.token, origin=job.rank, size=job.ends[0])
    life.beat_on(job.file(job.rank, LOCK))
    try:
        _write_part(job, memory)
    except Exception as error:
        outcome.error = _words(error)
        _leave_failure(job, outcome.error)
    finally:
        life.beat_on(None)
        if part_lock is not None:
            os.close(part_lock)
    if job.rank == 0:
        draft = directory.StagingDirectory.taken_over(job.parent, job.tag, job.token, draft_lock)
        try:
            failed = _await_parts(job, await_told)
            if outcome.error is None and failed is not None:
                outcome.origin, outcome.error = failed
            if outcome.error is None:
                notes = publish(draft, Whole(**json.loads(bytes(memory[job.ends[1] : job.ends[2]]))))
                outcome.notes = [note[:_MOST_NOTED] for note in notes[:_MOST_NOTES]]
        except Exception as error:
            outcome.error = _words(error)
        finally:
            draft.discard()  # what is published is no draft any more
    outcome.seconds = time.monotonic() - begun
    return outcome


def _write_part(job: WriteJob, memory: memoryview) -> None:
    file = file_name(job.rank, job.world, job.token)
    try:
        facts = write_bytes(os.path.join(job.path, file), memory[: job.ends[0]], direct=job.direct)
        # One more entry in the JSON object of the part, which may be large and need not be parsed for it.
        known = json.dumps({"facts": [facts.size, list(facts.checksums)]}).encode()
        _leave(job.file(job.rank, FACTS), known[:-1] + b"," + bytes(memory[job.ends[0] + 1 : job.ends[1]]))
    except OSError as error:
        raise unwritable(error, job.path, file, job.ends[0]) from error


def _leave(path: str, text: bytes) -> None:
    """Let a file appear, whole."""
    directory.write_file(f"{path}.new", text)
    os.rename(f"{path}.new", path)


def _leave_failure(job: WriteJob, words: str) -> None:
    path = job.file(job.rank, FAILURE)
    try:
        _leave(path, words.encode())
    except OSError:
        # On a full disk there may still be room for a name. If not, the lock that is given up says it.
        with contextlib.suppress(OSError), open(path, "xb"):
            pass


def _await_parts(
    job: WriteJob, await_told: Callable[[list[int]], object] = lambda ranks: None
) -> tuple[int, str] | None:
    """Wait until every other rank's process has done its part; return the first failure: rank and words."""
    waiting = set(range(1, job.world))
    failed: tuple[int, str] | None = None
    signs: dict[int, tuple[int, float]] = {}
    last, told = time.monotonic(), False
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
        if waiting and time.monotonic() - last >= _TELL_S:
            last = time.monotonic()
            await_told(sorted(waiting)[:_MOST_NOTES])
            told = True
        if waiting:  # many are asked less often: each costs the file system a few calls
            time.sleep(min(_LONGEST_POLL_S, _POLL_S * len(waiting)))
    if told:
        await_told([])
    return failed


def _has_left_something(job: WriteJob, rank: int) -> bool:
    """Whether a rank has ended its part between the look at the directory and the look at its lock."""
    return any(os.path.exists(job.file(rank, ending)) for ending in (FACTS, FAILURE))


def _silence(job: WriteJob, rank: int, signs: dict[int, tuple[int, float]]) -> str | None:
    """Return why a process that cannot be seen by its lock is given up, or None if it is not."""
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


class Life(threading.Thread):
    """Ends this process when its parent has gone, and gives signs of life while it writes.

    The parent is asked for rather than waited for: a signal of the kernel (PR_SET_PDEATHSIG) would come when the thread
    ends that has started this process, and the end of a socket not as long as a child of the parent has inherited it.
    """

    def __init__(self, parent: int) -> None:
        super().__init__(name="shardwise-life", daemon=True)
        self._parent = parent
        self._path: str | None = None

    def beat_on(self, path: str | None) -> None:
        """Touch a file from time to time; None: no more."""
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


def serve(channel: socket.socket, life: Life) -> None:
    """Do one job after the other until the socket is closed at the other end."""
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

        def await_told(ranks: list[int]) -> None:
            channel.send(json.dumps({"awaits": ranks}).encode())

        with memoryview(memory) as view:
            outcome = perform(job, view, given.get("part"), given.get("draft"), life, await_told)
        channel.send(json.dumps(asdict(outcome)).encode())


def main() -> None:
    """Run as a process: arguments are the descriptor of the socket and the parent's process id."""
    descriptor, parent = int(sys.argv[2]), int(sys.argv[3])
    for number in NOT_FOR_US:
        signal.signal(number, signal.SIG_IGN)
    life = Life(parent)
    life.start()
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    with socket.socket(fileno=descriptor) as channel, contextlib.suppress(ConnectionError):
        serve(channel, life)
