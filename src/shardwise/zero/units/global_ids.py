"""Global numbers of tensors (places), equal on all ranks, even if ranks have different parts of different tensors.

Sums over ranks by tensor (squares of gradients) have one place for each tensor of the job. If ranks have different
tensors, they exchange descriptions; else a place is the index in the registry.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from shardwise import boxes
from shardwise.boxes import Region
from shardwise.comm.coded import coded, decoded
from shardwise.comm.communicator import Communicator
from shardwise.comm.domain import Domains
from shardwise.errors import DesyncError, UsageError
from shardwise.registry import HeldPart, LogicalTensor, Registry
from shardwise.zero.units.partition import UnitSpec


class _Held(NamedTuple):
    """Part of a tensor, as one of its ranks describes it: index, name, box (None: all), shape of the tensor."""

    number: int
    name: str
    box: Any
    shape: Any
    aliases: Any
    dtype: str


@dataclass
class _Version:
    """Tensors of one domain that some ranks describe alike; ascending `ranks`."""

    ranks: list[int]
    held: list[_Held]

    @functools.cached_property
    def shared(self) -> tuple[int, ...]:
        return tuple(self.ranks)

    @functools.cached_property
    def by_index(self) -> dict[int, _Held]:
        return {held.number: held for held in self.held}


class GlobalTensorIds:
    """Numbers the tensors of all ranks of `job`; see the module docstring (all ranks call).

    Of ranks with equal descriptions one sends: messages grow with the number of different parts, and by a few bytes
    with the number of ranks. Raises DesyncError if units of ranks do not correspond, UsageError if parts of a tensor
    overlap or ranks disagree about its shape.

    Attributes:
        names: names of all tensors, by place.
        places: places of this rank's tensors, by index.
        counts: by index, whether this rank's group counts the tensor in sums, of all groups with the same part.
        shapes: shapes of all tensors, by place.
        holders: ranks that have a part of the tensor, by place; places of the same ranks share a list.
        cut: places of tensors of which some ranks have only a part.
    """

    def __init__(
        self,
        registry: Registry,
        specs: Sequence[UnitSpec],
        domains: Domains,
        job: Communicator,
    ) -> None:
        everybody = list(range(job.world))
        self.names = [tensor.name for tensor in registry]
        self.places = list(range(len(registry)))
        self.counts = [True] * len(registry)
        self.shapes = [tensor.global_shape for tensor in registry]
        self.holders = [everybody for _ in registry]
        self.cut: set[int] = set()
        self._versions: list[list[_Version]] = []
        self._domain_of: list[int] = []
        self._known: dict[int, tuple[HeldPart, ...]] = {}
        if not domains.others and all(tensor.box is None for tensor in registry):
            return
        kinds = [None, *domains.others]
        self._domain_of = [kinds.index(tensor.domain) for tensor in registry]
        shape = [(kinds.index(spec.domain), len(spec.tensors)) for spec in specs]
        order = [tensor.index for spec in specs for tensor in spec.tensors]
        _check_alike(job.exchange([shape, order, self._domain_of], "units"))
        for kind in range(len(kinds)):
            own = [_described(tensor) for tensor in registry if self._domain_of[tensor.index] == kind]
            self._versions.append(_versions(job.exchange(own, f"tensors of domain {kind}")))
        groups: list[list[list[int]]] = [[[] for _ in everybody]]
        groups += _groups(job, [key[0] for key in domains.others])
        self._groups = groups
        every = sorted(
            (
                (version.ranks[0], held.number, kind, version, held)
                for kind, versions in enumerate(self._versions)
                for version in versions
                for held in version.held
            ),
            key=lambda found: found[:2],
        )
        _check_parts([(rank, held.name, held.box, held.shape) for rank, _, _, _, held in every])
        self._first = first = dict[str, list[int]]()
        least: dict[int, list[int]] = {}  # by identity of a version
        having: dict[str, list[_Version]] = {}
        for _, _, kind, version, held in every:
            if id(version) not in least:
                least[id(version)] = min(groups[kind][rank] for rank in version.ranks)
            key = repr((held.name, held.box))
            first[key] = min(first.get(key, least[id(version)]), least[id(version)])
            having.setdefault(held.name, []).append(version)
        self.names = list(having)
        place = {name: number for number, name in enumerate(self.names)}
        self.places = [place[tensor.name] for tensor in registry]
        self.counts = [
            first[repr((tensor.name, _as_json(tensor.box)))] == groups[self._domain_of[tensor.index]][job.rank]
            for tensor in registry
        ]
        shapes = {held.name: tuple(held.shape) for *_, held in every}
        self.shapes = [shapes[name] for name in self.names]
        lists: dict[tuple[int, ...], list[int]] = {}
        holders: list[list[int]] = []
        for versions in having.values():
            ranks = tuple(dict.fromkeys(map(id, versions)))
            if ranks not in lists:
                lists[ranks] = sorted({rank for version in versions for rank in version.ranks})
            holders.append(lists[ranks])
        self.holders = holders
        self.cut = {place[held.name] for *_, held in every if held.box is not None}

    def groups(self, kind: int) -> list[list[int]]:
        """Return the groups of ranks that share the parameters of a domain, by number (0: all ranks)."""
        found = {id(ranks): ranks for ranks in self._groups[kind]}
        return list(found.values())

    def counted_by(self, place: int, box: Any, ranks: Sequence[int]) -> bool:
        """Return True if a group of ranks counts its part of the tensor at a place."""
        return self._first[repr((self.names[place], _as_json(box)))] == ranks

    def parts_of(self, index: int) -> tuple[HeldPart, ...]:
        """Return the parts of all ranks at the place of this tensor, each once, in one order; empty if equal."""
        if not self._versions:
            return ()
        if index not in self._known:
            found: dict[tuple[str, Region], HeldPart] = {}
            for version in self._versions[self._domain_of[index]]:
                held = version.by_index[index]
                part = boxes.whole(held.shape) if held.box is None else boxes.region(held.box)
                known = found.get((held.name, part))
                if known is None:
                    dtype = getattr(torch, held.dtype)
                    known = HeldPart(held.name, tuple(held.aliases), tuple(held.shape), dtype, part, ())
                ranks = tuple(sorted((*known.ranks, *version.ranks))) if known.ranks else version.shared
                found[held.name, part] = replace(known, ranks=ranks)
            self._known[index] = tuple(found.values())
        return self._known[index]

    def index(self, place: int | None) -> int | None:
        """Return the index of this rank's part of the tensor at a place; None: this rank has no part."""
        return next((index for index, own in enumerate(self.places) if own == place), None)


