"""Updates of elementwise optimizers, which step segments of master weights.

A segment is one lane of the master weights of a flat parameter, or of this rank's range of them. Each optimizer group
has a list of segments.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from shardwise.comm.communicator import Communicator
from shardwise.compat import allow_gradient_dtype, global_step_hooks, only_counts_steps
from shardwise.device.ranges import named
from shardwise.memory import Accountant, Category
from shardwise.memory.places import Acquisition, StateHome, acquiring, in_turn, tier_in_use
from shardwise.precision.tensornorms import NORMS, TensorNorms, TensorRun
from shardwise.registry import Registry
from shardwise.zero.units.flat_param import FlatParamStorage
from shardwise.zero.units.global_ids import GlobalTensorIds
from shardwise.zero.units.layout import GroupRange, ShardSlice
from shardwise.zero.units.unit import Unit
from shardwise.zero.updates.parameter_writeback import Outputs
from shardwise.zero.updates.update import (
    StateKind,
    UpdatePart,
    add_state,
    as_gradient,
    assign_groups,
    has_known_step,
    hold,
    keeping_memory,
    state_dtype,
    state_of_part,
    take_changes,
    tensors_of,
)

Segment = tuple[FlatParamStorage, slice, nn.Parameter]
"""Flat parameter, range of its master weights, and the optimizer's parameter for that range."""

ORIGINS = "shardwise_origins"
"""Attribute of optimizers that need the origin of each parameter's elements, by `id`: (tensor, first element of the
tensor, first element of the parameter, count). They take gradients of any dtype, and step parameters independently.
"""


@dataclass
class Part:
    """Segments of some flat parameters."""

    sections: list[FlatParamStorage]
    segments: list[Segment]


