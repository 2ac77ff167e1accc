"""Base of the optimizers of this library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Optimizer(torch.optim.Optimizer):
    """Base class: `step` runs the closure with gradients, then `_step`."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient; return the result of `closure`, which computes the loss again."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    def _step(self) -> None:
        raise NotImplementedError
