"""Binding of processes to CPU cores, to avoid migration and give threads their own cores.

A bound process keeps its caches, and its first-touch memory is on its own NUMA node. A process with a GPU gets cores of
the GPU's node, because copies of pinned memory on another node are slower. Other processes get cores in the order of
nodes, within one node where possible.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from shardwise.errors import CommandLineError, LaunchError

SYSTEM = Path("/sys/devices/system/cpu")
PCI = Path("/sys/bus/pci/devices")
DRIVER = Path("/proc/driver/nvidia/gpus")
"""A directory for each GPU that this process may use, by PCI address."""

Cores = tuple[tuple[int, ...], ...]
"""Physical cores, each with its logical CPUs (hyperthreads)."""


def parse_list(text: str, option: str) -> tuple[int, ...]:
    """Parse a list of CPUs. Raises CommandLineError if the text is none.

    >>> parse_list("0,4-6", "--core-list")
    (0, 4, 5, 6)
    """
    found: dict[int, None] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
            raise CommandLineError(f"{option} {text}: {part!r} is neither a number nor a range. Write it as 0,4-6.")
        found.update(dict.fromkeys(range(int(match[1]), int(match[2] or match[1]) + 1)))
    return tuple(found)


def available(listed: Sequence[int] | None = None, option: str = "", system: Path = SYSTEM) -> Cores:
    """Return the physical cores that this process may use, in the order of NUMA nodes, or of `listed` CPUs (from
    `option`). Without the kernel's description in `system` every CPU counts as a core.

    Raises:
        CommandLineError: a listed CPU is missing or not permitted.
        LaunchError: the system cannot bind processes.
    """
    if not hasattr(os, "sched_getaffinity"):
        raise LaunchError("Processes cannot be bound to cores on this system. Leave the option out.")
    usable = os.sched_getaffinity(0)
    unknown = [cpu for cpu in listed or () if cpu not in usable]
    if unknown:
        raise CommandLineError(
            f"{option}: this process may not use CPU {unknown[0]}; it has {_shown(sorted(usable))}. Name some of these."
        )
    cores: dict[tuple[int, ...], list[int]] = {}
    for cpu in sorted(usable) if listed is None else listed:
        place = _place(system / f"cpu{cpu}")
        cores.setdefault((-1, -1, cpu) if place is None else place, []).append(cpu)
    ordered = cores.items() if listed is not None else sorted(cores.items())
    return tuple(tuple(cpus) for _, cpus in ordered)


def nodes_of_gpus(
    names: Sequence[str], env: Mapping[str, str] = os.environ, driver: Path = DRIVER, pci: Path = PCI
) -> list[int] | None:
    """Return the NUMA node of each GPU, named as in CUDA_VISIBLE_DEVICES; None if kernel or NVIDIA's driver do not
    report all of them. `env` sets CUDA's numbering of different GPU models.
    """
    try:
        addresses = sorted(entry.name for entry in driver.iterdir())
        described = [(driver / address / "information").read_text() for address in addresses]
        nodes = [int((pci / address.lower() / "numa_node").read_text()) for address in addresses]
    except (OSError, ValueError):
        return None
    models = {line for text in described for line in text.splitlines() if line.startswith("Model:")}
    # CUDA numbers the fastest model first by default, then by PCI address.
    numbered = len(models) < 2 or env.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    found = []
    for name in names:
        if name.isdigit():
            places = [int(name)] if numbered and int(name) < len(nodes) else []
        else:
            places = [place for place, text in enumerate(described) if re.search(rf"UUID:\s*{re.escape(name)}", text)]
        if len(places) != 1 or nodes[places[0]] < 0:
            return None
        found.append(nodes[places[0]])
    return found


def deal(cores: Cores, processes: int, nodes: Sequence[int] | None = None, system: Path = SYSTEM) -> list[Cores]:
    """Split cores evenly among processes, in order; remaining cores stay idle. Preferred NUMA `nodes` are used if each
    has enough cores. Raises CommandLineError with fewer cores than processes.

    >>> deal(((0,), (1,), (2,), (3,), (4,)), 2)
    [((0,), (1,)), ((2,), (3,))]
    """
    each = len(cores) // processes
    if each == 0:
        raise CommandLineError(
            f"Binding {processes} processes to cores: this machine gives {len(cores)} cores "
            f"({_shown(sorted(cpu for core in cores for cpu in core))}). Start fewer processes, or do not bind them."
        )
    near = None if nodes is None else _deal_by_node(cores, nodes, system)
    return near or [cores[rank * each : (rank + 1) * each] for rank in range(processes)]


def _deal_by_node(cores: Cores, nodes: Sequence[int], system: Path) -> list[Cores] | None:
    """Split the cores of each NUMA node among its processes; None if a node has too few."""
    by_node: dict[int, list[tuple[int, ...]]] = {}
    for core in cores:
        place = _place(system / f"cpu{core[0]}")
        by_node.setdefault(-1 if place is None else place[0], []).append(core)
    each = min(len(by_node.get(node, ())) // count for node, count in Counter(nodes).items())
    if each == 0:
        return None
    begins = {node: iter(range(0, len(found), each)) for node, found in by_node.items()}
    return [tuple(by_node[node][(begin := next(begins[node])) : begin + each]) for node in nodes]


@contextlib.contextmanager
def bound(cores: Cores | None) -> Iterator[None]:
    """Bind processes started by this thread in the block to these cores; None: no binding."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    # Affinity of the calling thread; a started process inherits it before its first instruction.
    os.sched_setaffinity(0, {cpu for core in cores for cpu in core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _place(directory: Path) -> tuple[int, int, int] | None:
    """Return (NUMA node, package, core) of a CPU; None if the kernel does not report it."""
    try:
        package = int((directory / "topology" / "physical_package_id").read_text())
        core = int((directory / "topology" / "core_id").read_text())
        nodes = [int(entry.name[4:]) for entry in directory.iterdir() if re.fullmatch(r"node\d+", entry.name)]
    except (OSError, ValueError):
        return None
    return (nodes[0] if nodes else 0, package, core)


def _shown(cpus: Sequence[int]) -> str:
    return ", ".join(map(str, cpus[:16])) + (", ..." if len(cpus) > 16 else "")
