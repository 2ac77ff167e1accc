"""Checks of `optimizer` and `scheduler`: known name, known arguments, sensible values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from shardwise.errors import ConfigError, ConflictError, NotBuiltError

from . import names
from .problems import LISTED, Problem, dotted
from .scan import Scan
from .schema.root import Config
from .tree import nearest
from .validate import show


def check_optimizer(config: Config, found: Scan) -> list[Problem]:
    """Return what is wrong with the optimizer's name and arguments."""
    name, params = config.optimizer.type, config.optimizer.params
    if name is None:
        if params:
            return [Problem("optimizer.params", 'the optimizer has no `type`; add one, such as "type": "AdamW"')]
        return []
    here = dotted(found.given.get(("optimizer", "type"), ("optimizer", "type")))
    canonical = names.canonical_optimizer(name)
    if canonical in names.UNUSABLE_OPTIMIZERS:
        return [Problem(here, f"torch.optim.{name} cannot be used: {names.UNUSABLE_OPTIMIZERS[canonical]}")]
    if canonical in names.MUP_OPTIMIZERS:
        return []
    signature = names.optimizer_signature(name)
    if signature is None:
        usable = {
            *names.NATIVE_OPTIMIZERS,
            *names.MUP_OPTIMIZERS,
            *names.torch_optimizers(),
        } - names.UNUSABLE_OPTIMIZERS.keys()
        message = _unknown("optimizer", name, usable, "torch.optim")
        return [Problem(here, message)]
    problems = _check_arguments("optimizer.params", params, signature)
    if canonical in names.ONEBIT_OPTIMIZERS:
        problems += _check_onebit(name, params)
    elif canonical in ("adam", "adamw"):
        problems += _check_adam(canonical, params)
    problems += [
        Problem(f"optimizer.params.{option}", message, NotBuiltError if option == "per_head_muon" else ConfigError)
        for option, wrong, message in _REFUSED_VALUES.get(canonical, ())
        if option in params and wrong(params[option])
    ]
    return problems


_REFUSED_VALUES: dict[str, list[tuple[str, Callable[[Any], bool], str]]] = {
    "lamb": [
        (
            "max_grad_norm",
            lambda value: _is_number(value) and value > 0,
            "the engine clips gradients; write `gradient_clipping` at the top level, and 0 here or nothing",
        ),
        ("amsgrad", lambda value: value is True, "LAMB has no such variant; remove the key"),
    ],
    "muon": [
        (
            "per_head_muon",
            lambda value: value is True,
            "this version orthogonalises matrices as a whole; remove the key",
        ),
        ("ns_method", lambda value: value not in ("gram", "standard"), 'expected "gram" or "standard"'),
    ],
}
"""By optimizer: an option, whether a value of it is refused, and why."""


def _check_adam(name: str, params: dict[str, Any]) -> list[Problem]:
    """Options of Adam that contradict each other."""
    problems = []
    if name == "adamw" and params.get("adam_w_mode") is False:
        message = "false contradicts `optimizer.type` AdamW; use type Adam for decay added to the gradient"
        problems.append(Problem("optimizer.params.adam_w_mode", message, ConflictError))
    if params.get("torch_adam") is True and params.get("fused") is True:
        message = "true contradicts `optimizer.params.fused` true; remove one of them"
        problems.append(Problem("optimizer.params.torch_adam", message, ConflictError))
    return problems


