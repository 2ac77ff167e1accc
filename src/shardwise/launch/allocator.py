"""Settings of the C library's allocator for processes that train on the CPU.

glibc keeps large freed blocks in its heap, where small tensors that live longer break them up: the next large buffer
then needs new memory, although enough is free. Blocks above a fixed threshold can be mappings of their own, which
go back to the system whole. That would cost a page fault for every 4 KiB at each new use; with huge pages it is one for
every 2 MiB. Both settings are read when a process starts, so only its launcher can choose them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "GLIBC_TUNABLES"
SETTINGS = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4194304"

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_SINCE = (2, 35)
_OTHER_WISHES = (
    "LD_PRELOAD",
    "MALLOC_ARENA_MAX",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_TOP_PAD_",
)


def allocator_settings(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variable to set; nothing where the user has chosen, or the system lacks huge pages or this glibc.

    Example:
        >>> allocator_settings({"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"})
        {}
    """
    chosen = VARIABLE in env or any(env.get(name) for name in _OTHER_WISHES)
    return {} if chosen or _glibc() < _SINCE or not _has_huge_pages() else {VARIABLE: SETTINGS}


def _glibc() -> tuple[int, ...]:
    try:
        name, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()
        return tuple(int(part) for part in version.split(".")) if name == "glibc" else ()
    except (ValueError, OSError):
        return ()  # another C library


def _has_huge_pages() -> bool:
    try:
        return "[never]" not in _HUGE_PAGES.read_text()
    except OSError:
        return False
