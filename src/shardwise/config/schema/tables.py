"""Sections and keys that are rows of TOML files: documented keys of features that this version lacks
(`unsupported.toml`), and keys that change nothing, with the reason, by the class of their section (`no_effect.toml`).
"""

from __future__ import annotations

import json
import sys
from functools import cache
from importlib import resources
from typing import Any, Literal, TypeVar

from pydantic import ConfigDict, GetCoreSchemaHandler, create_model
from pydantic_core import CoreSchema

from .base import ConfigSection, DType, Int, key, section

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_NO_EFFECT = "this version has no feature that reads the key"


@cache
def table(name: str = "unsupported.toml") -> dict[str, Any]:
    """Return the tables of a file of this package."""
    return tomllib.loads(resources.files("shardwise.config").joinpath(name).read_text("utf-8"))


def documented(path: str) -> list[str]:
    """Return the rows of a section's keys, such as "fast: bool = true"."""
    return [row for row in table()["keys"][path].splitlines() if row and row != "*"]


@cache
def model(path: str) -> type[ConfigSection]:
    """Return the model of a section. Values other than switches are not checked, because nothing reads them."""
    fields: dict[str, Any] = {}
    subsections: dict[str, dict[str, Any]] = {"": fields}
    for row in documented(path):
        names, about = row.split(": ", 1)
        name, *others = names.split("|")
        words, default = about.rsplit(" = ", 1)
        if "<name>" in name:
            continue  # documents the keys of a dictionary
        parent, _, leaf = name.rpartition(".")
        above = ""
        for part in parent.split(".") if parent else ():
            above = f"{above}.{part}".strip(".")
            subsections.setdefault(above, {})
        value = key(
            json.loads(default),
            f"Not built: {words}, {default}.",
            names=tuple(others),
            free_form=words.startswith("object"),
            no_effect="" if words == "bool" else _NO_EFFECT,
            words="" if words == "bool" else words,
        )
        subsections[parent][leaf] = (bool if words == "bool" else Any, value)
    free = "*" in table()["keys"][path].split()
    for inner in sorted(filter(None, subsections), key=lambda name: -name.count(".")):
        parent, _, leaf = inner.rpartition(".")
        child = _create(f"{path}.{inner}", subsections[inner], free)
        subsections[parent][leaf] = (child, section(child, f"Not built: `{path}.{inner}`."))
    return _create(path, fields, free)


def _create(path: str, fields: dict[str, Any], free: bool) -> type[ConfigSection]:
    name = "".join(part.title() for part in path.replace(".", "_").split("_"))
    made: type[ConfigSection] = create_model(name, __base__=ConfigSection, __doc__=f"`{path}`: not built.", **fields)
    if free:
        made.model_config = ConfigDict(**{**made.model_config, "extra": "allow"})
    return made


class NotBuilt:
    """Type metadata of a section that this version lacks; `optional` sections may be null."""

    def __init__(self, path: str, optional: bool = False) -> None:
        self.path = path
        self.optional = optional

    @property
    def model(self) -> type[ConfigSection]:
        """The section."""
        return model(self.path)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Check values with the section's model."""
        return handler.generate_schema(self.model | None if self.optional else self.model)


def not_built(path: str) -> Any:
    """Declare a section with type metadata `NotBuilt(path)`, which has its defaults when absent."""
    return section(lambda: model(path)(), "Not built.")


# -- keys that change nothing ------------------------------------------------------------------------------------------

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
