"""Memory of one rank in closed form, before the first step: what the engine will hold, and what it cannot do without.

Both come from the same arithmetic on the plan table, the units and the dtypes (Rajbhandari et al., "ZeRO: Memory
optimizations toward training trillion parameter models", 2020, section 3, extended by the buffers of gathering and
reducing). The *plan* counts elements as they are laid out, with padding and alignment, and everything that this
implementation holds. The *floor* counts the parameters' own elements: resident state by the table, the largest pair of
consecutive units gathered, and one unit each of gradient, send and receive buffer; units that are used early and late
(tied ones) are held in between. Its total goes through the backward pass and adds what must be there together, so that
it is not above what is measured. On a CPU the norm's scratch is in both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import TYPE_CHECKING

import torch

from shardwise.comm.compression import Compressor, SectionSizes
from shardwise.comm.neighbours import CHUNK
from shardwise.comm.wire import SUM_CHUNK
from shardwise.memory import ActivationPlan, Category, StepBytes, Stretch, step_bytes
from shardwise.precision.norms import scratch_bytes
from shardwise.zero.units.peaks import QueuedReduction, ReductionQueue, gathered_together
from shardwise.zero.units.unit import SectionMemory, Unit
from shardwise.zero.updates.communicated import CommunicatedUpdate

if TYPE_CHECKING:
    from shardwise.zero.model import ShardedModel


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one rank.

    Attributes:
        peaks: most bytes in each category; activations are not among them.
        total: most bytes at once. Activations are highest when the backward pass begins, buffers later: the total is
            less than the sum.
    """

    peaks: dict[Category, int]
    total: int


def planned(
    model: ShardedModel, accumulation: int, activations: ActivationPlan | None = None, *, norm: bool = True
) -> MemoryPlan:
    """Return what this rank will hold.

    Args:
        model: as built, before or after any number of steps.
        accumulation: micro-batches a step.
        activations: counted in the total; None: left out.
        norm: whether steps compute the gradient norm.
    """
    exact = _planned(model, accumulation, activations, norm=norm)
    if not isinstance(model.update, CommunicatedUpdate) or model.comm.world == 1:
        return exact
    own = _planned(model, accumulation, activations, norm=norm, communicates=True)
    peaks = {category: max(size, own.peaks[category]) for category, size in exact.peaks.items()}
    return MemoryPlan(peaks, max(exact.total, own.total))


def _planned(
    model: ShardedModel,
    accumulation: int,
    activations: ActivationPlan | None,
    *,
    norm: bool,
    communicates: bool = False,
) -> MemoryPlan:
    """Plan steps with reduced gradients, or such as an optimizer takes that communicates itself."""
    sizes = _Sizes(model, accumulation, padded=True, communicates=communicates)
    resident = sizes.resident()
    gathered, buffers = sizes.gathered(), 0 if communicates else sizes.buffers()
    gathering, decoding = sizes.coded()
    pipeline, single = sizes.pipeline(adding=True), sizes.single()
    both = pipeline.most(activations)
    kept, messages = _state(model, communicates=communicates), sizes.messages()
    owned, exchange = sizes.exchange()
    widened = sizes.widened() if norm or model.stepping.norms else 0
    scratch = sizes.scratch() + sizes.unsent() + sizes.positions()
    held = sum(resident.values()) + kept.state + scratch
    gradients = resident[Category.GRADIENTS]
    summed = max(gradients, sizes.summed_gradients())
    peaks = {
        **resident,
        Category.GRADIENTS: max(summed, gradients + owned),
        Category.OPTIMIZER: kept.state,
        Category.BUFFERS: max(buffers + gathering.codes, single + decoding.codes, exchange, messages) + scratch,
        Category.GATHERED: gathered,
        Category.OTHER: resident[Category.OTHER] + max(kept.temporary, sizes.chunk(), widened),
    }
    # What several micro-batches add up is there in all their passes but the first; else gradients come one by one.
    passes = held - gradients + (0 if sizes.come_one_by_one else summed) + gathering.total + both
    if decoding.codes:
        results = sum(job.result for job in pipeline.jobs)
        passes = max(passes, passes - gathering.total - both + decoding.total + single + results)
    stepping = held + owned + max(kept.temporary + messages, exchange)
    if communicates:
        stepping += summed - gradients
    return MemoryPlan(peaks, max(passes, held + widened, stepping))


