"""Step log: values of each step for the run log and the progress display."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from shardwise.device.clock import Interval, Timed, add_up
from shardwise.engine.observers import NOTHING, StepObserver
from shardwise.memory import Tier, resident_bytes
from shardwise.memory.accountant import Lap
from shardwise.monitor.pending import Pending
from shardwise.monitor.progress import Memory, Progress, State
from shardwise.profile.rates import tokens_in

if TYPE_CHECKING:
    from shardwise.comm.ledger import Ledger, Record
    from shardwise.engine.step import StepReport, TrainStep
    from shardwise.monitor.runlog import RunLog
    from shardwise.zero.model import ShardedModel

_UNITS = 8
"""Units of a row: those with the longest waits."""


class Following(StepObserver):
    """Records each step for the run log (every `every` steps) and the progress display (`limit`: of device bytes)."""

    def __init__(
        self,
        sharded: ShardedModel,
        step: TrainStep,
        ledger: Ledger,
        ranks: int,
        log: RunLog | None = None,
        every: int = 1,
        display: Progress | None = None,
        limit: int | None = None,
    ) -> None:
        self.log = log
        self.display = display
        self.active = log is not None or display is not None
        self._accountant = sharded.accountant
        self._cuda = sharded.device.type == "cuda"
        self._step = step
        self._ranks = ranks
        self._limit = limit
        self._tokens: int | None = 0  # of this rank since the beginning
        self._every = every
        self._steps = 0  # since the last row
        self._last = 0.0  # end of the last step
        self._ended: float | None = None  # of the last row, or the beginning of the first step
        self._before = (0, 0)  # samples and tokens at the last row
        self._parts: list[Interval] = []
        self._waits = _Waits()
        self._ledger = ledger
        self._collectives: dict[str, tuple[int, int, int]] = {}
        self._moved = {tier: self._accountant.moved(tier) for tier in Tier}
        if log is not None:
            self._collectives = self._totals()
            self._accountant.lap()
            ledger.listen(self._waits.heard)

    # -- observation -------------------------------------------------------------------------------------------------

    @override
    def forward(self, training: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AbstractContextManager[Any]:
        if not training:
            return NOTHING
        if self._tokens is not None:
            found = tokens_in(args, kwargs)
            self._tokens = None if found is None else self._tokens + found
        if self._ended is None:
            self._ended = time.perf_counter()
            self._before = self._step.global_samples, 0
            if self.log is not None:
                self._collectives = self._totals()  # excludes `initialize` and earlier evaluations
        return self._part("forward")

    @override
    def backward(self) -> AbstractContextManager[Any]:
        return self._part("backward")

    @override
    def step(self) -> AbstractContextManager[Any]:
        return self._part("step")

    def _part(self, name: str) -> AbstractContextManager[Any]:
        return NOTHING if self.log is None else Timed(name, self._parts, self._cuda)

    @override
    def after_step(self) -> None:
        report = self._step.last_step
        if report is None:
            return
        self._steps += 1
        self._last = clock = time.perf_counter()
        self._waits.fold()
        at = self._step.global_steps
        if self.log is not None and at % self._every == 0:
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
        }
        if step.loss_scaler is not None:
            values["loss_scale"] = report.loss_scale
        if self._ended is not None:
            seconds = max(clock - self._ended, 1e-9)
            values |= {"seconds": seconds, "samples_per_second": (samples - self._before[0]) / seconds}
            if tokens:
                values["tokens"] = (tokens - self._before[1]) * self._ranks
                values["tokens_per_second"] = values["tokens"] / seconds
        self._ended, self._before, self._steps = clock, (samples, tokens or 0), 0
        pending = Pending(
            (name, value, step.global_steps)
            for name, value in (("loss", report.loss), ("grad_norm", report.grad_norm))
            if value is not None
        )
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
            tokens=None if self._tokens is None else self._tokens * self._ranks,
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
        self.heard = self._heard.append
        """Called after each wait for a collective; only appends."""

    def fold(self) -> None:
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
