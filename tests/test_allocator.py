"""The C library's allocator, set by the import in whatever process there is."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from shardwise import _allocator
from shardwise._allocator import set_allocator
from tests.harness import thorough

MIB = 1 << 20
PROGRAM = """
{before}
import shardwise
import torch

def resident():
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith("VmRSS")).split()[1]) << 10

del [torch.ones(24 << 20, dtype=torch.uint8)][0]  # from now on glibc would keep what is smaller in its heap
before = resident()
large, small = [], []
for _ in range(32):
    large.append(torch.ones(8 << 20, dtype=torch.uint8))
    small.append(torch.ones(64 << 10, dtype=torch.uint8))  # lives on, between blocks that do not; no hole has room
aligned = all(tensor.data_ptr() % 4096 == 0 for tensor in large)
del large
print(resident() - before, int(aligned))
"""
SETTABLE = pytest.mark.skipif(
    not (_allocator._on_glibc() and _allocator._has_huge_pages()), reason="another C library, or no huge pages"
)


def after_freeing(before: str = "", **env: str) -> tuple[int, bool]:
    """What a new process keeps of 256 MiB of tensors that it has freed, and whether torch asks for huge pages."""
    known = (*_allocator._OTHER_WISHES, _allocator.VARIABLE)
    others = {name: value for name, value in os.environ.items() if name not in known}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(before=before)],
        capture_output=True,
        text=True,
        check=True,
        env={**others, **env},
    )
    left, aligned = done.stdout.split()
    return int(left), bool(int(aligned))


@SETTABLE
@pytest.mark.parametrize("before", [thorough(""), "import torch"])
def test_freed_memory_returns_to_the_system_under_any_launcher(before: str) -> None:
    left, aligned = after_freeing(before)
    assert left < 16 * MIB
    assert aligned


@SETTABLE
@pytest.mark.parametrize(
    ("before", "env"),
    [("import torch; torch.ones(1)", {}), thorough("", {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=7"})],
)
def test_a_process_that_cannot_or_shall_not_is_left_as_it_is(before: str, env: dict[str, str]) -> None:
    left, aligned = after_freeing(before, **env)
    assert left > 128 * MIB
    assert not aligned


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
