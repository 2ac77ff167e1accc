"""Where the optimizer meets the units: what it is given to step, and how its results come back.

An elementwise optimizer steps segments: flat runs of master weights, one list per parameter group, each of one lane. An
optimizer that needs whole tensors gets whole fp32 masters of the parameters that this rank owns; owners are chosen so
that elements (or what the optimizer names as cost) are balanced, and gradients travel to the owner and updated values
back by all-to-all. One optimizer may have groups of both kinds. The client's optimizer instance is kept: its parameter
groups are edited in place and state that it already has goes with the parameters.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
from torch import nn

from shardwise.comm.communicator import Communicator
from shardwise.compat import allow_gradient_dtype
from shardwise.errors import CheckpointError
from shardwise.memory import Accountant, Category
from shardwise.precision.tensornorms import NORMS, Run, TensorNorms
from shardwise.registry import LogicalTensor, Registry
from shardwise.zero.layout import Lane, Piece
from shardwise.zero.unit import SectionMemory, Unit

StateKind = Callable[[Any, int, str], bool]
"""Whether an entry of an optimizer's state has one value per element: (value, elements of the parameter, name)."""


@dataclass(frozen=True)
class Stepping:
    """What an optimizer has to be given.

    Attributes:
        whole: parameter groups whose tensors are stepped whole; those of the others are stepped in flat segments.
        norms: the optimizer asks for norms of the tensors that segments are parts of.
        cost: of stepping a whole tensor of a shape, by which owners are balanced; None: elements.
        communicates: the optimizer reduces gradients itself (see `shardwise.zero.communicated`).
    """

    whole: frozenset[int] = frozenset()
    norms: bool = False
    cost: Callable[[Sequence[int]], float] | None = None
    communicates: bool = False


class FlatOptimizer(Protocol):
    """An elementwise optimizer that scales gradients and writes low-precision copies in the pass of its update.

    Its class has these two methods beside those of an optimizer of PyTorch.
    """

    def takes_flat(self) -> bool:
        """Whether `step_flat` may be given gradients now (hooks of `step()` may want them in `.grad`)."""

    def step_flat(
        self,
        *,
        factor: float | torch.Tensor,
        gradients: Sequence[tuple[nn.Parameter, torch.Tensor]] | None,
        outputs: Sequence[tuple[nn.Parameter, torch.Tensor]],
        origins: Sequence[tuple[nn.Parameter, Sequence[tuple[int, int, int, int]]]],
    ) -> None:
        """Do `step()`.

        Args:
            factor: what gradients are to be multiplied by.
            gradients: of each parameter; not written. None: they are in `.grad`.
            outputs: flat tensors in the parameters' memory that get a copy of what has been updated.
            origins: (logical tensor, first element of it, first element of the segment, count), for all pieces of each.
        """


