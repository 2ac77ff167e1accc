"""Sums of rows in order, against plain additions."""

from __future__ import annotations

import pytest
import torch

from shardwise.comm.native import sum_rows

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
WIDE = [(BF16, FP32), (FP16, FP32), (FP32, FP32), (FP64, FP64), (FP32, FP64)]
DTYPES = [*WIDE, (BF16, BF16), (FP16, FP16), (FP32, BF16), (FP64, FP32)]


def terms(size: int, count: int, of: torch.dtype, into: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """What is added to, and rows whose sum depends on the order."""
    random = torch.Generator().manual_seed(size * 100 + count)
    scales = 10.0 ** torch.randint(-3, 4, (count, 1), generator=random)
    rows = torch.randn(count, size, generator=random) * scales
    return torch.randn(size, generator=random).to(into), rows.to(of)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("of", "into"), DTYPES)
@pytest.mark.parametrize("count", [1, 2, 7])
def test_rows_are_added_in_order_in_the_dtype_of_the_sum(
    of: torch.dtype, into: torch.dtype, count: int, accumulate: bool
) -> None:
    out, rows = terms(33, count, of, into)
    total = rows[0].to(into)
    for row in rows[1:]:
        total = (total + row).to(into)
    expected = out + total if accumulate else total
    sum_rows(out, rows, accumulate=accumulate)
    assert torch.equal(out, expected)
