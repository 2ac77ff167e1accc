"""Overflow report of a step with non-finite gradients: first parameter, ranks and cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from shardwise.precision.origin import Origin

Phase = Literal["forward", "backward", "reduce", "gradients"]


@dataclass(frozen=True)
class Found:
    """Infinite and NaN elements in one rank's part of a gradient, and the largest absolute finite value (0: none)."""

    infinite: int = 0
    nan: int = 0
    largest: float = 0.0

    @classmethod
    def of(cls, runs: Sequence[torch.Tensor]) -> Found:
        """Count non-finite elements in runs of a gradient.

        >>> Found.of([torch.tensor([1.0, float("inf")]), torch.tensor([float("nan"), -3.0])])
        Found(infinite=1, nan=1, largest=3.0)
        """
        infinite = nan = 0
        largest = 0.0
        for run in runs:
            infinite += int(torch.isinf(run).sum())
            nan += int(torch.isnan(run).sum())
            finite = run[torch.isfinite(run)]
            if finite.numel():
                largest = max(largest, float(finite.abs().max()))
        return cls(infinite, nan, largest)


@dataclass(frozen=True)
class Extent:
    """The `count` of `total` parameters with non-finite gradients, in the order of the model.

    `last` is the name of the last one, `following` of the next parameter, which has a finite gradient, or None.
    """

    count: int
    total: int
    last: str
    following: str | None

    @classmethod
    def of(cls, sums: torch.Tensor, names: Sequence[str]) -> Extent | None:
        """Return the extent from one number a parameter, non-finite if its gradient is.

        >>> Extent.of(torch.tensor([float("nan"), float("inf"), 1.0]), ["low", "middle", "high"])
        Extent(count=2, total=3, last='middle', following='high')
        """
        places = torch.isfinite(sums).logical_not().nonzero().flatten().tolist()
        if not places:
            return None
        following = names[places[-1] + 1] if places[-1] + 1 < len(names) else None
        return cls(len(places), len(names), names[places[-1]], following)

    def describe(self, phase: Phase) -> str:
        """Return a sentence for a message. In a backward pass NaN spreads from the last parameters to the first.

        >>> print(Extent(3, 8, "layers.1.bias", "layers.2.weight").describe("backward"))
        3 of 8 parameters have such gradients, the last 'layers.1.bias'; that of the next, 'layers.2.weight', is \
finite, so in the order of the model it began between them
        >>> print(Extent(8, 8, "head.bias", None).describe("backward"))
        All 8 parameters have such gradients, so it began behind 'head.bias', or there
        """
        if self.count == self.total:
            behind = f", so it began behind {self.last!r}, or there" if phase == "backward" else ""
            return f"All {self.total} parameters have such gradients{behind}"
        if self.count == 1:
            return f"1 of {self.total} parameters has such a gradient"
        first = f"{self.count} of {self.total} parameters have such gradients, the last {self.last!r}"
        if phase != "backward" or self.following is None:
            return first
        between = f"that of the next, {self.following!r}, is finite, so in the order of the model it began between them"
        return f"{first}; {between}"


@dataclass(frozen=True)
class OverflowReport:
    """Cause of non-finite gradients in a step, the same on every rank.

    Attributes:
        phase: "forward": a loss was non-finite. "backward": losses were finite, a rank's own gradient was not, in its
            communication dtype. "reduce": all communicated gradients were finite, their sum was not, as sums in 16 bits
            can be. "gradients": "backward" or "reduce"; not every gradient was checked before communication; in the
            following steps each is.
        ranks: ranks of the data-parallel group with such a loss or gradient; empty for "reduce" and "gradients".
        parameter: first parameter in registration order with a non-finite gradient; None: only the norm is non-finite.
        loss_scale: factor of the losses.
        infinite, nan, largest: as in `Found`, of the summed gradient, as the step would use it; None: already freed.
        origin: module of the first non-finite value; None if modules were not watched (`anomaly_watch.trace`).
        watched_for: number of following steps in which modules are watched, to trace a recurrence to its module.
    """

    phase: Phase
    ranks: tuple[int, ...]
    parameter: str | None
    unit: str | None
    numel: int
    loss_scale: float
    infinite: int | None = None
    nan: int | None = None
    largest: float | None = None
    origin: Origin | None = None
    extent: Extent | None = None
    watched_for: int | None = None

    def __str__(self) -> str:
        """Return a sentence for a message.

        >>> print(OverflowReport("backward", (1,), "up.weight", "blocks.1", 8, 256.0, 2, 1, 0.5))
        backward: gradients on rank 1 were not finite. First parameter: 'up.weight' (unit 'blocks.1'), of whose 8 \
elements 2 are infinite and 1 NaN; the largest other is 0.5 (128 with the loss scale 256)
        """
        if self.origin is not None:
            return f"{self._words()}. {self.origin}"
        where = "" if self.extent is None else f". {self.extent.describe(self.phase)}"
        later = (
            f". Modules are watched for {self.watched_for} steps from now on: module and line are named when it recurs "
            '("anomaly_watch": {"trace": "always"} names the first, too)'
        )
        return f"{self._words()}{where}{'' if self.watched_for is None else later}"

    def _words(self) -> str:
        who = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        how = {
            "forward": f"the loss on {who} was not finite",
            "backward": f"gradients on {who} were not finite",
            "reduce": "gradients were finite on every rank, and their sum over ranks and micro-batches was not",
            "gradients": "gradients of a rank or their sum over ranks were not finite; the next step tells which",
        }[self.phase]
        if self.parameter is None:
            return f"{self.phase}: {how}. Every parameter's gradient is finite, the norm of all is not"
        first = f"{self.phase}: {how}. First parameter: {self.parameter!r} (unit {self.unit!r})"
        if self.infinite is None or self.largest is None:
            return first
        scaled = f" ({self.largest * self.loss_scale:.4g} with the loss scale {self.loss_scale:g})"
        return (
            f"{first}, of whose {self.numel} elements {self.infinite} are infinite and {self.nan} NaN; the largest "
            f"other is {self.largest:.4g}{scaled if self.loss_scale != 1 else ''}"
        )


def first_not_finite(sums: torch.Tensor) -> int | None:
    """Return the first parameter with a non-finite sum of squares, from the `sums` over all ranks.

    >>> first_not_finite(torch.tensor([1.0, float("nan"), float("inf")]))
    1
    """
    places = torch.isfinite(sums).logical_not().nonzero()
    return int(places[0]) if places.numel() else None
