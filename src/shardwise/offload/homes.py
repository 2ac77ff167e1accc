"""Which place each kind of an engine's state lives in."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from shardwise.device.staging import is_far
from shardwise.memory.places import ON_DEVICE, ON_HOST, Homes, StateHome, Where
from shardwise.offload.host import HostPlace

PLACES: dict[str, Callable[[torch.device], StateHome]] = {
    "device": lambda device: ON_DEVICE,
    "host": HostPlace,
    "pageable": functools.partial(HostPlace, pinned=False),
}
"""What makes the place of a name, from which an engine's device is lent what lives there."""


def homes_of(where: Where, device: torch.device) -> Homes:
    """Return the places of an engine on a device.

    What is stepped in segments is stepped by the processor: what lives on the host is never lent for it. Whole tensors
    are lent to the device, which multiplies matrices faster than copies take.
    """
    made = {name: PLACES[name](device) for name in sorted(where.names)}

    def on_host(name: str) -> StateHome:
        return ON_HOST if name in ("host", "pageable") else made[name]

    def on_device(name: str) -> StateHome:
        return made[name] if is_far(device) else on_host(name)

    return Homes(
        optimizer=on_host(where.optimizer),
        whole=on_device(where.optimizer),
        gradients=on_device(where.gradients),
        parameters=made[where.parameters],
        near=PLACES["host"](device) if where.near else made[where.parameters],
    )
