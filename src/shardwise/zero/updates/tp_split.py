"""Tensors of which ranks have different parts: gathered at an owner that steps them unsharded, and sent back.

If two groups of ranks have columns of a matrix, each rank has a range of its group's columns, and one of all ranks owns
the matrix. One all-to-all a unit sends gradients to the owner, each element from one rank; another sends updated values
to every rank that has them:

    columns A on ranks 0 and 2, B on 1 and 3; rank 1 owns the tensor
    rank 0 [A..]  rank 2 [..A]  rank 1 [B..]  rank 3 [..B]   ->  rank 1 [A B]  ->  all four

Ranks exchange the positions of parts (boxes) in flat parameters once; a rank's place in its domain gives its range.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.boxes import Patch, Region, overlap, region, whole
from shardwise.comm.communicator import Communicator
from shardwise.comm.domain import Domain, Domains
from shardwise.comm.native import await_release, users_of
from shardwise.errors import ConflictError
from shardwise.memory import Accountant, Category
from shardwise.registry import Registry
from shardwise.zero.units.flat_param import FlatParamStorage
from shardwise.zero.units.global_ids import GlobalTensorIds
from shardwise.zero.units.layout import FlatParam
from shardwise.zero.units.partition import UnitSpec
from shardwise.zero.units.unit import Unit

Finish = Callable[[], None]
"""Waits for an exchange that has been launched, and writes what has come."""


@dataclass(frozen=True)
class _Run:
    """Elements `[start, stop)` of a part in a rank's range. `counts`: this rank sends them, of several with them."""

    place: int
    start: int
    stop: int
    counts: bool
    box: Region | None

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class _Slot:
    place: int
    offset: int
    numel: int
    box: Region | None


