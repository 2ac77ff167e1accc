"""FLOP counts by module: forward pass, backward pass and recomputation.

torch's FlopCounterMode counts operators. In a forward pass an operator belongs to the innermost called module. Because
autograd numbers graph nodes in creation order, an operator of a backward pass belongs to the module call that created
its node. The graph is unchanged. Operators of a backward pass inside a module's call, or with gradients enabled, count
as recomputation (activation checkpointing).
"""

from __future__ import annotations

import contextlib
import sys
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn
from typing_extensions import override

from shardwise.compat import backward_pass, current_node, number_now, number_of
from shardwise.device.clock import Instant, now, seconds_between
from shardwise.profile.formulas import Formula, formulas

FORWARD, RECOMPUTE, BACKWARD = "forward", "recompute", "backward"


class _Call(NamedTuple):
    module: nn.Module
    again: bool  # the call began in a backward pass
    begun: Instant


class _Untracked:
    """Replaces the module tracker of torch's counter, whose hooks would change the graph."""

    parents = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        pass


class Callers:
    """Says which module's call an operator belongs to, between `start` and `stop`, by hooks on a model's modules."""

    def __init__(self, model: nn.Module, *, cuda: bool = False) -> None:
        self.model = model
        self._cuda = cuda
        self._handles: list[Any] = []
        self._running: list[_Call] = []
        self._thread = 0
        # First autograd node number of each module call, and the module.
        self._starts: list[int] = []
        self._makers: list[nn.Module | None] = []

    def start(self) -> None:
        """Register the hooks."""
        self._thread = threading.get_ident()
        for module in self.model.modules():
            self._handles.append(module.register_forward_pre_hook(self._enter))
            self._handles.append(module.register_forward_hook(self._leave, prepend=True, always_call=True))

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._running = []
        self._starts, self._makers = [], []

    def caller(self) -> tuple[nn.Module | None, str]:
        """Return the innermost module to which the running operator belongs, None without one, and the phase."""
        if backward_pass() is None or (self._running and not self._running[0].again):
            phase = FORWARD  # derivatives inside a module's call are part of its forward computation
        elif self._running or torch.is_grad_enabled():
            phase = RECOMPUTE
        else:
            phase = BACKWARD
        return self._running[-1].module if self._running else self._maker(), phase

    def left(self, call: _Call) -> None:
        """Called when a module's call has ended."""

    def _maker(self) -> nn.Module | None:
        node = current_node()
        place = 0 if node is None else bisect_right(self._starts, number_of(node))
        return self._makers[place - 1] if place else None

    def _mark(self) -> None:
        # Autograd numbers nodes by thread, and a device's backward thread runs only recomputation.
        if threading.get_ident() == self._thread:
            self._starts.append(number_now())
            self._makers.append(self._running[-1].module if self._running else None)

    def _enter(self, module: nn.Module, _: Any) -> None:
        self._running.append(_Call(module, backward_pass() is not None, now(self._cuda)))
        self._mark()

    def _leave(self, module: nn.Module, *_: Any) -> None:
        for place in reversed(range(len(self._running))):
            if self._running[place].module is module:
                call = self._running[place]
                del self._running[place:]
                self.left(call)
                break
        self._mark()


class FlopCount(Callers):
    """Counts a model's FLOPs between `start` and `stop`.

    `flops` are by module and phase, without submodules; None: outside of all modules. `calls` are those of forward
    passes.
    """

    def __init__(self, model: nn.Module, ignored: Iterable[type[nn.Module]] = ()) -> None:
        super().__init__(model, cuda=any(parameter.is_cuda for parameter in model.parameters()))
        self.flops: Counter[tuple[nn.Module | None, str]] = Counter()
        self.calls: Counter[nn.Module] = Counter()
        self._spans: list[tuple[nn.Module, Instant, Instant]] = []
        classes = tuple(ignored)
        self._left_out = {part for m in model.modules() if isinstance(m, classes) for part in m.modules()}
        self._formulas = {operator: self._counted(formula) for operator, formula in formulas().items()}

    @override
    def left(self, call: _Call) -> None:
        if not call.again:
            self.calls[call.module] += 1
            self._spans.append((call.module, call.begun, now(self._cuda)))

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count operators inside the block. Compiled modules run eagerly: their kernels are no torch operators."""
        from torch.utils.flop_counter import FlopCounterMode  # imported only for counting

        counter = FlopCounterMode(display=False, custom_mapping=self._formulas)
        counter.mod_tracker = _Untracked()  # type: ignore[assignment]
        eager: AbstractContextManager[Any] = contextlib.nullcontext()
        if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled
            eager = torch.compiler.set_stance("force_eager")
        with eager, counter:
            yield

    def seconds(self) -> dict[nn.Module, float]:
        """Return the time of each module's forward calls, waiting for the device."""
        found: dict[nn.Module, float] = {}
        for module, start, end in self._spans:
            found[module] = found.get(module, 0.0) + seconds_between(start, end)
        return found

    def _counted(self, formula: Formula) -> Formula:
        def count(*args: Any, **kwargs: Any) -> int:
            flops = formula(*args, **kwargs)
            module, phase = self.caller()
            if module not in self._left_out:
                self.flops[module, phase] += flops
            return flops

        count._get_raw = True  # type: ignore[attr-defined]  # gets tensors, not shapes
        return count
