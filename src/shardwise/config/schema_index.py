"""Index of the schema: spellings, children, accepted values, and nearest known names."""

from __future__ import annotations

import difflib
import json
import re
import types
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from .problems import Path, dotted
from .schema.base import AUTO, DEPRECATED_FOR, FREE_FORM, IN_WORDS, NO_EFFECT, OTHER_NAMES, SECRET, ConfigSection
from .schema.optimizers import NATIVE_OPTIMIZERS
from .schema.precision import FP16
from .schema.root import Config
from .schema.schedules import NATIVE_SCHEDULES
from .schema.tables import NotBuilt, table

_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
_NUMERIC = ("integer", "number")
_BELOW = {"list": ("[]",), "named": ("*",)}


@dataclass(frozen=True)
class Key:
    """One key of the schema: pydantic's record (`field`), its section (`owner`), and the section class below it, if
    any. `kind` is `value` (a leaf), `section`, `list` (list of sections), `named` (sections by any name) or `free` (any
    dict).
    """

    name: str
    field: FieldInfo
    owner: type[ConfigSection]
    kind: Literal["value", "section", "list", "named", "free"]
    child: type[ConfigSection] | None

    @cached_property
    def extra(self) -> dict[str, Any]:
        """Extra data of the schema (other names, replacement, no effect, note on the default)."""
        return self.field.json_schema_extra if isinstance(self.field.json_schema_extra, dict) else {}

    @cached_property
    def spellings(self) -> tuple[str, ...]:
        """The canonical name and every other accepted one."""
        return (self.name, *self.extra.get(OTHER_NAMES, ()))

    @cached_property
    def replacement(self) -> str:
        """Dotted path of the key that replaced this one, or an empty string."""
        return str(self.extra.get(DEPRECATED_FOR, ""))

    @cached_property
    def no_effect(self) -> str:
        """Reason why the key changes nothing here, or an empty string."""
        return str(self.extra.get(NO_EFFECT, ""))

    @cached_property
    def secret(self) -> bool:
        """Whether the value is masked in output."""
        return bool(self.extra.get(SECRET))

    @property
    def default(self) -> Any:
        """The value when the key is absent."""
        return self.field.get_default(call_default_factory=True)

    @property
    def takes_auto(self) -> bool:
        """Whether "auto" is a value of the key itself rather than a request to choose one."""
        return _has_auto(self.field.annotation) or any(_has_auto(item) for item in self.field.metadata)


def _has_auto(annotation: Any) -> bool:
    if get_origin(annotation) is Literal:
        return AUTO in get_args(annotation)
    return any(_has_auto(argument) for argument in get_args(annotation))


def _shape(annotation: Any) -> tuple[str, type[ConfigSection] | None]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    # In Python 3.10 list[int] counts as a class, so the origin is looked at first.
    if origin is None and isinstance(annotation, type) and issubclass(annotation, ConfigSection):
        return "section", annotation
    if origin is Annotated:
        return _shape(arguments[0])
    if origin in (Union, types.UnionType):
        for argument in arguments:
            kind, child = _shape(argument)
            if child is not None:
                return kind, child
    if origin is list:
        _, child = _shape(arguments[0])
        if child is not None:
            return "list", child
    if origin is dict:
        _, child = _shape(arguments[1])
        if child is not None:
            return "named", child
    return "value", None


@cache
def keys_of(section: type[ConfigSection]) -> dict[str, Key]:
    """Return the keys of a section by every accepted spelling."""
    table: dict[str, Key] = {}
    for name, info in section.model_fields.items():
        kind, child = _shape(info.annotation)
        for not_built in (item for item in info.metadata if isinstance(item, NotBuilt)):
            kind, child = "section", not_built.model
        extra = info.json_schema_extra
        if isinstance(extra, dict) and extra.get(FREE_FORM):
            kind = "free"
        key = Key(name, info, section, kind, child)  # type: ignore[arg-type]
        for spelling in key.spellings:
            table[spelling] = key
    return table


