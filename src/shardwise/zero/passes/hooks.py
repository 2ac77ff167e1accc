"""Hooks on the user's modules: they tell the gatherer what the model is doing, and nothing else.

The outermost hooked call opens a forward pass and closes it, also when it raises. A module that is home to a unit
enters and leaves it. Hooks lie outside of the modules' forward, so that a compiled module stays one region.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.compat import backward_pass, calls_running, transforming
from shardwise.device.ranges import named
from shardwise.trees import tensors_in
from shardwise.zero.passes.calls import Use
from shardwise.zero.passes.gather import Gatherer, Phase
from shardwise.zero.passes.modulehook import ModuleHook
from shardwise.zero.units.unit import Unit


class _Call(NamedTuple):
    """A call of a home module that is running."""

    module: nn.Module
    use: Use | None
    watched: list[Unit]
    opened: bool
    """Whether what autograd saves is watched on behalf of this call."""
    range: AbstractContextManager[Any]
    """Around what it computes."""


class Hooks:
    """Installs and removes the hooks of one engine.

    Args:
        root: the user's model.
        units: all units.
        gatherer: opened, asked and closed by the hooks.
    """

    def __init__(self, root: nn.Module, units: Sequence[Unit], gatherer: Gatherer) -> None:
        self.root = root
        self.gatherer = gatherer
        self._outermost: nn.Module | None = None
        self._calls: list[_Call] = []
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
            gatherer = self.gatherer
            if self._passes_by():
                for unit in units:
                    unit.finish_gather()
                return
            self._open(module)
            for unit in units:
                gatherer.enter(unit)
            use = None
            watched = [unit for unit in units if gatherer.watches(unit) and gatherer.differentiated(unit)]
            if watched:
                use = gatherer.begin_use(watched)
            opened = any(unit.sharded for unit in watched) and gatherer.saved.open()
            computing = named("forward", name)
            computing.__enter__()
            self._calls.append(_Call(module, use, watched, opened, computing))

        def after(module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
            gatherer = self.gatherer
            if self._passes_by():
                return
            call = self._returned(module)
            outermost = self._outermost is module and not self._calls
            if call.use is not None:
                gatherer.end_use(call.watched, call.use, outputs)
            if outermost and torch.is_grad_enabled():
                for node in {t.grad_fn for t in tensors_in(outputs) if t.grad_fn is not None}:
                    node.register_prehook(lambda _: gatherer.start_backward())
            for unit in units:
                gatherer.leave(unit)
            if outermost:
                self._close()

        self._handles.append(module.register_forward_pre_hook(ModuleHook(before), prepend=True, with_kwargs=True))
        self._handles.append(module.register_forward_hook(ModuleHook(after), with_kwargs=True, always_call=True))

    def _passes_by(self) -> bool:
        """Whether a call is none of the engine's: a transform of torch.func differentiates by itself, whole parameters
        are there, and nothing is accumulated into them. Where units are sharded the calls are followed all the same.
        """
        return transforming() and not self._sharded

    def _open(self, module: nn.Module) -> None:
        gatherer = self.gatherer
        if gatherer.phase is Phase.BACKWARD or module is self._outermost:
            self.settle(entered=module)
        if gatherer.phase is Phase.IDLE:
            gatherer.check_forward()
            self._calls.clear()
            self._outermost = module
            gatherer.begin_forward()

    def _returned(self, module: nn.Module) -> _Call:
        """Take the innermost call of a module off the list, with calls inside of it that were interrupted."""
        for place in reversed(range(len(self._calls))):
            if self._calls[place].module is module:
                returned = self._calls[place:]
                del self._calls[place:]
                for call in returned:
                    if call.opened:
                        self.gatherer.saved.close()
                for call in reversed(returned):
                    call.range.__exit__(None, None, None)
                return returned[0]
        return _Call(module, None, [], False, contextlib.nullcontext())

    def _close(self) -> None:
        self._outermost = None
        self._calls.clear()
        self.gatherer.end_forward()

    def settle(self, entered: nn.Module | None = None) -> None:
        """End a pass that an exception has cut short: its collectives take place, its gradients stay partial.

        Called by whatever comes next, not where the exception is raised: that must not wait for other ranks.

        Args:
            entered: the module whose call has just begun, if that is what comes next.
        """
        gatherer = self.gatherer
        if gatherer.phase is Phase.IDLE or backward_pass() is not None:
            return
        if gatherer.phase is Phase.BACKWARD:
            gatherer.cut_backward_short()
        elif calls_running(self._outermost) <= (entered is self._outermost):
            self._close()  # PyTorch calls no hook after a KeyboardInterrupt

    def remove(self) -> None:
        """Take all hooks off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
