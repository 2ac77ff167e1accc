"""The accountant: live and peak bytes by category.

The engine tells it about each of its buffers when the buffer comes and goes. The engine's memory is therefore known
exactly at any time, on any device, without asking an allocator.
"""

from __future__ import annotations

from enum import Enum


class Category(Enum):
    """What a byte is for."""

    PARAMETERS = "parameters"
    """Shards (or, where parameters are not sharded, whole copies) in the dtype the modules compute with."""
    GRADIENTS = "gradients"
    """Accumulated gradients of this rank's range, and whole ones where gradients are not sharded."""
    MASTER = "master weights"
    """fp32 copies that the optimizer updates."""
    OPTIMIZER = "optimizer state"
    """What the optimizer keeps for each element (two moments for Adam)."""
    BUFFERS = "communication buffers"
    """Gradients on their way to the reduction, and pieces received for it."""
    GATHERED = "gathered window"
    """Whole units that are gathered for computing and released after it."""
    ACTIVATIONS = "activations"
    """Tensors saved by autograd for the backward pass, and temporaries of the modules."""
    OTHER = "other"
    """Module buffers and everything else."""


class Accountant:
    """Counts bytes by category.

    Example:
        >>> accountant = Accountant()
        >>> accountant.add(Category.GATHERED, 100)
        >>> accountant.remove(Category.GATHERED, 60)
        >>> accountant.live[Category.GATHERED], accountant.peak[Category.GATHERED], accountant.peak_total
        (40, 100, 100)
    """

    def __init__(self) -> None:
        self.live: dict[Category, int] = dict.fromkeys(Category, 0)
        self.peak: dict[Category, int] = dict.fromkeys(Category, 0)
        self.total = 0
        self.peak_total = 0
        self.at_peak: dict[Category, int] = dict(self.live)

    def add(self, category: Category, size: int) -> None:
        """Count `size` more bytes."""
        self.live[category] += size
        self.total += size
        if self.live[category] > self.peak[category]:
            self.peak[category] = self.live[category]
        if self.total > self.peak_total:
            self.peak_total = self.total
            self.at_peak = dict(self.live)

    def remove(self, category: Category, size: int) -> None:
        """Count `size` fewer bytes."""
        self.live[category] -= size
        self.total -= size

    def reset_peak(self) -> None:
        """Begin a new measurement: peaks start from what is live now."""
        self.peak = dict(self.live)
        self.peak_total = self.total
        self.at_peak = dict(self.live)
