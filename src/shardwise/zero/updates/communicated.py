"""Optimizers that communicate themselves: what they are given of the units, and how their results come back.

Such an optimizer says before each window whether it wants the reduced gradient, as any other does, or this rank's own,
which is then only added up locally. It gets the memory of whole sections: it steps segments of master weights as an
elementwise optimizer does, and besides them knows where parameters lie in the section, and which groups they have.
Where the optimizer's state is sharded (ZeRO stage 1) it steps this rank's range and the parameters are gathered as
usual; gradients that are divided (stages 2 and 3) are no use to it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from shardwise.comm.communicator import Communicator
from shardwise.comm.domain import Domains
from shardwise.config.names import ONEBIT_STAGE_REASONS
from shardwise.errors import ConflictError, UsageError
from shardwise.memory import Accountant, Category
from shardwise.registry import Registry
from shardwise.zero.units.global_ids import GlobalTensorIds
from shardwise.zero.units.plan import ALL_ON_DEVICE, Plan
from shardwise.zero.units.unit import FlatParamStorage, Unit
from shardwise.zero.updates.segments import SegmentUpdate
from shardwise.zero.updates.update import StateKind, as_gradient


@dataclass
class BlockSegment:
    """A run of one group's master weights on this rank; see `shardwise.optim.communicating.Segment`."""

    parameter: nn.Parameter
    group: int
    start: int
    stop: int
    pieces: list[tuple[int, int, int]]


@dataclass
class SectionBlock:
    """A section as the optimizer sees it; see `shardwise.optim.communicating.Block`."""

    name: str
    numel: int
    start: int
    stop: int
    lanes: list[tuple[int, int, int]]
    tensors: list[tuple[int, int, int]]
    segments: list[BlockSegment] = field(default_factory=list)
    gradient: torch.Tensor | None = None


class CommunicatingOptimizer(Protocol):
    """What is asked of an optimizer that communicates itself; `shardwise.optim.communicating` has it in full."""

    ranks_differ: bool
    param_groups: list[dict[str, Any]]
    tensor_keys: tuple[str, ...]

    @property
    def apart(self) -> bool:
        """Whether ranks have parameters of their own now."""

    @property
    def warm_up(self) -> int:
        """Steps at the beginning that are exact, or keep less than those after them."""

    def attach(
        self,
        blocks: Sequence[Any],
        comm: Communicator,
        *,
        hold: Callable[[torch.Tensor], None],
        written: Callable[[], None],
    ) -> None:
        """Work on these blocks from now on."""

    def detach(self) -> None:
        """Forget the engine."""

    def forget(self) -> None:
        """Drop everything that is kept besides `state`."""

    def exact_gradients(self) -> bool:
        """Return whether the next step takes reduced gradients."""

    def kept(self) -> Iterable[torch.Tensor]:
        """Yield what is kept besides `state`."""

    def agreed(self, segment: Any) -> torch.Tensor:
        """Return the values of a segment that are the same on all ranks."""

    def withdraw(self) -> None:
        """Make the parameters what `agreed` says."""

    def momentum_was_set(self) -> None:
        """State has been written from outside."""

    def tensor_state(self, number: int) -> dict[str, torch.Tensor]:
        """Return what is kept for a parameter as a whole."""

    def set_tensor_state(self, number: int, values: Mapping[str, Any]) -> None:
        """Take over what is kept for a parameter as a whole."""

    def rank_state(self) -> dict[str, Any] | None:
        """Return what only this rank knows."""

    def load_rank_state(self, state: Mapping[str, Any] | None) -> bool:
        """Take it over; return whether it fits the layout."""


