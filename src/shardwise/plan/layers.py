"""Plans of deep models from those of shallow ones: of equal layers each adds the same memory, time and bytes."""

from __future__ import annotations

import copy
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import nn

from shardwise.engine.dryrun import MemoryPlan
from shardwise.engine.plans import Planner, PlanningTarget, Setting

FEW, MORE = 3, 4
"""Layers of the shallow models: the first, the last and one between differ from all others by what is around them."""


def equal_layers(model: nn.Module) -> tuple[str, int] | None:
    """Return name and length of the list of equal layers with the most parameters; None without one that is longer than
    a shallow model's.
    """
    found: tuple[int, str, int] | None = None
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) <= MORE:
            continue
        kinds = {_form(layer) for layer in module}
        size = sum(parameter.numel() for parameter in module.parameters())
        if len(kinds) == 1 and size and (found is None or size > found[0]):
            found = size, name, len(module)
    return None if found is None else found[1:]


def shallow(model: nn.Module, name: str, layers: int) -> nn.Module:
    """Return a module with the first `layers` of the list `name`, and all other parts of a model, which it shares."""
    if not name:
        kept: Any = model
        return kept[:layers]
    child, _, rest = name.partition(".")
    made = copy.copy(model)
    made._modules = {**model._modules, child: shallow(model.get_submodule(child), rest, layers)}
    return made


def deep_planner(target: PlanningTarget, batch: Any = None, *, deep: bool = True) -> Planner:
    """Return a planner that runs shallow models, if `deep` and there are many equal layers; else one of the model."""
    layers = equal_layers(target.module) if deep else None
    if layers is None:
        return Planner(target, batch)
    name, count = layers
    few, more = (Planner(_with_layers(target, name, number), batch) for number in (FEW, MORE))
    return DeepPlanner(few, more, count)


class DeepPlanner(Planner):
    """Planner of a model with `layers` equal layers, from planners of `FEW` and of `MORE` of them.

    Its plans are exact where a further layer adds the same at all depths; the planner of the whole model tells.
    """

    def __init__(self, few: Planner, more: Planner, layers: int) -> None:
        self.target = few.target
        self.few, self.more, self._layers = few, more, layers
        self._batch = few._batch

    def window(self, setting: Setting) -> tuple[MemoryPlan | None, str]:
        """Return the plan of a window, and the reason why the plan or its activations are missing."""
        (few, note), (more, _) = self.few.window(setting), self.more.window(setting)
        if few is None or more is None:
            return None, note
        return self.deep(few, more), note

    def deep(self, few: Any, more: Any) -> Any:
        """Return a value of the whole model from those of the shallow ones: a number, or numbers in a container."""
        if isinstance(few, (int, float)) and not isinstance(few, bool):
            value = few + (more - few) * (self._layers - FEW) / (MORE - FEW)
            return round(value) if isinstance(few, int) else value
        if isinstance(few, dict):
            made = copy.copy(few)
            made.update({key: self.deep(value, more.get(key, value)) for key, value in few.items()})
            return made
        if is_dataclass(few) and not isinstance(few, type):
            return replace(
                few, **{one.name: self.deep(getattr(few, one.name), getattr(more, one.name)) for one in fields(few)}
            )
        return few


def _with_layers(target: PlanningTarget, name: str, layers: int) -> PlanningTarget:
    model = shallow(target.module, name, layers)
    kept = {id(parameter) for parameter in model.parameters()}
    groups = [[parameter for parameter in group if id(parameter) in kept] for group in target.groups]
    return replace(target, module=model, groups=groups)


def _form(layer: nn.Module) -> tuple[Any, ...]:
    parameters = ((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in layer.named_parameters())
    return type(layer), *parameters
