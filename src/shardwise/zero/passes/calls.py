"""Forward calls in autograd's graph: when the backward pass of a call begins, and when it is complete.

A sharded unit must be unsharded from the moment at which outputs of its call are differentiated until the last node of
the call's graph has run, whether its parameters are trained, frozen or detached. By their sequence numbers, the nodes
of a call lie between its outputs and the first nodes that are older than the call. Because nothing is inserted into the
graph, gradients are summed in the same order as without sharding, bit by bit.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import Node

from shardwise.compat import (
    LEAF_NUMBER,
    at_end_of_backward,
    backward_pass,
    never_compiled,
    number_now,
    number_of,
)
from shardwise.trees import tensors_in
from shardwise.zero.passes.order import Phase
from shardwise.zero.units.unit import Unit


class Use:
    """A forward call whose graph may be differentiated; `done` is called when a backward pass has run all of it.

    Created when the call begins. Hooks of the graph's nodes keep it alive; it keeps no node.
    """

    __slots__ = ("__weakref__", "_done", "_edges", "_left", "_start", "_task")

    def __init__(self, done: Callable[[Use], None]) -> None:
        self._start = number_now()
        self._done = done
        self._edges = self._left = 0
        self._task: int | None = None

    def follow(self, outputs: Any, before: Callable[[], None]) -> bool:
        """Register hooks in the graph of the call; return True if the call has made a graph of the outputs.

        `before` is called before a backward pass runs a node that has computed an output.
        """
        roots = {t.grad_fn for t in tensors_in(outputs) if t.grad_fn is not None}
        roots = {node for node in roots if number_of(node) >= self._start}
        for node in roots:
            node.register_prehook(lambda _: before())
        for node in self._last(roots):
            self._edges += 1
            node.register_hook(self._ran)
        return bool(roots)

    def _last(self, roots: Iterable[Node]) -> Iterable[Node]:
        """Yield the nodes of the call that a backward pass runs last: all others have run before them."""
        start, known = self._start, set(roots)
        pending = list(known)
        while pending:
            node = pending.pop()
            is_last = True
            for following, _ in node.next_functions:
                if following is None:
                    continue
                if following in known:
                    is_last = False
                elif start <= number_of(following) != LEAF_NUMBER:
                    known.add(following)
                    pending.append(following)
                    is_last = False
            if is_last:
                yield node

    @never_compiled
    def _ran(self, *_: Any) -> None:
        task = backward_pass()
        if task != self._task:
            self._task, self._left = task, self._edges
        self._left -= 1
        if not self._left:
            self._done(self)


class AtEnd:
    """Calls `end` at the end of autograd's current backward pass, unless an exception ends the pass."""

    def __init__(self, end: Callable[[], None]) -> None:
        callback = partial(end)
        self._callback = weakref.ref(callback)
        at_end_of_backward(callback)

    @property
    def dropped(self) -> bool:
        """True if the pass has ended: autograd keeps the callback until then."""
        return self._callback() is None


class _Graph:
    """Calls in one graph. Dictionary keys and sets are indices of units."""

    def __init__(self) -> None:
        self.uses: defaultdict[int, weakref.WeakSet[Use]] = defaultdict(weakref.WeakSet)
        # Calls without a graph in a forward pass (re-entrant checkpoints) that are not recomputed yet. Negative: a pass
        # has recomputed all of them, and another pass may do so again.
        self.recomputed: dict[int, int] = {}
        self.used: set[int] = set()
        self.tracked: set[int] = set()


