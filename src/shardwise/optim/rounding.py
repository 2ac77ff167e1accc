"""Rounding to bf16 without losing small updates: stochastic rounding, or Kahan summation.

A bf16 number has 8 significant bits: an update below 1/512 of a parameter disappears in rounding to nearest.
*Stochastic* rounding goes up or down with probabilities that make the mean right (Croci et al., 2022). *Kahan*
summation keeps the rounding error in a second bf16 number (Zamirai et al., "Revisiting BFloat16 Training", 2020).

The random number of an element is a function of seed, step, tensor and position in the tensor. Sharding and the number
of ranks do not change it, and no RNG state is saved.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

import torch

Origin = tuple[int, int, int, int]
"""(number of a tensor, first element in the flattened tensor, first element in the range, count); both even."""

COMPENSATION = "compensation"
"""Name of the state that holds the rounding error of each bf16 parameter."""

Scratch = Callable[[str, int, torch.dtype], torch.Tensor]
"""Allocates scratch memory: (purpose, elements, dtype) -> 1-D tensor of undefined content."""


def _signed(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def key_of(*parts: int) -> int:
    """Return 32 random bits for numbers: seed, step, stream, and perhaps a tensor."""
    packed = b"".join(part.to_bytes(16, "little", signed=True) for part in parts)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=4).digest(), "little")


def random_bits(
    numel: int, origins: Sequence[Origin], *, seed: int, step: int, stream: int, device: torch.device, scratch: Scratch
) -> torch.Tensor:
    """Return a random 16-bit integer for each element of a range (int16, uniform), in memory of `scratch`.

    A counter is hashed ("lowbias32" of Wellons' integer hash prospector, with a key added between its rounds); each
    32-bit hash serves two adjacent elements. Elements without origin are padding. `stream` numbers a step's tensors.
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
    return _hash(x, shifted, key_of(seed, step, stream)).view(torch.int16)[:numel]


def _hash(x: torch.Tensor, shifted: torch.Tensor, key: int) -> torch.Tensor:
    """Hash int32 counters in place; `shifted` is scratch memory of their size."""
    # Right shifts of signed integers copy the sign bit; the masks clear it.
    x.bitwise_xor_(torch.bitwise_right_shift(x, 16, out=shifted).bitwise_and_(0xFFFF))
    x.mul_(_signed(0x7FEB352D))
    x.bitwise_xor_(torch.bitwise_right_shift(x, 15, out=shifted).bitwise_and_(0x1FFFF))
    x.add_(_signed(key))
    x.mul_(_signed(0x846CA68B))
    return x.bitwise_xor_(torch.bitwise_right_shift(x, 16, out=shifted).bitwise_and_(0xFFFF))


def uniform(
    shape: Sequence[int], region: Sequence[Sequence[tuple[int, int]]], *, seed: int, step: int, device: torch.device
) -> torch.Tensor:
    """Return fp32 random numbers, uniform in [0, 1), of the elements of a region of a tensor of a shape.

    `region`: ranges of each dimension, whose elements follow each other. A number depends on seed, step and position in
    the whole tensor, on any device.

    >>> whole = uniform([4, 3], [[(0, 4)], [(0, 3)]], seed=1, step=2, device=torch.device("cpu"))
    >>> part = uniform([4, 3], [[(0, 1), (3, 4)], [(1, 3)]], seed=1, step=2, device=torch.device("cpu"))
    >>> bool(whole.min() >= 0), bool(whole.max() < 1), torch.equal(part, whole[[0, 3], 1:])
    (True, True, True)
    """
    x = torch.full((), _signed(key_of(seed, step)), dtype=torch.int32, device=device)
    for dim, some in enumerate(region):
        places = torch.cat([torch.arange(first, end, device=device) for first, end in [(0, 0), *some]])
        x = x.unsqueeze(-1) + places.mul_(math.prod(shape[dim + 1 :])).to(torch.int32)  # modulo 2^32
    _hash(x, torch.empty_like(x), key_of(step, seed))
    return x.bitwise_right_shift_(8).bitwise_and_(0xFFFFFF) * 2.0**-24


def round_stochastically(values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Round fp32 values (1-D) to bf16 in place: up with probability (value - lower) / (upper - lower).

    NaN stays NaN, although the carry would turn the all-ones NaN of a GPU into 0.

    >>> values = torch.full((1000,), 1 + 1 / 512)  # a quarter of the way from 1 to the next bf16 number
    >>> new = lambda purpose, numel, dtype: torch.empty(numel, dtype=dtype)
    >>> noise = random_bits(1000, [(0, 0, 0, 1000)], seed=0, step=1, stream=0, device=values.device, scratch=new)
    >>> sorted(set(round_stochastically(values, noise).tolist())), 200 < int((values > 1).sum()) < 300
    ([1.0, 1.0078125], True)
    """
    bits = values.nan_to_num_(math.nan, math.inf, -math.inf).view(torch.int32)
    bits.add_(noise).add_(0x8000).bitwise_and_(_signed(0xFFFF0000))
    return values


def compensated(values: torch.Tensor, compensation: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """Add rounding errors to parameters (widened to fp32, in place).

    An error of more than half a unit in the last place shows that the parameter was written since; it is clamped.
    """
    rest = scratch("rest", values.numel(), values.dtype).copy_(compensation)
    limit = torch.abs(values, out=scratch("limit", values.numel(), values.dtype)).mul_(2.0**-8)
    torch.minimum(rest, limit, out=rest)
    torch.maximum(rest, limit.neg_(), out=rest)
    return values.add_(rest)


def round_compensated(
    values: torch.Tensor, parameters: torch.Tensor, compensation: torch.Tensor, scratch: Scratch
) -> None:
    """Write fp32 values as the sum of a bf16 parameter and a bf16 compensation; overwrites `values`."""
    parameters.copy_(values)
    rest = values.sub_(scratch("rest", values.numel(), values.dtype).copy_(parameters))
    compensation.copy_(rest)
