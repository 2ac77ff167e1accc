"""An accumulation window: counts and weights of its micro-batches.

Micro-batches count alike (the gradient is their mean), or by a weight such as their number of tokens. The gradient is
then sum_i w_i grad_i / sum_i w_i over all ranks and micro-batches: that of one process on all tokens at once. Losses
are multiplied by their weights; the step divides by the sum of weights, reduced with the gradient norm. Because fp16
gradients cannot be thousands of times larger, weights are there in units of a power of two near the typical weight, the
same on all ranks; the division by it is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from shardwise.errors import UsageError

Weight = float | torch.Tensor
"""A number, or a 0-D fp64 tensor on a device, unread by the host."""

FACTS = 4
"""Length of `Window.facts`."""

LOSS_FACTS = 2
"""Length of `Window.loss_facts`."""


def checked_weight(weight: Any) -> Weight:
    """Return a checked weight: one finite number >= 0. Values on a device are unchecked, because the host would wait.

    >>> checked_weight(torch.tensor(512)), checked_weight(0)
    (512.0, 0.0)
    """
    if isinstance(weight, torch.Tensor) and weight.numel() == 1 and weight.dtype is not torch.bool:
        if weight.device.type != "cpu":
            return weight.detach().reshape(()).double()
        weight = weight.item()
    if not isinstance(weight, bool) and isinstance(weight, Real):
        value = float(weight)
        if math.isfinite(value) and value >= 0:
            return value
    found = f"a tensor of shape {tuple(weight.shape)}" if isinstance(weight, torch.Tensor) else repr(weight)
    raise UsageError(
        "engine.backward(loss, weight=...): expected one finite number >= 0, such as the number of tokens that the "
        f"loss is the mean of; found {found}"
    )


def reference_for(mean: float) -> float:
    """Return the power of two next to a positive mean weight; 1 if the mean is not finite.

    >>> reference_for(3000.0), reference_for(0.2)
    (4096.0, 0.25)
    """
    return 2.0 ** round(math.log2(mean)) if math.isfinite(mean) else 1.0


@dataclass
class Window:
    """The backward passes of this rank since the last step.

    `brought`: passes with a gradient of a parameter. `losses`: unscaled and 0-D, for the handling of non-finite
    gradients; `shown`: losses and weights, if reported; `trace`: records of `ModuleTracer`, if modules are traced.
    `agreed`: number of the backward pass (the same on all ranks) for which facts were summed over ranks, and the sums.
    """

    weight: Weight = 0.0
    weighted: int = 0
    unweighted: int = 0
    brought: int = 0
    losses: list[torch.Tensor] | None = None
    shown: list[tuple[torch.Tensor, Weight]] | None = None
    trace: list[Any] | None = None
    agreed: tuple[int, torch.Tensor] | None = None

    @property
    def passes(self) -> int:
        """Number of backward passes."""
        return self.weighted + self.unweighted

    def count(self, weight: Weight | None, *, brought: bool) -> None:
        """Count a backward pass."""
        self.brought += brought
        if weight is None:
            self.unweighted += 1
        else:
            self.weighted += 1
            self.weight = self.weight + weight

    def facts(self) -> list[Weight]:
        """Return the values summed over ranks: weight, weighted and unweighted passes, and passes with gradients."""
        return [self.weight, float(self.weighted), float(self.unweighted), float(self.brought)]

    def loss_facts(self) -> list[Weight]:
        """Return the values summed over ranks for the mean loss: weighted losses and weights; no host wait."""
        if not self.shown:
            return [0.0, 0.0]
        counted: Weight = 0.0
        summed = torch.zeros((), dtype=torch.float64, device=self.shown[0][0].device)
        for loss, weight in self.shown:
            part = loss.double().reshape(()) * weight
            if isinstance(weight, torch.Tensor):
                part = torch.where(weight == 0.0, 0.0, part)  # the mean over no tokens may be NaN
            counted, summed = counted + weight, summed + part
        return [summed, counted]

    def lost(self) -> bool:
        """Whether a loss of the window is not finite (waits for the device)."""
        return any(not bool(torch.isfinite(loss).all()) for loss in self.losses or ())


def check_mixed(facts: Sequence[float], step: int, *, needed: bool = False) -> None:
    """Raise a UsageError on all ranks if some passes of a step had weights and others had none, or, if weights are
    needed, any had none.
    """
    _, weighted, unweighted, _ = facts
    if needed and unweighted:
        raise UsageError(
            f"engine.step(), step {step}: with unequal_batches losses count by their samples. Call "
            "engine.backward(loss) instead of loss.backward()"
        )
    if weighted and unweighted:
        raise UsageError(
            f"engine.step(), step {step}: of the {int(weighted + unweighted)} backward passes of this window on all "
            f"ranks, {int(weighted)} had a weight (engine.backward(loss, weight=...)) and {int(unweighted)} had none, "
            "so it is not defined how much each counts. Give all micro-batches of all ranks a weight, or none; call "
            "engine.zero_grad() to begin the window anew"
        )