class CommunicatedUpdate(SegmentUpdate):
    """Steps an optimizer that communicates itself.

    Args:
        optimizer: its groups are edited in place.
        units: all units.
        registry: the logical tensors.
        domains: of the parameters: one, in one dimension.
        numbering: of the tensors.
        accountant: is told about optimizer state and messages.
        is_elementwise: whether a state entry (value, elements of its parameter, name) has one value per element.
        plan: what is sharded.

    Attributes:
        own_gradient: returns this rank's gradient of a section, where gradients have only been added up locally.
        on_written: called when parameters have changed outside of a step.

    Raises:
        ConflictError: the plan shards what the optimizer needs whole, or ranks are in groups.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        units: Sequence[Unit],
        registry: Registry,
        domains: Domains,
        numbering: GlobalTensorIds,
        accountant: Accountant,
        is_elementwise: StateKind,
        plan: Plan,
    ) -> None:
        super().__init__(optimizer, units, registry, domains.main.ranks, numbering, accountant, is_elementwise)
        self.asked: CommunicatingOptimizer = optimizer  # type: ignore[assignment]
        self.own_gradient: Callable[[FlatParamStorage], torch.Tensor] = _none
        self.on_written: Callable[[], None] = _nothing
        self._blocks: list[tuple[FlatParamStorage, SectionBlock]] = []
        self._segment_of: dict[int, BlockSegment] = {}
        name, most = type(optimizer).__name__, 0 if self.asked.ranks_differ else 1
        if plan.stage > most:
            raise ConflictError(
                f"zero_optimization.stage: is {plan.stage}, but the optimizer {name} needs "
                f"{ONEBIT_STAGE_REASONS[most]}. Lower the stage or take another optimizer"
            )
        if plan.where != ALL_ON_DEVICE:
            raise ConflictError(
                f"the optimizer {name} uses its state outside of steps, too, and cannot have it, gradients or "
                "parameters elsewhere than on the device. Take another one"
            )
        if domains.others:
            raise ConflictError(
                f"the optimizer {name} exchanges gradients among all ranks at once and cannot have parameters that "
                "only some ranks share (declare_part). Take another one"
            )
        if domains.main.depth > 1:
            raise ConflictError(
                f"the optimizer {name} exchanges gradients among all ranks at once and cannot have groups of ranks. "
                "Take another one, or remove zero_optimization.mics_shard_size (or the mesh passed to initialize())"
            )

    def stays_local(self) -> bool:
        """Whether the gradients of the window that begins now are only added up locally (the same on all ranks)."""
        return not self.asked.exact_gradients()

    def bind(self) -> None:
        """Put the segments into the optimizer's groups, and give it the blocks."""
        keys, kept = self.asked.tensor_keys, {}
        for index, parameter in enumerate(self.registry.parameters):
            state = self.optimizer.state.get(parameter, {})
            kept[index] = {key: state.pop(key) for key in keys if key in state}
        super().bind()
        blocks: dict[int, SectionBlock] = {}
        for unit in self.units:
            for place, section in enumerate(unit.sections):
                if section.layout.trainable:
                    block = self._block(f"{unit.index}.{unit.name}.{place}", section)
                    blocks[id(section)] = block
                    self._blocks.append((section, block))
        pieces: dict[int, list[tuple[int, int, int]]] = {}
        for index, runs in self._runs.items():
            for _, piece, parameter in runs:
                end = piece.offset + piece.stop - piece.start
                pieces.setdefault(id(parameter), []).append((index, piece.offset, end))
        groups = {id(p): number for number, group in enumerate(self.optimizer.param_groups) for p in group["params"]}
        for section, where, parameter in self._segments:
            segment = BlockSegment(
                parameter,
                groups[id(parameter)],
                section.master_start + where.start,
                section.master_start + where.stop,
                sorted(pieces.get(id(parameter), []), key=lambda piece: piece[1]),
            )
            blocks[id(section)].segments.append(segment)
            self._segment_of[id(parameter)] = segment
        self.asked.attach(
            [block for _, block in self._blocks], self.comm, hold=self._hold_message, written=self._written
        )
        for index, values in kept.items():
            if values:
                self.asked.set_tensor_state(index, values)

    def _block(self, name: str, section: FlatParamStorage) -> SectionBlock:
        layout = section.layout
        return SectionBlock(
            name,
            layout.numel,
            section.master_start,
            section.master_stop,
            [(lane.group, lane.start, lane.stop) for lane in layout.lanes if lane.group is not None],
            [(slot.index, slot.offset, slot.offset + slot.numel) for slot in layout.slots],
        )

    def _hold_message(self, message: torch.Tensor) -> None:
        self._accountant.hold(Category.BUFFERS, message)

    def _written(self) -> None:
        for section, _ in self._blocks:
            section.publish()
        self._hold_all()
        self.on_written()

    def _hold_all(self) -> None:
        self.hold_state()
        for tensor in self.asked.kept():
            self._accountant.hold(Category.OPTIMIZER, tensor)

    def takes_factor(self, optimizer: torch.optim.Optimizer) -> bool:
        """See `Update.takes_factor`: what is communicated is what has been multiplied."""
        return False

    def step(self, optimizer: torch.optim.Optimizer, factor: float | torch.Tensor) -> None:
        """Step with reduced gradients or this rank's own, multiplied before, and write into the parameters' memory."""
        local = self.stays_local()
        for section, block in self._blocks:
            given = self.own_gradient(section) if local else section.whole_gradient
            block.gradient = as_gradient(given, block.segments[0].parameter, self._accountant)
        try:
            optimizer.step()
        finally:
            for _, block in self._blocks:
                block.gradient = None
        for section, _ in self._blocks:
            section.publish()
        self._hold_all()

    def refresh(self, unit: Unit, loaded: Collection[int] = ()) -> None:
        """See `Update.refresh`.

        Raises:
            UsageError: ranks have parameters of their own at the moment.
        """
        self.check_agreed(f"parameters of unit {unit.name!r}")
        super().refresh(unit, loaded)

    def check_agreed(self, what: str) -> None:
        """Refuse to change parameters of which every rank has its own.

        Raises:
            UsageError: it has; see `refresh`.
        """
        if self.asked.apart:
            raise UsageError(
                f"{what} changed while every rank has its own: {type(self.optimizer).__name__} has made local steps "
                "since it last averaged them. Call engine.optimizer.synchronize() on all ranks before changing them"
            )

    def master_pieces(self, index: int) -> list[tuple[int, int, torch.Tensor]]:
        """See `Update.master_pieces`; the values on which all ranks agree."""
        found = []
        for _, piece, parameter in self._runs.get(index, ()):
            values = self.asked.agreed(self._segment_of[id(parameter)])
            found.append((piece.start, piece.stop, values[piece.offset : piece.offset + piece.stop - piece.start]))
        return found

    def state(self, index: int) -> Mapping[str, Any]:
        """See `Update.state`."""
        state = super().state(index)
        return {**state, **self.asked.tensor_state(index)} if state else {}

    def clear_state(self) -> None:
        """See `Update.clear_state`."""
        super().clear_state()
        self.asked.forget()

    def stepped_together(self, key: str) -> list[list[int]]:
        """See `Update.stepped_together`; what is kept for each parameter as a whole is its own."""
        return [] if key in self.asked.tensor_keys else super().stepped_together(key)

    def make_state(
        self, index: int, elementwise: Mapping[str, torch.dtype], whole: Mapping[str, Any], *, filled: bool = False
    ) -> None:
        """See `Update.make_state`."""
        keys = self.asked.tensor_keys
        shared = {key: value for key, value in whole.items() if key not in keys}
        super().make_state(index, elementwise, shared, filled=filled)
        self.asked.set_tensor_state(index, {key: value for key, value in whole.items() if key in keys})

    def state_was_set(self) -> None:
        """State has been changed through `state_pieces`."""
        self.asked.momentum_was_set()

    def publish(self, unit: Unit) -> None:
        """See `Update.publish`."""
        self.asked.withdraw()
        super().publish(unit)

    def rank_state(self) -> dict[str, Any] | None:
        """Return what only this rank knows, for its part of a checkpoint."""
        return self.asked.rank_state()

    def load_rank_state(self, state: Mapping[str, Any] | None) -> bool:
        """Take it over again; return whether it fits the layout, or there was nothing."""
        fits = self.asked.load_rank_state(state)
        self._hold_all()
        return fits

    def detach(self) -> None:
        """See `Update.detach`."""
        self.asked.detach()

    def skip_warm_up(self) -> bool:
        """Go on with the steps that lose something (for plans of memory); return whether there are any."""
        for group in self.optimizer.param_groups:
            group["step"] = max(group["step"], self.asked.warm_up)
        return self.comm.world > 1


def _none(section: FlatParamStorage) -> torch.Tensor:
    raise AssertionError("nobody adds gradients up")


def _nothing() -> None:
    """Nobody listens."""
