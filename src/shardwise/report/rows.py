"""Rows of the run log, and merging of consecutive rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Sums = dict[str, float]


def number(value: Any) -> float | None:
    """Return a number of the run log, or None for other values.

    >>> number(3), number("inf"), number("3"), number(True)
    (3.0, inf, None, None)
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return None
    return float(value) if value in ("inf", "-inf", "nan") else None


def _numbers(value: Any) -> Sums:
    if not isinstance(value, Mapping):
        return {}
    found = ((str(name), number(inner)) for name, inner in value.items())
    return {name: inner for name, inner in found if inner is not None and math.isfinite(inner)}


def _lists(value: Any, length: int) -> dict[str, tuple[float, ...]]:
    found = {}
    for name, inner in value.items() if isinstance(value, Mapping) else ():
        numbers = [number(one) for one in inner] if isinstance(inner, list) and len(inner) == length else [None]
        if all(one is not None and math.isfinite(one) for one in numbers):
            found[str(name)] = tuple(one for one in numbers if one is not None)
    return found


def add(first: Sums, second: Mapping[str, float]) -> Sums:
    """Return the sums by name."""
    return {
        name: first.get(name, 0.0) + second.get(name, 0.0) for name in (*first, *(n for n in second if n not in first))
    }


def highest(first: Sums, second: Mapping[str, float]) -> Sums:
    """Return the maxima by name."""
    return {
        name: max(first.get(name, 0.0), second.get(name, 0.0))
        for name in (*first, *(n for n in second if n not in first))
    }


@dataclass(frozen=True)
class Held:
    """Memory of one tier, in bytes: `live` at the end, `at_peak` by category at the peak, `peaks` of each category."""

    live: float
    peak: float
    at_peak: Sums = field(default_factory=dict)
    peaks: Sums = field(default_factory=dict)

    def then(self, other: Held) -> Held:
        """Merge with a later value."""
        higher = other if other.peak > self.peak else self
        return Held(other.live, higher.peak, higher.at_peak, highest(self.peaks, other.peaks))


@dataclass(frozen=True)
class Row:
    """One rank's measurements of consecutive steps; None: unknown."""

    first: int
    step: int
    steps: int
    time: float  # at the end, seconds since 1970
    loss: float | None = None  # mean
    lr: float | None = None  # of the first group at the end
    grad_norm: float | None = None  # maximum
    loss_scale: float | None = None  # at the end
    skipped: int = 0
    seconds: float | None = None  # of all steps
    samples: float = 0.0  # of all ranks
    tokens: float = 0.0  # of all ranks; 0: unknown
    phases: Sums = field(default_factory=dict)
    memory: dict[str, Held] = field(default_factory=dict)
    resident: float = 0.0  # bytes of the process
    # operation -> count, bytes, bytes sent, seconds waited
    communication: dict[str, tuple[float, ...]] = field(default_factory=dict)
    units: Sums = field(default_factory=dict)  # seconds waited by unit
    moved: dict[str, tuple[float, ...]] = field(default_factory=dict)  # bytes read and written by tier

    @property
    def waited(self) -> float:
        """Seconds waited for collectives."""
        return sum(values[3] for values in self.communication.values())

    @staticmethod
    def of(found: Any) -> Row | None:
        """Return the row of a parsed object, or None if invalid."""
        if not isinstance(found, Mapping) or isinstance(found.get("step"), bool):
            return None
        step, steps = found.get("step"), found.get("steps", 1)
        if not isinstance(step, int) or not 0 <= step < 1 << 53:
            return None
        steps = steps if isinstance(steps, int) and 1 <= steps <= max(step, 1) else 1
        skipped = found.get("skipped")
        if not isinstance(skipped, int) or not 0 <= skipped <= steps:
            skipped = int(found.get("applied") is False)
        memory = {}
        for tier, held in found["memory"].items() if isinstance(found.get("memory"), Mapping) else ():
            if isinstance(held, Mapping):
                live, peak = (_finite(held.get(name)) or 0.0 for name in ("live", "peak"))
                memory[str(tier)] = Held(live, peak, _numbers(held.get("at_peak")), _numbers(held.get("peaks")))
        seconds = _finite(found.get("seconds"))
        rates = found.get("lr")
        return Row(
            first=step - steps + 1,
            step=step,
            steps=steps,
            time=_finite(found.get("time")) or 0.0,
            loss=number(found.get("loss")),
            lr=_finite(rates[0]) if isinstance(rates, list) and rates else None,
            grad_norm=number(found.get("grad_norm")),
            loss_scale=_finite(found.get("loss_scale")),
            skipped=skipped,
            seconds=seconds,
            samples=(_finite(found.get("samples_per_second")) or 0.0) * (seconds or 0.0),
            tokens=_finite(found.get("tokens")) or 0.0,
            phases=_numbers(found.get("phases")),
            memory=memory,
            resident=_finite(found.get("resident")) or 0.0,
            communication=_lists(found.get("communication"), 4),
            units=_numbers(found.get("units")),
            moved=_lists(found.get("moved"), 2),
        )

    def then(self, other: Row) -> Row:
        """Merge with a later row."""
        return Row(
            first=self.first,
            step=other.step,
            steps=self.steps + other.steps,
            time=other.time,
            loss=_mean(self, other, "loss"),
            lr=other.lr,
            grad_norm=_worst(self.grad_norm, other.grad_norm),
            loss_scale=other.loss_scale,
            skipped=self.skipped + other.skipped,
            seconds=_mean(self, other, "seconds", sums=True),
            samples=self.samples + other.samples,
            tokens=self.tokens + other.tokens,
            phases=add(self.phases, other.phases),
            memory=_joined(self.memory, other.memory, Held.then),
            resident=max(self.resident, other.resident),
            communication=_joined(self.communication, other.communication, plus),
            units=add(self.units, other.units),
            moved=_joined(self.moved, other.moved, plus),
        )


def plus(first: tuple[float, ...], second: tuple[float, ...]) -> tuple[float, ...]:
    """Return the elementwise sums."""
    return tuple(one + other for one, other in zip(first, second, strict=True))


def _joined(first: dict[str, Any], second: dict[str, Any], join: Any) -> dict[str, Any]:
    return {**first, **{name: join(first[name], value) if name in first else value for name, value in second.items()}}


def _finite(value: Any) -> float | None:
    found = number(value)
    return found if found is not None and math.isfinite(found) else None


def _mean(one: Row, other: Row, name: str, sums: bool = False) -> float | None:
    """Return the mean over steps with known values; with `sums`, the sum extrapolated to all steps."""
    known = [(value, row.steps) for row in (one, other) if (value := getattr(row, name)) is not None]
    if not known:
        return None
    if sums:
        return float(sum(value for value, _ in known) * (one.steps + other.steps) / sum(steps for _, steps in known))
    return float(sum(value * steps for value, steps in known) / sum(steps for _, steps in known))


def _worst(one: float | None, other: float | None) -> float | None:
    known = [value for value in (one, other) if value is not None]
    return next((value for value in known if math.isnan(value)), max(known)) if known else None
