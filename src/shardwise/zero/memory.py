"""Memory of one rank in closed form, before the first step: what the engine will hold, and what it cannot do without.

Both come from the same arithmetic on the plan table, the units and the dtypes (Rajbhandari et al., "ZeRO: Memory
optimizations toward training trillion parameter models", 2020, section 3, extended by the buffers of gathering and
reducing). The *plan* counts elements as they are laid out, with padding and alignment, and everything that this
implementation holds. The *floor* counts the parameters' own elements: resident state by the table, the largest pair of
consecutive units gathered, and one unit each of gradient, send and receive buffer; units that are used early and late
(tied ones) are held in between. On a CPU the norm's scratch is in both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shardwise.comm.neighbours import CHUNK
from shardwise.comm.wire import SUM_CHUNK
from shardwise.memory import ActivationPlan, Category, StepBytes, step_bytes
from shardwise.precision.norms import scratch_bytes
from shardwise.zero.peaks import Job, Pipeline, gathered_together
from shardwise.zero.unit import SectionMemory, Unit
from shardwise.zero.update import WholeUpdate

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
    sizes = _Sizes(model, accumulation, padded=True)
    resident = sizes.resident()
    gathered, buffers = sizes.gathered(), sizes.buffers()
    both = sizes.pipeline(adding=True).most(activations)
    kept = _state(model)
    owned, exchange = sizes.exchange()
    widened = sizes.widened() if norm else 0
    scratch = sizes.scratch() + sizes.unsent()
    held = sum(resident.values()) + kept.state + scratch
    gradients = resident[Category.GRADIENTS]
    summed = max(gradients, sizes.summed_gradients())
    peaks = {
        **resident,
        Category.GRADIENTS: max(summed, gradients + owned),
        Category.OPTIMIZER: kept.state,
        Category.BUFFERS: max(buffers, exchange) + scratch,
        Category.GATHERED: gathered,
        Category.OTHER: resident[Category.OTHER] + max(kept.temporary, sizes.chunk(), widened),
    }
    passes = held - gradients + summed + gathered + both
    return MemoryPlan(peaks, max(passes, held + widened, held + owned + max(kept.temporary, exchange)))


def floor(
    model: ShardedModel, accumulation: int, activations: ActivationPlan | None = None, *, norm: bool = True
) -> MemoryPlan:
    """Return what arithmetic asks of this rank; see the module docstring. Arguments as of `planned`."""
    sizes = _Sizes(model, accumulation, padded=False)
    resident = sizes.resident()
    resident[Category.GRADIENTS] = max(resident[Category.GRADIENTS], sizes.summed_gradients())
    unsent = sizes.unsent()
    gathered, buffers = sizes.gathered(), sizes.buffers() + unsent
    state = _least_state(model)
    both = sizes.pipeline().most(activations)
    widened = sizes.widened() if norm else 0
    peaks = {**resident, Category.OPTIMIZER: state, Category.BUFFERS: buffers, Category.GATHERED: gathered}
    peaks[Category.OTHER] += widened
    return MemoryPlan(peaks, sum(resident.values()) + state + unsent + max(gathered + both, widened))


def _state(model: ShardedModel) -> StepBytes:
    """Ask the optimizer what it will keep for the tensors that it now has."""
    if model.optimizer is None:
        return StepBytes(0, 0)
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
    share = model.comm.world if model.plan.shard_optimizer else 1
    state = 0
    alike: dict[tuple[int, torch.dtype], list[tuple[int, ...]]] = {}
    for tensor in model.registry:
        if tensor.trainable and tensor.group is not None:
            alike.setdefault((tensor.group, model.policy.master_dtype(tensor.dtype)), []).append(tensor.shape)
    for (group, dtype), shapes in alike.items():
        if isinstance(model.update, WholeUpdate):
            state += _ask(model, group, shapes, dtype).state // share
        else:
            numel = sum(torch.Size(shape).numel() for shape in shapes)
            state += _ask(model, group, [(-(-numel // share),)], dtype).state
    return state


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


class _Sizes:
    """Byte counts of a sharded model, with or without padding."""

    def __init__(
        self, model: ShardedModel, accumulation: int, *, padded: bool, sums_locally: bool | None = None
    ) -> None:
        self.model = model
        self.world = model.comm.world
        self.padded = padded
        self.accumulation = accumulation
        # Where gradients are not sharded, micro-batches are first added up in whole buffers; without peers always.
        locally = self.world == 1 or (accumulation > 1 and not model.plan.shard_gradients)
        self.sums_locally = locally if sums_locally is None else sums_locally

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

    def summed_gradients(self, *, reducing: bool = False) -> int:
        """Whole sums over micro-batches, and the parts of them that are reduced while others are still whole.

        Args:
            reducing: count what reductions need meanwhile.
        """
        if not self.sums_locally:
            return 0
        whole = sum(self.numel(section) * section.accumulate_dtype.itemsize for section in self.trained())
        if not self.padded or not self.model.plan.shard_optimizer:
            return whole
        most = held = whole
        for unit in self.reduced():
            held += sum(self.share(section) * section.accumulate_dtype.itemsize for section in unit.trainable)
            most = max(most, held + (self._received(unit) + self._cast(unit) if reducing else 0))
            held -= sum(self.numel(section) * section.accumulate_dtype.itemsize for section in unit.trainable)
        return most

    def reduced(self) -> list[Unit]:
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
        kept = self.model.gatherer.kept if self.padded else frozenset()
        sets = gathered_together(self.model.order, sizes, numels, self.model.plan.ahead, kept)
        return max((sum(sizes[index] for index in (*around, *coming)) for around, coming in sets), default=0)

    def buffers(self) -> int:
        """Gradients being collected and sent, and pieces being received."""
        return self.pipeline().most(None)

    def pipeline(self, *, adding: bool = False) -> Pipeline:
        """Reductions in their order.

        Args:
            adding: count scratch of adding up (see `chunk`), which is no communication buffer.
        """
        reducer = self.model.reducer
        alone = reducer.alone if reducer is not None and self.accumulation > 1 else frozenset()
        jobs = [
            Job(
                filled=0 if self.sums_locally else self._sent(unit),
                extra=self._received(unit) + self._cast(unit) + (self._chunk(unit) if adding else 0),
                alone=unit.index in alone,
                parameters=frozenset(self._pieces(unit)),
                pieces=self._pieces(unit) if self._in_pieces(unit) else {},
            )
            for unit in self.reduced()
        ]
        return Pipeline(jobs)

    def _wire(self, section: SectionMemory) -> torch.dtype:
        wire = self.model.policy.wire_dtype
        if wire is not None:
            return wire
        return section.accumulate_dtype if self.sums_locally else section.layout.dtype

    def _sent(self, unit: Unit) -> int:
        if self._in_pieces(unit):
            return sum(self._pieces(unit).values())
        return sum(self.numel(section) * self._wire(section).itemsize for section in unit.trainable)

    def _in_pieces(self, unit: Unit) -> bool:
        reducer = self.model.reducer
        return not self.sums_locally and reducer is not None and reducer.in_pieces(unit)

    def _pieces(self, unit: Unit) -> dict[int, int]:
        """Return the bytes of each gradient as autograd makes it, by `id()` of the parameter."""
        parameters = self.model.registry.parameters
        return {
            id(parameters[slot.index]): slot.numel * section.layout.dtype.itemsize
            for section in unit.trainable
            for slot in section.layout.slots
        }

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
        reducer = self.model.reducer
        if reducer is not None and reducer.compressor is not None:
            compressor = reducer.compressor
            return sum(
                compressor.scratch_bytes(self.numel(section), self._shapes(section), self.world)
                for section in unit.trainable
            )
        return 0 if self.model.comm.reads_peers else self._sent(unit) * (self.world - 1) // self.world

    def unsent(self) -> int:
        """What lossy reductions keep because it has not been sent."""
        reducer = self.model.reducer
        if reducer is None or reducer.compressor is None:
            return 0
        compressor = reducer.compressor
        return sum(
            compressor.kept_bytes(self.numel(section), self._shapes(section), self.world) for section in self.trained()
        )

    def _shapes(self, section: SectionMemory) -> list[torch.Size]:
        return [torch.Size(self.model.registry[slot.index].shape) for slot in section.layout.slots]

    def scratch(self) -> int:
        """Chunks in which gradients are read from the peers' memory and added up."""
        if not self.model.comm.reads_peers:
            return 0
        plan, sections = self.model.plan, list(self.trained())
        pieces = max((min(CHUNK, self.share(s)) * self._wire(s).itemsize for s in sections), default=0)
        aside = self.accumulation > 1 and not (self.sums_locally and plan.shard_optimizer)
        sums = max((min(CHUNK, self.share(s)) * s.accumulate_dtype.itemsize for s in sections), default=0)
        return pieces + (sums if aside else 0)

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
        """Scratch of adding pieces up that come in another dtype than that of the sum they are added to."""
        return max(map(self._chunk, self.reduced()), default=0)

    def _chunk(self, unit: Unit) -> int:
        reads = self.model.comm.reads_peers  # then the chunks are kept: see `scratch`
        if self.world == 1 or self.accumulation == 1 or not self.model.plan.shard_gradients or reads:
            return 0
        return max(
            (
                min(SUM_CHUNK, self.share(section)) * section.accumulate_dtype.itemsize
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
            for piece in section.layout.pieces(*section.layout.range_of(section.rank))
        ]
        return scratch_bytes(runs, self.model.device)
