"""What an engine has noticed that should not be: kept, logged with the facts for programs, and shown to monitors."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

from shardwise.engine.spikes import Spike
from shardwise.precision.overflow import OverflowReport
from shardwise.utils.logging import logger

KEPT = 100
"""Anomalies that are kept."""

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
    """Something that was noticed at a step; the same on every rank.

    Attributes:
        kind: "non_finite", "loss_spike", "grad_norm_spike", or "rewind", which is what was done about one.
        step: number of the step (`engine.global_steps` before it).
        text: what is known, in words.
        action: what was done: "warn", "skip", "stop" or "rewind".
        ranks: where values were not finite.
        module: in which it began; None if it is not known.
        parameters: the first and the last whose gradient was not finite, or those whose gradients have grown most.
        phase: "forward", "backward", "reduce" or "gradients" (see `OverflowReport`).
        line: `file:line` from which the module was called.
        value: the loss or the norm; of a rewind the step to which it went.
        usual: the median of the values before.
        advice: what to try.
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
        """Return that of gradients that are not finite."""
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
        """Return that of an unusual value."""
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
        """Return it for programs that read log records (`record.event`)."""
        facts = {key: value for key, value in vars(self).items() if key not in ("text", "ranks", "parameters")}
        return {
            **facts,
            "rank": self.ranks[0] if self.ranks else None,
            "ranks": list(self.ranks),
            "parameters": list(self.parameters),
        }


class Anomalies:
    """The last anomalies of one engine.

    Args:
        rank: of this process in the job; the first one logs.

    Attributes:
        noted: the last of them, the oldest first.
        rewinds: how often the engine has gone back.
    """

    def __init__(self, rank: int) -> None:
        self.noted: deque[Anomaly] = deque(maxlen=KEPT)
        self.rewinds = 0
        self._rank = rank
        self._count = self._shown = 0

    def note(self, anomaly: Anomaly, message: str, *values: Any, level: int = logging.WARNING) -> None:
        """Keep an anomaly and log a message about it."""
        self.note_quietly(anomaly)
        if self._rank == 0:
            logger.log(level, message, *values, extra={"event": anomaly.event()})

    def note_quietly(self, anomaly: Anomaly) -> None:
        """Keep an anomaly that an error tells of."""
        self.noted.append(anomaly)
        self._count += 1

    def take_new(self) -> list[Anomaly]:
        """Return those since the last call, of the last `KEPT`."""
        new, self._shown = self._count - self._shown, self._count
        return list(self.noted)[-new:] if new else []
