"""Reducer: reduces gradients from autograd into this rank's fp32 accumulator.

A gradient is copied into its unit's flat buffer and freed at once; on a device one call copies all gradients of a unit.
When all gradients that this backward pass will produce for a unit are there (known from autograd's graph), the unit is
reduced: reduce-scatter in rank order, in fp32, added to the accumulator. Units are reduced exactly once per reducing
backward pass, in the reverse of the agreed forward order; parameters that a rank has not used contribute zeros. One
reduction is in flight: buffers hold one unit's gradient being filled, one being sent, and received ranges.

On a mesh of several dimensions (`shardwise.comm.domain`) a unit is reduced over one after the other. Each reducing pass
reduces over the dimensions that shard gradients; the sums are added up over micro-batches, and the accumulation
boundary reduces them over the other dimensions. The next unit starts when the first dimension is done.

Unsharded gradients of several micro-batches are first added locally in fp32, and reduced in the last backward pass. An
optimizer that communicates itself may take them unreduced.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from shardwise.comm.collective_queue import Launch, Work, WorkChain
from shardwise.comm.communicator import Communicator
from shardwise.comm.compression import Compressor, Flat
from shardwise.comm.domain import Domain
from shardwise.compat import number_of_pass, will_run
from shardwise.device.ranges import Stretches, named, watched
from shardwise.errors import UsageError
from shardwise.memory import Accountant, Category
from shardwise.utils.logging import logger
from shardwise.zero.passes.calls import UnitCalls
from shardwise.zero.passes.driver import Driver
from shardwise.zero.passes.gradients import UnitGradients
from shardwise.zero.passes.order import Chunk
from shardwise.zero.passes.unshard import Unsharder
from shardwise.zero.units.flat_param import FlatParamStorage
from shardwise.zero.units.gradient_buffers import FlatGradient, GradientBuffer, GradientList
from shardwise.zero.units.peaks import ReductionSizes, reduced_alone
from shardwise.zero.units.plan import Plan
from shardwise.zero.units.unit import Unit
from shardwise.zero.updates.update import Update


class CopiesElsewhere(NamedTuple):
    """Copies of a parameter outside of the pass group, in flat parameters of the same layout.

    `ranks` has one rank of each pass group that has the parameter, at one place. `counted`: this group's copy counts in
    the gradient norm, and is saved.
    """

    ranks: Communicator
    counted: bool


class Reducer:
    """Collects and reduces the gradients of the selected model chunk; see the module docstring.

    `domain` is that of the pass group; units may have domains of some of its ranks. `wire_dtype` None: that of the flat
    parameters, or else of the local gradients. `prescale` multiplies gradients before communication. `compressor` is
    used once it has started. `driver` knows the position of a pass in its accumulation window. `copies`: by index,
    ranks outside of the pass group that have the same parameter.

    Attributes:
        watching: record whether this rank's gradients of the unit reduced last are finite: NaN and inf spread to it.
        watches_all: record it for each unit, which reads each gradient once more.
        separate: units whose reduction must end before other buffers are allocated (`shardwise.zero.units.peaks`).
        local: gradients of this window are only added locally, for an optimizer that communicates itself.
        brought: the current backward pass has brought gradients.
        every_pass: each backward pass reduces gradients; False: only those at the end of an accumulation window.
        passes: number of backward passes that have ended.
        partial: gradients of this window have been added locally, and not reduced.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        domain: Domain,
        accountant: Accountant,
        *,
        plan: Plan,
        wire_dtype: torch.dtype | None = None,
        prescale: float = 1.0,
        keeps_gradients: bool = False,
        compressor: Compressor | None = None,
        chunks: Sequence[Chunk],
        calls: UnitCalls,
        unsharder: Unsharder,
        update: Update,
        driver: Driver,
        copies: Mapping[int, Communicator] | None = None,
    ) -> None:
        self.domain = domain
        self.accountant = accountant
        self.every_pass = plan.shard_gradients
        self._launches = domain.ranks.streams.beside
        # With 0 a device would have no queued work while the host waits.
        self._ahead = 1 if domain.async_reductions else 0
        self._exchanges = domain.world > 1 or plan.shard_optimizer  # also of one rank
        self.wire_dtype = wire_dtype
        self.prescale = prescale
        self._keeps_gradients = keeps_gradients
        self.compressor = compressor if domain.world > 1 else None
        self._chunks, self._calls, self._unsharder = chunks, calls, unsharder
        self._ended: set[int] = set()  # chunks that have had their last backward pass in this window
        self._holding = False
        self._held: dict[tuple[int, int], list[tuple[int, torch.Tensor]]] = {}  # until the buffer exists
        self.update, self.driver = update, driver
        self.local = self._lossy = False
        self._hold = functools.partial(accountant.hold, Category.BUFFERS)
        self._own: dict[int, torch.Tensor] = {}
        self.boundary = True
        self.partial = False
        self.passes = 0
        self.brought = False  # whether the backward pass has brought gradients
        self.gradients = {
            u.index: UnitGradients(u, plan.levels(u.domain).gradients, calls, accountant) for u in units if u.trainable
        }
        # These are summed over inner dimensions first.
        self._inner = [one for one in self.gradients.values() if 0 < one.level < one.domain.depth]
        self.watching = False
        self.watches_all = not domain.ranks.streams.beside
        self.separate: Collection[int] = frozenset()
        # These need numbers of other ranks on the host, or launch more work in their wait.
        self._blocks_host = self.compressor is not None or any(unit.codes is not None for unit in units)
        self._in_flight: deque[_Flight] = deque()
        self._onward: tuple[UnitGradients, WorkChain, Sequence[FlatParamStorage]] | None = None
        self._replicating: list[Work] = []
        self._copies = _flat_copies(self.gradients.values(), copies or {})
        self._returned: UnitGradients | None = None  # returned to its tier, maybe still being stored
        self._stretches = Stretches("backward")
        self.follow_order()

    def follow_order(self) -> None:
        """Take over the orders of reductions after a change (between passes only)."""
        self._queues = [[self.gradients[index] for index in chunk.order.reductions] for chunk in self._chunks]
        self._all = list({id(gradients): gradients for queue in self._queues for gradients in queue}.values())
        self._chunks_of = {
            one.unit.index: {number for number, queue in enumerate(self._queues) if one in queue} for one in self._all
        }
        self.select(0)
        self.find_separate()

    def will_accumulate(self) -> bool:
        """Return whether the running backward pass accumulates into a parameter (nested passes are not looked into)."""
        return any(will_run(node) for one in self._all for node in one.nodes.values())

    def select(self, chunk: int) -> None:
        """Choose the chunk of the next pass, by number."""
        self._chunk, self.order, self._queue = chunk, self._chunks[chunk].order, self._queues[chunk]

    @property
    def unfinished(self) -> bool:
        """Whether gradients of this window are still to be reduced over some ranks."""
        return self.partial or any(gradients.sums for gradients in self._inner)

    @property
    def on_device(self) -> bool:
        """Whether the device orders reductions and the memory that they read; the host waits for none.

        The launch of a reduction makes the computing stream wait for the reduction before the last one. An all-gather
        that this rank launches later may run after that wait: see `UnitOrder.must_not_wait`.
        """
        return self.domain.async_reductions and self.order.traced and not self._blocks_host

    def block_host(self) -> None:
        """Let the host wait for reductions from now on, because ranks run units in different orders (all ranks call).

        Because a waiting host launches the all-gathers that its peers need, this is faster than copying each unit.
        """
        if not self._blocks_host and self.domain.ranks.rank == 0:
            logger.info(
                "ranks run the units of the model in different orders: the host waits for reductions from now on, so "
                "that no rank waits for another in the wrong order"
            )
        self._blocks_host = True

    def begin(self, *, differentiates: bool, holding: bool = False) -> None:
        """Begin a backward pass (all ranks call).

        `differentiates` False: this rank's gradients are zeros. `holding`: a later pass gets the gradients (`add`).
        """
        self.brought = False
        self.boundary = self.driver.reduces_now()
        self._holding = holding
        self._settle_local()
        order, queue = self.order, self._queues[self._chunk]
        order.reduced, order.on_device = 0, self.on_device
        # Else gradients are added locally.
        order.reduces = (self.every_pass or self.boundary) and not self.local and not holding
        for gradients in queue:
            gradients.begin(used=self._calls.used(gradients.unit), outside=not differentiates)
        if order.reduces and not self.every_pass:
            # A unit of several chunks is reduced by the last of them.
            self._ended.add(self._chunk)
            queue = [gradients for gradients in queue if self._chunks_of[gradients.unit.index] <= self._ended]
        self._queue = queue
        self.driver.backward_begins()

    def end(self) -> None:
        """End a backward pass: reduce the other units, with zeros for gradients that this rank lacks.

        Because peers wait for its collectives, a pass that an exception has ended early is ended in the same way.
        """
        self._stretches.end()
        rest = self._queues[self._chunk]
        if self.order.reduces:
            reduced = set(map(id, self._queue))
            rest = [gradients for gradients in rest if id(gradients) not in reduced]
            self._flush()
        elif not self._holding:
            self.partial = True
        for gradients in rest:
            gradients.task = -1
            gradients.rest()
        for gradients in rest:
            gradients.settle()
        self._calls.track_only({index for index, gradients in self.gradients.items() if gradients.nested})
        self.passes += 1

    def _flush(self) -> None:
        while self.order.reduced < len(self._queue):
            self._launch(self._queue[self.order.reduced])
        if self.order.on_device:
            self._unsharder.launch_rest()
        self._wait_oldest(0, blocking=not self.domain.async_reductions)
        self._finish_onward()
        with self._unsharder.blocked():
            for handle in self._replicating:
                handle.wait()
        self._replicating = []
        self._settle_returned()
        self.partial = False

    def first_of_pass(self, gradients: UnitGradients, index: int) -> None:
        """Prepare for a unit's first gradient in a backward pass. Raises UsageError if the unit has been reduced."""
        self.brought = True
        if gradients.resting:
            gradients.bring()
        if gradients.reduced:
            raise UsageError(
                f"parameter {gradients.unit.registry[index].name!r} received another gradient after its unit "
                f"{gradients.unit.name!r} had been reduced. It is shared between several re-entrant checkpoints in "
                "a way that cannot be seen beforehand: use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
            )
        gradients.look_ahead()
        gradients.task = number_of_pass()

    def add(self, gradients: UnitGradients, place: int, number: int, grad: torch.Tensor) -> None:
        """Add a gradient that an earlier pass has held to those of this pass, which reduces; before it brings any."""
        self.brought = True
        gradients.seen.add(gradients.unit.sections[place].layout.slots[number].index)
        self._held.setdefault((gradients.unit.index, place), []).append((number, grad))

    def _collected_as(self, gradients: UnitGradients, section: FlatParamStorage) -> tuple[bool, torch.dtype]:
        # Micro-batches are summed in the accumulator's dtype; the gradient of a single pass is sent in its own dtype.
        # The choice is the same on all ranks.
        separate = section.domain.world > 1 and not self.local and (self.every_pass or self._single(gradients))
        sent = None if self._lossy else self.wire_of(section)
        return separate, (sent or section.layout.dtype) if separate else section.accumulate_dtype

    def _single(self, gradients: UnitGradients) -> bool:
        alone = len(self._chunks_of[gradients.unit.index]) == 1
        return alone and self.boundary and not self.partial and self.driver.begins_window()

    def buffer_for(self, gradients: UnitGradients, place: int, section: FlatParamStorage) -> GradientBuffer:
        """Return the buffer that collects a flat parameter's gradients."""
        known = gradients.buffers.get(place)
        if known is not None:
            return known
        separate, dtype = self._collected_as(gradients, section)
        make = functools.partial(_buffer, section, dtype)
        buffer: GradientBuffer
        if not (separate or gradients.accumulated or section.tiered_gradient.away) and section.keeps_whole_gradient:
            # The accumulator is free and as large as the sum. One copy per unit has fewer launches, but takes memory.
            if self._launches and section.domain.world == 1 and self._single(gradients) and not self.local:
                buffer = GradientList(section.places, dtype, lambda: section.whole_gradient, self.accountant)
            else:
                buffer = FlatGradient(section.places, section.whole_gradient)
        else:
            if self._waits_for_separate(gradients):
                # A lossy reduction may wait for peers that wait for all-gathers.
                self._unsharder.launch_through(gradients.unit)
                if self.order.reduced < len(self._queue):
                    self._unsharder.launch_through(self._queue[self.order.reduced].unit)
                self._wait_oldest(0)
            if separate and self.domain.async_reductions:
                buffer = GradientList(section.places, dtype, make, self.accountant)
            else:
                buffer = FlatGradient(section.places, make())
                if separate:
                    self._hold(buffer.flat)
                else:
                    gradients.keep(buffer.flat)
        gradients.buffers[place] = buffer
        for number, grad in self._held.pop((gradients.unit.index, place), ()):
            buffer.put(number, grad)
        return buffer

    def prescale_of(self, gradients: UnitGradients) -> float:
        """Return the factor by which local sums are still to be multiplied before communication."""
        return 1.0 if self._own else self.prescale * gradients.domain.prescale

    def find_separate(self) -> None:
        """Find `separate`, for the current orders and dtypes."""
        queue = []
        for gradients in self._all if self.every_pass else ():
            sections, inner = gradients.unit.trainable, gradients.comm
            sent = sum(s.layout.numel * (self.wire_of(s) or s.layout.dtype).itemsize for s in sections)
            received, once = (inner.received(sent, accumulate=adds) for adds in (True, False))
            own = sum((s.master_stop - s.master_start) * s.accumulate_dtype.itemsize for s in sections)
            whole = sum(s.layout.numel * s.accumulate_dtype.itemsize for s in sections)
            queue.append(ReductionSizes(gradients.unit.index, sent, received, once, own, whole))
        self.separate = reduced_alone(queue)

    def wire_of(self, section: FlatParamStorage) -> torch.dtype | None:
        """Return the dtype in which gradients of a flat parameter are sent; None: their own."""
        return self.wire_dtype or section.layout.wire_dtype

    def watch_everything(self, wanted: bool) -> None:
        """Watch each unit in the next window, because the gradients of one were not finite; a CPU always does."""
        self.watches_all = wanted or not self._launches

    def was_finite(self, index: int, *, formerly: bool = False) -> bool | None:
        """Return whether this rank's sent gradients of a unit were finite (`formerly`: a window ago); None: unknown."""
        own = self.gradients[index].was_finite(formerly=formerly)
        if own is None and any(queue[-1].was_finite(formerly=formerly) is False for queue in self._queues if queue):
            return False
        return own

    def _waits_for_separate(self, gradients: UnitGradients) -> bool:
        accumulates = not self.boundary or self.local or gradients.accumulated
        return accumulates and any(flight.gradients.unit.index in self.separate for flight in self._in_flight)

    def _prepare(self, gradients: UnitGradients, buffers: list[torch.Tensor]) -> None:
        """Prescale, cast and watch the gradients of a unit, before they are sent."""
        # With one rank, the sum is the gradient itself.
        watches = self.watching and self.domain.world > 1 and (self.watches_all or gradients is self._queue[-1])
        prescale, several = self.prescale_of(gradients), gradients.domain.world > 1
        for number, section in enumerate(gradients.unit.trainable):
            if prescale != 1.0:
                buffers[number].mul_(prescale)
            wire = None if self._lossy else self.wire_of(section)
            if wire is not None and buffers[number].dtype != wire and several:
                buffers[number] = buffers[number].to(wire)
                self._hold(buffers[number])
            if watches:
                gradients.watch(buffers[number])

    def begin_profile_range(self) -> None:
        """Show the first unit of a backward pass to profilers, if there are any."""
        if watched():
            self._profile_range()

    def _profile_range(self) -> None:
        """Show the unit that is differentiated now to profilers: the next one with incomplete gradients."""
        coming = next((gradients.unit.name for gradients in self._queue if not gradients.complete), None)
        if coming is None:
            self._stretches.end()
        elif coming != self._stretches.unit:
            self._stretches.begin(coming)

    def progress(self, unit: Unit) -> bool:
        """Record that gradients of a unit may be complete; return True if they are, or the unit has none."""
        gradients = self.gradients.get(unit.index)
        if gradients is None:
            return True
        gradients.look_ahead()
        return gradients.complete

    def launch_complete(self, unit: Unit) -> None:
        """Launch the next complete reductions, after the gradients of a unit have become complete."""
        gradients = self.gradients.get(unit.index)
        order, queue = self.order, self._queue
        if gradients is not None and gradients.tiered.away and not order.reduces:
            gradients.rest()
        while order.reduces and order.reduced < len(queue) and queue[order.reduced].complete:
            self._launch(queue[order.reduced])
        if self._stretches.unit is not None:
            self._profile_range()

    def _launch(self, gradients: UnitGradients) -> None:
        unit = gradients.unit
        self._unsharder.launch_through(unit)
        lacks = len(gradients.buffers) < len(unit.trainable)
        self._wait_oldest(0 if lacks and self._waits_for_separate(gradients) else self._ahead)
        if gradients.resting:
            gradients.bring()
        # Before the stream of reductions is current, because their input belongs to the computing stream.
        flats = []
        for place in gradients.places:
            flats.append(self.buffer_for(gradients, place, unit.sections[place]).complete())
        self.order.reduced += 1
        gradients.reduced, gradients.task = True, -1
        if not self._exchanges and self._in_place(gradients, flats):
            with named("reduce", unit.name):
                gradients.accumulated = True
                gradients.free()
            return
        self.domain.reductions.follow()
        with named("reduce", unit.name), self.domain.reductions.aside(), self.accountant.owning(Category.BUFFERS):
            self._start_reduction(gradients, flats)
        if self.order.reduced < len(self._queue):
            self._queue[self.order.reduced].prefetch_sums()

    def _in_place(self, gradients: UnitGradients, flats: Sequence[torch.Tensor]) -> bool:
        """Return True if flat gradients are the accumulators, and need no scaling."""
        if gradients.tiered.away or self.prescale_of(gradients) != 1.0:
            return False
        return all(flat is s.gradient for flat, s in zip(flats, gradients.unit.trainable, strict=True))

    def _start_reduction(self, gradients: UnitGradients, flats: list[torch.Tensor]) -> None:
        self._prepare(gradients, flats)
        if self._lossy:
            launches, own_only = self._lossily(gradients, flats), []
        else:
            launches, own_only = self._exactly(gradients, flats), gradients.unit.trainable
        handle = gradients.domain.reductions.start(launches, self._hold)
        self._in_flight.append(_Flight(gradients, handle, own_only, flats if self.domain.async_reductions else ()))
        self.order.lossy_in_flight += not own_only

    def _lossily(self, gradients: UnitGradients, buffers: Sequence[torch.Tensor]) -> list[Launch]:
        unit, compressor = gradients.unit, self.compressor
        assert compressor is not None
        gradients.acquire_sums()
        flats = [_flat(unit, section, buffer) for section, buffer in zip(unit.trainable, buffers, strict=True)]
        before, gradients.accumulated = gradients.accumulated, True
        return [
            lambda: compressor.reduce(
                flats, unit.name, accumulate=before, scale=self.driver.reduction_scale(), wire_dtype=self.wire_dtype
            )
        ]

    def _exactly(self, gradients: UnitGradients, flats: Sequence[torch.Tensor]) -> list[Launch]:
        unit, domain, fine = gradients.unit, gradients.domain, gradients.domain.depth
        inside = 0 < gradients.level < fine
        outputs = []
        if inside:
            fine, adds = gradients.level, bool(gradients.sums)
            for place in gradients.places:
                outputs.append(self._sum_of(gradients, place, kept=not self.boundary))
        else:
            if gradients.tiered.away:
                gradients.acquire_sums()
            adds, gradients.accumulated = gradients.accumulated, True
            for section in unit.trainable:
                outputs.append(section.own_gradient)
        launches = domain.reducing(
            flats, outputs, 0, fine, unit.name, accumulate=adds, wire=self.wire_dtype, made=self._hold
        )
        if inside and self.boundary:  # goes on to this rank's own range
            launches += self._beyond(gradients)
        return launches

    def _sum_of(self, gradients: UnitGradients, place: int, *, kept: bool) -> torch.Tensor:
        """Return the sum over inner dimensions that micro-batches are added to (undefined content if it is new)."""
        known = gradients.sums.get(place)
        if known is None:
            section = gradients.unit.sections[place]
            size = section.layout.size(gradients.level)
            with gradients.domain.allocating():
                known = torch.empty(size, dtype=section.accumulate_dtype, device=section.device)
            self.accountant.hold(Category.GRADIENTS if kept else Category.BUFFERS, known)
            gradients.sums[place] = known
        return known

    def _beyond(self, gradients: UnitGradients) -> list[Launch]:
        gradients.acquire_sums()
        unit, domain = gradients.unit, gradients.domain
        outputs = [unit.sections[place].own_gradient for place in gradients.sums]
        given, before = list(gradients.sums.values()), gradients.accumulated
        gradients.accumulated, gradients.sums = True, {}
        return domain.reducing(
            given,
            outputs,
            gradients.level,
            domain.depth,
            unit.name,
            accumulate=before,
            wire=self.wire_dtype,
            made=self._hold,
        )

    def _wait_oldest(self, most: int, *, blocking: bool | None = None) -> None:
        """Wait for the oldest reductions until at most `most` are in flight.

        `blocking`: the host waits (default: unless `on_device`), because a waiting stream must not delay all-gathers
        that peers need before they can take part in the reduction.
        """
        if blocking is None:
            blocking = not self.order.on_device
        while len(self._in_flight) > most:
            flight = self._in_flight.popleft()
            gradients, handle, own_only = flight.gradients, flight.handle, flight.own_only
            self.order.lossy_in_flight -= not own_only
            name = gradients.unit.name
            category = Category.OTHER if own_only else Category.BUFFERS
            with self.accountant.owning(category), named("wait for reduction", name):
                if self.order.on_device and not blocking:
                    handle.wait()
                else:
                    with self._unsharder.blocked():
                        if isinstance(handle, WorkChain):
                            handle.wait_first()
                        elif blocking:
                            self.domain.reductions.synchronize(handle, f"the reduction of unit {name!r}")
                        else:
                            handle.wait()
            gradients.free()
            del flight
            if self._onward is not None:
                self._finish_onward()
            if isinstance(handle, WorkChain):
                self._onward = (gradients, handle, own_only)
            elif gradients.replicated or gradients.acquired:
                self._replicate(gradients, own_only)

    def _finish_onward(self) -> None:
        """Wait for the outer dimensions of the reduction before the last one."""
        if self._onward is None:
            return
        gradients, chain, own_only = self._onward
        self._onward = None
        with self._unsharder.blocked(), named("wait for reduction", gradients.unit.name):
            chain.wait()
        self._replicate(gradients, own_only)

    def _replicate(self, gradients: UnitGradients, own_only: Sequence[FlatParamStorage]) -> None:
        if not gradients.accumulated:
            return  # it is reduced over more ranks at the accumulation boundary
        domain, depth = gradients.domain, gradients.domain.depth
        links: list[Work] = []
        for level, sections in gradients.replicated.items() if own_only else ():
            moves = [(section.whole_gradient, section.own_gradient, depth) for section in sections]
            launches = domain.gathering(moves, level, gradients.unit.name, kind="replicate")
            links.append(domain.reductions.start(launches))
        if not gradients.acquired:
            self._replicating += links
            return
        with self._unsharder.blocked():
            for link in links:
                if self.order.on_device:
                    link.wait()
                else:
                    self.domain.reductions.synchronize(link, f"the reduction of unit {gradients.unit.name!r}")
        gradients.release_sums()
        # Storing may take as long as the next unit's reduction.
        self._settle_returned()
        self._returned = gradients

    def _settle_returned(self) -> None:
        if self._returned is not None:
            self._returned.settle()
            self._returned = None

    def complete_window(self) -> None:
        """Complete the accumulators of the window, before the step; `zero_absent` follows.

        Gradients that were only added locally are reduced (the boundary was declared after the last backward pass).
        Gradients that stay local complete `own_gradient`.
        """
        self._settle_local()
        if self.local:
            self._complete_local()
            return
        if self.partial:
            for gradients in self._all:
                gradients.reduced = False
            self.order.reduced, self._queue = 0, self._all
            self._flush()
        if self._inner and self.unfinished:
            for gradients in self._all:
                if not gradients.sums:
                    continue  # of a domain that has nothing beyond the ranks that have been summed over
                self._wait_oldest(self._ahead, blocking=not self.domain.async_reductions)
                self.domain.reductions.follow()
                with self.domain.reductions.aside():
                    handle = gradients.domain.reductions.start(self._beyond(gradients), self._hold)
                self._in_flight.append(_Flight(gradients, handle, gradients.unit.trainable))
            self._flush()

    def zero_absent(self) -> None:
        """Zero accumulators that no backward pass of this window has written (no collective). Raises OffloadError."""
        for gradients in self.gradients.values() if not self.local else ():
            if not gradients.accumulated:
                gradients.acquire_sums()
                for section in gradients.unit.trainable:
                    section.whole_gradient.zero_()
                gradients.release_sums()
                gradients.settle()

    def sum_copies(self) -> None:
        """Add up gradients of parameters that ranks outside of the pass group have, too, after `zero_absent`."""
        launched = []
        for gradients, section, ranks in self._copies:
            gradients.acquire_sums()
            launched.append(ranks.all_reduce(section.whole_gradient, gradients.unit.name, "explicit"))
        for handle in launched:
            handle.wait()
        for gradients, *_ in self._copies:
            gradients.release_sums()
            gradients.settle()

    def _settle_local(self) -> None:
        self.local = self.update.stays_local()
        self._lossy = self.compressor is not None and self.compressor.active

    def _complete_local(self) -> None:
        self.partial = True
        for gradients in self.gradients.values():
            gradients.bring()
            for place in gradients.places:
                section = gradients.unit.sections[place]
                buffer = self.buffer_for(gradients, place, section).complete()
                if self.prescale != 1.0:
                    buffer.mul_(self.prescale)
                self._own[id(section)] = buffer

    def own_gradient(self, section: FlatParamStorage) -> torch.Tensor:
        """Return the local gradient of a flat parameter, after `complete_window`."""
        return self._own[id(section)]

    def unused(self) -> list[str]:
        """Return the names of trainable parameters without a gradient on this rank since the last step."""
        return [
            gradients.unit.registry[slot.index].name
            for gradients in self.gradients.values()
            for section in gradients.unit.trainable
            for slot in section.layout.slots
            if slot.index not in gradients.seen
        ]

    def clear(self) -> None:
        """Begin a new window: drop gradients, and free their memory unless it is kept."""
        self.partial = False
        self._own, self._ended = {}, set()
        for gradients in self.gradients.values():
            gradients.accumulated = False
            gradients.sums = {}
            gradients.begin_window()
            gradients.free()
            gradients.seen = set()
            if not self._keeps_gradients:
                for section in gradients.unit.trainable:
                    section.free_gradient()


