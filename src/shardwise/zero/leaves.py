"""Modules that a script wants kept in one unit each, marked before there is an engine.

The mark is an attribute of the module, as scripts written for DeepSpeed set and read it. In the configuration
`zero_optimization.leaf_module` names such modules.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from shardwise.errors import UsageError

MARK = "_z3_leaf"


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether a module itself is marked."""
    return bool(getattr(model, MARK, False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the marked modules of a model."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark a module, or take its mark off."""
    setattr(model, MARK, flag)


def set_z3_leaf_modules(
    model: nn.Module, classes_or_names: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of some classes, and return them. Call it before `initialize`.

    Args:
        model: the model.
        classes_or_names: classes, or their names with or without the module that defines them.
        raise_if_not_found: raise if the model has none of these.

    Raises:
        UsageError: the model has none, or an entry is neither a class nor a name.
    """
    return _set(model, classes_or_names, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, classes_or_names: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take the marks off the modules of some classes, and return them; see `set_z3_leaf_modules`."""
    return _set(model, classes_or_names, False, raise_if_not_found)


def _set(
    model: nn.Module, classes_or_names: Iterable[type[nn.Module] | str], flag: bool, must_find: bool
) -> list[nn.Module]:
    wanted = list(classes_or_names)
    for entry in wanted:
        if not isinstance(entry, (type, str)):
            raise UsageError(f"leaf modules: expected classes or their names, found {entry!r}")
    found = [module for module in model.modules() if any(_matches(module, entry) for entry in wanted)]
    if not found and must_find:
        raise UsageError(
            f"leaf modules: {type(model).__name__} has no module of {', '.join(map(str, wanted)) or 'no class at all'}"
        )
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _matches(module: nn.Module, entry: type[nn.Module] | str) -> bool:
    if isinstance(entry, type):
        return isinstance(module, entry)
    kind = type(module)
    return entry in (kind.__name__, kind.__qualname__, f"{kind.__module__}.{kind.__qualname__}")