class Update(Protocol):
    """One way of stepping sharded parameters."""

    def capture(self, unit: Unit) -> None:
        """Take what is needed from a unit whose whole values are valid for the last time."""

    def bind(self) -> None:
        """Give the optimizer what it is to step, after all units have been captured."""

    def takes_factor(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether `step` can multiply the gradients now; else they have to be multiplied before."""

    def step(self, optimizer: torch.optim.Optimizer, factor: float | torch.Tensor) -> None:
        """Step with the accumulated gradients times `factor`; write the results into the parameters' memory."""

    def refresh(self, unit: Unit) -> None:
        """Take over parameter values of a gathered unit that somebody has changed."""

    def master_pieces(self, index: int) -> list[tuple[int, int, torch.Tensor]]:
        """Return (start, stop, 1-D master view) for the runs of a parameter that are stored on this rank."""

    def state_pieces(self, index: int, key: str) -> list[tuple[int, int, torch.Tensor]]:
        """Return (start, stop, 1-D view) for the runs of an elementwise optimizer state stored on this rank."""

    def state(self, index: int) -> Mapping[str, Any]:
        """Return all that the optimizer keeps on this rank for (the segment of) a parameter; empty if nothing."""

    def clear_state(self) -> None:
        """Forget all optimizer state."""

    def make_state(self, index: int, elementwise: Mapping[str, torch.dtype], whole: Mapping[str, Any]) -> None:
        """Give a parameter state: zeros for elementwise entries, to be filled through `state_pieces`, and whole values.

        Raises:
            CheckpointError: parameters that are stepped together would have different whole values.
        """

    def publish(self, unit: Unit) -> None:
        """Write masters that somebody has changed into the parameters' memory (all ranks call)."""


def assign_groups(optimizer: torch.optim.Optimizer, members: Sequence[Sequence[nn.Parameter]]) -> None:
    """Replace the parameters of an optimizer's groups in place."""
    for group, parameters in zip(optimizer.param_groups, members, strict=True):
        group["params"] = list(parameters)


def _hold_state(optimizer: torch.optim.Optimizer, accountant: Accountant) -> None:
    """Tell the accountant about an optimizer's state; known tensors are passed over, some optimizers make new ones."""
    for state in optimizer.state.values():
        _hold(state, accountant)


def _hold(state: Mapping[str, Any], accountant: Accountant) -> None:
    for value in state.values():
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            accountant.hold(Category.OPTIMIZER, value)


def _bind(optimizer: torch.optim.Optimizer, parts: Sequence[SegmentUpdate | WholeUpdate]) -> None:
    """Put what all parts step into the optimizer's groups, with the state that their parameters had."""
    members: list[list[nn.Parameter]] = [[] for _ in optimizer.param_groups]
    old_state = _take_state(optimizer)
    for part in parts:
        part.place(members, old_state)
    assign_groups(optimizer, members)


class SegmentUpdate:
    """Elementwise optimizers: steps segments of master weights.

    Args:
        optimizer: the client's or the configured optimizer; its groups are edited in place.
        units: all units.
        registry: the logical tensors.
        comm: the data-parallel group.
        accountant: is told about optimizer state.
        is_elementwise: whether a state entry (value, elements of its parameter, name) has one value per element.
        norms: the optimizer asks for norms of whole tensors.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        units: Sequence[Unit],
        registry: Registry,
        comm: Communicator,
        accountant: Accountant,
        is_elementwise: StateKind,
        *,
        norms: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self.units = units
        self.registry = registry
        self.comm = comm
        self._norms = norms
        self._accountant = accountant
        self._is_elementwise = is_elementwise
        self._segments: list[tuple[SectionMemory, slice, nn.Parameter]] = []
        self._origins: list[tuple[nn.Parameter, list[tuple[int, int, int, int]]]] = []
        self._runs: dict[int, list[tuple[SectionMemory, Piece, nn.Parameter]]] = {}

    def capture(self, unit: Unit) -> None:
        """Nothing: segments are views of the units' own masters."""

    def bind(self) -> None:
        """Put the segments into the optimizer's groups."""
        _bind(self.optimizer, [self])

    def place(self, members: list[list[nn.Parameter]], old_state: dict[int, dict[str, Any]]) -> None:
        """Add the segments to the members of each group, and give them what state their parameters had."""
        for unit in self.units:
            for section, lane in unit.segments():
                if section.layout.whole:
                    continue
                assert section.master is not None and lane.group is not None
                for start, stop, pieces in self._cut(section, lane, old_state):
                    segment = nn.Parameter(section.master[start:stop], requires_grad=True)
                    members[lane.group].append(segment)
                    self._segments.append((section, slice(start, stop), segment))
                    self._origins.append((segment, [(p.index, p.start, p.offset, p.stop - p.start) for p in pieces]))
                    for piece in pieces:
                        self._runs.setdefault(piece.index, []).append((section, piece, segment))
                    self._adopt_state(segment, pieces or self._example(lane.group, old_state), old_state)
        if self._norms:
            setattr(self.optimizer, NORMS, self._tensor_norms())

    def _tensor_norms(self) -> TensorNorms:
        """Say which tensors the segments are made of, and how their norms are formed on all ranks."""
        stepped = [
            (section, slot.index)
            for unit in self.units
            for section in unit.trainable
            if not section.layout.whole
            for slot in section.layout.slots
        ]
        numbers = {index: number for number, index in enumerate(sorted(index for _, index in stepped))}
        groups: list[list[int]] = [[] for _ in self.optimizer.param_groups]
        for index, number in numbers.items():
            group = self.registry[index].group
            assert group is not None
            groups[group].append(number)
        runs: dict[torch.Tensor, list[Run]] = {segment: [] for _, _, segment in self._segments}
        counted: list[tuple[torch.Tensor, Run]] = []
        for section, place, segment in self._segments:
            start = section.master_start + place.start
            first, last = section.layout.range_of(section.rank)
            for piece in section.layout.pieces(start, section.master_start + place.stop):
                offset = piece.offset + piece.stop - piece.start
                run = Run(numbers[piece.index], piece.offset, offset)
                runs[segment].append(run)
                # Where every rank steps everything, each counts what would be its own: the same sums at every stage.
                low, high = max(run.start, first - start), min(run.stop, last - start)
                if low < high:
                    counted.append((segment, Run(run.tensor, low, high)))
        return TensorNorms(
            groups,
            runs,
            counted,
            wide=[numbers[index] for section, index in stepped if section.master_dtype is torch.float64],
            device=self.comm.device,
            add=lambda sums: self.comm.all_reduce(sums, "tensor_norms").wait(),
            overwrites=True,
        )

    def _cut(
        self, section: SectionMemory, lane: Lane, old_state: dict[int, dict[str, Any]]
    ) -> Iterator[tuple[int, int, list[Piece]]]:
        """Yield the segments of a lane: start and stop in the master, and pieces counted from the start.

        A segment has one step count. Where parameters of an instance with state have different ones, the lane is cut.
        """
        first = section.master_start + lane.start
        start, counts, pieces = 0, None, []  # type: tuple[int, Any, list[Piece]]
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

    def _example(self, group: int, old_state: dict[int, dict[str, Any]]) -> list[Piece]:
        """Return an empty piece of a parameter with state: padding alone needs state too (Adagrad makes it early)."""
        for tensor, parameter in zip(self.registry, self.registry.parameters, strict=True):
            if tensor.group == group and id(parameter) in old_state:
                return [Piece(tensor.index, 0, 0, 0)]
        return []

    def _adopt_state(
        self, segment: nn.Parameter, pieces: Sequence[Piece], old_state: dict[int, dict[str, Any]]
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
                    target[key] = torch.zeros_like(segment.detach(), dtype=_state_dtype(value, tensor, segment))
                run = value.reshape(-1)[piece.start : piece.stop]
                target[key][piece.offset : piece.offset + run.numel()] = run
        if target:
            self.optimizer.state[segment] = target

    def takes_factor(self, optimizer: torch.optim.Optimizer) -> bool:
        """See `Update.takes_factor`."""
        flat = _flat_optimizer(optimizer)
        return flat is not None and flat.takes_flat()

    def step(self, optimizer: torch.optim.Optimizer, factor: float | torch.Tensor) -> None:
        """Step all segments and write the results into the parameters' memory."""
        flat = _flat_optimizer(optimizer)
        gradients = [(segment, section.whole_gradient[place]) for section, place, segment in self._segments]
        handed = flat is not None and flat.takes_flat()
        if not handed:
            for segment, gradient in gradients:
                if flat is not None:
                    allow_gradient_dtype(segment, gradient.dtype)
                fits = gradient.dtype is segment.dtype or getattr(segment, "grad_dtype", None) is gradient.dtype
                segment.grad = gradient if fits else _as_gradient(gradient, segment, self._accountant)
        try:
            if flat is not None:
                outputs = [
                    (segment, section.published[place])
                    for section, place, segment in self._segments
                    if not section.master_is_parameter
                ]
                flat.step_flat(
                    factor=factor, gradients=gradients if handed else None, outputs=outputs, origins=self._origins
                )
            else:
                optimizer.step()
        finally:
            for segment, _ in gradients:
                segment.grad = None
        if flat is None:
            for unit in self.units:
                self.publish(unit)
        _hold_state(self.optimizer, self._accountant)

    def refresh(self, unit: Unit) -> None:
        """Take over changed parameter values; unchanged elements keep the master's extra digits."""
        for section in unit.trainable:
            if section.master is not None and not section.master_is_parameter and not section.layout.whole:
                _take_changes(section.master, section.wire_view[section.master_start : section.master_stop])

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

    def make_state(self, index: int, elementwise: Mapping[str, torch.dtype], whole: Mapping[str, Any]) -> None:
        """See `Update.make_state`."""
        for _, _, segment in self._runs.get(index, ()):
            tensor = self.registry[index]
            state = self.optimizer.state[segment]
            _add_state(self.optimizer, tensor, segment, state, elementwise, whole)
            _hold(state, self._accountant)

    def publish(self, unit: Unit) -> None:
        """See `Update.publish`."""
        for section in unit.trainable:
            if not section.layout.whole:
                section.publish()


def owners(costs: Sequence[float], world: int) -> list[int]:
    """Return the rank that each of some things is given to: the dearest first, always to the rank that has least.

    No rank gets more than the mean and the dearest one (Graham, "Bounds on multiprocessing timing anomalies", 1969).

    Example:
        >>> owners([1, 5, 2, 2], 2)
        [1, 0, 1, 1]
    """
    load = [0.0] * world
    found = [0] * len(costs)
    for place in sorted(range(len(costs)), key=lambda place: (-costs[place], place)):
        found[place] = min(range(world), key=lambda rank: (load[rank], rank))
        load[found[place]] += costs[place]
    return found


class WholeUpdate:
    """Optimizers that need whole tensors: each tensor is owned and stepped by one rank.

    Args:
        optimizer: its groups are edited in place to hold the masters of the tensors this rank owns.
        units: all units.
        registry: the logical tensors.
        comm: the data-parallel group.
        accountant: is told about masters and state.
        is_elementwise: whether a state entry (value, elements of its parameter, name) has one value per element.
        stepping: which groups are stepped whole, and what that costs.
        replicated: every rank steps everything (the optimizer is not sharded).
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        units: Sequence[Unit],
        registry: Registry,
        comm: Communicator,
        accountant: Accountant,
        is_elementwise: StateKind,
        stepping: Stepping,
        *,
        replicated: bool,
    ) -> None:
        self.optimizer = optimizer
        self.units = units
        self.registry = registry
        self.comm = comm
        self.replicated = replicated or comm.world == 1
        self._accountant = accountant
        self._is_elementwise = is_elementwise
        stepped = [tensor for tensor in registry if tensor.trainable and tensor.group in stepping.whole]
        cost = stepping.cost
        costs = [float(tensor.numel) if cost is None else cost(tensor.shape) for tensor in stepped]
        ranks = [comm.rank] * len(stepped) if self.replicated else owners(costs, comm.world)
        self.owner = {tensor.index: rank for tensor, rank in zip(stepped, ranks, strict=True)}
        self.masters: dict[int, nn.Parameter] = {}

    def capture(self, unit: Unit) -> None:
        """Copy the masters of the tensors this rank owns (views, where nothing is sharded and the dtype is right)."""
        for section in _whole(unit):
            for slot in section.layout.slots:
                if self.owner[slot.index] != self.comm.rank:
                    continue
                shape = self.registry[slot.index].shape
                if self.replicated:
                    assert section.master is not None
                    values = section.master[slot.offset : slot.offset + slot.numel]
                else:
                    values = section.source[slot.offset : slot.offset + slot.numel].to(section.master_dtype, copy=True)
                    self._accountant.hold(Category.MASTER, values)
                self.masters[slot.index] = nn.Parameter(values.detach().view(shape))

    def bind(self) -> None:
        """Put the owned masters into the optimizer's groups."""
        _bind(self.optimizer, [self])

    def place(self, members: list[list[nn.Parameter]], old_state: dict[int, dict[str, Any]]) -> None:
        """Add the owned masters to the members of each group, and give them what state their parameters had."""
        for index in sorted(self.masters):
            group = self.registry[index].group
            assert group is not None
            members[group].append(self.masters[index])
            state = old_state.get(id(self.registry.parameters[index]))
            if state:
                master, tensor = self.masters[index], self.registry[index]
                self.optimizer.state[master] = {
                    key: value.to(master.device, _state_dtype(value, tensor, master))
                    if self._is_elementwise(value, tensor.numel, key)
                    else value
                    for key, value in state.items()
                }

    def takes_factor(self, optimizer: torch.optim.Optimizer) -> bool:
        """See `Update.takes_factor`: gradients are sent to their owners as they are."""
        return False

    def step(self, optimizer: torch.optim.Optimizer, factor: float | torch.Tensor) -> None:
        """Bring gradients (multiplied before) to their owners, step, and bring the results back."""
        with self.around():
            optimizer.step()
        _hold_state(self.optimizer, self._accountant)

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Bring gradients to their owners, let the optimizer step in the block, and bring the results back."""
        for unit in self.units:
            self._collect(unit)
        try:
            yield
        finally:
            for master in self.masters.values():
                master.grad = None
        for unit in self.units:
            self._distribute(unit)

    def refresh(self, unit: Unit) -> None:
        """Take over changed parameter values; unchanged elements keep the master's extra digits."""
        for section in _whole(unit):
            for slot in section.layout.slots:
                master = self.masters.get(slot.index)
                if master is not None and not (self.replicated and section.master_is_parameter):
                    _take_changes(_flat(master.detach()), section.wire_view[slot.offset : slot.offset + slot.numel])

    def _collect(self, unit: Unit) -> None:
        for section in _whole(unit):
            if self.replicated:
                for slot in section.layout.slots:
                    master = self.masters[slot.index]
                    gradient = section.whole_gradient[slot.offset : slot.offset + slot.numel].view(master.shape)
                    master.grad = _as_gradient(gradient, master, self._accountant)
                continue
            whole = {
                slot.index: torch.zeros(slot.numel, dtype=section.accumulate_dtype, device=section.device)
                for slot in section.layout.slots
                if slot.index in self.masters
            }
            for gradient in whole.values():
                self._accountant.hold(Category.GRADIENTS, gradient)
            sends, receives = self._routes(section, whole.__getitem__, section.own_gradient)
            self._exchange(receives, sends, section.accumulate_dtype, section.device, f"{unit.name}.gradients")
            for index, gradient in whole.items():
                master = self.masters[index]
                master.grad = _as_gradient(gradient.view(master.shape), master, self._accountant)

    def _distribute(self, unit: Unit) -> None:
        for section in _whole(unit):
            if self.replicated:
                section.publish()
                continue
            values = {
                slot.index: _flat(self.masters[slot.index].detach()).to(section.layout.dtype)
                for slot in section.layout.slots
                if slot.index in self.masters
            }
            for value in values.values():
                self._accountant.hold(Category.BUFFERS, value)
            receives, sends = self._routes(section, values.__getitem__, section.shard)
            self._exchange(receives, sends, section.layout.dtype, section.device, f"{unit.name}.updates")

    def _exchange(
        self,
        receives: list[list[torch.Tensor]],
        sends: list[list[torch.Tensor]],
        dtype: torch.dtype,
        device: torch.device,
        label: str,
    ) -> None:
        """All-to-all of lists of runs; runs of one peer travel as one message."""
        into, sizes_in = [run for runs in receives for run in runs], [sum(map(torch.numel, runs)) for runs in receives]
        given, sizes_out = [run for runs in sends for run in runs], [sum(map(torch.numel, runs)) for runs in sends]
        sent = torch.cat(given) if given else torch.empty(0, dtype=dtype, device=device)
        received = torch.empty(sum(sizes_in), dtype=dtype, device=device)
        for message in (sent, received):
            self._accountant.hold(Category.BUFFERS, message)
        self.comm.all_to_all(received, sent, sizes_in, sizes_out, label).wait()
        for run, part in zip(into, received.split([run.numel() for run in into]), strict=True):
            run.copy_(part)

    def _routes(
        self, section: SectionMemory, whole: Callable[[int], torch.Tensor], own: torch.Tensor
    ) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]]:
        """Return, per peer, the views of this rank's range owned by the peer,
        and of owned tensors in the peer's range.
        """
        world = self.comm.world
        mine: list[list[torch.Tensor]] = [[] for _ in range(world)]
        theirs: list[list[torch.Tensor]] = [[] for _ in range(world)]
        for rank in range(world):
            for piece in section.layout.pieces(*section.layout.range_of(rank)):
                owner = self.owner[piece.index]
                if rank == self.comm.rank:
                    mine[owner].append(own[piece.offset : piece.offset + piece.stop - piece.start])
                if owner == self.comm.rank:
                    theirs[rank].append(whole(piece.index)[piece.start : piece.stop])
        return mine, theirs

    def master_pieces(self, index: int) -> list[tuple[int, int, torch.Tensor]]:
        """See `Update.master_pieces`."""
        master = self.masters.get(index)
        return [] if master is None else [(0, master.numel(), _flat(master.detach()))]

    def state_pieces(self, index: int, key: str) -> list[tuple[int, int, torch.Tensor]]:
        """See `Update.state_pieces`."""
        master = self.masters.get(index)
        value = None if master is None else self.optimizer.state.get(master, {}).get(key)
        if master is None or not isinstance(value, torch.Tensor) or value.shape != master.shape:
            return []
        return [(0, master.numel(), _flat(value))]

    def state(self, index: int) -> Mapping[str, Any]:
        """See `Update.state`."""
        master = self.masters.get(index)
        return {} if master is None else self.optimizer.state.get(master, {})

    def clear_state(self) -> None:
        """See `Update.clear_state`."""
        self.optimizer.state.clear()

    def make_state(self, index: int, elementwise: Mapping[str, torch.dtype], whole: Mapping[str, Any]) -> None:
        """See `Update.make_state`."""
        master = self.masters.get(index)
        if master is not None:
            tensor, state = self.registry[index], self.optimizer.state[master]
            _add_state(self.optimizer, tensor, master, state, elementwise, whole)
            _hold(state, self._accountant)

    def publish(self, unit: Unit) -> None:
        """See `Update.publish`."""
        self._distribute(unit)


