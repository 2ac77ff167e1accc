"""Attributes of DeepSpeed's ZeRO-3 parameters that scripts read.

A resharded parameter has them by its class (`shardwise.zero.units.released`), an unsharded one is plain. Importing
`deepspeed` adds descriptors to `nn.Parameter`, which raise AttributeError for other parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from shardwise.zero.owner import ParameterOwner
from shardwise.zero.units import released
from shardwise.zero.units.plan import TABLE
from shardwise.zero.units.status import ZeroParamStatus


class _OfStage3:
    """One attribute, without a setter, because a script may assign its own value."""

    def __init__(self, answer: Callable[[nn.Parameter, released.Owner], Any]) -> None:
        self._answer = answer

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, parameter: nn.Parameter | None, owner: type | None = None) -> Any:
        keeper = None if parameter is None else released.owner_of(parameter)
        if parameter is None or keeper is None:
            raise AttributeError(f"{owner!r} has no attribute {self.name!r}")
        if isinstance(keeper, ParameterOwner) and not TABLE[keeper.model.plan.stage].parameters:
            raise AttributeError(f"a parameter of stage {keeper.model.plan.stage} has no attribute {self.name!r}")
        return self._answer(parameter, keeper)


class ParameterAttributes:
    """The attributes; see the module."""

    ds_id = _OfStage3(lambda parameter, keeper: id(parameter))
    ds_status = _OfStage3(lambda parameter, keeper: ZeroParamStatus.AVAILABLE)
    ds_numel = _OfStage3(lambda parameter, keeper: parameter.numel())
    ds_shape = _OfStage3(lambda parameter, keeper: parameter.shape)
    partition_numel = _OfStage3(lambda parameter, keeper: lambda: keeper.kept(parameter))


_DESCRIPTORS = {name: value for name, value in vars(ParameterAttributes).items() if isinstance(value, _OfStage3)}


def attach() -> None:
    """Add the attributes to every parameter; idempotent."""
    for name, descriptor in _DESCRIPTORS.items():
        setattr(nn.Parameter, name, descriptor)


def detach() -> None:
    """Undo `attach`."""
    for name in _DESCRIPTORS:
        if name in vars(nn.Parameter):
            delattr(nn.Parameter, name)
