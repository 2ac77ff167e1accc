"""Sums of rows in order: the loop against plain additions, and the kernel against the loop, bit by bit."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

from shardwise.device import summing
from tests.device.interpreter import interpret

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
    summing.sum_rows(out, rows, accumulate=accumulate)
    assert torch.equal(out, expected)


# -- the kernel --------------------------------------------------------------------------------------------------------


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have the kernel interpreted for the CPU; the list gets a word whenever the loop is used instead."""
    interpret(monkeypatch, "shardwise.device.tritonkernels")
    monkeypatch.setattr(summing, "_compiles_for", lambda device: True)
    monkeypatch.setattr(summing, "_kernel", summing._Kernel())
    return watched(monkeypatch)


def watched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    loop = summing._sum_in_loop

    def watch(out: torch.Tensor, rows: torch.Tensor, accumulate: bool) -> None:
        seen.append("loop")
        loop(out, rows, accumulate)

    monkeypatch.setattr(summing, "_sum_in_loop", watch)
    return seen


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("of", "into"), WIDE)
def test_the_kernel_has_the_bits_of_the_loop(
    interpreted: list[str], of: torch.dtype, into: torch.dtype, accumulate: bool
) -> None:
    for count in (1, 2, 3, 8, 64):
        for size in (1, 7, 1024, 1025, 2 * 1024 + 3):
            out, rows = terms(size, count, of, into)
            expected = out.clone()
            summing._sum_in_loop(expected, rows, accumulate)
            interpreted.clear()
            summing.sum_rows(out, rows, accumulate=accumulate)
            assert not interpreted
            assert torch.equal(out, expected), (count, size)


def test_values_that_are_not_finite(interpreted: list[str]) -> None:
    rows = torch.tensor([[float("inf"), float("nan"), -0.0, 3e38], [1.0, 1.0, -0.0, 3e38]])
    out = torch.zeros(4)
    with pytest.warns(RuntimeWarning, match="overflow"):  # of NumPy
        summing.sum_rows(out, rows, accumulate=False)
    torch.testing.assert_close(out, rows[0] + rows[1], rtol=0, atol=0, equal_nan=True)
    assert out.signbit().tolist()[2] and not interpreted


def test_what_the_kernel_does_not_serve_is_added_up_in_the_loop(interpreted: list[str]) -> None:
    wide = torch.zeros(8)
    summing.sum_rows(wide[::2], torch.ones(3, 4), accumulate=True)
    narrow = torch.zeros(4, dtype=BF16)
    summing.sum_rows(narrow, torch.ones(3, 4, dtype=BF16), accumulate=False)
    whole = torch.zeros(4, dtype=torch.int64)
    summing.sum_rows(whole, torch.ones(3, 4, dtype=torch.int64), accumulate=False)
    summing.sum_rows(torch.zeros(0), torch.ones(3, 0), accumulate=False)
    assert interpreted == ["loop"] * 4
    assert wide.tolist() == [3.0, 0.0] * 4
    assert narrow.tolist() == whole.tolist() == [3] * 4


def test_without_triton_or_a_compiler_the_loop_adds_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen = watched(monkeypatch)
    monkeypatch.setattr(summing, "_compiles_for", lambda device: True)
    tries: list[str] = []

    def load() -> None:
        tries.append("load")
        raise ImportError("no module named triton")

    def compiled(out: torch.Tensor, rows: torch.Tensor, accumulate: bool) -> None:
        tries.append("compile")
        raise RuntimeError("failed to find a C compiler")

    caplog.clear()
    for found in (load, lambda: compiled):
        monkeypatch.setattr(summing, "_kernel", summing._Kernel())
        monkeypatch.setattr(summing, "_load", found)
        for _ in range(2):
            out = torch.ones(3)
            summing.sum_rows(out, torch.ones(2, 3), accumulate=True)
            assert out.tolist() == [3.0] * 3
    # It is tried, and warned of, once.
    assert (tries, seen) == (["load", "compile"], ["loop"] * 4)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2


def test_errors_of_the_device_say_nothing_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little memory is raised, and the kernel is used again afterwards."""
    seen = watched(monkeypatch)
    monkeypatch.setattr(summing, "_compiles_for", lambda device: True)
    errors = iter([torch.OutOfMemoryError("no memory"), None])

    def run(out: torch.Tensor, rows: torch.Tensor, accumulate: bool) -> None:
        error = next(errors)
        if error is not None:
            raise error
        out.copy_(rows.sum(0))

    monkeypatch.setattr(summing, "_kernel", summing._Kernel())
    monkeypatch.setattr(summing, "_load", lambda: run)
    with pytest.raises(torch.OutOfMemoryError):
        summing.sum_rows(torch.zeros(3), torch.ones(2, 3), accumulate=False)
    out = torch.zeros(3)
    summing.sum_rows(out, torch.ones(2, 3), accumulate=False)
    assert out.tolist() == [2.0] * 3 and seen == []


def test_devices_without_kernels_do_not_ask_for_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summing, "_load", lambda: pytest.fail("asked"))
    monkeypatch.setattr(summing, "_kernel", summing._Kernel())
    summing.sum_rows(torch.zeros(2), torch.ones(2, 2), accumulate=False)
    if importlib.util.find_spec("triton") is None:
        assert "triton" not in sys.modules
