"""Tensors that only Python's garbage collector would free."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def tensors_in_cycles() -> Iterator[list[str]]:
    """Collect in the list, at the end of the block, dtype and shape of tensors that reference cycles in it keep."""
    found: list[str] = []
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found += [f"{value.dtype}{list(value.shape)}" for value in gc.garbage if isinstance(value, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
