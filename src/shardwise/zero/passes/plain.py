"""Gradients of an engine without an optimizer: averaged over ranks in `.grad`, for the script's own step.

Only for replicated parameters (stage 0). One all-reduce a unit follows each backward pass. Gradients that have been
averaged before keep their values, because a mean of equal values is that value, and new ones are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardwise.comm.communicator import Communicator
from shardwise.compat import never_compiled
from shardwise.memory import Accountant, Category
from shardwise.zero.passes.calls import AtEnd
from shardwise.zero.units.unit import Unit


class PlainGradients:
    """Averages gradients after backward passes (`averages`), or sums them; see the module docstring.

    Attributes:
        paused: accumulate gradients on each rank, until the first backward pass after the pause averages them.
    """

    def __init__(self, units: Sequence[Unit], comm: Communicator, accountant: Accountant, *, averages: bool) -> None:
        self.paused = False
        self._comm = comm
        self._accountant = accountant
        self._factor = 1.0 / comm.world if averages else 1.0
        self._at_end: AtEnd | None = None
        self._done = False
        self._members = [
            (unit.name, [parameter for parameter in unit.parameters if parameter.requires_grad]) for unit in units
        ]
        self._handles: list[Any] = [
            parameter.register_post_accumulate_grad_hook(self._arrived)
            for _, parameters in self._members
            for parameter in parameters
        ]

    def _arrived(self, parameter: torch.Tensor) -> None:
        if self._at_end is None or self._at_end.dropped:
            self._at_end = AtEnd(self._average)

    def begin(self) -> None:
        """Begin a backward pass of all ranks, with or without gradients."""
        self._done = False

    def end(self) -> None:
        """End a backward pass of all ranks."""
        if not self._done:
            self._average()

    @never_compiled
    def _average(self) -> None:
        self._done, self._at_end = True, None
        if self.paused or self._comm.world == 1:
            return
        with torch.no_grad():
            for name, parameters in self._members:
                for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
                    self._average_some(name, [parameter for parameter in parameters if parameter.dtype is dtype])

    def _average_some(self, name: str, parameters: Sequence[nn.Parameter]) -> None:
        """Average gradients of one dtype; gradients that no rank has stay None."""
        sizes = [parameter.numel() for parameter in parameters]
        used = sum(sizes) + len(parameters)
        flat = torch.zeros(
            -(-used // self._comm.world) * self._comm.world, dtype=parameters[0].dtype, device=parameters[0].device
        )
        self._accountant.hold(Category.BUFFERS, flat)
        values, present = flat[: sum(sizes)].split(sizes), flat[sum(sizes) : used]
        for number, parameter in enumerate(parameters):
            if parameter.grad is not None:
                values[number].copy_(parameter.grad.detach().reshape(-1))
                present[number] = 1.0
        self._comm.sum_large(flat, f"{name}.grad")
        for found, parameter, anywhere in zip(values, parameters, present.tolist(), strict=True):
            if anywhere:
                averaged = found.view(parameter.shape).mul_(self._factor)
                if parameter.grad is None:
                    parameter.grad = averaged.clone()
                else:
                    parameter.grad.detach().copy_(averaged)

    def remove(self) -> None:
        """Remove the hooks; gradients stay."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._members = [], []