def floor(
    model: ShardedModel, accumulation: int, activations: ActivationPlan | None = None, *, norm: bool = True
) -> MemoryPlan:
    """Return what arithmetic asks of this rank; see the module docstring. Arguments as of `planned`."""
    sizes = _Sizes(model, accumulation, padded=False)
    resident = sizes.resident()
    gradients = resident[Category.GRADIENTS] = max(resident[Category.GRADIENTS], sizes.summed_gradients())
    unsent = sizes.unsent()
    gathered, buffers = sizes.gathered(), sizes.buffers() + unsent
    state = _least_state(model)
    widened = sizes.widened() if norm or model.stepping.norms else 0
    peaks = {**resident, Category.OPTIMIZER: state, Category.BUFFERS: buffers, Category.GATHERED: gathered}
    peaks[Category.OTHER] += widened
    held = sum(resident.values()) + state + unsent
    pipeline = ReductionQueue([replace(job, result=0) for job in sizes.pipeline().jobs])
    # Not the sum of the peaks: what is gathered need not be most when activations or buffers are.
    order = activations or _in_order(pipeline)
    passes = max(gathered, pipeline.most(order, sizes.gathered_meanwhile(order)))
    if not sizes.come_one_by_one:
        return MemoryPlan(peaks, held + max(passes, widened))
    # Gradients come one by one: what is gathered with all of them there is what the backward pass ends with.
    return MemoryPlan(peaks, max(held - gradients + passes, held + max(sizes.ending(), widened)))


def _in_order(pipeline: ReductionQueue) -> ActivationPlan:
    """Return a backward pass without activations, in which gradients come in the order of the reductions."""
    parameters = [parameter for job in pipeline.jobs for parameter in job.parameters]
    return ActivationPlan(tuple(Stretch(parameter, 0, 0) for parameter in (None, *parameters)))


def _state(model: ShardedModel, *, communicates: bool) -> StepBytes:
    """Ask the optimizer what it will keep for the tensors that it now has."""
    if model.optimizer is None:
        return StepBytes(0, 0)
    if isinstance(model.update, CommunicatedUpdate):
        return _communicated_state(model, padded=True, communicates=communicates)
    asked = []
    for number, group in enumerate(model.optimizer.param_groups):
        shapes: dict[torch.dtype, list[tuple[int, ...]]] = {}
        for parameter in group["params"]:
            shapes.setdefault(parameter.dtype, []).append(tuple(parameter.shape))
        asked += [_ask(model, number, alike, dtype) for dtype, alike in shapes.items()]
    return StepBytes(sum(a.state for a in asked), max((a.temporary for a in asked), default=0))


