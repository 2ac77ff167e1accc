"""Fake quantization: values are rounded to the levels of few bits and stay in their dtype; gradients pass unchanged.

The straight-through estimator is that of Bengio et al., "Estimating or Propagating Gradients Through Stochastic
Neurons" (1308.3432). Binary weights are those of XNOR-Net (1603.05279), ternary weights those of Ternary Weight
Networks (1605.04711).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

TERNARY_THRESHOLD = 0.7
"""Of the mean size; smaller weights become 0."""


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None]:
        return gradients[0], None


def straight_through(values: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """Return `rounded`, with the gradient of `values`."""
    found: torch.Tensor = _StraightThrough.apply(values, rounded)
    return found


@dataclass(frozen=True)
class Scales:
    """How elements of a weight share scales.

    Attributes:
        groups: groups of consecutive elements of the whole weight.
        rows: group of each row that this rank has; None: the rank has the whole weight.
        gather: returns one tensor of each rank of a tensor-parallel group, stacked in rank order.
    """

    groups: int = 1
    rows: torch.Tensor | None = None
    gather: Callable[[torch.Tensor], torch.Tensor] | None = None

    def units(self, values: torch.Tensor) -> torch.Tensor:
        """Return a view of (groups or rows, elements)."""
        return values.reshape(self.groups if self.rows is None else values.shape[0], -1)

    def largest(self, units: torch.Tensor) -> torch.Tensor:
        """Return the largest element of each unit's group, as (units, 1)."""
        return self._of_groups(units.amax(1), float("-inf"), "amax")

    def sum(self, units: torch.Tensor) -> torch.Tensor:
        """Return the sum of each unit's group, as (units, 1)."""
        return self._of_groups(units.sum(1), 0.0, "sum")

    def _of_groups(self, found: torch.Tensor, start: float, how: str) -> torch.Tensor:
        if self.rows is not None:
            own = torch.full((self.groups,), start, dtype=found.dtype, device=found.device)
            own.scatter_reduce_(0, self.rows, found, how)
            every = own.unsqueeze(0) if self.gather is None else self.gather(own)
            found = (every.amax(0) if how == "amax" else every.sum(0))[self.rows]
        return found.unsqueeze(1)


def quantized(
    values: torch.Tensor, bits: int, *, symmetric: bool, scales: Scales, noise: torch.Tensor | None = None
) -> torch.Tensor:
    """Return a weight rounded to the levels of `bits`, in its dtype; computed in fp32 (fp64 for fp64), no gradient.

    Args:
        values: weight, or this rank's part.
        bits: at least 1. Symmetric weights of 1 bit have the signs times the mean size of those other than 0, those of
            2 bits are ternary, others have 2^bits - 1 levels around 0. Asymmetric weights have 2^bits levels, of which
            one is 0.
        symmetric: the kind of levels.
        scales: groups with a scale each.
        noise: uniform in [0, 1), in the shape of `values`: round up with the probability of the remainder.
    """
    wide = torch.promote_types(values.dtype, torch.float32)
    units = scales.units(values.detach().to(wide))
    if symmetric and bits <= 2:
        size = units.abs()
        least: torch.Tensor | float = 0.0  # pruned weights stay 0
        if bits == 2:
            least = TERNARY_THRESHOLD * scales.sum(size) / scales.sum(torch.ones_like(size))
        kept = size > least
        found = units.sign() * kept * (scales.sum(size * kept) / scales.sum(kept.to(wide)).clamp(min=1))
        return found.to(values.dtype).view_as(values)
    draw = None if noise is None else scales.units(noise.to(wide))
    if symmetric:
        low = high = scales.largest(units.abs())
    else:
        low, high = scales.largest(-units), scales.largest(units)
    return _levels(units, -low, high, bits, symmetric, draw).to(values.dtype).view_as(values)


def quantized_inputs(
    values: torch.Tensor, bits: int, *, symmetric: bool, bounds: torch.Tensor | None = None, dim: int = -1
) -> torch.Tensor:
    """Return inputs rounded to the levels of `bits`, in their dtype; the gradient is 0 outside of static bounds.

    Args:
        values: inputs of a module.
        bits: at least 2.
        symmetric: levels around 0, or from the smallest to the largest value, with 0 among them.
        bounds: smallest and largest value (static). None: of each vector (dynamic).
        dim: first dimension of a vector: -1 for tokens, 1 for images.
    """
    wide = values.detach().to(torch.promote_types(values.dtype, torch.float32))
    if bounds is None:
        flat = wide.flatten(dim)
        shape = (*flat.shape[:-1], *[1] * (wide.dim() - flat.dim() + 1))
        low, high = flat.amin(-1).view(shape), flat.amax(-1).view(shape)
    else:
        low, high = bounds.to(wide.dtype)
        size = torch.maximum(-low, high)
        values = values.clamp(*(end.to(values.dtype) for end in ((-size, size) if symmetric else (low, high))))
    if symmetric:
        high = torch.maximum(-low, high)
        low = -high
    found = _levels(wide, low, high, bits, symmetric, None).to(values.dtype)
    return straight_through(values, found)


def _levels(
    values: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    bits: int,
    symmetric: bool,
    noise: torch.Tensor | None,
) -> torch.Tensor:
    if symmetric:
        most = float(max(2 ** (bits - 1) - 1, 1))
        scale, zero, first, last = high / most, torch.zeros_like(high), -most, most
    else:
        first, last = 0.0, float(2**bits - 1)
        low, high = low.clamp(max=0), high.clamp(min=0)
        scale = (high - low) / last
        zero = (-low / torch.where(scale > 0, scale, 1.0)).round()
    scale = torch.where(scale > 0, scale, 1.0)
    steps = values / scale
    steps = steps.round() if noise is None else (steps + noise).floor()
    return ((steps + zero).clamp(first, last) - zero) * scale
