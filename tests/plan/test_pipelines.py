"""Times of pipelines and of offloaded state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.errors import UsageError
from shardwise.pipe import PipelineModule
from shardwise.pipeline.schedules import make_schedule
from shardwise.plan.clock import Costs
from shardwise.plan.cluster import Cluster
from shardwise.plan.events import Launch, Operator, Pass, Wait
from shardwise.plan.pipelines import pipeline_time
from shardwise.plan.rates import Machine
from shardwise.plan.time import TimePlan, plan_steps, plan_times
from tests.models import GPT
from tests.plan.test_cluster import GB, WHOLE
from tests.plan.test_time import LENGTH, ROWS, batch, config_of, launch, op

COSTS = Costs(lambda one: float(one.signature), lambda one: one.size / 1000)


def passes(stage: int, forward: float = 1, backward: float = 2) -> list[Pass]:
    return [
        Pass({"forward": [op(forward)]}, stage),
        Pass({"backward": [op(backward)]}, stage),
        Pass({"step": []}, -1),
    ]


def schedule(positions: int, micro_batches: int) -> Any:
    return make_schedule("1f1b", positions, micro_batches, 1)


@pytest.mark.parametrize(("positions", "micro_batches"), [(2, 1), (4, 8), (3, 7)])
def test_the_bubble_of_equal_stages(positions: int, micro_batches: int) -> None:
    recorded = [passes(stage) for stage in range(positions)]
    time, idle, each = pipeline_time(schedule(positions, micro_batches), [], recorded, COSTS, COSTS)
    bubble = (positions - 1) / (micro_batches + positions - 1)
    assert idle == pytest.approx([bubble] * positions)
    assert time.total == pytest.approx(3 * (micro_batches + positions - 1))
    assert sum(time.phases.values()) == pytest.approx(time.total)
    assert [one.computing for one in each] == pytest.approx([3 * micro_batches] * positions)


def test_reductions_and_the_update_follow_the_last_micro_batch() -> None:
    last: list[Any] = [op(2), launch(0, 5), Wait(0)]
    recorded = [*passes(0)[:2], Pass({"forward": [op(1)]}, 0), Pass({"backward": last}, 0), Pass({"step": [op(3)]}, -1)]
    time, _, _ = pipeline_time(schedule(2, 4), [], [recorded, passes(1)], COSTS, COSTS)
    assert time.total == pytest.approx(3 * 5 + 5 + 3)


def test_messages_and_the_slowest_position() -> None:
    recorded = [passes(0), passes(1, 2, 4)]
    times = {
        name: pipeline_time(schedule(2, 4), messages, recorded, COSTS, slow)[0].total
        for name, messages, slow in (
            ("alone", [], COSTS),
            ("sending", [Launch(0, "broadcast", "pipeline", 2, (0, 1), 1000, 0, "")], COSTS),
            ("slow", [], Costs(lambda one: 2 * float(one.signature), COSTS.collective)),
        )
    }
    assert times["alone"] == 1 + 4 * 6 + 2  # the second position is always at work
    assert times["sending"] >= times["alone"] + 2
    assert times["slow"] == 1 + 4 * 12 + 2


def test_a_pipeline_is_planned() -> None:
    layers = PipelineModule([torch.nn.Linear(256, 256) for _ in range(4)], num_stages=2, loss_fn=torch.nn.MSELoss())
    rows = torch.empty(4096, 256, device="meta")
    found: dict[int, TimePlan] = {}
    for accumulation in (2, 8):
        given: dict[str, Any] = {"ranks": 4, "stages": [1], "batch": (rows, rows)}
        cluster = Cluster.of("h100", None, 8, WHOLE)
        memory, (found[accumulation],) = plan_steps(layers, config_of(1, accumulation), cluster, **given)
        assert [one.position for one in memory.plans] == [0, 1]
    few, many = found[2], found[8]
    assert few.samples == 2 * ROWS * 2 and many.samples == 4 * few.samples
    assert few.time.total < many.time.total < 4 * few.time.total
    assert len(few.idle) == 2 and sum(many.idle) < sum(few.idle)
    assert ("reduce_scatter", "stage") in few.time.collectives
    # Three matrix products a layer, but two of the first one, which needs no gradient of its input.
    assert few.time.flops["f32"] in [2 * products * 2 * 4096 * 256 * 256 for products in (5, 6)]


def offloaded(device: str, **more: Any) -> dict[str, Any]:
    config = config_of(1)
    config["zero_optimization"]["offload_optimizer"] = {"device": device, **more}
    return config


def test_offloaded_state_is_moved_and_stepped_on_the_host(tmp_path: Path) -> None:
    cluster = Cluster.of("h100", None, 8, WHOLE)
    given: dict[str, Any] = {"ranks": 2, "stages": [1], "batch": batch()}
    (here,) = plan_times(GPT(), config_of(1), cluster, **given)
    (host,) = plan_times(GPT(), offloaded("cpu"), cluster, **given)
    shard = sum(one.numel() for one in GPT().parameters()) / 2
    assert here.time.transfers == 0
    assert host.time.transfers == pytest.approx(8 * shard / 63e9)  # gradients down, parameters up
    assert host.time.phases["step"] > here.time.phases["step"]
    assert host.time.phases["transfers"] == 0  # hidden by the backward pass
    on_disk = offloaded("nvme", nvme_path=str(tmp_path))
    (fast,) = plan_times(GPT(), on_disk, cluster, **given)
    (slow,) = plan_times(GPT(), on_disk, cluster, **given, disk=(1e3, 1e3))
    assert slow.time.transfers > 1 > fast.time.transfers > host.time.transfers
    assert slow.time.phases["transfers"] == pytest.approx(slow.time.transfers - slow.time.phases["backward"])
    assert slow.time.total == pytest.approx(sum(slow.time.phases.values()))


def test_prices_and_shares() -> None:
    cluster = Cluster.of("h100", None, 8, WHOLE)
    (plan,) = plan_times(GPT(), config_of(0), cluster, ranks=2, stages=[0], batch=batch())
    assert plan.cost(3.0) == pytest.approx(3.0 * 2 * plan.time.total / 3600)
    assert plan.share_of_peak == pytest.approx(plan.time.flops["f32"] / 67e12 / plan.time.total)
    assert (plan.samples, plan.tokens) == (2 * ROWS, 2 * ROWS * LENGTH)
    assert plan.as_dict(3.0)["cost"] == plan.cost(3.0)
    product = Operator("", "mm", 10, GB, "f32", on_host=True)
    assert cluster.costs(8).operator(product) == pytest.approx(GB / (409.6e9 / 8))


def test_a_machine_without_disk_rates(tmp_path: Path) -> None:
    machine = Machine(when="", host_name="elsewhere", processor="", cores=1, device="cpu", torch="", threads=1)
    with pytest.raises(UsageError, match="was not measured; `shardwise plan --disk-speed`"):
        plan_times(GPT(), offloaded("nvme", nvme_path=str(tmp_path)), machine, ranks=1, stages=[1], batch=batch())
