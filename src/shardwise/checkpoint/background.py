"""Asynchronous saves: training waits for a snapshot of the state, and a writer process writes it.

Every rank copies its part into shared memory, locks a file in the staging directory, and passes the lock to its writer
process: by a thread if the device still copies, and only the next optimizer step waits for these copies. Then the
writer processes coordinate (`shardwise.checkpoint.writer`), and ranks train on without a collective. Rank 0's writer
reports the outcome to rank 0. Ranks exchange it, and all or none raise, in their next common step: before the next
save, when they wait for this one, or when the engine is destroyed.
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
from shardwise.checkpoint.agree import collective_step
from shardwise.checkpoint.collect import RankSavePlan, TrainingState, add_replicated
from shardwise.checkpoint.protocols import CheckpointedModel
from shardwise.checkpoint.publish import FACTS, FAILURE, LOCK, CheckpointHeader, is_published, sidecar_path
from shardwise.checkpoint.save import PendingSave, SaveRequest, header_of, names_of, staged
from shardwise.checkpoint.slow_io import Progress
from shardwise.checkpoint.snapshot import Snapshot
from shardwise.checkpoint.writer import LIMIT, NOT_FOR_US, Outcome, WriteJob
from shardwise.comm.communicator import Communicator
from shardwise.device.staging import Copied, is_far
from shardwise.errors import CheckpointError
from shardwise.utils.logging import logger

_PROGRAM = "import sys; sys.path.append(sys.argv[1]); from shardwise.checkpoint.writer import main; main()"
_LEAVE_S = 5.0
"""Timeout in seconds for the exit of an idle process."""
_WHOLE = 1 << 16
"""Estimated bytes of the header of a checkpoint; a larger one is allocated as needed."""
_LOOK_S = 1.0
"""Seconds between looks at the process while waiting."""


@dataclass
class SaveReport:
    """One asynchronous save on this rank, in seconds and bytes. The caller `waited` for the previous save
    (back-pressure), then was `blocked` in `save_checkpoint`. `size` is 0 until written. `written` is the time of
    writing after that, on rank 0 until publication; None before its end. `error` is the reason of a failure, or None.
    """

    path: str
    waited: float = 0.0
    blocked: float = 0.0
    size: int = 0
    written: float | None = None
    error: str | None = None


class _SaveStatus:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.job: WriteJob | None = None
        self.report: SaveReport | None = None
        self.outcome: Outcome | None = None
        self.awaited: list[int] = []
        self.signs = 0
        self.on_saved: Callable[[SaveReport], None] | None = None

    def begin(self, job: WriteJob, report: SaveReport) -> None:
        with self.changed:
            self.job, self.report, self.outcome = job, report, None
            self.awaited, self.signs = [], 0

    def awaits(self, ranks: list[int]) -> None:
        with self.changed:
            self.awaited, self.signs = ranks, self.signs + 1

    def end(self, outcome: Outcome) -> None:
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
        elif self.on_saved is not None:
            self.on_saved(report)

    def wait(self, seconds: float) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: self.job is None, seconds)


def _failed(path: str, rank: int, error: str) -> str:
    return f"{path}: writing this checkpoint in the background failed on rank {rank}: {error}"


class _Process:
    """A writer process and its listening thread; neither keeps the engine alive."""

    def __init__(self, status: _SaveStatus) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root = str(Path(__file__).absolute().parents[2])
        with theirs:
            command = [sys.executable, "-I", "-S", "-c", _PROGRAM, root, str(theirs.fileno()), str(os.getpid())]
            # The process inherits the mask, and no signal ends it before it ignores signals.
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
        self._status = status
        self._guard = threading.Lock()
        self._job: WriteJob | None = None
        self.knows_memory = False
        self.ended = False
        self._thread = threading.Thread(target=self._listen, name="shardwise-checkpoint", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def launch(self, job: WriteJob, given: Mapping[str, int]) -> None:
        message = json.dumps({"job": asdict(job), "descriptors": list(given)}).encode()
        with self._guard:
            self._job = job
        try:
            socket.send_fds(self._channel, [message], list(given.values()))
        except (BrokenPipeError, ConnectionResetError):
            pass  # killed since its start; handled as any exit
        except OSError as error:
            with self._guard:
                self._job = None
            words = f"the process that writes in the background could not be given its task ({len(message)} bytes): "
            self._status.end(_aborted(job, f"{words}{error.strerror} (errno {error.errno})"))
            return
        self.knows_memory = True
        if self.ended:
            self._on_writer_exit()

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
                self._status.awaits(message["awaits"])
                continue
            with self._guard:
                self._job = None
            self._status.end(Outcome(**message))
        self._process.wait()
        self.ended = True
        self._on_writer_exit()

    def _on_writer_exit(self) -> None:
        with self._guard:
            job, self._job = self._job, None
        if job is not None:
            self._status.end(_writer_died(job, self._process.wait()))

    def dismiss(self) -> None:
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)

    def give_up(self) -> None:
        """Kill the process and forget it; a process that waits for a disk exits later."""
        self.ended = True
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)

    def leave(self) -> None:
        self.dismiss()
        self._thread.join(_LEAVE_S)


def _hand_over(
    process: _Process,
    status: _SaveStatus,
    job: WriteJob,
    locks: Mapping[str, int],
    memory: Mapping[str, int],
    copied: Copied | None,
) -> None:
    """Send a job after the snapshot is complete, and close this process's descriptors of the locks."""
    try:
        if copied is not None:
            copied.synchronize()
        process.launch(job, {**locks, **memory})
    except RuntimeError as error:  # of the device
        status.end(_aborted(job, f"the state could not be copied: {error}"))
    finally:
        for lock in locks.values():
            os.close(lock)


