"""Settings of the C library's allocator for processes that train on the CPU.

glibc keeps large freed blocks in its heap, where long-lived small tensors fragment them: the next large buffer then
needs new memory. Blocks above a fixed threshold can be separate mappings, which return to the system whole. Each new
use then costs a page fault for every 4 KiB, or for every 2 MiB if torch requests huge pages. torch reads its variable
when it makes the first tensor; glibc's can be set at any time. Importing shardwise sets both, under every launcher.
This module must not import torch.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

THRESHOLD = 4 << 20  # bytes from which a block is a separate mapping
VARIABLE = "THP_MEM_ALLOC_ENABLE"  # makes torch request huge pages for tensors from 2 MiB on

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_M_MMAP_THRESHOLD = -3
_PAGE = 4096
_TRIED = 3
_OTHER_WISHES = (
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
    "MALLOC_ARENA_MAX",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_TOP_PAD_",
)


def set_allocator(env: MutableMapping[str, str] = os.environ) -> bool:
    """Set this process's allocator; return True if done.

    Nothing changes if the user has chosen, if the system lacks huge pages or glibc, or if a tensor exists already,
    because torch then requests no huge pages any more.
    """
    chosen = any(name in env for name in _OTHER_WISHES) or env.get(VARIABLE, "1") != "1"
    if chosen or not _on_glibc() or not _has_huge_pages():
        return False
    before = env.get(VARIABLE)
    env[VARIABLE] = "1"
    if "torch" in sys.modules and not _torch_asks_for_huge_pages():
        if before is None:
            del env[VARIABLE]
        return False
    return bool(ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, THRESHOLD))


def _torch_asks_for_huge_pages() -> bool:
    """Return True if torch has read its variable, by the alignment of large tensors."""
    import torch

    tensors = [torch.empty(THRESHOLD, dtype=torch.uint8, device="cpu") for _ in range(_TRIED)]
    return all(tensor.data_ptr() % _PAGE == 0 for tensor in tensors)


def _on_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc ")
    except (ValueError, OSError, AttributeError):
        return False  # another C library


def _has_huge_pages() -> bool:
    try:
        return "[never]" not in _HUGE_PAGES.read_text()
    except OSError:
        return False
