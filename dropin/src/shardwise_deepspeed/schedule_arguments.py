"""Command-line flags of schedules, and their conversion to a `scheduler` section.

A flag that is not given is None, and never replaces a configured value or the schedule's default.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

from shardwise.config.schema.schedules import NATIVE_SCHEDULES
from shardwise.config.schema_index import Key, expected, keys_of


def _boolean(text: str) -> bool:
    lower = text.lower()
    if lower not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"expected true or false, found {text!r}")
    return lower == "true"


def _flags() -> dict[str, tuple[Key, list[str]]]:
    flags: dict[str, tuple[Key, list[str]]] = {}
    for schedule, model in NATIVE_SCHEDULES.items():
        for name, key in keys_of(model).items():
            flags.setdefault(name, (key, []))[1].append(schedule)
    del flags["last_batch_iteration"]
    return flags


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--lr_schedule NAME` and a flag for each argument of the five schedules to a parser, and return the parser.

    Example:
        >>> parser = add_tuning_arguments(argparse.ArgumentParser())
        >>> args = parser.parse_args("--lr_schedule WarmupLR --warmup_num_steps 100".split())
        >>> get_config_from_args(args)
        ({'type': 'WarmupLR', 'params': {'warmup_num_steps': 100}}, '')
    """
    group = parser.add_argument_group("learning-rate schedule", "arguments of the schedule; configuration keys by name")
    group.add_argument("--lr_schedule", default=None, metavar="NAME", help=f"one of {', '.join(NATIVE_SCHEDULES)}")
    for name, (key, owners) in _flags().items():
        words, text = expected(key), f"{', '.join(owners)}: {key.field.description}"
        if "true or false" in words:
            group.add_argument(
                f"--{name}", type=_boolean, default=None, nargs="?", const=True, metavar="BOOL", help=text
            )
        elif name == "warmup_type":
            group.add_argument(f"--{name}", default=None, choices=("log", "linear"), help=text)
        else:
            kind = int if "integer" in words else float
            group.add_argument(f"--{name}", type=kind, default=None, metavar=kind.__name__.upper(), help=text)
    return parser


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Parse the schedule's flags from the running script's command line; return (flags, other words)."""
    return add_tuning_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_known_args()


def override_params(args: object, params: MutableMapping[str, Any]) -> None:
    """Overwrite `scheduler.params` with the given flags, in place; missing attributes of `args` count as not given.

    >>> params = {"warmup_num_steps": 10, "warmup_type": "linear"}
    >>> override_params(argparse.Namespace(warmup_num_steps=20), params)
    >>> params
    {'warmup_num_steps': 20, 'warmup_type': 'linear'}
    """
    params.update(_given(args, _flags()))


def get_config_from_args(args: object) -> tuple[dict[str, Any] | None, str]:
    """Return (the `scheduler` section of a parser's flags, ""), or (None, error) if none of our schedules is named."""
    name = getattr(args, "lr_schedule", None)
    if name is None:
        return None, "--lr_schedule is not given"
    if name not in NATIVE_SCHEDULES:
        return None, f"--lr_schedule {name}: expected one of {', '.join(NATIVE_SCHEDULES)}"
    return {"type": name, "params": _given(args, keys_of(NATIVE_SCHEDULES[name]))}, ""


_HIGHEST = {
    "LRRangeTest": "lr_range_test_min_lr",
    "OneCycle": "cycle_max_lr",
    "WarmupLR": "warmup_max_lr",
    "WarmupDecayLR": "warmup_max_lr",
}


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[Any, str]:
    """Return (rate, "") of a `scheduler` section, or (None, error) if the section names none.

    The rate is for the optimizer: the highest, or the first of LRRangeTest; one for all groups or a list.

    >>> get_lr_from_config({"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.4}})
    (0.4, '')
    """
    name = config.get("type")
    if name is None:
        return None, "the schedule has no `type`"
    if name == "WarmupCosineLR":
        return None, "WarmupCosineLR scales the optimizer's own rate and has none itself"
    key = _HIGHEST.get(name)
    if key is None:
        return None, f"{name} is none of {', '.join(NATIVE_SCHEDULES)}"
    params = config.get("params") or {}
    default = NATIVE_SCHEDULES[name].model_fields[key].default
    rate = params.get(key, default if isinstance(default, float) else None)
    return (rate, "") if rate is not None else (None, f"{name} has no `{key}`")


def _given(args: object, keys: Iterable[str]) -> dict[str, Any]:
    return {name: value for name in keys if (value := getattr(args, name, None)) is not None}
