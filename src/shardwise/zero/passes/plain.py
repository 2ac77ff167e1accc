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

Unsure = tuple[torch.Tensor, nn.Parameter, torch.Tensor]
"""Whether any rank has a new gradient (a flag on the device), a parameter without one on this rank, and the result."""


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
        self._units = [(unit.name, unit.parameters) for unit in units]
        self._trained: list[bool] = []
        self._window: set[nn.Parameter] = set()  # trained since the last average: equal on all ranks
        self._members: list[tuple[str, list[nn.Parameter]]] = []
        self._handles: list[Any] = []
        self.follow()

    def follow(self) -> None:
        """Take over which parameters require gradients now, on all ranks."""
        trained = [parameter.requires_grad for _, parameters in self._units for parameter in parameters]
        if trained == self._trained:
            return
        self.remove()
        self._trained = trained
        self._window.update(p for _, parameters in self._units for p in parameters if p.requires_grad)
        self._members = [(name, [p for p in parameters if p in self._window]) for name, parameters in self._units]
        known = weakref.WeakMethod(self._arrived)  # torch's hooks are unknown to Python's garbage collector

        def arrived(parameter: torch.Tensor) -> None:
            if (method := known()) is not None:
                method(parameter)

        for parameter in (p for _, members in self._members for p in members if p.requires_grad):
            self._handles.append(parameter.register_post_accumulate_grad_hook(arrived))
            if not self._averages and self._comm.world > 1:
                self._handles.append(parameter.register_hook(self._before(parameter)))

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
        if grad is not None and grad.is_sparse and self._comm.world > 1:
            parameter.grad = grad = grad.coalesce().to_dense()
        if parameter in self._summed and grad is not None:
            assert isinstance(parameter, nn.Parameter)
            self._last[parameter] = weakref.ref(grad), grad._version
        if self._at_end is None or self._at_end.dropped:
            self._at_end = AtEnd(self._average)

    def begin(self) -> None:
        """Begin a backward pass of all ranks, with or without gradients."""
        self._done = False
        self.follow()

    def end(self) -> None:
        """End a backward pass of all ranks."""
        if not self._done:
            self._average()

    @never_compiled
    def _average(self) -> None:
        self._done, self._at_end = True, None
        if self.paused or self._comm.world == 1:
            return
        unsure: list[Unsure] = []
        with torch.no_grad():
            for name, parameters in self._members:
                for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
                    some = [parameter for parameter in parameters if parameter.dtype is dtype]
                    unsure += self._average_some(name, some)
            # One read for all units; none where every parameter has a new gradient on this rank.
            anywhere = torch.cat([flag for flag, *_ in unsure]).tolist() if unsure else []
            for found, (_, parameter, reduced) in zip(anywhere, unsure, strict=True):
                if found and parameter.grad is None:
                    parameter.grad = reduced
                elif found and parameter.grad is not None:
                    parameter.grad.detach().copy_(reduced)
        self._window.clear()
        self._trained = []  # `follow` finds the parameters of the next window

    def _average_some(self, name: str, parameters: Sequence[nn.Parameter]) -> list[Unsure]:
        """Average gradients of one dtype where this rank has new ones; return the other parameters."""
        sizes = [parameter.numel() for parameter in parameters]
        used = sum(sizes) + len(parameters)
        flat = torch.zeros(
            -(-used // self._comm.world) * self._comm.world, dtype=parameters[0].dtype, device=parameters[0].device
        )
        self._accountant.hold(Category.BUFFERS, flat)
        every, present = flat[: sum(sizes)], flat[sum(sizes) : used]
        values, flags = every.split(sizes), present.split(1)
        before = [self._summed_before(parameter) for parameter in parameters]
        grads = {
            number: parameter.grad.detach()
            for number, (parameter, summed) in enumerate(zip(parameters, before, strict=True))
            if parameter.grad is not None and summed is not parameter.grad
        }
        earlier = {number: summed.reshape(-1) for number, summed in enumerate(before) if summed is not None}
        added = [number for number in grads if number in earlier]
        if grads:
            torch._foreach_copy_([values[number] for number in grads], [grad.reshape(-1) for grad in grads.values()])
            torch._foreach_add_([flags[number] for number in grads], 1.0)
        if added:
            torch._foreach_sub_([values[number] for number in added], [earlier[number] for number in added])
        self._comm.sum_large(flat, f"{name}.grad")
        if self._averages:
            every.mul_(1.0 / self._comm.world)
        elif earlier:
            torch._foreach_add_([values[number] for number in earlier], list(earlier.values()))
        reduced = [found.view(parameter.shape) for found, parameter in zip(values, parameters, strict=True)]
        if grads:
            torch._foreach_copy_(list(grads.values()), [reduced[number] for number in grads])
        for parameter in parameters:
            self._summed.pop(parameter, None)
            self._last.pop(parameter, None)
        if len(grads) == len(parameters):
            return []
        anywhere = present.ne(0).split(1)
        return [
            (anywhere[number], parameter, reduced[number].clone())
            for number, parameter in enumerate(parameters)
            if number not in grads
        ]

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
