"""Cartesian topologies of ranks, and the model-parallel unit (mpu) of one rank in a topology."""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable, Sequence
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


class PipelineParallelGrid:
    """The model-parallel unit (mpu) of one rank in a topology with axes `pipe`, `data`, and optionally `model`.

    Args:
        topology: the ranks of the job.
        rank: the global rank of this process.
        make_group: creates the process group of some global ranks. Each group is created at its first use.
    """

    def __init__(self, topology: ProcessTopology, rank: int, make_group: Callable[[tuple[int, ...]], Any]) -> None:
        self._topology, self.global_rank, self._make_group = topology, rank, make_group
        self._coord = topology.get_coord(rank)
        self._groups: dict[str, Any] = {}
        self.world_size = topology.world_size()
        self.pipe_parallel_size = max(topology.get_dim("pipe"), 1)
        self.data_parallel_size = max(topology.get_dim("data"), 1)
        self.model_parallel_size = self.slice_parallel_size = max(topology.get_dim("model"), 1)

    def topology(self) -> ProcessTopology:
        """Return the topology of the job."""
        return self._topology

    def get_global_rank(self) -> int:
        """Return the global rank of this process."""
        return self.global_rank

    def get_stage_id(self) -> int:
        """Return the number of this rank along the pipeline."""
        return self._place("pipe")

    def get_data_parallel_id(self) -> int:
        """Return the number of this rank among the data-parallel ranks."""
        return self._place("data")

    def stage_to_global(self, stage_id: int, **coordinates: int) -> int:
        """Return the global rank of a pipeline rank; the other coordinates are those of this rank, or as given."""
        return self._topology.get_rank(**{**self._coord._asdict(), **coordinates, "pipe": stage_id})

    def get_pipe_parallel_rank(self) -> int:
        """Return the number of this rank along the pipeline."""
        return self._place("pipe")

    def get_pipe_parallel_world_size(self) -> int:
        """Return the number of ranks along the pipeline."""
        return self.pipe_parallel_size

    def get_pipe_parallel_group(self) -> Any:
        """Return the process group of the pipeline ranks with this rank's other coordinates."""
        return self._group("pipe")

    def get_data_parallel_rank(self) -> int:
        """Return the number of this rank among the data-parallel ranks."""
        return self._place("data")

    def get_data_parallel_world_size(self) -> int:
        """Return the number of data-parallel ranks."""
        return self.data_parallel_size

    def get_data_parallel_group(self) -> Any:
        """Return the process group of the data-parallel ranks with this rank's other coordinates."""
        return self._group("data")

    def get_model_parallel_rank(self) -> int:
        """Return the number of this rank in its tensor-parallel group."""
        return self._place("model")

    def get_model_parallel_world_size(self) -> int:
        """Return the size of the tensor-parallel group."""
        return self.model_parallel_size

    def get_model_parallel_group(self) -> Any:
        """Return the tensor-parallel process group of this rank."""
        return self._group("model")

    get_slice_parallel_rank = get_model_parallel_rank
    get_slice_parallel_world_size = get_model_parallel_world_size
    get_slice_parallel_group = get_model_parallel_group

    def _place(self, axis: str) -> int:
        return int(getattr(self._coord, axis, 0))

    def _group(self, axis: str) -> Any:
        if axis not in self._groups:
            others = {a: i for a, i in self._coord._asdict().items() if a != axis}
            ranks = self._topology.filter_match(**others) if axis in self._topology.axes else [self.global_rank]
            self._groups[axis] = self._make_group(tuple(ranks))
        return self._groups[axis]
