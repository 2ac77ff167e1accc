"""Checks of `optimizer` and `scheduler`: known name, known arguments, sensible values."""

from __future__ import annotations

import math
from typing import Any

from shardwise.errors import ConflictError, NotBuiltError

from . import names
from .problems import Problem, dotted
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
    if canonical in names.UNBUILT_OPTIMIZERS:
        return [_unbuilt(here, "optimizer", name, names.UNBUILT_OPTIMIZERS[canonical])]
    if canonical in names.UNUSABLE_OPTIMIZERS:
        return [Problem(here, f"torch.optim.{name} cannot be used: {names.UNUSABLE_OPTIMIZERS[canonical]}")]
    signature = names.optimizer_signature(name)
    if signature is None:
        usable = {*names.NATIVE_OPTIMIZERS, *names.torch_optimizers()} - names.UNUSABLE_OPTIMIZERS.keys()
        message = _unknown("optimizer", name, usable, names.UNBUILT_OPTIMIZERS, "torch.optim")
        return [Problem(here, message)]
    problems = _check_arguments("optimizer.params", params, signature)
    if canonical in ("adam", "adamw"):
        problems += _check_adam(canonical, params)
    return problems


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


def check_scheduler(config: Config, found: Scan) -> list[Problem]:
    """Return what is wrong with the schedule's name and arguments."""
    name, params = config.scheduler.type, config.scheduler.params
    if name is None:
        if params:
            return [Problem("scheduler.params", 'the scheduler has no `type`; add one, such as "type": "WarmupLR"')]
        return []
    here = dotted(found.given.get(("scheduler", "type"), ("scheduler", "type")))
    if name in names.UNBUILT_SCHEDULES:
        return [_unbuilt(here, "schedule", name, names.UNBUILT_SCHEDULES[name])]
    if name in names.UNUSABLE_SCHEDULES:
        return [Problem(here, f"{name} cannot be used in a configuration: {names.UNUSABLE_SCHEDULES[name]}")]
    signature = names.schedule_signature(name)
    if signature is None:
        usable = {*names.NATIVE_SCHEDULES, *names.torch_schedules()} - names.UNUSABLE_SCHEDULES.keys()
        message = _unknown("schedule", name, usable, names.UNBUILT_SCHEDULES, "torch.optim.lr_scheduler")
        return [Problem(here, message)]
    problems = _check_arguments("scheduler.params", params, signature)
    autos = {path[-1] for path in found.autos if path[:2] == ("scheduler", "params")}
    for argument, default in signature.arguments.items():
        if default is names.REQUIRED and argument not in params and argument not in autos:
            problems.append(Problem(f"scheduler.params.{argument}", f"{name} needs this argument; add it"))
    return problems


def _unbuilt(path: str, kind: str, name: str, reason: str) -> Problem:
    return Problem(path, f"this version does not have the {kind} {name}: {reason}", NotBuiltError)


def _unknown(kind: str, name: str, usable: set[str], unbuilt: dict[str, str], module: str) -> str:
    ordered = sorted(usable, key=lambda item: (item.lower(), item))
    close = nearest(name, [*ordered, *unbuilt])
    advice = f'did you mean "{close}"?' if close else f"known: {', '.join(ordered)}"
    return f"there is no {kind} {name!r}, neither here nor in {module}; {advice}"


def _check_arguments(path: str, params: dict[str, Any], signature: names.Signature) -> list[Problem]:
    problems = []
    for name, value in params.items():
        here = f"{path}.{name}"
        if name == "max_grad_norm" and name not in signature.arguments:
            problems.append(Problem(here, "the engine clips gradients; write `gradient_clipping` at the top level"))
        elif name not in signature.arguments:
            close = nearest(str(name), list(signature.arguments))
            advice = f"did you mean `{path}.{close}`?" if close else f"known: {', '.join(signature.arguments)}"
            problems.append(Problem(here, f"{signature.name} has no such argument; {advice}"))
        else:
            message = _wrong_value(name, value, signature.arguments[name])
            if message:
                problems.append(Problem(here, message))
    return problems


_AT_LEAST_ZERO = ("lr", "eps", "weight_decay", "momentum", "warmup_min_lr", "warmup_max_lr")
_STEPS = ("warmup_num_steps", "total_num_steps")
_LEARNING_RATES = ("warmup_min_lr", "warmup_max_lr")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _wrong_value(name: str, value: Any, default: Any) -> str:
    """Say what is wrong with one argument, judged by its name and its default's type; empty if nothing is."""
    if name == "warmup_type":
        return "" if value in ("log", "linear") else f'expected "log" or "linear", found {show(value)}'
    if name in _STEPS:
        whole = _is_number(value) and float(value).is_integer() and value > 0
        return "" if whole else f"expected an integer > 0, found {show(value)}{_unquote(value)}"
    if name in _LEARNING_RATES and isinstance(value, list | tuple):
        # One value for each parameter group.
        return (
            ""
            if all(_is_number(item) and item >= 0 for item in value)
            else f"expected numbers >= 0, found {show(value)}"
        )
    if name == "betas":
        pair = isinstance(value, list | tuple) and len(value) == 2
        fits = pair and all(_is_number(item) and 0 <= item < 1 for item in value)
        return "" if fits else f"expected two numbers in [0, 1), found {show(value)}"
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else f"expected true or false, found {show(value)}"
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
