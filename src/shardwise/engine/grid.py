"""The model-parallel unit (mpu) of one rank of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from shardwise.comm.topology import ProcessTopology


class PipelineParallelGrid:
    """The model-parallel unit (mpu) of one rank in a topology with axes `pipe`, `data`, and optionally `model`.

    Args:
        topology: the ranks of the job.
        process_group: the job, if `rank` or `make_group` is None; None: the default group.
        rank: the global rank of this process.
        make_group: creates the process group of some global ranks. Each group is created at its first use.
    """

    def __init__(
        self,
        topology: ProcessTopology,
        process_group: dist.ProcessGroup | None = None,
        *,
        rank: int | None = None,
        make_group: Callable[[tuple[int, ...]], Any] | None = None,
    ) -> None:
        if rank is None or make_group is None:
            members = dist.get_process_group_ranks(dist.group.WORLD if process_group is None else process_group)
            rank = dist.get_rank(process_group)

            def make_group(ranks: tuple[int, ...]) -> Any:
                return dist.new_group([members[place] for place in ranks], use_local_synchronization=True)

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
