"""Events that an engine writes to its monitor after each step."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import TYPE_CHECKING

from shardwise.engine.observers import StepObserver
from shardwise.monitor import Monitor
from shardwise.profile.breakdown import BACKWARD, FORWARD, INNER, REDUCE, STEP

if TYPE_CHECKING:
    from shardwise.engine.step import TrainStep

PREFIX = "Train/Samples/"
_TIMES = {
    FORWARD: "forward",
    BACKWARD: "backward",
    INNER: "backward_inner",
    REDUCE: "backward_allreduce",
    STEP: "step",
}
"""Phase of a step -> suffix of its event after `elapsed_time_ms_`."""


class StepEvents(StepObserver):
    """Writes loss, learning rates, loss scale, gradient norm, speed and anomalies, by global samples. The host never
    waits: device values are read once they have arrived. Times include the script's own work.
    """

    def __init__(self, monitor: Monitor, step: TrainStep) -> None:
        self._monitor = monitor
        self._step = step
        self._ended: float | None = None
        self.active = monitor.writes

    def after_step(self) -> None:
        """Write the values of the last step report."""
        report = self._step.last_step
        noticed = self._step.anomalies.take_new()
        if report is None:
            return
        events = {"train_loss": report.loss, "grad_norm": report.grad_norm}
        # The first group has the name that scripts expect.
        rates = {f"lr_{group}" if group else "lr": rate for group, rate in enumerate(report.lr)}
        scale = {} if self._step.loss_scaler is None else {"loss_scale": report.loss_scale}
        now = perf_counter()
        speed = {}
        if self._ended is not None:
            seconds = now - self._ended
            speed = {"step_time_ms": 1e3 * seconds, "samples_per_second": report.samples / max(seconds, 1e-9)}
        self._ended = now
        found = {name: value for name, value in events.items() if value is not None} | rates | scale | speed
        at = self._step.global_samples
        # Anomalies without a value are written as 1.
        found |= {one.kind: 1.0 if one.value is None else one.value for one in noticed}
        self._monitor.write_events([(PREFIX + name, value, at) for name, value in found.items()])

    def write_times(self, means: Mapping[str, float]) -> None:
        """Write the mean times of a step's phases, in milliseconds."""
        at = self._step.global_samples
        self._monitor.write_events(
            [(f"{PREFIX}elapsed_time_ms_{_TIMES[part]}", mean, at) for part, mean in means.items()]
        )
