"""Global gradient norm, bitwise independent of the sharding of gradients.

Each rank sums squares in fp64 over its runs of each parameter, then over parameters in registration order. One small
all-reduce adds them over ranks in rank order. Sums by parameter are reduced only for observers. Because fp32 squares
are exact in fp64, the effect of the sharding is far below the last bit of the fp32 result. A non-finite norm is an
overflow. fp64 stays also on GPUs with 1/64 of the fp32 rate: conversion and sum of a value take about 3 ps on an RTX
4090, and its read from memory 4 ps (estimates).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.compat import has_values, standing_for

CHUNK = 1 << 16
"""Elements converted to fp64 at a time on a CPU, because the fp64 copy must fit the cache."""
SMALL = 1 << 14
"""Minimum elements of a chunked run; for fewer, torch's own fp64 copy is as cheap."""


def widens(elements: int, device: torch.device) -> bool:
    """Return True if the squares of a run are summed in chunks, in scratch memory of this module."""
    # Because torch's norm with another dtype copies a large CPU tensor first, it is slow.
    return device.type == "cpu" and elements > SMALL


class Squares:
    """Sums of squares of the runs of parameters: pairs of the index of a parameter and the elements of a run."""

    def __init__(self, runs: Sequence[tuple[int, int]], parameters: int, device: torch.device) -> None:
        self._parameters = parameters
        self._device = device
        self._large = [place for place, (_, size) in enumerate(runs) if size and widens(size, device)]
        self._small = [place for place, (_, size) in enumerate(runs) if size and not widens(size, device)]
        # Allocated on the device once, because copying indices in every step would wait for it.
        indices = [runs[place][0] for place in (*self._large, *self._small)]
        self._places = torch.tensor(indices, dtype=torch.int64, device=device)

    def sums(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of squares of each parameter, an fp64 tensor, from the values of the runs in layout order."""
        sums = torch.zeros(self._parameters, dtype=torch.float64, device=self._device)
        squares = [_sum_of_squares([values[place] for place in self._large])] if self._large else []
        if self._small:
            small = [values[place] for place in self._small]
            squares.append(torch.stack(torch._foreach_norm(small, 2, dtype=torch.float64)).square())
        return sums.index_add_(0, self._places, torch.cat(squares)) if squares else sums

    def probe(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the numbers of `Runs.probe`; `values` as in `sums`."""
        found = torch.zeros(self._parameters, dtype=torch.float64, device=self._device)
        runs = [values[place] for place in (*self._large, *self._small)]
        if not runs:
            return found
        wide = None if self._device.type == "cpu" else torch.float64
        return found.index_add_(0, self._places, torch.stack(torch._foreach_norm(runs, 2, dtype=wide)).double())


class Runs:
    """The 1-D runs of gradients of which this rank sums squares; arguments as of `Squares`, with tensors for sizes."""

    def __init__(self, runs: Sequence[tuple[int, torch.Tensor]], parameters: int, device: torch.device) -> None:
        self._values = [run for _, run in runs]
        self._squares = Squares([(index, run.numel()) for index, run in runs], parameters, device)

    def sums_of_squares(self) -> torch.Tensor:
        """Return this rank's sum of squares of each parameter, an fp64 tensor."""
        return self._squares.sums(self._values)

    def probe(self) -> torch.Tensor:
        """Return a number for each parameter, non-finite if one of its local gradient values is non-finite.

        Reads memory once without waiting for the device. On a CPU a norm beyond the gradient's dtype is infinite, too.
        """
        return self._squares.probe(self._values)


def _sum_of_squares(runs: Sequence[torch.Tensor]) -> torch.Tensor:
    sums = []
    scratch = torch.empty(CHUNK, dtype=torch.float64, device="cpu")
    for run in runs:
        total = 0.0
        values, times = run.reshape(-1), 1
        if not has_values(run):  # a dry run processes only the first of possibly thousands of chunks
            values, times = values[:CHUNK], -(-values.numel() // CHUNK)
        with standing_for(times):
            for chunk in values.split(CHUNK):
                wide = scratch[: chunk.numel()].copy_(chunk)
                total += torch.dot(wide, wide).item()
        sums.append(total)
    return torch.tensor(sums, dtype=torch.float64, device="cpu")


def combine(sums: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
    """Return the global norm (0-D fp64) of gradients with true values of `scale` times the summed ones."""
    return total_of(sums).sqrt() * scale


def total_of(sums: torch.Tensor) -> torch.Tensor:
    """Return the sum of all elements (0-D), in an order that depends only on their number."""
    # On a CPU cumsum adds in registration order, and sum() would choose its own tree. On CUDA cumsum may differ from
    # run to run, and sum() has one tree for each length.
    one_by_one = sums.device.type == "cpu" and sums.numel()
    return sums.cumsum(0)[-1] if one_by_one else sums.sum()


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return the factor min(1, max_norm / (norm + 1e-6)) of `torch.nn.utils.clip_grad_norm_`, from the fp32 norm."""
    rounded = norm.float()
    return (max_norm / (rounded + 1e-6)).clamp(max=1.0)


def count_non_finite(ranges: Sequence[torch.Tensor]) -> tuple[int, int, float]:
    """Return the numbers of infinite and NaN elements, and the largest absolute finite value (0: none).

    >>> count_non_finite([torch.tensor([1.0, float("inf")]), torch.tensor([float("nan"), -3.0])])
    (1, 1, 3.0)
    """
    infinite = sum(int(torch.isinf(values).sum()) for values in ranges)
    nan = sum(int(torch.isnan(values).sum()) for values in ranges)
    largest = max((float(v.nan_to_num(0.0, 0.0, 0.0).abs().max()) for v in ranges if v.numel()), default=0.0)
    return infinite, nan, largest
