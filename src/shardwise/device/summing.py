"""Summation of rows in a fixed order."""

from __future__ import annotations

import torch

CHUNK = 1 << 18
"""Elements that a CPU adds at a time: smaller chunks cost calls, larger ones leave the cache."""


def sum_rows(out: torch.Tensor, rows: torch.Tensor, *, accumulate: bool) -> None:
    """Sum 2-D `rows` from first to last into (or add to) 1-D `out`, in its dtype; may overwrite the first row."""
    size = CHUNK if out.device.type == "cpu" else max(1, out.numel())
    for target, *parts in zip(out.split(size), *(row.split(size) for row in rows.unbind()), strict=True):
        first, *others = parts
        if not accumulate and others and first.dtype == out.dtype:
            total = torch.add(first, others.pop(0), out=target)
        elif not accumulate:
            total = target.copy_(first)
        else:
            total = first.to(out.dtype)
        for part in others:
            total.add_(part)
        if accumulate:
            target.add_(total)
