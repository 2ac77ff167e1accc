"""Guards against changes that a script makes to the model and the optimizer: take them over where possible, else raise.

* In-place changes of gathered parameters between steps (`load_state_dict`, `p.clamp_()` under `no_grad`) reach the
  master weights. Version counters show them, except for changes through `p.data`.
* Gradients of parameters in no optimizer group are dropped, because they would stay local and grow.
* Stepping raises for unfrozen parameters (no gradient in a unit), frozen parameters (the optimizer steps them), and
  parameters added to the optimizer's groups (gradients of this rank only).
* `load_state_dict(assign=True)` raises, because it would put unregistered parameters into the model.
* `load_state_dict()` and `state_dict()` raise while values are sharded, and name the method to call instead.
* The optimizer's own `state_dict()` has this rank's flat parameters: loading it elsewhere raises. Its `step()` raises,
  because it would find no gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from shardwise.compat import version_of, without_overrides
from shardwise.errors import ReleasedParameterError, UsageError
from shardwise.registry import LogicalTensor, Registry
from shardwise.utils.logging import logger
from shardwise.zero.passes.modulehook import ModuleHook

_SHOWN = 5

_LAYOUT = "shardwise_layout"
"""Key of the layout in the optimizer's `state_dict()`."""

_requires_grad = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]

_owned: WeakSet[torch.optim.Optimizer] = WeakSet()
"""Optimizers that engines step."""


