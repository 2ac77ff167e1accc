"""Memory by category at the phases of a step: the table of `memory_breakdown`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shardwise.memory.accountant import Accountant, Category, Tier
from shardwise.memory.report import readable

BEFORE, FORWARD, BACKWARD, STEP = "before forward", "after forward", "after backward", "after step"
_ORDER = (BEFORE, FORWARD, BACKWARD, STEP)


class MemoryPhases:
    """Records the accountant's bytes at the phases of a step; on CUDA the table includes torch's allocator.

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
        self._seen[phase] = _figures(
            {tier: self._accountant.live_in(tier) for tier in Tier},
            *(
                (torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device))
                if self._device.type == "cuda"
                else ()
            ),
        )

    def table(self) -> str:
        """Return the recorded table as text, and reset."""
        seen, self._seen = {phase: self._seen[phase] for phase in _ORDER if phase in self._seen}, {}
        peaks = {category.value: size for category, size in self._accountant.peak.items()}
        peaks["total"] = self._accountant.peak_total
        peaks |= {f"on {tier.value}": self._accountant.peak_total_in(tier) for tier in Tier if tier is not Tier.DEVICE}
        if self._device.type == "cuda":
            peaks["allocated"] = torch.cuda.max_memory_allocated(self._device)
            peaks["reserved"] = torch.cuda.max_memory_reserved(self._device)
        names = [name for name in peaks if any(found.get(name) for found in seen.values())]
        columns = {**seen, "peak": peaks}
        left = max(map(len, names), default=0)
        widths = {title: max(len(title), 11) + 2 for title in columns}
        lines = [" " * left + "".join(f"{title:>{widths[title]}}" for title in columns)]
        for name in names:
            cells = [f"{readable(found.get(name) or None):>{widths[title]}}" for title, found in columns.items()]
            lines.append(f"{name:<{left}}" + "".join(cells))
        return "\n".join(lines)


def _figures(
    live: Mapping[Tier, Mapping[Category, int]], allocated: int | None = None, reserved: int | None = None
) -> dict[str, int]:
    found = {category.value: size for category, size in live[Tier.DEVICE].items()}
    found["total"] = sum(live[Tier.DEVICE].values())
    found |= {f"on {tier.value}": sum(sizes.values()) for tier, sizes in live.items() if tier is not Tier.DEVICE}
    if allocated is not None and reserved is not None:
        found |= {"allocated": allocated, "reserved": reserved}
    return found
