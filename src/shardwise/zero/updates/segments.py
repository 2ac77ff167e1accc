"""Stepping flat runs of master weights: elementwise optimizers.

A segment is one lane of a section's master, or of the part that this rank has of it; there is one list of segments per
parameter group. An optimizer whose class can (`shardwise.zero.updates.parts.FlatOptimizer`) scales the gradients and
writes the parameters' copy in the pass of its update.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from shardwise.comm.communicator import Communicator
from shardwise.compat import allow_gradient_dtype, global_step_hooks, only_counts_steps
from shardwise.device.ranges import named
from shardwise.memory import Accountant, Category
from shardwise.memory.places import Borrowed, StateHome, borrowed, in_turn, tier_in_use
from shardwise.precision.tensornorms import NORMS, TensorNorms, TensorRun
from shardwise.registry import Registry
from shardwise.zero.units.global_ids import GlobalTensorIds
from shardwise.zero.units.layout import GroupRange, ShardSlice
from shardwise.zero.units.unit import FlatParamStorage, Unit
from shardwise.zero.updates.parameter_writeback import Outputs
from shardwise.zero.updates.parts import Origins, Part, Segment, flat_optimizer
from shardwise.zero.updates.update import (
    ReducedUpdate,
    StateKind,
    add_state,
    as_gradient,
    assign_groups,
    bind,
    hold,
    state_dtype,
    state_of_part,
    take_changes,
    tensors_of,
)


class SegmentUpdate(ReducedUpdate):
    """Elementwise optimizers: steps segments of master weights.

    Args:
        optimizer: the client's or the configured optimizer; its groups are edited in place.
        units: all units.
        registry: the logical tensors.
        job: all ranks that step together.
        numbering: of the tensors, the same on all of them.
        accountant: is told about optimizer state.
        is_elementwise: whether a state entry (value, elements of its parameter, name) has one value per element.
        norms: the optimizer asks for norms of whole tensors.

    Attributes:
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        units: Sequence[Unit],
        registry: Registry,
        job: Communicator,
        numbering: GlobalTensorIds,
        accountant: Accountant,
        is_elementwise: StateKind,
        *,
        norms: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self.units = units
        self.registry = registry
        self.comm = job
        self._numbering = numbering
        self._norms = norms
        self._accountant = accountant
        self._outputs = Outputs(job.device, accountant)
        self._is_elementwise = is_elementwise
        self._segments: list[Segment] = []
        self._origins: list[Origins] = []
        self._runs: dict[int, list[tuple[FlatParamStorage, ShardSlice, nn.Parameter]]] = {}
        self._everything = Part([], self._segments, self._origins)
        self._parts: list[tuple[Part, list[Borrowed]]] = []  # of the same, unit by unit, with what has to be lent
        self._near_factor: tuple[torch.Tensor, torch.Tensor] | None = None  # of a step, as it is and on the host

    def capture(self, unit: Unit) -> None:
        """Nothing: segments are views of the units' own masters."""

    def bind(self) -> None:
        """Put the segments into the optimizer's groups."""
        bind(self.optimizer, [self])

    def place(self, members: list[list[nn.Parameter]], old_state: dict[int, dict[str, Any]]) -> None:
        """Add the segments to the members of each group, and give them what state their parameters had."""
        of_parts = dict(old_state)
        for tensor, parameter in zip(self.registry, self.registry.parameters, strict=True):
            if tensor.box is not None and id(parameter) in old_state:
                of_parts[id(parameter)] = state_of_part(old_state[id(parameter)], tensor, self._is_elementwise)
        for unit in self.units:
            first = len(self._segments)
            with borrowed(unit.borrowing()):
                for section, lane in unit.segments():
                    if not section.layout.whole:
                        self._place_lane(section, lane, members, of_parts)
                sections = [section for section in unit.trainable if not section.layout.whole]
                part = Part(sections, self._segments[first:], self._origins[first:])
                self._everything.sections += sections
                self._parts.append((part, [loans for section in sections for loans in section.stepping]))
                self._keep_state(part)
        if self._norms:
            setattr(self.optimizer, NORMS, self._tensor_norms())

    def _place_lane(
        self,
        section: FlatParamStorage,
        lane: GroupRange,
        members: list[list[nn.Parameter]],
        old_state: dict[int, dict[str, Any]],
    ) -> None:
        assert section.master is not None and lane.group is not None
        for start, stop, pieces in self._cut(section, lane, old_state):
            segment = nn.Parameter(section.master[start:stop], requires_grad=True)
            members[lane.group].append(segment)
            self._segments.append((section, slice(start, stop), segment))
            self._origins.append((segment, [(p.index, p.start, p.offset, p.stop - p.start) for p in pieces]))
            for piece in pieces:
                self._runs.setdefault(piece.index, []).append((section, piece, segment))
            self._adopt_state(segment, pieces or self._example(lane.group, old_state), old_state)

    def _tensor_norms(self) -> TensorNorms:
        """Say which tensors the segments are made of, and how their norms are formed on all ranks."""
        stepped = [
            (section, slot.index)
            for unit in self.units
            for section in unit.trainable
            if not section.layout.whole
            for slot in section.layout.slots
        ]
        numbers, counts = self._numbering.places, self._numbering.counts
        groups: list[list[int]] = [[] for _ in self.optimizer.param_groups]
        for index in sorted(index for _, index in stepped):
            group = self.registry[index].group
            assert group is not None
            groups[group].append(numbers[index])
        runs: dict[torch.Tensor, list[TensorRun]] = {segment: [] for _, _, segment in self._segments}
        counted: list[tuple[torch.Tensor, TensorRun]] = []
        for section, place, segment in self._segments:
            start = section.master_start + place.start
            first, last = section.own_range
            for piece in section.layout.pieces(start, section.master_start + place.stop):
                offset = piece.offset + piece.stop - piece.start
                run = TensorRun(numbers[piece.index], piece.offset, offset)
                runs[segment].append(run)
                # Where every rank steps everything, each counts what would be its own: the same sums at every stage.
                low, high = max(run.start, first - start), min(run.stop, last - start)
                if low < high and counts[piece.index]:
                    counted.append((segment, TensorRun(run.tensor, low, high)))
        return TensorNorms(
            groups,
            runs,
            counted,
            count=len(self._numbering.names),
            wide=[numbers[index] for section, index in stepped if section.master_dtype is torch.float64],
            device=self._segments[0][2].device if self._segments else self.comm.device,
            add=self._add_norms,
            overwrites=True,
        )

    def _add_norms(self, sums: torch.Tensor) -> None:
        there = sums.to(self.comm.device)
        self.comm.all_reduce(there, "tensor_norms").wait()
        if there is not sums:
            sums.copy_(there)

    def _cut(
        self, section: FlatParamStorage, lane: GroupRange, old_state: dict[int, dict[str, Any]]
    ) -> Iterator[tuple[int, int, list[ShardSlice]]]:
        """Yield the segments of a lane: start and stop in the master, and pieces counted from the start.

        A segment has one step count. Where parameters of an instance with state have different ones, the lane is cut.
        """
        first = section.master_start + lane.start
        start, counts, pieces = 0, None, []  # type: tuple[int, Any, list[ShardSlice]]
        for piece in section.layout.pieces(first, section.master_start + lane.stop):
            state = old_state.get(id(self.registry.parameters[piece.index]), {})
            found = {
                key: value.tolist() if isinstance(value, torch.Tensor) else value
                for key, value in state.items()
                if not self._is_elementwise(value, self.registry[piece.index].numel, key)
            }
            if pieces and found != counts:
                yield lane.start + start, lane.start + piece.offset, pieces
                start, pieces = piece.offset, []
            counts = found
            pieces.append(replace(piece, offset=piece.offset - start))
        yield lane.start + start, lane.stop, pieces

    def _example(self, group: int, old_state: dict[int, dict[str, Any]]) -> list[ShardSlice]:
        """Return an empty piece of a parameter with state: padding alone needs state too (Adagrad makes it early)."""
        for tensor, parameter in zip(self.registry, self.registry.parameters, strict=True):
            if tensor.group == group and id(parameter) in old_state:
                return [ShardSlice(tensor.index, 0, 0, 0)]
        return []

    def _adopt_state(
        self, segment: nn.Parameter, pieces: Sequence[ShardSlice], old_state: dict[int, dict[str, Any]]
    ) -> None:
        """Cut the state that an instance already had the way its parameters are cut."""
        target: dict[str, Any] = {}
        for piece in pieces:
            tensor = self.registry[piece.index]
            state = old_state.get(id(self.registry.parameters[piece.index]), {})
            for key, value in state.items():
                if not self._is_elementwise(value, tensor.numel, key):
                    target[key] = copy.deepcopy(value)
                    continue
                if key not in target:
                    target[key] = torch.zeros_like(segment.detach(), dtype=state_dtype(value, tensor, segment))
                run = value.reshape(-1)[piece.start : piece.stop]
                target[key][piece.offset : piece.offset + run.numel()] = run
        if target:
            self.optimizer.state[segment] = target

    def takes_factor(self, optimizer: torch.optim.Optimizer) -> bool:
        """See `Update.takes_factor`."""
        flat = flat_optimizer(optimizer)
        return flat is not None and flat.takes_flat()

    def step(self, optimizer: torch.optim.Optimizer, factor: float | torch.Tensor) -> None:
        """Step all segments and write the results into the parameters' memory.

        If something has to be lent, or brought back to the device, that is done unit by unit, where the optimizer can
        be stepped so.
        """
        if not (self._apart and self._splits(optimizer)):
            self.step_at_once(optimizer, factor)
            return
        self._outputs.make_room([part.sections for part, _ in self._parts])

        def step(number: int) -> None:
            with named("step", self.units[number].name):
                self._step_alone(optimizer, factor, number)

        in_turn([(number, wanted) for number, (_, wanted) in enumerate(self._parts)], step)
        self.hold_state()

    def step_at_once(self, optimizer: torch.optim.Optimizer, factor: float | torch.Tensor) -> None:
        """Step in one call, for which everything is lent."""
        with self.around():
            self.step_lent(optimizer, factor)
        self.hold_state()

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Have everything lent for `step_lent` in the block, and new state kept where it should be afterwards."""
        self._outputs.make_room([self._everything.sections])
        with borrowed(self.away):
            yield
            for part, _ in self._parts if self.away else ():
                self._keep_state(part)

    def step_lent(self, optimizer: torch.optim.Optimizer, factor: float | torch.Tensor) -> None:
        """Step everything, which is there."""
        self._step(optimizer, factor, self._everything)

    @cached_property
    def away(self) -> list[Borrowed]:
        """All that has to be lent so that everything can be stepped."""
        return [borrows for _, wanted in self._parts for borrows in wanted]

    @cached_property
    def _apart(self) -> bool:
        """Whether something has to be lent, or copied to the device afterwards."""
        return bool(self.away) or any(map(self._outputs.stages, self._everything.sections))

    def _splits(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether some segments can be stepped after others, each in a call of its own, with the same result.

        torch's elementwise optimizers keep everything by parameter. Others may count calls, and so may hooks.
        """
        if self._norms:
            return False
        flat = flat_optimizer(optimizer)
        if flat is not None:
            return flat.takes_flat()
        hooks = (*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values())
        own = all(str(getattr(h, "__module__", "")).startswith("shardwise.") for h in (*hooks, *global_step_hooks()))
        wrapper = vars(optimizer).get("step")
        plain = wrapper is None or only_counts_steps(wrapper)
        return type(optimizer).__module__.startswith("torch.optim.") and own and plain

    def end_step(self) -> None:
        """See `Update.end_step`."""
        self._near_factor = None

    def _step_alone(self, optimizer: torch.optim.Optimizer, factor: float | torch.Tensor, number: int) -> None:
        """Step a part as if it were everything."""
        part, _ = self._parts[number]
        chosen = {id(segment) for _, _, segment in part.segments}
        members = [group["params"] for group in optimizer.param_groups]
        try:
            assign_groups(optimizer, [[p for p in group if id(p) in chosen] for group in members])
            self._step(optimizer, factor, part)
            self._keep_state(part)
        finally:
            assign_groups(optimizer, members)

    def _step(self, optimizer: torch.optim.Optimizer, factor: float | torch.Tensor, part: Part) -> None:
        """Step what the optimizer has in its groups now."""
        flat = flat_optimizer(optimizer)
        written = self._outputs.of(part.sections)
        outputs = [(s, written[id(section)][at]) for section, at, s in part.segments if id(section) in written]
        factor = self._factor_for(part, factor)
        if flat is not None and flat.takes_flat():
            shown = {id(section): section.stepped_gradient for section in part.sections}
            gradients = [(segment, shown[id(section)][place]) for section, place, segment in part.segments]
            flat.step_flat(factor=factor, gradients=gradients, outputs=outputs, origins=part.origins)
            self._outputs.send()
            return
        with contextlib.ExitStack() as lent:
            shown = {id(section): lent.enter_context(section.lending_gradient()) for section in part.sections}
            try:
                self._show_gradients(part.segments, shown, flat is not None)
                if flat is not None:
                    flat.step_flat(factor=factor, gradients=None, outputs=outputs, origins=part.origins)
                else:
                    optimizer.step()
            finally:
                for _, _, segment in part.segments:
                    segment.grad = None
        if flat is None:
            for section in part.sections:
                if id(section) in written and section.master is not None:
                    written[id(section)].copy_(section.master)
        self._outputs.send()

    def _factor_for(self, part: Part, factor: float | torch.Tensor) -> float | torch.Tensor:
        """Return a step's factor where a part is stepped; the host waits for it once in a step.

        After each part it would also wait for the copies of that part's parameters to the device.
        """
        if not (isinstance(factor, torch.Tensor) and any(section.steps_apart for section in part.sections)):
            return factor
        if self._near_factor is None or self._near_factor[0] is not factor:
            self._near_factor = factor, factor.to("cpu")
        return self._near_factor[1]

    def hold_state(self) -> None:
        """Tell the accountant about the optimizer's state; what is known is passed over, some optimizers make more."""
        for section, _, segment in self._segments:
            state = self.optimizer.state.get(segment)
            if state:
                hold(state, self._accountant, tier_in_use(section.optimizer_loans.home))

    def _keep_state(self, part: Part) -> None:
        """Have what the optimizer keeps for each element of a part live where it should."""
        for section in part.sections:
            if section.optimizer_loans.away:
                states = [(s, self.optimizer.state.get(s, {})) for other, _, s in part.segments if other is section]
                section.optimizer_loans.keep_only(
                    Category.OPTIMIZER,
                    [
                        value
                        for segment, state in states
                        for key, value in state.items()
                        if self._is_elementwise(value, segment.numel(), key)
                    ],
                )

    def _show_gradients(self, segments: Sequence[Segment], shown: Mapping[int, torch.Tensor], any_dtype: bool) -> None:
        """Put the gradients, which are given by section, into the segments' `.grad`."""
        for section, place, segment in segments:
            gradient = shown[id(section)][place]
            if any_dtype:
                allow_gradient_dtype(segment, gradient.dtype)
            fits = gradient.dtype is segment.dtype or getattr(segment, "grad_dtype", None) is gradient.dtype
            segment.grad = gradient if fits else as_gradient(gradient, segment, self._accountant)

    def refresh(self, unit: Unit, loaded: Collection[int] = ()) -> None:
        """See `Update.refresh`."""
        for section in unit.trainable:
            if section.master is not None and not section.master_is_parameter and not section.layout.whole:
                values = section.full[section.master_start : section.master_stop]
                pieces = section.layout.pieces(section.master_start, section.master_stop) if loaded else ()
                for piece in pieces:
                    if piece.index in loaded:
                        own = slice(piece.offset, piece.offset + piece.stop - piece.start)
                        section.master[own].copy_(values[own])
                take_changes(section.master, values)

    def master_ranges(self, index: int) -> list[tuple[int, int]]:
        """See `Update.master_ranges`."""
        return [(piece.start, piece.stop) for _, piece, _ in self._runs.get(index, ())]

    def master_pieces(self, index: int) -> list[tuple[int, int, torch.Tensor]]:
        """See `Update.master_pieces`."""
        return [
            (
                piece.start,
                piece.stop,
                segment.detach()[piece.offset : piece.offset + piece.stop - piece.start],
            )
            for _, piece, segment in self._runs.get(index, ())
        ]

    def state_pieces(self, index: int, key: str) -> list[tuple[int, int, torch.Tensor]]:
        """See `Update.state_pieces`."""
        found = []
        for _, piece, segment in self._runs.get(index, ()):
            value = self.optimizer.state.get(segment, {}).get(key)
            if isinstance(value, torch.Tensor) and value.numel() == segment.numel():
                view = value[piece.offset : piece.offset + piece.stop - piece.start]
                found.append((piece.start, piece.stop, view))
        return found

    def state(self, index: int) -> Mapping[str, Any]:
        """See `Update.state`."""
        runs = self._runs.get(index)
        return self.optimizer.state.get(runs[0][2], {}) if runs else {}

    def clear_state(self) -> None:
        """See `Update.clear_state`."""
        self.optimizer.state.clear()
        for part, _ in self._parts:
            self._keep_state(part)

    def stepped_together(self, key: str) -> list[list[int]]:
        """See `Update.stepped_together`."""
        sets: dict[int, list[int]] = {}
        for index, runs in self._runs.items():
            for segment in {id(segment) for _, _, segment in runs}:
                sets.setdefault(segment, []).append(index)
        return list(sets.values())

    def make_state(
        self, index: int, elementwise: Mapping[str, torch.dtype], whole: Mapping[str, Any], *, filled: bool = False
    ) -> None:
        """See `Update.make_state`."""
        for section, _, segment in self._runs.get(index, ()):
            tensor = self.registry[index]
            state = self.optimizer.state[segment]
            made = [key for key in elementwise if key not in state]
            add_state(self.optimizer, tensor, segment, state, elementwise, whole, filled=filled)
            if filled and made:
                self._zero_padding(segment, [state[key] for key in made])
            for key in elementwise if section.optimizer_loans.away else ():
                section.optimizer_loans.keep(Category.OPTIMIZER, state[key])
            hold(state, self._accountant, tier_in_use(section.optimizer_loans.home))

    def detach(self) -> None:
        """See `Update.detach`."""

    def own_masters(self) -> Iterator[tuple[torch.Tensor, StateHome]]:
        """See `Update.own_masters`: all belong to sections."""
        yield from ()

    def own_state(self) -> Iterator[tuple[torch.Tensor, StateHome]]:
        """See `Update.own_state`."""
        for section, _, segment in self._segments:
            for value in tensors_of(self.optimizer.state.get(segment, {})):
                yield value, section.optimizer_loans.home

    def take_new_views(self) -> None:
        """See `Update.take_new_views`."""
        for section, place, segment in self._segments:
            if section.master_is_parameter and not section.sharded and section.master is not None:
                segment.data = section.master[place]

    def _zero_padding(self, segment: nn.Parameter, tensors: Sequence[torch.Tensor]) -> None:
        pieces = next(pieces for other, pieces in self._origins if other is segment)
        for tensor in tensors:
            place = 0
            for _, _, offset, length in sorted(pieces, key=lambda piece: piece[2]):
                tensor[place:offset].zero_()
                place = offset + length
            tensor[place:].zero_()

    def publish(self, unit: Unit) -> None:
        """See `Update.publish`."""
        for section in unit.trainable:
            if not section.layout.whole:
                section.publish()
