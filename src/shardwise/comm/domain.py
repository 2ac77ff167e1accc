"""Domains: the ranks that share a parameter, arranged in a grid over which the parameter is sharded.

The dimensions of a grid go from the innermost (near ranks) to the outermost. At level k flat memory is sharded over the
first k dimensions and replicated over the others. At level 0 it is unsharded; at the last level each rank has a range
of its own. A range contains the rank's ranges at all finer levels. An all-gather to a coarser level, and a
reduce-scatter to a finer one, therefore run over one dimension after the other without copies in between.

    ranks 0 and 1 on one node, 2 and 3 on another: sizes (2, 2)
    level 0   every rank     [0 1 2 3 4 5 6 7]
    level 1   ranks 0 and 2  [0 1 2 3]          ranks 1 and 3          [4 5 6 7]
    level 2   rank 0 [0 1]   rank 2 [2 3]       rank 1 [4 5]           rank 3 [6 7]

The plan (`shardwise.zero.units.plan`) chooses the levels. ZeRO-3 is one dimension with everything at level 1. HSDP and
MiCS keep parameters, gradients and optimizer state at level 1 of two dimensions.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.comm.collective_queue import CollectiveQueue, Launch, Work
from shardwise.comm.communicator import Communicator, Handle
from shardwise.comm.registered import RegisteredMemory

SHARD, REPLICATE = "shard", "replicate"
"""Names of mesh dimensions: state is sharded over the first kind, and replicated over the second."""

Move = tuple[torch.Tensor, torch.Tensor, int]
"""Of an all-gather: output, this rank's input, and the level of the input."""


