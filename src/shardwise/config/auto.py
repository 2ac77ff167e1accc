"""Choosing a value for every "auto", from facts where there are any, and remembering the reason.

"auto" may stand for any single value of the schema and for any argument of the optimizer or the schedule. A value
that nothing is known about falls back to its default; a required one without a default is an error that says which
fact is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from . import names
from .facts import Facts
from .problems import Path, Problem, dotted
from .scan import Scan, put
from .tree import Key

Choice = tuple[Any, str] | None
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


class Note(NamedTuple):
    """A value that the user did not write, or wrote elsewhere, and why it is what it is."""

    path: str
    value: Any
    reason: str


def _buckets(share: float) -> Callable[[Facts], Choice]:
    """A bucket of a fraction of one square layer's weight matrix."""

    def choose(facts: Facts) -> Choice:
        if facts.hidden_size is not None:
            size = int(share * facts.hidden_size**2)
            factor = "" if share == 1 else f"{share:g} x "
            return size, f"{factor}hidden_size^2 with hidden_size = {facts.hidden_size}"
        if facts.largest_layer is not None:
            size = max(1, int(share * facts.largest_layer))
            return size, f"{share:g} x the largest layer ({facts.largest_layer} parameters)"
        return None

    return choose


def _persistence(facts: Facts) -> Choice:
    if facts.hidden_size is None:
        return None
    return 10 * facts.hidden_size, f"10 x hidden_size with hidden_size = {facts.hidden_size}"


def _live(facts: Facts) -> Choice:
    if facts.num_parameters is None:
        return None
    return facts.num_parameters, f"the model has {facts.num_parameters} parameters"


def _precision(name: str) -> Callable[[Facts], Choice]:
    def choose(facts: Facts) -> Choice:
        if facts.precision is None:
            return None
        return facts.precision == name, f"the caller trains in {facts.precision}"

    return choose


def _clipping(facts: Facts) -> Choice:
    return None if facts.max_grad_norm is None else (facts.max_grad_norm, "the caller's max_grad_norm")


RULES: dict[str, Callable[[Facts], Choice]] = {
    "gradient_clipping": _clipping,
    "fp16.enabled": _precision("fp16"),
    "bf16.enabled": _precision("bf16"),
    "zero_optimization.reduce_bucket_size": _buckets(1),
    "zero_optimization.allgather_bucket_size": _buckets(1),
    "zero_optimization.stage3_prefetch_bucket_size": _buckets(0.9),
    "zero_optimization.stage3_param_persistence_threshold": _persistence,
    "zero_optimization.stage3_max_live_parameters": _live,
    "zero_optimization.stage3_max_reuse_distance": _live,
}
"""Keys that facts bear on. Everything else takes its default."""


def resolve_autos(found: Scan, facts: Facts) -> tuple[list[Note], list[Problem]]:
    """Put a value in the place of every "auto" of `found.data`, except for the batch keys, which `batch` solves."""
    notes: list[Note] = []
    problems: list[Problem] = []
    # The optimizer comes first because the schedule's peak is the optimizer's learning rate.
    for path in sorted(found.autos, key=lambda item: (item[0] == "scheduler", tuple(map(str, item)))):
        if path in [(name,) for name in _BATCH]:
            continue
        spelled = dotted(found.given[path])
        if path[:2] in (("optimizer", "params"), ("scheduler", "params")):
            chosen = _argument(path, found, facts)
        else:
            chosen = _value(path, found.autos[path], facts)
        if isinstance(chosen, str):
            problems.append(Problem(spelled, chosen))
        else:
            value, reason = chosen
            if value is not names.REQUIRED:
                put(found.data, path, list(value) if isinstance(value, tuple) else value)
            notes.append(Note(spelled, value, reason))
    return notes, problems


def _value(path: Path, key: Key | None, facts: Facts) -> tuple[Any, str] | str:
    """Choose a value of the schema."""
    if key is None:
        return '"auto" has no meaning here: the arguments belong to another library'
    rule = RULES.get(dotted(path))
    choice = rule(facts) if rule is not None else None
    if choice is not None:
        return choice
    if key.field.is_required():
        return f'"auto" needs a value from the caller: {key.name} has no default'
    reason = "the default; no fact about the model is known" if rule is not None else "the default"
    return key.default, reason


def _argument(path: Path, found: Scan, facts: Facts) -> tuple[Any, str] | str:
    """Choose an argument of the optimizer or of the schedule."""
    section, name = str(path[0]), str(path[-1])
    known = getattr(facts, name, None) if name in Facts.__dataclass_fields__ else None
    if known is not None:
        return known, f"the caller's {name}"
    if (section, name) == ("scheduler", "warmup_max_lr"):
        return _peak(found, facts)
    if (section, name) == ("scheduler", "warmup_min_lr"):
        return 0.0, "the warm-up starts at zero"
    block = found.data.get(section, {})
    kind = block.get("type")
    if not isinstance(kind, str):
        return f'"auto" cannot be chosen without {section}.type'
    if section == "optimizer":
        signature = names.optimizer_signature(kind, block.get("params", {}))
    else:
        signature = names.schedule_signature(kind)
    if signature is None or name not in signature.arguments:
        # An unknown class or argument is reported, with the nearest name, by the check of arguments.
        return names.REQUIRED, "unknown"
    default = signature.arguments[name]
    if default is names.REQUIRED:
        return f'"auto" needs the fact {name}, which the caller has not given; write a number'
    return default, f"the default of {kind}"


def _peak(found: Scan, facts: Facts) -> tuple[Any, str]:
    """The learning rate that a warm-up leads to: the optimizer's own."""
    params = found.data.get("optimizer", {}).get("params", {})
    lr = params.get("lr") if isinstance(params, dict) else None
    if lr is not None:
        return lr, "optimizer.params.lr"
    if facts.lr is not None:
        return facts.lr, "the caller's learning rate"
    return None, "the optimizer's learning rate"
