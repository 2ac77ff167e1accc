"""Gradients of one unit during backward passes: collected ones, and expected ones."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import torch
from torch.autograd.graph import Node, get_gradient_edge

from shardwise.compat import number_of_pass, will_run, without_overrides
from shardwise.memory import Accountant, Category
from shardwise.memory.places import TieredTensors
from shardwise.zero.passes.calls import UnitCalls
from shardwise.zero.units.gradient_buffers import GradientBuffer
from shardwise.zero.units.unit import Unit


class UnitGradients:
    """Gradients of one unit during backward passes.

    Each micro-batch is reduced to `level` of the unit's domain; 0: gradients are reduced once a step. Sums over the
    inner dimensions stay on the device, also if gradients are offloaded. Dictionary keys are places of flat parameters.

    Attributes:
        comm: ranks of the innermost dimension.
        places: places of trainable flat parameters in the unit.
        replicated: flat parameters whose reduced gradients are all-gathered, by level of their optimizer state.
        tiered: offloaded buffers in which micro-batches are added.
        acquired: offloaded accumulators that are on the device.
        resting: these buffers are on their tier, and not on the device.
        task: number of the backward pass whose first gradient of the unit has arrived; -1: none.
        buffers, sums: buffers of this pass or window, and sums over the inner dimensions.
        expected: parameters whose gradients the current pass still brings, by index.
        nested: nested backward passes (re-entrant checkpoints) may bring further gradients.
        reduced: the current pass has reduced the unit.
        seen: parameters whose gradients have been collected since the last step, by index.
        accumulated: the accumulators have gradients of this window.
    """

    def __init__(self, unit: Unit, level: int, calls: UnitCalls, accountant: Accountant) -> None:
        self.unit = unit
        self.domain = unit.domain
        self.comm = unit.domain.dimensions[0]
        self.level = level
        self.places = [place for place, section in enumerate(unit.sections) if section.layout.trainable]
        levels = {section.levels.optimizer for section in unit.trainable} - {self.domain.depth}
        self.replicated = {
            level: [section for section in unit.trainable if section.levels.optimizer == level]
            for level in sorted(levels)
        }
        self._calls = calls
        self._accountant = accountant
        self._nodes: dict[int, Node] = {}
        self.tiered = TieredTensors(unit.trainable[0].tiered_gradient.home, accountant, unit.name)
        self.acquired: Sequence[TieredTensors] = ()
        self._tiered_sums = [section.tiered_gradient for section in unit.trainable if self.tiered.away]
        self.resting = self.tiered.away
        self.parameters = sum(len(section.layout.slots) for section in unit.trainable)
        self.buffers: dict[int, GradientBuffer] = {}
        self._ends: list[dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]]] = [{}, {}]
        self._window = 0
        self._watched: list[set[torch.dtype]] = [set(), set()]
        self.sums: dict[int, torch.Tensor] = {}  # over some ranks, by place of the flat parameter
        self.seen: set[int] = set()
        self.expected: set[int] = set()
        self._tasks: set[int] = set()
        self.task = -1
        self.nested = False
        self.reduced = False
        self.accumulated = False

    @property
    def nodes(self) -> Mapping[int, Node]:
        """The graph's node of each parameter that has required a gradient in a backward pass, created in the first.

        Because hooks run on the CUDA stream on which the node was created, it must be the stream of the script's
        passes, which may differ from that of `initialize()`.
        """
        if len(self._nodes) < self.parameters:
            # The graph node needs no values of resharded parameters.
            with without_overrides():
                for index in (slot.index for section in self.unit.trainable for slot in section.layout.slots):
                    parameter = self.unit.registry.parameters[index]
                    if index not in self._nodes and parameter.requires_grad:
                        self._nodes[index] = get_gradient_edge(parameter).node
        return self._nodes

    def begin(self, *, used: bool, outside: bool) -> None:
        """Find the gradients that the backward pass which has just begun will produce.

        `used`: the unit has computed outputs that may be differentiated. `outside`: the loss is not of the model.
        """
        self.reduced = False
        self.task = -1
        self.expected = set()
        self._tasks = set()
        if not outside:
            self.look_ahead()
        # A nested graph, of a re-entrant checkpoint, may have the others.
        self.nested = used and not outside and len(self.expected) < self.parameters

    def look_ahead(self) -> None:
        """Expect the gradients of autograd's current backward pass, the outer one or a nested one."""
        task = number_of_pass()
        if task not in self._tasks:
            self._tasks.add(task)
            self.expected |= {index for index, node in self.nodes.items() if will_run(node)}

    def keep(self, buffer: torch.Tensor) -> None:
        """Place a buffer in which micro-batches are added on the tier of gradients."""
        self.tiered.keep(Category.GRADIENTS, buffer)

    def bring(self) -> None:
        """Bring the offloaded buffers to the device."""
        if self.resting:
            self.tiered.acquire()
            self.resting = False

    def rest(self) -> None:
        """Return the offloaded buffers to their tier."""
        if self.tiered.away and not self.resting:
            self.tiered.give_back(written=True)
            self.resting, self.task = True, -1

    def settle(self) -> None:
        """Wait until the copies of `rest` and `release_sums` have ended, and free their memory."""
        for tiered in (self.tiered, *self._tiered_sums):
            tiered.settle()

    def free(self) -> None:
        """Drop the buffers."""
        if self.tiered.away:
            for buffer in self.buffers.values():
                if buffer.flat is not None:
                    self.tiered.forget(buffer.flat)
            self.rest()
        for buffer in self.buffers.values():
            buffer.free()
        self.buffers = {}

    def prefetch_sums(self) -> None:
        """Prefetch offloaded accumulators through host memory, because the next reduction adds to them."""
        adds = self.accumulated and self.level in (0, self.domain.depth)  # else `sums` are added to
        if adds and self.tiered.home.used_on is None:
            for section in self.unit.trainable if self._tiered_sums else ():
                section.tiered_gradient.look_ahead(section.whole_gradient)

    def acquire_sums(self) -> None:
        """Bring offloaded accumulators to the device until `release_sums`, because a reduction adds to them."""
        if self._tiered_sums and not self.acquired:
            with contextlib.ExitStack() as undo:
                for tiered in self._tiered_sums:
                    tiered.start(read=self.accumulated)
                    undo.callback(tiered.give_back, written=False)
                for tiered in self._tiered_sums:
                    tiered.finish()
                undo.pop_all()
            self.acquired = self._tiered_sums

    def release_sums(self) -> None:
        """Return offloaded accumulators to their tier, after the reduction."""
        acquired, self.acquired = self.acquired, ()
        for tiered in acquired:
            tiered.give_back(written=True)

    @property
    def complete(self) -> bool:
        """Whether no more gradients of this pass can come."""
        return not self.expected and (not self.nested or self._calls.settled(self.unit))

    def watch(self, values: torch.Tensor) -> None:
        """Record the minimum and maximum of values to be sent: one of them is not finite if any value is not.

        It reads the values once, without waiting for the device. Because small new tensors in each pass would fragment
        memory, the results have permanent memory.
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
        """Begin a new window of `watch`, and keep the results of the last one."""
        self._window ^= 1
        self._watched[self._window].clear()

    def was_finite(self, *, formerly: bool = False) -> bool | None:
        """Return True if watched values of this (`formerly`: the last) window are finite, None if unknown. Blocking."""
        window = self._window ^ int(formerly)
        ends = [end for dtype in self._watched[window] for end in self._ends[window][dtype]]
        return all(bool(torch.isfinite(end)) for end in ends) if ends else None
