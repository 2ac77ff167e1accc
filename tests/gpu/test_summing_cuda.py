"""The kernel that adds rows in order on a CUDA device: the bits of the loop, on any device and stream."""

from __future__ import annotations

import pytest
import torch

from shardwise.device import summing
from tests.device.test_summing import BF16, WIDE, terms
from tests.gpu.standin import needs_device


@needs_device
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("of", "into"), WIDE)
def test_the_kernel_has_the_bits_of_the_loop(of: torch.dtype, into: torch.dtype, accumulate: bool) -> None:
    pytest.importorskip("triton")
    for count in (1, 2, 3, 8, 64):
        for size in (1, 7, 1024, 1025, 1 << 20):
            out, rows = (tensor.cuda() for tensor in terms(size, count, of, into))
            expected = out.clone()
            summing._sum_in_loop(expected, rows, accumulate)
            assert summing._fits(out, rows)
            assert summing._kernel.launch(out, rows, accumulate)
            assert torch.equal(out, expected), (count, size)


def test_tiny_and_infinite_values() -> None:
    smallest = 2.0**-133  # of bf16
    values = [float("inf"), float("nan"), smallest, -smallest, -0.0, 3e38]
    rows = torch.tensor([values, values]).to(BF16).cuda()
    out, expected = torch.zeros(6, device="cuda"), torch.zeros(6, device="cuda")
    summing.sum_rows(out, rows, accumulate=False)
    summing._sum_in_loop(expected, rows, False)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(out.signbit()[2:], expected.signbit()[2:])


def test_it_runs_behind_what_the_stream_has_been_given() -> None:
    stream = torch.cuda.Stream()
    rows, out = torch.zeros(8, 1 << 16, dtype=BF16, device="cuda"), torch.zeros(1 << 16, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(5_000_000)
        rows.fill_(1)
        summing.sum_rows(out, rows, accumulate=True)
    stream.synchronize()
    assert bool((out == 8).all())
