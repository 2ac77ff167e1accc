"""Saving in the background: training waits for one copy of the state, and another process writes it.

    begin, collect     as in `shardwise.checkpoint.save`
    snapshot           every rank copies what it has to write into its own shared memory, and locks a file in the draft
    launch             every rank hands its process the locks (where a device still copies, a thread does when it has);
                       nothing is waited for any more, but that the next optimizer step comes behind these copies

From there on the processes agree among themselves (`shardwise.checkpoint.writer`): no collective is needed, so ranks
train on. What has become of it is known to rank 0's process, and through it to rank 0. The ranks exchange that when
they meet anyway: before the next save, when they wait for it, or when the engine is destroyed. There all raise, or
none.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import math
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from shardwise.checkpoint import directory, slow_io
from shardwise.checkpoint.agree import phase
from shardwise.checkpoint.collect import Part, TrainingState, add_shared
from shardwise.checkpoint.protocols import CheckpointedModel
from shardwise.checkpoint.publish import FACTS, FAILURE, LOCK, Whole, beside, stands
from shardwise.checkpoint.save import PendingSave, SaveRequest, drafted, names_of, whole_of
from shardwise.checkpoint.slow_io import Progress
from shardwise.checkpoint.snapshot import Snapshot
from shardwise.checkpoint.writer import LIMIT, NOT_FOR_US, Outcome, WriteJob
from shardwise.comm.communicator import Communicator
from shardwise.device.staging import Copied, is_far
from shardwise.errors import CheckpointError
from shardwise.utils.logging import logger

_PROGRAM = "import sys; sys.path.append(sys.argv[1]); from shardwise.checkpoint.writer import main; main()"
_LEAVE_S = 5.0
"""How long an idle process may take to leave."""
_WHOLE = 1 << 16
"""Bytes that what is known of a checkpoint probably takes; more is found room for."""
_LOOK_S = 1.0
"""How often somebody who waits looks at the process."""


@dataclass
class SaveReport:
    """One asynchronous save, as this rank sees it; seconds and bytes.

    Attributes:
        path: the checkpoint.
        waited: how long the save waited for the one before (back-pressure).
        blocked: how long `save_checkpoint` took, without that.
        size: bytes that this rank writes; 0 until they are written.
        written: how long writing took after that, on rank 0 until the checkpoint was published; None while it goes on.
        error: why it failed, or None.
    """

    path: str
    waited: float = 0.0
    blocked: float = 0.0
    size: int = 0
    written: float | None = None
    error: str | None = None


class _Desk:
    """Where the thread that listens to the process leaves what it has heard."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.job: WriteJob | None = None
        self.report: SaveReport | None = None
        self.outcome: Outcome | None = None
        self.awaited: list[int] = []
        self.signs = 0
        self.told: Callable[[SaveReport], None] | None = None

    def begin(self, job: WriteJob, report: SaveReport) -> None:
        with self.changed:
            self.job, self.report, self.outcome = job, report, None
            self.awaited, self.signs = [], 0

    def awaits(self, ranks: list[int]) -> None:
        """The process has written its part, and has seen that those of other ranks are not complete."""
        with self.changed:
            self.awaited, self.signs = ranks, self.signs + 1

    def end(self, outcome: Outcome) -> None:
        """Take an outcome: log it, and wake whoever waits."""
        with self.changed:
            job, report = self.job, self.report
            if job is None or report is None or outcome.token != job.token:
                return
            report.size, report.written, report.error = outcome.size, outcome.seconds, outcome.error
            self.job, self.outcome = None, outcome
            self.changed.notify_all()
        for note in outcome.notes:
            logger.info("%s", note)
        if outcome.error is not None:
            logger.error(
                "%s: writing it in the background failed on rank %d: %s", report.path, outcome.origin, outcome.error
            )
        elif self.told is not None:
            self.told(report)

    def wait(self, seconds: float) -> bool:
        """Wait until nothing is being written, at most so long; return whether that is so."""
        with self.changed:
            return self.changed.wait_for(lambda: self.job is None, seconds)


