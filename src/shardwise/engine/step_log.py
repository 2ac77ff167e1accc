"""Run log and progress display: values of each step, the description of the run, and the mode of the display."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from shardwise._version import __version__
from shardwise.comm.environment import PROGRESS
from shardwise.config.export import effective
from shardwise.device.clock import Interval, Timed, add_up
from shardwise.engine.observers import NOTHING, Phase, StepObserver
from shardwise.memory import Tier, resident_bytes
from shardwise.memory.accountant import Lap
from shardwise.memory.report import MemoryReport
from shardwise.monitor.pending import Pending
from shardwise.monitor.progress import Memory, Mode, Progress, State, mode_of
from shardwise.profile.rates import tokens_in

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator
    from shardwise.comm.ledger import Ledger, Record
    from shardwise.config import Config, Resolution
    from shardwise.engine.memory import MemoryReporting
    from shardwise.engine.state_getters import StateGetters
    from shardwise.engine.step import StepReport, TrainStep
    from shardwise.monitor.runlog import RunLog
    from shardwise.zero.model import ShardedModel

_UNITS = 8
"""Units of a row: those with the longest waits."""


@dataclass(eq=False, repr=False)
class Following(StepObserver):
    """Records each step for the run log (every `_every` steps) and the progress display (`_limit`: of device bytes).
    `_readers`: number of ranks with tokens of their own.
    """

    _sharded: ShardedModel
    _step: TrainStep
    _ledger: Ledger
    _readers: int
    log: RunLog | None
    _every: int
    display: Progress | None
    _limit: int | None

    def __post_init__(self) -> None:
        self.active = self.log is not None or self.display is not None
        self._accountant = self._sharded.accountant
        self._cuda = self._sharded.device.type == "cuda"
        self._tokens: int | None = 0  # of this rank since the beginning
        self._steps = 0  # since the last row
        self._skipped = 0  # of them
        self._losses: tuple[torch.Tensor, int] | None = None  # sum, and number of terms
        self._norm: torch.Tensor | None = None  # the largest
        self._last = 0.0  # end of the last step
        self._ended: float | None = None  # of the last row, or the beginning of the first step
        self._before = (0, 0)  # samples and tokens at the last row
        self._parts: list[Interval] = []
        self._waits = _Waits()
        self._collectives: dict[str, tuple[int, int, int]] = {}
        self._moved = {tier: self._accountant.moved(tier) for tier in Tier}
        if self.log is not None:
            self._collectives = self._totals()
            self._accountant.lap()
            self._ledger.listen(self._waits.heard)

    # -- observation -------------------------------------------------------------------------------------------------

    @override
    def during(self, phase: Phase, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AbstractContextManager[Any]:
        if phase == "forward":
            if self._tokens is not None and self._sharded.model_pass.in_first_chunk:
                found = tokens_in(args, kwargs)
                self._tokens = None if found is None else self._tokens + found
            if self._ended is None:
                self._ended = time.perf_counter()
                self._before = self._step.global_samples, 0
                if self.log is not None:
                    self._collectives = self._totals()  # excludes `initialize` and earlier evaluations
        return NOTHING if self.log is None else Timed(phase, self._parts, self._cuda)

    @override
    def after_step(self) -> None:
        report = self._step.last_step
        if report is None:
            return
        self._steps += 1
        self._last = clock = time.perf_counter()
        at = self._step.global_steps
        if self.log is not None:
            self._add(report)
            if at % self._every == 0:
                self._write(report, clock)
        if self.display is not None and self.display.due(at, clock):
            self.display.show(self._state(report, clock))

    def close(self) -> None:
        """Write the last row, and remove the display. Closing twice does nothing."""
        if self.display is not None:
            self.display.close()
        if self.log is not None:
            report = self._step.last_step
            if self._steps and report is not None:
                self._write(report, self._last)
            self.log.close()

    # -- the run log -------------------------------------------------------------------------------------------------

    def _add(self, report: StepReport) -> None:
        self._skipped += not report.applied
        if report.loss is not None:
            total, terms = self._losses or (None, 0)
            self._losses = report.loss if total is None else total + report.loss, terms + 1
        if report.grad_norm is not None:
            self._norm = report.grad_norm if self._norm is None else torch.maximum(self._norm, report.grad_norm)

    def _write(self, report: StepReport, clock: float) -> None:
        step = self._step
        samples, tokens = step.global_samples, self._tokens
        values: dict[str, Any] = {
            "time": time.time(),
            "step": step.global_steps,
            "samples": samples,
            "steps": self._steps,
            "lr": report.lr,
            "applied": report.applied,
            "skipped": self._skipped,
        }
        if step.loss_scaler is not None:
            values["loss_scale"] = report.loss_scale
        if self._ended is not None:
            seconds = max(clock - self._ended, 1e-9)
            values |= {"seconds": seconds, "samples_per_second": (samples - self._before[0]) / seconds}
            if tokens:
                values["tokens"] = (tokens - self._before[1]) * self._readers
                values["tokens_per_second"] = values["tokens"] / seconds
        loss = None if self._losses is None else self._losses[0] / self._losses[1]
        pending = Pending(
            (name, value, step.global_steps)
            for name, value in (("loss", loss), ("grad_norm", self._norm))
            if value is not None
        )
        self._ended, self._before, self._steps, self._skipped = clock, (samples, tokens or 0), 0, 0
        self._losses = self._norm = None
        assert self.log is not None
        self.log.write_step(values, pending, self._rest())

    def _rest(self) -> Callable[[dict[str, Any]], None]:
        parts, self._parts = self._parts, []
        laps = self._accountant.lap()
        totals, before = self._totals(), self._collectives
        self._collectives = totals
        moved, moved_before = {tier: self._accountant.moved(tier) for tier in Tier}, self._moved
        self._moved = moved
        by_op, by_unit = self._waits.taken()

        def finish(row: dict[str, Any]) -> None:
            row["phases"] = add_up(parts, {})
            row["memory"] = {tier.value: _told(lap) for tier, lap in laps.items() if lap.total or lap.peak_total}
            row["resident"] = resident_bytes()
            row["communication"] = {
                op: [*counts, by_op.get(op, 0.0)]
                for op, after in totals.items()
                if (counts := _since(after, before.get(op, (0, 0, 0))))[0] or op in by_op
            }
            longest = sorted(by_unit.items(), key=lambda item: item[1], reverse=True)[:_UNITS]
            row["units"] = {unit: seconds for unit, seconds in longest if seconds > 0}
            row["moved"] = {
                tier.value: moved[tier] - moved_before[tier] for tier in Tier if moved[tier] != moved_before[tier]
            }

        return finish

    def _totals(self) -> dict[str, tuple[int, int, int]]:
        return {op: (each.count, each.size, each.sent) for op, each in list(self._ledger.totals.items())}

    # -- the display -------------------------------------------------------------------------------------------------

    def _state(self, report: StepReport, clock: float) -> State:
        step, accountant = self._step, self._accountant
        held = [Memory("device", accountant.peak_total, self._limit)]
        host = accountant.peak_total_in(Tier.HOST)
        if host:
            held.append(Memory("host", host))
        return State(
            step=step.global_steps,
            clock=clock,
            samples=step.global_samples,
            tokens=None if self._tokens is None else self._tokens * self._readers,
            loss=None if report.loss is None else Pending([("loss", report.loss, step.global_steps)]),
            memory=held,
        )


class _Waits:
    _MOST = 4096
    """Collectives that are kept before they are added up."""

    def __init__(self) -> None:
        self._heard: list[Record] = []
        self._by_op: dict[str, float] = {}
        self._by_unit: dict[str, float] = {}

    def heard(self, record: Record) -> None:
        """Note a collective that has been waited for."""
        self._heard.append(record)
        if len(self._heard) > self._MOST:
            self._add_up()

    def _add_up(self) -> None:
        count = len(self._heard)  # other threads may append meanwhile
        for record in self._heard[:count]:
            waited = record.waited or 0.0
            self._by_op[record.op] = self._by_op.get(record.op, 0.0) + waited
            self._by_unit[record.label] = self._by_unit.get(record.label, 0.0) + waited
        del self._heard[:count]

    def taken(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the seconds since the last call, by operation and by unit."""
        self._add_up()
        found = self._by_op, self._by_unit
        self._by_op, self._by_unit = {}, {}
        return found


