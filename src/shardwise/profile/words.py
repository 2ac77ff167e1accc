"""Formatting of numbers with units, under DeepSpeed's names."""

from __future__ import annotations

from shardwise.units import format_scaled


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """Format a number with a unit "T", "G", "M", "K", "", "m" or "u" (else a KeyError); None: the best fit."""
    return format_scaled(num, units, precision)


def _of(what: str, num: float, units: str | None, precision: int) -> str:
    return format_scaled(num, None if units is None else units.removesuffix(what), precision) + what


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
    """Format a number of parameters, as "25.56 M", or "1.23 B" for billions.

    >>> params_to_string(7.8e9), params_to_string(7.8e9, "B", 0), params_to_string(12)
    ('7.80 B', '8 B', '12.00')
    """
    units = None if units is None else units.replace("B", "G")
    return format_scaled(params_num, units, precision).rstrip().replace("G", "B")


def duration_to_string(duration: float, units: str | None = None, precision: int = 2) -> str:
    """Format seconds, as "1.23 ms"."""
    return _of("s", duration, units if units is not None or duration < 1e3 else "", precision)
