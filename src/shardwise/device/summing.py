"""Summation of rows in a fixed order."""

from __future__ import annotations

import torch


def sum_rows(out: torch.Tensor, rows: torch.Tensor, *, accumulate: bool) -> None:
    """Sum 2-D `rows` from first to last into the 1-D `out`, in the dtype of `out`; `rows` must not overlap `out`.

    `accumulate` adds to `out` instead of replacing it.
    """
    first, *others = rows.unbind()
    if not accumulate:
        total = out.copy_(first)
    elif others or first.dtype != out.dtype:
        total = first.to(out.dtype, copy=True)
    else:
        total = first
    for row in others:
        total.add_(row)
    if accumulate:
        out.add_(total)
