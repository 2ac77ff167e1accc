"""Aggregation of the rows of all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Any

from .reading import Run
from .rows import Held, Row, Sums, add, plus

MOST_POINTS = 600  # maximum points of a line; more are indistinguishable and make the page large


@dataclass(frozen=True)
class Point:
    """Consecutive steps of all ranks."""

    step: int
    steps: int
    ranks: dict[int, Row]

    def mean(self, name: str) -> float | None:
        """Return the mean of a row attribute over ranks with a known value."""
        known = [value for row in self.ranks.values() if (value := getattr(row, name)) is not None]
        return sum(known) / len(known) if known else None

    def most(self, name: str) -> float | None:
        """Return the maximum of a row attribute; NaN if any value is NaN."""
        known = [value for row in self.ranks.values() if (value := getattr(row, name)) is not None]
        return next((value for value in known if math.isnan(value)), max(known)) if known else None

    @property
    def seconds(self) -> float | None:
        """Seconds of a step on the slowest rank."""
        known = [row.seconds / row.steps for row in self.ranks.values() if row.seconds is not None]
        return max(known) if known else None

    def phase(self, name: str) -> float:
        """Return the mean seconds of a part of a step over ranks."""
        return sum(row.phases.get(name, 0.0) / row.steps for row in self.ranks.values()) / len(self.ranks)


@dataclass
class Rank:
    """Summary of one rank."""

    number: int
    whole: Row  # all its rows, merged
    steady: Row  # all rows but the first, which includes one-time work; all if there is only one
    host: str | None
    last: int = 0  # number of points at which the rank waited least of all, because the others waited for it

    @property
    def step_seconds(self) -> float | None:
        """Mean seconds of a step."""
        return None if self.steady.seconds is None else self.steady.seconds / self.steady.steps

    @property
    def waited(self) -> float:
        """Mean seconds of a step spent waiting for collectives."""
        return self.steady.waited / self.steady.steps


@dataclass
class Summary:
    """Aggregated numbers of a run; `points` are all steps, merged in long runs."""

    run: Run
    points: list[Point] = field(init=False)

    def __post_init__(self) -> None:
        self.points = points_of(self.run.rows)

    @cached_property
    def ranks(self) -> list[Rank]:
        """All ranks with steps."""
        found = []
        for number, rows in sorted(self.run.rows.items()):
            whole = reduce(Row.then, rows)
            steady = reduce(Row.then, rows[1:]) if len(rows) > 1 else whole
            found.append(Rank(number, whole, steady, self.host(number)))
        by_number = {rank.number: rank for rank in found}
        for point in self.points[1:]:
            if len(point.ranks) > 1:
                by_number[min(point.ranks, key=lambda number: point.ranks[number].waited)].last += 1
        return found

    def host(self, rank: int) -> str | None:
        """Return the name of a rank's machine, or None."""
        ranks = self.run.about.get("ranks")
        if isinstance(ranks, list) and rank < len(ranks) and isinstance(ranks[rank], dict):
            host = ranks[rank].get("host")
            return host if isinstance(host, str) else None
        return None

    @cached_property
    def largest(self) -> Rank | None:
        """The rank with the highest device memory."""
        held = [rank for rank in self.ranks if "device" in rank.whole.memory]
        return max(held, key=lambda rank: rank.whole.memory["device"].peak) if held else None

    @cached_property
    def communication(self) -> dict[str, tuple[float, ...]]:
        """Count, bytes, bytes sent and seconds waited by operation, summed over ranks."""
        found: dict[str, tuple[float, ...]] = {}
        for rank in self.ranks:
            for op, values in rank.whole.communication.items():
                found[op] = plus(found[op], values) if op in found else values
        return found

    @cached_property
    def units(self) -> Sums:
        """Seconds waited by unit, summed over ranks without the first row of each, longest first."""
        found: Sums = {}
        for rank in self.ranks:
            found = add(found, rank.steady.units)
        return dict(sorted(found.items(), key=lambda item: item[1], reverse=True))

    @property
    def steps(self) -> int:
        """Number of the last step."""
        return max((rank.whole.step for rank in self.ranks), default=0)

    @property
    def step_seconds(self) -> float | None:
        """Mean seconds of a step on the slowest rank."""
        return max((rank.step_seconds for rank in self.ranks if rank.step_seconds is not None), default=None)

    def rate(self, what: str) -> float | None:
        """Return "samples" or "tokens" of all ranks a second; None: unknown."""
        for rank in self.ranks:
            number, seconds = getattr(rank.steady, what), rank.steady.seconds
            if number and seconds:
                return float(number / seconds)
        return None

    def planned(self, of: str) -> Sums:
        """Return planned bytes by name; `of`: "tiers", or "categories" of the device."""
        return numbers_in(self.run.about.get("plan"), of)

    def limits(self) -> Sums:
        """Return limits by tier."""
        return numbers_in(self.run.about, "limits")

    @property
    def last_loss(self) -> float | None:
        """Mean loss of the last tenth of the steps."""
        known = [loss for point in self.points if (loss := point.mean("loss")) is not None]
        last = known[-max(1, len(known) // 10) :]
        return sum(last) / len(last) if last else None


def numbers_in(value: Any, name: str) -> Sums:
    """Return the numbers of a nested object; empty if invalid."""
    inner = value.get(name) if isinstance(value, dict) else None
    if not isinstance(inner, dict):
        return {}
    return {
        str(key): float(number)
        for key, number in inner.items()
        if isinstance(number, int | float) and not isinstance(number, bool) and 0 <= number < 1e300
    }


def points_of(rows: dict[int, list[Row]], most: int = MOST_POINTS) -> list[Point]:
    """Return the steps of all ranks as at most `most` points, merging steps if needed.

    >>> points = points_of({0: [Row(n, n, 1, 0.0, loss=n) for n in range(1, 7)]}, most=3)
    >>> [(point.step, point.steps, point.mean("loss")) for point in points]
    [(2, 2, 1.5), (4, 2, 3.5), (6, 2, 5.5)]
    """
    if not rows:
        return []
    first = min(own[0].step for own in rows.values())
    last = max(own[-1].step for own in rows.values())
    width = max(1, math.ceil((last - first + 1) / most))
    found: dict[int, dict[int, Row]] = {}
    for rank, own in sorted(rows.items()):
        for row in own:
            ranks = found.setdefault((row.step - first) // width, {})
            ranks[rank] = ranks[rank].then(row) if rank in ranks else row
    return [
        Point(max(row.step for row in ranks.values()), max(row.steps for row in ranks.values()), ranks)
        for _, ranks in sorted(found.items())
    ]


def smoothed(values: Sequence[float | None], over: int) -> list[float | None]:
    """Return the moving average of finite values over `over` points.

    >>> smoothed([1.0, 3.0, None, 5.0], 2)
    [1.0, 2.0, 3.0, 5.0]
    """
    found: list[float | None] = []
    for place in range(len(values)):
        near = [
            value
            for value in values[max(0, place - over + 1) : place + 1]
            if value is not None and math.isfinite(value)
        ]
        found.append(sum(near) / len(near) if near else None)
    return found


def names_by_size(held: Iterable[Held]) -> list[str]:
    """Return the memory categories, largest first."""
    most: Sums = {}
    for each in held:
        for name, size in each.at_peak.items():
            most[name] = max(most.get(name, 0.0), size)
    return sorted(most, key=lambda name: most[name], reverse=True)