class MixedUpdate:
    """Optimizers with groups of both kinds: each part serves its own sections, and the optimizer steps once.

    Args:
        segments: serves the sections whose parameters are cut.
        whole: serves the others.
    """

    def __init__(self, segments: SegmentUpdate, whole: WholeUpdate) -> None:
        self.segments = segments
        self.whole = whole

    def _of(self, index: int) -> SegmentUpdate | WholeUpdate:
        return self.whole if index in self.whole.owner else self.segments

    def capture(self, unit: Unit) -> None:
        """See `Update.capture`."""
        self.whole.capture(unit)

    def bind(self) -> None:
        """See `Update.bind`."""
        _bind(self.segments.optimizer, [self.segments, self.whole])

    def takes_factor(self, optimizer: torch.optim.Optimizer) -> bool:
        """See `Update.takes_factor`: gradients are sent to their owners as they are."""
        return False

    def step(self, optimizer: torch.optim.Optimizer, factor: float | torch.Tensor) -> None:
        """See `Update.step`."""
        with self.whole.around():
            self.segments.step(optimizer, factor)

    def refresh(self, unit: Unit) -> None:
        """See `Update.refresh`."""
        self.segments.refresh(unit)
        self.whole.refresh(unit)

    def master_pieces(self, index: int) -> list[tuple[int, int, torch.Tensor]]:
        """See `Update.master_pieces`."""
        return self._of(index).master_pieces(index)

    def state_pieces(self, index: int, key: str) -> list[tuple[int, int, torch.Tensor]]:
        """See `Update.state_pieces`."""
        return self._of(index).state_pieces(index, key)

    def state(self, index: int) -> Mapping[str, Any]:
        """See `Update.state`."""
        return self._of(index).state(index)

    def clear_state(self) -> None:
        """See `Update.clear_state`."""
        self.segments.clear_state()

    def make_state(self, index: int, elementwise: Mapping[str, torch.dtype], whole: Mapping[str, Any]) -> None:
        """See `Update.make_state`."""
        self._of(index).make_state(index, elementwise, whole)

    def publish(self, unit: Unit) -> None:
        """See `Update.publish`."""
        self.segments.publish(unit)
        self.whole.publish(unit)


