"""Base of the optimizers of this library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.compat import without_compiler


class Optimizer(torch.optim.Optimizer):
    """Base class: `step` runs the closure with gradients, then `_step`."""

    add_param_group = without_compiler(torch.optim.Optimizer.add_param_group)
    zero_grad = without_compiler(torch.optim.Optimizer.zero_grad)
    state_dict = without_compiler(torch.optim.Optimizer.state_dict)
    load_state_dict = without_compiler(torch.optim.Optimizer.load_state_dict)

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
