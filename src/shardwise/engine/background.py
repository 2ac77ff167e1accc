"""Saves in the background, as the engine's users see them: to wait for, to ask about, and what they have cost."""

from __future__ import annotations

import functools
import os
import sys
import time
from typing import TYPE_CHECKING

import torch

from shardwise.checkpoint.background import Background, SaveReport, save_in_background, settle
from shardwise.errors import CheckpointError, UsageError
from shardwise.memory import Category
from shardwise.utils.logging import logger

if TYPE_CHECKING:
    from shardwise.checkpoint.collect import TrainingState
    from shardwise.checkpoint.save import SaveRequest
    from shardwise.comm.communicator import Communicator
    from shardwise.config import Resolution
    from shardwise.memory import Accountant
    from shardwise.zero.model import ShardedModel

_WORTH_TELLING_S = 1.0
"""A save that waits for the one before for so long says so."""


class BackgroundSaving:
    """Mixin of `Engine`: checkpoints that are written while training goes on."""

    sharded: ShardedModel
    device: torch.device
    accountant: Accountant
    _comm: Communicator
    _resolution: Resolution
    _saving: Background | None = None

    @property
    def checkpoint_pending(self) -> bool:
        """Whether an asynchronous save is being written; asking takes no time.

        It speaks of this rank: ranks need not see the end in the same step, so nothing that all ranks do together
        should depend on it. On rank 0 it ends when the checkpoint has been published.
        """
        return self._saving is not None and self._saving.pending

    @property
    def last_async_save(self) -> SaveReport | None:
        """What the last asynchronous save has cost this rank so far, or None if there was none."""
        return None if self._saving is None else self._saving.report

    def wait_for_checkpoint(self) -> str | None:
        """Wait until the asynchronous save in progress, if there is one, has been published; all ranks call this.

        Returns:
            Path of the checkpoint, or None if there was nothing to wait for.

        Raises:
            CheckpointError: it could not be written, or nothing has been written of it for most of the limit of a
                collective (a process that is stopped, a disk that does not answer), on all ranks alike; earlier
                checkpoints are unchanged, unless the message says that this one is complete. Each failure is raised
                once: here, by the next `save_checkpoint`, or by `destroy`, whichever comes first.
            UsageError: the engine has been destroyed.

        Example:
            >>> import shardwise, tempfile
            >>> engine, *_ = shardwise.initialize(
            ...     model=torch.nn.Linear(4, 1),
            ...     config={
            ...         "train_batch_size": 2,
            ...         "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            ...         "checkpoint": {"async_save": True},
            ...     },
            ... )
            >>> directory = tempfile.mkdtemp()
            >>> engine.save_checkpoint(directory)
            True
            >>> engine.wait_for_checkpoint().removeprefix(directory)
            '/global_step0'
            >>> engine.checkpoint_pending, engine.wait_for_checkpoint()
            (False, None)
            >>> engine.destroy()
        """
        self.sharded.check_open("engine.wait_for_checkpoint()")
        saving = self._saving
        if saving is None or not saving.unsettled:
            return None
        settle(self._comm, saving)
        return None if saving.report is None else saving.report.path

    def _settle_save(self) -> float:
        """Wait for the save before; return for how long. Raises on all ranks what has become of it."""
        if self._saving is None:
            return 0.0
        waited = settle(self._comm, self._saving)
        if waited >= _WORTH_TELLING_S and self._comm.rank == 0 and self._saving.report is not None:
            logger.warning(
                "save_checkpoint(): waited %.1f s until the save before, %s, was written (it took %.1f s); save less "
                "often, or to a faster disk",
                waited,
                self._saving.report.path,
                self._saving.report.written or 0.0,
            )
        return waited

    def _save_in_background(self, request: SaveRequest, state: TrainingState, begun: float, waited: float) -> None:
        if self._saving is None:
            ranks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or self._comm.world
            told = _tell if self._comm.rank == 0 and self._shows_statistics() else None
            # Less than a collective may take: ranks whose part is written wait for the others in one.
            limit = 0.8 * self._comm.timeout.total_seconds()
            self._saving = Background(self.device, int(ranks), self._counter(), told, limit)
        report = save_in_background(self.sharded, request, state, self._saving)
        self.sharded.copied = self._saving.copied
        report.waited = waited
        report.blocked = time.monotonic() - begun - waited

    def _counter(self) -> functools.partial[None] | None:
        """Return what counts the snapshot's memory; on a device of its own the table is of the device's memory."""
        return functools.partial(_count, self.accountant) if self.device.type == "cpu" else None

    def _shows_statistics(self) -> bool:
        writer = self._resolution.config.checkpoint.writer
        return writer is not None and writer.show_statistics

    def _finish_save(self) -> CheckpointError | None:
        """Wait for the save in progress, and give process and memory back; return the error if it has failed."""
        saving, self._saving = self._saving, None
        if saving is None:
            return None
        failure = None
        try:
            if sys.exc_info()[0] is None:
                settle(self._comm, saving)
            else:
                saving.wait()  # what has gone wrong may be on this rank alone, and the others somewhere else
        except CheckpointError as error:
            failure = error
        finally:
            saving.close()
        return failure

    def _snapshot_bytes(self, state: int) -> int:
        """Return the planned size of the snapshot; 0 if no save is asynchronous.

        Args:
            state: bytes of optimizer state on this rank.
        """
        held = 0 if self._saving is None else self._saving.size
        if held or not self._resolution.config.checkpoint.in_background:
            return held
        values, ranges = self.sharded.value_runs(), self.sharded.saved_ranges()
        size = trained = saved = 0
        for tensor in self.sharded.registry:
            runs = values.get(tensor.index, [])
            own = sum(stop - start for start, stop in ranges.get(tensor.index, []))
            size += own * (runs[0][2].dtype.itemsize if runs else 0)
            if tensor.trainable:
                trained += sum(stop - start for start, stop, _ in runs)
                saved += own
        return size + (state * saved // trained if trained else 0)


def check_same_way(given: list[bool]) -> None:
    """Raise, on all ranks alike, if they were told to save in different ways."""
    other = next((rank for rank, way in enumerate(given) if way != given[0]), None)
    if other is not None:
        raise UsageError(
            f"save_checkpoint(): asynchronous is {given[0]} on rank 0 and {given[other]} on rank {other}; pass the "
            "same on every rank"
        )


def statistics(path: str, size: int, seconds: float) -> str:
    """Return what `checkpoint.writer.show_statistics` prints."""
    return f"{path}: {size / 1e9:.3f} GB written in {seconds:.2f} s ({size / 1e9 / max(seconds, 1e-9):.2f} GB/s)"


def size_of(path: str) -> int:
    """Return the bytes of a checkpoint's files."""
    return sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file())


def _tell(report: SaveReport) -> None:
    try:
        size = size_of(report.path)
    except OSError:  # it has been moved since
        return
    logger.info("%s; training stood for %.2f s", statistics(report.path, size, report.written or 0.0), report.blocked)


def _count(accountant: Accountant, change: int) -> None:
    accountant.add(Category.OTHER, change)