class UnitCalls:
    """Forward calls of units that a backward pass may differentiate, by graph."""

    def __init__(self) -> None:
        self._graphs: dict[Hashable, _Graph] = {}
        self._to_track: set[int] | None = None
        self.select(None)

    def select(self, graph: Hashable) -> None:
        """Choose the graph of the next pass; None: the only one. The others are differentiated by other passes."""
        self._key = graph
        self._now = self._graphs.setdefault(graph, _Graph())

    def forget(self) -> None:
        """Drop all graphs but the one without a name, and select it."""
        self._graphs = {None: self._graphs[None]}
        self.select(None)

    def enter(self, unit: Unit, phase: Phase, *, builds_graph: bool) -> None:
        """Record that a module of the unit is called."""
        index, recomputed = unit.index, self._now.recomputed
        if phase is Phase.FORWARD and builds_graph:
            self._now.used.add(index)
            if not torch.is_grad_enabled():
                recomputed[index] = max(recomputed.get(index, 0), 0) + 1
        elif phase is Phase.BACKWARD and recomputed.get(index) and torch.is_grad_enabled():
            recomputed[index] -= 1

    def differentiated(self, unit: Unit, phase: Phase) -> bool:
        """Return True if the graph of a call that begins now may be differentiated.

        In a backward pass the call is a recomputation. Its graph is used only if the forward call had none, as under
        re-entrant checkpointing.
        """
        if not torch.is_grad_enabled():
            return False
        return phase is Phase.FORWARD or (phase is Phase.BACKWARD and unit.index in self._now.recomputed)

    def tracks(self, unit: Unit) -> bool:
        """Return True if calls of the unit are tracked through the backward pass.

        Sharded units must be unsharded then. Others are tracked until a graph has shown that none of their gradients
        comes from a re-entrant checkpoint.
        """
        return unit.sharded or self._to_track is None or unit.index in self._to_track

    def track_only(self, nested: Collection[int]) -> None:
        """Learn from a backward pass which units may get gradients from nested passes."""
        self._to_track = set(nested) if self._to_track is None else self._to_track | set(nested)

    def begin(self, units: Sequence[Unit], done: Callable[[Unit], None]) -> Use:
        """Track a call of some units until a backward pass has run its graph (`done` of each) or it is freed."""
        graph = self._now

        def ended(use: Use) -> None:
            for unit in units:
                graph.uses[unit.index].discard(use)
                done(unit)

        use = Use(ended)
        for unit in units:
            graph.uses[unit.index].add(use)
            graph.tracked.add(unit.index)
        return use

    def end(self, units: Sequence[Unit], use: Use, outputs: Any, before: Callable[[Unit], None]) -> None:
        """Record the return of the tracked call; `before` is called for each unit before outputs are differentiated."""
        reference, graph = weakref.ref(use), self._now

        @never_compiled
        def wanted() -> None:
            for unit in units:
                call = reference()
                if call is not None:  # again, if the graph was retained
                    graph.uses[unit.index].add(call)
                before(unit)

        if not use.follow(outputs, wanted):
            for unit in units:
                graph.uses[unit.index].discard(use)

    def used(self, unit: Unit) -> bool:
        """Return True if the unit has computed outputs that may be differentiated."""
        return unit.index in self._now.used

    def in_use(self, unit: Unit) -> bool:
        """Return True if a tracked call of the unit is still to be differentiated."""
        return bool(self._now.uses[unit.index])

    def settled(self, unit: Unit) -> bool:
        """Return True if calls of the unit are tracked and all of them have been differentiated."""
        graph, index = self._now, unit.index
        return index in graph.tracked and not graph.recomputed.get(index) and not graph.uses[index]

    def end_backward(self) -> None:
        """End a backward pass. Graphs that the pass has not used may still be differentiated."""
        graph = self._now
        live = {index for index, uses in graph.uses.items() if uses}
        graph.recomputed = {index: count or -1 for index, count in graph.recomputed.items()}
        graph.used = live | graph.recomputed.keys()
        graph.tracked &= live
        if not live and self._key is not None:
            self._graphs.pop(self._key, None)

    def end_window(self) -> None:
        """Forget calls without a graph: passes of the window have differentiated these, or none will."""
        for graph in self._graphs.values():
            graph.recomputed.clear()
