"""Who runs the passes of a sharded model and steps it, as the parts of the model see it."""

from __future__ import annotations

from typing import Protocol

import torch


class Driver(Protocol):
    """Knows where in an accumulation window a pass is; an engine's step is one."""

    def reduces_now(self) -> bool:
        """Whether the backward pass that starts now ends an accumulation window."""

    def begins_window(self) -> bool:
        """Whether that window has at most one backward pass on every rank."""

    def reduction_scale(self) -> float:
        """Return what divides a sum over ranks to give the gradient, but for weights of micro-batches."""

    def gradient_factor(self) -> float | torch.Tensor:
        """Return what turns accumulated sums into the gradient (all ranks call)."""

    def backward_begins(self) -> None:
        """A backward pass begins (all ranks call)."""

    def backward_ended(self, brought: bool) -> None:
        """A backward pass has ended, which has brought gradients or not."""


class Alone:
    """Drives a model that no engine has yet, or any more: every pass is a window, and sums are the gradient."""

    def reduces_now(self) -> bool:
        """See `Driver`."""
        return True

    begins_window = reduces_now

    def reduction_scale(self) -> float:
        """See `Driver`."""
        return 1.0

    gradient_factor = reduction_scale

    def backward_begins(self) -> None:
        """See `Driver`."""

    def backward_ended(self, brought: bool) -> None:
        """See `Driver`."""
