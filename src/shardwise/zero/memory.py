"""Memory of one rank in closed form, before the first step: what the engine will hold, and what it cannot do without.

Both come from the same arithmetic on the plan table, the units and the dtypes (Rajbhandari et al., "ZeRO: Memory
optimizations toward training trillion parameter models", 2020, section 3, extended by the buffers of gathering and
reducing). The *plan* counts elements as they are laid out, with padding and alignment, and everything that this
implementation holds. The *floor* counts the parameters' own elements: resident state by the table, the largest pair of
consecutive units gathered, and one unit each of gradient, send and receive buffer; units that are used early and late
(tied ones) are held in between.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from shardwise.comm.wire import SUM_CHUNK
from shardwise.memory import ActivationPlan, Category, StepBytes, step_bytes
from shardwise.zero.model import ShardedModel
from shardwise.zero.unit import SectionMemory, Unit
from shardwise.zero.update import WholeUpdate


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


def planned(model: ShardedModel, accumulation: int, activations: ActivationPlan | None = None) -> MemoryPlan:
    """Return what this rank will hold.

    Args:
        model: as built, before or after any number of steps.
        accumulation: micro-batches a step.
        activations: counted in the total; None: left out.
    """
    sizes = _Sizes(model, accumulation, padded=True)
    resident = sizes.resident()
    gathered, buffers = sizes.gathered(), sizes.buffers()
    both = sizes.pipeline().most(activations)
    kept = _state(model)
    owned, exchange = sizes.exchange()
    chunk = sizes.chunk()
    held = sum(resident.values()) + kept.state
    gradients = resident[Category.GRADIENTS]
    summed = max(gradients, sizes.summed_gradients())
    peaks = {
        **resident,
        Category.GRADIENTS: max(summed, gradients + owned),
        Category.OPTIMIZER: kept.state,
        Category.BUFFERS: max(buffers, exchange),
        Category.GATHERED: gathered,
        Category.OTHER: resident[Category.OTHER] + max(kept.temporary, chunk),
    }
    passes = held - gradients + summed + gathered + both + chunk
    return MemoryPlan(peaks, max(passes, held + owned + max(kept.temporary, exchange)))


def floor(model: ShardedModel, accumulation: int, activations: ActivationPlan | None = None) -> MemoryPlan:
    """Return what arithmetic asks of this rank; see the module docstring. Arguments as of `planned`."""
    sizes = _Sizes(model, accumulation, padded=False)
    resident = sizes.resident()
    resident[Category.GRADIENTS] = max(resident[Category.GRADIENTS], sizes.summed_gradients())
    gathered, buffers = sizes.gathered(), sizes.buffers()
    state = _least_state(model)
    both = sizes.pipeline().most(activations)
    peaks = {**resident, Category.OPTIMIZER: state, Category.BUFFERS: buffers, Category.GATHERED: gathered}
    return MemoryPlan(peaks, sum(resident.values()) + state + gathered + both)


def _state(model: ShardedModel) -> StepBytes:
    """Ask the optimizer what it will keep for the tensors that it now has."""
    if model.optimizer is None:
        return StepBytes(0, 0)
    asked = [
        _ask(model, group, [tuple(p.shape) for p in model.optimizer.param_groups[group]["params"]])
        for group in range(len(model.optimizer.param_groups))
    ]
    return StepBytes(sum(a.state for a in asked), max((a.temporary for a in asked), default=0))


def _least_state(model: ShardedModel) -> int:
    """Return the state of all trained parameters, divided evenly where it is sharded."""
    if model.optimizer is None:
        return 0
    share = model.comm.world if model.plan.shard_optimizer else 1
    state = 0
    for group in range(len(model.optimizer.param_groups)):
        shapes = [t.shape for t in model.registry if t.trainable and t.group == group]
        if isinstance(model.update, WholeUpdate):
            state += _ask(model, group, shapes).state // share
        elif shapes:
            numel = sum(t.numel for t in model.registry if t.trainable and t.group == group)
            state += _ask(model, group, [(-(-numel // share),)]).state
    return state


def _ask(model: ShardedModel, group: int, shapes: Sequence[tuple[int, ...]]) -> StepBytes:
    assert model.optimizer is not None
    kinds = {(s.master_dtype, s.accumulate_dtype) for unit in model.units for s in unit.trainable}
    if not shapes or not kinds:
        return StepBytes(0, 0)
    # fp32 wherever there is a choice; fp64 parameters bring their own.
    dtype, gradient_dtype = min(kinds, key=lambda kind: kind[0].itemsize)
    return step_bytes(model.optimizer, group, shapes, dtype=dtype, gradient_dtype=gradient_dtype, device=model.device)


class _Sizes:
    """Byte counts of a sharded model, with or without padding."""

    def __init__(self, model: ShardedModel, accumulation: int, *, padded: bool) -> None:
        self.model = model
        self.world = model.comm.world
        self.padded = padded
        self.accumulation = accumulation
        # Where gradients are not sharded, micro-batches are first added up in whole buffers; without peers always.
        self.sums_locally = self.world == 1 or (accumulation > 1 and not model.plan.shard_gradients)

    def numel(self, section: SectionMemory) -> int:
        return section.layout.numel if self.padded else sum(slot.numel for slot in section.layout.slots)

    def share(self, section: SectionMemory) -> int:
        """Elements of one rank's range."""
        return -(-self.numel(section) // self.world)

    def updated(self, section: SectionMemory) -> int:
        """Elements that the optimizer of this rank updates."""
        return self.share(section) if self.model.plan.shard_optimizer else self.numel(section)

    def trained(self) -> Iterable[SectionMemory]:
        if self.model.update is None:
            return []
        return [section for unit in self.model.units for section in unit.trainable]

    def owned(self, section: SectionMemory) -> int:
        """Elements of the whole tensors that this rank steps, where those are not its range."""
        update = self.model.update
        if not isinstance(update, WholeUpdate) or update.replicated:
            return 0
        return sum(slot.numel for slot in section.layout.slots if slot.index in update.masters)

    def resident(self) -> dict[Category, int]:
        found = dict.fromkeys((Category.PARAMETERS, Category.GRADIENTS, Category.MASTER, Category.OTHER), 0)
        for unit in self.model.units:
            for section in unit.sections:
                numel = self.share(section) if section.sharded else self.numel(section)
                found[Category.PARAMETERS] += numel * section.layout.dtype.itemsize
        for section in self.trained():
            found[Category.GRADIENTS] += self.updated(section) * section.accumulate_dtype.itemsize
            if self.padded and self.owned(section):
                found[Category.MASTER] += self.owned(section) * section.master_dtype.itemsize
            elif not section.master_is_parameter:
                found[Category.MASTER] += self.updated(section) * section.master_dtype.itemsize
        buffers = {id(b): b.nbytes for m in self.model.module.modules() for b in m._buffers.values() if b is not None}
        found[Category.OTHER] = sum(buffers.values())
        return found

    def summed_gradients(self) -> int:
        """Whole sums over micro-batches, and the parts of them that are reduced while others are still whole."""
        if not self.sums_locally:
            return 0
        whole = sum(self.numel(section) * section.accumulate_dtype.itemsize for section in self.trained())
        if not self.padded or not self.model.plan.shard_optimizer:
            return whole
        most = held = whole
        for unit in self._reduced():
            held += sum(self.share(section) * section.accumulate_dtype.itemsize for section in unit.trainable)
            most = max(most, held)
            held -= sum(self.numel(section) * section.accumulate_dtype.itemsize for section in unit.trainable)
        return most

    def _reduced(self) -> list[Unit]:
        """Units with gradients, in the order in which they are reduced."""
        if self.model.update is None:
            return []
        by_index = {unit.index: unit for unit in self.model.units if unit.trainable}
        return [by_index[index] for index in reversed(self.model.order[0]) if index in by_index]

    def gathered(self) -> int:
        sizes = {
            unit.index: sum(self.numel(s) * s.layout.dtype.itemsize for s in unit.sections)
            for unit in self.model.units
            if unit.sharded
        }
        numels = {unit.index: unit.numel for unit in self.model.units}
        ahead = self.model.plan.prefetch_elements if self.model.plan.prefetch else None
        forward, backward = self.model.order
        kept = self.model.gatherer.kept if self.padded else frozenset()
        return max(
            _window(forward, backward, sizes, numels, ahead, kept),
            _window(backward, forward, sizes, numels, ahead, kept),
        )

    def buffers(self) -> int:
        """Gradients being collected and sent, and pieces being received."""
        return self.pipeline().most(None)

    def pipeline(self) -> _Pipeline:
        jobs = [
            _Job(
                filled=0 if self.sums_locally else self._sent(unit),
                extra=self._received(unit) + self._cast(unit),
                parameters=frozenset(
                    id(self.model.registry.parameters[slot.index])
                    for section in unit.trainable
                    for slot in section.layout.slots
                ),
            )
            for unit in self._reduced()
        ]
        return _Pipeline(jobs)

    def _wire(self, section: SectionMemory) -> torch.dtype:
        wire = self.model.policy.wire_dtype
        if wire is not None:
            return wire
        return section.accumulate_dtype if self.sums_locally else section.layout.dtype

    def _sent(self, unit: Unit) -> int:
        return sum(self.numel(section) * self._wire(section).itemsize for section in unit.trainable)

    def _cast(self, unit: Unit) -> int:
        """Copies made because sums are sent in another dtype than they are formed in."""
        if not self.sums_locally or self.world == 1:
            return 0
        return sum(
            self.numel(section) * self._wire(section).itemsize
            for section in unit.trainable
            if self._wire(section) is not section.accumulate_dtype
        )

    def _received(self, unit: Unit) -> int:
        return self._sent(unit) * (self.world - 1) // self.world

    def exchange(self) -> tuple[int, int]:
        """Whole gradients of the tensors owned here, and the largest all-to-all, during the step."""
        gradients = largest = 0
        for section in self.trained():
            owned = self.owned(section)
            gradients += owned * section.accumulate_dtype.itemsize
            if isinstance(self.model.update, WholeUpdate) and not self.model.update.replicated:
                first, last = section.layout.range_of(section.rank)
                own = sum(piece.stop - piece.start for piece in section.layout.pieces(first, last))
                cast = 0 if section.master_is_parameter else owned
                largest = max(
                    largest,
                    (own + owned) * section.accumulate_dtype.itemsize,
                    (own + owned + cast) * section.layout.dtype.itemsize,
                )
        return gradients, largest

    def chunk(self) -> int:
        """Scratch of adding pieces up where the result cannot be formed in place."""
        plan = self.model.plan
        added_to, within_sum = plan.shard_gradients, not plan.shard_optimizer
        if self.world == 1 or self.accumulation == 1 or not (added_to or within_sum):
            return 0
        return max((min(SUM_CHUNK, self.share(s)) * s.accumulate_dtype.itemsize for s in self.trained()), default=0)


def _window(
    order: Sequence[int],
    other: Sequence[int],
    sizes: Mapping[int, int],
    numels: Mapping[int, int],
    ahead: int | None,
    kept: Collection[int],
) -> int:
    """Return the most bytes gathered at once in a pass that gathers in `order`.

    A unit that comes before another in both orders, that of this pass and that of the opposite one, encloses it: it is
    needed before and after, and held in between.

    Args:
        order: indices of units in the order of this pass.
        other: the same for the opposite pass.
        sizes: bytes of the units that are gathered at all.
        numels: their elements.
        ahead: elements that may be gathered beyond the next unit; None if not even that is.
        kept: units that are held from their gather to the end of the pass.
    """
    sequence = [index for index in order if index in sizes]
    place = {index: position for position, index in enumerate(other)}
    most = 0
    for position, index in enumerate(sequence):
        live = sizes[index]
        live += sum(sizes[b] for b in sequence[:position] if place[b] < place[index] or b in kept)
        budget = ahead
        for distance, following in enumerate(sequence[position + 1 :]):
            if budget is None:
                break
            budget -= numels[following]
            if distance > 0 and budget < 0:
                break
            live += sizes[following]
        most = max(most, live)
    return most


@dataclass(frozen=True)
class _Job:
    """Reduction of one unit.

    Attributes:
        filled: bytes of its gradient, from its first parameter's until it is reduced.
        extra: further bytes while it is under way.
        parameters: `id()` of those whose gradients it waits for.
    """

    filled: int
    extra: int
    parameters: frozenset[int]


class _Pipeline:
    """Units are reduced one after the other; while one is under way the next one's gradients are collected."""

    def __init__(self, jobs: Sequence[_Job]) -> None:
        self.jobs = jobs

    def most(self, activations: ActivationPlan | None) -> int:
        """Return the most bytes of buffers, or of buffers and activations, at once."""
        if activations is None:
            pairs = zip(self.jobs, [*self.jobs[1:], None], strict=False)
            return max(
                (job.filled + job.extra + (after.filled if after else 0) for job, after in pairs),
                default=0,
            )
        waiting = {parameter: place for place, job in enumerate(self.jobs) for parameter in job.parameters}
        missing = [len(job.parameters) for job in self.jobs]
        collecting: set[int] = set()
        under_way = -1
        most = 0
        for stretch in activations.stretches:
            place = waiting.pop(stretch.parameter, None) if stretch.parameter is not None else None
            if place is not None:
                collecting.add(place)
                missing[place] -= 1
            most = max(most, stretch.start + self._bytes(collecting, under_way))
            while under_way + 1 < len(self.jobs) and not missing[under_way + 1]:
                under_way += 1
                collecting.discard(under_way)
                most = max(most, stretch.start + self._bytes(collecting, under_way))
            most = max(most, stretch.peak + self._bytes(collecting, under_way))
        return most

    def _bytes(self, collecting: Iterable[int], under_way: int) -> int:
        held = sum(self.jobs[place].filled for place in collecting)
        return held + (self.jobs[under_way].filled + self.jobs[under_way].extra if under_way >= 0 else 0)
