"""What a rank has of one unit's gradients while backward passes bring them, and which are still to come."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from shardwise.compat import number_of_pass, will_run, without_overrides
from shardwise.memory import Accountant, Category
from shardwise.memory.places import Loans
from shardwise.zero.passes.calls import UnitCalls
from shardwise.zero.units.gradient_buffers import GradientBuffer
from shardwise.zero.units.unit import Unit


class UnitGradients:
    """The gradients of one unit during backward passes.

    Sums over some of the ranks are on the device wherever gradients live.

    Args:
        unit: the unit.
        level: of the unit's domain, to which every micro-batch is reduced; 0: gradients are reduced once per step.
        calls: forward calls that a backward pass may differentiate.
        accountant: is told of what is added up here.

    Attributes:
        domain: the unit's.
        comm: of the ranks in its innermost dimension.
        level: see above.
        parameters: number of trainable parameters.
        loans: lend what has been added up here over micro-batches.
        resting: whether what has been added up here is where gradients live, and not on the device.
        task: number of the backward pass of which gradients need nothing to be looked at any more; -1: there is none.
    """

    def __init__(self, unit: Unit, level: int, calls: UnitCalls, accountant: Accountant) -> None:
        self.unit = unit
        self.domain = unit.domain
        self.comm = unit.domain.dimensions[0]
        self.level = level
        self._calls = calls
        self._accountant = accountant
        self.loans = Loans(unit.trainable[0].gradient_loans.home, accountant, unit.name)
        self._lent: Sequence[Loans] = ()
        self._borrowed = [section.gradient_loans for section in unit.trainable if self.loans.away]
        self.resting = self.loans.away
        self.parameters = sum(len(section.layout.slots) for section in unit.trainable)
        self.buffers: dict[int, GradientBuffer] = {}
        self._ends: list[dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]]] = [{}, {}]
        self._window = 0
        self._watched: list[set[torch.dtype]] = [set(), set()]
        self.sums: dict[int, torch.Tensor] = {}  # over some of the ranks, by place of the section
        self.seen: set[int] = set()  # parameters whose gradients have been collected since the last step, and freed
        self.expected: set[int] = set()
        self._tasks: set[int] = set()
        self.task = -1
        self.nested = False
        self.reduced = False
        self.accumulated = False

    @cached_property
    def _nodes(self) -> list[tuple[int, Any]]:
        """Each parameter's node of the graph, made no earlier than in the first backward pass.

        A node belongs to the CUDA stream on which it is made, and hooks run with that stream current: it must be the
        stream of the script's passes, which may differ from that of `initialize()`.
        """
        # Only the graph node is wanted, not values: released parameters need not come back for it.
        with without_overrides():
            return [
                (slot.index, get_gradient_edge(self.unit.registry.parameters[slot.index]).node)
                for section in self.unit.trainable
                for slot in section.layout.slots
            ]

    def begin(self, *, used: bool, outside: bool) -> None:
        """Ask autograd which gradients the pass that has just started will produce.

        Args:
            used: the unit has computed something that may be differentiated now.
            outside: the loss does not depend on the model.
        """
        self.reduced = False
        self.task = -1
        self.expected = set()
        self._tasks = set()
        if not outside:
            self.look_ahead()
        # What this graph does not know of may be in a nested one, made by a re-entrant checkpoint.
        self.nested = used and not outside and len(self.expected) < self.parameters

    def look_ahead(self) -> None:
        """Expect what the backward pass that autograd is in will produce, be it the outer or a nested one."""
        task = number_of_pass()
        if task not in self._tasks:
            self._tasks.add(task)
            self.expected |= {index for index, node in self._nodes if will_run(node)}

    def keep(self, buffer: torch.Tensor) -> None:
        """Have a buffer in which micro-batches are added up live where gradients do."""
        self.loans.keep(Category.GRADIENTS, buffer)

    def bring(self) -> None:
        """Have what has been added up here on the device."""
        if self.resting:
            self.loans.start()
            self.loans.finish()
            self.resting = False

    def rest(self) -> None:
        """Nothing is added to what has been added up here for now."""
        if self.loans.away and not self.resting:
            self.loans.give_back(written=True)
            self.resting, self.task = True, -1

    def settle(self) -> None:
        """Have the memory of what was given back by `rest` and `return_sums`."""
        for loans in (self.loans, *self._borrowed):
            loans.settle()

    def free(self) -> None:
        """Drop what has been collected."""
        if self.loans.away:
            for buffer in self.buffers.values():
                if buffer.flat is not None:
                    self.loans.forget(buffer.flat)
            self.rest()
        for buffer in self.buffers.values():
            buffer.free()
        self.seen |= self.present()
        self.buffers = {}

    def present(self) -> set[int]:
        """Return the parameters, by index, of which gradients have been collected."""
        sections = self.unit.sections
        return {
            slot.index
            for place, buffer in self.buffers.items()
            for slot, present in zip(sections[place].layout.slots, buffer.present, strict=True)
            if present
        }

    def borrow_sums(self) -> None:
        """Have the accumulated gradients on the device, until `return_sums`: a reduction adds to them."""
        if self._borrowed and not self._lent:
            self._lent = self._borrowed
            for loans in self._lent:
                loans.start(read=self.accumulated)
            for loans in self._lent:
                loans.finish()

    @property
    def lends(self) -> bool:
        """Whether accumulated gradients have been borrowed."""
        return bool(self._lent)

    def return_sums(self) -> None:
        """The reduction has ended."""
        lent, self._lent = self._lent, ()
        for loans in lent:
            loans.give_back(written=True)

    @property
    def complete(self) -> bool:
        """Whether no more gradients of this pass can come."""
        return not self.expected and (not self.nested or self._calls.settled(self.unit))

    def watch(self, values: torch.Tensor) -> None:
        """Remember the least and the largest of what is to be sent: one is not finite if any value is not.

        A pass over the values as fast as copying them, and no wait for the device. It is kept in memory that stays:
        small tensors, new in every pass, would lie between large ones and break up the memory that these leave.
        """
        if not values.numel():
            return
        kept, watched = self._ends[self._window], self._watched[self._window]
        ends = kept.get(values.dtype)
        if ends is None:
            pair = torch.empty(2, dtype=values.dtype, device=values.device)
            ends = kept[values.dtype] = pair[0], pair[1]
        if values.dtype not in watched:
            watched.add(values.dtype)
            torch.aminmax(values, out=ends)
        else:
            low, high = torch.aminmax(values)
            torch.minimum(ends[0], low, out=ends[0])
            torch.maximum(ends[1], high, out=ends[1])

    def begin_window(self) -> None:
        """Begin to watch anew, and keep what has been seen in the window that ends."""
        self._window ^= 1
        self._watched[self._window].clear()

    def was_finite(self, *, formerly: bool = False) -> bool | None:
        """Return whether all that has been watched in this window is finite; None: nothing has (waits for the device).

        Args:
            formerly: of the window before.
        """
        window = self._window ^ int(formerly)
        ends = [end for dtype in self._watched[window] for end in self._ends[window][dtype]]
        return all(bool(torch.isfinite(end)) for end in ends) if ends else None