class SegmentUpdate(UpdatePart):
    """Steps segments of master weights with an elementwise optimizer.

    `job` has all ranks. `norms`: the optimizer needs norms of unsharded tensors. `at_once`: units are not split.
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
        at_once: bool = False,
    ) -> None:
        super().__init__(optimizer, accountant)
        self.units = units
        self.registry = registry
        self.comm = job
        self.numbering = numbering
        self._norms = norms
        self._at_once = at_once
        self._outputs = Outputs(job.device, accountant)
        self._is_elementwise = is_elementwise
        self.segments: list[Segment] = []
        self._origins: dict[int, list[tuple[int, int, int, int]]] = {}
        self.runs: dict[int, list[tuple[FlatParamStorage, ShardSlice, nn.Parameter]]] = {}
        self._everything = Part([], self.segments)
        self._parts: list[tuple[Part, list[Acquisition]]] = []  # `_everything` by unit, with its tiered tensors

    def place(self, members: list[list[nn.Parameter]], old_state: dict[int, dict[str, Any]]) -> None:
        """Add the segments to the members of each group, with the old state of their parameters."""
        of_parts = dict(old_state)
        for tensor, parameter in zip(self.registry, self.registry.parameters, strict=True):
            if tensor.box is not None and id(parameter) in old_state:
                of_parts[id(parameter)] = state_of_part(old_state[id(parameter)], tensor, self._is_elementwise)
        self._place(members, self._counts_of(of_parts), of_parts)

    @override
    def place_anew(self, members: list[list[nn.Parameter]], shared: Mapping[int, Any]) -> None:
        for known in (self.segments, self._origins, self.runs, self._parts, self._everything.sections):
            known.clear()
        self._place(members, shared, {})

    @override
    def fits(self, shared: Mapping[int, Any]) -> bool:
        first: dict[int, Any] = {}
        return all(
            first.setdefault(id(segment), shared.get(index)) == shared.get(index)
            for index, runs in self.runs.items()
            for _, _, segment in runs
        )

    def _place(
        self, members: list[list[nn.Parameter]], counts: Mapping[int, Any], of_parts: dict[int, dict[str, Any]]
    ) -> None:
        for unit in self.units:
            first = len(self.segments)
            with acquiring(unit.acquisitions()):
                for section, lane in unit.segments():
                    if not section.layout.whole:
                        self._place_lane(section, lane, members, of_parts, counts)
                sections = [section for section in unit.trainable if not section.layout.whole]
                part = Part(sections, self.segments[first:])
                self._everything.sections += sections
                self._parts.append((part, [tiered for section in sections for tiered in section.stepping]))
                self._keep_state(part)
        if self._norms:
            setattr(self.optimizer, NORMS, self._tensor_norms())
        if hasattr(self.optimizer, ORIGINS):
            setattr(self.optimizer, ORIGINS, self._origins)

    def _place_lane(
        self,
        section: FlatParamStorage,
        lane: GroupRange,
        members: list[list[nn.Parameter]],
        old_state: dict[int, dict[str, Any]],
        counts: Mapping[int, Any],
    ) -> None:
        assert section.master is not None and lane.group is not None
        for start, stop, pieces in self._cut(section, lane, counts):
            segment = nn.Parameter(section.master[start:stop], requires_grad=True)
            members[lane.group].append(segment)
            self.segments.append((section, slice(start, stop), segment))
            self._origins[id(segment)] = [(p.index, p.start, p.offset, p.stop - p.start) for p in pieces]
            for piece in pieces:
                self.runs.setdefault(piece.index, []).append((section, piece, segment))
            self._adopt_state(segment, pieces or self._example(lane.group, old_state), old_state)

    def _tensor_norms(self) -> TensorNorms:
        stepped = [
            (section, slot.index)
            for unit in self.units
            for section in unit.trainable
            if not section.layout.whole
            for slot in section.layout.slots
        ]
        numbers, counts = self.numbering.places, self.numbering.counts
        groups: list[list[int]] = [[] for _ in self.optimizer.param_groups]
        for index in sorted(index for _, index in stepped):
            group = self.registry[index].group
            assert group is not None
            groups[group].append(numbers[index])
        runs: dict[torch.Tensor, list[TensorRun]] = {segment: [] for _, _, segment in self.segments}
        counted: list[tuple[torch.Tensor, TensorRun]] = []
        for section, place, segment in self.segments:
            start = section.master_start + place.start
            first, last = section.own_range
            for piece in section.layout.pieces(start, section.master_start + place.stop):
                offset = piece.offset + piece.stop - piece.start
                run = TensorRun(numbers[piece.index], piece.offset, offset)
                runs[segment].append(run)
                # If every rank steps everything, each counts its own range: the sums are the same at every stage.
                low, high = max(run.start, first - start), min(run.stop, last - start)
                if low < high and counts[piece.index]:
                    counted.append((segment, TensorRun(run.tensor, low, high)))
        return TensorNorms(
            groups,
            runs,
            counted,
            count=len(self.numbering.names),
            wide=[numbers[index] for section, index in stepped if section.master_dtype is torch.float64],
            device=self.segments[0][2].device if self.segments else self.comm.device,
            add=self._add_norms,
            overwrites=True,
        )

    def _add_norms(self, sums: torch.Tensor) -> None:
        moved = sums.to(self.comm.device)
        self.comm.all_reduce(moved, "tensor_norms").wait()
        if moved is not sums:
            sums.copy_(moved)

    def _counts_of(self, old_state: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """Return state that parameters have as a whole, such as step counts, by index; the host waits once."""
        found: dict[int, dict[str, Any]] = {}
        tensors: dict[tuple[torch.device, torch.dtype], list[tuple[dict[str, Any], str, torch.Tensor]]] = {}
        sections = [section for unit in self.units for section in unit.trainable if not section.layout.whole]
        for index in sorted({slot.index for section in sections for slot in section.layout.slots}):
            own = found[index] = dict[str, Any]()
            for key, value in old_state.get(id(self.registry.parameters[index]), {}).items():
                if self._is_elementwise(value, self.registry[index].numel, key):
                    continue
                own[key] = value
                if isinstance(value, torch.Tensor):
                    tensors.setdefault((value.device, value.dtype), []).append((own, key, value))
        for alike in tensors.values():
            numbers = iter(torch.cat([value.reshape(-1) for *_, value in alike]).tolist())
            for own, key, value in alike:
                own[key] = tuple(value.shape), list(itertools.islice(numbers, value.numel()))
        return found

    def _cut(
        self, section: FlatParamStorage, lane: GroupRange, known: Mapping[int, Any]
    ) -> Iterator[tuple[int, int, list[ShardSlice]]]:
        """Yield the segments of a lane: start and stop in the master weights, and ranges counted from the start.

        Because a segment has one step count, the lane is split between parameters with different counts.
        """
        first = section.master_start + lane.start
        start, counts, pieces = 0, None, []  # type: tuple[int, Any, list[ShardSlice]]
        for piece in section.layout.pieces(first, section.master_start + lane.stop):
            if pieces and known.get(piece.index) != counts:
                yield lane.start + start, lane.start + piece.offset, pieces
                start, pieces = piece.offset, []
            counts = known.get(piece.index)
            pieces.append(replace(piece, offset=piece.offset - start))
        yield lane.start + start, lane.stop, pieces

    def _example(self, group: int, old_state: dict[int, dict[str, Any]]) -> list[ShardSlice]:
        """Return an empty range of a parameter with state, because padding needs state (Adagrad makes it early)."""
        for tensor, parameter in zip(self.registry, self.registry.parameters, strict=True):
            if tensor.group == group and id(parameter) in old_state:
                return [ShardSlice(tensor.index, 0, 0, 0)]
        return []

    def _adopt_state(
        self, segment: nn.Parameter, pieces: Sequence[ShardSlice], old_state: dict[int, dict[str, Any]]
    ) -> None:
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

    def step(self, factor: float | torch.Tensor) -> None:
        """Step all segments and write the parameters; unit by unit, if a step takes memory and can be split."""
        if not (self._in_turn and self._splits()):
            super().step(factor)
            return
        self._outputs.make_room([part.sections for part, _ in self._parts])

        def step(number: int) -> None:
            with named("step", self.units[number].name):
                self._step_alone(factor, self._parts[number][0])

        in_turn([(number, wanted) for number, (_, wanted) in enumerate(self._parts)], step)
        self.hold_state()

    @contextlib.contextmanager
    def around(self, factor: float | torch.Tensor) -> Iterator[None]:
        """Let the optimizer step all segments in the block, and move new state to its tier."""
        if self._stages:
            self._outputs.make_room([self._everything.sections])
        with acquiring(self.away) if self.away else contextlib.nullcontext():
            with self._stepping(self._everything, factor):
                yield
            for part, _ in self._parts if self.away else ():
                self._keep_state(part)
        self.hold_state()

    @cached_property
    def away(self) -> list[Acquisition]:
        """Tiered tensors that a step of all segments acquires."""
        return [acquisition for _, wanted in self._parts for acquisition in wanted]

    @cached_property
    def _in_turn(self) -> bool:
        """Whether a step takes memory for the segments: copies from tiers, host buffers, or wide gradients."""
        sections = self._everything.sections
        narrow = any(section.accumulate_dtype.itemsize < 4 for section in sections)
        return narrow or bool(self.away) or self._stages

    @cached_property
    def _stages(self) -> bool:
        """Whether parameters are copied from the host after a step."""
        return any(map(self._outputs.stages, self._everything.sections))

    def _splits(self) -> bool:
        """Return True if the optimizer gives the same result in several calls, each for some segments.

        Elementwise optimizers of torch and of this library keep all state by parameter. Other classes, hooks and
        wrappers of `step` may count calls.
        """
        optimizer = self.optimizer
        if self._at_once:
            return False
        hooks = (*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values())
        own = all(str(getattr(h, "__module__", "")).startswith("shardwise.") for h in (*hooks, *global_step_hooks()))
        wrapper = vars(optimizer).get("step")
        plain = wrapper is None or only_counts_steps(wrapper)
        return has_known_step(optimizer) and own and plain

    def _step_alone(self, factor: float | torch.Tensor, part: Part) -> None:
        chosen = {id(segment) for _, _, segment in part.segments}
        members = [group["params"] for group in self.optimizer.param_groups]
        try:
            assign_groups(self.optimizer, [[p for p in group if id(p) in chosen] for group in members])
            with self._stepping(part, factor):
                self.optimizer.step()
            self._keep_state(part)
        finally:
            assign_groups(self.optimizer, members)

    @contextlib.contextmanager
    def _stepping(self, part: Part, factor: float | torch.Tensor) -> Iterator[None]:
        written = self._outputs.of(part.sections)
        with contextlib.ExitStack() as acquired:
            try:
                shown = {
                    id(section): self.scaled(section, acquired.enter_context(section.acquiring_gradient()), factor)
                    for section in part.sections
                }
                self._show_gradients(part.segments, shown)
                with keeping_memory(self.optimizer, (segment for _, _, segment in part.segments)):
                    yield
            finally:
                for _, _, segment in part.segments:
                    segment.grad = None
        for section in part.sections:
            if id(section) in written and section.master is not None:
                written[id(section)].copy_(section.master)
        self._outputs.send()

    def hold_state(self) -> None:
        """Count the optimizer's state. Counted entries are skipped; some optimizers add entries later."""
        for section, _, segment in self.segments:
            state = self.optimizer.state.get(segment)
            if state:
                hold(state, self._accountant, tier_in_use(section.tiered_state.home))

    def _keep_state(self, part: Part) -> None:
        for section in part.sections:
            if section.tiered_state.away:
                states = [(s, self.optimizer.state.get(s, {})) for other, _, s in part.segments if other is section]
                section.tiered_state.keep_only(
                    Category.OPTIMIZER,
                    [
                        value
                        for segment, state in states
                        for key, value in state.items()
                        if self._is_elementwise(value, segment.numel(), key)
                    ],
                )

    def _show_gradients(self, segments: Sequence[Segment], shown: Mapping[int, torch.Tensor]) -> None:
        any_dtype = hasattr(self.optimizer, ORIGINS)
        for section, place, segment in segments:
            gradient = shown[id(section)][place]
            if any_dtype:
                allow_gradient_dtype(segment, gradient.dtype)
            fits = gradient.dtype is segment.dtype or getattr(segment, "grad_dtype", None) is gradient.dtype
            segment.grad = gradient if fits else as_gradient(gradient, segment, self._accountant)

    @override
    def refresh(self, unit: Unit, loaded: Collection[int] = ()) -> None:
        for section in unit.trainable:
            if section.master is not None and not section.master_is_parameter and not section.layout.whole:
                values = section.full[section.master_start : section.master_stop]
                pieces = section.layout.pieces(section.master_start, section.master_stop) if loaded else ()
                for piece in pieces:
                    if piece.index in loaded:
                        own = slice(piece.offset, piece.offset + piece.stop - piece.start)
                        section.master[own].copy_(values[own])
                take_changes(section.master, values)

    @override
    def has(self, index: int) -> bool:
        return index in self.runs

    @override
    def master_ranges(self, index: int) -> list[tuple[int, int]]:
        return [(piece.start, piece.stop) for _, piece, _ in self.runs.get(index, ())]

    @override
    def master_pieces(self, index: int) -> list[tuple[int, int, torch.Tensor]]:
        return [
            (
                piece.start,
                piece.stop,
                segment.detach()[piece.offset : piece.offset + piece.stop - piece.start],
            )
            for _, piece, segment in self.runs.get(index, ())
        ]

    @override
    def state_pieces(self, index: int, key: str) -> list[tuple[int, int, torch.Tensor]]:
        found = []
        for _, piece, segment in self.runs.get(index, ()):
            value = self.optimizer.state.get(segment, {}).get(key)
            if isinstance(value, torch.Tensor) and value.numel() == segment.numel():
                view = value[piece.offset : piece.offset + piece.stop - piece.start]
                found.append((piece.start, piece.stop, view))
        return found

    @override
    def state(self, index: int) -> Mapping[str, Any]:
        runs = self.runs.get(index)
        return self.optimizer.state.get(runs[0][2], {}) if runs else {}

    @override
    def keep_state(self) -> None:
        for part, _ in self._parts:
            self._keep_state(part)

    @override
    def make_state(
        self, index: int, elementwise: Mapping[str, torch.dtype], whole: Mapping[str, Any], *, filled: bool = False
    ) -> None:
        for section, _, segment in self.runs.get(index, ()):
            tensor = self.registry[index]
            state = self.optimizer.state[segment]
            made = [key for key in elementwise if key not in state]
            add_state(self.optimizer, tensor, segment, state, elementwise, whole, filled=filled)
            if filled and made:
                self._zero_padding(segment, [state[key] for key in made])
            for key in elementwise if section.tiered_state.away else ():
                section.tiered_state.keep(Category.OPTIMIZER, state[key])
            hold(state, self._accountant, tier_in_use(section.tiered_state.home))

    @override
    def own_state(self) -> Iterator[tuple[torch.Tensor, StateHome]]:
        for section, _, segment in self.segments:
            for value in tensors_of(self.optimizer.state.get(segment, {})):
                yield value, section.tiered_state.home

    @override
    def take_new_views(self) -> None:
        for section, place, segment in self.segments:
            if section.master_is_parameter and not section.sharded and section.master is not None:
                segment.data = section.master[place]

    def _zero_padding(self, segment: nn.Parameter, tensors: Sequence[torch.Tensor]) -> None:
        pieces = self._origins[id(segment)]
        for tensor in tensors:
            place = 0
            for _, _, offset, length in sorted(pieces, key=lambda piece: piece[2]):
                tensor[place:offset].zero_()
                place = offset + length
            tensor[place:].zero_()

    @override
    def publish(self, unit: Unit) -> None:
        for section in unit.trainable:
            if not section.layout.whole:
                section.publish()
