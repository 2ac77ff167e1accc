"""Handles non-finite gradients without a searched loss scale: reports their origin and applies `non_finite`.

The step's all-reduce includes the flag, read at once on a CPU, and at the next step on CUDA, without a host wait. Only
then all ranks search for the origin together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from shardwise.engine.anomalies import Anomalies, Anomaly
from shardwise.engine.overflows import explain_late, explain_overflow
from shardwise.engine.window import Window
from shardwise.precision.overflow import OverflowReport, first_not_finite
from shardwise.utils.logging import logger

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator
    from shardwise.engine.scaling import OnNonFinite
    from shardwise.engine.tracing import Tracer
    from shardwise.zero.model import ShardedModel


@dataclass(frozen=True)
class Evidence:
    """State of a step, kept until its gradients are known to be finite; `factor`: scale from sums to gradients.
    `of_parameters`: a number for each parameter, non-finite if its gradient is (None: unchecked), `summed` over ranks.
    """

    step: int
    window: Window
    factor: float | torch.Tensor
    of_parameters: torch.Tensor | None
    summed: bool


class NonFinite:
    """Applies the policy for non-finite gradients: the key `non_finite`, or "skip" where a loss scale is searched.
    `since`: first step of the current series with non-finite gradients, or None.
    """

    def __init__(
        self, sharded: ShardedModel, job: Communicator, policy: OnNonFinite, anomalies: Anomalies, tracer: Tracer
    ) -> None:
        self._sharded = sharded
        self._job = job
        self._anomalies = anomalies
        self._tracer = tracer
        self.policy = policy
        self.since: int | None = None

    @staticmethod
    def flag(values: torch.Tensor) -> torch.Tensor:
        """Return 1 if a value is not finite, else 0, as a 0-D fp64 tensor; the host does not wait."""
        return torch.isfinite(values).all().logical_not().double()

    def hear(self, wrong: bool, evidence: Evidence, *, late: bool) -> None:
        """Log where a series of non-finite steps begins and ends (all ranks call). `late`: the gradients are gone."""
        first = self._job.rank == 0
        if not wrong:
            if self.since is not None and first:
                logger.warning(
                    "step %d: gradients are finite again, after %d steps with gradients that were not",
                    evidence.step,
                    evidence.step - self.since,
                )
            self.since = None
        elif self.since is None:
            report = self._explained(evidence, late)
            if report is None:
                return
            self.since = evidence.step
            report = self.traced(report, evidence.step, evidence.window)
            anomaly = Anomaly.of_overflow(evidence.step, report, "warn")
            self._anomalies.note(
                anomaly,
                "step %d: gradients are not finite, and the update makes parameters infinite or NaN. %s. The key "
                '"non_finite" says what to do: "warn" (so now), "skip" such steps, "stop" before the update, "rewind" '
                "to a copy in memory; %s",
                evidence.step,
                report,
                anomaly.advice,
            )

    def traced(self, report: OverflowReport, step: int, window: Window) -> OverflowReport:
        """Return a report with the module of origin, if traced; start tracing if configured (all ranks call)."""
        origin = self._tracer.explained(report, window.trace, window.losses, self._job)
        watched_for = self._tracer.arm(step)
        # With other policies the run ends here, or the update damages all parameters: tracing later is useless.
        recurs = self.policy in ("skip", "rewind")
        return replace(report, origin=origin, watched_for=watched_for if recurs else None)

    def _explained(self, evidence: Evidence, late: bool) -> OverflowReport | None:
        sharded, values = self._sharded, evidence.of_parameters
        assert values is not None and sharded.sums is not None
        if late:
            if not evidence.summed:
                values = values.clone()
                sharded.sums.add(values, "non_finite")
            return explain_late(sharded, self._job, values, evidence.window.lost())
        if not evidence.summed:
            values = sharded.sums.by_tensor(sharded.sums.own_squares())
            if first_not_finite(values) is None:
                return None  # finite, but their sum overflows the dtype
        factor, lost = abs(float(evidence.factor)), evidence.window.lost()
        return explain_overflow(sharded, self._job, values, factor, 1.0, lost)
