"""One-line memory reports, in the formats that scripts for other libraries print and parse.

On a CUDA device the numbers are of torch's allocator. On a CPU "allocated" is the resident size of the process, its
maximum the peak since process start, and nothing is cached.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from shardwise.memory.limits import available_bytes, physical_bytes
from shardwise.memory.process import peak_resident_bytes, resident_bytes

_GB = 2**30


class _Usage(NamedTuple):
    """Bytes, and their maxima."""

    allocated: int = 0
    allocated_max: int = 0
    cached: int = 0
    cached_max: int = 0


_last = _Usage()


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print `message`, allocated, cached and host memory on rank 0, and reset the maxima. Not a collective. Nothing
    happens without `force`, so calls may stay in a script.

    >>> see_memory_usage("after building")
    """
    if not force or _rank() != 0:
        return
    now, total = _usage(), physical_bytes()
    used = total - available_bytes()
    print(
        f"{message}\n"
        f"MA {now.allocated / _GB:.2f} GB  Max_MA {now.allocated_max / _GB:.2f} GB  "
        f"CA {now.cached / _GB:.2f} GB  Max_CA {now.cached_max / _GB:.2f} GB\n"
        f"CPU Virtual Memory:  used = {used / _GB:.2f} GB, percent = {100 * used / total:.1f}%",
        flush=True,
    )
    _reset_maxima()


def memory_status(msg: str, print_rank: int = -1, reset_max: bool = False) -> None:
    """Print allocated and cached memory with the changes since the last call. Not a collective.

    `print_rank`: the rank that prints; -1: all. `reset_max`: reset the maxima first.

    >>> memory_status("step 1")  # doctest: +ELLIPSIS
    RANK=0 MEMSTATS step 1 device=... current alloc=...GB (delta=...GB max=...GB) current cache=...GB ...
    """
    global _last
    rank = _rank()
    if print_rank not in (-1, rank):
        return
    if reset_max:
        _reset_maxima()
    now, before = _usage(), _last
    _last = now
    device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    print(
        f"RANK={rank} MEMSTATS {msg} device={device} "
        f"current alloc={now.allocated / _GB:.4f}GB (delta={(now.allocated - before.allocated) / _GB:.4f}GB "
        f"max={now.allocated_max / _GB:.4f}GB) "
        f"current cache={now.cached / _GB:.4f}GB (delta={(now.cached - before.cached) / _GB:.4f}GB "
        f"max={now.cached_max / _GB:.4f}GB)",
        flush=True,
    )


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _usage() -> _Usage:
    cuda = torch.cuda
    if cuda.is_available():
        return _Usage(
            cuda.memory_allocated(), cuda.max_memory_allocated(), cuda.memory_reserved(), cuda.max_memory_reserved()
        )
    resident = resident_bytes() or 0
    return _Usage(resident, max(resident, peak_resident_bytes() or 0))


def _reset_maxima() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