def _flat_copies(
    units: Iterable[UnitGradients], copies: Mapping[int, Communicator]
) -> list[tuple[UnitGradients, FlatParamStorage, Communicator]]:
    """Return flat parameters that ranks outside of the pass group have, too, in one order on all of these ranks.

    Raises UsageError if their layouts differ, because shards would be of different elements (these ranks call).
    """
    found: list[tuple[str, UnitGradients, FlatParamStorage, Communicator]] = []
    for gradients in units if copies else ():
        for section in gradients.unit.trainable:
            names = [gradients.unit.registry[slot.index].name for slot in section.layout.slots]
            having = {copies.get(slot.index) for slot in section.layout.slots}
            if having == {None}:
                continue
            one = next(iter(having))
            if len(having) > 1 or one is None:
                raise UsageError(f"parameters {', '.join(names)} of one module are shared with different ranks")
            found.append((names[0], gradients, section, one))
    found.sort(key=lambda entry: entry[0])
    for name, gradients, section, ranks in found:
        slots = [(gradients.unit.registry[s.index].name, s.offset, s.numel) for s in section.layout.slots]
        layout = repr((slots, section.layout.numel, str(section.layout.dtype), section.levels))
        if len(set(ranks.fingerprints(layout, "copies"))) > 1:
            raise UsageError(f"the module of parameter {name!r} has other parameters on other ranks that share these")
    return [(gradients, section, ranks) for _, gradients, section, ranks in found]


class _Flight(NamedTuple):
    gradients: UnitGradients
    handle: Work
    own_only: Sequence[FlatParamStorage]
    """Flat parameters of which only this rank's own range is reduced."""
    sent: Sequence[torch.Tensor] = ()
    """Tensors of other streams, which must not be freed before the reduction has ended."""


def _flat(unit: Unit, section: FlatParamStorage, buffer: torch.Tensor) -> Flat:
    whole = section.whole_gradient
    return Flat(
        name=f"{unit.index}.{unit.name}.{unit.sections.index(section)}",
        full=buffer,
        own=section.own_gradient,
        whole=whole if whole.numel() != section.layout.shard else None,
        shapes=[(slot.offset, torch.Size(unit.registry[slot.index].shape)) for slot in section.layout.slots],
    )


def _buffer(section: FlatParamStorage, dtype: torch.dtype) -> torch.Tensor:
    with section.domain.allocating():
        return torch.empty(section.layout.numel, dtype=dtype, device=section.device)
