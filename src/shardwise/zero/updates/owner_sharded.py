"""Owner-sharded updates: each unsharded tensor is stepped on the rank that owns it, as Muon and Adafactor need.

Owners balance elements, or the optimizer's cost of each tensor. Gradients go to the owner, and updated values come
back, by all-to-all. No rank holds all tensors. A tensor of which ranks have different parts is owned by one of all
ranks (`shardwise.zero.updates.tp_split`), at every stage.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from typing_extensions import override

from shardwise.comm.domain import Domains
from shardwise.comm.native import await_release, users_of
from shardwise.errors import UsageError
from shardwise.memory import Accountant, Category
from shardwise.memory.places import ON_DEVICE, Acquisition, StateHome, TieredTensors, acquiring, tier_in_use
from shardwise.precision.dtypes import PrecisionPolicy
from shardwise.registry import LogicalTensor, Registry
from shardwise.zero.units.flat_param import FlatParamStorage
from shardwise.zero.units.global_ids import GlobalTensorIds
from shardwise.zero.units.unit import Unit
from shardwise.zero.updates.tp_split import Finish, SplitTensors
from shardwise.zero.updates.update import (
    StateKind,
    Stepping,
    UpdatePart,
    add_state,
    as_gradient,
    hold,
    is_of_whole,
    keeping_memory,
    state_dtype,
    take_changes,
    tensors_of,
)


class _Route(NamedTuple):
    """Ranges that a rank exchanges of one flat parameter.

    Attributes:
        own: ranges of this rank's range, by the rank that owns their tensors.
        owned: index and range of tensors that this rank owns, by the rank that has the range.
        own_sizes, owned_sizes: elements of each rank's ranges.
    """

    own: list[tuple[int, int]]
    owned: list[tuple[int, int, int]]
    own_sizes: list[int]
    owned_sizes: list[int]


R = TypeVar("R", tuple[int, int], tuple[int, int, int])


def _by_rank(runs: Sequence[tuple[int, R]], world: int) -> tuple[list[R], list[int]]:
    """Return the ranges of (rank, range) by rank, and the number of elements of each rank's."""
    sizes = [0] * world
    for rank, run in runs:
        sizes[rank] += run[-1] - run[-2]
    return [run for _, run in sorted(runs, key=operator.itemgetter(0))], sizes


def owners(costs: Sequence[float], world: int, among: Mapping[int, Sequence[int]] | None = None) -> list[int]:
    """Assign items to ranks greedily: largest first, to the least loaded rank (`among`: of the ranks that may get it).

    No rank gets more than the mean plus the largest item (Graham, 1969).

    Example:
        >>> owners([1, 5, 2, 2], 2)
        [1, 0, 1, 1]
    """
    load = [0.0] * world
    found = [0] * len(costs)
    least = [(0.0, rank) for rank in range(world)]  # a heap, which also has former loads of ranks
    for place in sorted(range(len(costs)), key=lambda place: (-costs[place], place)):
        able = () if among is None else among.get(place, ())
        if able:
            chosen = min(able, key=lambda rank: (load[rank], rank))
        else:
            while least[0][0] != load[least[0][1]]:
                heapq.heappop(least)
            chosen = least[0][1]
        found[place] = chosen
        load[chosen] += costs[place]
        heapq.heappush(least, (load[chosen], chosen))
    return found