def _told(lap: Lap) -> dict[str, Any]:
    return {
        "live": lap.total,
        "peak": lap.peak_total,
        "at_peak": {category.value: size for category, size in lap.at_peak.items() if size},
        "peaks": {category.value: size for category, size in lap.peak.items() if size},
    }


def _since(after: tuple[int, int, int], before: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return the difference of two totals; the later one, if the ledger has been reset."""
    if after[0] < before[0]:
        return after
    return after[0] - before[0], after[1] - before[1], after[2] - before[2]


# -- description of the run --------------------------------------------------------------------------------------------


def log_of(config: Config, job: Communicator, step: TrainStep) -> tuple[RunLog, list[Any]] | None:
    """Return this rank's run log, and host and process of each rank (all ranks call); None if disabled."""
    section = config.run_log
    if not section.enabled:
        return None
    from shardwise.monitor.runlog import RunLog

    own = {"host": socket.gethostname(), "process": os.getpid(), "path": section.path or _new_directory()}
    ranks = job.exchange(own, "run_log")
    path = Path(ranks[0]["path"]).expanduser()
    stepping = weakref.ref(step)  # the logger keeps the log of an engine that is dropped
    return RunLog(path, job.rank, lambda: 0 if (now := stepping()) is None else now.global_steps), [
        {"host": each["host"], "process": each["process"]} for each in ranks
    ]


def _new_directory() -> str:
    named = f"runs/{time.strftime('%Y%m%d-%H%M%S')}"
    names = [named, *(f"{named}-{number}" for number in range(2, 100))]
    return next((name for name in names if not os.path.lexists(name)), named)


def describe(
    engine: StateGetters, resolution: Resolution, memory: MemoryReporting, log: RunLog, ranks: Sequence[Any]
) -> None:
    """Write the description of the run on rank 0; `ranks` are host and process of each rank."""
    if engine.job.rank != 0:
        return
    settings = resolution.config
    log.write_run(
        {
            "time": time.time(),
            "step": engine.global_steps,
            "world": engine.job.world,
            "ranks": ranks,
            "versions": {"shardwise": __version__, "torch": torch.__version__, "python": platform.python_version()},
            "device": _device(engine.sharded.device),
            "waits_on_host": engine.job.waits_on_host,
            "model": type(engine.module).__name__,
            "parameters": sum(tensor.numel for tensor in engine.sharded.registry),
            "optimizer": None if engine.optimizer is None else type(engine.optimizer).__name__,
            "stage": engine.sharded.plan.stage,
            "precision": engine.precision_in_words(),
            "batch": dict(zip(("total", "micro", "accumulation"), engine.get_batch_info(), strict=True)),
            "total_steps": total_steps(settings),
            "limits": {
                name: limit
                for name in ("device", "host", "disk")
                if (limit := getattr(settings.memory_limits, name)) is not None
            },
            "plan": _planned(memory.memory_report()) if settings.run_log.plan else None,
            "warnings": [str(warning) for warning in resolution.warnings],
            "configuration": effective(resolution),
        }
    )


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _planned(report: MemoryReport) -> dict[str, Any] | None:
    if report.total.planned is None:
        return None
    tiers = {"device": report.total.planned, **{row.name: row.planned for row in report.elsewhere}}
    return {
        "tiers": {name: size for name, size in tiers.items() if size is not None},
        "categories": {row.name: row.planned for row in report.rows if row.planned is not None},
    }


# -- progress ----------------------------------------------------------------------------------------------------------


def display_mode(config: Config) -> Mode:
    """Return the mode of rank 0's progress display: scripts and frameworks for DeepSpeed print their own progress."""
    return mode_of(
        config.progress.mode,
        os.environ.get(PROGRESS, ""),
        own_output="deepspeed" in sys.modules,
        terminal=sys.stderr.isatty(),
    )


def display_of(config: Config, rank: int) -> Progress | None:
    """Return the progress display of a rank, or None."""
    mode = display_mode(config)
    if rank != 0 or mode == "off":
        return None
    return Progress(mode, total_steps(config), config.progress.interval)


def device_limit(config: Config, device: torch.device) -> int | None:
    """Return the most bytes that a rank may hold on its device, for display; None if unknown."""
    if config.memory_limits.device is not None:
        return config.memory_limits.device
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def total_steps(config: Config) -> int | None:
    """Return the number of steps of the run, if known."""
    given = config.progress.total_steps
    scheduled = config.scheduler.params.get("total_num_steps")
    if given is not None:
        return given
    return int(scheduled) if isinstance(scheduled, int | float) and scheduled >= 1 else None
