"""How much memory this process may have: the smallest of the limits that the device or the operating system sets."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from shardwise.memory.process import resident_bytes, virtual_bytes


@dataclass(frozen=True)
class MemoryLimit:
    """A limit, and what counts against it now; bytes.

    Attributes:
        name: what sets it.
        total: the limit.
        used: what counts against it, whoever has it.
        own: this process's part of `used`.
        sharers: processes of this job that share the limit.
        address_space: it counts addresses, used or not, instead of memory.
    """

    name: str
    total: int
    used: int
    own: int
    sharers: int = 1
    address_space: bool = False

    @property
    def share(self) -> int:
        """What this process can have at most: what it has, and an equal part of what is free."""
        return self.own + max(0, self.total - self.used) // self.sharers


def memory_limit(device: torch.device, processes: int = 1) -> MemoryLimit | None:
    """Return the limit that leaves this process the least, or None where nothing is known.

    On a CUDA device that is the device's memory (or the fraction of it that torch may use). On a CPU it is the least of
    the address space (RLIMIT_AS), the control group's limit (cgroup v2 or v1) and physical memory.

    Args:
        device: where tensors live.
        processes: processes of this job on this machine.

    Example:
        >>> limit = memory_limit(torch.device("cpu"))
        >>> limit is None or 0 < limit.share <= limit.total
        True
    """
    if device.type == "cuda":
        return _device_limit(device)
    return min(_host_limits(processes), key=lambda limit: limit.share, default=None)


def _device_limit(device: torch.device) -> MemoryLimit:
    free, total = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_reserved(device)
    used = total - free
    fraction: Callable[..., float] | None = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    allowed = int(total * fraction(device)) if fraction is not None else total
    if allowed - own < free:
        return MemoryLimit(f"set_per_process_memory_fraction on {device}", allowed, own, own)
    return MemoryLimit(f"memory of {device}", total, used, own)


def _host_limits(processes: int) -> Iterator[MemoryLimit]:
    own, addresses = resident_bytes(), virtual_bytes()
    if own is None or addresses is None:
        return
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        yield MemoryLimit("RLIMIT_AS (ulimit -v)", soft, addresses, addresses, address_space=True)
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    total = pages * size
    yield MemoryLimit("physical memory", total, max(own, total - _available(total)), own, processes)
    for path, limit, used in _control_groups(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")):
        if limit < total:
            yield MemoryLimit(f"control group {path}", limit, max(own, used), own, processes)


def _available(total: int) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return total


def _control_groups(membership: Path, root: Path) -> Iterator[tuple[str, int, int]]:
    """Yield path, limit and use of this process's control groups that limit memory, and of those around them.

    Inside a container the groups of the host may not be mounted; the container's own is then the root.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, names = root, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts), -1, -1):
            group = base.joinpath(*parts[:depth])
            try:
                limit, used = ((group / name).read_text().strip() for name in names)
            except OSError:
                continue
            if limit.isdigit() and used.isdigit():
                yield "/" + "/".join(parts[:depth]), int(limit), int(used)