def _writer_died(job: WriteJob, code: int) -> Outcome:
    how = f"was ended by signal {-code} ({_name_of(-code)})" if code < 0 else f"ended with exit code {code}"
    return _aborted(job, f"the process that writes in the background {how}")


def _aborted(job: WriteJob, words: str) -> Outcome:
    if job.rank == 0:
        draft = directory.StagingDirectory.taken_over(job.parent, job.tag, job.token, None)
        if is_published(draft):
            words += (
                f" at the very end: {draft.target} is complete, but "
                f"{os.path.join(job.parent, directory.LATEST)} may still name an earlier one, and older ones may still "
                "be there"
            )
        else:
            words += "; earlier checkpoints are unchanged"
            draft.discard()
    elif os.path.exists(job.file(job.rank, FACTS)):
        return Outcome(job.token, size=job.ends[0])  # its part is complete for the other ranks
    else:
        # Rank 0's process sees the free lock, or this outcome where locks do not reach it.
        with contextlib.suppress(OSError):
            directory.write_file(job.file(job.rank, FAILURE), words.encode())
    return Outcome(job.token, error=words, origin=job.rank)


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


class _ProgressWatch:
    def __init__(self) -> None:
        self.began = self.last = time.monotonic()
        self.next_warning = slow_io.WARN_AFTER_S
        self._seen: object = None

    def see(self, progress: object, now: float) -> None:
        if progress != self._seen:
            self._seen, self.last = progress, now


