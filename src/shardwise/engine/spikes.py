"""Spike detection for losses and gradient norms, by median and median absolute deviation.

A value is compared with the median of the last values, in units of their median absolute deviation (MAD), which is
robust to a few outliers (Hampel, 1974; *modified z-score*, Iglewicz and Hoaglin, 1993). Norms are compared by
logarithm, because they vary over orders of magnitude. All ranks compute from equal numbers, and so decide alike.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from shardwise.config.schema.observe import AnomalyWatch

HISTORY = 1000
"""Values kept for display."""

FLOOR = 0.01
"""Smallest deviation (of nearly constant values): a fraction of the median of losses, a logarithm of norms."""

NORMAL = 1.4826
"""Standard deviation over MAD, of normally distributed values."""

SHARE = 0.05
"""Weight of the last step in the moving average of a parameter's squared gradient."""

NAMED = 3
"""Number of parameters that are named."""

Kind = Literal["loss_spike", "grad_norm_spike"]
Action = Literal["warn", "skip", "stop", "rewind", "ignore"]


@dataclass(frozen=True)
class Spike:
    """A loss or gradient norm, by `deviations` standard deviations above `usual`, the median of the last values; the
    same on all ranks. `grown`: parameters with the most grown gradients, and by which factor.
    """

    kind: Kind
    value: float
    usual: float
    deviations: float
    action: Action = "warn"
    grown: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        """Describe the spike.

        >>> print(Spike("loss_spike", 9.5, 2.25, 31.0, grown=(("blocks.1.up.weight", 80.0),)))
        the mean loss of all ranks is 9.5, where it was about 2.25: 31 deviations above. Gradients have grown most in \
'blocks.1.up.weight' (80 times)
        """
        what = "the mean loss of all ranks" if self.kind == "loss_spike" else "the norm of the gradients"
        grown = ", ".join(f"{name!r} ({factor:.3g} times)" for name, factor in self.grown)
        more = f". Gradients have grown most in {grown}" if grown else ""
        above = f"{self.deviations:.3g} deviations above"
        return f"{what} is {self.value:.5g}, where it was about {self.usual:.5g}: {above}{more}"


class History:
    """Last values of one number, and detection of values above the median by more than `threshold` deviations.

    A new value is compared with the last `window` values, of which at least `least` must exist.

    >>> history = History(window=10, threshold=8.0, least=3)
    >>> [history.judge(step, value) for step, value in enumerate([2.0, 2.1, 1.9, 2.05])]
    [None, None, None, None]
    >>> usual, deviations = history.judge(4, 9.0)
    >>> round(usual, 3), round(deviations)
    (2.025, 94)
    """

    def __init__(self, window: int, threshold: float, least: int, factors: bool = False) -> None:
        self._window = window
        self._threshold = threshold
        self._least = least
        self._factors = factors
        self.values: deque[tuple[int, float]] = deque(maxlen=max(HISTORY, window))
        # Compared values by time and by size: most steps need only the median.
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def judge(self, step: int, value: float) -> tuple[float, float] | None:
        """Add a value; if it is a spike, return the previous median and the distance in deviations."""
        spike = self._spike(value) if len(self._recent) >= self._least else None
        self._keep(step, value)
        return spike

    def _spike(self, value: float) -> tuple[float, float] | None:
        seen = self._seen
        low, high = _middle(self._sorted)
        middle = (seen(low) + seen(high)) / 2
        above = seen(value) - middle
        floor = max(FLOOR if self._factors else FLOOR * abs(middle), 1e-300)
        if above <= self._threshold * floor:
            return None  # for any deviation
        deviation = NORMAL * sum(_middle(sorted(abs(seen(one) - middle) for one in self._sorted))) / 2
        distance = above / max(deviation, floor)
        return ((low + high) / 2, distance) if distance > self._threshold else None

    def _seen(self, value: float) -> float:
        return math.log(max(value, 1e-300)) if self._factors else value

    def _keep(self, step: int, value: float) -> None:
        self.values.append((step, value))
        self._recent.append(value)
        insort(self._sorted, value)
        if len(self._recent) > self._window:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]

    def state(self) -> list[list[float]]:
        """Return the state for `load`."""
        return [[float(step), value] for step, value in self.values]

    def load(self, state: Sequence[Sequence[float]]) -> None:
        """Restore a state."""
        self.values.clear()
        self._recent.clear()
        self._sorted.clear()
        for step, value in state:
            self._keep(int(step), float(value))


