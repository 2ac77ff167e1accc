"""Plans of time: what is recorded is what an engine does, and clocks add it up."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

import shardwise
from shardwise.engine.plans import planners_of
from shardwise.errors import CommandLineError, UsageError
from shardwise.launch.cli import app
from shardwise.launch.machine_measure import of_this_machine
from shardwise.memory.dryrun import loss_of
from shardwise.plan.clock import Costs, StepTime, step_time
from shardwise.plan.cluster import Cluster
from shardwise.plan.events import Event, Launch, Operator, Pass, Recorder, Wait
from shardwise.plan.models import micro_batch
from shardwise.plan.rates import Collectives, CollectiveTime, Crowd, Machine, Operators, OperatorTime, measure_operators
from shardwise.plan.time import plan_times
from shardwise.profile.counting import FlopCount
from tests.harness import on_ranks, thorough
from tests.models import GPT
from tests.parallel.models import llama

ROWS, LENGTH = 2, 6


def config_of(stage: int, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 2000},
        **more,
    }


def batch(device: str = "meta") -> torch.Tensor:
    return torch.zeros(ROWS, LENGTH, dtype=torch.int64, device=device)


def recorded(stage: int, ranks: int = 2, accumulation: int = 1) -> Recorder:
    (planner,), _ = planners_of(GPT(), config_of(stage, accumulation), ranks, batch())
    recorder = Recorder()
    planner.record(planner.target.setting, recorder)
    return recorder


@pytest.mark.parametrize("stage", [thorough(0), 1, thorough(2), 3])
@on_ranks(2)
def test_recorded_collectives_are_those_of_an_engine(stage: int) -> None:
    events = [event for one in recorded(stage, accumulation=2).passes for _, event in one.events]
    assert not any(event.narrow for event in events if isinstance(event, Launch))
    engine = shardwise.initialize(model=GPT(), config=config_of(stage, accumulation=2)).engine
    for _ in range(3):
        start = engine.job.ledger.sequence
        for _ in range(2):
            engine.backward(loss_of(engine(batch("cpu"))))
            engine.step()
    engine.sharded.finish_gathers()
    real = [(one.op, one.size, one.sent) for one in engine.job.ledger.records(start) if one.ranks > 1]
    planned = [(one.op, one.size, one.sent) for one in events if isinstance(one, Launch)]
    large = [one for one in planned if one[1] > 200]
    assert large == [one for one in real if one[1] > 200]  # small ones have facts that only an engine has
    assert len(planned) == len(real)


def test_a_window_begins_with_the_gathers_of_the_one_before() -> None:
    first = next(event for _, event in recorded(1).passes[0].events if not isinstance(event, Operator))
    assert isinstance(first, Wait)


def test_a_recorded_window_has_the_same_memory_plan() -> None:
    (planner,), _ = planners_of(GPT(), config_of(3, 2), 2, batch())
    setting = planner.target.setting
    assert planner.plan(setting) == planner.plan(setting, recorder=Recorder())


def test_flops_are_those_of_the_profiler() -> None:
    operators = [e for _, e in recorded(0, ranks=1).passes[0].events if isinstance(e, Operator)]
    model = GPT()
    count = FlopCount(model)
    count.start()
    with count.counting():
        loss_of(model(batch("cpu"))).backward()
    count.stop()
    assert sum(operator.flops for operator in operators) == sum(count.flops.values()) > 0


@pytest.mark.parametrize("stage", [thorough(0), 3])
def test_work_is_counted_by_unit(stage: int) -> None:
    (planner,), _ = planners_of(GPT(), config_of(stage), 2, batch())
    recorder = Recorder(by_unit=True)
    planner.record(planner.target.setting, recorder)
    (one,) = recorder.passes
    operators = [event for _, event in one.events if isinstance(event, Operator)]
    launches = [event for _, event in one.events if isinstance(event, Launch)]
    assert sum(work.flops for work in one.units.values()) == sum(operator.flops for operator in operators)
    assert sum(work.moved for work in one.units.values()) == sum(operator.moved for operator in operators)
    assert sum(work.sent for work in one.units.values()) == sum(launch.sent for launch in launches)
    model = GPT()
    count = FlopCount(model)
    count.start()
    with count.counting():
        loss_of(model(batch("cpu"))).backward()
    count.stop()
    for number, block in enumerate(model.blocks):
        parts = set(block.modules())
        unit = one.units[f"blocks.{number}"]
        assert unit.flops == sum(flops for (module, _), flops in count.flops.items() if module in parts) > 0
        assert unit.sent > 0


def test_ranks_of_a_sequence_share_its_work() -> None:
    cards = Cluster.of("h100", None, 8)
    found = []
    for parts in (1, 2):
        model = llama(shared=parts > 1)
        given = micro_batch(model, ROWS, 64, pipeline=False, parts=parts)
        config = config_of(0, sequence_parallel_size=parts)
        (one,) = plan_times(model, config, cards, ranks=2, stages=[0], batch=given)
        found.append((sum(one.time.flops.values()), one.tokens))
    assert found[1][0] == pytest.approx(found[0][0] / 2, rel=0.05)
    assert found[0][1] == 2 * found[1][1] == 2 * ROWS * 64


class Names(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_what_a_dry_run_leaves_out_counts() -> None:
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "optimizer": {"type": "Lion", "params": {"lr": 1e-3}},
        "bf16": {"enabled": True},
    }
    sample, recorder = torch.zeros(ROWS, 700, dtype=torch.bfloat16), Recorder(chunks=True)
    (planner,), _ = planners_of(nn.Linear(700, 900), config, 1, sample)
    planner.record(planner.target.setting, recorder)
    planned = Counter(event.name for event in recorder.of(Operator))
    engine = shardwise.initialize(model=nn.Linear(700, 900), config=config).engine
    engine.backward(engine(sample).sum())
    with Names() as names:
        engine.step()
    engine.destroy()
    for name in ("aten.dot.default", "aten._foreach_sign_.default"):
        assert planned[name] == names.found[name] > 3, (name, planned, names.found)


def test_an_update_on_the_host_keeps_the_work_of_units() -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    given: dict[str, Any] = {"ranks": 2, "stages": [2], "batch": batch()}
    (one,) = plan_times(GPT(), config_of(2, zero_optimization=zero), Cluster.of("h100", None, 8), **given)
    assert one.time.units["blocks.0"].flops > 0


@pytest.mark.parametrize(
    ("form", "tokens"), [((8, 3, 32, 32), 1), ((8, 16, 4), 16), ((8, 5), 1)], ids=["images", "vectors", "features"]
)
def test_tokens_of_a_sample(form: tuple[int, ...], tokens: int) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(form[1:]), 2))
    config = {**config_of(0), "train_micro_batch_size_per_gpu": 8}
    given: dict[str, Any] = {"ranks": 1, "stages": [0], "batch": torch.empty(form, device="meta")}
    (one,) = plan_times(model, config, Cluster.of("h100", None, 8), **given)
    assert one.tokens == 8 * tokens


def op(seconds: float) -> Operator:
    return Operator(str(seconds), "op", 0, 1)


def launch(number: int, seconds: float, group: str = "all") -> Launch:
    return Launch(number, "all_gather", group, 2, (0, 1), int(1000 * seconds), 7, "")


def timed(events: list[Event], accumulation: int = 1, passes: int = 1, **costs: Any) -> StepTime:
    given = Costs(lambda one: float(one.signature), lambda one: one.size / 1000, **costs)
    return step_time([Pass({"forward": events})] * passes, accumulation, given)


@pytest.mark.parametrize(
    ("events", "costs", "total", "waiting"),
    [
        ([op(1), op(2)], {}, 3, 0),
        ([launch(0, 2), op(1), Wait(0)], {}, 2, 1),
        ([launch(0, 2), op(3), Wait(0)], {}, 3, 0),
        ([launch(0, 2), launch(1, 2), op(1), Wait(0), Wait(1)], {}, 4, 3),  # one after the other in a group
        ([launch(0, 2), launch(1, 2, "other"), op(1), Wait(0), Wait(1)], {}, 2, 1),
        ([op(1), launch(0, 2), op(3), Wait(0)], {"interference": 0.5}, 5, 0),
        ([op(1), op(2)], {"host": 0.25}, 3.5, 0),
        ([op(1), op(2)], {"host": 0.25, "asynchronous": True}, 3, 0),  # the device works while the host goes on
        ([op(0.1), op(0.1)], {"host": 1, "asynchronous": True}, 2, 0),
        ([launch(0, 2), op(3), Wait(0)], {"launch": 0.5}, 3.5, 0),
        ([launch(0, 4), op(3), Wait(0)], {"launch": 0.5, "asynchronous": True}, 4, 1),
        ([replace(launch(0, 2), at_once=True), Wait(0)], {"launch": 0.5}, 2, 2),
        ([op(3), launch(0, 1), Wait(0)], {"host": 0.5, "asynchronous": True}, 4, 1),  # it reads what is computed
        ([Wait(0), op(2), launch(1, 3)], {}, 5, 3),  # a step begins with a wait for the end of the step before
    ],
)
def test_clocks(events: list[Event], costs: dict[str, Any], total: float, waiting: float) -> None:
    found = timed(events, **costs)
    assert found.total == pytest.approx(total) == pytest.approx(sum(found.phases.values()))
    assert found.waiting == pytest.approx(waiting)


def test_what_was_not_measured_and_what_shares_a_link() -> None:
    found = timed([op(1), op(2), op(1)], measured=lambda one: one.signature != "2")
    assert (found.estimated, found.computing) == (2, 4)
    found = timed([launch(0, 2), launch(1, 3, "other"), Wait(0), Wait(1)], link=lambda one: "cable")
    assert found.total == 5  # groups of one link, one after the other
    assert set(found.links.values()) == {"cable"}


@pytest.mark.parametrize(("accumulation", "passes"), [(1, 1), (2, 2), (3, 3), (7, 3)])
def test_micro_batches_that_were_not_recorded_count(accumulation: int, passes: int) -> None:
    events: list[Event] = [op(1), launch(0, 0.5), Wait(0)]
    found = timed(events, accumulation, passes)
    assert found.total == pytest.approx(1.5 * accumulation)
    assert found.sent == Counter({("all_gather", "all"): 7 * accumulation})


def test_estimates() -> None:
    known = {
        "a": OperatorTime(name="mm", seconds=1.0, flops=100, moved=10),
        "b": OperatorTime(name="mm", seconds=3.0, flops=200, moved=10),
        "c": OperatorTime(name="add", seconds=2.0, flops=0, moved=50),
    }
    operators = Operators(known, Crowd(ranks=2, computing=2.0, narrow=1.5, moving=3.0))
    assert operators.seconds(Operator("a", "mm", 100, 10, "bf16")) == 1.5
    assert operators.seconds(Operator("a", "mm", 100, 10)) == 2.0
    assert operators.seconds(Operator("new", "mm", 150, 10)) == 4.0
    assert operators.seconds(Operator("new", "mul", 0, 100)) == 12.0  # as others that move memory
    assert operators.seconds(Operator("view", "t", 0, 0)) == 0.0
    collectives = Collectives([CollectiveTime(op="all_gather", ranks=2, size=size, seconds=size) for size in (10, 20)])
    assert [collectives.seconds(launch(0, size / 1000)) for size in (5, 15, 40)] == [10.0, 15.0, 40.0]
    of_16_bits = CollectiveTime(op="all_gather", ranks=2, size=10, narrow=True, seconds=7)
    collectives = Collectives(
        [*(CollectiveTime(op="all_gather", ranks=n, size=9, seconds=n) for n in (2, 8)), of_16_bits]
    )
    assert collectives.seconds(replace(launch(0, 0.01), narrow=True)) == 7.0
    assert collectives.seconds(replace(launch(0, 0.009), ranks=7)) == 8.0


def test_fewer_ranks_than_cores_crowd_less_and_more_take_turns(tmp_path: Path) -> None:
    machine = of_this_machine(torch.device("cpu"))
    machine.cores, machine.crowds = 16, [Crowd(ranks=8, computing=2.0, narrow=2.5, moving=4.5)]
    assert [machine.crowd(ranks).moving for ranks in (1, 3, 8, 16, 32)] == [1.0, 2.0, 4.5, 4.5, 9.0]
    machine.cores, machine.crowds = 2, [Crowd(ranks=4, computing=2.0, narrow=2.0, moving=2.5)]
    assert [machine.crowd(ranks).moving for ranks in (2, 4, 8)] == [1.25, 2.5, 5.0]
    machine.save(tmp_path / "machine.json")
    text = (tmp_path / "machine.json").read_text()
    (tmp_path / "machine.json").write_text(text.replace('"version": 2', '"version": 1'))
    with pytest.raises(CommandLineError, match="another version of shardwise"):
        Machine.load(tmp_path / "machine.json")


def test_every_operator_of_a_step_can_be_measured() -> None:
    recorder = recorded(3)
    events = (event for one in recorder.passes for _, event in one.events)
    operators = {event.signature: event for event in events if isinstance(event, Operator)}
    found = measure_operators(recorder.calls, operators, torch.device("cpu"), limit=30)
    assert found.keys() == {signature for signature, one in operators.items() if one.moved}
    assert all(one.seconds > 0 for one in found.values())


@pytest.mark.parametrize("measured", [False, thorough(True)])
def test_a_plan_is_made_of_a_measured_machine(measured: bool, tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    if measured:
        done = CliRunner().invoke(app, ["bench", "machine", "--nproc", "2", "--seconds", "5", "--out", str(file)])
        assert done.exit_code == 0, done.output
        machine = Machine.load(file)
        assert machine.is_here() and machine.operators
        assert {(one.op, one.ranks) for one in machine.collectives} >= {("all_gather", 2), ("reduce_scatter", 2)}
        assert [one.ranks for one in machine.crowds] == [2]
    else:
        machine = of_this_machine(torch.device("cpu"))
        machine.collectives = [
            CollectiveTime(op=op, ranks=2, size=size, seconds=1e-3)
            for op in ("all_gather", "reduce_scatter", "all_reduce")
            for size in (1, 1 << 20)
        ]
        machine.save(file)
    options = ["--ranks", "2", "--stages", "0,3", "--length", "6", "--time", str(file)]
    done = CliRunner().invoke(app, ["plan", "tests.models:GPT", *options])
    assert done.exit_code == 0, done.output
    assert "stage 3 sends " in done.output and "all_gather (data_parallel)" in done.output
    assert "rates measured here" in done.output and "of the computing is estimated" not in done.output
    machine.host_name = "elsewhere"
    for flops in (0, 100):  # to estimate from
        machine.operators[str(flops)] = OperatorTime(name="one", seconds=1e-6, flops=flops, moved=100)
    machine.save(file)
    done = CliRunner().invoke(app, ["plan", "tests.models:GPT", *options])
    assert "measured on elsewhere" in done.output


def test_what_cannot_be_planned(tmp_path: Path) -> None:
    with pytest.raises(CommandLineError, match="bench machine"):
        Machine.load(tmp_path / "none.json")
    (tmp_path / "other.json").write_text('{"version": 2}')
    with pytest.raises(CommandLineError, match="no file of"):
        Machine.load(tmp_path / "other.json")
    machine = Machine(when="", host_name="elsewhere", processor="", cores=1, device="cpu", torch="", threads=1)
    assert not machine.is_here()
    with pytest.raises(UsageError, match="bench machine --nproc 2"):
        plan_times(GPT(), config_of(0), machine, ranks=2, stages=[0], batch=batch())
    with pytest.raises(UsageError, match="batch"):
        plan_times(GPT(), config_of(0), machine, ranks=2, stages=[0], batch=None)
    offloaded = config_of(1)
    offloaded["zero_optimization"]["offload_optimizer"] = {"device": "nvme", "nvme_path": str(tmp_path)}
    with pytest.raises(UsageError, match="`shardwise plan --disk-speed`"):
        plan_times(GPT(), offloaded, machine, ranks=2, stages=[1], batch=batch())


def test_rates_of_a_gpu_say_nothing_about_the_host() -> None:
    add = OperatorTime(name="aten.add.Tensor", seconds=1e-6, flops=0, moved=1000)
    product = OperatorTime(name="aten.mm.default", seconds=1e-6, flops=1000, moved=1000)
    machine = of_this_machine(torch.device("cpu")).model_copy(update={"device": "a GPU", "operators": {"a": add}})
    given: dict[str, Any] = {"ranks": 1, "stages": [1], "batch": batch(), "limit": 5.0}
    with pytest.raises(UsageError, match="was not measured, nor any other with FLOPs"):
        plan_times(GPT(), config_of(1), machine, **given)
    machine.operators["b"] = product
    (plan,) = plan_times(GPT(), config_of(1), machine, **given)
    assert list(machine.operators) == ["a", "b"]  # none was measured on the CPU
    assert plan.estimated == pytest.approx(1.0) and plan.time.flops
    for keys in ({"offload_optimizer": {"device": "cpu"}}, {"offload_param": {"device": "cpu"}, "stage": 3}):
        offloaded = config_of(1)
        offloaded["zero_optimization"] |= keys
        with pytest.raises(UsageError, match="the time of offloaded state was not measured"):
            plan_times(GPT(), offloaded, machine, ranks=1, stages=[3], batch=batch())


def test_images_are_no_tokens_and_an_offloaded_update_keeps_the_work_of_units() -> None:
    config = config_of(1)
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    model, images = nn.Sequential(nn.Flatten(), nn.Linear(48, 4)), torch.zeros(ROWS, 3, 4, 4)
    (plan,) = plan_times(model, config, Cluster.of("h100", None, 8), ranks=2, stages=[1], batch=images)
    assert plan.tokens == plan.samples == 2 * ROWS
    assert sum(work.flops for work in plan.time.units.values()) > 0
