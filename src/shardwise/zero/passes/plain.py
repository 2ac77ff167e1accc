"""Gradients of an engine without an optimizer: averaged over ranks in `.grad`, for the script's own step.

Only for replicated parameters (stage 0). One all-reduce a unit follows each backward pass. Because the mean of equal
values is that value, gradients that have been averaged before keep their values, and new ones are added. Sums would
grow: gradients that have been summed before are copied, and taken out of the next sum.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.comm.communicator import Communicator
from shardwise.compat import never_compiled
from shardwise.errors import UsageError
from shardwise.memory import Accountant, Category
from shardwise.zero.passes.calls import AtEnd
from shardwise.zero.units.unit import Unit


class PlainGradients:
    """Averages (or sums) gradients after backward passes; `paused`: only accumulate, until a pass after the pause."""

    def __init__(self, units: Sequence[Unit], comm: Communicator, accountant: Accountant, *, averages: bool) -> None:
        self.paused = False
        self._comm = comm
        self._accountant = accountant
        self._averages = averages
        self._summed: dict[nn.Parameter, torch.Tensor | None] = {}  # before the first pass since the last sum
        self._last: dict[nn.Parameter, tuple[weakref.ref[torch.Tensor], int]] = {}  # gradient and version after a pass
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
        if not averages and comm.world > 1:
            self._handles += [
                parameter.register_hook(self._before(parameter))
                for _, members in self._members
                for parameter in members
            ]

    def _before(self, parameter: nn.Parameter) -> Callable[[torch.Tensor], None]:
        """Return a hook that keeps the gradient which has been summed before, when a new one is about to be added."""
        reference = weakref.ref(parameter)

        @never_compiled
        def keep(_: torch.Tensor) -> None:
            parameter = reference()
            if parameter is None:
                return
            grad = parameter.grad
            if parameter in self._summed and grad is not None:
                last, version = self._last.get(parameter, (None, 0))
                if last is not None and last() is grad and grad._version == version:
                    return  # a pass of this window has been added
                if bool(grad.any()):
                    raise UsageError(
                        "a gradient was changed between backward passes inside of no_sync(), so that its part of this "
                        "rank is not known, which is to be summed over ranks. Change gradients after the first pass "
                        "outside of no_sync(), or set gradient_allreduce_op to mean"
                    )
            self._summed[parameter] = None if grad is None else grad.detach().clone()

        return keep

    def _arrived(self, parameter: torch.Tensor) -> None:
        grad = parameter.grad
        if parameter in self._summed and grad is not None:
            assert isinstance(parameter, nn.Parameter)
            self._last[parameter] = weakref.ref(grad), grad._version
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
        before = [self._summed_before(parameter) for parameter in parameters]
        for number, (parameter, summed) in enumerate(zip(parameters, before, strict=True)):
            if parameter.grad is not None and summed is not parameter.grad:
                values[number].copy_(parameter.grad.detach().reshape(-1))
                present[number] = 1.0
                if summed is not None:
                    values[number].sub_(summed.reshape(-1))
        self._comm.sum_large(flat, f"{name}.grad")
        for found, parameter, summed, anywhere in zip(values, parameters, before, present.tolist(), strict=True):
            self._summed.pop(parameter, None)
            self._last.pop(parameter, None)
            if not anywhere:
                continue
            reduced = found.view(parameter.shape)
            if self._averages:
                reduced.mul_(1.0 / self._comm.world)
            elif summed is not None:
                reduced.add_(summed)
            if parameter.grad is None:
                parameter.grad = reduced.clone()
            else:
                parameter.grad.detach().copy_(reduced)

    def _summed_before(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the part of a gradient that has been summed before; all of it if no pass has added to it."""
        if self._averages:
            return None
        return self._summed.get(parameter, parameter.grad)

    def remove(self) -> None:
        """Remove the hooks; gradients stay."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._members = [], []
