"""Sizes, durations, rates and counts as text: the only parser of sizes, and the only formatters.

Sizes are written in binary units (KiB, MiB, ...), transfer rates in decimal ones (GB/s), as torch and NCCL write them.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

UNKNOWN = "-"
LARGEST = (1 << 63) - 1  # maximum size, which fits the integers of tensors and of file systems

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"([0-9]{1,40}(?:\.[0-9]{1,40})?)\s*([kmgt]?)(ib|i|b)?", re.IGNORECASE)
_PREFIXES = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


def parse_size(written: int | str) -> int:
    """Return the bytes of an integer, or of a size such as "2GiB", "1.5 TB", "512M" or "4096".

    KB, MB, GB and TB are powers of 1000; KiB, MiB, ..., and letters without a B (K, M, G, ...), are powers of 1024.
    Raises ValueError for other texts, negative numbers, and sizes above `LARGEST`.

    >>> parse_size("2GiB"), parse_size("1.5 TB"), parse_size("512M"), parse_size("9007199254740993")
    (2147483648, 1500000000000, 536870912, 9007199254740993)
    """
    found = None if isinstance(written, bool) else _SIZE.fullmatch(str(written).strip())
    if found is None or (not found[2] and (found[3] or "").lower().startswith("i")):
        raise ValueError(f'expected bytes or a size such as "2GiB", "500 MB" or "4G" (4 GiB), found {written!r:.100}')
    base = 1000 if (found[3] or "").lower() == "b" else 1024
    size = int(Fraction(found[1]) * base ** _POWERS[found[2].lower()])
    if size > LARGEST:
        raise ValueError(f"expected a size of at most {LARGEST} bytes, found {written!r:.100}")
    return size


def size_unit(most: float) -> tuple[str, int]:
    """Return the unit for sizes up to `most`, and its bytes."""
    for unit, divisor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if most >= divisor:
            return unit, divisor
    return "B", 1


def format_size(size: float | None) -> str:
    """Format bytes.

    >>> format_size(999), format_size(1536), format_size(100 << 20), format_size(None)
    ('999 B', '1.50 KiB', '100.00 MiB', '-')
    """
    if size is None:
        return UNKNOWN
    unit, divisor = size_unit(abs(size))
    return f"{size:.0f} B" if unit == "B" else f"{size / divisor:.2f} {unit}"


def format_rate(bytes_per_second: float) -> str:
    """Format a transfer rate.

    >>> format_rate(1.25e10), format_rate(300)
    ('12.50 GB/s', '300.00 B/s')
    """
    return f"{format_scaled(bytes_per_second)}B/s"


def format_duration(seconds: float | None) -> str:
    """Format seconds with their unit.

    >>> format_duration(0.00042), format_duration(0.0123), format_duration(4.5), format_duration(4000)
    ('0.42 ms', '12.3 ms', '4.5 s', '1 h 07 min')
    """
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 0.9995:
        return f"{1e3 * seconds:.3g} ms" if seconds else "0 s"
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def format_count(value: float | None) -> str:
    """Format a count, or a number of items per second.

    >>> format_count(1234567), format_count(12.345), format_count(0), format_count(None)
    ('1,234,567', '12.3', '0', '-')
    """
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def format_percent(part: float, whole: float) -> str:
    """Format a share.

    >>> format_percent(1, 8), format_percent(1, 0)
    ('12 %', '-')
    """
    return f"{100 * part / whole:.0f} %" if whole > 0 else UNKNOWN


def format_scaled(value: float, prefix: str | None = None, precision: int = 2) -> str:
    """Format a number with a decimal prefix "T", "G", "M", "K", "", "m" or "u" (else a KeyError); None: the best fit.

    >>> format_scaled(25_557_032), format_scaled(1234.5, "M", 4)
    ('25.56 M', '0.0012 M')
    """
    if prefix is None:
        fitting = (name for name, size in _PREFIXES.items() if abs(value) >= size)
        prefix = next(fitting, "u") if value else ""
    return f"{value / _PREFIXES[prefix]:.{precision}f} {prefix}"
