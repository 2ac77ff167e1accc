"""Hooks on the modules of a model chunk, which call its pass.

The outermost hooked call begins a forward pass and ends it, also when it raises. Because hooks lie outside of
`forward`, a compiled module stays one region.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.compat import backward_pass, calls_running, transforming
from shardwise.device.ranges import named
from shardwise.trees import tensors_in
from shardwise.zero.passes.model_pass import Call, Pass
from shardwise.zero.passes.modulehook import ModuleHook, weakly
from shardwise.zero.passes.order import Phase
from shardwise.zero.units.unit import Unit


class _Running(NamedTuple):
    module: nn.Module
    call: Call
    range: AbstractContextManager[Any]
    """Profiler range of the computation."""


class Hooks:
    """Registers and removes the hooks of one model chunk; a call of `root` is a forward pass."""

    def __init__(self, root: nn.Module, units: Sequence[Unit], model_pass: Pass) -> None:
        self.root = root
        self._pass = model_pass
        self._outermost: nn.Module | None = None
        self._running: list[_Running] = []
        self._handles: list[Any] = []
        self._sharded = any(unit.sharded for unit in units)
        homes: dict[nn.Module, list[Unit]] = {root: []}
        for unit in units:
            for module in unit.modules:
                homes.setdefault(module, []).append(unit)
        for module, entered in homes.items():
            self._install(module, entered)

    def _install(self, module: nn.Module, units: list[Unit]) -> None:
        name = " ".join(unit.name for unit in units)

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._sharded and transforming():  # torch.func accumulates no gradients
                for unit in units:
                    unit.wait_for_unshard()
                return
            model_pass = self._pass
            if model_pass.order.phase is Phase.BACKWARD or module is self._outermost:
                self.settle(entered=module)
            if model_pass.order.phase is Phase.IDLE:
                model_pass.begin_forward()
                self._running.clear()
                self._outermost = module
            call = model_pass.pre_forward(units)
            computing = named("forward", name)
            computing.__enter__()
            self._running.append(_Running(module, call, computing))

        def after(module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
            if not self._sharded and transforming():
                return
            call = self._returned(module)
            outermost = self._outermost is module and not self._running
            if outermost and torch.is_grad_enabled():
                start = weakly(self._pass.start_backward)  # Python's collector does not see hooks of nodes
                for node in {t.grad_fn for t in tensors_in(outputs) if t.grad_fn is not None}:
                    node.register_prehook(lambda _: start())
            self._pass.post_forward(units, call, outputs)
            if outermost:
                self._close()

        self._handles.append(module.register_forward_pre_hook(ModuleHook(before), prepend=True, with_kwargs=True))
        self._handles.append(module.register_forward_hook(ModuleHook(after), with_kwargs=True, always_call=True))

    def _returned(self, module: nn.Module) -> Call:
        """Remove the innermost call of a module from the list, and the calls inside of it that were interrupted."""
        for place in reversed(range(len(self._running))):
            if self._running[place].module is module:
                returned = self._running[place:]
                del self._running[place:]
                for running in returned:
                    if running.call.saves:
                        self._pass.saved.close()
                for running in reversed(returned):
                    running.range.__exit__(None, None, None)
                return returned[0].call
        return Call((), None, saves=False)

    def _close(self) -> None:
        self._outermost = None
        self._running.clear()
        self._pass.end_forward()

    def settle(self, entered: nn.Module | None = None) -> None:
        """End a pass that an exception has ended early: its collectives take place, its gradients stay partial.

        The next use of the model (perhaps the call of `entered`) calls this, because the code that catches the
        exception must not wait for peers.
        """
        phase = self._pass.order.phase
        if phase is Phase.IDLE or backward_pass() is not None:
            return
        if phase is Phase.BACKWARD:
            self._pass.end_backward()
        elif calls_running(self._outermost) <= (entered is self._outermost):
            self._close()  # PyTorch calls no hook after a KeyboardInterrupt

    def remove(self) -> None:
        """Remove all hooks from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
