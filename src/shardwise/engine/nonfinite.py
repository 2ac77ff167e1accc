"""Gradients that are infinite or NaN where no loss scale is searched for: named, and trained on if so configured.

Whether there are any travels with the all-reduce of the step. A CPU knows at once; for a CUDA device the host does not
wait, and hears of it at the next step. Only then is it looked at more closely, by all ranks together.
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
    """What is kept of a step until it is known whether its gradients were finite.

    Attributes:
        step: its number.
        window: its micro-batches.
        factor: what turns the sums of gradients into the gradient.
        of_parameters: a number for each parameter that is not finite if its gradient is not; None if nobody looks.
        summed: it is of all ranks; otherwise of what this rank holds.
    """

    step: int
    window: Window
    factor: float | torch.Tensor
    of_parameters: torch.Tensor | None
    summed: bool


class NonFinite:
    """What an engine does about gradients that are not finite.

    Args:
        sharded: the model.
        job: all ranks that step together.
        policy: "skip" where steps with an overflow are skipped to find a loss scale; otherwise the key `non_finite`.
        anomalies: where they are noted.
        tracer: knows in which module values became so.

    Attributes:
        since: number of the step that began the present series of steps with such gradients; None if the last step
            whose gradients are known was a good one.
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
        """Say where a series of steps with such gradients begins and ends; all ranks call with the same `wrong`.

        Args:
            wrong: whether the gradients of the step are not finite.
            evidence: what is known of it.
            late: the next step is under way, and the gradients are not there any more.
        """
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
        """Return a report with the module in which it began, as far as that has been watched, and have modules watched
        from now on if so configured (all ranks call).
        """
        origin = self._tracer.explained(report, window.trace, window.losses, self._job)
        watched_for = self._tracer.arm(step)
        # With the others the run ends here, or the update damages all parameters: there is no second first time.
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
                return None  # finite, and larger together than a number of their type can be
        factor, lost = abs(float(evidence.factor)), evidence.window.lost()
        return explain_overflow(sharded, self._job, values, factor, 1.0, lost)
