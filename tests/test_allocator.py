"""The C library's allocator, set by the import in whatever process there is."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from shardwise import _allocator
from shardwise._allocator import set_allocator

MIB = 1 << 20
PROGRAM = """
import gc, sys
{before}
import shardwise
import torch

def resident():
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith("VmRSS")).split()[1]) << 10

# Blocks of 8 MiB with a small tensor made after each, which lives on.
torch.ones(1)
before = resident()
large, small = [], []
for _ in range(32):
    large.append(torch.ones(8 << 20, dtype=torch.uint8))
    small.append(torch.ones(1000, dtype=torch.uint8))
full = resident()
del large
print(full - before, resident() - before)
"""


def after_freeing(before: str = "", **env: str) -> tuple[int, int]:
    """Bytes that a new process holds, with 256 MiB of tensors and when they are freed."""
    others = {
        name: value
        for name, value in os.environ.items()
        if name not in (*_allocator._OTHER_WISHES, _allocator.VARIABLE)
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(before=before)],
        capture_output=True,
        text=True,
        check=True,
        env={**others, **env},
    )
    full, left = done.stdout.split()
    return int(full), int(left)


@pytest.mark.skipif(not _allocator._on_glibc(), reason="another C library")
@pytest.mark.skipif(not _allocator._has_huge_pages(), reason="the system has no huge pages")
def test_freed_memory_returns_to_the_system_under_any_launcher() -> None:
    full, left = after_freeing()
    assert full > 250 * MIB
    assert left < 16 * MIB


@pytest.mark.parametrize(
    ("huge_pages", "glibc", "env"),
    [
        ("always madvise [never]", "glibc 2.36", {}),
        (None, "glibc 2.36", {}),
        ("always [madvise] never", "musl", {}),
        ("always [madvise] never", None, {}),
        ("always [madvise] never", "glibc 2.36", {"LD_PRELOAD": "libjemalloc.so"}),
        ("always [madvise] never", "glibc 2.36", {"MALLOC_ARENA_MAX": "2"}),
        ("always [madvise] never", "glibc 2.36", {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}),
        ("always [madvise] never", "glibc 2.36", {"THP_MEM_ALLOC_ENABLE": "0"}),
    ],
)
def test_nothing_is_set_where_it_cannot_be_or_the_user_has_chosen(
    huge_pages: str | None, glibc: str | None, env: dict[str, str], tmp_path, monkeypatch
) -> None:
    path = tmp_path / "enabled"
    if huge_pages is not None:
        path.write_text(huge_pages)
    monkeypatch.setattr(_allocator, "_HUGE_PAGES", path)
    monkeypatch.setattr(os, "confstr", lambda _: glibc)
    given = dict(env)
    assert not set_allocator(given)
    assert given == env


def test_nothing_is_set_after_the_first_tensor(monkeypatch) -> None:
    monkeypatch.setattr(_allocator, "_torch_asks_for_huge_pages", lambda: False)
    env: dict[str, str] = {}
    assert not set_allocator(env)
    assert env == {}
