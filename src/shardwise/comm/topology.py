"""Cartesian topologies of ranks."""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Sequence
from itertools import product
from typing import Any

from shardwise.errors import UsageError


class ProcessTopology:
    """A Cartesian grid of ranks with named axes; along the last axis, ranks are adjacent.

    >>> grid = ProcessTopology(["pipe", "data"], [2, 3])
    >>> grid.get_rank(pipe=1, data=0), grid.get_coord(4).data, grid.get_axis_comm_lists("pipe")
    (3, 1, [[0, 3], [1, 4], [2, 5]])
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        if len(axes) != len(dims) or len(set(axes)) != len(axes) or any(dim < 1 for dim in dims):
            raise UsageError(
                "ProcessTopology(axes, dims): expected different names and as many positive sizes, found axes "
                f"{list(axes)} and dims {list(dims)}"
            )
        self.axes, self.dims = list(axes), list(dims)
        coordinates: Any = namedtuple  # because mypy expects literal field names
        self.ProcessCoord = coordinates("ProcessCoord", self.axes)
        self._coords = [self.ProcessCoord(*place) for place in product(*map(range, self.dims))]
        self.mapping = {coord: rank for rank, coord in enumerate(self._coords)}

    def world_size(self) -> int:
        """Return the number of ranks."""
        return math.prod(self.dims)

    def get_rank(self, **coordinates: int) -> int:
        """Return the rank at a coordinate of each axis."""
        if set(coordinates) != set(self.axes):
            raise UsageError(f"get_rank: expected one coordinate for each of {self.axes}, found {sorted(coordinates)}")
        found = self.filter_match(**coordinates)
        if not found:
            raise UsageError(f"get_rank: {coordinates} is outside of the topology. Its sizes are {self._sizes()}")
        return found[0]

    def get_coord(self, rank: int) -> Any:
        """Return the coordinates of a rank as a named tuple."""
        if not 0 <= rank < self.world_size():
            raise UsageError(f"get_coord: expected a rank of 0 to {self.world_size() - 1}, found {rank}")
        return self._coords[rank]

    def get_axis_names(self) -> list[str]:
        """Return the names of the axes, outermost first."""
        return self.axes

    def get_dim(self, axis: str) -> int:
        """Return the size of an axis; 0 if the topology lacks the axis."""
        return self._sizes().get(axis, 0)

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """Return the coordinates of a rank as text for file names.

        >>> PipeModelDataParallelTopology(2, 2, 1).get_rank_repr(3)
        'model_01'
        """
        coord = self.get_coord(rank)
        return outer_sep.join(f"{a}{inner_sep}{getattr(coord, a):02d}" for a in self.axes if a not in omit_axes)

    def filter_match(self, **coordinates: int) -> list[int]:
        """Return the ranks that have the given coordinates, in ascending order."""
        unknown = sorted(set(coordinates) - set(self.axes))
        if unknown:
            raise UsageError(f"The topology has no axis {', '.join(unknown)}. Its axes are {', '.join(self.axes)}")
        wanted = coordinates.items()
        return [rank for rank, at in enumerate(self._coords) if all(getattr(at, axis) == i for axis, i in wanted)]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks with coordinate `idx` on an axis."""
        return self.filter_match(**{axis: idx})

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the groups of ranks that differ on one axis only; none if the topology lacks the axis."""
        if axis not in self.axes:
            return []
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, coord in enumerate(self._coords):
            groups.setdefault(tuple(i for a, i in zip(self.axes, coord, strict=True) if a != axis), []).append(rank)
        return list(groups.values())

    def _sizes(self) -> dict[str, int]:
        return dict(zip(self.axes, self.dims, strict=True))

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """Pipeline stages outermost; the data-parallel ranks of a stage are adjacent."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Pipeline, data, and tensor parallelism; the tensor-parallel ranks are adjacent."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])