def takes_any_key(section: type[ConfigSection]) -> bool:
    """Return True if a section passes unknown keys on to another library."""
    return section.model_config.get("extra") == "allow"


@cache
def walk(section: type[ConfigSection] = Config, path: tuple[str, ...] = ()) -> tuple[tuple[tuple[str, ...], Key], ...]:
    """Return every key of the schema with its path; `[]` stands for a list index, `*` for any name."""
    found: list[tuple[tuple[str, ...], Key]] = []
    for spelling, key in keys_of(section).items():
        if spelling != key.name:
            continue
        here = (*path, key.name)
        found.append((here, key))
        if key.child is not None:
            found += walk(key.child, (*here, *_BELOW.get(key.kind, ())))
    return tuple(found)


def lookup(path: str) -> Key:
    """Return the key at a dotted path of canonical names. Raises `KeyError` if the schema has none."""
    section: type[ConfigSection] | None = Config
    key: Key | None = None
    for name in path.split("."):
        if key is not None and key.kind == "named" and name == "*":
            continue
        if section is None:
            raise KeyError(path)
        key = keys_of(section)[name]
        section = key.child
    assert key is not None
    return key


@cache
def _places() -> dict[str, tuple[str, ...]]:
    table: dict[str, list[str]] = {}
    for path, key in walk():
        for spelling in key.spellings:
            place = ".".join((*path[:-1], spelling)).replace(".[]", "[]").replace("*", "<name>")
            table.setdefault(_comparable(spelling), []).append(place)
    return {spelling: tuple(paths) for spelling, paths in table.items()}


def _comparable(name: str) -> str:
    return name.lower().replace("-", "_")


_LONGEST_NAME = 100
"""A longer name resembles no key, and comparing it would be slow."""


def nearest(name: str, candidates: list[str], cutoff: float = 0.6) -> str | None:
    """Return the candidate most like a name, compared without regard to case and hyphens, or None."""
    if len(name) > _LONGEST_NAME:
        return None
    table = {_comparable(candidate): candidate for candidate in reversed(candidates)}
    found = difflib.get_close_matches(_comparable(name), list(table), n=1, cutoff=cutoff)
    return table[found[0]] if found else None


def advise(section: type[ConfigSection], path: Path, name: str) -> str:
    """Return advice on an unknown key: the keys that may be meant."""
    known = known_reason(path, name)
    if known is not None:
        return known
    local = list(keys_of(section))
    elsewhere = _elsewhere(name)
    close = nearest(name, local, 0.9 if elsewhere else 0.8)
    if close is not None:
        return f"did you mean `{dotted((*path, close))}`?"
    if elsewhere:
        return _belongs(elsewhere)
    longer = [spelling for spelling in local if len(name) >= _LONG_NAME and _comparable(name) in spelling]
    close = longer[0] if longer else nearest(name, local, 0.7)
    if close is not None:
        return f"did you mean `{dotted((*path, close))}`?"
    far = nearest(name, list(_places()), 0.8)
    if far is not None and _comparable(name) not in table()["hints"]["general"]:
        return f"did you mean `{_places()[far][0]}`?"
    where = f"`{dotted(path)}`" if path else "the top level"
    return f"no key of {where} or of another section has a similar name; remove it"


_LONG_NAME = 5
"""Minimum length at which a component of a name identifies a key."""


def _belongs(paths: tuple[str, ...]) -> str:
    shown = _shown(paths)
    names = " or ".join(f"`{path}`" for path in shown)
    if len(shown) == 1:
        parent, _, _ = shown[0].rpartition(".")
        return f"this key belongs to {f'section `{parent}`' if parent else 'the top level'}: write {names}"
    return f"this key belongs to other sections, such as {names}"


def _shown(paths: tuple[str, ...]) -> list[str]:
    return list(paths[:3])