def _check_onebit(name: str, params: dict[str, Any]) -> list[Problem]:
    """Values that optimizers with one-bit communication cannot take."""
    problems = []
    for option, reason in names.ONEBIT_REFUSED.items():
        if params.get(option) is True:
            problems.append(Problem(f"optimizer.params.{option}", f"{name} only has false: {reason}"))
    for option in names.ONEBIT_COUNTS:
        value = params.get(option, 1)
        if _is_number(value) and (not float(value).is_integer() or value < 1):
            problems.append(Problem(f"optimizer.params.{option}", f"expected an integer >= 1, found {show(value)}"))
    backend = params.get("comm_backend_name", "nccl")
    if backend not in names.ONEBIT_BACKENDS:
        message = f"expected one of {', '.join(names.ONEBIT_BACKENDS)}, found {show(backend)}"
        problems.append(Problem("optimizer.params.comm_backend_name", message))
    known = {**names.ONEBIT_OPTIMIZERS[name.lower()], **params}
    for low, high in names.ONEBIT_ORDERED:
        least: Any = known.get(low)
        most: Any = known.get(high)
        if _is_number(least) and _is_number(most) and least > most:
            message = f"is {least:g}, but may be at most `optimizer.params.{high}` = {most:g}"
            problems.append(Problem(f"optimizer.params.{low}", message, ConflictError))
    return problems


def check_scheduler(config: Config, found: Scan) -> list[Problem]:
    """Return what is wrong with the schedule's name and arguments."""
    name, params = config.scheduler.type, config.scheduler.params
    if name is None:
        if params:
            return [Problem("scheduler.params", 'the scheduler has no `type`; add one, such as "type": "WarmupLR"')]
        return []
    here = dotted(found.given.get(("scheduler", "type"), ("scheduler", "type")))
    if name in names.UNUSABLE_SCHEDULES:
        return [Problem(here, f"{name} cannot be used in a configuration: {names.UNUSABLE_SCHEDULES[name]}")]
    signature = names.schedule_signature(name)
    if signature is None:
        usable = {*names.NATIVE_SCHEDULES, *names.torch_schedules()} - names.UNUSABLE_SCHEDULES.keys()
        message = _unknown("schedule", name, usable, "torch.optim.lr_scheduler")
        return [Problem(here, message)]
    problems = _check_arguments("scheduler.params", params, signature)
    autos = {path[-1] for path in found.autos if path[:2] == ("scheduler", "params")}
    for argument, default in signature.arguments.items():
        if default is names.REQUIRED and argument not in params and argument not in autos:
            problems.append(Problem(f"scheduler.params.{argument}", f"{name} needs this argument; add it"))
    if not problems:
        problems += [*_check_bounds(params, signature)]
    return problems


def _check_bounds(params: dict[str, Any], signature: names.Signature) -> Iterator[Problem]:
    """Minima above their maxima, group by group where both or one are lists."""
    for least, most in (("cycle_min_lr", "cycle_max_lr"), ("cycle_min_mom", "cycle_max_mom")):
        if least not in signature.arguments:
            continue
        low, high = (params.get(name, signature.arguments[name]) for name in (least, most))
        if not all(_is_number(value) or isinstance(value, list | tuple) for value in (low, high)):
            continue
        lows, highs = (value if isinstance(value, list | tuple) else [value] for value in (low, high))
        length = max(len(lows), len(highs))
        lows, highs = (list(values) * length if len(values) == 1 else values for values in (lows, highs))
        if len(lows) != len(highs):
            message = f"has {len(lows)} values and `scheduler.params.{most}` {len(highs)}; both need one for each group"
            yield Problem(f"scheduler.params.{least}", message)
        elif any(a > b for a, b in zip(lows, highs, strict=True)):
            message = f"{low} is above `scheduler.params.{most}` = {high}; exchange them"
            yield Problem(f"scheduler.params.{least}", message)


def _unknown(kind: str, name: str, usable: set[str], module: str) -> str:
    ordered = sorted(usable, key=lambda item: (item.lower(), item))
    close = nearest(name, ordered)
    advice = f'did you mean "{close}"?' if close else f"known: {', '.join(ordered)}"
    return f"there is no {kind} {show(name)}, neither here nor in {module}; {advice}"


