"""Sums of rows in order: one kernel on a CUDA device where Triton is there, a loop elsewhere, with the same bits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

_log = logging.getLogger("shardwise")

_SUMS = (torch.float32, torch.float64)
"""Dtypes in which the kernel adds up. Others, in which few choose to have sums, are left to the loop: there is no
interpreter that rounds to them as a device does, to compare with.
"""


def sum_rows(out: torch.Tensor, rows: torch.Tensor, *, accumulate: bool) -> None:
    """Set (or add to) `out` the sum of the rows, formed from the first to the last and in the dtype of `out`.

    The kernel reads each row once and writes the sum once; the loop reads and writes the sum for each row. The kernel
    has been compared with the loop in Triton's interpreter, and has not been run on a device.

    Args:
        out: 1-D, of S elements.
        rows: 2-D, of S elements each; they do not overlap `out`.
        accumulate: add to `out` instead of replacing it.
    """
    if not (_fits(out, rows) and _kernel.launch(out, rows, accumulate)):
        _sum_in_loop(out, rows, accumulate)


def _sum_in_loop(out: torch.Tensor, rows: torch.Tensor, accumulate: bool) -> None:
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


def _fits(out: torch.Tensor, rows: torch.Tensor) -> bool:
    """Whether the kernel serves these tensors."""
    # Plans are made on fake tensors, which have no memory.
    real = type(out) is torch.Tensor and type(rows) is torch.Tensor
    flat = out.is_contiguous() and rows.is_contiguous() and out.numel() > 0
    floats = out.dtype in _SUMS and rows.is_floating_point() and torch.promote_types(out.dtype, rows.dtype) is out.dtype
    return real and flat and floats and _compiles_for(out.device)


def _compiles_for(device: torch.device) -> bool:
    """Whether there are kernels for a device; tests have them interpreted for the CPU."""
    return device.type == "cuda"


class _Kernel:
    """The kernel, which is loaded when it is first needed, if it can be."""

    def __init__(self) -> None:
        self._tried = False
        self._run: Callable[[torch.Tensor, torch.Tensor, bool], None] | None = None

    def launch(self, out: torch.Tensor, rows: torch.Tensor, accumulate: bool) -> bool:
        """Launch it; return False where it cannot be had, and nothing has been written."""
        try:
            if not self._tried:
                self._tried = True
                self._run = _load()
            if self._run is not None:
                self._run(out, rows, accumulate)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise  # nothing is wrong with the kernel
        except Exception as error:  # Triton is missing or too old, or finds no C compiler at the first launch
            self._run = None
            _log.warning(
                "sums over ranks are formed by one kernel of torch for each rank, because Triton's kernel cannot be "
                "used: %s: %s. Install a Triton that fits this torch, and a C compiler",
                type(error).__name__,
                error,
            )
        return self._run is not None


def _load() -> Any:
    from shardwise.device.tritonkernels import sum_rows as run

    return run


_kernel = _Kernel()
