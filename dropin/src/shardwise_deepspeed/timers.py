"""Timers of scripts, with DeepSpeed's names and interface.

Times come from CUDA events if a CUDA device is in use; reading a time waits for the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from shardwise.comm.logger import trimmed_mean
from shardwise.device.clock import Instant, now, seconds_between
from shardwise.errors import UsageError
from shardwise.utils.logging import log_dist
from shardwise_deepspeed.entries import read

TIME_EPSILON: float = read("constants.toml")["TIME_EPSILON"]


def _on_cuda() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


class Timer:
    """Sum of intervals; `name` is for messages."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._begun: Instant | None = None
        self._intervals: list[tuple[Instant, Instant]] = []

    def start(self) -> None:
        """Begin an interval; raises a UsageError if one is open already."""
        if self._begun is not None:
            raise UsageError(f"timer {self.name!r}: start() is called twice; call stop() in between")
        self._begun = now(_on_cuda())

    def stop(self, reset: bool = False, record: bool = True) -> None:
        """End the interval; raises a UsageError if none is open.

        `reset` discards earlier intervals, `record=False` this one.
        """
        if self._begun is None:
            raise UsageError(f"timer {self.name!r}: stop() without start()")
        begun, self._begun = self._begun, None
        if reset:
            self._intervals = []
        if record:
            self._intervals.append((begun, now(not isinstance(begun, float))))

    def reset(self) -> None:
        """Discard all intervals, including an open one."""
        self._begun, self._intervals = None, []

    def milliseconds(self) -> list[float]:
        """Return the finished intervals, waiting for the device."""
        return [1e3 * seconds_between(*interval) for interval in self._intervals]

    def elapsed(self, reset: bool = True) -> float:
        """Return the sum of all intervals in milliseconds; `reset` discards them. An open interval counts up to now,
        where a new one begins.
        """
        is_open = self._begun is not None
        if is_open:
            self.stop()
        found = sum(self.milliseconds())
        if reset:
            self._intervals = []
        if is_open:
            self.start()
        return found

    def mean(self) -> float:
        """Return the mean of the intervals in milliseconds, without the longest and the shortest tenth."""
        return trim_mean(self.milliseconds(), 0.1)


class SynchronizedWallClockTimer:
    """Timers by name: `timers("load").start()`.

    Example:
        >>> timers = SynchronizedWallClockTimer()
        >>> timers("load").start()
        >>> timers("load").stop()
        >>> timers.has_timer("load"), timers("load").elapsed() >= 0.0
        (True, True)
    """

    def __init__(self) -> None:
        self.timers: dict[str, Timer] = {}

    def __call__(self, name: str) -> Timer:
        """Return the timer of a name, creating it on first use."""
        return self.timers.setdefault(name, Timer(name))

    def get_timers(self) -> dict[str, Timer]:
        """Return all timers by name."""
        return self.timers

    def has_timer(self, name: str) -> bool:
        """Return True if a timer of this name exists."""
        return name in self.timers

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: list[int] | None = None,
    ) -> None:
        """Log times in milliseconds, divided by `normalizer` (above 0, else a UsageError), and reset the timers.

        Missing timers are skipped. `memory_breakdown` also logs the device's memory. The default of `ranks` is the
        first.
        """
        found = self.get_mean(names, normalizer, reset, mean=False)
        text = " | ".join(f"{name}: {value:.2f}" for name, value in found.items())
        log_dist(f"time (ms) | {text}{self.memory_usage() if memory_breakdown else ''}", ranks or [0])

    @staticmethod
    def memory_usage() -> str:
        """Return the device's memory as text, as `log` appends; empty if no CUDA device is in use."""
        if not _on_cuda():
            return ""
        used, most = torch.cuda.memory_allocated() / 1e9, torch.cuda.max_memory_allocated() / 1e9
        return f" | memory (GB): {used:.2f}, at most {most:.2f}"

    def get_mean(
        self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True, *, mean: bool = True
    ) -> dict[str, float]:
        """Return mean times in milliseconds (`mean=False`: sums); other arguments and errors as of `log`."""
        if normalizer <= 0:
            raise UsageError(f"timers: normalizer={normalizer!r}; expected a number above 0")
        found = {}
        for name in names:
            if name in self.timers:
                timer = self.timers[name]
                found[name] = (timer.mean() if mean else timer.elapsed(reset)) / normalizer
                if mean and reset:
                    timer.reset()
        return found


