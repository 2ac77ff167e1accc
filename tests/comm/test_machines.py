"""Groups of ranks laid over machines: by the machine of each rank, in any order of ranks."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import shardwise
from shardwise.comm.machines import by_machine, groups_of, split_by, topology
from tests.harness import on_ranks
from tests.harness.logs import logged
from tests.harness.training import config_of, make_optimizer, take_steps
from tests.models import CASES

CASE = CASES["gpt"]


@pytest.mark.parametrize(
    ("nodes", "size", "expected"),
    [
        ("aabb", 2, [[0, 1], [2, 3]]),
        ("abab", 2, [[0, 2], [1, 3]]),
        ("abab", 4, [[0, 2, 1, 3]]),
        ("abcabc", 2, [[0, 3], [1, 4], [2, 5]]),
        ("aaabbbbb", 2, [[0, 1], [2, 7], [3, 4], [5, 6]]),
        ("ababcdcd", 4, [[0, 2, 1, 3], [4, 6, 5, 7]]),
    ],
)
def test_groups_lie_inside_of_machines_or_have_whole_ones(nodes: str, size: int, expected: list[list[int]]) -> None:
    assert groups_of(nodes, size) == expected
    assert bool(split_by(nodes, expected)) is (nodes == "aaabbbbb")


def test_a_group_that_splits_machines_is_named() -> None:
    found = split_by("aaabbb", [[0, 1], [2, 3], [4, 5]])
    assert found == "ranks 2, 3 lie on 2 machines, whose ranks are 3 on a, 3 on b"


@pytest.mark.parametrize("world", [8, 1024, 4096])
def test_time_grows_with_ranks_only_and_equal_machines_have_one_row(world: int) -> None:
    nodes = [f"node{rank % (world // 8)}" for rank in range(world)]
    began = time.perf_counter()
    groups = groups_of(nodes, 8)
    text = topology(nodes, [("eth0", "cpu")] * world, {"shard": groups, "replicate": list(zip(*groups, strict=True))})
    assert time.perf_counter() - began < 0.5
    assert groups == list(by_machine(nodes).values()) and len(text) < 80 * 4
    assert "shard: " + f"{world // 8} x 8 ranks, inside of machines" in text


def trained(nodes: str, zero: dict[str, Any], mesh: list[list[int]] | None = None) -> Any:
    """Return the parameters after two steps of ranks on imagined machines, groups of ranks, and the log."""
    os.environ["SHARDWISE_MACHINE"] = nodes[dist.get_rank()]
    model = CASE.make()
    given = None if mesh is None else DeviceMesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
    optimizer = make_optimizer("AdamW", CASE.groups(model), 1e-2)
    with logged() as kept:
        config = config_of(3, zero=zero)
        engine: Any = shardwise.initialize(model=model, optimizer=optimizer, config=config, mesh=given).engine
    take_steps(engine, CASE, range(2))
    with engine.gathered():
        state = {name: value.detach().clone() for name, value in model.named_parameters()}
    return state, {record.group: list(record.members) for record in engine.ledger.records()}, kept.lines


def same(first: Any, second: Any) -> bool:
    return all(torch.equal(value, second[name]) for name, value in first.items())


@on_ranks(4)
def test_secondary_shards_of_ranks_in_turn_change_no_bit() -> None:
    plain, _, _ = trained("abab", {})
    state, groups, lines = trained("abab", {"zero_hpz_partition_size": 2})
    assert same(plain, state) and groups["secondary"] == [[0, 2], [1, 3]][dist.get_rank() % 2]
    if dist.get_rank() == 0:
        (table,) = [line for line in lines if line.startswith("2 machines")]
        assert (
            "secondary: 2 x 2 ranks, inside of machines" in table and "shard: 1 x 4 ranks, across 2 machines" in table
        )


@on_ranks(4)
def test_groups_of_ranks_in_turn_are_those_of_a_mesh_by_machine() -> None:
    wanted, _, _ = trained("aaaa", {}, [[0, 2], [1, 3]])
    state, groups, lines = trained("abab", {"mics_shard_size": 2})
    assert same(wanted, state) and groups["shard"] == [[0, 2], [1, 3]][dist.get_rank() % 2]
    assert not any("cross machines" in line for line in lines)
    hierarchical = {"mics_shard_size": 4, "mics_hierarchical_params_gather": True}
    state, groups, _ = trained("abba", hierarchical)
    assert groups["shard"] == [[0, 3], [1, 2]][dist.get_rank() in (1, 2)]
    assert all(torch.allclose(value, state[name], atol=1e-5) for name, value in wanted.items())


@on_ranks(4)
def test_ranks_of_unequal_machines_are_warned_of() -> None:
    _, groups, lines = trained("aaab", {"mics_shard_size": 2})
    assert groups["shard"] in ([0, 1], [2, 3])
    assert any("ranks 2, 3 lie on 2 machines, whose ranks are 3 on a, 1 on b" in line for line in lines)
