"""Tier of each kind of an engine's state."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from shardwise.device.staging import is_far
from shardwise.memory.places import ON_DEVICE, ON_HOST, Homes, StateHome, Where
from shardwise.offload.disk import Disks
from shardwise.offload.host import HostPlace

_HOST, _CPU = ("host", "pageable"), torch.device("cpu")

PLACES: dict[str, Callable[[torch.device], StateHome]] = {
    "device": lambda device: ON_DEVICE,
    "host": HostPlace,
    "pageable": functools.partial(HostPlace, pinned=False),
}
"""Factory of the tier of each name, except disks."""


def homes_of(where: Where, device: torch.device, disks: Disks) -> Homes:
    """Return the tiers of an engine on a device. Raises OffloadError if a disk is unusable.

    The CPU steps segments: it uses state on the host in place, and reads state on a disk to the host. Unsharded tensors
    are copied to the device, because it multiplies matrices faster than the copies take.
    """
    made = {name: PLACES[name](device) for name in sorted(where.names - {"disk"})}
    # If the device is the CPU, values read to the host are where they are used.
    there = None if is_far(device) else _CPU

    def stepped(name: str, used_on: torch.device | None) -> StateHome:
        if name == "disk":
            return disks.place(disks.optimizer, device, used_on)
        return ON_HOST if name in _HOST and used_on is not None else made[name]

    on_disk = where.parameters == "disk"
    return Homes(
        optimizer=stepped(where.optimizer, _CPU),
        whole=stepped(where.optimizer, there),
        gradients=stepped(where.gradients, there),
        parameters=disks.place(disks.parameters, device, None) if on_disk else made[where.parameters],
        near=PLACES["host"](device) if where.near else ON_DEVICE,
    )
