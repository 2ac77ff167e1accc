"""Kernels in Triton, which is optional. Imported by what has another way where it is missing."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK = 1024
"""Elements of a program: 16 bytes at a time for each of its 128 threads where a row has 16 bits an element."""


@triton.jit
def _sum_rows(out, rows, size, count, ACCUMULATE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = place < size
    total = tl.load(rows + place, mask=there).to(out.dtype.element_ty)
    for _ in tl.range(1, count, loop_unroll_factor=4):  # so that several loads are under way
        rows += size
        total += tl.load(rows + place, mask=there).to(out.dtype.element_ty)
    if ACCUMULATE:
        total += tl.load(out + place, mask=there)
    tl.store(out + place, total, mask=there)


def sum_rows(out: torch.Tensor, rows: torch.Tensor, accumulate: bool) -> None:
    """See `shardwise.device.summing.sum_rows`.

    Args:
        out: contiguous, fp32 or fp64, not empty.
        rows: contiguous, of floating point, no wider than `out`.
        accumulate: add to `out`.
    """
    # A thread of the engine's own may have another current device.
    on_device: Any = torch.cuda.device(out.device) if out.device.type == "cuda" else contextlib.nullcontext()
    with on_device:
        grid = (triton.cdiv(out.numel(), _BLOCK),)
        _sum_rows[grid](out, rows, out.numel(), rows.shape[0], accumulate, _BLOCK)
