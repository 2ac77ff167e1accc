"""Sizes as people write them: bytes, or a number with a unit. All options, keys and arguments use this parser."""

from __future__ import annotations

import re
from fractions import Fraction

LARGEST = (1 << 63) - 1  # maximum size, which fits the integers of tensors and of file systems

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"([0-9]{1,40}(?:\.[0-9]{1,40})?)\s*([kmgt]?)(ib|i|b)?", re.IGNORECASE)


def size_in_bytes(written: str) -> int:
    """Return the bytes of a size such as "2GiB", "1.5 TB", "512M" or "4096".

    KB, MB, GB and TB are powers of 1000; KiB, MiB, ..., and letters without a B (K, M, G, ...), are powers of 1024.
    Raises a ValueError for other texts, or a size above `LARGEST`.

    >>> size_in_bytes("2GiB"), size_in_bytes("1.5 TB"), size_in_bytes("512M"), size_in_bytes("9007199254740993")
    (2147483648, 1500000000000, 536870912, 9007199254740993)
    """
    found = _SIZE.fullmatch(written.strip())
    if found is None or (not found[2] and (found[3] or "").lower().startswith("i")):
        raise ValueError(f'expected bytes or a size such as "2GiB", "500 MB" or "4G" (4 GiB), found {written!r:.100}')
    base = 1000 if (found[3] or "").lower() == "b" else 1024
    size = int(Fraction(found[1]) * base ** _POWERS[found[2].lower()])
    if size > LARGEST:
        raise ValueError(f"expected a size of at most {LARGEST} bytes, found {written!r:.100}")
    return size
