"""Numbers of tensors that are the same on all ranks, whatever parts of which tensors each has.

What is summed over ranks for each tensor (squares of its gradient) has a place for every tensor of the job. Where ranks
have different tensors they tell each other; where they have the same, a place is the index in the registry.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardwise import boxes
from shardwise.boxes import Region
from shardwise.comm.communicator import Communicator
from shardwise.comm.domain import Domains
from shardwise.errors import DesyncError, UsageError
from shardwise.registry import HeldPart, Registry
from shardwise.zero.units.partition import UnitSpec


class Numbering:
    """See the module docstring (all ranks call).

    Args:
        registry: of this rank.
        specs: the units of this rank.
        domains: of its parameters.
        job: all ranks that step together.

    Attributes:
        names: of all tensors, by place.
        places: of this rank's tensors, by index.
        counts: whether this rank's domain is the one that counts the tensor, by index: where several have the same part
            of it, one does.
        parts: what is at the place of this rank's tensors in the units of all ranks, by index: each part once, in the
            same order everywhere. None where ranks have the same tensors.
        shapes: of all whole tensors, by place.
        holders: the ranks that have a part of the tensor, by place.
        cut: places of the tensors of which some rank has a part that is not all.

    Raises:
        DesyncError: ranks have units that do not correspond.
        UsageError: parts of a tensor overlap, or ranks disagree about its shape.
    """

    def __init__(
        self,
        registry: Registry,
        specs: Sequence[UnitSpec],
        domains: Domains,
        job: Communicator,
    ) -> None:
        self.names = [tensor.name for tensor in registry]
        self.places = list(range(len(registry)))
        self.counts = [True] * len(registry)
        self.parts: list[tuple[HeldPart, ...]] | None = None
        self.shapes = [tensor.global_shape for tensor in registry]
        self.holders = [list(range(job.world)) for _ in registry]
        self.cut: set[int] = set()
        if not domains.others and all(tensor.box is None for tensor in registry):
            return
        kinds = list(domains.others)
        shape = [(-1 if spec.domain is None else kinds.index(spec.domain), len(spec.tensors)) for spec in specs]
        own = [(tensor.name, tensor.box, tensor.ranks, tensor.global_shape) for tensor in registry]
        facts = [(tensor.aliases, str(tensor.dtype).removeprefix("torch.")) for tensor in registry]
        order = [tensor.index for spec in specs for tensor in spec.tensors]
        told = job.exchange((shape, own, facts, order), "tensors")
        differ = [rank for rank, (other, *_) in enumerate(told) if other != told[0][0]]
        if differ:
            raise DesyncError(
                f"initialize(): rank {differ[0]} has {len(told[differ[0]][0])} units, which are not of as many "
                f"parameters each, over the same groups of ranks, as the {len(told[0][0])} of rank 0: ranks gather and "
                "reduce them in one order. Parts of tensors have to be about as large on all ranks"
            )
        tensors = [(rank, *held) for rank, (_, some, _, _) in enumerate(told) for held in some]
        _check_parts(tensors)
        first: dict[str, list[int] | None] = {}
        for _, name, box, ranks, _ in tensors:
            key = repr((name, box))
            known = first.setdefault(key, ranks)
            first[key] = ranks if known is not None and (ranks is None or ranks < known) else known
        self.names = list(dict.fromkeys(name for _, name, *_ in tensors))
        place = {name: number for number, name in enumerate(self.names)}
        self.places = [place[tensor.name] for tensor in registry]
        mine = told[job.rank][1]
        self.counts = [first[repr((name, box))] == ranks for name, box, ranks, _ in mine]
        shapes = {name: tuple(whole) for _, name, _, _, whole in tensors}
        self.shapes = [shapes[name] for name in self.names]
        self.holders = [[] for _ in self.names]
        for rank, name, box, *_ in tensors:
            self.holders[place[name]].append(rank)
            if box is not None:
                self.cut.add(place[name])
        self.parts = [()] * len(registry)
        for number, index in enumerate(order):
            self.parts[index] = _at_one_place(
                (rank, *some[indices[number]], *others[indices[number]])
                for rank, (_, some, others, indices) in enumerate(told)
            )

    def index(self, place: int | None) -> int | None:
        """Return the index of this rank's part of the tensor at a place; None if it has none."""
        return next((index for index, own in enumerate(self.places) if own == place), None)


def _at_one_place(told: Iterable[tuple[Any, ...]]) -> tuple[HeldPart, ...]:
    """Return the parts that ranks have at one place, each once, from what each rank has told."""
    found: dict[tuple[str, Region], HeldPart] = {}
    for rank, name, box, _, shape, aliases, dtype in told:
        part = boxes.whole(shape) if box is None else boxes.region(box)
        known = found.get((name, part))
        if known is None:
            known = HeldPart(name, tuple(aliases), tuple(shape), getattr(torch, dtype), part, ())
        found[name, part] = replace(known, ranks=(*known.ranks, rank))
    return tuple(found.values())


def _check_parts(tensors: Sequence[tuple[int, str, Any, Any, Any]]) -> None:
    """Raise if parts of a tensor overlap and are not the same: their common elements would have several gradients.

    Args:
        tensors: (rank, name, box, ranks, shape) of what each rank has.
    """
    found: dict[str, dict[Region, int]] = {}
    shapes: dict[str, tuple[int, Any]] = {}
    for rank, name, box, _, shape in tensors:
        other, known = shapes.setdefault(name, (rank, shape))
        if known != shape:
            raise UsageError(
                f"parameter {name!r}: rank {other} has declared a part of a tensor of shape {list(known)}, rank {rank} "
                f"of shape {list(shape)}; parts of one tensor need one shape, different tensors different names"
            )
        # Through JSON tuples have become lists; as keys they have to be tuples again.
        held = boxes.whole(shape) if box is None else boxes.region(box)
        found.setdefault(name, {}).setdefault(held, rank)
    known_apart: set[frozenset[Region]] = set()  # layers are divided alike
    for name, parts in found.items():
        if frozenset(parts) in known_apart:
            continue
        known_apart.add(frozenset(parts))
        for (one, rank), (another, other) in itertools.combinations(parts.items(), 2):
            if boxes.meet(one, another):
                raise UsageError(
                    f"parameter {name!r}: rank {rank} has declared the part {one} of {list(shapes[name][1])}, rank "
                    f"{other} {another}, and these overlap. Parts are the same, or have no element in common: give "
                    "what only some of these ranks share a parameter of its own"
                )