def belongs_to_engine(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if an engine steps this optimizer."""
    return optimizer in _owned


class Guards:
    """Installs and removes the guards of one engine; see the module docstring.

    `absent` returns True if a parameter is sharded and cannot be unsharded by using it now. `layout` is a fingerprint
    of the optimizer's elements and their order. `drops`: drop gradients of parameters that the optimizer does not have.
    `loaded` has the indices of changed parameters that `load_state_dict` has written as a whole.
    """

    def __init__(
        self,
        module: nn.Module,
        registry: Registry,
        optimizer: torch.optim.Optimizer | None,
        absent: Callable[[nn.Parameter], bool],
        layout: str,
        *,
        drops: bool = True,
    ) -> None:
        pairs = list(zip(registry, registry.parameters, strict=True))
        self._module = module
        self._trained = [p for t, p in pairs if t.trainable]
        self._indices = [t.index for t, _ in pairs if t.trainable]
        self._frozen = [(t, p) for t, p in pairs if not p.requires_grad]
        self._names = [t.name for t in registry if t.trainable]
        self._versions: list[int] = []
        self.loaded: set[int] = set()
        self._stepping = False
        self._layout = layout
        self._handles: list[Any] = []
        self._absent = absent
        self._optimizer = optimizer
        if drops:
            self._drop_gradients([(t, p) for t, p in pairs if p.requires_grad and not t.trainable])
        self._watch_loading(module, registry)
        if optimizer is not None:
            _owned.add(optimizer)
            self._handles.append(optimizer.register_step_pre_hook(self._before_optimizer))
            self._handles.append(optimizer.register_state_dict_post_hook(self._mark_state))
            self._handles.append(optimizer.register_load_state_dict_pre_hook(self._check_state))
        self.note_groups()
        self.note()

    # -- parameters without an optimizer -----------------------------------------------------------------------------

    def _drop_gradients(self, unowned: list[tuple[LogicalTensor, nn.Parameter]]) -> None:
        warned = False
        why = (
            "the engine has no optimizer (at stage 0 gradients would be averaged and left in .grad)"
            if self._optimizer is None
            else "no group of the optimizer has them"
        )
        names = [tensor.name for tensor, _ in unowned]

        def arrived(parameter: nn.Parameter) -> None:  # refers to no tensor: the garbage collector would not see it
            nonlocal warned
            parameter.grad = None
            if not warned:
                warned = True
                logger.warning(
                    "%d parameters require a gradient, but %s, so their gradients are dropped: %s. Call "
                    "requires_grad_(False) on them, which also saves computing the gradients, or give them to the "
                    "optimizer",
                    len(names),
                    why,
                    _listed(names),
                )

        for _, parameter in unowned:
            parameter.grad = None  # from earlier training
            self._handles.append(parameter.register_post_accumulate_grad_hook(arrived))

    def check_trained(self) -> None:
        """Raise UsageError, with names, unless the optimizer steps exactly the parameters that require a gradient."""
        with without_overrides():
            unfrozen = [tensor.name for tensor, parameter in self._frozen if parameter.requires_grad]
            trained = list(map(_requires_grad, self._trained))
        if not all(trained):
            frozen = [name for name, requires_grad in zip(self._names, trained, strict=True) if not requires_grad]
            raise UsageError(
                f"{len(frozen)} parameters were trained when the engine was built and are frozen now, and the "
                f"optimizer would go on to apply momentum and weight decay to them: {_listed(frozen)}. Set "
                "requires_grad back before engine.step(), or call engine.refresh() after freezing them"
            )
        if unfrozen:
            raise UsageError(
                f"{len(unfrozen)} parameters were frozen when the engine was built and require a gradient now, so they "
                f"would not be trained: {_listed(unfrozen)}. Unfreeze before initialize(), or call engine.refresh() "
                "after unfreezing them"
            )
        self._check_groups()

    def _stepped(self) -> list[set[int]]:
        return (
            [] if self._optimizer is None else [set(map(id, group["params"])) for group in self._optimizer.param_groups]
        )

    def note_groups(self) -> None:
        """Record the members of the optimizer's groups, which the engine has changed."""
        self._members = self._stepped()

    def _check_groups(self) -> None:
        now = self._stepped()
        if now == self._members:
            return
        assert self._optimizer is not None
        known = set().union(*self._members)
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        added = [
            names.get(id(parameter)) or f"a tensor of shape {tuple(parameter.shape)} that the model does not have"
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) not in known
        ]
        name = type(self._optimizer).__name__
        if not added:
            raise UsageError(
                f"the parameter groups of {name} have been changed since the engine was built: expected "
                f"{[len(group) for group in self._members]} flat parameters in them, found {list(map(len, now))}. "
                "Change settings of the groups (lr, weight_decay) only; for other parameters see engine.refresh()"
            )
        raise UsageError(
            f"{len(added)} parameters have been added to {name} since the engine was built: {_listed(added)}. Their "
            "gradients are neither averaged over ranks, nor clipped, nor dropped after the step. Give them to the "
            "optimizer before initialize(), pass them to engine.refresh(param_groups=...) instead of "
            "add_param_group(), or train what is not in the model with an optimizer of its own"
        )

    # -- in-place changes --------------------------------------------------------------------------------------------

    def note(self) -> None:
        """Record the current version counters; clear `loaded`."""
        self._versions = self._read()
        self.loaded = set()

    def changed(self) -> set[int]:
        """Return the indices of trained parameters that have changed in place since `note()`."""
        now = self._read()
        if now == self._versions:
            return set()
        return {index for index, old, new in zip(self._indices, self._versions, now, strict=True) if old != new}

    def _read(self) -> list[int]:
        # Version counters need no values.
        with without_overrides():
            return list(map(version_of, self._trained))

    def _watch_loading(self, module: nn.Module, registry: Registry) -> None:
        def before(module: nn.Module, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *_: Any) -> None:
            if local_metadata.get("assign_to_params_buffers"):
                raise UsageError(
                    "load_state_dict(assign=True) on the module of an engine would replace its parameters by others, "
                    "which are not trained; leave assign out, or use engine.load_module_state_dict()"
                )
            self._refuse_absent(
                module,
                "load_state_dict() on the module of an engine",
                "Use engine.load_module_state_dict(state_dict), or load inside of `with shardwise.zero."
                "GatheredParameters(list(module.parameters()), modifier_rank=0):` on every rank",
            )

        def reading(module: nn.Module, prefix: str, keep_vars: bool) -> None:
            if not keep_vars:
                self._refuse_absent(
                    module,
                    "state_dict() on the module of an engine (save_pretrained() calls it)",
                    "Use engine.module_state_dict() on every rank, which is also what save_pretrained(state_dict=...) "
                    "takes, or engine.save_16bit_model(directory), which writes a file without holding the whole model",
                )

        def after(module: nn.Module, incompatible_keys: Any) -> None:
            tensors = (registry.find(p) for p in module._parameters.values() if p is not None)
            self.loaded |= {tensor.index for tensor in tensors if tensor is not None} & self.changed()

        for child in module.modules():
            if any(parameter is not None for parameter in child._parameters.values()):
                self._handles.append(child.register_load_state_dict_pre_hook(ModuleHook(before)))
                self._handles.append(child.register_load_state_dict_post_hook(ModuleHook(after)))
                self._handles.append(child.register_state_dict_pre_hook(ModuleHook(reading)))

    def _refuse_absent(self, module: nn.Module, what: str, instead: str) -> None:
        absent = [name for name, p in module._parameters.items() if p is not None and self._absent(p)]
        if absent:
            raise ReleasedParameterError(
                f"{what}: the values of {type(module).__name__}.{absent[0]} are sharded over the ranks. {instead}"
            )

    # -- the optimizer -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Permit the optimizer's `step()` inside the block."""
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._stepping:
            raise UsageError(
                f"{type(optimizer).__name__}.step(): this optimizer belongs to an engine, which holds the gradients; "
                "call engine.step() instead (it also clips, steps the scheduler and drops the gradients)"
            )

    def _mark_state(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        state_dict[_LAYOUT] = self._layout

    def _check_state(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        found, name = state_dict.get(_LAYOUT), type(optimizer).__name__
        if found != self._layout:
            origin = "of another rank, world size or layout" if found else "not that of an engine's optimizer"
            raise UsageError(
                f"{name}.load_state_dict(): the state is {origin}, and this optimizer has this rank's part of flat "
                "parameters, so that state would go to other elements. Use engine.save_checkpoint() and "
                "engine.load_checkpoint(); state of a plain optimizer is loaded before initialize(), which divides it"
            )

    def remove(self) -> None:
        """Remove all guards from the model and the optimizer."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._optimizer is not None:
            _owned.discard(self._optimizer)
            self._optimizer = None
        self._trained, self._frozen, self._versions, self.loaded = [], [], [], set()
        self._members, self._names, self._indices = [], [], []
        self._absent = _never


def _never(parameter: nn.Parameter) -> bool:
    return False


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