def _middle(ordered: Sequence[float]) -> tuple[float, float]:
    """Return the two middle values (or the middle one twice) of sorted values; their mean is the median."""
    return ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]


class SpikeWatch:
    """Detects spikes in the mean losses of all ranks and the gradient norms of one engine's steps."""

    def __init__(self, options: AnomalyWatch, names: Sequence[str]) -> None:
        arguments = options.window, options.threshold, options.min_steps
        self.losses = History(*arguments)
        self.norms = History(*arguments, factors=True)
        self._actions: dict[Kind, Action] = {
            "loss_spike": options.loss_spike,
            "grad_norm_spike": options.grad_norm_spike,
        }
        self.follow(names)

    def follow(self, names: Sequence[str]) -> None:
        """Take over the names of the model's parameters."""
        self._names = names
        self._usual: torch.Tensor | None = None

    @property
    def decides(self) -> bool:
        """Whether an action depends on the result before the update."""
        return any(action in ("skip", "stop", "rewind") for action in self._actions.values())

    def judge(
        self,
        step: int,
        loss: float | None,
        norm: float | None,
        sums: torch.Tensor | None,
        factor: float | torch.Tensor,
    ) -> list[Spike]:
        """Add a step, and return its spikes; loss or norm may be unknown. `sums`: squared gradient norm of each
        parameter, before the scale `factor` from gradient sums to the gradient.
        """
        found: list[Spike] = []
        kinds: tuple[tuple[Kind, History, float | None], ...] = (
            ("loss_spike", self.losses, loss),
            ("grad_norm_spike", self.norms, norm),
        )
        for kind, history, value in kinds:
            if value is None or not math.isfinite(value):
                continue
            judged = history.judge(step, value)
            if judged is not None and self._actions[kind] != "ignore":
                found.append(Spike(kind, value, *judged, action=self._actions[kind]))
        if sums is not None and norm is not None and math.isfinite(norm):
            squares = sums * (factor * factor)
            grown = self._grown(squares) if found and self._usual is not None else ()
            found = [replace(spike, grown=grown) for spike in found]
            self._usual = squares if self._usual is None else torch.lerp(self._usual, squares, SHARE)
        return found

    def _grown(self, squares: torch.Tensor) -> tuple[tuple[str, float], ...]:
        assert self._usual is not None
        factors = (squares / self._usual.clamp(min=1e-300)).sqrt().tolist()
        first = sorted(range(len(factors)), key=lambda place: -factors[place])[:NAMED]
        return tuple((self._names[place], factors[place]) for place in first if factors[place] > 1.0)

    def state(self) -> dict[str, Any]:
        """Return the state for `load`, as values that a checkpoint can hold."""
        return {
            "losses": _packed(self.losses.state()),
            "norms": _packed(self.norms.state()),
            "usual": None if self._usual is None else self._usual.cpu(),
        }

    def load(self, state: Mapping[str, Any] | None, device: torch.device) -> None:
        """Restore a state; None: start empty."""
        state = state or {}
        for history, name in ((self.losses, "losses"), (self.norms, "norms")):
            packed = state.get(name)
            history.load([] if packed is None else packed.tolist())
        usual = state.get("usual")
        if usual is not None:
            usual = usual.to(device, torch.float64) if usual.shape == (len(self._names),) else None
        self._usual = usual


def _packed(pairs: list[list[float]]) -> torch.Tensor:
    return torch.tensor(pairs, dtype=torch.float64, device="cpu").reshape(-1, 2)
