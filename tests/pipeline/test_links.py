"""Links on a transport that, as NCCL from 2.22 on, connects the ranks of a group inside its first collective, where the
host waits for them: receives that are launched ahead must not be that collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardwise.comm import groups, native
from shardwise.comm.communicator import Communicator
from shardwise.comm.ledger import Ledger
from shardwise.pipeline import make_schedule, runtime, with_communication
from shardwise.pipeline.messages import form_of
from tests.harness import run_ranks

CPU = torch.device("cpu")
LIMIT = timedelta(seconds=10)


class Work:
    """Stages that multiply by trained numbers."""

    def __init__(self) -> None:
        self.weight = torch.ones(2, requires_grad=True, device=CPU)

    def inputs(self, micro_batch: int) -> torch.Tensor:
        return torch.full((2,), float(micro_batch), device=CPU)

    def forward(self, stage: int, micro_batch: int, value: torch.Tensor) -> torch.Tensor:
        output = value * self.weight
        return output.sum() if stage == dist.get_world_size() - 1 else output

    def backward(self, key: Any, roots: Sequence[Any], gradients: Any, *, split: bool, last: bool) -> None:
        torch.autograd.backward(roots, gradients)


def run(name: str, micro_batches: int, fixed: bool) -> list[float]:
    launch, connected = native.launch_together, set[str]()

    def launch_together(
        op: Callable[..., Any], pairs: Sequence[native.Pair], group: dist.ProcessGroup, *, async_op: bool
    ) -> list[Any]:
        if group.group_name not in connected:
            connected.add(group.group_name)
            groups.await_ranks(dist.get_process_group_ranks(group), LIMIT, f"first/{group.group_name}", "connecting")
        return launch(op, pairs, group, async_op=async_op)

    world, work = dist.get_world_size(), Work()
    with (
        mock.patch.object(native, "launch_together", launch_together),
        mock.patch.object(Communicator, "waits_on_host", False),
        mock.patch.object(runtime, "ordered_kernels_overlap", lambda: True),
    ):
        whole = Communicator(None, Ledger(), CPU)
        pipeline = runtime.Runtime(whole, range(world), dist.get_rank(), range(world), str)
        if fixed:
            form = form_of(torch.ones(2, requires_grad=True, device=CPU), "")[0]
            pipeline.expect(dict.fromkeys(range(world - 1), form))
        pipeline.run(with_communication(make_schedule(name, world, micro_batches)), work, fixed=fixed)
        pipeline.close()
        whole.destroy()
    assert work.weight.grad is not None
    return work.weight.grad.tolist()


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(("name", "world"), [("1f1b", 3), ("gpipe", 2)])
def test_receives_launched_ahead_do_not_connect_ranks(name: str, world: int, fixed: bool) -> None:
    assert run_ranks(run, world, name, 4, fixed, timeout=60) == [[6.0, 6.0]] * world
