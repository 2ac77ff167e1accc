"""Interface from the parts of a sharded model to the engine that runs its passes and steps."""

from __future__ import annotations

from typing import Protocol

import torch
from typing_extensions import override


class Driver(Protocol):
    """Position of a pass in an accumulation window."""

    def reduces_now(self) -> bool:
        """Return True if the backward pass that starts now ends an accumulation window."""

    def begins_window(self) -> bool:
        """Return True if that window has at most one backward pass on every rank."""

    def reduction_scale(self) -> float:
        """Return the divisor from a sum over ranks to the gradient, without weights of micro-batches."""

    def gradient_factor(self) -> float | torch.Tensor:
        """Return the factor from accumulated sums to the gradient (all ranks call)."""

    def backward_begins(self) -> None:
        """Handle the begin of a backward pass (all ranks call)."""

    def backward_ended(self, brought: bool) -> None:
        """Handle the end of a backward pass; `brought`: it has brought gradients."""


class Alone(Driver):
    """Driver of a model without an engine: every pass is a window, and sums are the gradient."""

    @override
    def reduces_now(self) -> bool:
        return True

    begins_window = reduces_now

    @override
    def reduction_scale(self) -> float:
        return 1.0

    gradient_factor = reduction_scale

    @override
    def backward_begins(self) -> None: ...

    @override
    def backward_ended(self, brought: bool) -> None: ...