class NoopTimer:
    """Timer interface without effect."""

    def __call__(self, name: str) -> NoopTimer:
        """Return itself as the timer."""
        return self

    def start(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    stop = reset = log = start

    def elapsed(self, **_: Any) -> float:
        """Return 0."""
        return 0.0

    mean = elapsed

    def has_timer(self, name: str) -> bool:
        """Return True: every name maps to this timer."""
        return True

    def get_mean(self, *_: Any, **__: Any) -> dict[str, float]:
        """Return an empty dict."""
        return {}

    get_timers = get_mean


class ThroughputTimer:
    """Samples per second between `start()` and `stop()` of each step.

    Args:
        config: has `enabled` and `synchronized` (the section `timers.throughput`).
        batch_size: samples of all ranks in a step.
        start_step: first counted step.
        steps_per_output: steps between log lines; None: never.
        monitor_memory: also log the device's memory.
        logging_fn: receives log lines; None: the log, on rank 0.

    Raises:
        UsageError: `batch_size` is below 1.
    """

    def __init__(
        self,
        config: Any,
        batch_size: int,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], Any] | None = None,
    ) -> None:
        if batch_size < 1:
            raise UsageError(f"ThroughputTimer(batch_size={batch_size}): expected 1 or more samples")
        self.config = config
        self.batch_size = batch_size
        self.start_step = start_step
        self.steps_per_output = steps_per_output
        self.monitor_memory = monitor_memory
        self.logging = logging_fn if logging_fn is not None else lambda text: log_dist(text, [0])
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = self.step_elapsed_time = 0.0
        self.started = False
        self._begun = 0.0
        self._counted = self._logged_step = 0
        self._logged_time = 0.0

    def update_epoch_count(self) -> None:
        """Count the end of an epoch."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def _now(self) -> float:
        if self.config.synchronized and _on_cuda():
            torch.cuda.synchronize()
        return time.perf_counter()

    def start(self) -> None:
        """Begin a micro-batch."""
        if self.config.enabled:
            self.started = True
            if self.global_step_count >= self.start_step:
                self._begun = self._now()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """End a micro-batch, with `global_step` also a step, and log if due; do nothing if none has begun."""
        if not self.config.enabled or not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        if self._begun:
            took = self._now() - self._begun
            self._begun = 0.0
            self.total_elapsed_time += took
            self.step_elapsed_time += took
            self._counted += global_step
        if not global_step:
            return
        self.global_step_count += 1
        due = self.steps_per_output and self.global_step_count % self.steps_per_output == 0
        if report_speed and due and self._counted > self._logged_step:
            steps, seconds = self._counted - self._logged_step, self.total_elapsed_time - self._logged_time
            now_speed = steps * self.batch_size / max(seconds, TIME_EPSILON)
            text = (
                f"epoch={self.epoch_count} micro_step={self.micro_step_count} step={self.global_step_count} "
                f"samples/s={now_speed:.4g}, since the beginning {self.avg_samples_per_sec():.4g}"
            )
            if self.monitor_memory and _on_cuda():
                text += f", memory (GB) {torch.cuda.memory_allocated() / 1e9:.2f}"
            self.logging(text)
            self._logged_step, self._logged_time = self._counted, self.total_elapsed_time
        self.step_elapsed_time = 0.0

    def avg_samples_per_sec(self) -> float:
        """Return samples per second of all counted steps; minus infinity without one."""
        if not self._counted:
            return float("-inf")
        return self._counted * self.batch_size / max(self.total_elapsed_time, TIME_EPSILON)


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """Return the mean without a share `trim_percent` of the largest and of the smallest values; 0 if empty.

    Raises a UsageError if the share is below 0 or above 1.

    >>> trim_mean([100.0, 1.0, 2.0, 3.0, -5.0], 0.2), trim_mean([], 0.1)
    (2.0, 0.0)
    """
    if not 0.0 <= trim_percent <= 1.0:
        raise UsageError(f"trim_mean(trim_percent={trim_percent!r}): expected a number from 0 to 1")
    return trimmed_mean(data, trim_percent)
