"""The gatherer: when units are gathered and released, in one order that all ranks share.

Every forward pass and every backward pass gathers each sharded unit exactly once, in an agreed order (of first use in
the forward pass; of last use, reversed, in the backward pass), whether this rank uses it or not. Entering a unit
launches the gathers of all units before it; a pass ends by launching what is left. All ranks therefore launch the same
gathers in the same order whatever branches their data takes, and none can wait for a collective that another never
launches.

The unit that a backward pass needs first is kept from the end of the forward pass before it, and not gathered again: on
every rank, because whether a pass follows is the same on all. Whatever comes between the two releases it (`let_go`).

What is free to differ between ranks is how long a unit is kept. A unit is released after as many uses as earlier passes
on this rank have shown, and at the latest at the end of the pass. In the first pass, before anything is known, nothing
is gathered ahead; in that room units stay that have been used, and the oldest gives way when another one comes. If a
rank needs a unit once more after its release, its values come from the peers through
`shardwise.zero.passes.sidechannel`, outside the order of collectives, and the unit is kept longer from then on.

Gathers and reductions are two sequences, and a rank may wait in either. So that two ranks never wait for each other
across them, (1) a unit is reduced only after every gather up to its own place has been launched, and (2) a rank that
needs a gather ahead of its own reductions says so, and peers that wait for a reduction launch it (`parked`).
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from shardwise.comm.collective_queue import CollectiveQueue
from shardwise.compat import backward_pass, never_compiled
from shardwise.errors import ReleasedParameterError, UsageError
from shardwise.registry import Registry
from shardwise.trees import tensors_in
from shardwise.zero.passes.calls import AtEnd, Use
from shardwise.zero.passes.saved import SavedValues
from shardwise.zero.units.presence import Presence
from shardwise.zero.units.unit import Unit, UnitState, UnshardReason

_NOTHING = contextlib.nullcontext()


class Phase(Enum):
    """What the engine's model is doing."""

    IDLE = "idle"
    """Between passes. Sharded units are released, but for one; whole values are nobody's business."""
    FORWARD = "forward"
    """Inside the outermost forward call. Units are gathered in order."""
    BACKWARD = "backward"
    """Between the first gradient hook and autograd's final callback. Units are gathered in reverse order."""


class Touch(NamedTuple):
    """A use of a parameter outside of its own module that may be differentiated."""

    use: Use
    watched: bool
    """Whether what autograd saves is watched on its behalf."""


class Channel(Protocol):
    """Help from the peers without a collective."""

    def fetch(self, unit: Unit) -> None:
        """Fill the (allocated) whole values of `unit` from the peers' shards."""

    def want(self, number: int, place: int) -> None:
        """Tell the peers that backward pass `number` waits for the gather at `place`."""

    def check_present(self) -> None:
        """Raise if a peer will not take part in another gather."""

    def attend(self) -> None:
        """Be told that the thread of the pass goes on; raise what has failed while peers were helped."""


class Reductions(Protocol):
    """The other half of the passes (`shardwise.zero.passes.reduce.Reducer`)."""

    @property
    def on_device(self) -> bool:
        """Whether the device alone orders reductions."""

    def begin(self) -> None:
        """Start a backward pass; nothing happens in one that has been started."""

    def end(self) -> None:
        """End a backward pass."""

    def advance(self, unit: Unit) -> None:
        """Something has happened that may complete the gradients of a unit."""

    def lags_behind(self, index: int) -> bool:
        """Whether a peer may wait for a reduction still to come here without having launched the gather of a unit."""

    def waits_for_peers(self, index: int) -> bool:
        """Whether the gather of a unit may run, on another rank, behind a reduction still to be launched here."""


