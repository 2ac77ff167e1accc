"""Choosing a value for every "auto", with the reason.

"auto" may stand for any single value of the schema and for any argument of the optimizer or the schedule. Facts give
the value, else it is the default; a required value without facts is an error that names the missing fact.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from . import names
from .normalize import Scan, put
from .problems import Note, Path, Problem, dotted
from .runtime_facts import Facts
from .schema.base import AUTO, ConfigSection
from .schema.gradients import METHODS, canonical_method
from .schema_index import Key, keys_of, takes_any_key

_STAGE = ("zero_optimization", "stage")
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


FROM_FACTS = ("gradient_clipping", "fp16.enabled", "bf16.enabled")
"""Keys with a value from facts; other keys take their default."""

SIZED = (
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.allgather_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.stage3_max_live_parameters",
)
"""Keys with a better default than a number from the width (trainers use hidden_size^2, less than a block)."""


class _Chosen(NamedTuple):
    """A value with its reason; `write` is False if the key may as well be absent."""

    value: Any
    reason: str
    write: bool = True


def resolve_autos(found: Scan, facts: Facts) -> tuple[list[Note], list[Problem]]:
    """Replace every "auto" of `found.data`, except for the batch keys, which `batch` resolves."""
    notes: list[Note] = []
    problems: list[Problem] = []
    for path in sorted(found.autos, key=lambda item: tuple(map(str, item))):
        if path in [(name,) for name in _BATCH]:
            continue
        key = found.autos[path]
        if path == _STAGE:
            chosen: _Chosen | str = _least_stage(found)
        else:
            chosen = _argument(path, found, facts) if key is None else _value(path, key, facts)
        spelled = dotted(found.given[path])
        if isinstance(chosen, str):
            problems.append(Problem(spelled, chosen))
            continue
        if chosen.write:
            put(found.data, path, list(chosen.value) if isinstance(chosen.value, tuple) else chosen.value)
        notes.append(Note(spelled, chosen.value, chosen.reason))
    return notes, problems


def _value(path: Path, key: Key, facts: Facts) -> _Chosen:
    name = dotted(path)
    if name == "gradient_clipping" and facts.max_grad_norm is not None:
        return _Chosen(facts.max_grad_norm, "the caller's max_grad_norm")
    if name in FROM_FACTS and path[0] != name and facts.precision is not None:
        return _Chosen(facts.precision == path[0], f"the caller trains in {facts.precision}")
    reason = "the default; the caller gave no value" if name in FROM_FACTS else "the default"
    if name in SIZED:
        reason = "units have the size of the model's blocks; no number is needed"
    # Not written, because a number would look like the user's choice.
    return _Chosen(key.default, reason, write=False)


def _least_stage(found: Scan) -> _Chosen:
    """Return the lowest stage for the tiers that are configured; a plan of the built model chooses from there on."""
    zero = found.data[_STAGE[0]]

    def is_offloaded(name: str) -> bool:
        section = zero.get(name)
        return isinstance(section, dict) and section.get("device") in ("cpu", "nvme")

    stage = 3 if is_offloaded("offload_param") else int(is_offloaded("offload_optimizer"))
    return _Chosen(stage, "the lowest for the configured offloading" if stage else "the default", write=stage > 0)


def _argument(path: Path, found: Scan, facts: Facts) -> _Chosen | str:
    section, name = str(path[0]), str(path[-1])
    if path[1] != "params" or section not in ("optimizer", "scheduler", "compression"):
        return '"auto" has no meaning here: these arguments belong to another library; write a value'
    arguments = _arguments(section, found)
    if arguments is None:
        return _Chosen(AUTO, "the type is unknown", write=False)
    if name not in arguments:
        # Kept, so that the check of arguments reports the name with the nearest known one.
        return _Chosen(AUTO, "no such argument")
    if name in Facts.__dataclass_fields__ and getattr(facts, name) is not None:
        return _Chosen(getattr(facts, name), f"the caller's {name}")
    if name == "warmup_max_lr":
        return _Chosen(None, "each parameter group's own rate", write=False)
    if arguments[name].field.is_required():
        return f'"auto" needs {name}, a fact that the caller has not given; write a number'
    kind = found.data[section]["type"]
    default = arguments[name].default
    return _Chosen(default, f"the default of {kind}", write=default is not None)


def _arguments(section: str, found: Scan) -> dict[str, Key] | None:
    kind = found.data[section].get("type")
    if not isinstance(kind, str):
        return None
    model: type[ConfigSection] | None
    if section == "compression":
        method = canonical_method(kind)
        model = METHODS[method] if method is not None else None
    else:
        model = names.model_of("optimizer" if section == "optimizer" else "scheduler", kind)
    return None if model is None or takes_any_key(model) else keys_of(model)
