"""Out-of-memory (OOM) detection, and the error for it."""

from __future__ import annotations

import contextlib
import gc
import re
import traceback
from types import FrameType, FunctionType

import torch
from torch import nn

from shardwise.errors import ShardwiseError

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_ASKED = re.compile(r"tried to allocate ([\d.]+) (bytes|[KMGT]iB)", re.IGNORECASE)
_SIGNS = ("can't allocate memory", "not enough memory", "out of memory", "alloc_failed")


class OutOfMemoryError(ShardwiseError, torch.OutOfMemoryError, MemoryError):
    """Memory has run out in the engine, or a plan does not fit: requested bytes, memory in use, and remedies.

    Handlers of PyTorch's `OutOfMemoryError`, of its `RuntimeError` for a CPU, and of `MemoryError` catch it.

    Attributes:
        asked: requested bytes, None if unknown.
        suggestion: configuration keys with which `initialize()` would fit after a refused plan; None if unknown.
    """

    asked: int | None = None
    suggestion: dict[str, object] | None = None


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error is an OOM error that has not been converted yet.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: 1"))
    (True, True)
    >>> is_out_of_memory(RuntimeError("shapes differ")), is_out_of_memory(OutOfMemoryError())
    (False, False)
    """
    if isinstance(error, ShardwiseError):
        return False
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS)


def asked_bytes(error: BaseException) -> int | None:
    """Return the requested bytes of an OOM error, or None if it does not state them.

    >>> asked_bytes(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."))
    4096
    >>> asked_bytes(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.50 MiB. GPU 0 has ..."))
    21495808
    """
    found = _ASKED.search(str(error))
    if found is None:
        return None
    unit = next(size for name, size in _UNITS.items() if name.lower() == found.group(2).lower())
    return int(float(found.group(1)) * unit)


def let_go_of_frames(error: BaseException) -> None:
    """Clear the local variables of an error's frames, which hold activations. The traceback keeps its lines."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        traceback.clear_frames(current.__traceback__)
        for frame, _ in traceback.walk_tb(current.__traceback__):
            _clear_module_call(frame)
        pending.extend((current.__cause__, current.__context__))


def _clear_module_call(frame: FrameType) -> None:
    """Clear the arguments of a module's call, because `nn.Module` keeps them in closure cells of this call: a cleared
    frame still references its function, and the function its cells.
    """
    if frame.f_code.co_filename != nn.modules.module.__file__:
        return
    for held in gc.get_referents(frame):
        if isinstance(held, FunctionType) and held.__code__ is frame.f_code and "<locals>" in held.__qualname__:
            for cell in held.__closure__ or ():
                with contextlib.suppress(ValueError):  # empty already
                    del cell.cell_contents
