"""Update of optimizers that communicate themselves.

Before each window such an optimizer chooses between reduced gradients and this rank's own gradients. With own
gradients, backward has no reduction, and the optimizer averages its own results
(`shardwise.comm.compression.averaging`). At ZeRO stage 1 it steps this rank's range, and the parameters are
all-gathered as usual. It cannot use sharded gradients (stages 2 and 3).
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from typing_extensions import override

from shardwise.comm.compression.averaging import Block, Segment
from shardwise.comm.domain import Domains
from shardwise.config.names import ONEBIT_STAGE_REASONS
from shardwise.errors import ConflictError, UsageError
from shardwise.memory import Accountant, Category
from shardwise.zero.units.flat_param import FlatParamStorage
from shardwise.zero.units.plan import ALL_ON_DEVICE, Plan
from shardwise.zero.units.unit import Unit
from shardwise.zero.updates.segments import SegmentUpdate
from shardwise.zero.updates.update import Update, as_gradient


class CommUpdate(Update):
    """Steps a `CommOptimizer`, which gets flat parameters as blocks; `domains` is one domain, in one dimension.

    Raises ConflictError if the plan shards or offloads state that the optimizer needs, or ranks are in groups.
    """

    def __init__(
        self, optimizer: Any, segments: SegmentUpdate, domains: Domains, accountant: Accountant, plan: Plan
    ) -> None:
        super().__init__(optimizer, [segments])
        self.optimizer: Any = optimizer
        self._segments, self._accountant, self._comm = segments, accountant, domains.main.ranks
        self._blocks: list[tuple[FlatParamStorage, Block]] = []
        self._segment_of: dict[int, tuple[Block, Segment]] = {}
        name, most = f"the optimizer {type(optimizer).__name__}", 0 if optimizer.ranks_differ else 1
        exchanges = f"{name} exchanges gradients among all ranks at once and cannot have"
        mics = "zero_optimization.mics_shard_size (or the mesh passed to initialize())"
        if plan.stage > most:
            needs = f"is {plan.stage}, but {name} needs {ONEBIT_STAGE_REASONS[most]}"
            raise ConflictError(f"zero_optimization.stage: {needs}. Lower the stage or take another optimizer")
        if plan.where != ALL_ON_DEVICE:
            raise ConflictError(f"{name} cannot have state elsewhere than on the device. Take another one")
        if domains.others:
            raise ConflictError(f"{exchanges} parameters that only some ranks share (declare_part). Take another one")
        if domains.main.depth > 1:
            raise ConflictError(f"{exchanges} groups of ranks. Take another one, or remove {mics}")

    @override
    def stays_local(self) -> bool:
        return not self.optimizer.exact_gradients()

    @override
    def bind(self, own_gradient: Callable[[FlatParamStorage], torch.Tensor], written: Callable[[], None]) -> None:
        super().bind(own_gradient, written)
        self._own_gradient = own_gradient
        groups = {id(p): number for number, group in enumerate(self.optimizer.param_groups) for p in group["params"]}
        segments = defaultdict[int, list[Segment]](list)
        for section, where, parameter in self._segments.segments:
            places = section.master_start + where.start, section.master_start + where.stop
            segments[id(section)].append(Segment(parameter, groups[id(parameter)], *places))
        numbers = self._segments.numbering.places
        for unit in self._segments.units:
            for place, section in enumerate(unit.sections):
                layout, name = section.layout, f"{unit.index}.{unit.name}.{place}"
                lanes = [(lane.group, lane.start, lane.stop) for lane in layout.lanes if lane.group is not None]
                tensors = [(numbers[slot.index], slot.offset, slot.offset + slot.numel) for slot in layout.slots]
                own = section.master_start, section.master_stop
                if layout.trainable:
                    block = Block(name, layout.numel, *own, lanes, tensors, segments[id(section)])
                    self._blocks.append((section, block))
                    self._segment_of.update({id(segment.parameter): (block, segment) for segment in block.segments})

        def changed() -> None:
            self._publish()
            written()

        hold = functools.partial(self._accountant.hold, Category.BUFFERS)
        self.optimizer.attach([block for _, block in self._blocks], self._comm, hold=hold, written=changed)

    def _publish(self) -> None:
        for section, _ in self._blocks:
            section.publish()
        self._hold_all()

    def _hold_all(self) -> None:
        self._segments.hold_state()
        for tensor in self.optimizer.extra_tensors():
            self._accountant.hold(Category.OPTIMIZER, tensor)

    @override
    def _step(self, factor: float | torch.Tensor) -> None:
        if not self.stays_local():
            super()._step(factor)
            self._hold_all()
            return
        for section, block in self._blocks:
            given = self._segments.scaled(section, self._own_gradient(section), factor)
            block.gradient = as_gradient(given, block.segments[0].parameter, self._accountant)
        try:
            self.optimizer.step()
        finally:
            for _, block in self._blocks:
                del block.gradient
        self._publish()

    @override
    def refresh(self, unit: Unit, loaded: Collection[int] = ()) -> None:
        self.check_agreed(f"parameters of unit {unit.name!r}")
        super().refresh(unit, loaded)

    @override
    def check_agreed(self, what: str) -> None:
        if self.optimizer.diverged:
            raise UsageError(
                f"{what} changed while every rank has its own: {type(self.optimizer).__name__} has made local steps "
                "since it last averaged them. Call engine.optimizer.synchronize() on all ranks before changing them"
            )

    @override
    def check_movable(self, what: str) -> None:
        raise UsageError(
            f"{what}: {type(self.optimizer).__name__} communicates itself, and its state is bound to memory of the "
            "device. Take an optimizer whose gradients the engine reduces"
        )

    @override
    def master_pieces(self, index: int) -> list[tuple[int, int, torch.Tensor]]:
        found = []
        for _, piece, parameter in self._segments.runs.get(index, ()):
            values = self.optimizer.synchronized_values(*self._segment_of[id(parameter)])
            found.append((piece.start, piece.stop, values[piece.offset : piece.offset + piece.stop - piece.start]))
        return found

    @override
    def clear_state(self) -> None:
        super().clear_state()
        self.optimizer.forget()

    @override
    def cut_by(self, shared: Mapping[int, Any]) -> None:
        if not all(part.fits(shared) for part in self.parts):
            raise UsageError(
                f"parameters have different step counts, and {type(self.optimizer).__name__} averages them together. "
                "Start with fresh optimizer state (load_optimizer_states=False)"
            )

    @override
    def state_was_set(self) -> None:
        self.optimizer.momentum_was_set()

    @override
    def publish(self, unit: Unit) -> None:
        self.optimizer.restore_synchronized()
        super().publish(unit)

    @override
    def rank_state(self) -> dict[str, Any] | None:
        return dict(state) if (state := self.optimizer.rank_state()) else None

    @override
    def load_rank_state(self, state: Mapping[str, Any] | None) -> bool:
        fits = bool(self.optimizer.load_rank_state(state))
        self._hold_all()
        return fits

    @override
    def detach(self) -> None:
        self.optimizer.detach()

    @override
    def begin_averaging(self) -> bool:
        for group in self.optimizer.param_groups:
            group["step"] = max(group["step"], self.optimizer.warm_up)
        return self._comm.world > 1
