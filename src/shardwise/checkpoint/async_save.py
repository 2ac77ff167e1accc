"""Asynchronous saves: training waits for a snapshot of the state, and a thread writes it.

Every rank copies its part into host memory; if the device still copies, only the next optimizer step waits for it. Then
a thread of each rank writes its files and reports to rank 0 through the job's store. Rank 0's thread waits for all
reports, and publishes. Ranks train on without a collective. They exchange the outcome, and all or none raise, in their
next common step: before the next save, when they wait for this one, or when the engine is destroyed.

If a rank is killed, its report does not come, and nothing is published. If rank 0 is killed, its staging directory is
unlocked, and the next save removes it. A disk that hangs is given up after a limit.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch

from shardwise.checkpoint.agree import SLOWEST, collective_step, warn_if_slow
from shardwise.checkpoint.checksums import in_words
from shardwise.checkpoint.collect import RankSavePlan, TrainingState, add_replicated
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.protocols import CheckpointedModel, Fetch, in_place
from shardwise.checkpoint.safetensors_reader import Spec
from shardwise.checkpoint.safetensors_writer import LINE, file_order
from shardwise.checkpoint.save import MOST_NAMES, PendingSave, SaveRequest, finish, header_of, staged, write_part
from shardwise.comm.communicator import Communicator
from shardwise.compat import default_store
from shardwise.device.hostmemory import HostMemory
from shardwise.device.staging import Copied, CopyStream, copy_stream, is_far
from shardwise.errors import CheckpointError
from shardwise.memory import memory_limit
from shardwise.units import format_size
from shardwise.utils.logging import logger

_NICENESS = 5
_HEAD_START_S = 0.01
"""Seconds for which the thread lets the script go on: Python would let the thread run for 5 ms first."""
_LOOK_S = 1.0
"""Seconds between looks at the job's store."""
_EXIT_S = 60.0
"""Seconds for which rank 0 waits for other ranks after the end of its script and the time of a very slow disk."""


_STEP = 1 << 16
"""Sizes are multiples of this, because small differences between saves should not move the memory."""


