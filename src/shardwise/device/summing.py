"""Sums of rows in order."""

from __future__ import annotations

import torch


def sum_rows(out: torch.Tensor, rows: torch.Tensor, *, accumulate: bool) -> None:
    """Set (or add to) `out` the sum of the rows, formed from the first to the last and in the dtype of `out`.

    Args:
        out: 1-D, of S elements.
        rows: 2-D, of S elements each; they do not overlap `out`.
        accumulate: add to `out` instead of replacing it.
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
