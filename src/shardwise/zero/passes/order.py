"""Order of the units of a model chunk, and the position of the current pass in it.

Each forward and backward pass unshards every sharded unit exactly once, in an order that all ranks have agreed on,
whether this rank uses the unit or not. Each reducing backward pass reduces every trained unit exactly once. Hence all
ranks launch the same all-gathers and reduce-scatters in the same order, for any branches of their data.

All-gathers and reduce-scatters are two sequences. Two rules prevent ranks from waiting for each other across these:

* A unit is reduced after the launch of all all-gathers up to its own position in the backward order.
* A rank may need an all-gather far ahead of its own reductions. If the host waits for reductions, the rank reports the
  position to its peers (`UnitOrder.lags_behind`); peers that wait in a reduction launch the all-gather. If the device
  orders reductions, the rank does not wait for the all-gather (`UnitOrder.must_not_wait`), but copies the shards.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from enum import Enum
from itertools import accumulate

from shardwise.zero.units.unit import Unit


class Phase(Enum):
    """Phase of a pass."""

    IDLE = "idle"
    """Between passes. All units are resharded, except the unit that is kept for the backward pass."""
    FORWARD = "forward"
    """Inside the outermost forward call."""
    BACKWARD = "backward"
    """Between the first gradient hook and the final callback of autograd."""


class UnitOrder:
    """Orders and positions of one model chunk, which unsharder and reducer share; see the module docstring.

    Attributes:
        indices: indices of the units in the forward and in the backward order.
        forward, backward: sharded units in the order of first use, and in the reverse order of last use, in forward.
        reductions: indices of trained units in the order of reductions, the reverse of the forward order.
        traced: the orders are those of a forward pass, not of registration.
        builds_graph: whether the current or last forward pass records a graph for autograd.
        sequence: units that the current pass unshards, in order; without units that the script keeps unsharded.
        position: index of each unit in `sequence`, by unit index.
        next: number of all-gathers of `sequence` that have been launched.
        following: unit whose all-gather is launched next; None at the end of the pass.
        reduces, reduced: whether the current backward pass reduces gradients, and launched reductions.
        on_device: whether the device orders reductions, and the host does not wait for them.
        lossy_in_flight: number of lossy reductions in flight, which may launch further collectives.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = {unit.index: unit for unit in units}
        self.traced = False
        self.phase = Phase.IDLE
        self.builds_graph = False
        self.sequence: list[Unit] = []
        self.position: dict[int, int] = {}
        self.next = 0
        self.following: Unit | None = None
        self.reduces = self.on_device = False
        self.reduced = self.lossy_in_flight = 0
        order = list(self._units)
        self.set(order, order[::-1])

    def set(self, forward: Sequence[int], backward: Sequence[int]) -> None:
        """Set the orders that all ranks have agreed on (between passes only); units of other chunks are left out."""
        units = self._units
        forward = [index for index in forward if index in units]
        backward = [index for index in backward if index in units]
        self.indices = forward, backward
        self.forward = [units[index] for index in forward if units[index].sharded]
        self.backward = [units[index] for index in backward if units[index].sharded]
        self.reductions = [index for index in reversed(forward) if units[index].trainable]
        self._places = {unit.index: place for place, unit in enumerate(self.backward)}
        # By reduction: the last place in the backward order whose all-gather (of a sharded unit) is launched before it.
        self._launched = list(accumulate((self._places.get(index, -1) for index in self.reductions), max))

    def begin(self, phase: Phase, *, unshards: bool = True) -> None:
        """Begin a pass at its first unit. `unshards` False: the pass reads no parameters, on any rank."""
        self.phase = phase
        order = self.backward if phase is Phase.BACKWARD else self.forward
        self.sequence = [unit for unit in order if not unit.pins] if unshards else []
        self.position = {unit.index: place for place, unit in enumerate(self.sequence)}
        self.advance_to(0)

    def advance_to(self, place: int) -> None:
        """Record that so many all-gathers have been launched."""
        self.next = place
        self.following = self.sequence[place] if place < len(self.sequence) else None

    def lags_behind(self, unit: Unit) -> bool:
        """Return True if a peer may wait in a reduction without having launched the unit's all-gather."""
        if self.on_device or not self.reduces:
            return False
        # A peer at the same position may also wait for the further collectives of a lossy reduction.
        if self.reduced >= len(self.reductions) and not self.lossy_in_flight:
            return False
        return self._launched[min(self.reduced, len(self._launched) - 1)] < self._places.get(unit.index, -1)

    def must_not_wait(self, unit: Unit) -> bool:
        """Return True if the unit's all-gather may run, on another rank, after a reduction to be launched here.

        If the device orders reductions, each rank launches the all-gather at place p before reduction r, the first with
        `_launched[r] >= p`. Then its computing stream waits for reductions up to r - 2 at most. Hence a rank that has
        launched these may wait for the all-gather: each collective waits for earlier ones only.
        """
        if not (self.on_device and self.reduces):
            return False
        first = bisect.bisect_left(self._launched, self._places.get(unit.index, -1))
        return self.reduced < first - 1


class UnitUsage:
    """Counts uses of the units of one model chunk on this rank, in forward passes.

    The first forward pass of a job finds the orders that all ranks then agree on. Counts may differ by rank: they
    decide only when this rank reshards the unit. Passes with and without a graph, as for evaluation, may use units
    differently.

    Attributes:
        first_uses: indices of units in the order of first use in the last forward pass with a graph.
        branches: fingerprint of the uses since the last step, for `strict_sync`.
        untracked: indices of units with unseen uses: they stay unsharded in each backward pass.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = [unit.index for unit in units]
        self._builds_graph = False
        self._passes = {False: 0, True: 0}  # ended forward passes, without and with a graph
        self.first_uses: list[int] = []
        self.branches = 0
        self.untracked: set[int] = set()
        self._last_uses: dict[int, int] = {}
        self._clock = 0
        self._count: dict[int, int] = {}
        counts = {unit.index: len(unit.modules) for unit in units}
        self._expected = {False: counts, True: counts.copy()}

    @property
    def passes(self) -> int:
        """Number of forward passes like the current or last one that have ended."""
        return self._passes[self._builds_graph]

    def begin_forward(self, *, builds_graph: bool) -> None:
        """Begin a forward pass."""
        self._count, self._builds_graph = {}, builds_graph
        if builds_graph:
            self.first_uses, self._last_uses = [], {}

    def end_forward(self) -> None:
        """Learn from the pass how often each unit is used."""
        expected = self._expected[self._builds_graph]
        for index, count in self._count.items():
            known = expected[index] if self.passes else 0
            expected[index] = max(known, count)
        self._passes[self._builds_graph] += 1

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

    def count(self, unit: Unit, *, builds_graph: bool, counts: bool = True) -> bool:
        """Record a use that has ended. `counts`: False if the unit stays unsharded to the end of the pass anyway.

        Returns True if earlier passes have shown no further use.
        """
        if builds_graph:
            self._clock += 1
            self._last_uses[unit.index] = self._clock
        count = self._count[unit.index] = self._count.get(unit.index, 0) + counts
        return count >= self._expected[self._builds_graph][unit.index]

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


class Chunk:
    """A part of the model that runs in passes of its own, in one order on all ranks of the pass group."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.order, self.usage = UnitOrder(units), UnitUsage(units)
