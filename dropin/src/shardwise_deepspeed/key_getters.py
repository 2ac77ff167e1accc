"""The methods of getters.toml. Type checkers read key_getters.pyi, which `python dropin/stubs.py` makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwise_deepspeed.entries import read


class KeyGetters:
    """One method for each name of getters.toml; subclasses have a `Resolution` as `_resolution`."""


def _getter(key: str, default: Any = None, values: list[Any] | None = None) -> Callable[[Any], Any]:
    def method(engine: Any) -> Any:
        found = engine._resolution.config
        for name in key.split("."):
            found = None if found is None else getattr(found, name)
        found = default if found is None else found
        return found if values is None else found in values

    method.__doc__ = f"Return `{key}` of the configuration{'' if values is None else f' as one of {values}'}."
    return method


for _name, _row in read("getters.toml").items():
    _row = {"key": _row} if isinstance(_row, str) else _row
    _method = _getter(_row["key"], _row.get("default"), _row.get("is"))
    _method.__name__, _method.__qualname__ = _name, f"KeyGetters.{_name}"
    setattr(KeyGetters, _name, _method)