def _least_state(model: ShardedModel) -> int:
    """Return the state of all trained parameters, divided evenly where it is sharded."""
    if model.optimizer is None:
        return 0
    if isinstance(model.update, CommunicatedUpdate):
        return _communicated_state(model, padded=False, communicates=True).state
    share = model.domain.parts(model.plan.levels(model.domain).optimizer)
    state = 0
    alike: dict[tuple[int, torch.dtype], list[tuple[int, ...]]] = {}
    for tensor in model.registry:
        if tensor.trainable and tensor.group is not None:
            alike.setdefault((tensor.group, model.policy.master_dtype(tensor.dtype)), []).append(tensor.shape)
    for (group, dtype), shapes in alike.items():
        if group in model.stepping.whole:
            state += _ask(model, group, shapes, dtype).state // share
        else:
            numel = sum(torch.Size(shape).numel() for shape in shapes)
            state += _ask(model, group, [(-(-numel // share),)], dtype).state
    return state


def _communicated_state(model: ShardedModel, *, padded: bool, communicates: bool) -> StepBytes:
    """Ask an optimizer that communicates itself; its temporaries are pieces of one rank's range of a section."""
    assert isinstance(model.update, CommunicatedUpdate)
    sizes = _Sizes(model, 1, padded=padded)
    largest = max((4 * sizes.share(section) for section in sizes.trained()), default=0)
    # Compressing: signs as numbers, their packed form, and a sum.
    exact, kept, _ = model.update.planned(sizes.blocks())
    return StepBytes(kept if communicates else exact, 3 * largest)


def _ask(model: ShardedModel, group: int, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> StepBytes:
    """Ask the optimizer what tensors of a dtype take."""
    assert model.optimizer is not None
    gradient_dtype = model.policy.accumulation_dtype(dtype)
    return step_bytes(model.optimizer, group, shapes, dtype=dtype, gradient_dtype=gradient_dtype, device=model.device)


def reduced_alone(model: ShardedModel) -> frozenset[int]:
    """Return the units whose reduction is over before other gradients are collected, if micro-batches are added up.

    Where gradients are sharded, a unit's gradient is collected while the one before is reduced. On few ranks, two units
    that are much of the model would take more memory than whole sums: those are reduced one after the other.
    """
    if not model.plan.shard_gradients:
        return frozenset()
    split = _Sizes(model, 2, padded=True)
    whole = _Sizes(model, 2, padded=True, sums_locally=True)
    limit = whole.summed_gradients(reducing=True) + whole.scratch()
    base = split.resident()[Category.GRADIENTS] + split.scratch()
    jobs = split.pipeline(adding=True).jobs
    return frozenset(
        unit.index
        for unit, job, after in zip(split.reduced(), jobs, jobs[1:], strict=False)
        if base + job.filled + job.extra + after.filled > limit
    )


@dataclass(frozen=True)
class _Window:
    """Bytes gathered at once: of whole units, of codes, of both."""

    whole: int
    codes: int
    total: int


class _Sizes:
    """Byte counts of a sharded model, with or without padding."""

    def __init__(
        self,
        model: ShardedModel,
        accumulation: int,
        *,
        padded: bool,
        sums_locally: bool | None = None,
        communicates: bool = False,
    ) -> None:
        self.model = model
        self.domain = model.domain
        self.world = model.domain.world
        self.level = model.plan.levels(model.domain).gradients
        self.padded = padded
        self.accumulation = accumulation
        # Where gradients are not sharded, micro-batches are first added up in whole buffers; without peers always.
        locally = self.world == 1 or communicates or (accumulation > 1 and not model.plan.shard_gradients)
        self.communicates = communicates
        self.sums_locally = locally if sums_locally is None else sums_locally

    @property
    def come_one_by_one(self) -> bool:
        """Whether a backward pass begins without any gradient's memory."""
        return self.accumulation == 1 and not self.model.keeps_gradients

    def numel(self, section: SectionMemory) -> int:
        return section.layout.numel if self.padded else sum(slot.numel for slot in section.layout.slots)

    def share(self, section: SectionMemory, level: int | None = None) -> int:
        """Elements of one rank's range at a level (None: the finest)."""
        return -(-self.numel(section) // self.domain.parts(self.domain.depth if level is None else level))

    def updated(self, section: SectionMemory) -> int:
        """Elements that the optimizer of this rank updates."""
        return self.share(section, section.levels.optimizer)

    def trained(self) -> Iterable[SectionMemory]:
        if self.model.update is None:
            return []
        return [section for unit in self.model.units for section in unit.trainable]

    def owned(self, section: SectionMemory) -> int:
        """Elements of the whole tensors that this rank steps, where those are not its range."""
        owners = self.model.owners
        if owners is None or owners.replicated:
            return 0
        return sum(slot.numel for slot in section.layout.slots if slot.index in owners.masters)

    def _exchanged(self, section: SectionMemory) -> bool:
        """Whether the section's tensors are stepped by their owners."""
        return section.layout.whole and self.model.owners is not None and not self.model.owners.replicated

    def blocks(self) -> list[tuple[int, int, int]]:
        """Elements, elements stepped here and parameters of each trained section."""
        return [(self.numel(s), self.updated(s), len(s.layout.slots)) for s in self.trained()]

    def messages(self) -> int:
        """What an optimizer that communicates itself sends and receives at once."""
        update = self.model.update
        return update.planned(self.blocks())[2] if isinstance(update, CommunicatedUpdate) and self.communicates else 0

    def resident(self) -> dict[Category, int]:
        found = dict.fromkeys((Category.PARAMETERS, Category.GRADIENTS, Category.MASTER, Category.OTHER), 0)
        for unit in self.model.units:
            for section in unit.sections:
                numel = self.share(section, section.levels.parameters)
                if unit.second is not None:
                    numel += -(-self.numel(section) // unit.second.world)
                found[Category.PARAMETERS] += numel * section.layout.dtype.itemsize
        for section in self.trained():
            if not self.communicates or not self.model.plan.shard_optimizer:  # then there are only whole sums
                found[Category.GRADIENTS] += self.updated(section) * section.accumulate_dtype.itemsize
            if self.padded and self._exchanged(section):
                found[Category.MASTER] += self.owned(section) * section.master_dtype.itemsize
            elif not section.master_is_parameter:
                found[Category.MASTER] += self.updated(section) * section.master_dtype.itemsize
        buffers = {id(b): b.nbytes for m in self.model.module.modules() for b in m._buffers.values() if b is not None}
        found[Category.OTHER] = sum(buffers.values())
        return found

    def summed_gradients(self, *, reducing: bool = False) -> int:
        """Whole sums over micro-batches, and the parts of them that are reduced while others are still whole.

        Args:
            reducing: count what reductions need meanwhile.
        """
        if not self.sums_locally:
            return self._sums_over_ranks()
        whole = sum(self._collected(section) * section.accumulate_dtype.itemsize for section in self.trained())
        if not self.padded or self.communicates:
            return whole
        # Rows of tables, beside the whole gradient that they may have to become, or into which their sum goes.
        rows = sum(self._table(section) * section.accumulate_dtype.itemsize for section in self.trained())
        if not self.model.plan.shard_optimizer:
            return whole + rows
        most = held = whole + rows // 2
        for unit in self.reduced():
            held += sum(self.share(section) * section.accumulate_dtype.itemsize for section in unit.trainable)
            most = max(most, held + (self._received(unit) + self._cast(unit) if reducing else 0))
            held -= sum(self.numel(section) * section.accumulate_dtype.itemsize for section in unit.trainable)
        return most

    def _sums_over_ranks(self) -> int:
        """Sums over inner ranks that micro-batches are added up in, while they are reduced over the others."""
        if not 0 < self.level < self.domain.depth or self.accumulation == 1:
            return 0

        def size(unit: Unit, level: int | None) -> int:
            levels = [section.levels.optimizer if level is None else level for section in unit.trainable]
            pairs = zip(unit.trainable, levels, strict=True)
            return sum(self.share(section, at) * section.accumulate_dtype.itemsize for section, at in pairs)

        most = held = sum(size(unit, self.level) for unit in self.reduced())
        units = self.reduced()
        # The reduction of a unit goes on while that of the next one begins.
        for unit, done in zip(units, [None, None, *units], strict=False):
            held += size(unit, None) - (0 if done is None else size(done, self.level))
            most = max(most, held)
        return most

    def reduced(self) -> list[Unit]:
        """Units with gradients, in the order in which they are reduced."""
        if self.model.update is None:
            return []
        by_index = {unit.index: unit for unit in self.model.units if unit.trainable}
        return [by_index[index] for index in reversed(self.model.order[0]) if index in by_index]

    def gathered(self) -> int:
        """Whole units at once."""
        return max((window.whole for window, _ in self._windows()), default=0)

    def ending(self) -> int:
        """What comes on top of all gradients when the backward pass ends.

        Either the last unit is being reduced, or it is still whole, and its gradient is not there yet.
        """
        jobs = self.pipeline().jobs[-1:]
        whole = [window.whole for window, _ in self._windows()][-1:]
        return max(0, *(job.filled + job.extra for job in jobs), sum(whole) - sum(job.result for job in jobs))

    def coded(self) -> tuple[_Window, _Window]:
        """Most codes, and most of codes and whole units, while a unit computes, and while it is decoded."""
        found = list(self._windows()) or [(_Window(0, 0, 0), _Window(0, 0, 0))]
        first, second = (
            _Window(0, max(w.codes for w in windows), max(w.total for w in windows))
            for windows in zip(*found, strict=True)
        )
        return first, second

    def _windows(self) -> Iterator[tuple[_Window, _Window]]:
        """Yield what is gathered at once while a unit computes, and while it is decoded, for each unit in turn.

        What is gathered as codes has no whole buffer until it is needed.
        """
        sizes = self._sizes_of_units()
        numels = {unit.index: unit.numel for unit in self.model.units}
        kept = self.model.gatherer.kept if self.padded else frozenset()
        sets = gathered_together(self.model.order, sizes, numels, self.model.plan.ahead, kept)
        codes = {u.index: u.codes for u in self.model.units if u.codes is not None and self.padded}
        for around, coming in sets:
            if not codes or self.model.plan.secondary > 1:  # backward passes gather second shards, which are exact
                whole = sum(sizes[index] for index in (*around, *coming))
                yield _Window(whole, 0, whole), _Window(whole, 0, whole)
            if codes:
                exact = (index for index in coming[1:] if index not in codes)
                whole = sum(sizes[index] for index in (*around, coming[0], *exact))
                ahead = sum(codes[index].gathered_bytes for index in coming[1:] if index in codes)
                own = codes.get(coming[0])
                decoding = ahead + (own.gathered_bytes + own.work_bytes if own is not None else 0)
                yield _Window(whole, ahead, whole + ahead), _Window(whole, decoding, whole + decoding)

    def _sizes_of_units(self) -> dict[int, int]:
        """Bytes of each unit that is gathered, when it is whole."""
        return {
            unit.index: sum(self.numel(s) * s.layout.dtype.itemsize for s in unit.sections)
            for unit in self.model.units
            if unit.sharded
        }

    def single(self) -> int:
        """The largest reduction that is under way while no other gradients are collected."""
        return max((job.filled + job.extra for job in self.pipeline().jobs), default=0)

    def gathered_meanwhile(self, passes: ActivationPlan) -> list[tuple[int, int]]:
        """Return the bytes of whole units that cannot be avoided when each stretch of the passes begins, and after it.

        While gradients of one unit come, it is whole, and so is the next one, which is on its way. From the last
        gradient of a unit to the first of the next it is only sure that the next is whole. Before the first gradient
        nothing is: activations may be highest in the loss, which no unit computes.
        """
        sizes = self._sizes_of_units()
        numels = {unit.index: unit.numel for unit in self.model.units}
        forward, backward = self.model.order
        own, pair = dict.fromkeys(numels, 0), dict.fromkeys(numels, 0)
        windows = gathered_together((backward, forward), sizes, numels, self.model.plan.ahead)
        for around, coming in islice(windows, len(sizes)):  # those of the backward pass
            own[coming[0]] = sum(sizes[unit] for unit in (*around, coming[0]))
            pair[coming[0]] = own[coming[0]] + sum(sizes[unit] for unit in coming[1:])
        unit_of = {parameter: unit.index for unit in self.reduced() for parameter in self._pieces(unit)}
        units = [None if stretch.parameter is None else unit_of.get(stretch.parameter) for stretch in passes.stretches]
        times = Counter(unit for unit, _ in groupby(units))
        found = []
        for unit, after in zip(units, [*units[1:], None], strict=True):
            begins = 0 if unit is None else (pair if times[unit] == 1 else own)[unit]
            then = 0 if after is None else (pair if after == unit and times[unit] == 1 else own)[after]
            found.append((begins, min(begins, then) if unit is not None else 0))
        return found

    def positions(self) -> int:
        """Where values that travel exactly among codes are."""
        return sum(unit.codes.kept_bytes for unit in self.model.units if unit.codes is not None)

    def buffers(self) -> int:
        """Gradients being collected and sent, and pieces being received."""
        pipeline = self.pipeline()
        return pipeline.most(None) - sum(job.result for job in pipeline.jobs)

    def pipeline(self, *, adding: bool = False) -> ReductionQueue:
        """Reductions in their order.

        Args:
            adding: count scratch of adding up (see `chunk`), which is no communication buffer.
        """
        reducer = self.model.reducer
        alone = reducer.alone if reducer is not None and self.accumulation > 1 else frozenset()
        jobs = [
            QueuedReduction(
                filled=0 if self.sums_locally else self._sent(unit),
                extra=0 if self.communicates else self._extra(unit) + (self._chunk(unit) if adding else 0),
                alone=unit.index in alone,
                parameters=frozenset(self._pieces(unit)),
                pieces=self._pieces(unit) if self._in_pieces(unit) else {},
                result=self._result(unit) if self.come_one_by_one else 0,
                summed=self.sums_locally,
            )
            for unit in self.reduced()
        ]
        return ReductionQueue(jobs)

    def _extra(self, unit: Unit) -> int:
        return self._received(unit) + self._cast(unit)

    def _result(self, unit: Unit) -> int:
        """Bytes of what a unit's gradients become: a sum of whole ones, or what is reduced of them."""
        numel = self.numel if self.sums_locally else self.updated
        return sum(numel(section) * section.accumulate_dtype.itemsize for section in unit.trainable)

    def _wire(self, section: SectionMemory) -> torch.dtype:
        wire = self.model.policy.wire_dtype or section.layout.wire_dtype
        own = section.accumulate_dtype if self.sums_locally else section.layout.dtype
        if wire is None or self._always_lossy:
            return own
        # Lossy reductions take gradients as they are, after exact ones that do not.
        return max(wire, own, key=lambda dtype: dtype.itemsize) if self._compressor is not None else wire

    @property
    def _compressor(self) -> Compressor | None:
        return self.model.compressor if self.world > 1 else None

    @property
    def _always_lossy(self) -> bool:
        """Whether no reduction is exact."""
        return self._compressor is not None and self._compressor.start == 0

    def _sent(self, unit: Unit) -> int:
        if self._in_pieces(unit):
            return sum(self._pieces(unit).values())
        return sum(self._collected(section) * self._wire(section).itemsize for section in unit.trainable)

    def _collected(self, section: SectionMemory) -> int:
        """Elements of a section's gradient before it is reduced; of a table there need not be more than a few rows."""
        return 0 if section.layout.table is not None and not self.padded else self.numel(section)

    def _in_pieces(self, unit: Unit) -> bool:
        reducer = self.model.reducer
        return not self.sums_locally and reducer is not None and reducer.in_pieces(unit)

    def _pieces(self, unit: Unit) -> dict[int, int]:
        """Return the bytes of each gradient as autograd makes it, by `id()` of the parameter."""
        parameters = self.model.registry.parameters
        return {
            id(parameters[slot.index]): (slot.numel * section.layout.dtype.itemsize if self._collected(section) else 0)
            for section in unit.trainable
            for slot in section.layout.slots
        }

    def _cast(self, unit: Unit) -> int:
        """Copies made because sums are sent in another dtype than they are formed in."""
        if not self.sums_locally or self.world == 1:
            return 0
        return sum(
            self._collected(section) * self._wire(section).itemsize
            for section in unit.trainable
            if self._wire(section) is not section.accumulate_dtype
        )

    def _received(self, unit: Unit) -> int:
        inner = self.domain.sizes[0]
        exact = 0 if self.domain.dimensions[0].reads_peers else self._sent(unit) * (inner - 1) // inner
        exact += self._summed_on(unit)
        if self._compressor is not None:
            lossy = self._compressor.scratch_bytes([self._section_sizes(section) for section in unit.trainable])
            return lossy if self._always_lossy else max(lossy, exact)
        if not self.domain.dimensions[0].reads_peers or self.sums_locally or not self.padded:
            return exact
        # Rows are given up for a dense gradient when they are half of it.
        return sum(self._table(section) * self._wire(section).itemsize for section in unit.trainable) // 2

    def _summed_on(self, unit: Unit) -> int:
        """Sums that are reduced further, one dimension after the other, of this unit and the one before it."""
        found = 0
        for level, size in enumerate(self.domain.sizes[1:], start=1):
            sums = sum(self.share(section, level) * section.accumulate_dtype.itemsize for section in unit.trainable)
            kept = level == self.level and self.accumulation > 1  # among the gradients
            found += (0 if kept else 2 * sums) + sums * (size - 1) // size
        return found

    @staticmethod
    def _table(section: SectionMemory) -> int:
        """Elements of a table whose gradients may be rows: at most, what rows take is what the table does."""
        return section.layout.slots[0].numel if section.layout.table is not None else 0

    def unsent(self) -> int:
        """What lossy reductions keep because it has not been sent."""
        compressor = self._compressor
        if compressor is None:
            return 0
        return sum(compressor.kept_bytes(self._section_sizes(section)) for section in self.trained())

    def _section_sizes(self, section: SectionMemory) -> SectionSizes:
        shapes, offset = [], 0
        for slot in section.layout.slots:
            shapes.append((slot.offset if self.padded else offset, torch.Size(self.model.registry[slot.index].shape)))
            offset += slot.numel
        return SectionSizes(
            numel=self.numel(section),
            shapes=shapes,
            dtype=section.accumulate_dtype if self.sums_locally else section.layout.dtype,
            whole=section.keeps_whole_gradient,
            wire_dtype=self.model.policy.wire_dtype,
        )

    def scratch(self) -> int:
        """Chunks in which gradients are read from the peers' memory and added up."""
        if not self.domain.dimensions[0].reads_peers or self._always_lossy:
            return 0
        plan, sections = self.model.plan, list(self.trained())
        pieces = max((min(CHUNK, self.share(s)) * self._wire(s).itemsize for s in sections), default=0)
        aside = self.accumulation > 1 and not (self.sums_locally and plan.shard_optimizer)
        # Sums that are copied to be sent, in another dtype, make room for the result.
        sums = [
            min(CHUNK, self.share(s)) * s.accumulate_dtype.itemsize
            for s in sections
            if not self.sums_locally or self._wire(s) is s.accumulate_dtype
        ]
        return pieces + (max(sums, default=0) if aside else 0)

    def exchange(self) -> tuple[int, int]:
        """Whole gradients of the tensors owned here, and the largest all-to-all, during the step."""
        gradients = largest = 0
        for section in self.trained():
            owned = self.owned(section)
            gradients += owned * section.accumulate_dtype.itemsize
            if self._exchanged(section):
                first, last = section.own_range
                own = sum(piece.stop - piece.start for piece in section.layout.pieces(first, last))
                cast = 0 if section.master_is_parameter else owned
                largest = max(
                    largest,
                    (own + owned) * section.accumulate_dtype.itemsize,
                    (own + owned + cast) * section.layout.dtype.itemsize,
                )
        return gradients, largest

    def chunk(self) -> int:
        """Scratch of adding pieces up that come in another dtype than that of the sum they are added to."""
        return max(map(self._chunk, self.reduced()), default=0)

    def _chunk(self, unit: Unit) -> int:
        reads = self.domain.dimensions[0].reads_peers  # then the chunks are kept: see `scratch`
        if self.world == 1 or self.accumulation == 1 or not self.model.plan.shard_gradients or reads:
            return 0
        return max(
            (
                min(SUM_CHUNK, self.share(section, 1)) * section.accumulate_dtype.itemsize
                for section in unit.trainable
                if self._wire(section) is not section.accumulate_dtype
            ),
            default=0,
        )

    def widened(self) -> int:
        """Scratch of the norm."""
        runs = [
            piece.stop - piece.start
            for section in self.trained()
            for piece in section.layout.pieces(*section.own_range)
        ]
        return scratch_bytes(runs, self.model.device)
