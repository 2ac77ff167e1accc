"""Dispatch mode in which a model draws no random numbers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

_CONSTANT = 0.4375
# Arguments that switch dropout off. The first that an operator has counts. Operators without the tag: only `dropout_p`.
_OFF = {"dropout_p": 0.0, "dropout": 0.0, "train": False, "training": False}


class Deterministic(TorchDispatchMode):
    """Switches dropout off, and replaces other random numbers by constants.

    A Bernoulli variable becomes its mean, which makes dropout computed from it the identity.

    Args:
        silent: uninitialised memory is zero, because nothing is received.

    Attributes:
        drew: random numbers other than those of dropout were replaced.
    """

    supports_higher_order_operators = True

    def __init__(self, silent: bool = False) -> None:
        super().__init__()
        self._silent = silent
        self.drew = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: torch.compile works inside the context, and its code keeps random numbers."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **named)  # a higher-order operator
        random, switch = torch.Tag.nondeterministic_seeded in func.tags, _switch(func)
        if switch is not None:
            index, name = switch
            if index < len(args):
                args = (*args[:index], _OFF[name], *args[index + 1 :])
            elif name in named:
                named[name] = _OFF[name]
        made = func(*args, **named)
        if switch is not None or not random:
            if self._silent and func._schema.name in ("aten::empty", "aten::empty_like", "aten::new_empty"):
                made.zero_()
            return made
        if func._schema.name in ("aten::bernoulli", "aten::bernoulli_"):
            return _mean(made, args, named)
        self.drew = True
        return tree_map(_constant, made)


@functools.cache
def _switch(func: torch._ops.OpOverload) -> tuple[int, str] | None:
    names = [argument.name for argument in func._schema.arguments]
    random = torch.Tag.nondeterministic_seeded in func.tags
    name = next((name for name in _OFF if name in names), None)
    return None if name is None or not (random or name == "dropout_p") else (names.index(name), name)


def _mean(made: torch.Tensor, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """Return a Bernoulli variable's mean; 1 if the variable selects elements."""
    if not made.is_floating_point():
        return made.fill_(1)
    given = args[1] if len(args) > 1 else kwargs.get("p", 0.5 if made is args[0] else args[0])
    return made.copy_(given) if isinstance(given, torch.Tensor) else made.fill_(given)


def _constant(made: Any) -> Any:
    if not isinstance(made, torch.Tensor):
        return made
    return made.fill_(_CONSTANT if made.is_floating_point() else int(made.dtype == torch.bool))
