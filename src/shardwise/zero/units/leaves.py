"""Leaf modules: modules that a script marks, before the engine is built, to be kept in one unit each.

The mark is an attribute of the module, as in scripts written for DeepSpeed. `initialize` marks the modules of
`zero_optimization.leaf_module`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from shardwise.errors import NoSuchModuleError, UsageError

MARK = "_z3_leaf"


def z3_leaf_module(model: nn.Module) -> bool:
    """Return True if the module itself is marked."""
    return bool(getattr(model, MARK, False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the marked modules of a model."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark a module, or remove its mark."""
    setattr(model, MARK, flag)


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of some classes (or their names, maybe with the module), and return them; before `initialize`.

    Raises NoSuchModuleError if there is none and `raise_if_not_found`, UsageError for another kind of entry.
    """
    return _set(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Remove the marks of the modules of some classes, and return them (arguments of `set_z3_leaf_modules`)."""
    return _set(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark (or, with `flag` False, unmark) modules by their names in `model.named_modules()`, before `initialize`.

    Returns (matched modules, names that match no module). Raises NoSuchModuleError if `raise_if_not_found` for these.
    """
    return _set_named(model, module_names, flag, raise_if_not_found, str.__eq__)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by the ends of their names. Other arguments are those of `set_z3_leaf_modules_by_name`."""
    return _set_named(model, module_name_suffixes, flag, raise_if_not_found, str.endswith)


def _set_named(
    model: nn.Module, wanted: Iterable[str], flag: bool, must_find: bool, fits: Callable[[str, str], bool]
) -> tuple[list[nn.Module], list[str]]:
    entries = list(wanted)
    found: dict[nn.Module, None] = {}
    missing = []
    for entry in entries:
        matches = [module for name, module in model.named_modules() if name and fits(name, entry)]
        found.update(dict.fromkeys(matches))
        if not matches:
            missing.append(entry)
    if must_find and (missing or not entries):
        raise NoSuchModuleError(
            f"leaf modules: {type(model).__name__} has no module named {', '.join(missing) or 'by no name at all'}; "
            "names are those of model.named_modules()"
        )
    for module in found:
        set_z3_leaf_module(module, flag)
    return list(found), missing


def _set(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], flag: bool, must_find: bool
) -> list[nn.Module]:
    wanted = list(leaf_module_classes)
    for entry in wanted:
        if not isinstance(entry, (type, str)):
            raise UsageError(f"leaf modules: expected classes or their names, found {entry!r}")
    found = [module for module in model.modules() if any(_matches(module, entry) for entry in wanted)]
    if not found and must_find:
        raise NoSuchModuleError(
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
