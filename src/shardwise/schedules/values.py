"""Checks of the schedules' arguments. What is wrong is a `ConfigError` that names `scheduler.params.KEY`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from shardwise.errors import ConfigError

Rates = float | Sequence[float]
"""One value for all parameter groups, or one for each."""


def positive_integer(value: Any, name: str) -> int:
    """Accept 1000 and 1e3; JSON writers produce both."""
    if not _is_whole(value) or value <= 0:
        raise ConfigError(f"scheduler.params.{name}: expected an integer > 0, found {value!r}")
    return int(value)


def count(value: Any, name: str) -> int:
    """Accept an integer from 0, also as 4.0."""
    if not _is_whole(value) or value < 0:
        raise ConfigError(f"scheduler.params.{name}: expected an integer >= 0, found {value!r}")
    return int(value)


def number(value: Any, name: str) -> float:
    """Accept a finite number from 0."""
    if not _is_number(value) or not 0 <= value < math.inf:
        raise ConfigError(f"scheduler.params.{name}: expected a number >= 0, found {value!r}")
    return float(value)


def flag(value: Any, name: str) -> bool:
    """Accept true and false."""
    if not isinstance(value, bool):
        raise ConfigError(f"scheduler.params.{name}: expected true or false, found {value!r}")
    return value


def rates(value: Any, name: str) -> float | list[float]:
    """Accept a finite number from 0, or a list of them."""
    if isinstance(value, list | tuple):
        return [number(item, name) for item in value]
    return number(value, name)


def positive_rates(value: Any, name: str) -> float | list[float]:
    """Accept a finite number above 0, or a list of them."""
    found = rates(value, name)
    if min(_listed(found), default=0.0) <= 0:
        raise ConfigError(f"scheduler.params.{name}: expected a number > 0, or a list of them, found {value!r}")
    return found


def momenta(value: Any, name: str) -> float | list[float]:
    """Accept a number from 0 and below 1, or a list of them."""
    found = rates(value, name)
    if max(_listed(found), default=0.0) >= 1:
        raise ConfigError(f"scheduler.params.{name}: expected a number >= 0 and < 1, or a list, found {value!r}")
    return found


def of_group(found: float | list[float], index: int, groups: int, name: str) -> float:
    """Return the value of one of `groups` parameter groups."""
    if not isinstance(found, list):
        return found
    if len(found) != groups:
        raise ConfigError(
            f"scheduler.params.{name}: expected one value for each of the optimizer's {groups} parameter groups, found "
            f"{len(found)}"
        )
    return found[index]


def of_groups(found: float | list[float], groups: int, name: str) -> list[float]:
    """Return the values of all parameter groups."""
    return [of_group(found, index, groups, name) for index in range(groups)]


def check_order(
    low: float | list[float], high: float | list[float], groups: int, low_name: str, high_name: str
) -> None:
    """Raise if the lower bound of any parameter group is above its upper one."""
    for index in range(groups):
        least, most = of_group(low, index, groups, low_name), of_group(high, index, groups, high_name)
        if least > most:
            raise ConfigError(
                f"scheduler.params.{low_name}: {least:g} is above {high_name} = {most:g} in parameter group {index}; "
                "exchange them"
            )


def _listed(found: float | list[float]) -> list[float]:
    return found if isinstance(found, list) else [found]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value) and float(value).is_integer()
