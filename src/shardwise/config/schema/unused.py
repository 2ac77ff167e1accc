"""Keys that are accepted and change nothing, with the reason: `no_effect.toml`, by the class of the section."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from pydantic import create_model

from .base import ConfigSection, DType, Int, key
from .not_built import table

Section = TypeVar("Section", bound=ConfigSection)
_TYPES: dict[str, Any] = {"bool": bool, "int": Int, "number": float, "string": str, "dtype": DType}


def with_unused_keys(section: type[Section]) -> type[Section]:
    """Return a section with its keys of `no_effect.toml` behind its own. No code reads their values."""
    fields: dict[str, Any] = {}
    for name, row in table("no_effect.toml")[section.__name__].items():
        about = {"default": None, **row}
        kind = _TYPES[about.pop("type")] if "type" in about else Literal[tuple(about.pop("choices"))]
        fields[name] = (kind if "default" in row else kind | None, key(**about))
    about_class: dict[str, Any] = {"__doc__": section.__doc__, "__module__": section.__module__}
    return create_model(section.__name__, __base__=section, **about_class, **fields)
