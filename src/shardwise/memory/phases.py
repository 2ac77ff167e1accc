"""Memory by category at the phases of a step: the table of `memory_breakdown`."""

from __future__ import annotations

import torch

from shardwise.memory.accountant import Accountant, Tier
from shardwise.units import format_size

BEFORE, FORWARD, BACKWARD, STEP = "before forward", "after forward", "after backward", "after step"
_ORDER = (BEFORE, FORWARD, BACKWARD, STEP)


class MemoryPhases:
    """Records the accountant's bytes at the phases of a step; on CUDA the table includes torch's allocator.

    >>> from shardwise.memory import Category
    >>> accountant = Accountant()
    >>> phases = MemoryPhases(accountant, torch.device("cpu"))
    >>> accountant.add(Category.PARAMETERS, 2048)
    >>> phases.look(BEFORE)
    >>> accountant.add(Category.GRADIENTS, 1024)
    >>> phases.look(STEP)
    >>> print(phases.table())
                before forward   after step         peak
    parameters        2.00 KiB     2.00 KiB     2.00 KiB
    gradients                -     1.00 KiB     1.00 KiB
    total             2.00 KiB     3.00 KiB     3.00 KiB
    """

    def __init__(self, accountant: Accountant, device: torch.device) -> None:
        self._accountant = accountant
        self._device = device
        self._seen: dict[str, dict[str, int]] = {}

    def look(self, phase: str) -> None:
        """Record the current bytes; the last micro-batch counts."""
        live = {tier: self._accountant.live_in(tier) for tier in Tier}
        self._seen[phase] = found = {category.value: size for category, size in live[Tier.DEVICE].items()}
        for tier, sizes in live.items():
            found["total" if tier is Tier.DEVICE else f"on {tier.value}"] = sum(sizes.values())
        if self._device.type == "cuda":
            found["allocated"] = torch.cuda.memory_allocated(self._device)
            found["reserved"] = torch.cuda.memory_reserved(self._device)

    def table(self) -> str:
        """Return the recorded table as text, and reset."""
        seen, self._seen = {phase: self._seen[phase] for phase in _ORDER if phase in self._seen}, {}
        peaks = {category.value: size for category, size in self._accountant.peak.items()}
        for tier in Tier:
            peaks["total" if tier is Tier.DEVICE else f"on {tier.value}"] = self._accountant.peak_total_in(tier)
        if self._device.type == "cuda":
            peaks["allocated"] = torch.cuda.max_memory_allocated(self._device)
            peaks["reserved"] = torch.cuda.max_memory_reserved(self._device)
        names = [name for name in peaks if any(found.get(name) for found in seen.values())]
        left = max(map(len, names), default=0)
        lines = [name.ljust(left) for name in ("", *names)]
        for title, found in {**seen, "peak": peaks}.items():
            cells = [title, *(format_size(found.get(name) or None) for name in names)]
            width = max(len(title), 11) + 2
            lines = [line + cell.rjust(width) for line, cell in zip(lines, cells, strict=True)]
        return "\n".join(lines)
