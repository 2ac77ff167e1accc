"""What an elementwise optimizer is given at a time, and what an optimizer has that takes it in one pass over memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import nn

from shardwise.zero.units.unit import FlatParamStorage


class FlatOptimizer(Protocol):
    """An elementwise optimizer that scales gradients and writes low-precision copies in the pass of its update.

    Its class has these two methods beside those of an optimizer of PyTorch.
    """

    def takes_flat(self) -> bool:
        """Whether `step_flat` may be given gradients now (hooks of `step()` may want them in `.grad`)."""

    def step_flat(
        self,
        *,
        factor: float | torch.Tensor,
        gradients: Sequence[tuple[nn.Parameter, torch.Tensor]] | None,
        outputs: Sequence[tuple[nn.Parameter, torch.Tensor]],
        origins: Sequence[tuple[nn.Parameter, Sequence[tuple[int, int, int, int]]]],
    ) -> None:
        """Do `step()`.

        Args:
            factor: what gradients are to be multiplied by.
            gradients: of each parameter. None: they are in `.grad`.
            outputs: flat tensors in the parameters' memory that get a copy of what has been updated.
            origins: (logical tensor, first element of it, first element of the segment, count), for all pieces of each.
        """


Segment = tuple[FlatParamStorage, slice, nn.Parameter]
"""A section, a range of its master, and what the optimizer has in its groups for it."""

Origins = tuple[nn.Parameter, list[tuple[int, int, int, int]]]


@dataclass
class Part:
    """Segments of some sections, each with its place in the section's master, and where their elements come from."""

    sections: list[FlatParamStorage]
    segments: list[Segment]
    origins: list[Origins]


def flat_optimizer(optimizer: torch.optim.Optimizer) -> FlatOptimizer | None:
    """Return the optimizer as one that steps flat ranges in one pass, if its class is."""
    methods = ("takes_flat", "step_flat")
    return cast(FlatOptimizer, optimizer) if all(callable(getattr(optimizer, m, None)) for m in methods) else None