def _check_arguments(path: str, params: dict[str, Any], signature: names.Signature) -> list[Problem]:
    problems = []
    for name, value in params.items():
        here = f"{path}.{name}"
        if name == "max_grad_norm" and name not in signature.arguments:
            problems.append(Problem(here, "the engine clips gradients; write `gradient_clipping` at the top level"))
        elif name not in signature.arguments:
            # Looking for what was meant takes long; the message does not show more.
            close = nearest(str(name), list(signature.arguments)) if len(problems) < LISTED else None
            advice = f"did you mean `{path}.{close}`?" if close else f"known: {', '.join(signature.arguments)}"
            problems.append(Problem(here, f"{signature.name} has no such argument; {advice}"))
        else:
            message = _wrong_value(name, value, signature.arguments[name])
            if message:
                problems.append(Problem(here, message))
    return problems


_LEARNING_RATES = ("warmup_min_lr", "warmup_max_lr", "cycle_min_lr", "cycle_max_lr")
_POSITIVE_RATES = ("lr_range_test_min_lr",)
_MOMENTA = ("cycle_min_mom", "cycle_max_mom")
_AT_LEAST_ZERO = (
    "lr",
    "muon_lr",
    "adam_lr",
    "eps",
    "weight_decay",
    "momentum",
    "lr_range_test_step_rate",
    "decay_lr_rate",
    "decay_mom_rate",
)
_STEPS = ("lr_range_test_step_size", "cycle_first_step_size")
_COUNTS = (
    "warmup_num_steps",
    "total_num_steps",
    "cycle_second_step_size",
    "cycle_first_stair_count",
    "cycle_second_stair_count",
    "decay_step_size",
)
WHOLE_NUMBERS = (*_STEPS, *_COUNTS)
"""Arguments of schedules that are integers; JSON writers produce 1e3, too."""

# Of one number for all parameter groups, or a list with one for each: what to expect, and whether a number is that.
_PER_GROUP: dict[str, tuple[str, Callable[[float], bool]]] = {
    **dict.fromkeys(_LEARNING_RATES, (">= 0", lambda value: value >= 0)),
    **dict.fromkeys(_POSITIVE_RATES, ("> 0", lambda value: value > 0)),
    **dict.fromkeys(_MOMENTA, (">= 0 and < 1", lambda value: 0 <= value < 1)),
}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _wrong_value(name: str, value: Any, default: Any) -> str:
    """Say what is wrong with one argument, judged by its name and its default's type; empty if nothing is."""
    if name == "warmup_type":
        return "" if value in ("log", "linear") else f'expected "log" or "linear", found {show(value)}'
    if name in WHOLE_NUMBERS:
        whole = _is_number(value) and float(value).is_integer() and value >= (name in _STEPS)
        bound = ">" if name in _STEPS else ">="
        if whole or (value is None and default is None):
            return ""
        return f"expected an integer {bound} 0, found {show(value)}{_unquote(value)}"
    if name in _PER_GROUP:
        bound, within = _PER_GROUP[name]
        if isinstance(value, list | tuple):
            right = all(_is_number(item) and within(item) for item in value)
            return "" if right else f"expected numbers {bound}, found {show(value)}"
        if (value is None and default is None) or (_is_number(value) and within(value)):
            return ""
        return f"expected a number {bound}, found {show(value)}{_unquote(value)}"
    if name == "betas":
        pair = isinstance(value, list | tuple) and len(value) == 2
        fits = pair and all(_is_number(item) and 0 <= item < 1 for item in value)
        return "" if fits else f"expected two numbers in [0, 1), found {show(value)}"
    if isinstance(default, bool):
        return "" if isinstance(value, bool) or value in (0, 1) else f"expected true or false, found {show(value)}"
    if name in _AT_LEAST_ZERO or isinstance(default, int | float):
        if (value is None and default is None) or _is_tensor(value):
            return ""
        if not _is_number(value):
            return f"expected a number, found {show(value)}{_unquote(value)}"
        return f"expected a number >= 0, found {show(value)}" if name in _AT_LEAST_ZERO and value < 0 else ""
    return ""


def _is_tensor(value: Any) -> bool:
    return type(value).__module__.startswith("torch")


def _unquote(value: Any) -> str:
    try:
        return f". Remove the quotes: {float(value):g}" if isinstance(value, str) else ""
    except ValueError:
        return ""
