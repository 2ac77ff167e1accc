"""Checks of arguments by pydantic models: those in a configuration and those of constructors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from .problems import LISTED, Problem, another_name, error_of
from .schema.base import AUTO, Arguments
from .schema.optimizers import CLIPPING
from .schema.schedules import NATIVE_SCHEDULES
from .schema_index import keys_of, nearest, takes_any_key
from .validate import message

Model = TypeVar("Model", bound=Arguments)


def check(
    model: type[Model], values: Mapping[str, Any], at: str, name: str, later: Collection[str] = ()
) -> Model | list[Problem]:
    """Return the arguments of class `name` with defaults, or the problems; `at` has {} for an argument's name."""
    keys = keys_of(model)
    wrong: dict[str, Problem] = {}
    written: dict[str, str] = {}
    for key, value in values.items():
        here = at.format(key)
        if key not in keys and key == "max_grad_norm":
            wrong[key] = Problem(here, CLIPPING)
        elif key not in keys and not takes_any_key(model):
            # Nearest names are slow to find, and the message lists no more.
            close = nearest(str(key), list(keys), 0.8) if len(wrong) < LISTED else None
            advice = f"did you mean `{at.format(close)}`?" if close else _advice(model, str(key), keys)
            wrong[key] = Problem(here, f"{name} has no such argument; {advice}")
        elif isinstance(value, str) and value == AUTO:
            wrong[key] = Problem(here, '"auto" has to be replaced by a value before this is built')
        elif (first := written.setdefault(keys[key].name if key in keys else key, key)) != key:
            wrong[key] = Problem(here, another_name(at.format(first)))
    try:
        found = model.model_validate({name: values[key] for name, key in written.items()})
    except ValidationError as error:
        for detail in error.errors(include_url=False, include_context=False):
            key = written.get(str(detail["loc"][0]), str(detail["loc"][0]))
            if key not in {*wrong, *later}:
                text = message(keys[key], values[key]) if key in values else f"{name} needs this argument; add it"
                wrong[key] = Problem(at.format(key), text)
        return list(wrong.values())
    unfit = found.contradictions(lambda key: f"`{at.format(key)}`")
    return list(wrong.values()) or [Problem(at.format(key), text, kind) for key, text, kind in unfit] or found


def _advice(model: type[Arguments], name: str, keys: Collection[str]) -> str:
    others = [other.called() for other in NATIVE_SCHEDULES.values() if other is not model and name in keys_of(other)]
    is_schedule = model in NATIVE_SCHEDULES.values()
    owner = f"it belongs to {' and '.join(others)}; " if others and is_schedule else ""
    return f"{owner}known: {', '.join(keys)}"


def checked(model: type[Model], values: Mapping[str, Any], at: str = "", name: str = "") -> Model:
    """Return the arguments with defaults filled in. `at` is as for `check`, or empty for a call of the class. `name` is
    the class in messages; empty: that of the model.

    Raises:
        ConfigError: an argument is wrong; the message gives path, problem and fix.

    >>> from shardwise.config.schema.schedules import WarmupLRArguments
    >>> checked(WarmupLRArguments, {"warmup_num_steps": 1e2}).warmup_num_steps
    100
    >>> checked(WarmupLRArguments, {"warmup_num_steps": -1})
    Traceback (most recent call last):
        ...
    shardwise.errors.ConfigError: WarmupLR(warmup_num_steps=...): expected an integer >= 0, found -1 (integer)
    """
    name = name or model.called()
    found = check(model, values, at or f"{name}({{}}=...)", name)
    if not isinstance(found, list):
        return found
    raise error_of(found, "\n".join(map(str, found)))


def called(model: type[Model], given: Mapping[str, Any], at: str = "", name: str = "") -> Model:
    """Return the arguments of a constructor, as `checked`; `given` may have further names, as `locals()` has."""
    return checked(model, {key: given[key] for key in keys_of(model) if key in given}, at, name)
