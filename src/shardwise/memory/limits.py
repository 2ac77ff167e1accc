"""How much memory this process may have: the smallest of the limits that the device or the operating system sets.

Pages of files that the kernel can give back at once count as free.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shardwise.memory.process import resident_bytes, virtual_bytes


@contextlib.contextmanager
def more_addresses() -> Iterator[None]:
    """Let this process have as many addresses inside of the block as it can give itself (`ulimit -S -v`).

    What is said when they have run out takes some itself, and freed memory does not always give them back.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


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
        return device_limit(device)
    return min(host_limits(processes), key=lambda limit: limit.share, default=None)


def device_limit(device: torch.device) -> MemoryLimit:
    """Return the limit of the memory of a CUDA device."""
    free, total = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_reserved(device)
    used = total - free
    fraction: Callable[..., float] | None = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    allowed = int(total * fraction(device)) if fraction is not None else total
    if allowed - own < free:
        return MemoryLimit(f"set_per_process_memory_fraction on {device}", allowed, own, own)
    return MemoryLimit(f"memory of {device}", total, used, own)


def host_limits(processes: int = 1) -> Iterator[MemoryLimit]:
    """Yield every limit of the memory of the host that this process has.

    Args:
        processes: processes of this job on this machine.
    """
    own, addresses = resident_bytes(), virtual_bytes()
    if own is None or addresses is None:
        return
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        yield MemoryLimit("RLIMIT_AS (ulimit -v)", soft, addresses, addresses, address_space=True)
    total = physical_bytes()
    yield MemoryLimit("physical memory", total, max(own, total - _available(total)), own, processes)
    for group in control_groups():
        if group.limit < total:
            yield MemoryLimit(f"control group {group.path}", group.limit, max(own, group.used()), own, processes)


def physical_bytes() -> int:
    """Return the memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def disk_limit(directory: Path, processes: int = 1) -> MemoryLimit | None:
    """Return what the file system of a directory has for this user, or None if it cannot be asked.

    Args:
        directory: need not be there yet.
        processes: processes of this job that use the same file system.

    Example:
        >>> import tempfile
        >>> limit = disk_limit(Path(tempfile.gettempdir()))
        >>> limit is not None and 0 <= limit.share <= limit.total
        True
    """
    try:
        found = os.statvfs(existing(directory))
    except OSError:
        return None
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    return MemoryLimit(f"the disk of {directory}", total, total - free, 0, processes)


def existing(directory: Path) -> Path:
    """Return a directory, or the nearest one above it that is there."""
    return next((place for place in (directory, *directory.absolute().parents) if place.exists()), Path("/"))


def lowest_free(groups: Sequence[ControlGroup]) -> tuple[str, int, int]:
    """Return the limit of this machine's memory that has least left: its name, its size, what is free. Cheap.

    Args:
        groups: that limit this process.
    """
    total = physical_bytes()
    found = ("physical memory", total, _available(total))
    for group in groups:
        free = group.limit - group.used(exact_above=group.limit // 2)
        if free < found[2]:
            found = (f"control group {group.path}", group.limit, free)
    return found


def _available(total: int) -> int:
    with open("/proc/meminfo", "rb") as file:
        for line in file:
            if line.startswith(b"MemAvailable:"):
                return int(line.split()[1]) * 1024
    return total


@dataclass(frozen=True)
class ControlGroup:
    """A control group that limits memory.

    Attributes:
        path: its name.
        limit: bytes.
        directory: of its files.
        counter: the file that has what is in use.
    """

    path: str
    limit: int
    directory: Path
    counter: str

    def used(self, exact_above: int = 0) -> int:
        """Return what is in use, without pages of files that can be given back; 0 if that cannot be read any more.

        Args:
            exact_above: below so many bytes in use such pages may be counted, which saves reading the statistics.
        """
        used = 0
        try:
            used = int((self.directory / self.counter).read_text())
            if used < exact_above:
                return used
            lines = (self.directory / "memory.stat").read_text().splitlines()
        except (OSError, ValueError):
            return used
        sizes = dict(line.split(maxsplit=1) for line in lines if " " in line)
        # In the older version what the groups below it have is told apart.
        total = "total_" if "total_inactive_file" in sizes else ""
        caches = (f"{total}inactive_file", f"{total}active_file", "slab_reclaimable")
        return max(0, used - sum(int(sizes.get(name, 0)) for name in caches))


def control_groups(
    membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> Iterator[ControlGroup]:
    """Yield this process's control groups that limit memory, and those around them.

    Inside a container the groups of the host may not be mounted; the container's own is then the root.

    Args:
        membership: file that names the groups of a process.
        root: where they are mounted.
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
                yield ControlGroup("/" + "/".join(parts[:depth]), int(limit), group, names[1])
