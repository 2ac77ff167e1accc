"""Reading configurations that were written for DeepSpeed.

DeepSpeed ignores unknown keys at the top level and, by version, in other sections, and keys of another stage or of a
section that is switched off. `accept` removes such keys, and requests of missing features that change only the speed,
with the reason for each; the strict checks see the rest. A key one edit away from a known key of its section stays, and
is refused as a misspelling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from .conditions import holds
from .normalize import SCHEMA, scan, unfold
from .problems import Note, Path, dotted
from .read import Document, read
from .schema.base import AUTO, STAGES, ConfigSection
from .schema.root import Config
from .schema.tables import table
from .schema.zero import ZeroConfig
from .schema_index import Key, keys_of, known_reason, nearest, place_of, takes_any_key
from .unsupported import UNSUPPORTED
from .validate import validate

_SHORTEST = 4
"""Minimum length of the longer name for one edit to count as a misspelling."""
_SIMILAR = 0.75
"""Minimum ratio of similarity at which a warning names a known key."""


def accept(source: Any) -> Document:
    """Read a configuration as DeepSpeed does: remove the keys that it ignores.

    `Document.written` is the original configuration; `Document.ignored` lists removed, reinterpreted and added keys,
    with the reason. Raises ConfigError if the source cannot be read.

    >>> document = accept({"train_batch_size": 8, "seed": 1})
    >>> document.data, document.ignored[0].path
    ({'train_batch_size': 8}, 'seed')
    """
    document = read(source)
    if document.written is not None:
        return document
    source = dict(document.data)
    ignored = unfold(source)
    data = _section(source, Config, (), False, ignored)
    _read_values(data, ignored)
    _drop_other_stages(data, ignored)
    _drop_without_type(data, ignored)
    _give_defaults(data, ignored)
    _drop_speed_only(data, ignored)
    ignored.sort(key=lambda note: note.path)
    return replace(document, data=data, written=document.data, ignored=tuple(ignored))


def warning(origin: str, ignored: list[Note]) -> str:
    """Return one text that lists the ignored keys by reason.

    >>> print(warning("a.json", [Note("seed", 1, "unknown"), Note("log", {}, "unknown")]))
    a.json has keys that have no effect, or another one than is written:
      `seed`, `log`: unknown
    """
    by_reason: dict[str, list[str]] = {}
    for note in ignored:
        by_reason.setdefault(note.reason, []).append(f"`{note.path}`")
    lines = [f"  {', '.join(paths)}: {reason}" for reason, paths in by_reason.items()]
    return "\n".join([f"{origin} has keys that have no effect, or another one than is written:", *lines])


# -- names -----------------------------------------------------------------------------------------------------------


def _section(
    values: dict[Any, Any], model: type[ConfigSection], path: Path, off: bool, ignored: list[Note]
) -> dict[Any, Any]:
    keys = keys_of(model)
    kept: dict[Any, Any] = {}
    for name, value in values.items():
        here = (*path, str(name))
        key = keys.get(name) if isinstance(name, str) else None
        if key is not None:
            if name != key.name and key.name in values:
                ignored.append(Note(dotted(here), value, f"`{dotted((*path, key.name))}` is given, too, and counts"))
            elif key.kind == "section" and key.child is not None and isinstance(value, dict):
                switched_off = off or _is_off(key, value)
                kept[name] = _section(value, key.child, here, switched_off, ignored)
            elif off and not _fits(key, value):
                ignored.append(Note(dotted(here), value, "the section is switched off"))
            elif key.no_effect and not _fits(key, value):
                ignored.append(Note(dotted(here), value, key.no_effect))
            else:
                kept[name] = value
        elif takes_any_key(model) or not isinstance(name, str) or (not path and (name == SCHEMA or _is_path(name))):
            kept[name] = value
        elif off:
            ignored.append(Note(dotted(here), value, "the section is switched off"))
        elif (reason := known_reason(path, name)) is not None:
            ignored.append(Note(dotted(here), value, reason))
        elif any(_one_edit(name, known) for known in keys):
            kept[name] = value  # the strict check names the key that was meant
        else:
            ignored.append(Note(dotted(here), value, _place(name, keys)))
    return kept


def _is_path(name: str) -> bool:
    section, dot, _ = name.partition(".")
    return bool(dot) and section in keys_of(Config)


def _place(name: str, keys: Iterable[str]) -> str:
    found = place_of(name)
    if found:
        return f"only {found} is read"
    close = nearest(name, list(keys), _SIMILAR)
    return "no key of DeepSpeed's or of this library's" + (f"; did you mean `{close}`?" if close else "")


def _is_off(key: Key, values: dict[Any, Any]) -> bool:
    """Return True if a section is switched off, except for sections that have an effect although off."""
    assert key.child is not None
    keys = keys_of(key.child)
    if "enabled" in keys:
        default = keys["enabled"].default
        switch = values.get("enabled", default)
        if switch is default is None:
            return False  # the other keys decide
        return switch in (False, None, 0) or (isinstance(switch, str) and switch.lower() == "false")
    if key.name in ("offload_param", "offload_optimizer"):
        return values.get("device") in (None, "none")
    return False


def _fits(key: Key, value: Any) -> bool:
    if value is None or (value == AUTO and key.kind == "value"):
        return True
    try:
        key.owner.model_validate({key.name: value})
    except ValidationError as error:
        return all(detail["loc"][:1] != (key.name,) for detail in error.errors(include_url=False))
    return True


def _one_edit(name: str, known: str) -> bool:
    """Return True if one letter more, less or exchanged, or two letters swapped, make the names equal.

    >>> _one_edit("gradient_clipp1ng", "gradient_clipping"), _one_edit("Train-Batch-Size", "train_batch_size")
    (True, True)
    >>> _one_edit("log", "aio"), _one_edit("seed", "speed_up")
    (False, False)
    """
    first, second = (text.lower().replace("-", "_") for text in (name, known))
    if first == second:
        return True
    if abs(len(first) - len(second)) > 1 or max(len(first), len(second)) < _SHORTEST:
        return False
    start = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(map(len, (first, second)))
    )
    rest, other = first[start:], second[start:]
    swapped = len(rest) > 1 and rest[1::-1] + rest[2:] == other
    return rest[1:] == other[1:] or rest[1:] == other or rest == other[1:] or swapped


# -- values ----------------------------------------------------------------------------------------------------------


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


_MEANS: dict[str, Callable[[Any], bool]] = {
    "zero": lambda value: _number(value) == 0,
    "not positive": lambda value: _number(value) <= 0,
    "negative": lambda value: _number(value) < 0,
    "infinite": lambda value: (
        _number(value) < 0 or (isinstance(value, str) and value.strip().lower() in ("inf", "infinity"))
    ),
    "no clipping": lambda value: _number(value) < 0 or _number(value) == math.inf,
    "dynamic": lambda value: value == "dynamic",
    "null": lambda value: value is None,
}


def _read_values(data: dict[str, Any], ignored: list[Note]) -> None:
    for path, row in table("read_as.toml").items():
        parent, spelling = _find(data, path)
        if parent is not None and spelling in parent and _MEANS[row["means"]](parent[spelling]):
            ignored.append(Note(dotted((*path.split(".")[:-1], spelling)), parent[spelling], row["text"]))
            if "value" in row:
                parent[spelling] = row["value"]
            else:
                del parent[spelling]


def _find(data: dict[str, Any], path: str) -> tuple[dict[str, Any] | None, str]:
    model: type[ConfigSection] = Config
    *above, last = path.split(".")
    place: Any = data
    for name in above:
        key = keys_of(model)[name]
        place = next((place[spelling] for spelling in key.spellings if spelling in place), None)
        if not isinstance(place, dict) or key.child is None:
            return None, last
        model = key.child
    return place, next((spelling for spelling in keys_of(model)[last].spellings if spelling in place), last)


def _drop_other_stages(data: dict[str, Any], ignored: list[Note]) -> None:
    zero = data.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, dict) else None
    stage = 0 if stage is None else stage
    if not isinstance(zero, dict) or stage not in (0, 1, 2, 3):
        return  # with "auto" a plan of the built model chooses the stage

    def drop(name: str, reason: str) -> None:
        for spelling in keys_of(ZeroConfig)[name].spellings:
            if spelling in zero and zero[spelling] not in (None, False) and not _device_is_none(zero[spelling]):
                ignored.append(Note(f"zero_optimization.{spelling}", zero.pop(spelling), reason))

    if stage < 3:
        for name in ("offload_param", "cpu_offload_param"):
            drop(name, f"it belongs to stage 3; at stage {stage} each rank has all parameters on its device")
        stage_3 = [name for name, key in keys_of(ZeroConfig).items() if key.extra.get(STAGES)]
        for name in (*stage_3, "zero_quantized_nontrainable_weights", "zeropp_loco_param"):
            drop(name, f"it belongs to stage 3, and the stage is {stage}")
    if stage == 0:
        for name in ("offload_optimizer", "cpu_offload", "cpu_offload_use_pin_memory"):
            drop(name, "it belongs to stages 1 to 3, and the stage is 0")
    if stage != 1:
        drop("legacy_stage1", f"it belongs to stage 1, and the stage is {stage}")
    for old, new in (
        ("cpu_offload", "offload_optimizer"),
        ("cpu_offload_param", "offload_param"),
        ("cpu_offload_params", "offload_param"),
    ):
        section = zero.get(new)
        if old in zero and isinstance(section, dict) and section.get("device") == ("cpu" if zero[old] else "none"):
            ignored.append(Note(f"zero_optimization.{old}", zero.pop(old), f"`zero_optimization.{new}` says the same"))
    state = zero.get("offload_optimizer")
    if stage in (1, 2) and isinstance(state, dict) and state.get("ratio") not in (None, AUTO, 1):
        path = "zero_optimization.offload_optimizer.ratio"
        ignored.append(Note(path, state.pop("ratio"), f"it belongs to stage 3, and the stage is {stage}"))
    if stage in (1, 2) and isinstance(state, dict) and state.get("device") == "nvme" and not state.get("nvme_path"):
        path = "zero_optimization.offload_optimizer.device"
        ignored.append(Note(path, "nvme", "read as cpu: no `nvme_path` is given"))
        state["device"] = "cpu"


def _device_is_none(value: Any) -> bool:
    return isinstance(value, dict) and value.get("device") in (None, "none")


def _drop_without_type(data: dict[str, Any], ignored: list[Note]) -> None:
    for name in ("optimizer", "scheduler"):
        section = data.get(name)
        if isinstance(section, dict) and section.get("type") is None and section.get("params"):
            reason = f"`{name}.type` is not given, so no {name} is built"
            ignored.append(Note(f"{name}.params", section.pop("params"), reason))


def _give_defaults(data: dict[str, Any], ignored: list[Note]) -> None:
    """Add the key whose default in DeepSpeed is a rate, and here the optimizer's."""
    section = data.get("scheduler")
    if not isinstance(section, dict) or section.get("type") != "WarmupDecayLR":
        return
    params = section.get("params") or {}
    if isinstance(params, dict) and "warmup_max_lr" not in params:
        section["params"] = {**params, "warmup_max_lr": 1e-3}
        reason = "it is not given, and DeepSpeed's default is 0.001; write null for the optimizer's lr"
        ignored.append(Note("scheduler.params.warmup_max_lr", None, reason))


def _drop_speed_only(data: dict[str, Any], ignored: list[Note]) -> None:
    config, _, _ = validate(scan(data))
    for row in UNSUPPORTED:
        if not row.get("speed_only") or not holds(row, config):
            continue
        parent, spelling = _find(data, row["path"])
        if parent is not None and spelling in parent:
            path = dotted((*row["path"].split(".")[:-1], spelling))
            reason = f"this version does not have {row['feature']}; results are the same"
            ignored.append(Note(path, parent.pop(spelling), reason))
