"""Tensors that ranks have in parts, each brought together where it is stepped whole, and back.

Of a matrix whose columns two groups of ranks divide, each rank has a run of the elements of its group's columns: its
range of a unit's memory. One rank of all owns the matrix. Gradients go to it in one all-to-all a unit, in which each
element is sent by one rank, and updated values come back to every rank that has them:

    columns A on ranks 0 and 2, B on 1 and 3; rank 1 owns the tensor
    rank 0 [A..]  rank 2 [..A]  rank 1 [B..]  rank 3 [..B]   ->  rank 1 [A B]  ->  all four

Ranks tell each other once which runs each has. Of a part nothing is known but its box.
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
from shardwise.errors import ConflictError
from shardwise.memory import Accountant, Category
from shardwise.registry import Registry
from shardwise.zero.units.layout import Section
from shardwise.zero.units.numbering import Numbering
from shardwise.zero.units.partition import UnitSpec
from shardwise.zero.units.unit import SectionMemory, Unit


@dataclass(frozen=True)
class _Run:
    """Elements `[start, stop)` of a part that lie in a rank's range of a section.

    Attributes:
        place: of the tensor in the numbering.
        start: see above.
        stop: see above.
        counts: whether, of several ranks that have these elements, it is this one that sends them.
        box: the part; None: all of the tensor.
    """

    place: int
    start: int
    stop: int
    counts: bool
    box: Region | None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


_Runs = dict[tuple[int, str], list[_Run]]
"""Those of a rank, by unit and dtype of the parameters, in the order of its sections."""


class CutTensors:
    """See the module docstring (all ranks call).

    Args:
        registry: the logical tensors of this rank.
        numbering: of all ranks' tensors.
        specs: the units.
        layouts: their sections: what is cut is in sections of its own.
        domains: of the parameters.
        accountant: is told of buffers.

    Attributes:
        job: all ranks.
        places: of the tensors in the numbering, by the index of this rank's part.
        known: places of all of them, also of those that this rank has no part of.
    """

    def __init__(
        self,
        registry: Registry,
        numbering: Numbering,
        specs: Sequence[UnitSpec],
        layouts: Sequence[Sequence[Section]],
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
        self._index = {place: index for index, place in self.places.items()}

        def lies(rank: int | None = None) -> list[list[Any]]:
            def place_in(domain: Domain) -> int:
                return domain.place if rank is None else domain.place_of(rank % domain.world)

            return [
                [unit, str(section.dtype).removeprefix("torch."), place, piece.start, piece.stop, counts, box]
                for unit, (spec, sections) in enumerate(zip(specs, layouts, strict=True))
                for section in sections
                if section.cut
                for piece in section.pieces(*section.range_of(place_in(domains.of(spec.domain))))
                for place, counts in [(numbering.places[piece.index], numbering.counts[piece.index])]
                for box in [registry[piece.index].box]
            ]

        if self.job.imagined:  # the others have as much
            told = [lies(rank) for rank in range(self.job.world)]
        else:
            told = self.job.exchange(lies(), "cut tensors")
        self._told = [_read(runs) for runs in told]
        every = [run for runs in self._told for own in runs.values() for run in own]
        self.known = sorted({run.place for run in every})
        counted: Counter[int] = Counter()
        for run in every:
            counted[run.place] += run.numel if run.counts else 0
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

    def own(self, owners: Mapping[int, int]) -> None:
        """Say which rank owns each tensor, by place; every rank says the same."""
        self._owner = dict(owners)
        last = {
            run.place: unit
            for unit, kind in sorted({key for runs in self._told for key in runs})
            for runs in self._told
            for run in runs.get((unit, kind), ())
        }
        for place, unit in last.items():
            if owners[place] == self.job.rank:
                self._complete.setdefault(unit, []).append(self._index[place])

    def completed_by(self, unit: Unit) -> list[int]:
        """Return the indices of owned tensors that have arrived as a whole when a unit has, and those before it."""
        return self._complete.get(unit.index, [])

    def owned_of(self, unit: Unit) -> set[int]:
        """Return the indices of owned tensors of which any rank has something in a unit."""
        keys = [(unit.index, kind) for kind in self._kinds(unit)]
        found = (run for runs in self._told for key in keys for run in runs.get(key, ()))
        return {self._index[run.place] for run in found if self._owner[run.place] == self.job.rank}

    def gather(
        self,
        unit: Unit,
        read: Callable[[SectionMemory], torch.Tensor],
        into: Callable[[int], torch.Tensor],
        dtype_of: Callable[[torch.dtype], torch.dtype],
        label: str,
    ) -> None:
        """Bring what ranks have of a unit to the owners (all ranks call).

        Args:
            unit: of this rank; other ranks give theirs of the same number.
            read: returns what this rank has at its own range of a section; 1-D.
            into: returns the memory of an owned tensor, by index; 1-D.
            dtype_of: in which values travel, by dtype of the parameters.
            label: for records.
        """
        for kind in self._kinds(unit):
            dtype = dtype_of(getattr(torch, kind))
            sent: list[list[torch.Tensor]] = [[] for _ in self._told]
            for run, values in self._own(unit, kind, read):
                if run.counts:
                    sent[self._owner[run.place]].append(values.to(dtype))
            arriving = [self._owned(runs, unit, kind, counted=True) for runs in self._told]
            received = self._exchange([sum(run.numel for run in runs) for runs in arriving], sent, dtype, label)
            for runs, part in zip(arriving, received, strict=True):
                for run, values in zip(runs, part.split([run.numel for run in runs]), strict=True):
                    whole_values = into(self._index[run.place])
                    for patch in self._patches_of(run):
                        _inside(patch, whole_values).copy_(_outside(patch, values))

    def spread(
        self,
        unit: Unit,
        values_of: Callable[[int], torch.Tensor],
        write: Callable[[SectionMemory], torch.Tensor],
        label: str,
    ) -> None:
        """Bring what owners have of a unit to all ranks that have a part of it (all ranks call).

        Args:
            unit: see `gather`.
            values_of: returns an owned tensor, in the dtype of its parameter, by index; 1-D.
            write: returns the memory of this rank's own range of a section; 1-D.
            label: for records.
        """
        for kind in self._kinds(unit):
            sent: list[list[torch.Tensor]] = []
            for runs in self._told:
                sent.append([])
                for run in self._owned(runs, unit, kind, counted=False):
                    part = torch.empty(run.numel, dtype=getattr(torch, kind), device=self.job.device)
                    for patch in self._patches_of(run):
                        _outside(patch, part).copy_(_inside(patch, values_of(self._index[run.place])))
                    sent[-1].append(part)
            targets: list[list[torch.Tensor]] = [[] for _ in self._told]
            for run, memory in self._own(unit, kind, write):
                targets[self._owner[run.place]].append(memory)
            sizes = [sum(map(torch.numel, some)) for some in targets]
            received = self._exchange(sizes, sent, getattr(torch, kind), label)
            for some, part in zip(targets, received, strict=True):
                for memory, values in zip(some, part.split([memory.numel() for memory in some]), strict=True):
                    memory.copy_(values)

    def agreed(self, *kinds: set[int]) -> list[set[int]]:
        """Return places of the tensors in sets of indices, each with those in the other ranks' (a small all-reduce)."""
        number = {place: n for n, place in enumerate(self.known)}
        flags = torch.zeros(len(kinds), len(self.known), device="cpu")
        for row, indices in enumerate(kinds):
            for place in {self.places[index] for index in indices}.intersection(number):  # others have no elements
                flags[row, number[place]] = 1.0
        flags = flags.to(self.job.device)
        self.job.all_reduce(flags, "changed tensors").wait()
        return [{place for place, flag in zip(self.known, row, strict=True) if flag} for row in flags.tolist()]

    def units_of(self, places: set[int]) -> list[int]:
        """Return the numbers of the units in which any rank has something of some tensors."""
        every = (item for runs in self._told for item in runs.items())
        return sorted({unit for (unit, _), runs in every if any(run.place in places for run in runs)})

    def _kinds(self, unit: Unit) -> list[str]:
        return sorted({kind for runs in self._told for number, kind in runs if number == unit.index})

    def _own(
        self, unit: Unit, kind: str, memory: Callable[[SectionMemory], torch.Tensor]
    ) -> Iterator[tuple[_Run, torch.Tensor]]:
        """Yield this rank's runs of a unit, each with its view of what a section has at the rank's own range."""
        runs = iter(self._told[self.job.rank].get((unit.index, kind), ()))
        for section in unit.trainable:
            layout = section.layout
            if layout.cut and str(layout.dtype).removeprefix("torch.") == kind:
                values = memory(section)
                for piece in layout.pieces(*section.own_range):
                    yield next(runs), values[piece.offset : piece.offset + piece.stop - piece.start]

    def _owned(self, runs: _Runs, unit: Unit, kind: str, *, counted: bool) -> list[_Run]:
        """Return the runs of a rank of tensors that are owned here."""
        here = self.job.rank
        return [
            run
            for run in runs.get((unit.index, kind), ())
            if self._owner[run.place] == here and (run.counts or not counted)
        ]

    def _patches_of(self, run: _Run) -> list[Patch]:
        """Return where the elements of a run lie in it and in the whole tensor."""
        found = self._patches.get(run)
        if found is None:
            shape = self._shapes[run.place]
            outer = whole(shape)
            inner = outer if run.box is None else run.box
            found = list(overlap(inner, run.start, run.stop, outer, 0, math.prod(shape)))
            self._patches[run] = found
        return found

    def _exchange(
        self, sizes: Sequence[int], sent: Sequence[Sequence[torch.Tensor]], dtype: torch.dtype, label: str
    ) -> list[torch.Tensor]:
        """All-to-all of lists of runs; those of one rank travel as one message."""
        given = [run for runs in sent for run in runs]
        message = torch.cat(given) if given else torch.empty(0, dtype=dtype, device=self.job.device)
        received = torch.empty(sum(sizes), dtype=dtype, device=self.job.device)
        for buffer in (message, received):
            self._accountant.hold(Category.BUFFERS, buffer)
        sizes_out = [sum(map(torch.numel, runs)) for runs in sent]
        self.job.all_to_all(received, message, sizes, sizes_out, label).wait()
        return list(received.split(list(sizes)))


def _read(told: list[list[Any]]) -> _Runs:
    found: _Runs = {}
    for unit, kind, place, start, stop, counts, box in told:
        run = _Run(place, start, stop, counts, None if box is None else region(box))
        found.setdefault((unit, kind), []).append(run)
    return found


def _outside(patch: Patch, values: torch.Tensor) -> torch.Tensor:
    """Return the view of a patch in the run's own memory."""
    return values.as_strided(patch.shape, patch.source_strides, values.storage_offset() + patch.source)


def _inside(patch: Patch, values: torch.Tensor) -> torch.Tensor:
    """Return the view of a patch in the whole tensor."""
    return values.as_strided(patch.shape, patch.target_strides, values.storage_offset() + patch.target)
