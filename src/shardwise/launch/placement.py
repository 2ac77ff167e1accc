"""Machines of a job; number of processes on this machine, and their devices.

Invariant: on a machine with CUDA devices every process has its own device, and no device outside CUDA_VISIBLE_DEVICES
is used, for any options.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.errors import CommandLineError
from shardwise.launch.hosts import check_filters, is_this_machine, parse_filter, read_hostfile, select


@dataclass(frozen=True)
class Resources:
    """Requested resources of the command line (filters of slots, path of the hostfile); None if not given."""

    nproc: int | None = None
    num_nodes: int | None = None
    include: str | None = None
    exclude: str | None = None
    hostfile: str | None = None


@dataclass(frozen=True)
class Devices:
    """Names (numbers or UUIDs) of usable CUDA devices, and whether CUDA_VISIBLE_DEVICES has selected them."""

    names: tuple[str, ...] = ()
    restricted: bool = False

    @property
    def slots(self) -> tuple[int, ...]:
        """The devices' numbers; their indices if they are named by UUID."""
        if all(name.isdigit() for name in self.names):
            return tuple(int(name) for name in self.names)
        return tuple(range(len(self.names)))


@dataclass(frozen=True)
class Host:
    """A machine of the job, with the slots to use; none: as many as the machine has, or are requested."""

    name: str
    slots: tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """Number of processes, and the device of each, for CUDA_VISIBLE_DEVICES; None without CUDA devices."""

    nproc: int
    devices: tuple[str, ...] | None


def remaining(placement: Placement, slots: Sequence[int]) -> Placement:
    """Return the placement with the processes `slots` only, in order.

    >>> remaining(Placement(3, ("4", "5", "6")), [0, 2])
    Placement(nproc=2, devices=('4', '6'))
    """
    devices = None if placement.devices is None else tuple(placement.devices[slot] for slot in slots)
    return Placement(len(slots), devices)


def find_devices(env: Mapping[str, str] = os.environ) -> Devices:
    """Return the CUDA devices of this machine, without initialising any."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if "CUDA_VISIBLE_DEVICES" not in env:
        return Devices(tuple(str(index) for index in range(count)))
    names = [name.strip() for name in env["CUDA_VISIBLE_DEVICES"].split(",") if name.strip()]
    # CUDA stops reading at the first unknown name.
    return Devices(tuple(names[:count]), restricted=True)


def hosts_of(resources: Resources) -> list[Host] | None:
    """Return the machines of the hostfile that the options choose; None without a hostfile.

    Raises CommandLineError if the options contradict each other or the hostfile.
    """
    check_resources(resources)
    hosts = read_hostfile(resources.hostfile)
    if hosts is None:
        if (resources.num_nodes or 1) > 1:
            raise CommandLineError(
                f"--num_nodes {resources.num_nodes}: the machines are not known. Name them with --hostfile."
            )
        return None
    listed = {host: tuple(range(slots)) for host, slots in hosts.items()}
    chosen = [Host(*pair) for pair in select(listed, resources.include, resources.exclude).items()]
    if resources.num_nodes is not None:
        if resources.num_nodes > len(chosen):
            raise CommandLineError(
                f"--num_nodes {resources.num_nodes}: the hostfile has only {len(chosen)} machines: "
                f"{', '.join(host.name for host in chosen)}."
            )
        chosen = chosen[: resources.num_nodes]
    return chosen


def place(resources: Resources, devices: Devices, host: Host | None = None) -> Placement:
    """Decide on the processes of this machine. Default: one for each visible CUDA device, or one without devices.

    `host` is this machine's entry among several; None: this machine is the only one.

    Raises CommandLineError if the options contradict each other, the hostfile or the machine.

    >>> place(Resources(nproc=2), Devices(("4", "5", "6"), restricted=True))
    Placement(nproc=2, devices=('4', '5'))
    """
    hosts = hosts_of(resources) if host is None else [host] if host.slots else None
    listed = hosts is not None
    if hosts is None:
        chosen = select(_this_machine_only(resources, devices), resources.include, resources.exclude)
        hosts = [Host(*pair) for pair in chosen.items()]
    host = hosts[0]
    slots = _on_devices(host.slots, resources, devices) if devices.names else host.slots
    slots = _take(slots, resources, devices, limited=listed or bool(devices.names))
    if not devices.names:
        return Placement(len(slots), None)
    name_of = dict(zip(devices.slots, devices.names, strict=True))
    return Placement(len(slots), tuple(name_of[slot] for slot in slots))


def check_resources(resources: Resources) -> None:
    """Check options that are wrong for any devices, before torch is imported. Raises CommandLineError with the fix."""
    for option, value in (("--nproc", resources.nproc), ("--num_nodes", resources.num_nodes)):
        if value is not None and value < 1:
            raise CommandLineError(f"{option} {value}: a job has at least one. Leave the option out for the default.")
    for option, text in (("--include", resources.include), ("--exclude", resources.exclude)):
        if text and (resources.nproc is not None or resources.num_nodes is not None):
            raise CommandLineError(
                f"{option} chooses the slots itself and excludes --nproc, --num_gpus or "
                "--num_nodes. Give one or the other."
            )
        if text:
            parse_filter(text, option)
    check_filters(resources.include, resources.exclude)
    read_hostfile(resources.hostfile)


def _this_machine_only(resources: Resources, devices: Devices) -> dict[str, tuple[int, ...]]:
    text, option = (resources.include, "--include") if resources.include else (resources.exclude, "--exclude")
    named = parse_filter(text, option) if text else {}
    host = next((name for name in named if is_this_machine(name)), "localhost")
    if devices.names:
        return {host: devices.slots}
    # Without devices slots are equal: as many as the filter names, else one.
    return {host: tuple(range(max(named.get(host, ()), default=0) + 1))}


def _on_devices(slots: tuple[int, ...], resources: Resources, devices: Devices) -> tuple[int, ...]:
    usable = tuple(slot for slot in slots if slot in devices.slots)
    if usable == slots:
        return slots
    listed = ", ".join(devices.names)
    if devices.restricted:
        if usable and not resources.include:
            return usable
        raise CommandLineError(
            f"Slots {', '.join(map(str, slots))} are requested, but CUDA_VISIBLE_DEVICES allows only "
            f"{listed}. Change one of them."
        )
    raise CommandLineError(
        f"The hostfile gives this machine the slots {', '.join(map(str, slots))}, but it has "
        f"{len(devices.names)} CUDA devices ({listed}). Correct the line, or choose with --include."
    )


def _take(slots: tuple[int, ...], resources: Resources, devices: Devices, limited: bool) -> tuple[int, ...]:
    if resources.nproc is None:
        return slots
    if not limited:
        return tuple(range(resources.nproc))
    if resources.nproc > len(slots):
        if devices.names:
            have = f"{len(slots)} CUDA device{'s' * (len(slots) > 1)} here ({', '.join(map(str, slots))})"
            fix = "set CUDA_VISIBLE_DEVICES= (empty) to run on the CPU"
        else:
            have, fix = f"{len(slots)} slots in the hostfile", "correct the hostfile"
        raise CommandLineError(
            f"{resources.nproc} processes are requested, but there are only {have}. Use --nproc "
            f"{len(slots)} or fewer, or {fix}."
        )
    return slots[: resources.nproc]
