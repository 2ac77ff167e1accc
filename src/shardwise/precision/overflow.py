"""What is known of a step whose gradients are not finite: where the first one is, on which rank, how it came about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from shardwise.precision.origin import Origin

Phase = Literal["forward", "backward", "reduce"]


@dataclass(frozen=True)
class Found:
    """What one rank finds in its part of a parameter's gradient (JSON values).

    Attributes:
        infinite: elements that are plus or minus infinity.
        nan: elements that are not a number.
        largest: largest absolute value of the others; 0 if there are none.
    """

    infinite: int = 0
    nan: int = 0
    largest: float = 0.0

    @classmethod
    def of(cls, runs: Sequence[torch.Tensor]) -> Found:
        """Look through runs of a gradient.

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
class OverflowReport:
    """Why gradients of a step are not finite: the same on every rank.

    Attributes:
        phase: "forward": a loss was not finite. "backward": the losses were finite, and a rank's own gradient was not,
            in the type in which it is sent. "reduce": what each rank sent was finite, and the sum was not, which sums
            in 16 bits can bring about.
        ranks: ranks of the data-parallel group with such a loss, or with such a gradient in the unit; none for
            "reduce".
        parameter: the first parameter in registration order whose gradient is not finite. None if each parameter's
            gradient is finite and only the global norm of all is not.
        unit: the unit that it belongs to.
        numel: its elements.
        loss_scale: what the losses were multiplied by.
        infinite: elements of its summed gradient that are infinite. This and the next two are None where the gradient
            was not there any more when it was looked at.
        nan: elements that are not a number.
        largest: largest finite absolute value of its gradient, as the step would have seen it.
        origin: the module in which it began; None if nobody has watched modules (`anomaly_watch.trace`).
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

    def __str__(self) -> str:
        """Return it in words.

        >>> print(OverflowReport("backward", (1,), "up.weight", "blocks.1", 8, 256.0, 2, 1, 0.5))
        backward: gradients on rank 1 were not finite. First parameter: 'up.weight' (unit 'blocks.1'), of whose 8 \
elements 2 are infinite and 1 NaN; the largest other is 0.5 (128 with the loss scale 256)
        """
        return f"{self._words()}. {self.origin}" if self.origin is not None else self._words()

    def _words(self) -> str:
        who = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        how = {
            "forward": f"the loss on {who} was not finite",
            "backward": f"gradients on {who} were not finite",
            "reduce": "gradients were finite on every rank, and their sum over ranks and micro-batches was not",
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
    """Return the first parameter whose sum of squares is not finite; `sums` as all ranks have it.

    >>> first_not_finite(torch.tensor([1.0, float("nan"), float("inf")]))
    1
    """
    places = torch.isfinite(sums).logical_not().nonzero()
    return int(places[0]) if places.numel() else None