@dataclass(frozen=True)
class _Laid:
    """Flat parameter with parts of tensors, the same on the ranks of some groups; a rank has `shard` elements."""

    unit: int
    kind: str
    shard: int
    slots: tuple[_Slot, ...]
    domain: Domain
    groups: tuple[tuple[int, ...], ...]

    def runs(self, slot: _Slot) -> Iterator[tuple[int, int, int]]:
        """Yield (place in the domain, start, stop) of a part's ranges on the ranks of a group."""
        end = slot.offset + slot.numel
        for place in range(slot.offset // self.shard, -(-end // self.shard)):
            first, last = max(slot.offset, place * self.shard), min(end, (place + 1) * self.shard)
            yield place, first - slot.offset, last - slot.offset


class SplitTensors:
    """Exchanges parts of tensors between ranks and owners (all ranks call); parts are in separate flat parameters.

    `job` has all ranks. `places` has the numbers of these tensors by the index of this rank's part; `known` has the
    numbers of all, also of tensors of which this rank has no part.
    """

    def __init__(
        self,
        registry: Registry,
        numbering: GlobalTensorIds,
        specs: Sequence[UnitSpec],
        layouts: Sequence[Sequence[FlatParam]],
        domains: Domains,
        accountant: Accountant,
    ) -> None:
        self.job: Communicator = domains.main.ranks
        self._accountant = accountant
        self._shapes = numbering.shapes
        self.places = {
            slot.index: numbering.places[slot.index]
            for sections in layouts
            for section in sections
            if section.cut
            for slot in section.slots
        }
        self._boxes = {index: _region(registry[index].box) for index in self.places}
        self._index = {place: index for index, place in self.places.items()}
        self._numbering = numbering
        self._laid: list[_Laid] = []
        for number, (key, domain) in enumerate([(None, domains.main), *domains.others.items()]):
            own = [
                [unit, str(section.dtype).removeprefix("torch."), section.shard, _slots(section, registry, numbering)]
                for unit, (spec, sections) in enumerate(zip(specs, layouts, strict=True))
                for section in sections
                if section.cut and spec.domain == key
            ]
            self._laid += self._of_all(own, number, domain)
        parts = {(slot.place, slot.box): slot.numel for laid in self._laid for slot in laid.slots if slot.numel}
        self.known = sorted({place for place, _ in parts})
        counted: Counter[int] = Counter()
        for (place, _), numel in parts.items():
            counted[place] += numel
        for place in self.known if not self.job.imagined else ():
            if counted[place] != math.prod(self._shapes[place]):
                raise ConflictError(
                    f"parameter {numbering.names[place]!r}: the parts that ranks have are {counted[place]} of its "
                    f"{math.prod(self._shapes[place])} elements {list(self._shapes[place])}, and the optimizer steps "
                    "whole tensors. Declare parts that are, together, all of it, or take an elementwise optimizer"
                )
        self._owner: dict[int, int] = {}
        self._patches: dict[_Run, list[Patch]] = {}
        self._complete: dict[int, list[int]] = {}
        self._owned: dict[tuple[int, str], dict[int, list[_Run]]] = {}

    def _of_all(self, own: list[Any], number: int, domain: Domain) -> list[_Laid]:
        world = self.job.world
        if self.job.imagined:  # other ranks have as much
            groups = [list(range(first, first + domain.world)) for first in range(0, world, domain.world)]
        else:
            groups = self._numbering.groups(number) if number else [list(range(world))]
        gathered = self.job.exchange(own, f"cut tensors of domain {number}")
        found: dict[int, list[tuple[int, ...]]] = {}
        for ranks in groups:
            found.setdefault(id(gathered[ranks[0]]), []).append(tuple(ranks))
        versions = {id(value): value for value in gathered}
        return [
            _Laid(unit, kind, shard, tuple(map(_slot_of, slots)), domain, tuple(found[key]))
            for key in found
            for unit, kind, shard, slots in versions[key]
        ]

    def own(self, owners: Mapping[int, int]) -> None:
        """Set the owner of each tensor, by place; the same on all ranks."""
        self._owner = dict(owners)
        here = self.job.rank
        last: dict[int, int] = {}
        for laid in self._laid:
            owned = self._owned.setdefault((laid.unit, laid.kind), {})
            for slot in laid.slots:
                if slot.numel:
                    last[slot.place] = max(last.get(slot.place, 0), laid.unit)
                if slot.numel and owners[slot.place] == here:
                    for ranks in laid.groups:
                        counts = self._counts(slot, ranks)
                        for place, start, stop in laid.runs(slot):
                            run = _Run(slot.place, start, stop, counts, slot.box)
                            owned.setdefault(ranks[laid.domain.arrangement.order[place]], []).append(run)
        for place, unit in sorted(last.items(), key=lambda found: found[1]):
            if owners[place] == here:
                self._complete.setdefault(unit, []).append(self._index[place])

    def _counts(self, slot: _Slot, ranks: Sequence[int]) -> bool:
        return self.job.imagined or self._numbering.counted_by(slot.place, slot.box, [*ranks])

    def has(self, unit: Unit) -> bool:
        """Return True if any rank has parts of tensors in a unit."""
        return bool(self._kinds(unit))

    def completed_by(self, unit: Unit) -> list[int]:
        """Return the indices of owned tensors that are complete with this unit and the units before it."""
        return self._complete.get(unit.index, [])

    def owned_of(self, unit: Unit) -> set[int]:
        """Return the indices of owned tensors of which any rank has elements in a unit."""
        keys = [(unit.index, kind) for kind in self._kinds(unit)]
        found = (run for key in keys for runs in self._owned.get(key, {}).values() for run in runs)
        return {self._index[run.place] for run in found}

    def gather(
        self,
        unit: Unit,
        read: Callable[[FlatParamStorage], torch.Tensor],
        into: Callable[[int], torch.Tensor],
        dtype_of: Callable[[torch.dtype], torch.dtype],
        label: str,
    ) -> list[Finish]:
        """Launch the sending of a unit's parts to the owners, in `dtype_of` the parameters' dtype (all ranks call).

        The returned functions wait, and write what has come. `read` returns the values of this rank's range of a flat
        parameter, `into` the memory of an owned tensor.
        """
        return [self._gather(unit, kind, read, into, dtype_of, label) for kind in self._kinds(unit)]

    def _gather(
        self,
        unit: Unit,
        kind: str,
        read: Callable[[FlatParamStorage], torch.Tensor],
        into: Callable[[int], torch.Tensor],
        dtype_of: Callable[[torch.dtype], torch.dtype],
        label: str,
    ) -> Finish:
        dtype = dtype_of(getattr(torch, kind))
        sent: list[list[torch.Tensor]] = [[] for _ in range(self.job.world)]
        for run, values in self._own(unit, kind, read):
            if run.counts:
                sent[self._owner[run.place]].append(values.to(dtype))
        arriving = self._owned_runs(unit, kind, counted=True)

        def write(received: Sequence[torch.Tensor]) -> None:
            for runs, part in zip(arriving, received, strict=True):
                for run, values in zip(runs, part.split([run.numel for run in runs]), strict=True):
                    whole_values = into(self._index[run.place])
                    for patch in self._patches_of(run):
                        _inside(patch, whole_values).copy_(_outside(patch, values))

        return self._exchange([sum(run.numel for run in runs) for runs in arriving], sent, dtype, label, write)

    def spread(
        self,
        unit: Unit,
        values_of: Callable[[int], torch.Tensor],
        write: Callable[[FlatParamStorage], torch.Tensor],
        label: str,
    ) -> list[Finish]:
        """Launch the sending of owned tensors of a unit to all ranks that have a part (all ranks call).

        The returned functions wait, and write what has come. `values_of` returns an owned tensor in the dtype of its
        parameter, `write` the memory of this rank's range.
        """
        return [self._spread(unit, kind, values_of, write, label) for kind in self._kinds(unit)]

    def _spread(
        self,
        unit: Unit,
        kind: str,
        values_of: Callable[[int], torch.Tensor],
        write: Callable[[FlatParamStorage], torch.Tensor],
        label: str,
    ) -> Finish:
        sent: list[list[torch.Tensor]] = []
        for runs in self._owned_runs(unit, kind, counted=False):
            sent.append([])
            for run in runs:
                part = torch.empty(run.numel, dtype=getattr(torch, kind), device=self.job.device)
                for patch in self._patches_of(run):
                    _outside(patch, part).copy_(_inside(patch, values_of(self._index[run.place])))
                sent[-1].append(part)
        targets: list[list[torch.Tensor]] = [[] for _ in range(self.job.world)]
        for run, memory in self._own(unit, kind, write):
            targets[self._owner[run.place]].append(memory)
        sizes = [sum(map(torch.numel, some)) for some in targets]

        def write_parts(received: Sequence[torch.Tensor]) -> None:
            for some, part in zip(targets, received, strict=True):
                for memory, values in zip(some, part.split([memory.numel() for memory in some]), strict=True):
                    memory.copy_(values)

        return self._exchange(sizes, sent, getattr(torch, kind), label, write_parts)

    def agreed(self, *kinds: set[int]) -> list[set[int]]:
        """Return the places of sets of indices, each united over all ranks (a small all-reduce)."""
        number = {place: n for n, place in enumerate(self.known)}
        flags = torch.zeros(len(kinds), len(self.known), dtype=torch.float32, device="cpu")
        for row, indices in enumerate(kinds):
            for place in {self.places[index] for index in indices}.intersection(number):  # others have no elements
                flags[row, number[place]] = 1.0
        flags = flags.to(self.job.device)
        self.job.all_reduce(flags, "changed tensors").wait()
        return [{place for place, flag in zip(self.known, row, strict=True) if flag} for row in flags.tolist()]

    def units_of(self, places: set[int]) -> list[int]:
        """Return the numbers of the units in which any rank has elements of some tensors."""
        found = {laid.unit for laid in self._laid if any(slot.numel and slot.place in places for slot in laid.slots)}
        return sorted(found)

    def _kinds(self, unit: Unit) -> list[str]:
        return sorted({laid.kind for laid in self._laid if laid.unit == unit.index})

    def _own(
        self, unit: Unit, kind: str, memory: Callable[[FlatParamStorage], torch.Tensor]
    ) -> Iterator[tuple[_Run, torch.Tensor]]:
        numbering = self._numbering
        for section in unit.trainable:
            layout = section.layout
            if layout.cut and str(layout.dtype).removeprefix("torch.") == kind:
                values = memory(section)
                for piece in layout.pieces(*section.own_range):
                    box = self._boxes[piece.index]
                    place, counts = numbering.places[piece.index], numbering.counts[piece.index]
                    run = _Run(place, piece.start, piece.stop, counts, box)
                    yield run, values[piece.offset : piece.offset + piece.stop - piece.start]

    def _owned_runs(self, unit: Unit, kind: str, *, counted: bool) -> list[list[_Run]]:
        owned = self._owned.get((unit.index, kind), {})
        ranks = range(self.job.world)
        return [[run for run in owned.get(rank, ()) if run.counts or not counted] for rank in ranks]

    def _patches_of(self, run: _Run) -> list[Patch]:
        found = self._patches.get(run)
        if found is None:
            shape = self._shapes[run.place]
            outer = whole(shape)
            inner = outer if run.box is None else run.box
            found = list(overlap(inner, run.start, run.stop, outer, 0, math.prod(shape)))
            self._patches[run] = found
        return found

    def _exchange(
        self,
        sizes: Sequence[int],
        sent: Sequence[Sequence[torch.Tensor]],
        dtype: torch.dtype,
        label: str,
        write: Callable[[Sequence[torch.Tensor]], None],
    ) -> Finish:
        """Launch an exchange of `sizes` elements from each rank, which `write` gets when the returned one is called."""
        given = [run for runs in sent for run in runs]
        message = torch.cat(given) if given else torch.empty(0, dtype=dtype, device=self.job.device)
        received = torch.empty(sum(sizes), dtype=dtype, device=self.job.device)
        for buffer in (message, received):
            self._accountant.hold(Category.BUFFERS, buffer)
        sizes_out = [sum(map(torch.numel, runs)) for runs in sent]
        users = users_of(received, message)
        handle = self.job.all_to_all(received, message, sizes, sizes_out, label)

        def finish() -> None:
            handle.wait()
            await_release(users)  # because threads of Gloo may keep them for a while
            write(received.split(list(sizes)))

        return finish


def _slots(section: FlatParam, registry: Registry, numbering: GlobalTensorIds) -> list[list[Any]]:
    return [[numbering.places[slot.index], slot.offset, slot.numel, registry[slot.index].box] for slot in section.slots]


def _slot_of(received: Sequence[Any]) -> _Slot:
    place, offset, numel, box = received
    return _Slot(place, offset, numel, _region(box))


def _region(box: Any) -> Region | None:
    return None if box is None else region(box)


def _outside(patch: Patch, values: torch.Tensor) -> torch.Tensor:
    return values.as_strided(patch.shape, patch.source_strides, values.storage_offset() + patch.source)


def _inside(patch: Patch, values: torch.Tensor) -> torch.Tensor:
    return values.as_strided(patch.shape, patch.target_strides, values.storage_offset() + patch.target)
