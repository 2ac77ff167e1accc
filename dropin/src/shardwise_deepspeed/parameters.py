"""Attributes of DeepSpeed's ZeRO-3 parameters that scripts read.

A resharded parameter has them by its class (`shardwise.zero.units.released`), an unsharded one is plain. Importing
`deepspeed` adds descriptors to `nn.Parameter`, which raise AttributeError for other parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from shardwise.zero.owner import ParameterOwner
from shardwise.zero.units import released
from shardwise.zero.units.plan import TABLE
from shardwise.zero.units.status import ZeroParamStatus

Answers = Mapping[str, Callable[[Any, Any], Any]]
"""Name of an attribute -> function of the instance and of what `find` returns for it."""


class Attribute:
    """One attribute, for the instances for which `find` does not return None; without a setter, because a script may
    assign its own value.
    """

    def __init__(self, name: str, find: Callable[[Any], Any], answer: Callable[[Any, Any], Any]) -> None:
        self._name, self._find, self._answer = name, find, answer

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        found = None if instance is None else self._find(instance)
        if found is None:
            raise AttributeError(f"{owner!r} has no attribute {self._name!r}, except where an engine keeps it")
        return self._answer(instance, found)


def add(owner: type, find: Callable[[Any], Any], answers: Answers) -> None:
    """Add attributes to a class; idempotent."""
    for name, answer in answers.items():
        setattr(owner, name, Attribute(name, find, answer))


def _keeper(parameter: nn.Parameter) -> released.Owner | None:
    keeper = released.owner_of(parameter)
    unsharded = isinstance(keeper, ParameterOwner) and not TABLE[keeper.model.plan.stage].parameters
    return None if unsharded else keeper


ANSWERS: Answers = {
    "ds_id": lambda parameter, keeper: id(parameter),
    "ds_status": lambda parameter, keeper: ZeroParamStatus.AVAILABLE,
    "ds_numel": lambda parameter, keeper: parameter.numel(),
    "ds_shape": lambda parameter, keeper: parameter.shape,
    "partition_numel": lambda parameter, keeper: lambda: keeper.kept(parameter),
}


def attach() -> None:
    """Add the attributes to every parameter; idempotent."""
    add(nn.Parameter, _keeper, ANSWERS)
