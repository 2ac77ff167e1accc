"""Formatting of numbers with units."""

from __future__ import annotations

_UNITS = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """Format a number with a unit "T", "G", "M", "K", "", "m" or "u" (else a KeyError); None: the best fit.

    >>> number_to_string(25_557_032), number_to_string(1234.5, "M", 4)
    ('25.56 M', '0.0012 M')
    """
    if units is None:
        fitting = (unit for unit, size in _UNITS.items() if abs(num) >= size)
        units = next(fitting, "u") if num else ""
    return f"{num / _UNITS[units]:.{precision}f} {units}"


def _of(what: str, num: float, units: str | None, precision: int) -> str:
    units = units.removesuffix(what) if units is not None else None
    return number_to_string(num, units, precision) + what


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    """Format FLOPs, as "1.23 GFLOPS"."""
    return _of("FLOPS", flops, units, precision)


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    """Format multiply-accumulate operations, as "1.23 GMACs"."""
    return _of("MACs", macs, units, precision)


def bytes_to_string(b: float, units: str | None = None, precision: int = 2) -> str:
    """Format bytes in decimal units, as "1.23 GB"."""
    return _of("B", b, units, precision)


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    """Format a number of parameters, as "25.56 M"."""
    return number_to_string(params_num, units, precision).rstrip()


def duration_to_string(duration: float, units: str | None = None, precision: int = 2) -> str:
    """Format seconds, as "1.23 ms"."""
    return _of("s", duration, units if units is not None or duration < 1e3 else "", precision)
