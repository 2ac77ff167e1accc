"""The gradient path: from autograd's gradients to this rank's fp32 accumulator. There is only this one.

A gradient is copied into its unit's flat buffer and freed the moment autograd has produced it; on a device one call
copies all gradients of a unit together instead. When all gradients that this backward pass will produce
for a unit are there (asked of the autograd engine, not guessed), the unit is reduced:
reduce-scatter in rank order, in fp32, added to the accumulator. Units are reduced exactly once per reducing backward
pass, in the reverse of the agreed forward order; what a rank has not used contributes zeros. One reduction is in flight
at a time, so the buffers held are one unit's gradient being filled, one being sent and the pieces being received.

Where ranks lie in a grid of several dimensions (`shardwise.comm.domain`), a unit is reduced over one after the other.
Over those that gradients are divided over it is in every reducing pass; what has been summed so is added up over
micro-batches, and is reduced over the rest at the accumulation boundary. The reduction of the next unit begins when
that over the first dimension has ended.

Where gradients are not sharded and several micro-batches make a step, gradients are first added up locally in fp32 and
reduced once, in the backward pass of the last micro-batch. Where the optimizer communicates itself, they may stay as
they are.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.comm.collective_queue import Launch, Work, WorkChain
from shardwise.comm.communicator import Handle
from shardwise.comm.compression import Compressor, Flat
from shardwise.comm.domain import Domain
from shardwise.compat import never_compiled, number_of_pass
from shardwise.device.ranges import Stretches, named, watched
from shardwise.errors import UsageError
from shardwise.memory import Accountant, Category
from shardwise.utils.logging import logger
from shardwise.zero.passes.calls import AtEnd
from shardwise.zero.passes.driver import Driver
from shardwise.zero.passes.gather import Gatherer
from shardwise.zero.passes.gradients import UnitGradients
from shardwise.zero.units.joined import GradientList
from shardwise.zero.units.peaks import ReductionSizes, reduced_alone
from shardwise.zero.units.plan import Plan
from shardwise.zero.units.presence import Presence
from shardwise.zero.units.unit import FlatParamStorage, Unit
from shardwise.zero.updates.update import Update


class Reducer:
    """Collects and reduces the gradients of one engine; see the module docstring.

    Args:
        units: all units.
        domain: of all ranks; of some units some of them share the parameters.
        accountant: is told about the buffers.
        plan: says to which level of its domain every micro-batch of a unit is reduced.
        wire_dtype: dtype on the wire; None: that of the sections, or else that of the local gradients.
        prescale: factor applied before sending.
        keeps_gradients: leave accumulators their memory between steps.
        compressor: reduces with loss, once it has started.
        gatherer: the other half of the passes.
        update: steps what is reduced here.
        driver: knows where in a window a pass is.
        presence: knows whether state has been moved off the device.

    Attributes:
        watching: keep whether this rank's gradients were finite when they were sent, of the unit that is reduced last;
            a value that is not finite spreads to it from all others in the backward pass.
        watches_all: keep it of each unit, which reads every gradient once more.
        alone: units whose reduction is waited for before another unit's gradients are collected, where several
            micro-batches make a step (see `shardwise.zero.units.peaks.reduced_alone`).
        local: whether gradients of this window are only added up locally, for an optimizer that communicates itself.
        order_is_traced: the orders in force are those of a pass that has been run, not of registration.
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
        gatherer: Gatherer,
        update: Update,
        driver: Driver,
        presence: Presence,
    ) -> None:
        self.domain = domain
        self.accountant = accountant
        self._every_pass = plan.shard_gradients
        self._launches = domain.ranks.streams.beside
        self._exchanges = domain.world > 1 or plan.shard_optimizer  # by oneself, if that is asked for
        self.wire_dtype = wire_dtype
        self.prescale = prescale
        self._keeps_gradients = keeps_gradients
        self.compressor = compressor if domain.world > 1 else None
        self.gatherer, self.update, self.driver = gatherer, update, driver
        self._presence = presence
        self.local = False
        self.order_is_traced = False
        self._own: dict[int, torch.Tensor] = {}
        self.boundary = True
        self.partial = False
        self.active = False
        self._at_end: AtEnd | None = None
        self.passes = 0
        self.brought = False  # whether the backward pass has brought gradients
        self.gradients = {
            u.index: UnitGradients(u, plan.levels(u.domain).gradients, gatherer, accountant)
            for u in units
            if u.trainable
        }
        self.watching = False
        self.watches_all = not domain.ranks.streams.beside
        self.alone: Collection[int] = frozenset()
        self._order: list[UnitGradients] = []
        self._places: dict[int, int] = {}
        self._launched: list[int] = []
        order = [unit.index for unit in units]
        self.set_order(order, order[::-1])
        # What needs numbers of other ranks on the host, or launches more when it is waited for, blocks the host.
        self._blocks_host = self.compressor is not None or any(unit.codes is not None for unit in units)
        self._next = 0
        self._in_flight: deque[_Flight] = deque()
        self._onward: tuple[UnitGradients, WorkChain, Sequence[FlatParamStorage]] | None = None
        self._replicating: list[Work] = []
        self._returned: UnitGradients | None = None  # what has just been given back, and may still be being stored
        self._stretches = Stretches("backward")
        self._hooks: list[Any] = []
        for gradients in self.gradients.values():
            unit = gradients.unit
            for section in unit.trainable:
                for number, slot in enumerate(section.layout.slots):
                    hook = self._make_hook(gradients, section, number)
                    parameter = unit.registry.parameters[slot.index]
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def set_order(self, order: Sequence[int], backward: Sequence[int]) -> None:
        """Adopt the agreed orders in which all units are gathered forward and backward (between passes only)."""
        self._order = [self.gradients[index] for index in reversed(order) if index in self.gradients]
        self._places = {index: place for place, index in enumerate(backward)}
        # A unit is reduced after the gathers up to its own place: so far they have come when the reduction is launched.
        self._launched = list(accumulate((self._places[g.unit.index] for g in self._order), max))

    @property
    def reducing(self) -> bool:
        """Whether backward passes reduce now, or only add up locally."""
        return (self._every_pass or self.boundary) and not self.local

    @property
    def unfinished(self) -> bool:
        """Whether gradients of this window are not reduced over all ranks yet."""
        return self.partial or any(gradients.sums for gradients in self.gradients.values())

    @property
    def on_device(self) -> bool:
        """Whether the device alone orders reductions and the memory that they read: the host waits for none.

        The computing stream waits for the reduction before the last one when the next one is launched. A gather of
        this rank that is launched later may run behind that wait. So that no two ranks wait for each other, a rank
        that needs a unit too far ahead of its own reductions does not wait for the gather (`waits_for_peers`).
        """
        return self.domain.async_reductions and self.order_is_traced and not self._blocks_host

    def block_host(self) -> None:
        """Have the host wait for reductions from now on, because ranks run units in different orders (all ranks call).

        Then a rank that waits launches the gathers that its peers need, which is faster than fetching every unit.
        """
        if not self._blocks_host and self.domain.ranks.rank == 0:
            logger.info(
                "ranks run the units of the model in different orders: the host waits for reductions from now on, so "
                "that no rank waits for another in the wrong order"
            )
        self._blocks_host = True

    def waits_for_peers(self, index: int) -> bool:
        """Return whether the gather of a unit may run, on another rank, behind a reduction still to be launched here.

        Where the device orders reductions, gather p is launched on every rank before reduction r, the first one with
        `_launched[r] >= p`. Computing streams wait then for reductions up to r - 2 at most. So a rank that has launched
        these may wait for the gather: each collective waits for earlier ones only.
        """
        if not (self.on_device and self.reducing):
            return False
        first = bisect.bisect_left(self._launched, self._places.get(index, -1))
        return self._next < first - 1

    def lags_behind(self, index: int) -> bool:
        """Whether a peer may wait for a reduction still to come here without having launched the gather of a unit."""
        # Peers that have come as far may also wait for the further collectives of a lossy reduction under way.
        under_way = any(not flight.own_only for flight in self._in_flight)
        if self.on_device or not self.reducing or (self._next >= len(self._order) and not under_way):
            return False
        return self._launched[min(self._next, len(self._launched) - 1)] < self._places.get(index, -1)

    def begin(self) -> None:
        """Start a backward pass; called by the first hook that autograd runs, any number of times."""
        if self.active:
            if self._at_end is None or not self._at_end.dropped:
                return
            self.end()  # an exception has cut an earlier pass short, and nothing has settled it
        self._presence.require("a backward pass cannot begin")
        self._at_end = AtEnd(self.end)
        self._start()

    def _start(self, *, outside: bool = False) -> None:
        self.active = True
        self.brought = False
        self.boundary = self.driver.reduces_now()
        self._settle_local()
        self._next = 0
        for gradients in self.gradients.values():
            gradients.begin(used=self.gatherer.used(gradients.unit), outside=outside)
        self.driver.backward_begins()
        self.gatherer.begin_backward()
        if watched() and not outside:
            self._stretch()

    def pass_over(self) -> None:
        """Take part in a backward pass of the others: the loss of this rank does not depend on the model."""
        self._presence.require("a backward pass cannot begin")
        self._start(outside=True)
        self.end()

    @never_compiled
    def end(self) -> None:
        """End a backward pass: reduce what is left, with zeros for what this rank has not used.

        A pass that an exception has cut short is ended in the same way, because the others wait for its collectives.
        """
        if not self.active:
            return
        self._stretches.end()
        if self.reducing:
            self._sweep()
        else:
            self.partial = True
            for gradients in self.gradients.values():
                gradients.task = -1
                gradients.rest()
            for gradients in self.gradients.values():
                gradients.settle()
        self.gatherer.watch_from_now_on({index for index, gradients in self.gradients.items() if gradients.nested})
        self.active = False
        self.passes += 1
        self.gatherer.end_backward()
        self.driver.backward_ended(self.brought)

    def _sweep(self) -> None:
        while self._next < len(self._order):
            self._launch(self._order[self._next])
        if self.on_device:
            self.gatherer.launch_rest()
        self._land(0, blocking=not self.domain.async_reductions)
        self._finish_onward()
        with self.gatherer.parked():
            for handle in self._replicating:
                handle.wait()
        self._replicating = []
        self._settle_returned()
        self.partial = False

    def _make_hook(
        self, gradients: UnitGradients, section: FlatParamStorage, number: int
    ) -> Callable[[nn.Parameter], None]:
        place = gradients.unit.sections.index(section)
        index = section.layout.slots[number].index

        # There are many parameters: what is usual comes first, and asks for as little as it can.
        @never_compiled
        def arrived(parameter: nn.Parameter) -> None:
            grad = parameter.grad
            if grad is None:
                return
            parameter.grad = None
            if gradients.task != number_of_pass():
                self._first_of_pass(gradients, index)
            buffer = gradients.buffers.get(place)
            if type(buffer) is GradientList and not grad.is_sparse:
                gradients.put(buffer, number, grad)
                gradients.written.add(index)
            else:
                self._collect(gradients, place, section, number, grad)
            del grad
            expected = gradients.expected
            expected.discard(index)
            if not expected:
                self.advance(gradients.unit)

        return arrived

    def _first_of_pass(self, gradients: UnitGradients, index: int) -> None:
        """A backward pass is about to bring the first gradient of a unit: that of parameter `index`."""
        self.begin()
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

    def _collect(
        self, gradients: UnitGradients, place: int, section: FlatParamStorage, number: int, grad: torch.Tensor
    ) -> None:
        """Add one parameter's gradient to what is there of it."""
        if grad.is_sparse:
            grad = grad.coalesce().to_dense()  # equal rows are summed in one order
        slot = section.layout.slots[number]
        buffer = self._buffer(gradients, place, section)
        if isinstance(buffer, GradientList):
            gradients.put(buffer, number, grad)
        elif slot.index in gradients.written:
            buffer[slot.offset : slot.offset + slot.numel].add_(grad.reshape(-1))
        else:
            buffer[slot.offset : slot.offset + slot.numel].copy_(grad.reshape(-1))
        gradients.written.add(slot.index)

    def _collected_as(self, section: FlatParamStorage) -> tuple[bool, torch.dtype]:
        """Return whether the gradients of one pass are reduced by themselves, and the dtype in which they are kept."""
        # Sums over micro-batches are formed in the accumulator's dtype; a gradient that is alone travels as it is, and
        # without peers nothing travels. The choice depends on nothing that could differ between ranks.
        alone = section.domain.world > 1 and not self.local and (self._every_pass or self._single)
        return alone, (self._cast_to(section) or section.layout.dtype) if alone else section.accumulate_dtype

    @property
    def _single(self) -> bool:
        """Whether this backward pass is the only one of its window."""
        return self.boundary and not self.partial and self.driver.begins_window()

    def _buffer(self, gradients: UnitGradients, place: int, section: FlatParamStorage) -> torch.Tensor | GradientList:
        """Return what collects a section's gradients; if it is a flat buffer, it is new with undefined content.

        See `_fill_gaps`.
        """
        known = gradients.buffers.get(place)
        if known is not None:
            return known
        alone, dtype = self._collected_as(section)
        buffer: torch.Tensor | GradientList
        if not (alone or gradients.accumulated or section.gradient_loans.away) and section.keeps_whole_gradient:
            # The reduced gradient will be as large as the sum, and nothing is in its place yet. One copy of a unit's
            # gradients costs less than one of each where the host launches them; elsewhere it only takes memory.
            joined = self._launches and section.domain.world == 1 and self._single and not self.local
            buffer = GradientList(section.places, dtype) if joined else section.whole_gradient
        else:
            if self._waits_alone(gradients):
                # A lossy reduction may wait for peers that wait for gathers.
                self.gatherer.launch_through(gradients.unit)
                if self._next < len(self._order):
                    self.gatherer.launch_through(self._order[self._next].unit)
                self._land(0)
            if alone and self.domain.async_reductions:
                buffer = GradientList(section.places, dtype)
            else:
                buffer = torch.empty(section.layout.numel, dtype=dtype, device=section.device)
                if alone:
                    self.accountant.hold(Category.BUFFERS, buffer)
                else:
                    gradients.keep(buffer)
        gradients.buffers[place] = buffer
        return buffer

    def find_alone(self) -> None:
        """Decide on `alone`, for the orders and the dtypes in force."""
        queue = []
        for gradients in self._order if self._every_pass else ():
            sections, inner = gradients.unit.trainable, gradients.comm
            sent = sum(s.layout.numel * (self.wire_of(s) or s.layout.dtype).itemsize for s in sections)
            received = inner.received(sent)
            own = sum((s.master_stop - s.master_start) * s.accumulate_dtype.itemsize for s in sections)
            whole = sum(s.layout.numel * s.accumulate_dtype.itemsize for s in sections)
            queue.append(ReductionSizes(gradients.unit.index, sent, received, own, whole))
        self.alone = reduced_alone(queue)

    def wire_of(self, section: FlatParamStorage) -> torch.dtype | None:
        """Return the dtype in which a section's gradients are sent; None: as they are."""
        return self.wire_dtype or section.layout.wire_dtype

    def _cast_to(self, section: FlatParamStorage) -> torch.dtype | None:
        """Return `wire_of` a section, but lossy methods choose what they send by themselves."""
        return None if self.compressor is not None and self.compressor.active else self.wire_of(section)

    def _prescale(self, domain: Domain) -> float:
        """Return what gradients are multiplied by before they are sent."""
        return self.prescale * domain.prescale

    def watch_everything(self, wanted: bool) -> None:
        """Watch each unit in the next window, because the gradients of one were not finite; a CPU always does."""
        self.watches_all = wanted or not self._launches

    def was_finite(self, index: int, *, formerly: bool = False) -> bool | None:
        """Return whether this rank's gradients of a unit were finite when they were sent; None: it is not known.

        Args:
            index: of the unit.
            formerly: in the window before.
        """
        own = self.gradients[index].was_finite(formerly=formerly)
        if own is None and self._order[-1].was_finite(formerly=formerly) is False:
            return False
        return own

    def _watches(self, gradients: UnitGradients) -> bool:
        # Of a single rank, whatever is not finite was so before it was added up.
        if not self.watching or self.domain.world == 1:
            return False
        return self.watches_all or gradients is self._order[-1]

    def _waits_alone(self, gradients: UnitGradients) -> bool:
        """Whether memory for gradients of a unit is taken only when reductions under way have ended; see `alone`."""
        accumulates = not self.boundary or self.local or gradients.accumulated
        return accumulates and any(flight.gradients.unit.index in self.alone for flight in self._in_flight)

    def _prepare(self, gradients: UnitGradients, section: FlatParamStorage, buffer: torch.Tensor) -> torch.Tensor:
        """Return a flat buffer, which is complete, as it is to be sent."""
        if self._prescale(section.domain) != 1.0:
            buffer.mul_(self._prescale(section.domain))
        wire = self._cast_to(section)
        if wire is not None and buffer.dtype != wire and section.domain.world > 1:
            buffer = buffer.to(wire)
            self.accountant.hold(Category.BUFFERS, buffer)
        if self._watches(gradients):
            gradients.watch(buffer)
        return buffer

    def _fill_gaps(self, gradients: UnitGradients, section: FlatParamStorage, buffer: torch.Tensor) -> None:
        """Put zeros where no gradient has arrived: absent parameters, and between parameters."""
        # Zeroing the whole buffer beforehand would write every byte once more.
        for start, stop in section.layout.gaps:
            buffer[start:stop].zero_()
        if len(gradients.written) < gradients.parameters:
            for slot in section.layout.slots:
                if slot.index not in gradients.written:
                    buffer[slot.offset : slot.offset + slot.numel].zero_()

    def _flatten(self, gradients: UnitGradients) -> None:
        """Copy gradients together, in one call, that lie where autograd has put them."""
        for place, there in gradients.buffers.items():
            if isinstance(there, GradientList):
                section = gradients.unit.sections[place]
                if section.domain.world == 1:
                    flat = section.whole_gradient
                else:
                    flat = torch.empty(section.layout.numel, dtype=there.dtype, device=section.device)
                    self.accountant.hold(Category.BUFFERS, flat)
                there.places.join(there.tensors, flat)
                gradients.uncount(there)
                gradients.buffers[place] = flat
                gradients.joined.add(place)

    def _stretch(self) -> None:
        """Tell whoever looks which unit is differentiated now: the next one whose gradients are not complete."""
        coming = next((gradients.unit.name for gradients in self._order if not gradients.complete), None)
        if coming is None:
            self._stretches.end()
        elif coming != self._stretches.unit:
            self._stretches.begin(coming)

    def advance(self, unit: Unit) -> None:
        """Something has happened that may complete the gradients of a unit."""
        gradients = self.gradients.get(unit.index)
        if gradients is not None:
            gradients.look_ahead()
        if gradients is None or gradients.complete:
            self.gatherer.finish_backward(unit)
            if gradients is not None and gradients.loans.away and not self.reducing:
                gradients.rest()
            self._pump()
            if self._stretches.unit is not None:
                self._stretch()

    def _pump(self) -> None:
        """Launch the reductions whose turn it is and whose gradients are complete."""
        while self.reducing and self._next < len(self._order) and self._order[self._next].complete:
            self._launch(self._order[self._next])

    def _launch(self, gradients: UnitGradients) -> None:
        self.gatherer.launch_through(gradients.unit)
        # Not in `_buffer`, on the stream of reductions: memory that they read belongs to the computing stream.
        lacks = any(s.layout.trainable and n not in gradients.buffers for n, s in enumerate(gradients.unit.sections))
        self._land(0 if lacks and self._waits_alone(gradients) else self._ahead)
        self._flatten(gradients)
        if not self._exchanges and self._in_place(gradients):
            with named("reduce", gradients.unit.name):
                self._complete_in_place(gradients)
            return
        self.domain.reductions.follow()
        with named("reduce", gradients.unit.name), self.domain.reductions.aside():
            self._start_reduction(gradients)

    def _in_place(self, gradients: UnitGradients) -> bool:
        """Whether a unit's gradients have been collected where they are to be reduced to."""
        unit = gradients.unit
        return (
            not gradients.loans.away
            and self._prescale(unit.domain) == 1.0
            and all(
                section.gradient is not None and gradients.buffers.get(place) is section.gradient
                for place, section in enumerate(unit.sections)
                if section.layout.trainable
            )
        )

    def _complete_in_place(self, gradients: UnitGradients) -> None:
        """Do what remains of a reduction where there is nobody to reduce with."""
        self._next += 1
        gradients.reduced, gradients.accumulated, gradients.task = True, True, -1
        for place, buffer in gradients.buffers.items():
            if place not in gradients.joined:
                assert isinstance(buffer, torch.Tensor)
                self._fill_gaps(gradients, gradients.unit.sections[place], buffer)
        gradients.free()

    def _start_reduction(self, gradients: UnitGradients) -> None:
        self._next += 1
        gradients.reduced, gradients.task = True, -1
        gradients.bring()
        unit = gradients.unit
        buffers: dict[int, torch.Tensor] = {}
        for place, section in enumerate(unit.sections):
            if section.layout.trainable:
                self._buffer(gradients, place, section)
        self._flatten(gradients)
        for place, section in enumerate(unit.sections):
            if section.layout.trainable:
                buffer = gradients.buffers[place]
                assert isinstance(buffer, torch.Tensor)
                if place not in gradients.joined:
                    self._fill_gaps(gradients, section, buffer)
                buffers[place] = self._prepare(gradients, section, buffer)
        sent = [*buffers.values()]
        with self.accountant.owning(Category.BUFFERS):
            if self.compressor is not None and self.compressor.active:
                launches, own_only = [self._lossily(self.compressor, gradients, buffers)], []
            else:
                launches, own_only = self._exactly(gradients, buffers), unit.trainable
            del buffers
            handle = gradients.domain.reductions.start(launches, self._hold)
        self._in_flight.append(_Flight(gradients, handle, own_only, sent if self.domain.async_reductions else ()))

    def _lossily(self, compressor: Compressor, gradients: UnitGradients, buffers: Mapping[int, torch.Tensor]) -> Launch:
        unit = gradients.unit
        gradients.borrow_sums()
        flats = [_flat(unit, unit.sections[place], buffer) for place, buffer in buffers.items()]
        before, gradients.accumulated = gradients.accumulated, True
        return lambda: compressor.reduce(
            flats, unit.name, accumulate=before, scale=self.driver.reduction_scale(), wire_dtype=self.wire_dtype
        )

    def _exactly(self, gradients: UnitGradients, buffers: Mapping[int, torch.Tensor]) -> list[Launch]:
        """Return the launches that reduce a unit's buffers."""
        unit, level, depth = gradients.unit, gradients.level, gradients.domain.depth
        places = [place for place, section in enumerate(unit.sections) if section.layout.trainable]
        sections = [unit.sections[place] for place in places]
        inside = 0 < level < depth
        ends = self.boundary or not inside  # goes on to this rank's own range
        adds = bool(gradients.sums) if inside else gradients.accumulated

        def first(outputs: Sequence[torch.Tensor]) -> Handle:
            given = dict(zip(places, outputs, strict=True))
            pairs = [(given[place], buffer) for place, buffer in buffers.items()]
            return gradients.comm.reduce_scatter(pairs, unit.name, accumulate=adds and fine == 1, kind="reduce")

        if inside:
            fine, outputs = level, [self._sum_of(gradients, place, kept=not ends) for place in places]
        else:
            gradients.borrow_sums()
            fine, outputs = depth, [section.own_gradient for section in sections]
        launches = gradients.domain.reducing(
            outputs, first, 0, fine, unit.name, accumulate=adds, wire=self.wire_dtype, made=self._hold
        )
        if inside and ends:
            launches += self._beyond(gradients)
        elif not inside:
            gradients.accumulated = True
        return launches

    def _sum_of(self, gradients: UnitGradients, place: int, *, kept: bool) -> torch.Tensor:
        """Return what a section is reduced to in every micro-batch, where more ranks have gradients to add to it."""
        known = gradients.sums.get(place)
        if known is None:
            section = gradients.unit.sections[place]
            size = section.layout.size(gradients.level)
            known = torch.empty(size, dtype=section.accumulate_dtype, device=section.device)
            self.accountant.hold(Category.GRADIENTS if kept else Category.BUFFERS, known)
            gradients.sums[place] = known
        return known

    def _beyond(self, gradients: UnitGradients) -> list[Launch]:
        """Return the launches that reduce `gradients.sums` over the ranks that have not been summed over yet."""
        gradients.borrow_sums()
        pairs = [(gradients.unit.sections[place].own_gradient, total) for place, total in gradients.sums.items()]
        before, gradients.accumulated, gradients.sums = gradients.accumulated, True, {}
        return gradients.domain.onward(
            pairs, gradients.level, gradients.unit.name, accumulate=before, wire=self.wire_dtype, made=self._hold
        )

    def _hold(self, buffer: torch.Tensor) -> None:
        self.accountant.hold(Category.BUFFERS, buffer)

    @property
    def _ahead(self) -> int:
        """How many reductions may be under way when another one is launched.

        Where the host waits for each, that is none. A device computes meanwhile what has been launched, and would run
        dry if the host waited for the last one.
        """
        return 1 if self.domain.async_reductions else 0

    def _land(self, most: int, *, blocking: bool | None = None) -> None:
        """Wait until at most so many reductions are under way, and go on with what was before them.

        Args:
            most: see above.
            blocking: the host waits, and no stream: what waits for a reduction must not hold up gathers that other
                ranks need before they can take part in it. Else the current stream waits. None: unless `on_device`.
        """
        if blocking is None:
            blocking = not self.on_device
        while len(self._in_flight) > most:
            flight = self._in_flight.popleft()
            gradients, handle, own_only = flight.gradients, flight.handle, flight.own_only
            name = gradients.unit.name
            category = Category.OTHER if own_only else Category.BUFFERS
            with self.gatherer.parked(), self.accountant.owning(category), named("wait for reduction", name):
                if isinstance(handle, WorkChain):
                    handle.wait_first()
                elif blocking:
                    self.domain.reductions.synchronize(handle, f"the reduction of unit {name!r}")
                else:
                    handle.wait()
            gradients.free()
            del flight
            self._finish_onward()
            if isinstance(handle, WorkChain):
                self._onward = (gradients, handle, own_only)
            else:
                self._replicate(gradients, own_only)

    def _finish_onward(self) -> None:
        """Wait for the rest of the last unit's reduction but one."""
        if self._onward is None:
            return
        gradients, chain, own_only = self._onward
        self._onward = None
        with self.gatherer.parked(), named("wait for reduction", gradients.unit.name):
            chain.wait()
        self._replicate(gradients, own_only)

    def _replicate(self, gradients: UnitGradients, own_only: Sequence[FlatParamStorage]) -> None:
        """Bring the reduced gradients to the ranks that step the same as this one does."""
        if not gradients.accumulated:
            return  # it is reduced over more ranks at the accumulation boundary
        domain, depth = gradients.domain, gradients.domain.depth
        links: list[Work] = []
        for level in sorted({section.levels.optimizer for section in own_only} - {depth}):
            moves = [(s.whole_gradient, s.own_gradient, depth) for s in own_only if s.levels.optimizer == level]
            launches = domain.gathering(moves, level, gradients.unit.name, kind="replicate")
            links.append(domain.reductions.start(launches))
        if not gradients.lends:
            self._replicating += links
            return
        with self.gatherer.parked():
            for link in links:
                if self.on_device:
                    link.wait()
                else:
                    self.domain.reductions.synchronize(link, f"the reduction of unit {gradients.unit.name!r}")
        gradients.return_sums()
        # What is stored may take as long as the next unit's reduction.
        self._settle_returned()
        self._returned = gradients

    def _settle_returned(self) -> None:
        if self._returned is not None:
            self._returned.settle()
            self._returned = None

    def complete_window(self) -> None:
        """Make the accumulators hold the window's gradients, before they are stepped.

        What has only been added up locally is reduced (the boundary was declared after the last backward pass). Where
        gradients stay local, `own_gradient` is made complete instead. Afterwards comes `zero_absent`.
        """
        self._settle_local()
        if self.local:
            self._complete_local()
            return
        if self.partial:
            for gradients in self.gradients.values():
                gradients.reduced = False
            self._next = 0
            self._sweep()
        if any(gradients.sums for gradients in self.gradients.values()):
            for gradients in self._order:
                if not gradients.sums:
                    continue  # of a domain that has nothing beyond the ranks that have been summed over
                self._land(self._ahead, blocking=not self.domain.async_reductions)
                self.domain.reductions.follow()
                with self.domain.reductions.aside():
                    handle = gradients.domain.reductions.start(self._beyond(gradients))
                self._in_flight.append(_Flight(gradients, handle, gradients.unit.trainable))
            self._sweep()

    def zero_absent(self) -> None:
        """Make the accumulators zero that hold the window before, for this one had no backward pass (no collective).

        Raises:
            OffloadError: they live elsewhere and cannot be written. It can be called again.
        """
        for gradients in self.gradients.values() if not self.local else ():
            if not gradients.accumulated:
                gradients.borrow_sums()
                for section in gradients.unit.trainable:
                    section.whole_gradient.zero_()
                gradients.return_sums()
                gradients.settle()

    def _settle_local(self) -> None:
        self.local = self.update.stays_local()

    def _complete_local(self) -> None:
        self.partial = True
        for gradients in self.gradients.values():
            gradients.bring()
            for place, section in enumerate(gradients.unit.sections):
                if section.layout.trainable:
                    buffer = self._buffer(gradients, place, section)
                    assert isinstance(buffer, torch.Tensor)  # sums are never in a GradientList
                    self._fill_gaps(gradients, section, buffer)
                    if self.prescale != 1.0:
                        buffer.mul_(self.prescale)
                    self._own[id(section)] = buffer

    def own_gradient(self, section: FlatParamStorage) -> torch.Tensor:
        """Return what has been added up locally for all of a section; `complete_window` has to come before."""
        return self._own[id(section)]

    def unused(self) -> list[str]:
        """Return the names of trainable parameters that have received no gradient on this rank since the last step."""
        return [
            gradients.unit.registry[slot.index].name
            for gradients in self.gradients.values()
            for section in gradients.unit.trainable
            for slot in section.layout.slots
            if slot.index not in gradients.seen and slot.index not in gradients.written
        ]

    def clear(self) -> None:
        """Start a new step: what is accumulated counts no more, and its memory is given back (or kept, if so asked)."""
        self.partial = False
        self._own = {}
        for gradients in self.gradients.values():
            gradients.accumulated = False
            gradients.sums = {}
            gradients.begin_window()
            gradients.free()
            gradients.seen = set()
            if not self._keeps_gradients:
                for section in gradients.unit.trainable:
                    section.free_gradient()

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


class _Flight(NamedTuple):
    """A reduction under way."""

    gradients: UnitGradients
    handle: Work
    own_only: Sequence[FlatParamStorage]
    """Sections of which only this rank's own range is reduced then."""
    sent: Sequence[Any] = ()
    """What belongs to other streams, and must not be given back before the reduction has ended."""


def _flat(unit: Unit, section: FlatParamStorage, buffer: torch.Tensor) -> Flat:
    """Return a section's gradients as a compressor takes them."""
    whole = section.whole_gradient
    return Flat(
        name=f"{unit.index}.{unit.name}.{unit.sections.index(section)}",
        full=buffer,
        own=section.own_gradient,
        whole=whole if whole.numel() != section.layout.shard else None,
        shapes=[(slot.offset, torch.Size(unit.registry[slot.index].shape)) for slot in section.layout.slots],
    )