def _described(tensor: LogicalTensor) -> _Held:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return _Held(tensor.index, tensor.name, tensor.box, tensor.global_shape, tensor.aliases, dtype)


def _as_json(value: Any) -> Any:
    return [_as_json(item) for item in value] if isinstance(value, (tuple, list)) else value


def _check_alike(gathered: Sequence[Any]) -> None:
    shape, *rest = gathered[0]
    for rank, (other, *others) in enumerate(gathered):
        if other != shape:
            raise DesyncError(
                f"initialize(): rank {rank} has {len(other)} units, which are not of as many parameters each, over the "
                f"same groups of ranks, as the {len(shape)} of rank 0: ranks gather and reduce them in one order"
            )
        if others != rest:
            raise DesyncError(
                f"initialize(): rank {rank} has its parameters in another order than rank 0. Ranks register parameters "
                "of the same layers in the same order"
            )


def _versions(gathered: Sequence[Any]) -> list[_Version]:
    found: dict[int, _Version] = {}
    for rank, value in enumerate(gathered):
        if id(value) not in found:
            found[id(value)] = _Version([], [_Held(*map(_as_json, held)) for held in value])
        found[id(value)].ranks.append(rank)
    return list(found.values())


def _groups(job: Communicator, members: Sequence[Sequence[int]]) -> list[list[list[int]]]:
    """Return the ranks that share each domain, by domain and rank; ranks of one group share a list."""
    found = []
    for code in zip(*job.exchange([coded(ranks) for ranks in members], "domains of tensors"), strict=True):
        lists: dict[str, list[int]] = {}
        for one in code:
            if repr(one) not in lists:
                lists[repr(one)] = decoded(one)
        found.append([lists[repr(one)] for one in code])
    return found


def _check_parts(tensors: Sequence[tuple[int, str, Any, Any]]) -> None:
    """Raise UsageError if parts (rank, name, box, shape) overlap: common elements would have several gradients."""
    found: dict[str, dict[Region, int]] = {}
    shapes: dict[str, tuple[int, Any]] = {}
    for rank, name, box, shape in tensors:
        other, known = shapes.setdefault(name, (rank, shape))
        if known != shape:
            raise UsageError(
                f"parameter {name!r}: rank {other} has declared a part of a tensor of shape {list(known)}, rank {rank} "
                f"of shape {list(shape)}; parts of one tensor need one shape, different tensors different names"
            )
        # JSON has made lists of tuples; keys need tuples.
        held = boxes.whole(shape) if box is None else boxes.region(box)
        found.setdefault(name, {}).setdefault(held, rank)
    disjoint: set[frozenset[Region]] = set()  # checked once, because layers are partitioned alike
    for name, parts in found.items():
        if frozenset(parts) in disjoint:
            continue
        disjoint.add(frozenset(parts))
        for (one, rank), (another, other) in itertools.combinations(parts.items(), 2):
            if boxes.meet(one, another):
                raise UsageError(
                    f"parameter {name!r}: rank {rank} has declared the part {one} of {list(shapes[name][1])}, rank "
                    f"{other} {another}, and these overlap. Parts are the same, or have no element in common: give "
                    "what only some of these ranks share a parameter of its own"
                )
