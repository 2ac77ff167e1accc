"""Watching the numbers of a run: losses, gradient norms, and infinite or NaN values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from shardwise.errors import ConflictError

from .base import ConfigSection, Contradiction, Int, key

OnSpike = Literal["warn", "skip", "stop", "rewind", "ignore"]


class AnomalyWatch(ConfigSection):
    """`anomaly_watch`: loss spikes, growing gradients, and the module that first computes infinite or NaN values. Not
    a section of DeepSpeed.
    """

    enabled: bool = key(False, "Watch losses, gradient norms and modules.")
    trace: Literal["off", "after", "always"] = key(
        "after",
        "Watch what modules hand on, to name the one in which values become infinite or NaN: never, for `trace_steps` "
        "steps after one whose gradients were not finite, or always, which names the first one too.",
    )
    trace_steps: Int = key(100, "Steps for which modules are watched after one whose gradients were not finite.", gt=0)
    loss_spike: OnSpike = key(
        "warn",
        "A mean loss far above the last ones: warn; skip the step; stop before the update; rewind to the copy in "
        "memory (`checkpoint.memory_copies`); do not look.",
    )
    grad_norm_spike: OnSpike = key("warn", "The same of a gradient norm.")
    window: Int = key(100, "Steps with which a value is compared.", ge=4)
    min_steps: Int = key(30, "Steps before the first value is judged.", ge=3)
    threshold: float = key(
        8.0, "Deviations above the median of the window from which a value is a spike (1.4826 MAD is one).", gt=0
    )
    max_rewinds: Int = key(3, "Most rewinds; the next anomaly that requests one ends the run.", gt=0)

    def contradictions(self, at: Callable[[str], str]) -> Iterator[Contradiction]:
        """Yield a minimum that the window never reaches."""
        if self.min_steps > self.window:
            message = (
                f"is {self.min_steps}, and no more than {at('window')} = {self.window} steps are ever compared, so no "
                "value would be judged; lower it or widen the window"
            )
            yield "min_steps", message, ConflictError
