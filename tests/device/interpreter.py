"""Kernels of Triton, interpreted for the CPU."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch


def interpret(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """Have a module of kernels loaded anew and interpreted, until the test ends; skip the test where Triton is missing.

    Two faults of the interpreter are mended: it cuts bf16 off where devices round to nearest, and does not know its
    smallest numbers; and it takes arrays of one element for numbers, which NumPy has given up.
    """
    pytest.importorskip("triton")
    from triton.runtime import interpreter

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    cast, patch = interpreter.InterpreterBuilder.cast_impl, interpreter._patch_lang_tensor

    def cast_impl(self: Any, source: Any, wanted: Any) -> Any:
        found = cast(self, source, wanted)
        if source.dtype.scalar.is_fp32() and wanted.scalar.is_bf16():
            rounded = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.bfloat16).view(torch.int16)
            found.data = rounded.numpy().view(np.uint16)
        elif source.dtype.scalar.is_bf16() and wanted.scalar.is_fp32():
            found.data = (source.data.astype(np.uint32) << 16).view(np.float32)
        return found

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", cast_impl)
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_lang_tensor)
    # Modules keep kernels as they were made; what is loaded while this holds is forgotten with it.
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, module)