def _whole(unit: Unit) -> list[SectionMemory]:
    return [section for section in unit.trainable if section.layout.whole]


def _flat_optimizer(optimizer: torch.optim.Optimizer) -> FlatOptimizer | None:
    """Return the optimizer as one that steps flat ranges in one pass, if its class is."""
    methods = ("takes_flat", "step_flat")
    return cast(FlatOptimizer, optimizer) if all(callable(getattr(optimizer, m, None)) for m in methods) else None


def _as_gradient(values: torch.Tensor, master: torch.Tensor, accountant: Accountant) -> torch.Tensor:
    """Return accumulated values in the dtype of what they update (the same ones, unless it was chosen narrower)."""
    if values.dtype == master.dtype:
        return values
    wide = values.to(master.dtype)
    accountant.hold(Category.GRADIENTS, wide)
    return wide


def _state_dtype(value: torch.Tensor, tensor: LogicalTensor, master: torch.Tensor) -> torch.dtype:
    """Return the dtype of adopted state: state in the parameter's own dtype goes on in the master's."""
    return master.dtype if value.dtype is tensor.source_dtype else value.dtype


def _take_state(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    """Remove and return the state an optimizer already has, by `id(parameter)`."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {id(p): optimizer.state.pop(p) for p in parameters if p in optimizer.state}


def _add_state(
    optimizer: torch.optim.Optimizer,
    tensor: LogicalTensor,
    stepped: nn.Parameter,
    state: dict[str, Any],
    elementwise: Mapping[str, torch.dtype],
    whole: Mapping[str, Any],
) -> None:
    """Add entries to the state of a segment or master that `tensor` is part of."""
    settings = optimizer.param_groups[tensor.group or 0]
    on_device = settings.get("capturable") or settings.get("fused")
    for key, dtype in elementwise.items():
        if key not in state:
            state[key] = torch.zeros_like(stepped.detach(), dtype=dtype)
    for key, value in whole.items():
        if isinstance(value, torch.Tensor):
            # As in torch: a step count that the host counts stays there.
            value = value.to("cpu" if key == "step" and not on_device else stepped.device, copy=True)
        if key not in state:
            state[key] = value
        elif not _equal(state[key], value):
            raise CheckpointError(
                f"optimizer state {key!r} of {tensor.name!r} is {value!r}; that of parameters which are stepped "
                f"together with it is {state[key]!r}. Put them into different parameter groups, or start with fresh "
                "optimizer state"
            )


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return torch.equal(first, second)
    return type(first) is type(second) and bool(first == second)


def _take_changes(master: torch.Tensor, values: torch.Tensor) -> None:
    changed = master.to(values.dtype) != values
    master.copy_(torch.where(changed, values.to(master.dtype), master))


def _flat(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.view(-1)