class Snapshot:
    """Memory of one rank for one snapshot at a time; pinned for a CUDA device if the system allows it. Every save
    reuses the memory, which costs one copy of the state into present pages.

    A separate stream copies state from a device, and training continues at once. The device's next operations wait for
    the copies of state that may change at any time, the next optimizer step for all (`copied`).

    `device` has the state. `local_ranks` of this machine share its memory. `resized` is called with the change of the
    memory in bytes (`size`). `copied` is the event after the copies of the last `take`; None: they were made at once.
    """

    def __init__(
        self, device: torch.device, local_ranks: int = 1, resized: Callable[[int], None] | None = None
    ) -> None:
        self._device = device
        self._local_ranks = local_ranks
        self._resized = resized or (lambda change: None)
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._memory: HostMemory | None = None
        self.copied: Copied | None = None
        self._stream: CopyStream | None = None

    @property
    def size(self) -> int:
        """Bytes of the memory."""
        return self._bytes.nbytes

    def take(
        self, tensors: Mapping[str, torch.Tensor], later: Collection[str] = (), fetch: Fetch = in_place
    ) -> dict[str, torch.Tensor]:
        """Copy tensors of any device and layout; return the copies, which the next call overwrites.

        `later` names tensors that do not change before a wait for `copied`; all others may change after the return.
        `fetch` makes offloaded tensors readable.
        """
        self.settle()
        if is_far(self._device):
            self._stream = self._stream or copy_stream(self._device)
        order = file_order({name: Spec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()})
        sizes = [-(-tensors[name].nbytes // LINE) * LINE for name in order]
        self._reserve(sum(sizes))
        copies: dict[str, torch.Tensor] = {}
        for name, place in zip(order, self._bytes[: sum(sizes)].split(sizes), strict=True):
            source = tensors[name]
            copies[name] = place[: source.nbytes].view(source.dtype).view(source.shape)

        def copy(names: Sequence[str]) -> None:
            if self._stream is not None:
                self._stream.follow()  # fetched values have just been written
            for name in names:
                source = tensors[name].detach()
                if self._stream is None or not is_far(source.device):
                    copies[name].copy_(source)
                else:
                    self._stream.copy(copies[name], source)
                    self._stream.keep(source)

        with torch.no_grad():
            for after in (False, True):
                names = [name for name in order if tensors[name].nbytes and (name in later) is after]
                fetch([(name, tensors[name]) for name in names], copy)
                if self._stream is not None:
                    self.copied = self._stream.mark()
                    if self._memory is not None:
                        self._memory.used(self.copied)
                    if not after:
                        self.copied.wait()
        return copies

    def settle(self) -> None:
        """Wait for the copies."""
        copied, self.copied = self.copied, None
        if copied is not None:
            copied.synchronize()

    def _reserve(self, needed: int) -> None:
        if needed <= self.size:
            return
        size = -(-needed // _STEP) * _STEP
        self._check_room(size - self.size)
        self.close()
        try:
            self._bytes = self._allocated(size)
        except (RuntimeError, OSError) as error:
            raise CheckpointError(
                f"the snapshot of an asynchronous save needs {format_size(size)} of host memory, which the system "
                f"refuses: {error}. Set checkpoint.async_save to false, or free memory"
            ) from error
        self._resized(size)

    def _allocated(self, size: int) -> torch.Tensor:
        if self._stream is None or self._device.type != "cuda":
            return torch.empty(size, dtype=torch.uint8, device="cpu")
        try:
            self._memory = HostMemory(self._stream, size)
        except RuntimeError as error:
            logger.warning(
                f"the snapshot of asynchronous saves ({format_size(size)}) cannot be pinned; copying to it is slower "
                f"(is the limit of locked memory, ulimit -l, that low?): {error}"
            )
            self._memory = HostMemory(self._stream, size, locked=False)
        return self._memory.bytes

    def _check_room(self, more: int) -> None:
        limit = memory_limit(torch.device("cpu"), self._local_ranks)
        if limit is None:
            return
        room = limit.share - limit.own
        if more > room:
            raise CheckpointError(
                f"the snapshot of an asynchronous save needs {format_size(more)} more host memory on this rank, and "
                f"{format_size(room)} are free for it ({limit.name}, shared by {limit.sharers} ranks). Set "
                "checkpoint.async_save to false, shard the state over more ranks, or give the job more memory"
            )

    def close(self) -> None:
        """Free the memory."""
        self.settle()
        if self.size:
            self._resized(-self.size)
        self._bytes, self._memory = torch.empty(0, dtype=torch.uint8, device="cpu"), None


@dataclass
class SaveReport:
    """One asynchronous save on this rank, in seconds and bytes. The caller `waited` for the previous save
    (back-pressure), then was `blocked` in `save_checkpoint`. `size` is 0 until written. `written` is the time of
    writing after that, on rank 0 until publication; None before its end. `error` is the reason of a failure, or None,
    and `origin` the rank that has failed.
    """

    path: str
    waited: float = 0.0
    blocked: float = 0.0
    size: int = 0
    written: float | None = None
    error: str | None = None
    origin: int = 0


@dataclass
class _WriteJob:
    """One save on this rank: `tensors` of its part, and on rank 0 the staging directory to publish with the manifest's
    `header`. `limit` is in seconds, `slowest` those in which a very slow disk writes the largest part.
    """

    rank: int
    made: PendingSave
    tensors: Mapping[str, torch.Tensor]
    request: SaveRequest
    report: SaveReport
    limit: float
    slowest: float
    store: torch.distributed.Store | None
    copied: Copied | None
    header: Manifest
    on_saved: Callable[[SaveReport], None] | None
    begun: float = field(default_factory=time.monotonic)
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Write, report and publish; the report is complete at the end."""
        report, part, draft = self.report, self.made.part, self.made.draft
        time.sleep(_HEAD_START_S)
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        names: list[list[str]] = []  # of values that are not finite, by rank
        try:
            if self.copied is not None:
                self.copied.synchronize()
            description, direct = part.to_json(), self.request.direct
            report.size = write_part(self.made.path, part.file, self.tensors, description, direct=direct)[0]
            names.append(part.names_not_finite(self.tensors)[:MOST_NAMES] if self.request.check_finite else [])
        except Exception as error:
            report.origin, report.error = self.rank, _words(error)
        try:
            if self.store is not None and self.rank:
                self.store.set(self._key(self.rank), json.dumps([report.error, *names]))
            if draft is not None:
                failed = self._await_others(self.header.layout["world"], names)
                if failed is not None and report.error is None:
                    report.origin, report.error = failed
                if report.error is None:
                    finish(draft, self.header, self.request, names)
        except Exception as error:
            report.origin, report.error = self.rank, report.error or _words(error)
        finally:
            if draft is not None:
                draft.discard()
        report.written = time.monotonic() - self.begun
        if report.error is not None:
            logger.error(
                "%s: writing it in the background failed on rank %d: %s", report.path, report.origin, report.error
            )
        elif self.on_saved is not None:
            self.on_saved(report)
        self.ended.set()

    def _key(self, rank: int) -> str:
        return f"shardwise/checkpoint/{self.made.path}/{rank}"

    def _await_others(self, world: int, names: list[list[str]]) -> tuple[int, str] | None:
        """Wait for the reports of all other ranks; return the first rank that failed, and its reason. Adds the names
        of their values that are not finite.
        """
        failed: tuple[int, str] | None = None
        store, left = self.store, math.inf
        for rank in range(1, world if store is not None else 1):
            assert store is not None
            while not store.check([self._key(rank)]):
                if not threading.main_thread().is_alive():
                    left = min(left, max(time.monotonic(), self.begun + self.slowest) + _EXIT_S)
                if time.monotonic() > min(left, self.begun + self.limit):
                    return failed or (rank, f"its part is not complete after {time.monotonic() - self.begun:.0f} s")
                with contextlib.suppress(RuntimeError):  # a timeout
                    store.wait([self._key(rank)], timedelta(seconds=_LOOK_S))
            error, *found = json.loads(store.get(self._key(rank)))
            store.delete_key(self._key(rank))
            names += found
            if error is not None and failed is None:
                failed = rank, error
        return failed


def _words(error: Exception) -> str:
    if not isinstance(error, (OSError, CheckpointError)):
        traceback.print_exception(error)
    return in_words(error)


class AsyncSaver:
    """Asynchronous saves of one rank: memory for a snapshot, and a thread for each save.

    Methods are local to the rank unless their docstring says "collective". `local_ranks` are on this machine. `resized`
    is called with the change of the snapshot's memory in bytes, `on_saved` on a separate thread with the report of each
    successful save. A save fails after `limit` seconds, plus the time of writing on a very slow disk.
    """

    def __init__(
        self,
        device: torch.device,
        local_ranks: int = 1,
        resized: Callable[[int], None] | None = None,
        on_saved: Callable[[SaveReport], None] | None = None,
        limit: float = math.inf,
    ) -> None:
        self._memory = device, local_ranks, resized
        self._on_saved = on_saved
        self._limit = limit
        self._store: torch.distributed.Store | None = None
        self._reset()

    def _reset(self) -> None:
        self._owner = os.getpid()
        self._snapshot = Snapshot(*self._memory)
        self._job: _WriteJob | None = None
        self.report: SaveReport | None = None
        self._unsettled = False

    def _reset_after_fork(self) -> None:
        if self._owner != os.getpid():
            self._reset()  # because memory and thread belong to the parent

    @property
    def unsettled(self) -> bool:
        """Whether the outcome of the last save has not been exchanged."""
        return self._unsettled and self._owner == os.getpid()

    @property
    def pending(self) -> bool:
        """Whether a save is being written, or on rank 0 not published yet."""
        return self._job is not None and not self._job.ended.is_set() and self._owner == os.getpid()

    @property
    def size(self) -> int:
        """Bytes of the snapshot's memory."""
        return self._snapshot.size

    @property
    def copied(self) -> Copied | None:
        """Event after the copies of state that only the optimizer writes; None: they are complete."""
        return self._snapshot.copied

    def save(self, model: CheckpointedModel, request: SaveRequest, state: TrainingState) -> SaveReport:
        """Take a snapshot and write it during training; return the report, which is completed later. A collective.

        The previous save must be settled. Raises CheckpointError on all ranks, without a pending save, if the staging
        directory cannot be made, a value cannot be saved, or memory is too small.
        """
        comm, what = model.comm, request.what
        self._reset_after_fork()
        own = replace(request, check_finite=False)  # the thread looks for infinite values, in the snapshot
        with staged(model, own, state) as made, collective_step(comm, what) as taken:
            part = made.part
            add_replicated(part, model)
            tensors = self._snapshot.take(part.tensors, _stepped_only(model, part), part.fetch)
            self._connect(comm)
            taken.local = sum(tensor.nbytes for tensor in tensors.values())
        slowest = max(taken.gathered) / SLOWEST
        self.report, self._unsettled = SaveReport(os.path.join(request.directory, made.tag)), True
        self._job = _WriteJob(
            rank=comm.rank,
            made=made,
            tensors=tensors,
            request=request,
            report=self.report,
            limit=self._limit + slowest,
            slowest=slowest,
            store=self._store,
            copied=self._snapshot.copied,
            header=header_of(model, request),
            on_saved=self._on_saved,
        )
        # The thread does not keep the engine alive. The interpreter waits for it at exit.
        threading.Thread(target=self._job.run, name="shardwise-checkpoint", daemon=False).start()
        return self.report

    def _connect(self, comm: Communicator) -> None:
        if self._store is None and comm.world > 1 and comm.sends:
            store = default_store()
            if store is None:
                raise CheckpointError(
                    "asynchronous saves need the store of the job's process group, which is not there; set "
                    "checkpoint.async_save to false"
                )
            self._store = store.clone()  # type: ignore[attr-defined]  # because a wait blocks other uses of the same connection

    def wait(self, seconds: float = math.inf) -> SaveReport | None:
        """Wait for the end of the unsettled save; return its report, or None without one, or if it has not ended."""
        self._reset_after_fork()
        job = self._job
        if job is None or not self.unsettled:
            return self.report if self.unsettled else None  # of a save that was given up
        left = job.begun + job.limit + 2 * _LOOK_S - time.monotonic()
        with warn_if_slow(f"{job.report.path}: waiting until it is written"):
            if job.ended.wait(max(0.0, min(seconds, left, threading.TIMEOUT_MAX))):
                return job.report
        if seconds < left:
            return None
        if job.made.draft is not None:
            job.made.draft.given_up = True
        self._snapshot, self._job = Snapshot(*self._memory), None  # the thread may still read the old one
        error = f"its part is not written after {job.limit:.0f} s (the limit follows SHARDWISE_TIMEOUT). It is given up"
        self.report = replace(job.report, error=error, origin=job.rank)
        return self.report

    def await_all(self, comm: Communicator) -> list[tuple[str | None, int]]:
        """Wait for the end of the save on all ranks; return the failure of each, and the rank of its origin.
        A collective: ranks meet in turns shorter than a collective's timeout.
        """
        turn = min(self._limit / 2, 600.0)
        while True:
            report = self.wait(turn)
            outcomes = comm.exchange(None if report is None else [report.error, report.origin], "checkpoint")
            if None not in outcomes:
                return [(error, origin) for error, origin in outcomes]

    def settle(self, comm: Communicator) -> float:
        """Wait for the end of a pending save; return the seconds. A collective. Raises CheckpointError once if it
        fails.
        """
        if not self.unsettled:
            return 0.0
        begun = time.monotonic()
        outcomes = self.await_all(comm)
        self._unsettled = False
        error, origin = outcomes[0]  # rank 0 has waited for all others
        if error is not None:
            others = [f"rank {rank}: {words}" for rank, (words, _) in enumerate(outcomes) if rank and words]
            path = "a checkpoint" if self.report is None else self.report.path
            raise CheckpointError(
                f"{path}: writing this checkpoint in the background failed on rank {origin}: "
                + "; ".join([error, *others])
            )
        return time.monotonic() - begun

    def close(self) -> None:
        """Wait, and free the memory."""
        self.wait()
        self._snapshot.close()


def _stepped_only(model: CheckpointedModel, part: RankSavePlan) -> set[str]:
    """Return the tensors that only the optimizer writes: training continues while they are copied."""
    if not is_far(model.device):
        return set()
    model.finish_gathers()  # because a pending all-gather changes where parameters lie
    shown = {parameter.untyped_storage().data_ptr() for parameter in model.registry.parameters}
    return {key for key in part.runs if part.tensors[key].untyped_storage().data_ptr() not in shown}
