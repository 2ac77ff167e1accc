"""Timelines of training steps, and stragglers.

Ranks compare clocks before the first recorded step and after the last one, never inside a step. A recording that ends
early (destroyed engine, exception) is written without the other ranks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from shardwise.comm.clocks import Clock, measure
from shardwise.comm.stragglers import Stragglers, compare
from shardwise.device.ranges import listening
from shardwise.engine.observers import StepObserver
from shardwise.errors import UsageError
from shardwise.profile.timeline import Recorder, file_of, hostname, write
from shardwise.utils.logging import logger

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator
    from shardwise.config import Config
    from shardwise.engine.step import TrainStep
    from shardwise.zero.model import ShardedModel


@dataclass
class _Recording:
    """A timeline being recorded. `recorder` None: not on this rank. `left` None: until the block ends."""

    file: Path
    clock: Clock
    first: int
    left: int | None
    recorder: Recorder | None = None
    installed: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)


class Timelines(StepObserver):
    """Records timelines of one engine's steps, into `directory` unless configured otherwise."""

    def __init__(self, sharded: ShardedModel, config: Config, job: Communicator, steps: TrainStep) -> None:
        self.directory = Path("timeline")
        self._sharded = sharded
        self._job = job
        self._steps = steps
        self._options = config.timeline
        self._until = self._options.start_step if self._options.enabled else -1  # steps until recording begins
        self._recording: _Recording | None = None
        self._rank = job.members[job.rank]
        self.active = self._options.enabled  # `record_timeline` has no limit of steps
        if self._options.enabled:
            made = sorted(set(self._options.ranks or ()) - set(job.members))
            if made:
                raise UsageError(f"timeline.ranks: there are no ranks {made}; the job has {job.world} ranks, from 0 on")

    def begin_if_due(self) -> None:
        """Start the configured recording if due (all ranks call, outside of steps)."""
        if self._until == 0:
            options = self._options
            self._begin(
                Path(options.path) if options.path else self.directory, options.steps, options.ranks, options.max_events
            )
        if self._until >= 0:
            self._until -= 1

    @override
    def after_step(self) -> None:
        recording = self._recording
        if recording is not None and recording.left is not None:
            recording.left -= 1
            if not recording.left:
                self._end(together=True)
        self.begin_if_due()

    @contextlib.contextmanager
    def record_timeline(
        self, path: str | os.PathLike[str], *, ranks: Sequence[int] | None = None, max_events: int | None = None
    ) -> Iterator[None]:
        """Record a timeline inside the block, as the section `timeline` does for some steps (all ranks call).

        Each rank writes `timeline-RRRRR.json` at the end of the block; `shardwise trace` merges the files. The block
        begins and ends outside of passes and steps. If it ends with an exception, clocks are not compared again.

        Args:
            path: directory.
            ranks: global ranks that record; None: all.
            max_events: maximum number of ranges and collectives; None: as configured.

        Raises:
            UsageError: a timeline is being recorded already, or the engine has been destroyed.

        Example:
            >>> import os, shardwise, tempfile, torch
            >>> config = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
            >>> engine, *_ = shardwise.initialize(model=torch.nn.Linear(4, 1), config=config)
            >>> with tempfile.TemporaryDirectory() as directory:
            ...     with engine.record_timeline(directory):
            ...         _ = engine.backward(engine(torch.ones(2, 4)).mean())
            ...         engine.step()
            ...     os.listdir(directory)
            ['timeline-00000.json']
            >>> engine.destroy()
        """
        self._sharded.check_open("engine.record_timeline()")
        self._begin(Path(path), None, ranks, self._options.max_events if max_events is None else max_events)
        mine = self._recording
        together = False
        try:
            yield
            together = True
        finally:
            if self._recording is mine:
                self._end(together=together)

    def close(self) -> None:
        """Write the events recorded so far, without the other ranks."""
        self._until = -1
        self._end(together=False)

    def stragglers(self, since: int = 0) -> Stragglers:
        """Return which rank waited for which in the last collectives (all ranks call, between steps).

        It reads the ledger, which keeps the newest 4096; `since`: the first sequence number to count, from
        `engine.ledger.sequence`. `print(found.table())` shows a table; `found.as_dict()` returns JSON values. On NCCL
        the host does not wait for collectives; record a timeline instead. Raises a UsageError after `destroy()`.
        """
        self._sharded.check_open("engine.stragglers()")
        return compare(self._job, since)

    # -- one recording -----------------------------------------------------------------------------------------------

    def _begin(self, path: Path, steps: int | None, ranks: Sequence[int] | None, most: int) -> None:
        if self._recording is not None:
            raise UsageError(
                f"a timeline is being recorded already, into {self._recording.file.parent}: end it first, or leave the "
                "section `timeline` of the configuration out"
            )
        file = path / file_of(self._rank)
        mine = ranks is None or self._rank in ranks
        if mine:
            try:
                path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                why = error.strerror or error
                logger.warning("timeline: rank %d cannot write %s: %s; it records nothing", self._rank, path, why)
                mine = False
        clock = measure(self._job)
        recording = _Recording(file, clock, self._steps.global_steps, steps)
        if mine:
            cuda = self._sharded.device.type == "cuda"
            sizes = {unit.name: unit.nbytes for unit in self._sharded.units}
            recorder = Recorder(
                cuda=cuda, most=most, step=lambda: self._steps.global_steps, sizes=sizes, memory=self._memory
            )
            recording.recorder = recorder
            recording.installed.enter_context(listening(recorder))
            for record in self._job.ledger.in_flight():
                recorder.opened(record)
            self._job.ledger.watcher = recorder
        self._recording = recording

    def _memory(self) -> Mapping[str, int]:
        return {category.value: size for category, size in self._sharded.accountant.live.items()}

    def _end(self, *, together: bool) -> None:
        recording, self._recording = self._recording, None
        if recording is None:
            return
        recording.installed.close()
        self._job.ledger.watcher = None
        recorder = recording.recorder
        if recorder is not None:
            recorder.finish()
        later = measure(self._job) if together else None
        if recorder is None:
            return
        host = hostname()
        events = recorder.events(self._rank, host, recording.clock, later)
        if recorder.left_out:
            logger.warning(
                "timeline: rank %d has left out %d ranges and collectives beyond the first %d; record fewer steps, or "
                "raise timeline.max_events",
                self._rank,
                recorder.left_out,
                recorder.most,
            )
        try:
            write(
                recording.file,
                events,
                rank=self._rank,
                world=self._job.world,
                host=host,
                first_step=recording.first,
                steps=self._steps.global_steps - recording.first,
                left_out=recorder.left_out,
                clock_uncertainty_us=round(1e6 * max(c.uncertainty for c in (recording.clock, later) if c), 3),
            )
        except OSError as error:
            logger.warning("timeline: rank %d cannot write %s: %s", self._rank, recording.file, error)
            return
        if self._rank == 0:
            logger.info("timeline: steps from %d on are in %s", recording.first, recording.file.parent)
