"""Anomalies of an engine's steps (non-finite gradients, spikes, rewinds): kept, logged, and sent to monitors."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from shardwise.utils.logging import logger

if TYPE_CHECKING:
    from shardwise.engine.nonfinite import OverflowReport
    from shardwise.engine.spikes import Spike

KEPT = 100
"""Number of anomalies that are kept."""

SPIKE_ADVICE = (
    "look at the data of this step; where it recurs, lower the learning rate, lengthen its warm-up, or set "
    "gradient_clipping"
)
GRADIENT_ADVICE = (
    'see what the batch has, lower the learning rate or set gradient_clipping; "anomaly_watch": {"enabled": true, '
    '"trace": "always"} names the module'
)


@dataclass(frozen=True)
class Anomaly:
    """An anomaly of a step; the same on every rank. A "rewind" is the reaction to another one.

    Attributes:
        step: `engine.global_steps` before the step.
        action: "warn", "skip", "stop" or "rewind".
        ranks: ranks with non-finite values.
        module: module of origin; None if unknown.
        parameters: first and last parameter with a non-finite gradient, or parameters with the most grown gradients.
        phase: "forward", "backward", "reduce" or "gradients" (see `OverflowReport`).
        line: `file:line` that called the module.
        value: loss or norm; of a rewind, the restored step.
        usual: median of the previous values.
    """

    kind: Literal["non_finite", "loss_spike", "grad_norm_spike", "rewind"]
    step: int
    text: str
    action: str
    ranks: tuple[int, ...] = ()
    module: str | None = None
    parameters: tuple[str, ...] = ()
    phase: str | None = None
    line: str = ""
    value: float | None = None
    usual: float | None = None
    advice: str = ""

    @classmethod
    def of_overflow(cls, step: int, report: OverflowReport, action: str) -> Anomaly:
        """Return the anomaly of non-finite gradients."""
        origin = report.origin
        named = (report.parameter, None if report.extent is None else report.extent.last)
        return cls(
            "non_finite",
            step,
            str(report),
            action,
            report.ranks if origin is None else origin.ranks,
            None if origin is None else origin.module,
            tuple(dict.fromkeys(name for name in named if name is not None)),
            report.phase if origin is None else origin.phase,
            "" if origin is None else origin.line,
            advice=GRADIENT_ADVICE if origin is None else origin.advice,
        )

    @classmethod
    def of_spike(cls, step: int, spike: Spike) -> Anomaly:
        """Return the anomaly of a spike."""
        grown = tuple(name for name, _ in spike.grown)
        return cls(
            spike.kind,
            step,
            str(spike),
            spike.action,
            parameters=grown,
            value=spike.value,
            usual=spike.usual,
            advice=SPIKE_ADVICE,
        )

    def event(self) -> dict[str, Any]:
        """Return the anomaly as the `event` of log records, for programs."""
        facts = {key: value for key, value in vars(self).items() if key not in ("text", "ranks", "parameters")}
        return {
            **facts,
            "rank": self.ranks[0] if self.ranks else None,
            "ranks": list(self.ranks),
            "parameters": list(self.parameters),
        }


class Anomalies:
    """Keeps the last anomalies of one engine; rank 0 logs them."""

    def __init__(self, rank: int) -> None:
        self.noted: deque[Anomaly] = deque(maxlen=KEPT)
        self.rewinds = 0
        self._rank = rank
        self._count = self._shown = 0

    def note(self, anomaly: Anomaly, message: str, *values: Any, level: int = logging.WARNING) -> None:
        """Keep an anomaly and log a message."""
        self.note_quietly(anomaly)
        if self._rank == 0:
            logger.log(level, message, *values, extra={"event": anomaly.event()})

    def note_quietly(self, anomaly: Anomaly) -> None:
        """Keep an anomaly without logging, because an error reports it."""
        self.noted.append(anomaly)
        self._count += 1

    def take_new(self) -> list[Anomaly]:
        """Return anomalies since the last call, at most `KEPT`."""
        new, self._shown = self._count - self._shown, self._count
        return list(self.noted)[-new:] if new else []