class Background:
    """Asynchronous saves of one rank: shared memory and a writer process, which the first save creates.

    Methods are local to the rank unless their docstring says "collective". `local_ranks` are on this machine. `resized`
    is called with the change of the shared memory in bytes, `on_saved` on a separate thread with the report of each
    successful save. `limit` counts seconds without progress, plus the time of writing on a very slow disk, before the
    process is killed and the save fails. On rank 0 looking at other ranks' files is progress, because their own ranks
    watch the writers.
    """

    def __init__(
        self,
        device: torch.device,
        local_ranks: int = 1,
        resized: Callable[[int], None] | None = None,
        on_saved: Callable[[SaveReport], None] | None = None,
        limit: float = math.inf,
    ) -> None:
        self._limit = limit
        self._device = device
        self._local_ranks = local_ranks
        self._resized = resized
        self._on_saved = on_saved
        self._begin()
        _living.add(self)

    def _begin(self) -> None:
        self._owner = os.getpid()
        self._snapshot = Snapshot(self._device, self._local_ranks, self._resized)
        self._status = _SaveStatus()
        self._status.on_saved = self._on_saved
        self._process: _Process | None = None
        self._lock: int | None = None
        self._ends: list[int] = []
        self._part = b""
        self._watch: _ProgressWatch | None = None
        self.report: SaveReport | None = None
        self.unsettled = False

    @property
    def pending(self) -> bool:
        """Whether a save is being written, or on rank 0 not published yet."""
        return self._status.job is not None and self._owner == os.getpid()

    @property
    def size(self) -> int:
        """Bytes of shared memory."""
        return self._snapshot.size

    @property
    def pid(self) -> int | None:
        """Id of the living writer process, or None."""
        return None if self._process is None or self._process.ended else self._process.pid

    @property
    def copied(self) -> Copied | None:
        """Event after the copies of state that only the optimizer writes; None: they are complete."""
        return self._snapshot.copied

    def prepare(self, made: PendingSave, later: Collection[str]) -> None:
        """Take the snapshot, start a process, and lock this rank's file in the staging directory. No save may be
        pending. `later` names tensors that do not change before a wait for `copied`.
        """
        if self._process is None or self._process.ended:
            if not sys.executable:
                raise CheckpointError(
                    "asynchronous saves start a Python process, and sys.executable is empty; set "
                    "checkpoint.async_save to false"
                )
            self._process = _Process(self._status)  # it starts during the snapshot
            weakref.finalize(self, _Process.dismiss, self._process)
        self._part = json.dumps(made.part.to_json()).encode()
        room = len(self._part) + _WHOLE
        self._ends = [self._snapshot.take(made.part.tensors, later, made.part.fetch, room)]
        self._lock = directory.lock_file(os.path.join(made.path, sidecar_path(made.part.file, LOCK)))

    def complete(self, header: CheckpointHeader | None) -> None:
        """Add the checkpoint's header (rank 0) after `prepare`. Raises CheckpointError without enough memory."""
        known = [] if header is None else [json.dumps(vars(header)).encode()]
        self._ends = self._snapshot.add(self._ends[0], [self._part, *known])
        self._part = b""

    def give_up(self) -> None:
        """Undo `prepare`, after another rank has failed in it."""
        self._snapshot.settle()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def launch(self, job: WriteJob, draft: directory.StagingDirectory | None, report: SaveReport) -> None:
        """Send the job to the process; its outcome arrives later."""
        assert self._process is not None
        given = {"part": self._lock, "draft": None if draft is None else draft.hand_over()}
        locks = {name: lock for name, lock in given.items() if lock is not None}
        memory = {} if self._process.knows_memory else {"memory": self._snapshot.descriptor}
        self._lock = None
        self.report, self.unsettled, self._watch = report, True, None
        self._status.begin(job, report)
        hand_over = functools.partial(
            _hand_over, self._process, self._status, job, locks, memory, self._snapshot.copied
        )
        if self._snapshot.copied is None:
            hand_over()
        else:
            # The thread does not keep the engine alive.
            threading.Thread(target=hand_over, name="shardwise-snapshot", daemon=True).start()

    def job(self, made: PendingSave, request: SaveRequest, rank: int, world: int) -> WriteJob:
        """Return the process's job for the snapshot."""
        parent = os.path.abspath(request.directory)  # the process has another working directory
        return WriteJob(rank, world, parent, made.tag, made.token, self._ends, self.size, direct=request.direct)

    @property
    def turn(self) -> float:
        """Seconds between the exchanges of waiting ranks: less than the timeout of a collective."""
        return min(self._limit / 2, 600.0)

    def wait(self, seconds: float = math.inf) -> Outcome | None:
        """Wait until nothing is written; return the unsettled outcome of the last save, or None."""
        self.reset_after_fork()
        if not self.unsettled:
            return None
        self._wait(seconds)
        return self._status.outcome

    def _wait(self, seconds: float = math.inf) -> None:
        """Wait until nothing is written; warn if that takes long, and kill a process without progress."""
        watch = self._watch = self._watch or _ProgressWatch()
        until = time.monotonic() + seconds
        while not self._status.wait(min(_LOOK_S, slow_io.WARN_AFTER_S)):
            job, process, now = self._status.job, self._process, time.monotonic()
            if now >= until:
                return
            if job is None or process is None:
                continue
            found = Progress.of(process.pid)
            watch.see((found.written, self._status.signs), now)
            path = os.path.join(job.parent, job.tag)
            size = f"{job.ends[0] / 1e6:.1f} MB"
            words = f"process {process.pid}, which writes the part of rank {job.rank} ({size}), {found}"
            if self._status.awaited and not found.stuck:
                words = f"the part of rank {', '.join(map(str, self._status.awaited))} is not complete"
            if now - watch.began >= watch.next_warning:
                watch.next_warning *= 4
                if job.rank == 0 or found.stuck:
                    logger.warning("%s: waiting for %.0f s until it is written: %s", path, now - watch.began, words)
            if now - watch.last >= self._limit + job.ends[0] / slow_io.SLOWEST:
                process.give_up()
                self._status.end(
                    Outcome(
                        job.token,
                        origin=job.rank,
                        error=f"{words}, and has written nothing for {now - watch.last:.0f} s (the limit follows "
                        "SHARDWISE_TIMEOUT). It is given up",
                    )
                )

    def reset_after_fork(self) -> None:
        """Reset in a forked child, because memory and process belong to the parent."""
        if self._owner != os.getpid():
            self._snapshot.copied = None  # a child cannot wait for the parent's device
            self._snapshot.close()
            self._begin()

    def close(self) -> None:
        """Wait, let the process exit, and free the memory."""
        self.reset_after_fork()
        self._wait()
        if self._process is not None:
            self._process.leave()
            self._process = None
        self._snapshot.close()
        _living.discard(self)


