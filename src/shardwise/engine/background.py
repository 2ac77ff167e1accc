"""Asynchronous checkpoints of an engine: waiting, state and statistics."""

from __future__ import annotations

import functools
import os
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.checkpoint.async_save import AsyncSaver, SaveReport
from shardwise.engine.mesh import local_ranks
from shardwise.errors import CheckpointError, UsageError
from shardwise.memory import Category
from shardwise.units import format_duration, format_rate, format_size
from shardwise.utils.logging import logger

if TYPE_CHECKING:
    from shardwise.checkpoint.collect import TrainingState
    from shardwise.checkpoint.save import SaveRequest
    from shardwise.comm.communicator import Communicator
    from shardwise.config import Config
    from shardwise.zero.model import ShardedModel

_WORTH_TELLING_S = 1.0
"""Seconds of waiting for the previous save from which on a warning is logged."""


@dataclass(eq=False, repr=False)
class BackgroundSaves:
    """Asynchronous checkpoints of a model. `saving` has the snapshot; None before the first save."""

    _sharded: ShardedModel
    _config: Config
    _job: Communicator
    saving: AsyncSaver | None = None

    @property
    def pending(self) -> bool:
        """Whether a save is being written; not a collective."""
        return self.saving is not None and self.saving.pending

    @property
    def report(self) -> SaveReport | None:
        """Report of the last save on this rank; None without one."""
        return None if self.saving is None else self.saving.report

    def wait(self) -> str | None:
        """Wait until the pending save is published; return its path, or None (all ranks call)."""
        self._sharded.check_open("engine.wait_for_checkpoint()")
        saving = self.saving
        if saving is None or not saving.unsettled:
            return None
        saving.settle(self._job)
        return None if saving.report is None else saving.report.path

    def await_last(self) -> None:
        """Wait until the previous save has ended on all ranks, if still pending."""
        if self.saving is not None and self.saving.unsettled:
            self.saving.await_all(self._job)

    def settle_last(self) -> float:
        """Wait for the previous save and return the seconds waited. Raises its failure on all ranks."""
        if self.saving is None:
            return 0.0
        waited = self.saving.settle(self._job)
        if waited >= _WORTH_TELLING_S and self._job.rank == 0 and self.saving.report is not None:
            logger.warning(
                "save_checkpoint(): waited %.1f s until the save before, %s, was written (it took %.1f s); save less "
                "often, or to a faster disk",
                waited,
                self.saving.report.path,
                self.saving.report.written or 0.0,
            )
        return waited

    def start(self, request: SaveRequest, state: TrainingState, begun: float, waited: float) -> None:
        """Copy the state to a snapshot and start writing it; `begun` is of `time.monotonic`, `waited` in seconds."""
        if self.saving is None:
            told = _tell if self._job.rank == 0 and self.shows_statistics else None
            # Shorter than a collective's timeout, because finished ranks wait in a collective for the others.
            limit = 0.8 * self._job.timeout.total_seconds()
            device = self._sharded.device
            # The memory table counts device memory; the snapshot is in host memory.
            counter = functools.partial(self._sharded.accountant.add, Category.OTHER) if device.type == "cpu" else None
            self.saving = AsyncSaver(device, local_ranks(self._job.world), counter, told, limit)
        report = self.saving.save(self._sharded.state, request, state)
        self._sharded.copied = self.saving.copied
        report.waited = waited
        report.blocked = time.monotonic() - begun - waited

    @property
    def shows_statistics(self) -> bool:
        """Whether size and time of each save are logged."""
        writer = self._config.checkpoint.writer
        return writer is not None and writer.show_statistics

    def finish(self) -> CheckpointError | None:
        """Wait for the pending save, and free its memory; return its error, if any."""
        saving, self.saving = self.saving, None
        if saving is None:
            return None
        failure = None
        try:
            if sys.exc_info()[0] is None:
                saving.settle(self._job)
            else:
                saving.wait()  # no collective: other ranks may not have failed
        except CheckpointError as error:
            failure = error
        finally:
            saving.close()
        return failure

    def snapshot_bytes(self, state: int) -> int:
        """Return the planned bytes of the snapshot, or 0; `state`: bytes of this rank's optimizer state."""
        held = 0 if self.saving is None else self.saving.size
        return held if held or not self._config.checkpoint.in_background else saved_bytes(self._sharded, state)


def saved_bytes(sharded: ShardedModel, state: int) -> int:
    """Return the planned bytes of this rank's part of a checkpoint; `state`: bytes of its optimizer state."""
    values, ranges = sharded.state.value_runs(), sharded.state.owned_ranges()
    size = trained = saved = 0
    for tensor in sharded.registry:
        runs = values.get(tensor.index, [])
        own = sum(stop - start for start, stop in ranges.get(tensor.index, []))
        size += own * (runs[0][2].dtype.itemsize if runs else 0)
        if tensor.trainable:
            trained += sum(stop - start for start, stop, _ in runs)
            saved += own
    return size + (state * saved // trained if trained else 0)


def check_same_way(given: list[dict[str, bool]]) -> None:
    """Raise a UsageError on all ranks if they differ in an argument."""
    for rank, arguments in enumerate(given):
        for name, value in arguments.items():
            if value != given[0][name]:
                raise UsageError(
                    f"save_checkpoint(): {name} is {given[0][name]} on rank 0 and {value} on rank {rank}; pass the "
                    "same on every rank"
                )


def statistics(path: str, size: int, seconds: float) -> str:
    """Return the line of `checkpoint.writer.show_statistics`."""
    return (
        f"{path}: {format_size(size)} written in {format_duration(seconds)} ({format_rate(size / max(seconds, 1e-9))})"
    )


def size_of(path: str) -> int:
    """Return the bytes of a checkpoint's files."""
    return sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file())


def _tell(report: SaveReport) -> None:
    try:
        size = size_of(report.path)
    except OSError:  # it has been moved
        return
    logger.info("%s; training stood for %.2f s", statistics(report.path, size, report.written or 0.0), report.blocked)
