"""Who runs the passes of a sharded model and steps it, as the parts of the model see it."""

from __future__ import annotations

from typing import Protocol

import torch
from typing_extensions import override


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


class Alone(Driver):
    """Drives a model that no engine has yet, or any more: every pass is a window, and sums are the gradient."""

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
