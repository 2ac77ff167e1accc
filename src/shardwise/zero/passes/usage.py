"""Usage of units in forward passes: order and number of uses of each unit on this rank.

The first forward pass of a job finds the orders that all ranks then agree on (`shardwise.zero.passes.order`). Counts
may differ by rank: they decide only when this rank reshards the unit.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.zero.units.unit import Unit


class UnitUsage:
    """Counts uses of the units of one pass.

    Attributes:
        passes: number of forward passes that have ended.
        first_uses: indices of units in the order of first use in the last forward pass with a graph.
        branches: fingerprint of the uses since the last step, for `strict_sync`.
        untracked: indices of units with unseen uses: they stay unsharded in each backward pass.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = [unit.index for unit in units]
        self.passes = 0
        self.first_uses: list[int] = []
        self.branches = 0
        self.untracked: set[int] = set()
        self._last_uses: dict[int, int] = {}
        self._clock = 0
        self._count: dict[int, int] = {}
        self._expected = {unit.index: len(unit.modules) for unit in units}

    def begin_forward(self, *, builds_graph: bool) -> None:
        """Begin a forward pass."""
        self._count = {}
        if builds_graph:
            self.first_uses, self._last_uses = [], {}

    def end_forward(self) -> None:
        """Learn from the pass how often each unit is used."""
        for index, count in self._count.items():
            known = self._expected[index] if self.passes else 0
            self._expected[index] = max(known, count)
        self.passes += 1

    def enter(self, unit: Unit) -> None:
        """Record that a module of the unit is called in a forward pass with a graph."""
        self.branches = hash((self.branches, unit.index))
        if unit.index not in self._count:
            self.first_uses.append(unit.index)

    def touch(self, unit: Unit) -> None:
        """Record that a parameter of the unit is used outside of its module in a forward pass with a graph."""
        if unit.index not in self._count:
            self.first_uses.append(unit.index)
            self._count[unit.index] = 0

    def count(self, unit: Unit, *, builds_graph: bool) -> bool:
        """Count a use that has ended; return True if earlier passes have shown no further use."""
        if builds_graph:
            self._clock += 1
            self._last_uses[unit.index] = self._clock
        count = self._count[unit.index] = self._count.get(unit.index, 0) + 1
        return count >= self._expected[unit.index]

    def forward_order(self) -> list[int]:
        """Return all units in the order of first use in the last forward pass; unused ones follow their predecessor."""
        return self._by_use({index: place for place, index in enumerate(self.first_uses)})

    def backward_order(self) -> list[int]:
        """Return all units in the reverse order of last use; a tied embedding is first and last."""
        return self._by_use(self._last_uses)[::-1]

    def _by_use(self, use: dict[int, int]) -> list[int]:
        keys: dict[int, tuple[int, int]] = {}
        last = -1
        for index in self._units:
            last = use.get(index, last)
            keys[index] = (last, index)
        return sorted(keys, key=lambda index: keys[index])
