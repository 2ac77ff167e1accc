"""Memory limits of this process, by device and operating system. Reclaimable pages of the page cache count as free."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from shardwise.memory.accountant import Accountant, Tier
from shardwise.memory.process import resident_bytes, virtual_bytes


@contextlib.contextmanager
def more_addresses() -> Iterator[None]:
    """Raise the soft address-space limit to the hard one: an error message after exhaustion needs addresses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@dataclass(frozen=True)
class MemoryLimit:
    """A memory limit and its use by all processes, in bytes. `own`: this process's part of `used`. `sharers`: processes
    of this job that share the limit. `address_space`: it counts addresses instead of memory.
    """

    name: str
    total: int
    used: int
    own: int
    sharers: int = 1
    address_space: bool = False

    @property
    def share(self) -> int:
        """Maximum memory of this process: its current memory, and an equal part of the free memory."""
        return self.own + max(0, self.total - self.used) // self.sharers


def memory_limit(device: torch.device, processes: int = 1) -> MemoryLimit | None:
    """Return the limit that leaves each of `processes` on this machine the least, or None if unknown.

    On a CUDA device this is the device's memory (or torch's allowed fraction). On a CPU it is the minimum of address
    space (RLIMIT_AS), control group limit (cgroup v2 or v1) and physical memory.

    >>> limit = memory_limit(torch.device("cpu"))
    >>> limit is None or 0 < limit.share <= limit.total
    True
    """
    if device.type != "cuda":
        return min(host_limits(processes), key=lambda limit: limit.share, default=None)
    free, total = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_reserved(device)
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(device))
    if allowed - own < free:
        return MemoryLimit(f"set_per_process_memory_fraction on {device}", allowed, own, own)
    return MemoryLimit(f"memory of {device}", total, total - free, own)


def host_limits(processes: int = 1) -> Iterator[MemoryLimit]:
    """Yield each host memory limit of this process; `processes` of this job share the machine."""
    own, addresses = resident_bytes() or 0, virtual_bytes()
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        yield MemoryLimit("RLIMIT_AS (ulimit -v)", soft, addresses, addresses, address_space=True)
    total = physical_bytes()
    yield MemoryLimit("physical memory", total, max(own, total - available_bytes()), own, processes)
    for group in control_groups():
        if group.limit < total:
            yield MemoryLimit(f"control group {group.path}", group.limit, max(own, group.used()), own, processes)


def engine_room(
    limit: MemoryLimit, accountant: Accountant, device: torch.device, tiers: Collection[Tier], uncounted: int = 0
) -> int:
    """Return the bytes of a limit that are available to the engine's tensors in `tiers` and to activations.

    The rest is the process's use before the engine or, if larger, beyond the counted and `uncounted` bytes.
    """
    ours = uncounted + sum(sum(accountant.live_in(tier).values()) for tier in tiers)
    if Tier.HOST in tiers:
        used = limit.own
        before = (accountant.process_addresses if limit.address_space else accountant.process_bytes) or 0
    else:
        used, before = torch.cuda.memory_allocated(device), 0
    return max(0, limit.share - max(before, used - ours))


def physical_bytes() -> int:
    """Return the physical memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def disk_limit(directory: Path) -> MemoryLimit | None:
    """Return this user's space on the file system of a directory, existing or not; None if unknown.

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
    return MemoryLimit(f"the disk of {directory}", total, total - free, 0)


def existing(directory: Path) -> Path:
    """Return a directory, or its nearest existing parent."""
    return next((place for place in (directory, *directory.absolute().parents) if place.exists()), Path("/"))


def lowest_free(groups: Sequence[ControlGroup]) -> tuple[str, int, int]:
    """Return name, size and free bytes of the host limit with the least free memory; cheap enough for polling."""
    total = physical_bytes()
    found = ("physical memory", total, available_bytes())
    for group in groups:
        free = group.limit - group.used(exact_above=group.limit // 2)
        if free < found[2]:
            found = (f"control group {group.path}", group.limit, free)
    return found


def available_bytes() -> int:
    """Return the physical memory of this machine that is free, or soon can be."""
    return psutil.virtual_memory().available


@dataclass(frozen=True)
class ControlGroup:
    """A control group with a memory limit in bytes; `counter`: name of the file with the current use."""

    path: str
    limit: int
    directory: Path
    counter: str

    def used(self, exact_above: int = 0) -> int:
        """Return the use without reclaimable page cache (below `exact_above` possibly with it); 0 if unreadable."""
        used = 0
        try:
            used = int((self.directory / self.counter).read_text())
            if used < exact_above:
                return used
            lines = (self.directory / "memory.stat").read_text().splitlines()
        except (OSError, ValueError):
            return used
        sizes = dict(line.split(maxsplit=1) for line in lines if " " in line)
        # cgroup v1 has separate totals that include child groups.
        total = "total_" if "total_inactive_file" in sizes else ""
        caches = (f"{total}inactive_file", f"{total}active_file", "slab_reclaimable")
        return max(0, used - sum(int(sizes.get(name, 0)) for name in caches))


def control_groups(
    membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> Iterator[ControlGroup]:
    """Yield this process's memory-limiting control groups (from the file `membership`, mounted at `root`), and their
    parents. In a container the host's groups may not be mounted; the container's group is then the root.
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
