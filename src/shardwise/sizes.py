"""Sizes as people write them: bytes, or a number with a unit."""

from __future__ import annotations

import re

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)


def size_in_bytes(written: str) -> int:
    """Return the bytes of a size such as "2GiB", "1.5 TB" or "4096".

    Raises:
        ValueError: it is not one.

    >>> size_in_bytes("2GiB"), size_in_bytes("1.5 TB"), size_in_bytes("4096")
    (2147483648, 1500000000000, 4096)
    """
    found = _SIZE.fullmatch(written.strip())
    if found is None:
        raise ValueError(f'expected bytes or a size such as "2GiB" or "500 MB", found {written!r}')
    return int(float(found[1]) * _UNITS[(found[2] or "").lower()])
