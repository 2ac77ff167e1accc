"""Device memory of communicators beside torch's allocator: a reserve for each, until a step has been measured."""

from __future__ import annotations

import torch

from shardwise.comm.communicator import Communicator
from shardwise.memory import Accountant, Category

RESERVE = 400_000_000
"""Bytes of device memory planned for one NCCL communicator. Public reports name 0.1 to 0.7 GB, by version and links."""


class CommunicatorMemory:
    """Counts the device memory of an engine's communicators under `Category.COMMUNICATORS`; on a CPU they take none.

    Args:
        accountant: of the engine.
        device: of the engine.
        world: number of ranks.
        planned: there are no communicators, and nothing is measured.
    """

    def __init__(self, accountant: Accountant, device: torch.device, world: int, *, planned: bool = False) -> None:
        self._accountant, self._device = accountant, device
        self._counted = 0
        self.on_device = device.type == "cuda" and world > 1
        self._before = _outside_allocator(device) if self.on_device and not planned else None

    def reserve(self, job: Communicator) -> None:
        """Count the reserve for all communicators that the ranks of an engine have made so far."""
        if self.on_device:
            self._count(RESERVE * len(job.communicators()))

    def after_step(self) -> None:
        """After the first step, replace the reserve by what the device has lost beside torch's allocator since."""
        if self._before is None:
            return
        before, self._before = self._before, None
        self._count(max(0, _outside_allocator(self._device) - before))

    def _count(self, size: int) -> None:
        self._accountant.add(Category.COMMUNICATORS, size - self._counted)
        self._counted = size


def _outside_allocator(device: torch.device) -> int:
    """Return the bytes of the device in use that are not torch's allocator's."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)
