"""First pass over a configuration as written: names.

Every key is looked up in the schema; unknown keys are reported with the nearest known name. Other spellings become
canonical, deprecated keys move to their replacement. Every "auto" is recorded and removed before the check of types.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

from .problems import LISTED, Note, Path, Problem, another_name, dotted
from .schema.base import AUTO, ConfigSection
from .schema.root import Config
from .schema_index import Key, advise, expected, keys_of, lookup, takes_any_key, walk

SCHEMA = "$schema"
"""Key of the top level by which editors find the JSON Schema."""
_OFFLOAD_FLAGS = ("zero_optimization.cpu_offload", "zero_optimization.cpu_offload_param")


@dataclass
class Scan:
    """A configuration with canonical names.

    Attributes:
        data: the configuration, ready for type checks.
        given: canonical path -> path as the user spelled it, for every key in the source.
        autos: canonical path -> key (None inside free-form dictionaries) of every value that is "auto".
        forwarded: (old path, new path, value) of every deprecated key.
        unfolded: notes on keys that were written as dotted paths.
        problems: unknown and duplicate keys.
    """

    data: dict[str, Any] = field(default_factory=dict)
    given: dict[Path, Path] = field(default_factory=dict)
    autos: dict[Path, Key | None] = field(default_factory=dict)
    forwarded: list[tuple[str, str, Any]] = field(default_factory=list)
    unfolded: list[Note] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def scan(raw: dict[str, Any]) -> Scan:
    """Return the scan of a configuration, which is not changed."""
    result = Scan()
    source = dict(raw)
    pointer = source.pop(SCHEMA, None)
    if pointer is not None and not isinstance(pointer, str):
        result.problems.append(Problem(SCHEMA, f"expected the address of a JSON Schema, found {pointer!r}"))
    zero = source.get("zero_optimization")
    if isinstance(zero, bool):
        # The oldest form: true means stage 1, with the gather size at top level.
        source["zero_optimization"] = {"stage": int(zero)}
        result.forwarded.append(("zero_optimization", "zero_optimization.stage", int(zero)))
    result.unfolded = unfold(source)
    result.data = _scan_section(source, Config, (), (), result)
    _forward_deprecated(result)
    return result


def unfold(source: dict[str, Any]) -> list[Note]:
    """Move top-level keys that are paths (`zero_optimization.reduce_bucket_size`), which TRL writes for models that are
    only evaluated, into their sections. A value in the section itself has precedence.
    """
    notes: list[Note] = []
    for name in [name for name in source if isinstance(name, str) and "." in name]:
        try:
            key = lookup(name)
        except KeyError:
            continue
        *above, last = name.split(".")
        place = source
        for part in above:
            below = place.get(part)
            if below is not None and not isinstance(below, dict):
                break  # the oldest form of a section, or a mistake: the key is reported as unknown
            place[part] = dict(below or {})
            place = place[part]
        else:
            value = source.pop(name)
            if isinstance(value, float) and math.isfinite(value) and expected(key).startswith("an integer"):
                value = math.floor(value)
            reason = "written at the top level as one key with dots"
            spellings = [spelling for spelling in key.spellings if place.get(spelling) not in (None, AUTO)]
            if spellings:
                reason += f", and not used: section `{dotted(tuple(above))}` says {place[spellings[0]]!r}"
            else:
                for spelling in key.spellings:
                    place.pop(spelling, None)
                place[last] = value
                reason += f"; taken as `{last}` of section `{dotted(tuple(above))}`, where it should be written"
            notes.append(Note(name, value, reason))
    return notes


def _scan_section(
    raw: dict[str, Any], section: type[ConfigSection], path: Path, spelled: Path, result: Scan
) -> dict[str, Any]:
    keys = keys_of(section)
    clean: dict[str, Any] = {}
    for name, value in raw.items():
        here: Path = (*path, name)
        as_written: Path = (*spelled, name)
        key = keys.get(name) if isinstance(name, str) else None
        if key is None:
            if takes_any_key(section) and isinstance(name, str):
                clean[name] = value
                result.given[here] = as_written
            else:
                # Nearest names are slow to find, and the message lists no more.
                few = len(result.problems) < LISTED
                message = f"unknown key; {advise(section, spelled, str(name))}" if few else "unknown key"
                result.problems.append(Problem(dotted((*spelled, str(name))), message))
            continue
        if isinstance(value, str) and "\0" in value:
            message = f"{value!r:.200} has the character NUL, which no name, path or number has; remove it"
            result.problems.append(Problem(dotted(as_written), message))
            continue
        here = (*path, key.name)
        if here in result.given:
            result.problems.append(Problem(dotted(as_written), another_name(dotted(result.given[here]))))
            continue
        result.given[here] = as_written
        if isinstance(value, str) and value == AUTO and key.kind == "value" and not key.takes_auto:
            result.autos[here] = key
            continue
        if value is None and key.kind == "section":
            continue
        clean[key.name] = _scan_value(value, key, here, as_written, result)
    return clean


def _scan_value(value: Any, key: Key, path: Path, spelled: Path, result: Scan) -> Any:
    if key.kind == "section" and key.child is not None and isinstance(value, dict):
        return _scan_section(value, key.child, path, spelled, result)
    if key.kind == "list" and isinstance(value, list | tuple):
        return [_scan_item(item, key, (*path, at), (*spelled, at), result) for at, item in enumerate(value)]
    if key.kind == "named" and isinstance(value, dict):
        result.given |= {(*path, name): (*spelled, name) for name in value}
        return {name: _scan_item(item, key, (*path, name), (*spelled, name), result) for name, item in value.items()}
    if key.kind == "free" and isinstance(value, dict):
        return _scan_free(value, path, spelled, result)
    return value


def _scan_item(item: Any, key: Key, path: Path, spelled: Path, result: Scan) -> Any:
    assert key.child is not None
    return _scan_section(item, key.child, path, spelled, result) if isinstance(item, dict) else item


def _scan_free(value: dict[Any, Any], path: Path, spelled: Path, result: Scan) -> dict[Any, Any]:
    clean: dict[Any, Any] = {}
    for name, item in value.items():
        here = (*path, name)
        result.given[here] = (*spelled, name)
        if isinstance(item, str) and item == AUTO:
            result.autos[here] = None
        else:
            clean[name] = list(item) if isinstance(item, list) else item
    return clean


def _forward_deprecated(result: Scan) -> None:
    for old, key in walk():
        if not key.replacement or old not in result.given:
            continue
        parent = _parent(result.data, old)
        if parent is None or parent.get(key.name) is None:
            continue
        value = parent.pop(key.name)
        new = tuple(key.replacement.split("."))
        if new in result.given:
            newer = dotted(result.given[new])
            message = f"this is the old form of `{newer}`, which is given too; keep the new one"
            result.problems.append(Problem(dotted(result.given[old]), message))
            continue
        if dotted(old) in _OFFLOAD_FLAGS and isinstance(value, bool):
            value = "cpu" if value else "none"
        put(result.data, new, value)
        result.given[new] = result.given[old]
        result.forwarded.append((dotted(result.given[old]), key.replacement, value))


def _parent(data: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any] | None:
    place: Any = data
    for part in path[:-1]:
        place = place.get(part) if isinstance(place, dict) else None
    return place if isinstance(place, dict) else None


def put(data: dict[str, Any], path: Path, value: Any) -> None:
    """Set a value at a path, making the sections above it; the check of types reports a section of another type."""
    place: Any = data
    for part, below in itertools.pairwise(path):
        if isinstance(place, dict) and place.get(part) is None:
            place[part] = {}
        place = place[part]
        if not isinstance(place, list if isinstance(below, int) else dict):
            return
    place[path[-1]] = value
