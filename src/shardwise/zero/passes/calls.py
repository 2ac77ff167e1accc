"""Forward calls as autograd sees them: when their backward begins and when it is complete.

A sharded unit must be whole from the moment its outputs are differentiated until the last node of the call's graph has
run, whether its parameters are trained, frozen or used detached. The graph is asked for that: nodes carry a sequence
number, and those made during the call lie between its outputs and the first nodes that are older than it. Nothing is
inserted into the graph, so that gradients are added up in the same order as without sharding, to the bit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

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


class Use:
    """One forward call of a unit's module whose backward is still to come; dies with its autograd graph.

    Made when the call begins. Hooks of the graph's nodes hold it; it holds none of them.

    Args:
        done: called whenever a backward pass has run the whole graph of the call.
    """

    __slots__ = ("__weakref__", "_done", "_edges", "_left", "_start", "_task")

    def __init__(self, done: Callable[[Use], None]) -> None:
        self._start = number_now()
        self._done = done
        self._edges = self._left = 0
        self._task: int | None = None

    def follow(self, outputs: Any, before: Callable[[], None]) -> bool:
        """Watch the graph that the call has made.

        Args:
            outputs: what the call has returned.
            before: called before a backward pass runs a node that has made one of them.

        Returns:
            Whether the call has made a graph at all.
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
        """Yield the nodes that no other node of the call comes after: when they have run, all others have."""
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
    """A callback at the end of the backward pass that autograd is in now.

    Args:
        end: called when the pass has ended, unless an exception ends it.
    """

    def __init__(self, end: Callable[[], None]) -> None:
        callback = partial(end)
        self._callback = weakref.ref(callback)
        at_end_of_backward(callback)

    @property
    def dropped(self) -> bool:
        """Whether the pass has ended: autograd holds the callback no longer than that."""
        return self._callback() is None