def _failed(path: str, rank: int, error: str) -> str:
    return f"{path}: writing this checkpoint in the background failed on rank {rank}: {error}"


class _Process:
    """A process that writes, and the thread that listens to it.

    Neither the thread nor the desk knows the engine, which may therefore be collected while they live.
    """

    def __init__(self, desk: _Desk) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root = str(Path(__file__).absolute().parents[2])
        with theirs:
            command = [sys.executable, "-I", "-S", "-c", _PROGRAM, root, str(theirs.fileno()), str(os.getpid())]
            # The process inherits the mask, so that none of these ends it before it has begun to ignore them.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, NOT_FOR_US)
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    cwd="/",
                )
            except OSError:
                ours.close()
                raise
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._channel = ours
        self._desk = desk
        self._guard = threading.Lock()
        self._job: WriteJob | None = None
        self.knows_memory = False
        self.ended = False
        self._thread = threading.Thread(target=self._listen, name="shardwise-checkpoint", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def launch(self, job: WriteJob, given: Mapping[str, int]) -> None:
        """Hand over a job, with copies of some descriptors by name."""
        message = json.dumps({"job": asdict(job), "descriptors": list(given)}).encode()
        with self._guard:
            self._job = job
        try:
            socket.send_fds(self._channel, [message], list(given.values()))
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has been killed since it was started, which is found out like later deaths
        except OSError as error:
            with self._guard:
                self._job = None
            words = f"the process that writes in the background could not be given its task ({len(message)} bytes): "
            self._desk.end(_abandoned(job, f"{words}{error.strerror} (errno {error.errno})"))
            return
        self.knows_memory = True
        if self.ended:
            self._bereave()

    def _listen(self) -> None:
        while True:
            try:
                data = self._channel.recv(LIMIT)
            except OSError:
                data = b""
            if not data:
                break
            message = json.loads(data)
            if "awaits" in message:
                self._desk.awaits(message["awaits"])
                continue
            with self._guard:
                self._job = None
            self._desk.end(Outcome(**message))
        self._process.wait()
        self.ended = True
        self._bereave()

    def _bereave(self) -> None:
        """It has ended: tell so of the job that it had, if it had one and nobody has told yet."""
        with self._guard:
            job, self._job = self._job, None
        if job is not None:
            self._desk.end(_bereaved(job, self._process.wait()))

    def dismiss(self) -> None:
        """Let it end when it has done what it was given."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)

    def give_up(self) -> None:
        """End it, and count on nothing from it any more: where a disk does not answer, it ends some day."""
        self.ended = True
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)

    def leave(self) -> None:
        """Let it end, and wait for that; it has nothing to do when this is called."""
        self.dismiss()
        self._thread.join(_LEAVE_S)


def _hand_over(
    process: _Process,
    desk: _Desk,
    job: WriteJob,
    locks: Mapping[str, int],
    memory: Mapping[str, int],
    copied: Copied | None,
) -> None:
    """Give a process a job when the snapshot is complete, and close this process's descriptors of the locks."""
    try:
        if copied is not None:
            copied.synchronize()
        process.launch(job, {**locks, **memory})
    except RuntimeError as error:  # of the device
        desk.end(_abandoned(job, f"the state could not be copied: {error}"))
    finally:
        for lock in locks.values():
            os.close(lock)


def _bereaved(job: WriteJob, code: int) -> Outcome:
    """Return the outcome of a save whose process has ended in the middle of it."""
    how = f"was ended by signal {-code} ({_name_of(-code)})" if code < 0 else f"ended with exit code {code}"
    return _abandoned(job, f"the process that writes in the background {how}")


def _abandoned(job: WriteJob, words: str) -> Outcome:
    """Return the outcome of a save that nobody goes on with; `words` say why."""
    if job.rank == 0:
        draft = directory.StagingDirectory.taken_over(job.parent, job.tag, job.token, None)
        if stands(draft):
            words += (
                f" at the very end: {draft.target} is complete, but "
                f"{os.path.join(job.parent, directory.LATEST)} may still name an earlier one, and older ones may still "
                "be there"
            )
        else:
            words += "; earlier checkpoints are unchanged"
            draft.discard()
    elif os.path.exists(job.file(job.rank, FACTS)):
        return Outcome(job.token, size=job.ends[0])  # it had left all that the others need of it
    else:
        # Rank 0's process sees that the lock is gone; where locks do not reach it, it sees this.
        with contextlib.suppress(OSError):
            directory.write_file(job.file(job.rank, FAILURE), words.encode())
    return Outcome(job.token, error=words, origin=job.rank)


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


class _Watch:
    """How long a save has been waited for, and when it was last seen to make progress."""

    def __init__(self) -> None:
        self.began = self.last = time.monotonic()
        self.tell = slow_io.TELL_S
        self._seen: object = None

    def see(self, progress: object, now: float) -> None:
        """Compare what is known of the progress with what was known before."""
        if progress != self._seen:
            self._seen, self.last = progress, now


class Background:
    """What one rank needs to save in the background: shared memory, and a process that writes from it.

    Both are made by the first save. Attributes and methods are local to the rank, unless they say otherwise.

    Args:
        device: where the state lives.
        neighbours: ranks on this machine.
        resized: called with the bytes by which the shared memory grows or shrinks.
        told: called on a thread of its own with the report of each save that has succeeded.
        limit: seconds that a process may show no progress while it is waited for, besides those that writing takes on
            a very slow disk; then it is ended, and the save has failed. Rank 0's waits for those of other ranks, which
            their own ranks watch, so looking at their files is progress.
    """

    def __init__(
        self,
        device: torch.device,
        neighbours: int = 1,
        resized: Callable[[int], None] | None = None,
        told: Callable[[SaveReport], None] | None = None,
        limit: float = math.inf,
    ) -> None:
        self._limit = limit
        self._device = device
        self._neighbours = neighbours
        self._resized = resized
        self._told = told
        self._begin()
        _living.add(self)

    def _begin(self) -> None:
        self._owner = os.getpid()
        self._snapshot = Snapshot(self._device, self._neighbours, self._resized)
        self._desk = _Desk()
        self._desk.told = self._told
        self._process: _Process | None = None
        self._lock: int | None = None
        self._ends: list[int] = []
        self._part = b""
        self._watch: _Watch | None = None
        self.report: SaveReport | None = None
        self.unsettled = False

    @property
    def pending(self) -> bool:
        """Whether something is being written (on rank 0: or not published yet)."""
        return self._desk.job is not None and self._owner == os.getpid()

    @property
    def size(self) -> int:
        """Bytes of shared memory held."""
        return self._snapshot.size

    @property
    def pid(self) -> int | None:
        """Id of the process that writes, or None if there is none."""
        return None if self._process is None or self._process.ended else self._process.pid

    @property
    def copied(self) -> Copied | None:
        """Behind the copies of what only the optimizer writes; None: they have been made."""
        return self._snapshot.copied

    def prepare(self, made: PendingSave, later: Collection[str]) -> None:
        """Take the snapshot, have a process, and lock this rank's file in the draft. Nothing may be pending.

        Args:
            made: what is saved.
            later: tensors that stay as they are until `copied` has been waited for.

        Raises:
            CheckpointError: there is too little memory.
            OSError: the process cannot be started, or the draft is not there.
        """
        if self._process is None or self._process.ended:
            if not sys.executable:
                raise CheckpointError(
                    "asynchronous saves start a Python process, and sys.executable does not say which; set "
                    "checkpoint.async_save to false"
                )
            self._process = _Process(self._desk)  # it starts while the snapshot is taken
            weakref.finalize(self, _Process.dismiss, self._process)
        self._part = json.dumps(made.part.to_json()).encode()
        room = len(self._part) + _WHOLE
        self._ends = [self._snapshot.take(made.part.tensors, later, made.part.bring, room)]
        self._lock = directory.lock_file(os.path.join(made.path, beside(made.part.file, LOCK)))

    def complete(self, whole: Whole | None) -> None:
        """Add what is known of the checkpoint, on rank 0, after `prepare`.

        Raises:
            CheckpointError: there is too little memory.
        """
        known = [] if whole is None else [json.dumps(vars(whole)).encode()]
        self._ends = self._snapshot.add(self._ends[0], [self._part, *known])
        self._part = b""

    def give_up(self) -> None:
        """Undo `prepare`, if another rank has failed in it."""
        self._snapshot.settle()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def launch(self, job: WriteJob, draft: directory.StagingDirectory | None, report: SaveReport) -> None:
        """Hand everything to the process; what becomes of it is known later."""
        assert self._process is not None
        given = {"part": self._lock, "draft": None if draft is None else draft.hand_over()}
        locks = {name: lock for name, lock in given.items() if lock is not None}
        memory = {} if self._process.knows_memory else {"memory": self._snapshot.descriptor}
        self._lock = None
        self.report, self.unsettled, self._watch = report, True, None
        self._desk.begin(job, report)
        hand_over = functools.partial(_hand_over, self._process, self._desk, job, locks, memory, self._snapshot.copied)
        if self._snapshot.copied is None:
            hand_over()
        else:
            # Not by this thread, which trains on, and not by one that keeps the engine alive.
            threading.Thread(target=hand_over, name="shardwise-snapshot", daemon=True).start()

    def job(self, made: PendingSave, request: SaveRequest, rank: int, world: int) -> WriteJob:
        """Return what the process is to do with the snapshot."""
        parent = os.path.abspath(request.directory)  # the process has another working directory
        return WriteJob(rank, world, parent, made.tag, made.token, self._ends, self.size, direct=request.direct)

    @property
    def turn(self) -> float:
        """Seconds after which ranks tell each other that they still wait: less than a collective may take."""
        return min(self._limit / 2, 600.0)

    def wait(self, seconds: float = math.inf) -> Outcome | None:
        """Wait until nothing is being written; return the outcome of the last save, which nobody has settled yet.

        Args:
            seconds: at most so long; then None is returned.
        """
        self.belong()
        if not self.unsettled:
            return None
        self._wait(seconds)
        return self._desk.outcome

    def _wait(self, seconds: float = math.inf) -> None:
        """Wait until nothing is being written: say so when it takes long, and give up when nothing happens."""
        watch = self._watch = self._watch or _Watch()
        until = time.monotonic() + seconds
        while not self._desk.wait(min(_LOOK_S, slow_io.TELL_S)):
            job, process, now = self._desk.job, self._process, time.monotonic()
            if now >= until:
                return
            if job is None or process is None:
                continue
            found = Progress.of(process.pid)
            watch.see((found.written, self._desk.signs), now)
            path = os.path.join(job.parent, job.tag)
            size = f"{job.ends[0] / 1e6:.1f} MB"
            words = f"process {process.pid}, which writes the part of rank {job.rank} ({size}), {found}"
            if self._desk.awaited and not found.stuck:
                words = f"the part of rank {', '.join(map(str, self._desk.awaited))} is not complete"
            if now - watch.began >= watch.tell:
                watch.tell *= 4
                if job.rank == 0 or found.stuck:
                    logger.warning("%s: waiting for %.0f s until it is written: %s", path, now - watch.began, words)
            if now - watch.last >= self._limit + job.ends[0] / slow_io.SLOWEST:
                process.give_up()
                self._desk.end(
                    Outcome(
                        job.token,
                        origin=job.rank,
                        error=f"{words}, and has written nothing for {now - watch.last:.0f} s (the limit follows "
                        "SHARDWISE_TIMEOUT). It is given up",
                    )
                )

    def belong(self) -> None:
        """Begin anew in a process that was forked from the one that made this: memory and process are the parent's."""
        if self._owner != os.getpid():
            self._snapshot.copied = None  # a child cannot wait for the parent's device
            self._snapshot.close()
            self._begin()

    def close(self) -> None:
        """Wait, let the process leave, and give the memory back."""
        self.belong()
        self._wait()
        if self._process is not None:
            self._process.leave()
            self._process = None
        self._snapshot.close()
        _living.discard(self)


_living: weakref.WeakSet[Background] = weakref.WeakSet()


@atexit.register
def _wait_at_exit() -> None:
    """What is being written when the interpreter ends is finished; that an error was logged is all that can be done."""
    for background in list(_living):
        if background.pending and background.report is not None:
            logger.info("%s: waiting until this checkpoint is written", background.report.path)
            with contextlib.suppress(ValueError):  # not on the main thread
                # The launcher asks all ranks to end when one has failed; this one is ending, and is given some seconds.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
        background.close()


def save_in_background(
    model: CheckpointedModel, request: SaveRequest, state: TrainingState, background: Background
) -> SaveReport:
    """Take a snapshot, and let it be written while training goes on; all ranks call this together.

    The one before must have been settled.

    Returns:
        The report, which is completed when it is written.

    Raises:
        CheckpointError: the draft cannot be made, something cannot be saved, or there is too little memory; on all
            ranks alike. Nothing is pending then.
    """
    comm, what = model.comm, request.what
    background.belong()
    with drafted(model, request, state) as made:
        try:
            with phase(comm, what) as taken:
                add_shared(made.part, model, made.told)
                background.prepare(made, _stepped_only(model, made.part))
                taken.said = [platform.node(), made.part.not_finite]
            not_finite = names_of([said[1] for said in taken.heard], request, comm.rank)
            with phase(comm, what):
                whole = whole_of(model, request, not_finite) if comm.rank == 0 else None
                if whole is not None:
                    whole = replace(whole, directory=os.path.abspath(whole.directory))
                background.complete(whole)
        except BaseException:
            background.give_up()
            raise
    job = background.job(made, request, comm.rank, comm.world)
    if comm.rank == 0:
        job = replace(job, unseen=_unseen(job, [said[0] for said in taken.heard]))
    report = SaveReport(os.path.join(request.directory, made.tag))
    background.launch(job, made.draft, report)
    return report


def _stepped_only(model: CheckpointedModel, part: Part) -> set[str]:
    """Return the tensors of a part that only the optimizer writes: none that lies in the script's own parameters.

    It matters where copying goes on while training does.
    """
    if not is_far(model.device):
        return set()
    model.finish_gathers()  # parameters whose values are on their way do not say where they lie
    shown = {parameter.untyped_storage().data_ptr() for parameter in model.registry.parameters}
    return {key for key in part.runs if part.tensors[key].untyped_storage().data_ptr() not in shown}


def _unseen(job: WriteJob, machines: Sequence[str]) -> list[int]:
    """Return the ranks whose locks cannot be seen from here; one rank speaks for its machine."""
    seen: dict[str, bool] = {}
    for rank, machine in enumerate(machines):
        if rank and machine not in seen:
            seen[machine] = directory.is_locked(job.file(rank, LOCK))
    return [rank for rank, machine in enumerate(machines) if rank and not seen[machine]]


def await_all(comm: Communicator, background: Background) -> list[tuple[str | None, int]]:
    """Wait until the save in the background has ended on all ranks; all ranks call this together.

    A save may take longer than a collective may, so ranks that have done their part do not wait in one.

    Returns:
        Of each rank its error, if there is one, and the rank where the error arose.
    """
    while True:
        outcome = background.wait(background.turn)
        heard = comm.exchange(None if outcome is None else [outcome.error, outcome.origin], "checkpoint")
        if None not in heard:
            return [(error, origin) for error, origin in heard]


def settle(comm: Communicator, background: Background) -> float:
    """Wait until the save in the background, if there is one, has ended on all ranks; all ranks call this together.

    Returns:
        Seconds that this rank has waited.

    Raises:
        CheckpointError: it has failed, on all ranks alike. It is told once.
    """
    if not background.unsettled:
        return 0.0
    begun = time.monotonic()
    heard = await_all(comm, background)
    background.unsettled = False
    # Rank 0 has waited for all others, so what it knows is what has become of the checkpoint.
    error, origin = heard[0]
    if error is not None:
        others = [f"rank {rank}: {said[0]}" for rank, said in enumerate(heard) if rank and said[0]]
        error = "; ".join([error, *others])
        path = background.report.path if background.report is not None else "a checkpoint"
        raise CheckpointError(_failed(path, origin, error))
    return time.monotonic() - begun
