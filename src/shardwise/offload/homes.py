"""Which place each kind of an engine's state lives in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple

import torch

from shardwise.memory.places import ON_DEVICE, ON_HOST, Homes, StateHome, Where
from shardwise.offload.host import HostPlace

PLACES: dict[str, Callable[[torch.device], StateHome]] = {"device": lambda device: ON_DEVICE, "host": HostPlace}
"""What makes the place of a name, from which an engine's device is lent what lives there."""


def homes_of(where: Where, device: torch.device) -> Homes:
    """Return the places of an engine on a device.

    What the optimizer works on is worked on by the processor of the host, where that is all there is: then it lives
    there without being lent.
    """
    made = {name: PLACES[name](device) for name in dict.fromkeys(astuple(where))}

    def worked_on(name: str) -> StateHome:
        return ON_HOST if name == "host" and device.type == "cpu" else made[name]

    return Homes(worked_on(where.optimizer), worked_on(where.gradients), made[where.parameters])
