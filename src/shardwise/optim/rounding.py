"""Rounding to bf16 without losing small updates: at random, or with the rest kept in a second number.

A bf16 number has 8 significant bits: an update below 1/512 of a parameter disappears when the sum is rounded to
nearest. *Stochastic* rounding goes up or down with probabilities that make the mean right (Croci et al., "Stochastic
rounding: implementation, error analysis and applications", 2022). *Kahan* summation keeps the rest that did not fit
in a second bf16 number (Zamirai et al., "Revisiting BFloat16 Training", 2020).

Invariant: the random numbers of an element are a function of seed, step, tensor and position in the tensor. Neither
sharding nor the number of ranks changes them, and there is no state to be saved.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

import torch

Origin = tuple[int, int, int, int]
"""(number of a tensor, first element in the flattened tensor, first element in the run, count); both even."""

COMPENSATION = "compensation"
"""Name of the state that holds the rest of each parameter that bf16 has cut off."""

Scratch = Callable[[str, int, torch.dtype], torch.Tensor]
"""Gives memory: (what for, elements, dtype) -> 1-D tensor of undefined content."""


def _signed(value: int) -> int:
    """Return the 32-bit integer with the same bits."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def key_of(*parts: int) -> int:
    """Return 32 random bits for numbers: seed, step, stream, and perhaps a tensor."""
    packed = b"".join(part.to_bytes(16, "little", signed=True) for part in parts)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=4).digest(), "little")


def random_bits(
    numel: int, origins: Sequence[Origin], *, seed: int, step: int, stream: int, device: torch.device, scratch: Scratch
) -> torch.Tensor:
    """Return a random 16-bit integer for each element of a run (int16, all values equally likely).

    A counter is mixed into a hash ("lowbias32" of Wellons' integer hash prospector, with a key added between its
    rounds); each 32-bit hash serves two neighbouring elements.

    Args:
        numel: elements of the run.
        origins: where they come from; what no origin names is padding, and gets any number.
        seed: of the training run.
        step: number of the step.
        stream: number of the tensor among those that are rounded in the same step.
        device: where the result lies.
        scratch: gives the memory; the result is one of its tensors.
    """
    pairs = -(-numel // 2)
    x, shifted = scratch("bits", 2 * pairs, torch.int32).split(pairs)
    torch.arange(pairs, out=shifted, device=device)
    if sum(count for *_, count in origins) < numel:
        x.zero_()
    for tensor, start, offset, count in origins:
        first, last = offset // 2, -(-(offset + count) // 2)
        base = key_of(seed, step, stream, tensor) + start // 2 - first
        torch.add(shifted[first:last], _signed(base), out=x[first:last])
    # Shifts of signed integers repeat the sign; the masks take that away.
    x.bitwise_xor_(torch.bitwise_right_shift(x, 16, out=shifted).bitwise_and_(0xFFFF))
    x.mul_(_signed(0x7FEB352D))
    x.bitwise_xor_(torch.bitwise_right_shift(x, 15, out=shifted).bitwise_and_(0x1FFFF))
    x.add_(_signed(key_of(seed, step, stream)))
    x.mul_(_signed(0x846CA68B))
    x.bitwise_xor_(torch.bitwise_right_shift(x, 16, out=shifted).bitwise_and_(0xFFFF))
    return x.view(torch.int16)[:numel]


def round_stochastically(values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Round fp32 values to bf16 numbers in place, up with a probability that is the part of a step they are above.

    Args:
        values: 1-D fp32 tensor; afterwards each value is one that bf16 has.
        noise: what `random_bits` gives for them.

    What is not a number stays so; the carry would make 0 of a device's, whose bits are all ones.

    >>> values = torch.full((1000,), 1 + 1 / 512)  # a quarter of the way from 1 to the next bf16 number
    >>> ask = lambda what, numel, dtype: torch.empty(numel, dtype=dtype)
    >>> noise = random_bits(1000, [(0, 0, 0, 1000)], seed=0, step=1, stream=0, device=values.device, scratch=ask)
    >>> sorted(set(round_stochastically(values, noise).tolist())), 200 < int((values > 1).sum()) < 300
    ([1.0, 1.0078125], True)
    """
    bits = values.nan_to_num_(math.nan, math.inf, -math.inf).view(torch.int32)
    bits.add_(noise).add_(0x8000).bitwise_and_(_signed(0xFFFF0000))
    return values


def compensated(values: torch.Tensor, compensation: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """Add to parameters (widened to fp32, in place) what their rounding has left out.

    More than half a unit in the last place cannot have been left out: then another value has been written since,
    and no more than that is taken over.
    """
    rest = scratch("rest", values.numel(), values.dtype).copy_(compensation)
    limit = torch.abs(values, out=scratch("limit", values.numel(), values.dtype)).mul_(2.0**-8)
    torch.minimum(rest, limit, out=rest)
    torch.maximum(rest, limit.neg_(), out=rest)
    return values.add_(rest)


def round_compensated(
    values: torch.Tensor, parameters: torch.Tensor, compensation: torch.Tensor, scratch: Scratch
) -> None:
    """Write fp32 values as the sum of a bf16 parameter and a bf16 compensation; `values` are used up."""
    parameters.copy_(values)
    rest = values.sub_(scratch("rest", values.numel(), values.dtype).copy_(parameters))
    compensation.copy_(rest)
