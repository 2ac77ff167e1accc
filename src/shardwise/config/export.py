"""Showing a configuration: JSON Schema, effective values, and a table of choices."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from .conditions import value_at
from .gradient_compression import method_parameters
from .resolve import Resolution
from .schema.base import AUTO, MASK, ConfigSection
from .schema.gradients import METHODS
from .schema.root import Config
from .schema_index import Key, keys_of, raw_json_schema, walk

_PASSWORD = re.compile(r"(://)[^/@\s]*:[^/@\s]*@")


class KeyRow(NamedTuple):
    """One line of `describe`: a key, its value, the default, and the source of the value."""

    path: str
    value: Any
    default: Any
    source: str
    reason: str


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a configuration as users write it, with every other spelling of a key,
    "auto" for any single value, null for a section, and the boolean form of `zero_optimization`.

    For completion in editors, save it to a file and name the file in the configuration under `"$schema"`.

    >>> json_schema()["properties"]["train_batch_size"]["description"]
    'Samples per optimizer step over all ranks.'
    """
    schema = raw_json_schema(Config)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "shardwise configuration"
    definitions = schema.get("$defs", {})
    for model in _sections(Config):
        target = schema if model is Config else definitions[model.__name__]
        _open_up(target, model)
    definitions["Compression"]["allOf"] = [_parameters(name, method) for name, method in METHODS.items()]
    schema["properties"]["$schema"] = {"type": "string", "description": "Address of this JSON Schema."}
    zero = schema["properties"]["zero_optimization"]
    zero["anyOf"].append({"type": "boolean", "deprecated": True})
    return schema


def _parameters(name: str, method: type[ConfigSection]) -> dict[str, Any]:
    params = raw_json_schema(method)
    _open_up(params, method)
    spelled = "".join(f"[{letter.lower()}{letter.upper()}]" if letter.isalpha() else letter for letter in name)
    chosen = {"properties": {"type": {"type": "string", "pattern": f"^{spelled}$"}}, "required": ["type"]}
    return {"if": chosen, "then": {"properties": {"params": params}}}


def _sections(model: type[ConfigSection]) -> list[type[ConfigSection]]:
    children = [key.child for _, key in walk(model) if key.child is not None]
    return list(dict.fromkeys([model, *children]))


def _open_up(target: dict[str, Any], model: type[ConfigSection]) -> None:
    properties = target.get("properties", {})
    for spelling, key in keys_of(model).items():
        if spelling == key.name:
            properties[key.name] = _property(properties[key.name], key)
    for spelling, key in keys_of(model).items():
        if spelling != key.name:
            properties[spelling] = {**properties[key.name], "description": f"Another name of {key.name}."}


def _property(schema: dict[str, Any], key: Key) -> dict[str, Any]:
    schema.pop("title", None)
    if key.replacement:
        schema["deprecated"] = True
    extra: dict[str, Any] | None = None
    if key.kind == "section" and key.default is not None:
        extra = {"type": "null"}
    elif key.kind == "value" and not key.takes_auto:
        extra = {"const": AUTO}
    if extra is None:
        return schema
    about = {name: schema.pop(name) for name in list(schema) if name in _ABOUT or name.startswith("x-")}
    options = schema.pop("anyOf", None)
    if options is None:
        options = [schema]
    elif schema:
        # Next to a union, bounds apply to its numbers; inside an option they would also apply to "auto".
        options = [{**option, **schema} if option.get("type") != "null" else option for option in options]
    return {**about, "anyOf": [*options, extra]}


_ABOUT = ("description", "default", "deprecated", "title")


def effective(resolution: Resolution) -> dict[str, Any]:
    """Return every value that the run uses, as a dictionary that is itself a valid configuration, with masked secrets.

    It is saved with checkpoints: resolved again it gives the same values, also in a version with other defaults. An
    infinity, which JSON lacks, becomes null where null means "never".
    """
    values = without_secrets(resolution.config.model_dump())
    steps = values.get("steps_per_print")
    if isinstance(steps, float) and math.isinf(steps):
        values["steps_per_print"] = None
    parameters = method_parameters(resolution.config)
    if parameters is not None:
        values["compression"]["params"] = parameters.model_dump()
    return values


def without_secrets(values: Mapping[str, Any], model: type[ConfigSection] = Config) -> dict[str, Any]:
    """Return values of a section with `***` for secrets and for passwords in addresses.

    >>> without_secrets({"train_batch_size": 8, "comet": {"enabled": True, "api_key": "k3y"}})
    {'train_batch_size': 8, 'comet': {'enabled': True, 'api_key': '***'}}
    """
    result: dict[str, Any] = {}
    keys = keys_of(model)
    for name, value in values.items():
        key = keys.get(name)
        if key is not None and key.kind == "section" and key.child is not None and isinstance(value, Mapping):
            value = without_secrets(value, key.child)
        result[name] = value if key is None else _shown(key, value)
    return result


def _shown(key: Key, value: Any) -> Any:
    if key.secret:
        return value and MASK
    return _PASSWORD.sub(rf"\1{MASK}@", value) if isinstance(value, str) else value


def describe(resolution: Resolution) -> list[KeyRow]:
    """Return one row for every value that the user wrote or the library chose, in the order of the schema. `source` is
    `given`, `auto` (the user wrote "auto"), `derived` (from other keys) or `forwarded` (from a deprecated key).
    """
    reasons = {note.path: note.reason for note in resolution.notes}
    rows: list[KeyRow] = []
    for path, key in walk():
        dots = ".".join(path)
        if key.kind in ("section", "list") or {"[]", "*"} & {*path} or key.replacement:
            continue
        value = _shown(key, value_at(resolution.config, dots))
        if key.kind == "free":
            for name, item in (value or {}).items():
                inner = f"{dots}.{name}"
                rows.append(KeyRow(inner, item, None, _source(inner, resolution), reasons.get(inner, "")))
        elif dots in resolution.given or dots in reasons:
            if key.kind == "named":
                value = {name: item.model_dump(exclude_unset=True) for name, item in value.items()}
            rows.append(KeyRow(dots, value, key.default, _source(dots, resolution), reasons.get(dots, "")))
    return rows


def _source(path: str, resolution: Resolution) -> str:
    reason = next((note.reason for note in resolution.notes if note.path == path), None)
    if reason is None:
        return "given"
    if reason.startswith("forwarded"):
        return "forwarded"
    if reason.startswith(("read from", "null:")):
        return "given"
    return "auto" if path in resolution.given else "derived"