def place_of(name: str) -> str:
    """Return the paths of the keys of a name as text; empty if the name is unknown."""
    return " or ".join(f"`{path}`" for path in _shown(_elsewhere(name)))


def _elsewhere(name: str) -> tuple[str, ...]:
    comparable = _comparable(name)
    return () if comparable in table()["hints"]["general"] else _places().get(comparable, ())


def known_reason(path: Path, name: str) -> str | None:
    """Return why a key that is often written at a path is not read there, and the fix; None if unknown."""
    hints, parent = table()["hints"], path[0] if len(path) == 1 else None
    if name.startswith(("_", "//", "#", "--", ";")):
        name = "comment"
    if parent in ("optimizer", "scheduler") and name in _arguments(str(parent)):
        return f"only `{parent}.params.{name}` is read: move it there"
    if parent == "bf16" and name in FP16.model_fields:
        return "it is for fp16: bf16 needs no loss scale and no casts, so remove it"
    found: str | None = hints["paths"].get(dotted((*path, name))) or hints["names"].get(name.lower())
    return found


@cache
def _arguments(section: str) -> frozenset[str]:
    models = NATIVE_OPTIMIZERS if section == "optimizer" else NATIVE_SCHEDULES
    return frozenset(name for model in models.values() for name in model.model_fields)


@cache
def _properties(section: type[ConfigSection]) -> tuple[dict[str, Any], dict[str, Any]]:
    schema = raw_json_schema(section)
    return schema.get("properties", {}), schema.get("$defs", {})


def raw_json_schema(section: type[ConfigSection]) -> dict[str, Any]:
    """Return the JSON Schema of a section in canonical form."""
    schema: dict[str, Any] = _standard(section.model_json_schema())
    return schema


def _standard(schema: Any) -> Any:
    """Give bounds their standard names, because pydantic writes its own next to types with a converter."""
    if isinstance(schema, list):
        return [_standard(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    names = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
    return {names.get(name, name): _standard(item) for name, item in schema.items()}


def expected(key: Key) -> str:
    """Describe in words the values that a key accepts, such as `an integer > 0 or null`."""
    if key.kind in ("section", "named", "free"):
        return "an object {...}" + (" or null" if key.default is None else "")
    properties, definitions = _properties(key.owner)
    return _in_words(properties[key.name], definitions)


def _plural(words: str) -> str:
    return re.sub(r"\ban? (\w+)", r"\1s", words).removesuffix(" {...}")


def _in_words(schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    if IN_WORDS in schema:
        return str(schema[IN_WORDS])
    if "$ref" in schema:
        return _in_words(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in schema:
        limits = {bound: schema[bound] for bound in _BOUNDS if bound in schema}
        options = [{**option, **limits} if option.get("type") in _NUMERIC else option for option in schema["anyOf"]]
        return " or ".join(dict.fromkeys(_in_words(option, definitions) for option in options))
    if "enum" in schema:
        return "one of " + ", ".join(json.dumps(value) for value in schema["enum"])
    if "const" in schema:
        return json.dumps(schema["const"])
    kind = schema.get("type")
    if kind == "array":
        items = schema.get("items", {})
        item = _in_words(items, definitions) if items else ""
        return f"a list of {_plural(item)}" if item else "a list"
    words = {
        "integer": "an integer",
        "number": "a number",
        "boolean": "true or false",
        "string": "a string",
        "null": "null",
        "object": "an object {...}",
    }.get(str(kind), "a value")
    bounds = [f"{sign} {schema[bound]:g}" for bound, sign in _BOUNDS.items() if bound in schema]
    if bounds == [">= 1e+308"]:
        return "infinity"
    if "multipleOf" in schema:
        bounds.append(f"a multiple of {schema['multipleOf']:g}")
    if schema.get("minLength"):
        bounds.append("that is not empty")
    return " ".join([words, " and ".join(bounds)]).strip()
