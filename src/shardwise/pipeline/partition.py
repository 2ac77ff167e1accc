"""Partitioning of layers into pipeline stages: pure functions from weights to boundaries.

Boundaries of n stages are n + 1 ascending layer numbers: stage i has the layers from `boundaries[i]` to before
`boundaries[i + 1]`.
"""

from __future__ import annotations

import difflib
import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from shardwise.errors import ConfigError

METHODS = ("best", "uniform", "parameters", "profile", "type:REGEX")


@dataclass(frozen=True)
class LayerCost:
    """Properties of a layer that partitioning weighs.

    Attributes:
        name: class name of the layer.
        parameters: number of parameter elements.
        seconds: time of a forward and a backward pass, if measured.
        bytes: memory of parameters and saved activations, if measured.
    """

    name: str
    parameters: int
    seconds: float | None = None
    bytes: int | None = None


def partition(method: str | Sequence[int], stages: int, layers: Sequence[LayerCost]) -> list[int]:
    """Return the boundaries of pipeline stages.

    Args:
        method: `uniform` (number of layers), `parameters`, `profile` (measured time), `type:REGEX` (layers whose class
            name matches, in any case), `best` (`profile` if times are given, else `parameters`), or the boundaries.
        stages: number of stages: pipeline ranks x chunks of a rank.
        layers: the layers in order.

    Raises:
        ConfigError: the method is unknown, or the layers cannot be divided into `stages` stages.
    """
    if not isinstance(method, str):
        return _given(list(method), stages, len(layers))
    kind = method.lower().partition(":")[0]
    measured = all(layer.seconds is not None for layer in layers)
    if kind == "best":
        kind = "profile" if measured else "parameters"
    if kind == "uniform":
        return balance([1] * len(layers), stages)
    if kind == "parameters":
        return balance([layer.parameters for layer in layers], stages)
    if kind == "profile":
        if not measured:
            raise ConfigError("partition_method 'profile': no layer times are given. Pass a sample batch to measure")
        return balance([layer.seconds or 0.0 for layer in layers], stages)
    if kind == "type":
        return balance(_matches(method.partition(":")[2], layers), stages)
    near = difflib.get_close_matches(kind, [name.partition(":")[0] for name in METHODS], n=1)
    meant = f". Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"partition_method: expected {', '.join(METHODS)} or a list of boundaries, found {method!r}{meant}"
    )


def balance(weights: Sequence[float], parts: int) -> list[int]:
    """Return the boundaries that minimise the largest sum of a part; every part has at least one item.

    Among equal results, the sums and then the lengths of the parts have the least sum of squares. Among results that
    are still equal, later parts are larger: earlier pipeline stages keep the activations of more micro-batches.

    >>> balance([1, 1, 1, 1, 1, 1], 4)
    [0, 1, 2, 4, 6]
    """
    count = len(weights)
    if not 1 <= parts <= count:
        raise ConfigError(
            f"{count} layers cannot be divided into {parts} pipeline stages: every stage needs a layer. "
            f"Use 1 to {count} stages (pipeline ranks x chunks of a rank)"
        )
    if any(not 0 <= weight < math.inf for weight in weights):
        raise ConfigError(f"Weights of layers: expected finite numbers that are not negative, found {list(weights)}")
    sums = list(accumulate(weights, initial=0))
    return _even(sums, parts, _smallest_limit(sums, parts))


def _smallest_limit(sums: Sequence[float], parts: int) -> float:
    """Because a prefix sum minus a prefix sum rounds monotonically, bisection is exact for floats as well."""
    candidates = sorted({high - low for i, low in enumerate(sums) for high in sums[i + 1 :]})

    def fits(limit: float) -> bool:
        start = 0
        for _ in range(parts):
            start = bisect_right(sums, limit, lo=start, key=lambda end: end - sums[start]) - 1
        return start >= len(sums) - 1

    return candidates[bisect_left(candidates, True, key=fits)]


def _even(sums: Sequence[float], parts: int, limit: float) -> list[int]:
    """Minimise the squares of sums and lengths over the partitions without a part above the limit."""
    count = len(sums) - 1
    best: list[tuple[float, int] | None] = [(0, 0)] + [None] * count
    choices: list[list[int]] = []
    for part in range(1, parts + 1):
        row: list[tuple[float, int] | None] = [None] * (count + 1)
        choice = [-1] * (count + 1)
        for end in range(part, count - (parts - part) + 1):
            for start in range(end - 1, part - 2, -1):
                size = sums[end] - sums[start]
                if size > limit:
                    break
                before = best[start]
                if before is None:
                    continue
                cost = (before[0] + size * size, before[1] + (end - start) ** 2)
                known = row[end]
                if known is None or cost <= known:
                    row[end], choice[end] = cost, start
        best = row
        choices.append(choice)
    ends = [count]
    for choice in reversed(choices):
        ends.append(choice[ends[-1]])
    return ends[::-1]


def _given(boundaries: list[int], stages: int, count: int) -> list[int]:
    rising = all(low < high for low, high in pairwise(boundaries))
    if len(boundaries) != stages + 1 or boundaries[0] != 0 or boundaries[-1] != count or not rising:
        raise ConfigError(
            f"partition_method: expected {stages + 1} ascending boundaries from 0 to {count} for {stages} stages of "
            f"{count} layers, found {boundaries}"
        )
    return boundaries


def _matches(pattern: str, layers: Sequence[LayerCost]) -> list[int]:
    try:
        found = [int(bool(re.search(pattern, layer.name, re.IGNORECASE))) for layer in layers]
    except re.error as error:
        raise ConfigError(f"partition_method 'type:{pattern}': the regular expression is invalid: {error}") from error
    if not any(found):
        names = ", ".join(sorted({layer.name for layer in layers}))
        raise ConfigError(f"partition_method 'type:{pattern}': no layer's class name matches. The classes are {names}")
    return found
