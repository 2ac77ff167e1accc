"""Which place each kind of an engine's state lives in."""

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
"""What makes the place of a name, from which an engine's device is lent what lives there; those of disks apart."""


def homes_of(where: Where, device: torch.device, disks: Disks) -> Homes:
    """Return the places of an engine on a device.

    What is stepped in segments is stepped by the processor: what lives on the host is never lent for it, and what lives
    on a disk is lent to the host. Whole tensors are lent to the device, which multiplies matrices faster than copies
    take.

    Args:
        where: which places.
        device: the engine's.
        disks: those that it has.

    Raises:
        OffloadError: a disk cannot be used.
    """
    made = {name: PLACES[name](device) for name in sorted(where.names - {"disk"})}
    # Where the device is the processor itself, what is brought to the host is where it is used.
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
