"""Formatting of numbers for the report."""

from __future__ import annotations

import math

NOTHING = "-"  # placeholder of an unknown number


def in_bytes(size: float | None) -> str:
    """Format a size with three digits and its unit.

    >>> in_bytes(0), in_bytes(1536), in_bytes(100 << 20), in_bytes(None)
    ('0 B', '1.50 KiB', '100 MiB', '-')
    """
    if size is None:
        return NOTHING
    unit, divisor = byte_unit(size)
    value = size / divisor
    return (
        f"{value:.0f} {unit}"
        if unit == "B" or value >= 99.95
        else f"{value:.3g} {unit}"
        if value >= 10
        else f"{value:.2f} {unit}"
    )


def byte_unit(most: float) -> tuple[str, int]:
    """Return the unit for sizes up to `most`, and its bytes."""
    for unit, divisor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if most >= divisor:
            return unit, divisor
    return "B", 1


def in_seconds(seconds: float | None) -> str:
    """Format a duration with its unit.

    >>> in_seconds(0.00042), in_seconds(0.0123), in_seconds(4.5), in_seconds(4000), in_seconds(0)
    ('0.42 ms', '12.3 ms', '4.50 s', '1 h 07 min', '0 s')
    """
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    if seconds == 0:
        return "0 s"
    if seconds < 0.9995:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 100:
        return f"{seconds:.2f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def counted(value: float | None) -> str:
    """Format a count or a rate.

    >>> counted(1234567), counted(12.345), counted(0), counted(None)
    ('1,234,567', '12.3', '0', '-')
    """
    if value is None or not math.isfinite(value):
        return NOTHING
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def digits(value: float | None) -> str:
    """Format a measured number with four digits.

    >>> digits(2.34567), digits(6e-4), digits(float("inf"))
    ('2.346', '0.0006', 'inf')
    """
    return NOTHING if value is None else f"{value:.4g}"


def percent(part: float, whole: float) -> str:
    """Format a share.

    >>> percent(1, 8), percent(1, 0)
    ('12 %', '-')
    """
    return f"{100 * part / whole:.0f} %" if whole > 0 else NOTHING
