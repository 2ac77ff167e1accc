"""What groups of ranks must not break: leaving in any order, logs, limits, combinations that cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise.comm import comms_logger
from shardwise.errors import ConflictError, UsageError
from shardwise.optim import OnebitAdam
from shardwise.zero.passes.sidechannel import SideChannel
from tests.harness import on_ranks, run_ranks
from tests.harness.training import Setting, digest, masters, start
from tests.models import CASES
from tests.zero.test_mesh import LEVELS, PAIRS, SPREAD, WORLD


def step(engine: Any, rank: int | None = None) -> None:
    case = CASES["gpt"]
    rank = dist.get_rank() if rank is None else rank
    engine.backward(case.loss(engine, case.data(0, 0, rank, torch.float32)))
    engine.step()


# -- leaving -----------------------------------------------------------------------------------------------------------


@on_ranks(WORLD)
def test_a_group_leaves_when_the_others_know() -> None:
    """The groups gather by themselves in `destroy()`: one is done while another still asks where its ranks are."""
    engine = start(CASES["gpt"], Setting(3, zero=PAIRS))
    step(engine)
    asks = SideChannel._where

    def late(self: SideChannel, peer: int, begin: float) -> dict[str, Any]:
        time.sleep(0.3)
        return asks(self, peer, begin)

    if dist.get_rank() == 0:
        SideChannel._where = late  # type: ignore[method-assign]
    else:
        time.sleep(0.3)  # so that it does ask
    try:
        engine.destroy()
    finally:
        SideChannel._where = asks  # type: ignore[method-assign]


ENDING = """
import torch, shardwise
from torch import nn

model = nn.Sequential(*[nn.Linear(1500, 1500) for _ in range(6)])
zero = {"stage": 2, "mics_shard_size": 2, "optimizer_over_replicas": True, "reduce_bucket_size": 3000000}
config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
engine, *_ = shardwise.initialize(model=model, optimizer=optimizer, config=config)
for _ in range(2):
    engine.backward(engine(torch.ones(2, 1500)).sum())
    engine.step()
"""


@pytest.mark.thorough
def test_a_process_ends_behind_the_chains_of_its_last_step(tmp_path: Path) -> None:
    """Updated parameters are still on their way, in a thread, when the script is over."""
    script = tmp_path / "ending.py"
    script.write_text(ENDING)
    command = [sys.executable, "-m", "shardwise.launch", "run", "--nproc", str(WORLD), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


@on_ranks(WORLD)
def test_engines_leave_no_sockets_and_no_threads() -> None:
    found = []
    others = set(threading.enumerate())  # of what earlier tests have left in this process
    for number in range(6):
        stage, zero = ((3, PAIRS), (2, SPREAD), (3, LEVELS))[number % 3]
        engine = start(CASES["gpt"], Setting(stage, zero=zero))
        step(engine)
        engine.destroy()
        del engine
        if number % 3 == 2:
            new = set(threading.enumerate()) - others
            threads = [thread.name for thread in new if thread.name.startswith("shardwise")]
            found.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), threads))
    first, last = found
    assert last[0] <= first[0] and last[1] <= first[1] and last[2] == []


# -- the communication log ---------------------------------------------------------------------------------------------


@on_ranks(WORLD)
def test_the_log_counts_the_ranks_of_a_group() -> None:
    """Return by what part of the size, in the log, a gather of two ranks is shorter."""
    comms_logger.comms_dict = {}
    setting = Setting(3, zero=PAIRS, extra=(("comms_logger", {"enabled": True}),))
    engine = start(CASES["gpt"], setting)
    try:
        step(engine)
        engine.sharded.finish_gathers()
        raw = comms_logger.get_raw_data()
    finally:
        comms_logger.enabled = False
        engine.destroy()
    sizes = [entry for op in ("all_gather", "reduce_scatter") for entry in raw[op].values()]
    assert {round(bus / algorithm, 6) for _, _, *both in sizes for algorithm, bus in zip(*both, strict=True)} == {0.5}


# -- part of the ranks -------------------------------------------------------------------------------------------------


class Half:
    """An `mpu` whose data-parallel ranks are half of the job."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._group


def in_halves() -> list[str]:
    """Two engines of four ranks in a job of eight, in groups of the configuration and of a mesh."""
    half = dist.get_rank() // 4
    groups = [dist.new_group(list(range(4))), dist.new_group(list(range(4, 8)))]
    names = ("pipe", "replicate", "shard")
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)["replicate", "shard"]
    found = []
    for zero, given in ((PAIRS, None), (SPREAD, None), ((), mesh), ((("optimizer_over_replicas", True),), mesh)):
        model = CASES["gpt"].make()
        engine, *_ = shardwise.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            config=Setting(3, zero=zero).config(),
            mpu=Half(groups[half]),
            mesh=given,
        )
        step(engine, dist.get_rank() % 4)
        with shardwise.zero.GatheredParameters(model.norm.weight, modifier_rank=4 * half + 3), torch.no_grad():
            model.norm.weight.fill_(float(dist.get_rank() % 4))
        found.append(digest(list(masters(model).values())))
        engine.destroy()
    return found


def test_groups_in_half_of_the_ranks() -> None:
    answers = run_ranks(in_halves, 8)
    assert len({found for answer in answers for found in answer}) == 1


# -- what is refused ---------------------------------------------------------------------------------------------------


HIERARCHY: dict[str, Any] = {"mics_shard_size": 4, "mics_hierarchical_params_gather": True}


def refused() -> list[str]:
    groups = len(dist.distributed_c10d._world.pg_map)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    made = len(dist.distributed_c10d._world.pg_map)
    found = []

    def attempt(error: type[Exception], model: nn.Module, zero: dict[str, Any], **more: Any) -> None:
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
        with pytest.raises(error) as caught:
            shardwise.initialize(model=model, config=config, **more)
        found.append(str(caught.value))

    model = nn.Linear(4, 4)
    onebit = OnebitAdam(model.parameters(), lr=1e-3)
    attempt(ConflictError, model, {"stage": 1, "mics_shard_size": 2}, optimizer=onebit)
    attempt(ConflictError, model, {"stage": 1}, optimizer=onebit, mesh=mesh)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    levels = {"stage": 3, "mics_shard_size": 2, "mics_hierarchical_params_gather": True, "zero_node_size": 1}
    attempt(ConflictError, model, levels, optimizer=sgd, mesh=mesh)
    before = len(dist.distributed_c10d._world.pg_map)
    attempt(UsageError, model, {"stage": 3}, optimizer=sgd, mesh=mesh["shard"])
    assert len(dist.distributed_c10d._world.pg_map) == before > made > groups
    with shardwise.zero.Init(
        config_dict_or_path={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}},
        zero_quantized_weights=True,
    ):
        coded = nn.Linear(64, 64)
    sgd = torch.optim.SGD(coded.parameters(), lr=0.1)
    attempt(ConflictError, coded, {"stage": 3, **HIERARCHY, "zero_node_size": 2}, optimizer=sgd)
    return found


def test_what_cannot_have_groups() -> None:
    words = [
        ["OnebitAdam", "groups of ranks"],
        ["OnebitAdam", "groups of ranks"],
        ["mics_hierarchical_params_gather", "mesh"],
        ["the engine has ranks [0, 1, 2, 3]"],
        ["zero.Init(zero_quantized_weights=True)", "one level"],
    ]
    for answer in run_ranks(refused, WORLD):
        for message, expected in zip(answer, words, strict=True):
            assert all(word in message for word in expected), message
