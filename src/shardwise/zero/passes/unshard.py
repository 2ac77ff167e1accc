"""Unsharder: launches all-gathers of units in the agreed order, waits for them, and reshards units after use.

The first use of a unit launches the all-gathers of all units before it in the order; the end of a pass launches the
others. The time of resharding may differ by rank: after as many uses as earlier passes have shown, at the latest at the
end of the pass. The first forward pass, which knows no counts, prefetches nothing, and keeps used units unsharded in
the memory of prefetching (the oldest is resharded first).

The first unit of the backward pass stays unsharded after the forward pass, on all ranks, because all know whether a
backward pass follows. Any other use of the model reshards it (`reshard_kept`). If a rank needs a unit after it has
resharded it, the values come from the peers' shards (`shardwise.zero.passes.sidechannel`), and the unit stays unsharded
to the end of such passes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import zip_longest

from shardwise.comm.collective_queue import CollectiveQueue
from shardwise.errors import ReleasedParameterError, UsageError
from shardwise.zero.passes.order import Chunk, Phase, UnitOrder
from shardwise.zero.passes.peer_shards import PeerShards
from shardwise.zero.units.unit import Unit, UnitState, UnshardReason

_NOTHING = contextlib.nullcontext()


class Unsharder:
    """Unshards and reshards the units of the selected model chunk; see the module docstring.

    `peers` is None if no unit is sharded. `prefetch` launches the next unit's all-gather during the computation of a
    unit; `prefetch_elements` launches more while their units have at most so many elements.

    Attributes:
        suspended: the script has unsharded all units; passes launch no all-gathers.
        reason: why the current pass unshards, the same on all ranks.
        late: number of units copied from peers, because they had been resharded too early.
    """

    def __init__(
        self,
        chunk: Chunk,
        peers: PeerShards | None,
        queue: CollectiveQueue,
        *,
        prefetch: bool = True,
        prefetch_elements: int = 0,
        backward_follows: bool = True,
    ) -> None:
        self.order, self.usage = chunk.order, chunk.usage
        self.suspended = False
        self.reason = UnshardReason.PLAIN
        self.late = 0
        self.peers = peers
        self._queue = queue
        self._prefetch = prefetch
        self._prefetch_elements = prefetch_elements
        self._backward_follows = backward_follows
        self._lock = threading.RLock()  # the thread of the side channel may launch all-gathers, too
        self._blocked = False
        self._backward_passes = 0
        self._needed_by_peers: dict[int, int] = {}  # by backward pass: the last position that a peer waits for
        self._kept: Unit | None = None  # from a forward pass to the backward pass
        self._heir: Unit | None = None  # may get the memory of the unit that was resharded last
        self._recent: dict[int, Unit] = {}  # used units of the first forward pass that are still unsharded
        self._room = 0
        self._from_peers: set[int] = set()  # units copied from peers before the launch of their all-gather
        self._first: Collection[int] = frozenset()
        self._was_ahead = False
        self._keeping: dict[UnitOrder, list[Unit]] = {}  # units that stay unsharded over several passes
        self._to_end: set[int] = set()  # units that stay unsharded to the end of this pass
        self._to_end_of: dict[Phase, set[int]] = {phase: set() for phase in Phase}

    # -- passes ------------------------------------------------------------------------------------------------------

    def select(self, chunk: Chunk) -> None:
        """Choose the chunk of the next pass."""
        with self._lock:
            self.order, self.usage = chunk.order, chunk.usage

    def keep(self, chunk: Chunk) -> None:
        """Keep the units of a chunk unsharded from their next use to `release` (all ranks call)."""
        self.reshard_kept()
        self._keeping[chunk.order] = []

    def release(self, chunk: Chunk) -> None:
        """Reshard the units that have been unsharded since `keep`."""
        for unit in self._keeping.pop(chunk.order, ()):
            unit.pins -= 1
            unit.reshard()
        self._queue.catch_up()

    def begin_forward(self) -> None:
        """Begin a forward pass."""
        self.reshard_kept()
        self._queue.follow()  # because the script may have written into shards since the last pass
        self._begin(Phase.FORWARD)

    def end_forward(self) -> None:
        """Launch the other all-gathers, and reshard all units but the first one of the backward order."""
        self._end(keep=None if self.order in self._keeping else self._first_of_backward)

    def begin_backward(self, *, unshards: bool = True) -> None:
        """Begin a backward pass. `unshards` False: it reads no parameters, on any rank."""
        with self._lock:
            self._backward_passes += 1
            self._begin(Phase.BACKWARD, unshards=unshards)
            if self.order.on_device:
                self._launch_to(self._last_at_start)

    def end_backward(self) -> None:
        """Launch the other all-gathers, and reshard all units."""
        self._end()

    def _begin(self, phase: Phase, *, unshards: bool = True) -> None:
        if self._heir is not None:  # the pass before has not come to its all-gather
            self._heir.drop_inherited()
            self._heir = None
        order = self.order
        order.begin(phase, unshards=unshards)
        if phase is Phase.BACKWARD:
            self.reason = UnshardReason.BACKWARD
        else:
            self.reason = UnshardReason.FORWARD if order.builds_graph else UnshardReason.PLAIN
        self._recent = {}
        self._from_peers = set()
        if not self.usage.passes:
            ahead = order.sequence[1:] if self._prefetch else []
            pairs = zip_longest(order.sequence, ahead)
            self._room = max((unit.nbytes + (other.nbytes if other else 0) for unit, other in pairs), default=0)
        self._to_end = set(self._to_end_of[phase])

    def _end(self, keep: Unit | None = None) -> None:
        order = self.order
        if not self.suspended:
            while (unit := order.following) is not None:
                with self._lock:
                    self._launch_to(order.next)
                if unit is not keep:
                    unit.reshard()  # one at a time, because all-gathers for the peers must not pile up in memory
            for unit in order.sequence:
                if unit is not keep:
                    unit.reshard()
                else:
                    unit.keep_unsharded()
                    self._kept = unit
        self._queue.catch_up()
        with self._lock:
            order.phase, self.reason = Phase.IDLE, UnshardReason.PLAIN
            self._needed_by_peers.pop(self._backward_passes, None)
        self._refuse_lost_changes()

    def _refuse_lost_changes(self) -> None:
        dropped = [name for unit in self.order.sequence for name in unit.dropped]
        for unit in self.order.sequence:
            unit.dropped = []
        if dropped:
            raise UsageError(
                f"parameters were changed in place inside of a pass: {', '.join(dropped)}. Under "
                "zero_optimization.zero_quantized_weights or float8.all_gather it computes with rounded values, and "
                "storing them would round the weights themselves. Make what forward changes a buffer, change it "
                "between steps inside of shardwise.zero.GatheredParameters(..., modifier_rank=0), or switch the key off"
            )

    @property
    def _first_of_backward(self) -> Unit | None:
        return self.order.backward[0] if self._backward_follows and self.order.backward else None

    def reshard_kept(self, units: Sequence[Unit] | None = None) -> None:
        """Reshard the unit that is kept for a backward pass, if it is among `units` (all ranks call)."""
        unit = self._kept
        if unit is not None and (units is None or unit in units):
            self._kept = None
            unit.reshard()

    def is_resharded(self, unit: Unit) -> bool:
        """Return True if the unit is resharded, or unsharded only for the backward pass."""
        return unit.state is UnitState.SHARDED or unit is self._kept

    # -- launching ---------------------------------------------------------------------------------------------------

    def _launch_to(self, position: int) -> int:
        order, launched = self.order, 0
        while order.next <= position:
            unit = order.sequence[order.next]
            if self.peers is not None and unit is not self._kept:
                self.peers.check_present()
            order.advance_to(order.next + 1)
            launched += 1
            if unit is self._kept:
                self._kept = None
            elif unit.state is UnitState.SHARDED and unit.index not in self._from_peers:
                unit.unshard(self.reason)
            else:
                unit.join_unshard(self.reason)  # it is unsharded here, but the peers need this rank's shard
            if order in self._keeping:
                unit.pins += 1
                self._keeping[order].append(unit)
            following = order.following
            if following is not None and following.away and following is not self._kept:
                following.look_ahead()
        return launched

    def launch_through(self, unit: Unit) -> None:
        """Launch all-gathers up to the position of a unit, before its gradients are reduced."""
        order = self.order
        if order.phase is Phase.BACKWARD and not self.suspended:
            position = order.position.get(unit.index, -1)
            if order.next <= position:
                with self._lock:
                    self._launch_to(position)

    def launch_rest(self) -> None:
        """Launch the other all-gathers of a backward pass, of units that this rank does not need."""
        order = self.order
        while order.phase is Phase.BACKWARD and not self.suspended and (unit := order.following) is not None:
            with self._lock:
                self._launch_to(order.next)
            unit.reshard()

    def launch_first(self, units: Collection[int]) -> None:
        """Launch all-gathers up to these units, by index, at the beginning of each backward pass (all ranks call).

        Because no rank waits for a reduction then, ranks that need the units early may wait for their all-gathers.
        """
        self._first = frozenset(units)

    @property
    def _last_at_start(self) -> int:
        return max((self.order.position.get(index, -1) for index in self._first), default=-1)

    # -- peers -------------------------------------------------------------------------------------------------------

    def blocked(self) -> AbstractContextManager[None]:
        """Let the side channel launch all-gathers for peers in the block, in which this rank waits for a reduction."""
        return _NOTHING if self.peers is None else self._while_blocked()

    @contextlib.contextmanager
    def _while_blocked(self) -> Iterator[None]:
        assert self.peers is not None
        self.peers.raise_helper_error()
        with self._lock:
            self._blocked = True
            self._launch_for_peers()
        try:
            yield
        finally:
            with self._lock:
                self._blocked = False

    def on_peer_blocked(self, number: int, position: int) -> None:
        """Record that a peer waits for the all-gather at a position of a backward pass (called on any thread)."""
        with self._lock:
            self._needed_by_peers[number] = max(position, self._needed_by_peers.get(number, -1))
            if self._blocked:
                self._launch_for_peers()

    def _launch_for_peers(self) -> None:
        if self.order.phase is Phase.BACKWARD and not self.suspended:
            self._launch_to(self._needed_by_peers.get(self._backward_passes, -1))

    # -- units -------------------------------------------------------------------------------------------------------

    def unshard(self, unit: Unit) -> None:
        """Wait until a unit is unsharded; launch its all-gather, and those before it in the order, if necessary."""
        if unit.sharded and not self.suspended:
            if self.peers is not None:
                self.peers.raise_helper_error()
            position = self.order.position.get(unit.index, -1)
            if self._recent:
                self._make_room(unit, position)
            if self.order.phase is Phase.BACKWARD and self._must_not_wait(unit, position):
                self._copy_from_peers(unit)
                self._from_peers.add(unit.index)
                self._was_ahead = True
            else:
                with self._lock:
                    self._launch_to(position)
                    resharded = unit.state is UnitState.SHARDED
                if resharded:
                    self._unshard_late(unit)
                if self._prefetch and (self.usage.passes or self.order.phase is Phase.BACKWARD):
                    self._launch_ahead(position)
            order = self.order
            if order.phase is Phase.BACKWARD and unit.state is UnitState.UNSHARDING and order.lags_behind(unit):
                assert self.peers is not None
                self.peers.want(self._backward_passes, position)
        unit.wait_for_unshard()

    def take_ahead(self) -> bool:
        """Return True if a unit was needed far ahead of this rank's reductions since the last call."""
        found, self._was_ahead = self._was_ahead, False
        return found

    def _must_not_wait(self, unit: Unit, position: int) -> bool:
        """Return True if waiting for the all-gather of a unit could let ranks wait for each other."""
        late = unit.state is not UnitState.UNSHARDED and position > self._last_at_start
        return late and self.order.must_not_wait(unit)

    def _make_room(self, unit: Unit, position: int) -> None:
        """Reshard units that the first forward pass has used, until the units needed now fit."""
        self._recent.pop(unit.index, None)
        while self._recent:
            order = self.order
            coming = {other.index for other in order.sequence[order.next : position + 1]} | {unit.index}
            there = [u for u in order.sequence if u.index in coming or u.state is not UnitState.SHARDED]
            if sum(other.nbytes for other in there) <= self._room:
                return
            self._recent.pop(next(iter(self._recent))).reshard()

    def _launch_ahead(self, position: int) -> None:
        order = self.order
        budget = self._prefetch_elements
        for ahead in range(position + 1, len(order.sequence)):
            budget -= order.sequence[ahead].numel
            if ahead > position + 1 and budget < 0:
                return
            with self._lock:
                self._launch_to(ahead)

    def _unshard_late(self, unit: Unit) -> None:
        if self.peers is None:
            raise ReleasedParameterError(
                f"unit {unit.name!r} is needed again after it was resharded, and no peer can be asked for its shards"
            )
        self.late += 1
        self.keep_to_end(unit)
        self._copy_from_peers(unit)

    def _copy_from_peers(self, unit: Unit) -> None:
        assert self.peers is not None
        if unit.state is UnitState.UNSHARDING:
            self._queue.leave()  # the running all-gather writes into freed memory, and reads the shard
        for section in unit.sections:
            section.allocate()
        self.peers.fetch(unit)
        unit.fetched(self.reason)

    def keep_to_end(self, unit: Unit, *, of_each: bool = False) -> None:
        """Keep a unit unsharded to the end of this pass; `of_each`: and of each later pass of this phase."""
        self._to_end.add(unit.index)
        if of_each:
            self._to_end_of[self.order.phase].add(unit.index)

    def after_forward_use(self, unit: Unit) -> None:
        """Reshard a unit that a forward pass has used as often as earlier passes."""
        if unit is self._first_of_backward or unit.index in self._to_end or self.suspended:
            return
        if self.usage.passes:
            self._reshard(unit)
        else:
            self._recent[unit.index] = unit

    def after_backward_use(self, unit: Unit) -> None:
        """Reshard a unit when its gradients are complete and all of its calls have been differentiated."""
        if self.order.phase is Phase.BACKWARD and unit.index not in self._to_end and not self.suspended:
            self._reshard(unit)

    def _reshard(self, unit: Unit) -> None:
        with self._lock:  # peers may have all-gathers launched
            following = self.order.following
            self._heir = following if following is not None and following.state is UnitState.SHARDED else None
            unit.reshard(self._heir)
