"""Times of checkpointed functions: forward, recomputation and backward.

CUDA times come from CUDA events, which are read on request; CPU times from the host's clock.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from shardwise.device.clock import now, seconds_between
from shardwise.trees import tensors_in

Called = Callable[..., Any]

_PENDING = 1024  # maximum number of CUDA intervals before they are summed


@dataclass(frozen=True)
class CheckpointTimes:
    """Times of one function's checkpointed calls, in seconds.

    Attributes:
        calls: number of calls in forward passes.
        forward: time of these calls.
        recompute: time of the recomputation in backward passes.
        backward: from its outputs' gradients to its inputs' gradients, `recompute` included.
    """

    calls: int = 0
    forward: float = 0.0
    recompute: float = 0.0
    backward: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.calls} calls: forward {1e3 * self.forward:.1f} ms, recompute {1e3 * self.recompute:.1f} ms, "
            f"backward {1e3 * self.backward:.1f} ms"
        )


class Timer:
    """Sums of times by function and phase."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._sums: dict[str, dict[str, float]] = {}
        self._pending: list[tuple[str, str, Any, Any]] = []

    def call(self, name: str, run: Callable[[Called], Any], function: Called, given: Any) -> Any:
        """Time one checkpointed call `run(timed function)` and return its result; `given` determines the device."""
        from shardwise.zero.passes.calls import Use  # imported only when times are needed

        cuda = any(tensor.is_cuda for tensor in tensors_in(given))
        begun: list[Any] = []
        calls = 0

        def timed(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            with self._interval(name, "forward" if calls == 1 else "recompute", cuda):
                return function(*args, **kwargs)

        def before() -> None:
            if not begun:
                begun.append(now(cuda))

        def done(use: Use) -> None:
            if begun:
                self._add(name, "backward", begun.pop(), now(cuda))

        use = Use(done)
        outputs = run(timed)
        self._count(name)
        use.follow(outputs, before)
        return outputs

    @contextlib.contextmanager
    def _interval(self, name: str, phase: str, cuda: bool) -> Iterator[None]:
        start = now(cuda)
        try:
            yield
        finally:
            self._add(name, phase, start, now(cuda))

    def _count(self, name: str) -> None:
        with self._lock:
            sums = self._of(name)
            sums["calls"] += 1

    def _of(self, name: str) -> dict[str, float]:
        return self._sums.setdefault(name, {"calls": 0, "forward": 0.0, "recompute": 0.0, "backward": 0.0})

    def _add(self, name: str, phase: str, start: Any, end: Any) -> None:
        with self._lock:
            if isinstance(end, float):
                self._of(name)[phase] += seconds_between(start, end)
                return
            self._pending.append((name, phase, start, end))
            if len(self._pending) > _PENDING:
                self._fold(self._pending[: _PENDING // 2])
                del self._pending[: _PENDING // 2]

    def _fold(self, intervals: list[tuple[str, str, Any, Any]]) -> None:
        for name, phase, start, end in intervals:
            self._of(name)[phase] += seconds_between(start, end)

    def read(self, clear: bool) -> dict[str, CheckpointTimes]:
        """Return the sums by function, waiting for timed CUDA work."""
        with self._lock:
            self._fold(self._pending)
            self._pending.clear()
            found = {
                name: CheckpointTimes(int(sums["calls"]), sums["forward"], sums["recompute"], sums["backward"])
                for name, sums in self._sums.items()
            }
            if clear:
                self._sums.clear()
            return found


TIMER = Timer()  # of this process


def times(*, clear: bool = False) -> dict[str, CheckpointTimes]:
    """Return times of checkpointed functions by name, since `profile` was enabled.

    Example:
        >>> times(clear=True)
        {}
    """
    return TIMER.read(clear)