_living: weakref.WeakSet[Background] = weakref.WeakSet()


@atexit.register
def _wait_at_exit() -> None:
    for background in list(_living):
        if background.pending and background.report is not None:
            logger.info("%s: waiting until this checkpoint is written", background.report.path)
            with contextlib.suppress(ValueError):  # not on the main thread
                # The launcher terminates all ranks after a failure, with a grace period; this one is exiting already.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
        background.close()


def save_in_background(
    model: CheckpointedModel, request: SaveRequest, state: TrainingState, background: Background
) -> SaveReport:
    """Take a snapshot and write it during training; return the report, which is completed later. A collective.

    The previous save must be settled. Raises CheckpointError on all ranks, without a pending save, if the staging
    directory cannot be made, a value cannot be saved, or memory is too small.
    """
    comm, what = model.comm, request.what
    background.reset_after_fork()
    with staged(model, request, state) as made:
        try:
            with collective_step(comm, what) as taken:
                add_replicated(made.part, model, made.inventories)
                background.prepare(made, _stepped_only(model, made.part))
                taken.local = [platform.node(), made.part.not_finite]
            not_finite = names_of([entry[1] for entry in taken.gathered], request, comm.rank)
            with collective_step(comm, what):
                header = header_of(model, request, not_finite) if comm.rank == 0 else None
                if header is not None:
                    header = replace(header, directory=os.path.abspath(header.directory))
                background.complete(header)
        except BaseException:
            background.give_up()
            raise
    job = background.job(made, request, comm.rank, comm.world)
    if comm.rank == 0:
        job = replace(job, unseen=_unseen(job, [entry[0] for entry in taken.gathered]))
    report = SaveReport(os.path.join(request.directory, made.tag))
    background.launch(job, made.draft, report)
    return report


def _stepped_only(model: CheckpointedModel, part: RankSavePlan) -> set[str]:
    """Return the tensors that only the optimizer writes: training continues while they are copied."""
    if not is_far(model.device):
        return set()
    model.finish_gathers()  # because a pending all-gather changes where parameters lie
    shown = {parameter.untyped_storage().data_ptr() for parameter in model.registry.parameters}
    return {key for key in part.runs if part.tensors[key].untyped_storage().data_ptr() not in shown}


def _unseen(job: WriteJob, machines: Sequence[str]) -> list[int]:
    """Return the ranks with locks that cannot be seen from here; one rank represents its machine."""
    seen: dict[str, bool] = {}
    for rank, machine in enumerate(machines):
        if rank and machine not in seen:
            seen[machine] = directory.is_locked(job.file(rank, LOCK))
    return [rank for rank, machine in enumerate(machines) if rank and not seen[machine]]


def await_all(comm: Communicator, background: Background) -> list[tuple[str | None, int]]:
    """Wait for the end of the save on all ranks, in turns shorter than a collective's timeout; return the outcomes."""
    while True:
        outcome = background.wait(background.turn)
        outcomes = comm.exchange(None if outcome is None else [outcome.error, outcome.origin], "checkpoint")
        if None not in outcomes:
            return [(error, origin) for error, origin in outcomes]


def settle(comm: Communicator, background: Background) -> float:
    """Wait for the end of a pending save; return the seconds. A collective. Raises CheckpointError once if it fails."""
    if not background.unsettled:
        return 0.0
    begun = time.monotonic()
    outcomes = await_all(comm, background)
    background.unsettled = False
    # Rank 0 has waited for all others.
    error, origin = outcomes[0]
    if error is not None:
        others = [f"rank {rank}: {entry[0]}" for rank, entry in enumerate(outcomes) if rank and entry[0]]
        error = "; ".join([error, *others])
        path = background.report.path if background.report is not None else "a checkpoint"
        raise CheckpointError(_failed(path, origin, error))
    return time.monotonic() - begun
