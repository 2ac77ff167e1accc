"""Settings of engines whose state lives elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

HOST, DISK = "cpu", "nvme"

PLACES: dict[str, dict[str, Any]] = {
    "optimizer on host": {"optimizer": HOST},
    "optimizer on disk": {"optimizer": DISK},
    "parameters on host": {"parameters": HOST},
    "parameters on disk": {"parameters": DISK},
    "half of the optimizer on host": {"optimizer": HOST, "ratio": 0.5},
    "all on host": {"optimizer": HOST, "parameters": HOST},
    "all on disk": {"optimizer": DISK, "parameters": DISK, "gradients": DISK},
    "gradients on disk": {"optimizer": HOST, "gradients": DISK},
    "some parameters near": {"optimizer": DISK, "parameters": DISK, "max_in_cpu": 4000},
}
"""What is asked for, by name; those with parameters or a part need stage 3."""

FROM_STAGE_1 = ("optimizer on host", "optimizer on disk", "gradients on disk")


def offload(place: str, directory: str) -> dict[str, Any]:
    """Keys of `zero_optimization` for a place."""
    asked = PLACES[place]
    found: dict[str, Any] = {}
    for kind, key in (("optimizer", "offload_optimizer"), ("parameters", "offload_param")):
        if kind in asked:
            found[key] = {"device": asked[kind]}
            if DISK in asked.values():
                found[key]["nvme_path"] = directory
    if "gradients" in asked:
        found["offload_optimizer"]["gradients"] = asked["gradients"]
    if "ratio" in asked:
        found["offload_optimizer"]["ratio"] = asked["ratio"]
    if asked.get("parameters") == DISK:
        found["offload_param"]["max_in_cpu"] = asked.get("max_in_cpu", 0)
    return found


@contextlib.contextmanager
def played_device() -> Iterator[None]:
    """Have the CPU taken for a device whose memory the host cannot read: everything is copied that would be."""

    def far(device: torch.device) -> bool:
        return True

    with (
        mock.patch("shardwise.offload.homes.is_far", far),
        mock.patch("shardwise.offload.disk.is_far", far),
        mock.patch("shardwise.zero.updates.parameter_writeback.is_far", far),
    ):
        yield
