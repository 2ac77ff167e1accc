"""Pass: runs the forward and backward passes of model chunks over their units.

Hooks of modules call `pre_forward` and `post_forward`, hooks in autograd's graph `pre_backward`, hooks of parameters
`post_backward` when gradients are complete. The unsharder and the reducer do the work, and share one `UnitOrder`.

A model has one chunk, or several that run one after the other, in the same order on all ranks of the pass group. Their
graphs may wait for their backward passes together. `select` chooses the chunk and the graph of the next pass.

The backward pass of a graph may be split in two (`Part`). Units with sharded gradients are reduced once for a graph:
the first part holds gradients of parameters, and the second adds its own and reduces the sums.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.compat import backward_pass, never_compiled, number_of_pass
from shardwise.errors import ReleasedParameterError
from shardwise.registry import LogicalTensor, Registry
from shardwise.trees import tensors_in
from shardwise.zero.passes.calls import AtEnd, UnitCalls, Use
from shardwise.zero.passes.gradients import UnitGradients
from shardwise.zero.passes.modulehook import weakly
from shardwise.zero.passes.order import Chunk, Phase, UnitOrder, UnitUsage
from shardwise.zero.passes.reduce import Reducer
from shardwise.zero.passes.saved import SavedValues
from shardwise.zero.passes.unshard import Unsharder
from shardwise.zero.units.flat_param import FlatParamStorage
from shardwise.zero.units.presence import Presence
from shardwise.zero.units.unit import Unit, UnitState


class Part(Enum):
    """Part of the backward pass of a graph."""

    WHOLE = "whole"
    FIRST = "first"
    """Gradients of inputs, and of some parameters."""
    SECOND = "second"
    """Gradients of the other parameters, which are computed without any parameter."""


class Call(NamedTuple):
    """A running call of a module that has units, or of a function that uses a parameter."""

    units: Sequence[Unit]
    """Units with a call that is tracked through the backward pass."""
    use: Use | None
    saves: bool
    """Whether the hooks on saved tensors are in force for this call."""


class Pass:
    """Runs the passes of the chunks of a model. `reducer` is None if nothing is trained."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        calls: UnitCalls,
        unsharder: Unsharder,
        reducer: Reducer | None,
        registry: Registry,
        presence: Presence,
    ) -> None:
        self.chunks, self.calls = chunks, calls
        self.unsharder, self.reducer = unsharder, reducer
        self._part = Part.WHOLE
        self._held: dict[Hashable, list[tuple[UnitGradients, int, int, torch.Tensor]]] = {}
        self._holds: list[tuple[UnitGradients, int, int, torch.Tensor]] | None = None
        self.select(0)
        # Graphs keep these; a model that keeps its loss would never be freed.
        self.saved = SavedValues(weakly(self._recall))
        self._before, self._after = weakly(self.pre_backward), weakly(self.post_backward)
        self._registry = registry
        self._presence = presence
        self._inside: dict[int, int] = {}  # running calls by unit
        self._at_end: AtEnd | None = None
        self._closed = False
        self._handles: list[Any] = []
        self._arrivals: list[tuple[UnitGradients, int, FlatParamStorage, int, int]] = []
        """Unit, its flat parameter, slot and parameter of each hook, by number of the hook."""
        for gradients in reducer.gradients.values() if reducer is not None else ():
            for section in gradients.unit.trainable:
                for number, slot in enumerate(section.layout.slots):
                    hook = self._gradient_hook(gradients, section, number)
                    self._handles.append(registry.parameters[slot.index].register_post_accumulate_grad_hook(hook))

    def select(self, chunk: int, graph: Hashable = None) -> None:
        """Choose the chunk of the next pass, by number, and its graph, if several wait for their backward passes."""
        chosen = self.chunks[chunk]
        self.order: UnitOrder = chosen.order
        self.usage: UnitUsage = chosen.usage
        self._graph = graph
        self.calls.select(graph)
        self.unsharder.select(chosen)
        if self.reducer is not None:
            self.reducer.select(chunk)

    @property
    def in_first_chunk(self) -> bool:
        """Whether the next pass is one of the first chunk."""
        return self.order is self.chunks[0].order

    def begin_part(self, part: Part) -> None:
        """Set the part of the next backward pass."""
        self._part, self.saved.reads = part, part is not Part.SECOND

    def keep(self, chunk: int) -> None:
        """Keep the units of a chunk unsharded from their next use to `release` (all ranks call)."""
        self.unsharder.keep(self.chunks[chunk])

    def release(self, chunk: int) -> None:
        """Reshard the units that have been unsharded since `keep`."""
        self.unsharder.release(self.chunks[chunk])

    def end_graphs(self) -> None:
        """Drop graphs and gradients that still wait for a backward pass; an error has ended their batch."""
        for chunk in self.chunks:
            self.unsharder.release(chunk)
        self.begin_part(Part.WHOLE)
        self._held.clear()
        self.calls.forget()
        self.select(0)

    def end_window(self) -> None:
        """Forget uses of units that the forward passes of the next window record anew."""
        self.calls.end_window()
        for chunk in self.chunks:
            chunk.usage.untracked.clear()

    def set_order(self, orders: Sequence[tuple[Sequence[int], Sequence[int]]], *, traced: bool = False) -> None:
        """Set the forward and backward orders of the chunks that all ranks have agreed on (between passes only)."""
        for chunk, (forward, backward) in zip(self.chunks, orders, strict=True):
            chunk.order.set(forward, backward)
            chunk.order.traced = traced
        if self.reducer is not None:
            self.reducer.follow_order()

    def close(self) -> None:
        """Remove the hooks of parameters. A graph that is left differentiates a plain model."""
        self._closed, self.reducer = True, None
        for handle in self._handles:
            handle.remove()
        self._handles, self._arrivals = [], []

    # -- forward -----------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Begin a forward pass. Raises UsageError if the parameters are off the device."""
        self._presence.require("a forward pass cannot begin", values=True)
        order = self.order
        order.builds_graph = torch.is_grad_enabled()
        self._inside = {}
        self.saved.forget()
        self.usage.begin_forward(builds_graph=order.builds_graph)
        self.unsharder.begin_forward()

    def end_forward(self) -> None:
        """End a forward pass."""
        self.saved.close_all()
        self.usage.end_forward()
        self.unsharder.end_forward()

    def pre_forward(self, units: Sequence[Unit]) -> Call:
        """Unshard the units of a module before its forward call."""
        order, calls = self.order, self.calls
        recorded = order.phase is Phase.FORWARD and order.builds_graph
        tracked, saves = list[Unit](), False
        for unit in units:
            if recorded:
                self.usage.enter(unit)
            calls.enter(unit, order.phase, builds_graph=order.builds_graph)
            self._unshard(unit)
            self._inside[unit.index] = self._inside.get(unit.index, 0) + 1
            unit.unguard()
            if calls.tracks(unit) and calls.differentiated(unit, order.phase):
                tracked.append(unit)
                saves = saves or unit.sharded
        use = calls.begin(tracked, self._after) if tracked else None
        return Call(tracked, use, saves and self.saved.open())

    def post_forward(self, units: Sequence[Unit], call: Call, outputs: Any) -> None:
        """Track the graph of a module's forward call that has returned, and reshard its units."""
        if call.use is not None:
            self.calls.end(call.units, call.use, outputs, self._before)
        for unit in units:
            self._inside[unit.index] = max(0, self._inside.get(unit.index, 0) - 1)
            self._after_use(unit)

    def _after_use(self, unit: Unit, *, counts: bool = True) -> None:
        if self.order.phase is not Phase.FORWARD:
            return
        # Outside of its modules a unit is guarded even while it is unsharded, because each use must be seen.
        if unit.sharded and not self._inside.get(unit.index):
            unit.guard()
        if self.usage.count(unit, builds_graph=self.order.builds_graph, counts=counts):
            self.unsharder.after_forward_use(unit)

    def _unshard(self, unit: Unit) -> None:
        self.unsharder.unshard(unit)
        if unit.sharded:
            self.saved.know(unit)

    # -- backward ----------------------------------------------------------------------------------------------------

    @never_compiled
    def start_backward(self) -> None:
        """Begin a backward pass, unless one is under way; called by each hook that a backward pass may reach first."""
        # If the model differentiates a part of itself, that belongs to the forward pass.
        if not self._closed and self.order.phase is not Phase.FORWARD:
            self._ensure_backward()

    def _ensure_backward(self) -> None:
        if self.order.phase is Phase.BACKWARD:
            if self._at_end is None or not self._at_end.dropped:
                return
            self.end_backward()  # an exception has ended an earlier pass
        self._require_state()
        self._at_end = AtEnd(self.end_backward)
        self._begin_backward()

    def _require_state(self) -> None:
        self._presence.require("a backward pass cannot begin", values=self.reducer is None)

    def _begin_backward(self, *, differentiates: bool = True) -> None:
        if self.order.phase is Phase.FORWARD:
            self.end_forward()  # it was interrupted, and nothing has called since
        self.order.phase = Phase.BACKWARD
        reducer, part = self.reducer, self._part
        self._holds = self._held.setdefault(self._graph, []) if self._holding else None
        if reducer is not None:
            reducer.begin(differentiates=differentiates, holding=self._holds is not None)
        self._inside = {}
        self.saved.forget()
        self.unsharder.begin_backward(unshards=part is not Part.SECOND)
        for unit in self.order.backward if part is not Part.SECOND else ():
            if unit.index in self.usage.untracked:
                self.unsharder.keep_to_end(unit)
                self._unshard(unit)
                unit.unguard()
        if reducer is not None and part is Part.SECOND:
            for gradient in self._held.pop(self._graph, ()):
                reducer.add(*gradient)
        if reducer is not None and differentiates:
            reducer.begin_profile_range()

    @property
    def _holding(self) -> bool:
        return self._part is Part.FIRST and self.reducer is not None and self.reducer.every_pass

    def join_backward(self) -> None:
        """Take part in a backward pass of the peers: the loss of this rank does not depend on the model."""
        self._require_state()
        self._begin_backward(differentiates=False)
        self.end_backward()

    @never_compiled
    def end_backward(self) -> None:
        """End a backward pass, also one that an exception has ended early."""
        if self.order.phase is not Phase.BACKWARD:
            return
        if self.reducer is not None:
            self.reducer.end()
        self.unsharder.end_backward()
        self.calls.end_backward()
        if self.reducer is not None:
            self.reducer.driver.backward_ended(self.reducer.brought)

    def pre_backward(self, unit: Unit) -> None:
        """Unshard a unit before a node runs that may read its values."""
        self.start_backward()
        late = self.unsharder.late
        self._unshard(unit)
        if self.unsharder.late != late:
            self.unsharder.keep_to_end(unit, of_each=True)
        # A backward pass inside of a forward pass must not hide later uses from `touch`.
        if self.order.phase is not Phase.FORWARD:
            unit.unguard()

    def _recall(self, unit: Unit) -> None:
        """Unshard a unit before a node reads values of the unit that autograd has saved."""
        if unit.state is UnitState.UNSHARDED:
            return
        if backward_pass() is None:
            raise ReleasedParameterError(
                f"values of unit {unit.name!r} that autograd has saved are read outside of a backward pass, where they "
                f"are {unit.between_uses}"
            )
        self.pre_backward(unit)

    def _gradient_hook(
        self, gradients: UnitGradients, section: FlatParamStorage, number: int
    ) -> Callable[[nn.Parameter], None]:
        # Python's garbage collector does not see what these hooks refer to: a strong reference would never be freed.
        known, turn = weakref.ref(self), len(self._arrivals)
        place = gradients.unit.sections.index(section)
        self._arrivals.append((gradients, place, section, number, section.layout.slots[number].index))

        # Because there are many parameters, the frequent case comes first and calls as little as possible.
        @never_compiled
        def arrived(parameter: nn.Parameter) -> None:
            current = known()
            grad = parameter.grad
            if grad is None or current is None or (reducer := current.reducer) is None:
                return
            gradients, place, section, number, index = current._arrivals[turn]
            parameter.grad = None
            if gradients.task != number_of_pass():
                current._ensure_backward()
                reducer.first_of_pass(gradients, index)
            # Equal rows of a sparse gradient are summed in one order.
            grad = grad.coalesce().to_dense() if grad.is_sparse else grad
            if current._holds is None:
                buffer = gradients.buffers.get(place) or reducer.buffer_for(gradients, place, section)
                buffer.put(number, grad)
            else:
                current._holds.append((gradients, place, number, grad))
            del grad
            gradients.seen.add(index)
            expected = gradients.expected
            expected.discard(index)
            if not expected:
                current.post_backward(gradients.unit)

        return arrived

    def post_backward(self, unit: Unit) -> None:
        """Reshard a unit with complete gradients, and launch its reduction."""
        if self._closed or self.order.phase is Phase.FORWARD:
            return
        reducer = self.reducer
        if reducer is not None and not reducer.progress(unit):
            return
        if not self.calls.in_use(unit):
            self.unsharder.after_backward_use(unit)
        if reducer is not None:
            reducer.launch_complete(unit)

    # -- uses of parameters outside of their own modules ---------------------------------------------------------------

    def touch(self, unit: Unit, tensor: LogicalTensor, what: str) -> Call | None:
        """Unshard a unit for the function `what`, which uses a parameter outside of its own module; return the use.

        Raises ReleasedParameterError if no pass is under way and the unit is resharded.
        """
        order, unsharder = self.order, self.unsharder
        if order.phase is Phase.IDLE:
            self._presence.require(f"{what}: parameter {tensor.name!r} cannot be used", values=True)
        if not unit.sharded:
            unit.wait_for_unshard()
            return None
        if order.phase is Phase.IDLE and not unsharder.suspended and unsharder.is_resharded(unit):
            if backward_pass() is not None:
                self.start_backward()  # an autograd function that has kept the parameter runs first
            if order.phase is Phase.IDLE and unsharder.is_resharded(unit):
                raise ReleasedParameterError(
                    f"{what}: the values of parameter {tensor.name!r} (shape {tuple(tensor.shape)}) are "
                    f"{unit.between_uses} and not gathered outside of forward and backward. Compute a loss from them "
                    "in the model's forward(); read or change them inside `with shardwise.zero.GatheredParameters("
                    "parameter, modifier_rank=None or 0):` on every rank, or use "
                    "shardwise.utils.safe_get_full_fp32_param(parameter). The whole model is saved by "
                    "engine.save_checkpoint() and engine.save_16bit_model(), copied by engine.module_state_dict(), "
                    "and there inside of `with engine.gathered():`."
                )
        if order.phase is Phase.FORWARD and order.builds_graph:
            self.usage.touch(unit)
        # A recomputation, or the number of uses is unknown, or a kernel will use the address unseen.
        if order.phase is Phase.BACKWARD or not self.usage.passes or what == "data_ptr":
            unsharder.keep_to_end(unit)
        # Without a graph it may be a re-entrant checkpoint, which uses the unit again in the backward pass.
        if order.builds_graph and (what == "data_ptr" or not torch.is_grad_enabled()):
            self.usage.untracked.add(unit.index)
        self._unshard(unit)
        unit.unguard()
        if not self.calls.differentiated(unit, order.phase):
            return None
        return Call([unit], self.calls.begin([unit], self._after), self.saved.open())

    def end_touch(self, unit: Unit, call: Call | None, result: Any) -> None:
        """Track the result of the function, because its backward needs the unit unsharded."""
        if call is not None and call.saves:
            self.saved.close()
        order = self.order
        if not unit.sharded or order.phase is Phase.IDLE:
            return
        views = any(unit.owns(value) for value in tensors_in(result))
        if views:
            # Uses of a view cannot be seen: the unit stays unsharded to the end of this pass and each backward pass.
            self.unsharder.keep_to_end(unit)
            if order.builds_graph:
                self.usage.untracked.add(unit.index)
        elif call is not None and call.use is not None:
            self.calls.end([unit], call.use, result, self._before)
        self._after_use(unit, counts=not views)


def backward_order(units: Sequence[Sequence[nn.Module]], root: nn.Module) -> list[int]:
    """Return all units (given by their modules) in the likely backward order, from the module tree only.

    The unit that ends last in the tree comes first; of two that end together, the outer one.
    """
    start: dict[nn.Module, int] = {}
    end: dict[nn.Module, int] = {}
    _visit(root, start, end)
    last = {index: max((end[m], -start[m]) for m in modules) for index, modules in enumerate(units)}
    return sorted(last, key=lambda index: (last[index], index), reverse=True)


def _visit(module: nn.Module, start: dict[nn.Module, int], end: dict[nn.Module, int]) -> None:
    # Not a closure: one that calls itself is a cycle, and would keep the model.
    if module in start:
        return
    start[module] = len(start)
    for child in module.children():
        _visit(child, start, end)
    end[module] = len(start)