class Gatherer:
    """Gathers and releases the units of one engine; see the module docstring.

    Args:
        units: all units, in registration order.
        registry: finds the unit of a parameter.
        channel: rescue for units that are needed again after their release; None where nothing is sharded.
        gathers: launches what units gather.
        presence: knows whether the parameters have been moved off the device.
        prefetch: gather the next unit while the current one computes.
        prefetch_elements: gather further units ahead as long as they have at most this many elements together.
        backward: whether backward passes are to be expected.

    Attributes:
        reducer: the other half of the passes; None where nothing is trained.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        registry: Registry,
        channel: Channel | None,
        gathers: CollectiveQueue,
        presence: Presence,
        *,
        prefetch: bool = True,
        prefetch_elements: int = 0,
        backward: bool = True,
    ) -> None:
        self.units = list(units)
        self.registry = registry
        self.phase = Phase.IDLE
        self._heir: Unit | None = None
        self.suspended = False
        self.rescues = 0
        self._channel = channel
        self._gathers = gathers
        self._presence = presence
        self._lock = threading.RLock()
        self._parked = False
        self._passes_back = 0
        self._wanted: dict[int, int] = {}
        self._prefetch = prefetch
        self._prefetch_elements = prefetch_elements
        self._backward_follows = backward
        self._waiting: Unit | None = None  # since the end of a forward pass, for the backward pass
        self._unit_of = {tensor.index: unit for unit in units for tensor in unit.tensors}
        self._order: list[Unit] = []
        self._back: list[Unit] = []
        self._sequence: list[Unit] = []
        self._position: dict[int, int] = {}
        self._next = 0
        self._visited: dict[int, int] = {}
        self._expected = {unit.index: len(unit.modules) for unit in units}
        self._passes = 0
        self._resting: dict[int, Unit] = {}
        self._room = 0
        self._fetched: set[int] = set()  # units that came from the peers before their gather was launched
        self._at_once: Collection[int] = frozenset()
        self._was_ahead = False
        self._held: set[int] = set()
        self._late: dict[Phase, set[int]] = {phase: set() for phase in Phase}
        self.saved = SavedValues(self._recall)
        self.kept: set[int] = set()
        self._with_graph = False
        self._uses: dict[int, weakref.WeakSet[Use]] = {unit.index: weakref.WeakSet() for unit in units}
        self._recomputed: dict[int, int] = {}
        self._used: set[int] = set()
        self._watched: set[int] = set()
        self._to_watch: set[int] | None = None
        self.trace: list[int] = []
        self.branches = 0
        self._last_use: dict[int, int] = {}
        self._clock = 0
        self._inside: dict[int, int] = {}
        self._untracked: set[int] = set()
        self.reducer: Reductions | None = None
        self._closed = False
        self._at_end: AtEnd | None = None
        order = [unit.index for unit in self.units]
        self.set_order(order, order[::-1])

    def close(self) -> None:
        """Follow no pass any more: graphs that are left differentiate a plain model."""
        self._closed, self.reducer = True, None

    # -- order -------------------------------------------------------------------------------------------------------

    @property
    def order(self) -> list[int]:
        """Indices of the sharded units in the agreed forward order."""
        return [unit.index for unit in self._order]

    def set_order(self, order: Sequence[int], backward: Sequence[int]) -> None:
        """Adopt orders of all units for the two passes that all ranks have agreed on (between passes only)."""
        by_index = {unit.index: unit for unit in self.units}
        self._order = [by_index[index] for index in order if by_index[index].sharded]
        self._back = [by_index[index] for index in backward if by_index[index].sharded]

    def traced_order(self) -> list[int]:
        """Return all units in the order of first use in the last forward pass; unused ones follow their predecessor."""
        return self._by_use({index: place for place, index in enumerate(self.trace)})

    def traced_backward(self) -> list[int]:
        """Return all units in the reverse order of their last use in the last forward pass.

        It is not the reverse of `traced_order`: a tied embedding is used first and last.
        """
        return self._by_use(self._last_use)[::-1]

    def _by_use(self, use: dict[int, int]) -> list[int]:
        keys: dict[int, tuple[int, int]] = {}
        last = -1
        for unit in self.units:
            last = use.get(unit.index, last)
            keys[unit.index] = (last, unit.index)
        return sorted(keys, key=lambda index: keys[index])

    def _note_use(self, unit: Unit) -> None:
        if self._with_graph:
            self._clock += 1
            self._last_use[unit.index] = self._clock

    # -- passes ------------------------------------------------------------------------------------------------------

    def check_forward(self) -> None:
        """Raise if no forward pass can be started.

        Raises:
            UsageError: the parameters have been moved off the device.
        """
        self._presence.require("a forward pass cannot begin", values=True)

    def begin_forward(self) -> None:
        """Start a forward pass."""
        self.let_go()
        self._gathers.follow()  # what the script may have written into shards since the last pass
        self.phase = Phase.FORWARD
        self._with_graph = torch.is_grad_enabled()
        if self._with_graph:
            self.trace, self._last_use = [], {}
        self._begin(self._order)

    def end_forward(self) -> None:
        """End a forward pass: launch the gathers that are left, release everything, learn how often units are used."""
        self.saved.close_all()
        for index, count in self._visited.items():
            known = self._expected[index] if self._passes else 0
            self._expected[index] = max(known, count)
        self._passes += 1
        self._drain(keep=self._first_back())

    def _first_back(self) -> Unit | None:
        """The unit that is kept through the end of this forward pass for the backward pass."""
        return self._back[0] if self._backward_follows and self._back else None

    def let_go(self, units: Sequence[Unit] | None = None) -> None:
        """Release what waits for a backward pass, if it is among `units`: something else comes first, on all ranks."""
        unit = self._waiting
        if unit is not None and (units is None or unit in units):
            self._waiting = None
            unit.release()

    def absent(self, unit: Unit) -> bool:
        """Whether the values of a unit are nobody's business now, as far as they are here at all."""
        return unit.state is UnitState.RELEASED or unit is self._waiting

    @never_compiled
    def start_backward(self) -> None:
        """Called by the first hook that a backward pass reaches, any number of times."""
        # If the model differentiates a part of itself, that is a part of the forward pass.
        if self._closed or self.phase is Phase.FORWARD:
            return
        if self.reducer is not None:
            self.reducer.begin()
            return
        self._presence.require("a backward pass cannot begin", values=True)
        # Nothing is trained, but gradients of the inputs are wanted (a frozen teacher, an adversary).
        if self.phase is Phase.BACKWARD:
            if self._at_end is None or not self._at_end.dropped:
                return
            self.end_backward()
        self._at_end = AtEnd(self.end_backward)
        self.begin_backward()

    def cut_backward_short(self) -> None:
        """End a backward pass that an exception has ended."""
        if self.reducer is not None:
            self.reducer.end()
        else:
            self.end_backward()

    @property
    def untracked(self) -> list[int]:
        """Indices of units that this rank has from the beginning to the end of each backward pass."""
        return sorted(self._untracked)

    def launch_at_once(self, units: Collection[int]) -> None:
        """Launch the gathers up to these units when a backward pass begins, on all ranks.

        No rank has waited for a reduction then, so whoever needs the units may wait for their gathers.
        """
        self._at_once = frozenset(units)

    def begin_backward(self) -> None:
        """Start a backward pass."""
        if self.phase is Phase.FORWARD:
            self.end_forward()  # it was interrupted, and nothing has called since
        with self._lock:
            self.phase = Phase.BACKWARD
            self._passes_back += 1
            self._begin(self._back)
            if self.reducer is not None and self.reducer.on_device:
                self._launch_to(self._last_at_once)
        for unit in self._back:
            if unit.index in self._untracked:
                self._held.add(unit.index)
                self.need(unit)
                unit.expose()

    @never_compiled
    def end_backward(self) -> None:
        """End a backward pass: launch the gathers that are left and release everything."""
        self._drain()
        self._recomputed.clear()
        # Graphs that this pass has not touched may still be differentiated.
        self._used = {index for index, uses in self._uses.items() if uses}
        self._watched &= self._used

    def _begin(self, order: list[Unit]) -> None:
        if self._heir is not None:  # the pass before has not come to its gather
            self._heir.renounce()
            self._heir = None
        # What the script has gathered around the pass is whole on all ranks.
        self._sequence = [unit for unit in order if not unit.pins]
        self._position = {unit.index: place for place, unit in enumerate(self._sequence)}
        self._next = 0
        self._visited = {}
        self._inside = {}
        self._resting = {}
        self._fetched = set()
        if not self._passes:
            ahead = self._sequence[1:] if self._prefetch else []
            pairs = zip_longest(self._sequence, ahead)
            self._room = max((unit.nbytes + (other.nbytes if other else 0) for unit, other in pairs), default=0)
        # Units that are used outside of their own modules; the memory plan asks for them.
        self.kept |= self._held
        self._held = set(self._late[self.phase])
        self.saved.forget()

    def _drain(self, keep: Unit | None = None) -> None:
        if not self.suspended:
            while self._next < len(self._sequence):
                with self._lock:
                    place = self._next
                    self._launch_to(place)
                # One at a time: what is launched only for the others' sake must not pile up here.
                if self._sequence[place] is not keep:
                    self._sequence[place].release()
            for unit in self._sequence:
                if unit is not keep:
                    unit.release()
                else:
                    unit.wait_concealed()
                    self._waiting = unit
        self._gathers.catch_up()
        with self._lock:
            self.phase = Phase.IDLE
            self._wanted.pop(self._passes_back, None)
        self._refuse_dropped()

    def _refuse_dropped(self) -> None:
        """Raise for changes that this pass has made and that are lost, now that the pass has ended on this rank.

        Raises:
            UsageError: see above.
        """
        dropped = [name for unit in self._sequence for name in unit.dropped]
        for unit in self._sequence:
            unit.dropped = []
        if dropped:
            raise UsageError(
                f"parameters were changed in place inside of a pass: {', '.join(dropped)}. Under "
                "zero_optimization.zero_quantized_weights it computes with rounded values, and storing them would "
                "round the weights themselves. Make what forward changes a buffer, change it between steps inside of "
                "shardwise.zero.GatheredParameters(..., modifier_rank=0), or switch zero_quantized_weights off"
            )

    def _launch_to(self, place: int) -> int:
        """Launch all gathers up to `place` that have not been launched in this pass; return how many."""
        launched = 0
        while self._next <= place:
            unit = self._sequence[self._next]
            if self._channel is not None and unit is not self._waiting:
                self._channel.check_present()
            self._next += 1
            launched += 1
            if unit is self._waiting:
                self._waiting = None
            elif unit.state is UnitState.RELEASED and unit.index not in self._fetched:
                unit.start_gather(self._purpose)
            else:
                # Already whole here (the user gathered it), but the others need this rank's part.
                unit.join_gather(self._purpose)
            following = self._sequence[self._next] if self._next < len(self._sequence) else None
            if following is not None and following is not self._waiting:
                following.look_ahead()
        return launched

    @property
    def _purpose(self) -> UnshardReason:
        """What this pass gathers for, the same on all ranks."""
        if self.phase is Phase.BACKWARD:
            return UnshardReason.BACKWARD
        return UnshardReason.FORWARD if self.phase is Phase.FORWARD and self._with_graph else UnshardReason.PLAIN

    def launch_through(self, unit: Unit) -> None:
        """Launch the gathers up to a unit's place in the backward order, before its gradients are reduced."""
        if self.phase is Phase.BACKWARD and not self.suspended:
            with self._lock:
                self._launch_to(self._position.get(unit.index, -1))

    def launch_rest(self) -> None:
        """Launch the gathers that are left of a backward pass, whose values this rank does not need."""
        while self.phase is Phase.BACKWARD and not self.suspended and self._next < len(self._sequence):
            with self._lock:
                unit = self._sequence[self._next]
                self._launch_to(self._next)
            unit.release()

    def parked(self) -> AbstractContextManager[None]:
        """Block on a reduction inside: meanwhile the side channel may launch gathers that others wait for."""
        return _NOTHING if self._channel is None else self._park()

    @contextlib.contextmanager
    def _park(self) -> Iterator[None]:
        assert self._channel is not None
        self._channel.attend()
        with self._lock:
            self._parked = True
            self._serve_wanted()
        try:
            yield
        finally:
            with self._lock:
                self._parked = False

    def wanted(self, number: int, place: int) -> None:
        """A peer waits for the gather at `place` of backward pass `number` (called by the side channel's thread)."""
        with self._lock:
            self._wanted[number] = max(place, self._wanted.get(number, -1))
            if self._parked:
                self._serve_wanted()

    def _serve_wanted(self) -> None:
        if self.phase is Phase.BACKWARD and not self.suspended:
            self._launch_to(self._wanted.get(self._passes_back, -1))

    # -- units -------------------------------------------------------------------------------------------------------

    def need(self, unit: Unit) -> None:
        """Make the values of a unit valid, launching whatever comes before it in the order."""
        if unit.sharded and not self.suspended:
            if self._channel is not None:
                self._channel.attend()
            place = self._position.get(unit.index, -1)
            self._make_room(unit, place)
            if self._must_not_wait(unit):
                self._fetch(unit)
                self._fetched.add(unit.index)
                self._was_ahead = True
            else:
                with self._lock:
                    self._launch_to(place)
                    released = unit.state is UnitState.RELEASED
                if released:
                    self._rescue(unit)
                self._look_ahead(place)
            lags = self.reducer is not None and self.reducer.lags_behind(unit.index)
            if self.phase is Phase.BACKWARD and unit.state is UnitState.GATHERING and lags:
                assert self._channel is not None
                self._channel.want(self._passes_back, place)
        unit.finish_gather()
        if unit.sharded:
            self.saved.know(unit)

    def take_ahead(self) -> bool:
        """Return whether a unit was needed far ahead of this rank's reductions since the last call."""
        found, self._was_ahead = self._was_ahead, False
        return found

    @property
    def _last_at_once(self) -> int:
        """The last place in the backward order whose gather is launched when a pass begins."""
        return max((self._position.get(index, -1) for index in self._at_once), default=-1)

    def _must_not_wait(self, unit: Unit) -> bool:
        """Return whether waiting for the gather of a unit could have ranks wait for each other."""
        if self.phase is not Phase.BACKWARD or self.reducer is None or unit.state is UnitState.GATHERED:
            return False
        if self._position.get(unit.index, -1) <= self._last_at_once:
            return False
        return self.reducer.waits_for_peers(unit.index)

    def _make_room(self, unit: Unit, place: int) -> None:
        """Release units of the first pass that may be used again, but for as many as fit beside what is needed now."""
        self._resting.pop(unit.index, None)
        while self._resting:
            coming = {other.index for other in self._sequence[self._next : place + 1]} | {unit.index}
            whole = [u for u in self._sequence if u.index in coming or u.state is not UnitState.RELEASED]
            if sum(other.nbytes for other in whole) <= self._room:
                return
            self._resting.pop(next(iter(self._resting))).release()

    def _look_ahead(self, place: int) -> None:
        if not self._prefetch or not (self._passes or self.phase is Phase.BACKWARD):
            return
        budget = self._prefetch_elements
        ahead = place + 1
        while ahead < len(self._sequence):
            budget -= self._sequence[ahead].numel
            if ahead > place + 1 and budget < 0:
                return
            with self._lock:
                self._launch_to(ahead)
            ahead += 1

    def _rescue(self, unit: Unit) -> None:
        if self._channel is None:
            raise ReleasedParameterError(
                f"unit {unit.name!r} is needed again after its release and there is no way to fetch it"
            )
        self.rescues += 1
        self._held.add(unit.index)
        self._fetch(unit)

    def _fetch(self, unit: Unit) -> None:
        """Bring the values of a unit from the peers' shards, without a collective."""
        assert self._channel is not None
        if unit.state is UnitState.GATHERING:
            self._gathers.leave()  # it goes on into memory that is given back, and reads the shard
        for section in unit.sections:
            section.allocate()
        self._channel.fetch(unit)
        unit.fetched(self._purpose)

    def enter(self, unit: Unit) -> None:
        """A module of the unit is about to compute."""
        if self.phase is Phase.FORWARD and self._with_graph:
            self.branches = hash((self.branches, unit.index))
            if unit.index not in self._visited:
                self.trace.append(unit.index)
            self._used.add(unit.index)
            if not torch.is_grad_enabled():
                self._recomputed[unit.index] = self._recomputed.get(unit.index, 0) + 1
        elif self.phase is Phase.BACKWARD and self._recomputed.get(unit.index) and torch.is_grad_enabled():
            self._recomputed[unit.index] -= 1
        self.need(unit)
        self._inside[unit.index] = self._inside.get(unit.index, 0) + 1
        unit.expose()

    def leave(self, unit: Unit) -> None:
        """A module of the unit has computed."""
        self._inside[unit.index] = max(0, self._inside.get(unit.index, 0) - 1)
        if self.phase is Phase.FORWARD:
            self._conceal(unit)
            self._count_use(unit)

    def _conceal(self, unit: Unit) -> None:
        """Outside of its modules a unit's parameters are withheld even while it is gathered: uses must be noticed."""
        if unit.sharded and not self._inside.get(unit.index):
            unit.conceal()

    def _count_use(self, unit: Unit) -> None:
        self._note_use(unit)
        count = self._visited.get(unit.index, 0) + 1
        self._visited[unit.index] = count
        if unit is self._first_back() and self.phase is Phase.FORWARD:
            return
        if count >= self._expected[unit.index] and unit.index not in self._held and not self.suspended:
            if self._passes:
                self._release(unit)
            else:
                self._resting[unit.index] = unit

    # -- backward ----------------------------------------------------------------------------------------------------

    def differentiated(self, unit: Unit) -> bool:
        """Whether the graph of a forward call made now may be differentiated later.

        In the backward pass a call is a recomputation. Its graph is used only if the first forward had none (re-entrant
        checkpointing).
        """
        if not torch.is_grad_enabled():
            return False
        return self.phase is Phase.FORWARD or (self.phase is Phase.BACKWARD and unit.index in self._recomputed)

    def watches(self, unit: Unit) -> bool:
        """Whether calls of the unit are followed through the backward pass.

        Sharded units are, because their values must be there. Others are as long as autograd's graph has not shown all
        their gradients to come directly, not from re-entrant checkpoints.
        """
        return unit.sharded or self._to_watch is None or unit.index in self._to_watch

    def watch_from_now_on(self, nested: set[int]) -> None:
        """Learn from a backward pass which units may get gradients from nested passes."""
        self._to_watch = nested if self._to_watch is None else self._to_watch | nested

    def used(self, unit: Unit) -> bool:
        """Whether the unit has computed something that may be differentiated."""
        return unit.index in self._used

    def settled(self, unit: Unit) -> bool:
        """Whether all calls of the unit that are to be differentiated have been, as far as they are watched."""
        return unit.index in self._watched and not self._recomputed.get(unit.index) and not self._uses[unit.index]

    def begin_use(self, units: Sequence[Unit]) -> Use:
        """Follow a call of the units' module that begins now.

        The units count as in use until its graph has been differentiated, or dies, or the backward pass ends.
        """

        def done(use: Use) -> None:
            for unit in units:
                self._uses[unit.index].discard(use)
                self._call_done(unit)

        use = Use(done)
        for unit in units:
            self._uses[unit.index].add(use)
            self._watched.add(unit.index)
        return use

    def _call_done(self, unit: Unit) -> None:
        """The backward of one call of the unit's module is complete."""
        if self._closed or self.phase is Phase.FORWARD:
            return
        if self.reducer is not None:
            self.reducer.advance(unit)
        else:
            self.finish_backward(unit)

    def end_use(self, units: Sequence[Unit], use: Use, outputs: Any) -> None:
        """The call has returned: bring the units back before its outputs are differentiated."""
        reference = weakref.ref(use)

        @never_compiled
        def wanted() -> None:
            self.start_backward()
            for unit in units:
                call = reference()
                if call is not None:  # once more, if the graph was retained
                    self._uses[unit.index].add(call)
                self._need_backward(unit)

        if not use.follow(outputs, wanted):
            for unit in units:
                self._uses[unit.index].discard(use)

    def _need_backward(self, unit: Unit) -> None:
        """A node is about to run that may read the values of a unit."""
        rescues = self.rescues
        self.need(unit)
        if self.rescues != rescues:
            # From now on it stays, once it has been gathered, to the end of such passes.
            self._late[self.phase].add(unit.index)
        # A backward pass inside of a forward pass must not hide later uses from `touch`.
        if self.phase is not Phase.FORWARD:
            unit.expose()

    def _recall(self, unit: Unit) -> None:
        """A node is about to read values of a unit that autograd has saved (see `shardwise.zero.passes.saved`)."""
        if unit.state is UnitState.GATHERED:
            return
        if backward_pass() is None:
            raise ReleasedParameterError(
                f"values of unit {unit.name!r} that autograd has saved are read outside of a backward pass, where they "
                f"are {unit.between_uses}"
            )
        self.start_backward()
        self._need_backward(unit)

    def in_use(self, unit: Unit) -> bool:
        """Whether a forward call of the unit is still to be differentiated."""
        return bool(self._uses[unit.index])

    def finish_backward(self, unit: Unit) -> None:
        """Release a unit whose gradients are complete, unless its values may still be needed."""
        busy = unit.index in self._held or self.in_use(unit) or self.suspended
        if self.phase is Phase.BACKWARD and not busy:
            self._release(unit)

    def _release(self, unit: Unit) -> None:
        """Release a unit; the next one to be gathered may have its memory."""
        with self._lock:  # peers may have gathers launched
            following = self._sequence[self._next] if self._next < len(self._sequence) else None
            self._heir = following if following is not None and following.state is UnitState.RELEASED else None
            unit.release(self._heir)

    # -- access by the user (shardwise.zero.units.released.Owner) ----------------------------------------------------

    def touch(self, parameter: nn.Parameter, what: str) -> Touch | None:
        """Gather on demand inside a pass; outside, wait for updated values or raise."""
        tensor = self.registry.find(parameter)
        assert tensor is not None
        unit = self._unit_of[tensor.index]
        if self.phase is Phase.IDLE:
            self._presence.require(f"{what}: parameter {tensor.name!r} cannot be used", values=True)
        if not unit.sharded:
            unit.finish_gather()
            return None
        if self.phase is Phase.IDLE and not self.suspended and self.absent(unit) and backward_pass() is not None:
            self.start_backward()  # an autograd function that has kept the parameter runs before nodes of the outputs
        if self.phase is Phase.IDLE and not self.suspended and self.absent(unit):
            raise ReleasedParameterError(
                f"{what}: the values of parameter {tensor.name!r} (shape {tuple(tensor.shape)}) are "
                f"{unit.between_uses} and not gathered outside of forward and backward. Compute a loss from them in "
                "the model's forward(); read or change them inside `with shardwise.zero.GatheredParameters(parameter, "
                "modifier_rank=None or 0):` on every rank, or use shardwise.utils.safe_get_full_fp32_param(parameter). "
                "The whole model is saved by engine.save_checkpoint() and engine.save_16bit_model(), copied by "
                "engine.module_state_dict(), and there inside of `with engine.gathered():`."
            )
        if self.phase is Phase.FORWARD and self._with_graph and unit.index not in self._visited:
            self.trace.append(unit.index)
            self._visited[unit.index] = 0
        if self.phase is Phase.BACKWARD or not self._passes:
            # A recomputation, or nothing is known yet about how often the unit will be used.
            self._held.add(unit.index)
        if what == "data_ptr":  # a kernel will be launched on the address, which cannot be seen
            self._held.add(unit.index)
            if self._with_graph:
                self._untracked.add(unit.index)
        if self._with_graph and not torch.is_grad_enabled():
            self._untracked.add(unit.index)  # may be a re-entrant checkpoint, which uses it again in the backward pass
        self.need(unit)
        unit.expose()
        if not self.differentiated(unit):
            return None
        return Touch(self.begin_use([unit]), self.saved.open())

    def end_touch(self, parameter: nn.Parameter, touch: Touch | None, result: Any) -> None:
        """A function has used a parameter outside of its own module."""
        if touch is not None and touch.watched:
            self.saved.close()
        tensor = self.registry.find(parameter)
        assert tensor is not None
        unit = self._unit_of[tensor.index]
        if not unit.sharded or self.phase is Phase.IDLE:
            return
        if any(unit.owns(value) for value in tensors_in(result)):
            # A view, or detached: what will be computed with it cannot be seen. The values stay to the end of this
            # pass, and from the beginning to the end of each backward pass.
            self._held.add(unit.index)
            if self._with_graph:
                self._untracked.add(unit.index)
        elif touch is not None:
            self.end_use([unit], touch.use, result)
        if self.phase is Phase.FORWARD:
            self._conceal(unit)
            self._count_use(unit)


def backward_order(units: Sequence[Sequence[nn.Module]], root: nn.Module) -> list[int]:
    """Return all units in the order in which a backward pass is likely to need them, from the module tree alone.

    The unit whose modules end last comes first; of two that end together, the one around the other.

    Args:
        units: the modules of each.
        root: the user's model.
    """
    start: dict[nn.Module, int] = {}
    end: dict[nn.Module, int] = {}
    _visit(root, start, end)
    last = {index: max((end[m], -start[m]) for m in modules) for index, modules in enumerate(units)}
    return sorted(last, key=lambda index: (last[index], index), reverse=True)


def _visit(module: nn.Module, start: dict[nn.Module, int], end: dict[nn.Module, int]) -> None:
    # Not a closure: one that calls itself is a cycle, and would keep the model.
    if module in start:
        return
    start[module] = len(start)
    for child in module.children():
        _visit(child, start, end)
    end[module] = len(start)
