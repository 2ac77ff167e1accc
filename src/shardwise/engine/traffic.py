"""Offload traffic of a step: bytes and seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shardwise.errors import OffloadError
from shardwise.memory import Tier
from shardwise.offload import Disks
from shardwise.units import format_duration, format_rate, format_size
from shardwise.utils.logging import logger

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator
    from shardwise.config import Config
    from shardwise.engine.dryrun import MemoryPlan

WORTH_MEASURING = 16 << 20
"""Bytes a step from which on the speed of a disk or of copies is measured."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that a step moves between a tier ("disk", "host") and its users, on the rank with most.

    Speeds are in bytes a second of one rank, measured while all ranks transfer, or as given.

    >>> print(Traffic("disk", 4 << 30, 2 << 30, 2e9, 1e9))
    disk: a step reads 4.00 GiB and writes 2.00 GiB on each rank, at 2.00 GB/s and 1.00 GB/s: +4.29 s a step if \
nothing hides it.
    """

    tier: str
    read: int
    written: int
    read_speed: float
    write_speed: float

    @property
    def seconds(self) -> float:
        """Seconds that the traffic adds to a step without overlap."""
        return self.read / self.read_speed + self.written / self.write_speed

    def __str__(self) -> str:
        return (
            f"{self.tier}: a step reads {format_size(self.read)} and writes {format_size(self.written)} on each rank, "
            f"at {format_rate(self.read_speed)} and {format_rate(self.write_speed)}: +{format_duration(self.seconds)} "
            "a step if nothing hides it."
        )


def offload_traffic(
    config: Config, device: torch.device, job: Communicator, plans: Sequence[MemoryPlan]
) -> tuple[Traffic, ...]:
    """Measure the speed of tiers that a step uses much, and log the time (all ranks call with the plans of all)."""
    found = []
    for tier in (Tier.DISK, *((Tier.HOST,) if device.type == "cuda" else ())):
        moved = [tuple(plan.moved[tier.value].values()) for plan in plans if tier.value in plan.moved]
        read, written = max(moved, key=sum, default=(0, 0))
        if read + written < WORTH_MEASURING:
            continue
        directory = next((Path(path) for plan in plans for path in plan.files), None)
        speeds = [speed for speed in job.exchange(_measured(config, device, tier, directory), "speed") if speed]
        if not speeds:
            continue
        found.append(Traffic(tier.value, read, written, *(min(speed[side] for speed in speeds) for side in (0, 1))))
        if job.rank == 0:
            logger.info("%s", found[-1])
    return tuple(found)


def _measured(config: Config, device: torch.device, tier: Tier, directory: Path | None) -> tuple[float, float] | None:
    from shardwise.offload.measure import MEASURED, copy_speed, disk_speed  # it loads NumPy

    try:
        if tier is Tier.HOST:
            return copy_speed(device, MEASURED)
        options = Disks.of(config, 0).options
        return None if directory is None or options is None else disk_speed(directory, options, MEASURED)
    except OffloadError as error:
        logger.warning("the disk was not measured: %s", error)
        return None
