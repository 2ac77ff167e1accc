"""Topologies map ranks to coordinates and back; a grid gives one rank its groups."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from shardwise.comm.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)
from shardwise.errors import UsageError
from shardwise.pipe import PipelineParallelGrid
from tests.harness import on_ranks


def test_ranks_and_coordinates_are_inverse() -> None:
    topology = ProcessTopology(["x", "y", "z"], [2, 3, 4])
    assert topology.world_size() == 24
    assert topology.get_axis_names() == ["x", "y", "z"]
    for rank in range(24):
        coord = topology.get_coord(rank)
        assert topology.get_rank(**coord._asdict()) == rank
        assert rank == coord.x * 12 + coord.y * 4 + coord.z
    assert (topology.get_dim("y"), topology.get_dim("pipe")) == (3, 0)


def test_the_last_axis_is_innermost() -> None:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert topology.get_axis_names() == ["pipe", "data", "model"]
    assert topology.get_axis_comm_lists("model") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert topology.get_axis_comm_lists("data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert topology.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.get_axis_comm_lists("expert") == []
    assert topology.filter_match(pipe=1, model=0) == [4, 6]
    assert topology.get_axis_list("data", 1) == [2, 3, 6, 7]


def test_file_names() -> None:
    topology = PipeModelDataParallelTopology(2, 2, 2)
    assert topology.get_rank_repr(5) == "model_01"
    assert topology.get_rank_repr(5, omit_axes=()) == "pipe_01-data_00-model_01"
    assert topology.get_rank_repr(5, omit_axes=["data"], inner_sep="=", outer_sep=",") == "pipe=01,model=01"
    assert PipeDataParallelTopology(2, 2).get_rank_repr(3) == ""


def test_wrong_arguments_name_the_axes() -> None:
    topology = PipeDataParallelTopology(2, 2)
    with pytest.raises(UsageError, match=r"each of \['pipe', 'data'\], found \['pipe'\]"):
        topology.get_rank(pipe=0)
    with pytest.raises(UsageError, match="outside of the topology"):
        topology.get_rank(pipe=2, data=0)
    with pytest.raises(UsageError, match=r"no axis model\. Its axes are pipe, data"):
        topology.filter_match(model=0)
    with pytest.raises(UsageError, match="rank of 0 to 3, found 4"):
        topology.get_coord(4)
    with pytest.raises(UsageError, match="different names and as many positive sizes"):
        ProcessTopology(["a", "a"], [1, 2])


def test_a_grid_creates_a_group_at_its_first_use() -> None:
    made: list[tuple[int, ...]] = []

    def make(ranks: tuple[int, ...]) -> tuple[int, ...]:
        made.append(ranks)
        return ranks

    grid = PipelineParallelGrid(PipeModelDataParallelTopology(2, 2, 2), rank=5, make_group=make)
    assert made == []
    assert (grid.get_pipe_parallel_rank(), grid.get_stage_id(), grid.get_pipe_parallel_world_size()) == (1, 1, 2)
    assert (grid.get_data_parallel_rank(), grid.get_data_parallel_id(), grid.get_data_parallel_world_size()) == (
        0,
        0,
        2,
    )
    assert (grid.get_model_parallel_rank(), grid.get_slice_parallel_rank()) == (1, 1)
    assert grid.get_pipe_parallel_group() == (1, 5)
    assert grid.get_data_parallel_group() == (5, 7)
    assert grid.get_slice_parallel_group() == grid.get_model_parallel_group() == (4, 5)
    grid.get_pipe_parallel_group()
    assert made == [(1, 5), (5, 7), (4, 5)]
    assert grid.stage_to_global(0) == 1
    assert grid.stage_to_global(0, data=1, model=0) == 2
    assert grid.get_global_rank() == 5
    assert grid.topology().world_size() == 8


@on_ranks(3)
def test_a_grid_of_a_process_group() -> None:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    grid = PipelineParallelGrid(PipeDataParallelTopology(2, 1), group)
    assert grid.get_stage_id() == grid.get_global_rank() == dist.get_rank() - 1
    assert dist.get_process_group_ranks(grid.get_pipe_parallel_group()) == [1, 2]
    assert dist.get_process_group_ranks(grid.get_data_parallel_group()) == [dist.get_rank()]
