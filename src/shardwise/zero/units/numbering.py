"""Numbers of tensors that are the same on all ranks, whatever parts of which tensors each has.

What is summed over ranks for each tensor (squares of its gradient) has a place for every tensor of the job. Where ranks
have different tensors they tell each other; where they have the same, a place is the index in the registry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise.boxes import Box, misfit, whole
from shardwise.comm.communicator import Communicator
from shardwise.comm.domain import Domains
from shardwise.errors import DesyncError, UsageError
from shardwise.registry import Registry
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
        shapes: of all whole tensors, by place.
        holders: the ranks that have a part of the tensor, by place.
        cut: places of the tensors of which some rank has a box.

    Raises:
        DesyncError: ranks have units that do not correspond.
        UsageError: the parts that ranks have of a tensor are not, together, each element of it once.
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
        self.shapes = [tensor.global_shape for tensor in registry]
        self.holders = [list(range(job.world)) for _ in registry]
        self.cut = {tensor.index for tensor in registry if tensor.box is not None}
        if not domains.others:
            return
        kinds = list(domains.others)
        shape = [(-1 if spec.ranks is None else kinds.index(spec.ranks), len(spec.tensors)) for spec in specs]
        own = [(tensor.name, tensor.box, tensor.ranks, tensor.global_shape) for tensor in registry]
        told = job.exchange((shape, own), "tensors")
        differ = [rank for rank, (other, _) in enumerate(told) if other != told[0][0]]
        if differ:
            raise DesyncError(
                f"initialize(): rank {differ[0]} has {len(told[differ[0]][0])} units, which are not of as many "
                f"parameters each, over the same groups of ranks, as the {len(told[0][0])} of rank 0: ranks gather and "
                "reduce them in one order. Parts of tensors have to be about as large on all ranks"
            )
        first: dict[str, list[int] | None] = {}
        for _, tensors in told:
            for name, box, ranks, _ in tensors:
                key = repr((name, box))
                known = first.setdefault(key, ranks)
                first[key] = ranks if known is not None and (ranks is None or ranks < known) else known
        parts: dict[str, list[tuple[int, Any, list[int]]]] = {}
        for rank, (_, tensors) in enumerate(told):
            for name, box, _, whole_shape in tensors:
                parts.setdefault(name, []).append((rank, box, whole_shape))
        self.names = list(parts)
        place = {name: number for number, name in enumerate(self.names)}
        self.places = [place[tensor.name] for tensor in registry]
        mine = told[job.rank][1]
        self.counts = [first[repr((name, box))] == ranks for name, box, ranks, _ in mine]
        self.shapes = [tuple(found[0][2]) for found in parts.values()]
        self.holders = [[rank for rank, _, _ in found] for found in parts.values()]
        boxed = [name for name, found in parts.items() if any(box is not None for _, box, _ in found)]
        self.cut = {place[name] for name in boxed}
        for name in boxed if not job.imagined else ():
            _check_parts(name, parts[name])

    def index(self, place: int | None) -> int | None:
        """Return the index of this rank's part of the tensor at a place; None if it has none."""
        return next((index for index, own in enumerate(self.places) if own == place), None)


def _check_parts(name: str, parts: Sequence[tuple[int, Any, list[int]]]) -> None:
    """Raise unless the boxes of a tensor, each counted once however many ranks have it, are all of it."""
    shapes = {tuple(shape): rank for rank, _, shape in parts}
    if len(shapes) > 1:
        said = " and ".join(f"{list(shape)} by rank {rank}" for shape, rank in shapes.items())
        raise UsageError(f"declared parts of {name!r}: the shape of the whole tensor is {said}; it is one tensor")
    (shape,) = shapes
    boxes = {whole(shape) if box is None else as_box(box): rank for rank, box, _ in parts}
    wrong = misfit(shape, boxes)
    if wrong is not None:
        said = ", ".join(f"{box} by rank {rank}" for box, rank in boxes.items())
        raise UsageError(
            f"declared parts of {name!r}: element {list(wrong[0])} of {list(shape)} is in {wrong[1]} of the different "
            f"boxes ({said}), and should be in one. Ranks have the same box of a tensor, or boxes without a common "
            "element"
        )


def as_box(told: Any) -> Box:
    """Return a box that has travelled as JSON, in which tuples are lists."""
    box: Box = _tuples(told)
    return box


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