@dataclass(frozen=True)
class Arrangement:
    """The grid of some ranks.

    Attributes:
        names: mesh dimension of each dimension of the grid, innermost first.
        sizes: ranks in each dimension.
        order: ranks by the place of their range at the finest level.

    >>> grid = Arrangement.of_groups([[0, 1], [2, 3]])
    >>> grid.sizes, grid.order, grid.lines(0), grid.lines(1)
    ((2, 2), (0, 2, 1, 3), [[0, 1], [2, 3]], [[0, 2], [1, 3]])
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    order: tuple[int, ...]

    @classmethod
    def of_groups(cls, groups: Sequence[Sequence[int]], near: int | None = None) -> Arrangement:
        """Return the grid of groups of ranks of one size, over each of which all state is sharded.

        Runs of `near` ranks of a group become a dimension of their own.
        """
        size = near or len(groups[0])
        return cls.of([[group[at : at + size] for at in range(0, len(group), size)] for group in groups])

    @classmethod
    def of(cls, groups: Sequence[Sequence[Sequence[int]]]) -> Arrangement:
        """Return the grid of a mesh [replicate][across][within] without its dimensions of size 1."""
        outer, across, within = len(groups), len(groups[0]), len(groups[0][0])
        order = [groups[r][a][w] for w, a, r in itertools.product(range(within), range(across), range(outer))]
        return cls._of_dimensions(((SHARD, within), (SHARD, across), (REPLICATE, outer)), order)

    @classmethod
    def _of_dimensions(cls, dimensions: Iterable[tuple[str, int]], order: Iterable[int]) -> Arrangement:
        kept = [(name, size) for name, size in dimensions if size > 1] or [(SHARD, 1)]
        return cls(tuple(name for name, _ in kept), tuple(size for _, size in kept), tuple(order))

    def lines(self, dimension: int) -> list[list[int]]:
        """Return the groups of ranks that differ in one dimension only."""
        stride = math.prod(self.sizes[dimension + 1 :])
        size = self.sizes[dimension]
        first = [place for place in range(len(self.order)) if place // stride % size == 0]
        lines = [[self.order[place + step * stride] for step in range(size)] for place in first]
        return sorted(lines)

    def within(self, ranks: Sequence[int], lines: Sequence[Sequence[int]]) -> Arrangement | None:
        """Return the grid of ascending `ranks`, numbered among themselves, without dimensions of size 1.

        `lines` are all lists of ranks that need the same grid. None: a list is no grid, or lists form different ones.

        >>> Arrangement.of_groups([[0, 1, 2, 3], [4, 5, 6, 7]]).within([0, 2, 4, 6], [[0, 2, 4, 6], [1, 3, 5, 7]])
        Arrangement(names=('shard', 'replicate'), sizes=(2, 2), order=(0, 2, 1, 3))
        """
        places = {rank: place for place, rank in enumerate(self.order)}
        found = set()
        for line in lines:
            rest: list[int] = [places[rank] for rank in line]
            sizes: list[int] = []
            for size in reversed(self.sizes):
                sizes.insert(0, len({place % size for place in rest}))
                rest = [place // size for place in rest]
            found.add(tuple(sizes) if math.prod(sizes) == len(line) else ())
        shape = found.pop()
        if found or not shape:
            return None
        order = sorted(range(len(ranks)), key=lambda number: places[ranks[number]])
        return self._of_dimensions(zip(self.names, shape, strict=True), order)


def dimension_names(names: Sequence[str]) -> list[str]:
    """Return different names of a grid's dimensions.

    >>> dimension_names(("shard", "shard", "replicate"))
    ['shard', 'shard_2', 'replicate']
    """
    counts = [names[:number].count(name) for number, name in enumerate(names)]
    return [f"{name}_{again + 1}" if again else name for name, again in zip(names, counts, strict=True)]


class Domain:
    """Ranks that share parameters, their grid, and the queues of their collectives.

    Args:
        ranks: all of them.
        arrangement: the grid; None: one dimension.
        like: a domain of the same job; collectives of both domains are in one order.
        prescale: factor of gradients before the sum over the ranks.

    Attributes:
        dimensions: communicators of this rank's line in each dimension, innermost first; `names`, `sizes`: likewise.
        place: number of this rank's range at the finest level.
        depth: the finest level.
        async_gathers: all-gathers run on a CUDA stream of their own, and waiting for one does not block the host.
        async_reductions: the same of reduce-scatters.
        allocating: returns a context for allocating buffers of collectives.
    """

    def __init__(
        self,
        ranks: Communicator,
        arrangement: Arrangement | None = None,
        *,
        like: Domain | None = None,
        prescale: float = 1.0,
    ) -> None:
        arrangement = arrangement or Arrangement((SHARD,), (ranks.world,), tuple(range(ranks.world)))
        self.ranks = ranks
        self.arrangement = arrangement
        self.prescale = prescale
        self.names, self.sizes = arrangement.names, arrangement.sizes
        self._places = {rank: place for place, rank in enumerate(arrangement.order)}
        self.place = self._places[ranks.rank]
        self.world, self.depth = ranks.world, len(self.sizes)
        self.dimensions: tuple[Communicator, ...] = (ranks,)
        if len(self.sizes) > 1 or arrangement.order != tuple(range(ranks.world)):
            labels = enumerate(dimension_names(self.names))
            self.dimensions = tuple(ranks.part(arrangement.lines(number), label) for number, label in labels)
        self.allocating: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
        self._registered: RegisteredMemory | None = None
        first = ranks if like is None else like.ranks
        self.async_gathers, self.async_reductions = first.async_gathers, not first.waits_on_host
        if like is None:
            queue = functools.partial(CollectiveQueue, ranks.streams, limit=ranks.timeout, imagined=ranks.imagined)
            self.gathers = queue(waits_on_host=not self.async_gathers, name="gathers")
            self.reductions = queue(waits_on_host=not self.async_reductions, name="reductions")
        else:
            self.gathers, self.reductions = like.gathers, like.reductions

    def level(self, over: Sequence[str]) -> int:
        """Return the level at which memory is sharded over some mesh dimensions."""
        return sum(1 for _ in itertools.takewhile(lambda name: name in over, self.names))

    def parts(self, level: int) -> int:
        """Return the number of ranges at a level."""
        return math.prod(self.sizes[:level])

    def holders(self, level: int) -> list[tuple[int, int]]:
        """Return (rank, place) of the nearest ranks that together have all ranges of a level; this rank first."""
        stride = self.world // self.parts(level)
        found = [(self.arrangement.order[place], place) for place in range(self.place % stride, self.world, stride)]
        return sorted(found, key=lambda holder: (holder[0] - self.ranks.rank) % self.world)

    def connect(self, levels: int, *, trained: bool, registered: bool = False) -> None:
        """Create the process groups of passes, because no pass must wait for them (all ranks call at one point).

        `levels`: the finest level from which parameters are gathered; `trained`: gradients are reduced; `registered`:
        buffers are allocated in memory that these groups have registered (raises as `RegisteredMemory`).
        """
        later = ("",) if self.depth == 1 else ("", "_on")
        groups: list[Any] = []
        for number, dimension in enumerate(self.dimensions):
            for kind, needed in (("gather", number < levels), ("reduce", trained)):
                if needed:
                    groups += dimension.connect(*(kind + suffix for suffix in later))
        if registered and groups and self._registered is None:
            self._registered = memory = RegisteredMemory(list(dict.fromkeys(groups)), self.ranks.device)
            self.allocating = memory.allocating
            for dimension in self.dimensions:
                dimension.allocate_in(memory.allocating)

    def place_of(self, rank: int) -> int:
        """Return the number of a rank's range at the finest level."""
        return self._places[rank]

    def rank_of(self, place: int) -> int:
        """Return the rank that has a range at the finest level."""
        return self.arrangement.order[place]

    def within(self, memory: torch.Tensor, coarse: int, fine: int) -> torch.Tensor:
        """Return this rank's range at level `fine` of 1-D memory at level `coarse`, as a view."""
        parts = math.prod(self.sizes[coarse:fine])
        if parts == 1:
            return memory
        size = memory.numel() // parts
        number = self.place // math.prod(self.sizes[fine:]) % parts
        return memory[number * size : (number + 1) * size]

    def gathering(self, moves: Sequence[Move], level: int, label: str, kind: str = "gather") -> list[Launch]:
        """Return the launches of all-gathers to `level`: one collective for each dimension, outermost first."""
        launches: list[Launch] = []
        finest = level
        for _, _, fine in moves:
            finest = max(finest, fine)
        for dimension in range(finest - 1, level - 1, -1):
            pairs = []
            for target, source, fine in moves:
                if fine > dimension:
                    own = source if fine == dimension + 1 else self.within(target, level, dimension + 1)
                    pairs.append((target if dimension == level else self.within(target, level, dimension), own))
            kind_here = kind if not launches else "gather_on" if kind == "gather" else "reduce_on"
            launches.append(functools.partial(self.dimensions[dimension].all_gather, pairs, label, kind_here))
        return launches

    def gather(self, moves: Sequence[Move], level: int, label: str, kind: str = "gather") -> Work:
        """Launch the collectives of `gathering`, at least one; inputs may be views of the outputs."""
        return self.gathers.start(self.gathering(moves, level, label, kind))

    def reducing(
        self,
        given: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        coarse: int,
        fine: int,
        label: str,
        *,
        accumulate: bool,
        wire: torch.dtype | None,
        made: Callable[[torch.Tensor], None],
    ) -> list[Launch]:
        """Return the launches of reduce-scatters from level `coarse` to `fine`: one each dimension, innermost first.

        Sums are formed in the dtype of their outputs, in the rank order of each dimension. Under `accumulate` the last
        reduce-scatter adds to `outputs`. Gradients (`given` at level 0) are sent as they are; sums (`given` at other
        levels, and between dimensions) in dtype `wire` (None: their own). `made` is called with each buffer.
        """
        sums = given
        launches: list[Launch] = []
        for dimension in range(coarse, fine):
            given, sums = sums, outputs
            last = dimension + 1 == fine
            if not last:
                more = math.prod(self.sizes[dimension + 1 : fine])
                with self.allocating():
                    sums = [torch.empty(out.numel() * more, dtype=out.dtype, device=out.device) for out in outputs]
                for buffer in sums:
                    made(buffer)
            ranks, adds = self.dimensions[dimension], accumulate and last
            if dimension:
                launches.append(functools.partial(_sum_on, ranks, given, label, adds, wire, made, sums))
            else:
                pairs = [*zip(sums, given, strict=True)]
                launches.append(functools.partial(ranks.reduce_scatter, pairs, label, accumulate=adds, kind="reduce"))
        return launches

    def close(self) -> None:
        """End the threads of the queues, and `deregister`."""
        self.gathers.close()
        self.reductions.close()
        self.deregister()

    def deregister(self) -> None:
        """Allocate buffers as usual from now on."""
        self.allocating = contextlib.nullcontext
        if self._registered is not None:
            for dimension in self.dimensions:
                dimension.allocate_in(contextlib.nullcontext)
            self._registered.close()
            self._registered = None


@dataclass(frozen=True)
class Domains:
    """Domains of parameters: `main` of all ranks; `others` of fewer ranks or with another divisor, by both."""

    main: Domain
    others: Mapping[tuple[tuple[int, ...], int | None], Domain] = field(default_factory=dict)

    def of(self, key: tuple[tuple[int, ...], int | None] | None) -> Domain:
        """Return a domain by its key; None: `main`."""
        return self.main if key is None else self.others[key]


def _sum_on(
    ranks: Communicator,
    given: Sequence[torch.Tensor],
    label: str,
    accumulate: bool,
    wire: torch.dtype | None,
    made: Callable[[torch.Tensor], None],
    outputs: Sequence[torch.Tensor],
) -> Handle:
    sent = []
    for out, total in zip(outputs, given, strict=True):
        cast = total if wire is None else total.to(wire)
        if cast is not total:
            made(cast)
        sent.append((out, cast))
    return ranks.reduce_scatter(sent, label, accumulate=accumulate, kind="reduce_on")
