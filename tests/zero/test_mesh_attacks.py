"""What groups of ranks must not break: leaving in any order, logs, and engines of some of the ranks."""

from __future__ import annotations

import os
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardwise
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
