"""Conditions on the values of a configuration, which rows of this package's TOML files state."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from .schema.root import Config

_TESTS: dict[str, Callable[[Any, Any], bool]] = {
    "is": operator.eq,
    "is_not": operator.ne,
    "above": operator.gt,
    "among": lambda value, choices: value in choices,
    "given": lambda value, wanted: (value is not None) is wanted,
}


def holds(row: Mapping[str, Any], config: Config) -> bool:
    """Return True if the value at a row's `of`, by default its `path`, passes the row's test, its switches `within` are
    on, and those `unless` are off. Without a test the value has to be on.
    """
    on = [value_at(config, name) for name in row.get("within", ())]
    if not all(on) or any(value_at(config, name) for name in row.get("unless", ())):
        return False
    value = value_at(config, row.get("of", row["path"]))
    return next((test(value, row[name]) for name, test in _TESTS.items() if name in row), bool(value))


def value_at(config: Config, path: str) -> Any:
    """Return the value at a dotted path, None if a section on the way is absent."""
    place: Any = config
    for name in path.split("."):
        place = getattr(place, name) if place is not None else None
    return place
