"""Device memory of communicators outside of torch's allocator: a reserve, then the measured value."""

from __future__ import annotations

import torch

from shardwise.comm.communicator import Communicator
from shardwise.memory import Accountant, Category

RESERVE = 400_000_000
"""Bytes of device memory planned for one NCCL communicator. Public reports name 0.1 to 0.7 GB, by version and links."""


class CommunicatorMemory:
    """Counts device memory under `Category.COMMUNICATORS`; 0 on a CPU. `planned` (a dry run): without measurement."""

    def __init__(self, accountant: Accountant, device: torch.device, world: int, *, planned: bool = False) -> None:
        self._accountant, self._device = accountant, device
        self._counted = 0
        self.on_device = device.type == "cuda" and world > 1
        self._before = _outside_allocator(device) if self.on_device and not planned else None

    def reserve(self, job: Communicator) -> None:
        """Count the reserve for all communicators made so far."""
        if self.on_device:
            self._count(RESERVE * len(job.communicators()))

    def after_step(self) -> None:
        """Replace the reserve by the measured growth outside of torch's allocator, after the first step."""
        if self._before is None:
            return
        before, self._before = self._before, None
        self._count(max(0, _outside_allocator(self._device) - before))

    def _count(self, size: int) -> None:
        self._accountant.add(Category.COMMUNICATORS, size - self._counted)
        self._counted = size


def _outside_allocator(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)