class WholeUpdate(UpdatePart):
    """Steps unsharded tensors, each on its owner.

    `parts` has tensors of which ranks have different parts, or None. `replicated`: every rank steps all tensors. `home`
    is the tier of master weights and state that belong to no flat parameter; `tiered` has that state. `owner` is a rank
    of the tensor's domain, or any rank if ranks have parts, by index. `cut` has the indices of these.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        units: Sequence[Unit],
        registry: Registry,
        domains: Domains,
        numbering: GlobalTensorIds,
        parts: SplitTensors | None,
        policy: PrecisionPolicy,
        accountant: Accountant,
        is_elementwise: StateKind,
        stepping: Stepping,
        *,
        replicated: bool,
        home: StateHome = ON_DEVICE,
    ) -> None:
        super().__init__(optimizer, accountant)
        self.units = units
        self.registry = registry
        self.replicated = replicated or domains.main.world == 1
        self.tiered = TieredTensors(home, accountant, "whole tensors")
        self._tier = tier_in_use(home)
        self._is_elementwise = is_elementwise
        self._parts = parts
        self._policy = policy
        self.cut: Collection[int] = () if parts is None else parts.places.keys()
        stepped = [tensor for tensor in registry if tensor.trainable and tensor.group in stepping.whole]
        self.owner: dict[int, int] = {}
        uncut = [tensor for tensor in stepped if tensor.index not in self.cut]
        self._choose_owners(uncut, domains, numbering, stepping.cost or math.prod)
        self.masters: dict[int, nn.Parameter] = {}
        self._arriving: dict[int, torch.Tensor] = {}
        self._routes: dict[FlatParamStorage, _Route] = {}
        self._changed: set[int] = set()  # parts with changes that their owners lack
        self._loaded: set[int] = set()

    def _choose_owners(
        self,
        stepped: Sequence[LogicalTensor],
        domains: Domains,
        numbering: GlobalTensorIds,
        cost: Callable[[Sequence[int]], float],
    ) -> None:
        for domain in dict.fromkeys([None, *(tensor.domain for tensor in stepped)]):
            shared, comm = [tensor for tensor in stepped if tensor.domain == domain], domains.of(domain).ranks
            costs = [float(cost(tensor.shape)) for tensor in shared]
            if self.replicated:
                self.owner.update((tensor.index, comm.rank) for tensor in shared)
                shared, costs = [], []
            among = {}
            cut = [] if domain is not None or self._parts is None else self._parts.known
            for place in cut:
                among[len(costs)] = numbering.holders[place]
                costs.append(float(cost(numbering.shapes[place])))
            chosen = owners(costs, comm.world, among)
            self.owner.update((tensor.index, rank) for tensor, rank in zip(shared, chosen, strict=False))
            if domain is None and self._parts is not None:
                owned = dict(zip(cut, chosen[len(shared) :], strict=True))
                self._parts.own(owned)
                for index, place in self._parts.places.items():
                    self.owner[index] = owned.get(place, numbering.holders[place][0])  # without elements: the first

    def capture(self, unit: Unit) -> None:
        """Copy the master weights of owned tensors (views, if nothing is sharded and the dtype fits)."""
        if self._parts is not None:
            dtype_of = self._policy.master_dtype
            for index, values in self._gather(unit, self._parts, _initial, dtype_of, f"{unit.name}.masters")().items():
                self._own(index, values)
        for section in _uncut(unit):
            for slot in section.layout.slots:
                if self.owner[slot.index] != section.domain.ranks.rank:
                    continue
                shape = self.registry[slot.index].shape
                if self.replicated:
                    assert section.master is not None
                    values = section.master[slot.offset : slot.offset + slot.numel]
                else:
                    values = section.source[slot.offset : slot.offset + slot.numel].to(section.master_dtype, copy=True)
                self.masters[slot.index] = nn.Parameter(values.detach().view(shape))
                if not self.replicated:
                    self.tiered.keep(Category.MASTER, values)

    def _own(self, index: int, values: torch.Tensor) -> None:
        self.masters[index] = nn.Parameter(values.view(self.registry[index].global_shape))
        self.tiered.keep(Category.MASTER, values)

    def _gather(
        self,
        unit: Unit,
        parts: SplitTensors,
        read: Callable[[FlatParamStorage], torch.Tensor],
        dtype_of: Callable[[torch.dtype], torch.dtype],
        label: str,
        category: Category | None = None,
    ) -> Callable[[], dict[int, torch.Tensor]]:
        """Launch the gathering of a unit's parts at their owners.

        The returned function waits, and returns the values of tensors that are complete then, by index.
        """

        def into(index: int) -> torch.Tensor:
            found = self._arriving.get(index)
            if found is None:
                tensor = self.registry[index]
                dtype, numel = dtype_of(tensor.dtype), math.prod(tensor.global_shape)
                found = self._arriving[index] = torch.empty(numel, dtype=dtype, device=parts.job.device)
                if category is not None:
                    self._accountant.hold(category, found)
            return found

        pending = parts.gather(unit, read, into, dtype_of, label)

        def complete() -> dict[int, torch.Tensor]:
            while pending:
                pending.pop(0)()  # nothing else refers to its messages
            return {index: self._arriving.pop(index) for index in parts.completed_by(unit)}

        return complete

    def place(self, members: list[list[nn.Parameter]], old_state: dict[int, dict[str, Any]]) -> None:
        """Add the owned master weights to the members of each group, with the old state of their parameters.

        Raises UsageError if the state is that of a part, but the owner needs that of the unsharded tensor.
        """
        for index in self.cut:
            tensor, state = self.registry[index], old_state.get(id(self.registry.parameters[index]), {})
            parts = [key for key, value in state.items() if not self._is_known_whole(key, value, tensor)]
            if parts:
                raise UsageError(
                    f"the optimizer {type(self.optimizer).__name__} steps whole tensors, and has state for "
                    f"{tensor.name!r}, of which this rank has the box {tensor.box} only: {', '.join(parts)}. Pass one "
                    "without state, and load a checkpoint"
                )
        for index in sorted(self.masters):
            group = self.registry[index].group
            assert group is not None
            members[group].append(self.masters[index])
            state = old_state.get(id(self.registry.parameters[index]), {})
            if state:
                master, tensor = self.masters[index], self.registry[index]
                self.optimizer.state[master] = {
                    key: value.to(master.device, state_dtype(value, tensor, master))
                    if self._is_elementwise(value, master.numel(), key)
                    else value
                    for key, value in state.items()
                }
        self.keep_state()

    def _is_known_whole(self, key: str, value: Any, tensor: LogicalTensor) -> bool:
        number = not isinstance(value, torch.Tensor) or value.numel() == 1
        return number or is_of_whole(key, value, tensor, self._is_elementwise)

    def hold_state(self) -> None:
        """Count the optimizer's state. Counted entries are skipped; some optimizers add entries later."""
        for master in self.masters.values():
            state = self.optimizer.state.get(master)
            if state:
                hold(state, self._accountant, self._tier)

    def stepping(self) -> list[Acquisition]:
        """Return the tiered tensors needed to step all tensors."""
        sections = [section for unit in self.units for section in _whole(unit)]
        away = [(tiered, tiered is not section.tiered_gradient) for section in sections for tiered in section.away]
        return [*self.acquisitions(), *away]

    def acquisitions(self) -> list[Acquisition]:
        """Return the tiered tensors of master weights and state that belong to no flat parameter."""
        return [(self.tiered, True)] if self.tiered.away else []

    def keep_state(self) -> None:
        """Move elementwise optimizer state to its tier."""
        if self.tiered.away:
            states = [(master.numel(), self.optimizer.state.get(master, {})) for master in self.masters.values()]
            kept = [v for numel, state in states for key, v in state.items() if self._is_elementwise(v, numel, key)]
            self.tiered.keep_only(Category.OPTIMIZER, kept)

    @contextlib.contextmanager
    def around(self, factor: float | torch.Tensor) -> Iterator[None]:
        """Send gradients to owners, let the optimizer step in the block, and send results back; acquires all state."""
        with acquiring(self.stepping()):
            with self._gradients_there(factor), keeping_memory(self.optimizer, self.masters.values()):
                yield
            self._one_ahead(self._distribute)
            self.keep_state()
        self.hold_state()

    @contextlib.contextmanager
    def _gradients_there(self, factor: float | torch.Tensor) -> Iterator[None]:
        with contextlib.ExitStack() as acquired:
            if self.replicated:
                for unit in self.units:
                    for section in _uncut(unit):
                        acquired.enter_context(section.acquiring_gradient())
            try:
                self._one_ahead(functools.partial(self._collect, factor=factor))
                yield
            finally:
                for master in self.masters.values():
                    master.grad = None

    def refresh(self, unit: Unit, loaded: Collection[int] = ()) -> None:
        """Take over changes; changes of parts are kept for `share_changes`."""
        for section in _whole(unit):
            for slot in section.layout.slots:
                if section.layout.cut:
                    self._changed.add(slot.index)
                    self._loaded |= {slot.index}.intersection(loaded)
                    continue
                master = self.masters.get(slot.index)
                if master is None or (self.replicated and section.master_is_parameter):
                    continue
                values = section.full[slot.offset : slot.offset + slot.numel]
                if slot.index in loaded:
                    _flat(master.detach()).copy_(values)
                else:
                    take_changes(_flat(master.detach()), values)

    @override
    def share_changes(self) -> None:
        if self._parts is None:
            return
        changed, loaded = self._parts.agreed(self._changed, self._loaded)
        self._changed, self._loaded = set(), set()
        units = [self.units[number] for number in self._parts.units_of(changed)]
        acquisitions = [(tiered, False) for unit in units for section in _whole(unit) for tiered in section.away]
        with acquiring([*self.acquisitions(), *acquisitions] if units else []):
            for unit in units:
                label = f"{unit.name}.changes"
                complete = self._gather(unit, self._parts, _own_values, _as_it_is, label, Category.BUFFERS)
                for index, values in complete().items():
                    place, master = self._parts.places[index], _flat(self.masters[index].detach())
                    if place in loaded:
                        master.copy_(values)
                    elif place in changed:
                        take_changes(master, values)
        self._arriving.clear()  # parts of unchanged tensors, received along with the others

    def _one_ahead(self, begin: Callable[[Unit], list[Finish]]) -> None:
        """Exchange values of all units; each exchange runs while the next unit's is prepared."""
        pending: list[Finish] = []
        for unit in self.units:
            following = begin(unit)
            while pending and following:
                pending.pop(0)()  # nothing else refers to its messages
            pending += following
        while pending:
            pending.pop(0)()

    def _collect(self, unit: Unit, factor: float | torch.Tensor) -> list[Finish]:
        """Send gradients of a unit to their owners; the returned functions give them to the optimizer."""
        found: list[Finish] = []
        for section in _uncut(unit):
            if self.replicated:
                whole_gradient = self.scaled(section, section.whole_gradient, factor)
                for slot in section.layout.slots:
                    master = self.masters[slot.index]
                    gradient = whole_gradient[slot.offset : slot.offset + slot.numel].view(master.shape)
                    master.grad = as_gradient(gradient, master, self._accountant)
                continue
            # Each element comes from the rank that has it.
            whole = {
                slot.index: torch.empty(slot.numel, dtype=section.accumulate_dtype, device=section.device)
                for slot in section.layout.slots
                if slot.index in self.masters
            }
            for gradient in whole.values():
                self._accountant.hold(Category.GRADIENTS, gradient)
            label = f"{unit.name}.gradients"
            found.append(self._exchange(section, section.own_gradient, whole, label, to_owners=True))
            found.append(functools.partial(self._give, whole, factor))
        if self._parts is not None and self._parts.has(unit):
            dtype_of, label = self._policy.accumulation_dtype, f"{unit.name}.gradients"
            complete = self._gather(unit, self._parts, _gradient, dtype_of, label, Category.GRADIENTS)
            found.append(lambda: self._give(complete(), factor))
        return found

    def _give(self, gradients: Mapping[int, torch.Tensor], factor: float | torch.Tensor) -> None:
        for index, gradient in gradients.items():
            master = self.masters[index]
            master.grad = as_gradient(gradient.view(master.shape), master, self._accountant).mul_(factor)

    def _distribute(self, unit: Unit) -> list[Finish]:
        """Send new values of a unit's tensors from their owners; the returned functions write them."""
        found: list[Finish] = []
        for section in _uncut(unit):
            if self.replicated:
                section.publish()
                continue
            values = self._rounded(slot.index for slot in section.layout.slots)
            found.append(self._exchange(section, section.own_values, values, f"{unit.name}.updates", to_owners=False))
        if self._parts is not None:
            values = self._rounded(self._parts.owned_of(unit))
            found += self._parts.spread(unit, values.__getitem__, _own_values, f"{unit.name}.updates")
        return found

    def _rounded(self, indices: Iterable[int]) -> dict[int, torch.Tensor]:
        found = {
            index: _flat(self.masters[index].detach()).to(self.registry[index].dtype)
            for index in indices
            if index in self.masters
        }
        for values in found.values():
            self._accountant.hold(Category.BUFFERS, values)
        return found

    def _exchange(
        self,
        section: FlatParamStorage,
        own: torch.Tensor,
        whole: Mapping[int, torch.Tensor],
        label: str,
        *,
        to_owners: bool,
    ) -> Finish:
        """Launch the exchange between this rank's range and the owned tensors of a flat parameter.

        The returned function waits for the exchange, and writes what has come.
        """
        route = self._route(section)
        near = [own[start:stop] for start, stop in route.own]
        far = [whole[index][start:stop] for index, start, stop in route.owned]
        given, into = (near, far) if to_owners else (far, near)
        sizes = route.own_sizes, route.owned_sizes
        sizes_out, sizes_in = sizes if to_owners else reversed(sizes)
        sent = torch.cat(given) if given else own.new_empty(0)
        received = torch.empty(sum(sizes_in), dtype=own.dtype, device=section.device)
        for message in (sent, received):
            self._accountant.hold(Category.BUFFERS, message)
        users = users_of(received, sent)
        handle = section.domain.ranks.all_to_all(received, sent, sizes_in, sizes_out, label)

        def finish() -> None:
            handle.wait()
            await_release(users)
            if into:
                torch._foreach_copy_(into, received.split([run.numel() for run in into]))

        return finish

    def _route(self, section: FlatParamStorage) -> _Route:
        """Return which ranges of a flat parameter this rank exchanges; found once."""
        known = self._routes.get(section)
        if known is not None:
            return known
        domain, layout, here = section.domain, section.layout, section.domain.ranks.rank
        own = [
            (self.owner[piece.index], (piece.offset, piece.offset + piece.stop - piece.start))
            for piece in layout.pieces(*section.own_range)
        ]
        owned = [
            (domain.rank_of(place), (piece.index, piece.start, piece.stop))
            for slot in layout.slots
            if slot.numel and self.owner[slot.index] == here
            for place in range(slot.offset // layout.shard, (slot.offset + slot.numel - 1) // layout.shard + 1)
            for piece in layout.pieces(
                max(slot.offset, place * layout.shard), min(slot.offset + slot.numel, (place + 1) * layout.shard)
            )
        ]
        given, given_sizes = _by_rank(own, domain.world)
        taken, taken_sizes = _by_rank(owned, domain.world)
        found = self._routes[section] = _Route(given, taken, given_sizes, taken_sizes)
        return found

    @override
    def has(self, index: int) -> bool:
        return index in self.owner

    @override
    def master_ranges(self, index: int) -> list[tuple[int, int]]:
        master = self.masters.get(index)
        return [] if master is None else [(0, master.numel())]

    @override
    def master_pieces(self, index: int) -> list[tuple[int, int, torch.Tensor]]:
        master = self.masters.get(index)
        return [] if master is None else [(0, master.numel(), _flat(master.detach()))]

    @override
    def state_pieces(self, index: int, key: str) -> list[tuple[int, int, torch.Tensor]]:
        master = self.masters.get(index)
        value = None if master is None else self.optimizer.state.get(master, {}).get(key)
        if master is None or not isinstance(value, torch.Tensor) or value.shape != master.shape:
            return []
        return [(0, master.numel(), _flat(value))]

    @override
    def state(self, index: int) -> Mapping[str, Any]:
        master = self.masters.get(index)
        return {} if master is None else self.optimizer.state.get(master, {})

    @override
    def make_state(
        self, index: int, elementwise: Mapping[str, torch.dtype], whole: Mapping[str, Any], *, filled: bool = False
    ) -> None:
        master = self.masters.get(index)
        if master is not None:
            tensor, state = self.registry[index], self.optimizer.state[master]
            add_state(self.optimizer, tensor, master, state, elementwise, whole, filled=filled)
            self.keep_state()
            hold(state, self._accountant, self._tier)

    @override
    def publish(self, unit: Unit) -> None:
        for finish in self._distribute(unit):
            finish()

    @override
    def own_masters(self) -> Iterator[tuple[torch.Tensor, StateHome]]:
        # Master weights of replicated tensors belong to flat parameters.
        for index, master in self.masters.items():
            if not self.replicated or index in self.cut:
                yield master.detach(), self.tiered.home

    @override
    def own_state(self) -> Iterator[tuple[torch.Tensor, StateHome]]:
        for master in self.masters.values():
            for value in tensors_of(self.optimizer.state.get(master, {})):
                yield value, self.tiered.home

    @override
    def take_new_views(self) -> None:
        for unit in self.units if self.replicated else ():
            for section in _uncut(unit):
                if section.master_is_parameter and not section.sharded and section.master is not None:
                    for slot in section.layout.slots:
                        values = section.master[slot.offset : slot.offset + slot.numel]
                        self.masters[slot.index].data = values.view(self.registry[slot.index].shape)


def _whole(unit: Unit) -> list[FlatParamStorage]:
    return [section for section in unit.trainable if section.layout.whole]


def _uncut(unit: Unit) -> list[FlatParamStorage]:
    return [section for section in _whole(unit) if not section.layout.cut]


def _initial(section: FlatParamStorage) -> torch.Tensor:
    return section.source[slice(*section.own_range)]


def _gradient(section: FlatParamStorage) -> torch.Tensor:
    return section.own_gradient


def _own_values(section: FlatParamStorage) -> torch.Tensor:
    return section.own_values


def _as_it_is(dtype: torch.dtype) -> torch.dtype:
    return dtype


def _flat(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.view(-1)
