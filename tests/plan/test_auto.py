"""Values left to "auto": chosen once for all ranks, within the budget, and built."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import shardwise
from shardwise.comm.environment import CONFIG_OVERRIDE
from shardwise.engine.choice import sample_of
from shardwise.engine.plans import MARGIN
from shardwise.errors import ConfigError, ConflictError, UsageError
from shardwise.memory import OutOfMemoryError
from shardwise.pipe import PipelineModule
from shardwise.plan.rates import Machine, OperatorTime
from tests.harness import on_ranks, thorough

ROWS, WIDTH = 8, 96
AUTO = {
    "train_batch_size": 2 * ROWS,
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": "auto", "offload_optimizer": {"device": "auto"}},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}

FIXED = {**AUTO, "train_micro_batch_size_per_gpu": ROWS}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.mean()


def model() -> nn.Module:
    torch.manual_seed(3)
    return Net()


def sample(rows: int = 1) -> torch.Tensor:
    return torch.ones(rows, 64, WIDTH)


def chosen(engine: Any) -> tuple[Any, ...]:
    config = engine._resolution.config
    offload = config.zero_optimization.offload_optimizer
    return (
        engine.sharded.sharding.plan.stage,
        offload.device,
        config.train_micro_batch_size_per_gpu,
        config.gradient_accumulation_steps,
    )


@on_ranks(2)
def test_the_cheapest_that_fits_is_built_and_trains_as_if_written() -> None:
    engine = shardwise.initialize(model(), config={**AUTO, "memory_budget": "1GiB"}, sample_batch=sample()).engine
    assert chosen(engine) == (0, "none", ROWS, 1)
    engine.destroy()
    config = {**AUTO, "memory_budget": "1700KiB"}
    engine = shardwise.initialize(model(), config=config, sample_batch=sample()).engine
    stage, device, micro, steps = chosen(engine)
    assert device == "none" and stage > 0 and micro * steps == ROWS
    planned = engine.memory_report(sample(micro)).total.planned
    assert planned is not None and planned * (1 + MARGIN) <= 1700 << 10
    (note,) = (note for note in engine._resolution.notes if note.path == "zero_optimization.stage")
    assert note.value == stage and re.search(
        r"the cheapest .* of \d+ settings that fits .*1\.66 MiB a rank", note.reason
    )
    written = {
        **AUTO,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
        "zero_optimization": {"stage": stage},
    }
    other = shardwise.initialize(model(), config=written).engine
    for _ in range(2 * steps):
        losses = [one.backward(one(sample(micro))) for one in (engine, other)]
        engine.step()
        other.step()
        assert torch.equal(*losses)
    engine.destroy()
    other.destroy()


def test_groups_of_generators_and_keys_of_the_override_are_those_of_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are used twice where a plan chooses: for the plan, and for the engine."""
    (tmp_path / "keys.json").write_text(json.dumps({"zero_optimization": {"stage": "auto"}}))
    monkeypatch.setenv(CONFIG_OVERRIDE, str(tmp_path / "keys.json"))
    net = model()
    groups = [{"params": layer.parameters(), "lr": 0.1} for layer in net.layers]
    config = {**FIXED, "zero_optimization": {"stage": 3}, "memory_budget": "1GiB"}
    engine = shardwise.initialize(net, model_parameters=groups, config=config, sample_batch=sample()).engine
    (note,) = (note for note in engine._resolution.notes if note.path == "zero_optimization.stage")
    assert engine.sharded.sharding.plan.stage == note.value == 0
    assert all(group["params"] for group in engine.optimizer.param_groups)
    engine.destroy()


@on_ranks(2)
def test_state_goes_to_the_host_before_micro_batches_become_small() -> None:
    config = {**AUTO, "train_micro_batch_size_per_gpu": 1, "memory_budget": "900KiB"}
    engine = shardwise.initialize(model(), config=config, sample_batch=sample()).engine
    assert chosen(engine)[1:] == ("cpu", 1, ROWS)
    engine.destroy()


@on_ranks(2)
def test_a_budget_in_which_nothing_fits_is_refused_with_the_least() -> None:
    with pytest.raises(OutOfMemoryError, match=r"none fits into 1\.00 KiB .* The least: stage \d, .* needs \d"):
        shardwise.initialize(model(), config={**FIXED, "memory_budget": "1KiB"}, sample_batch=sample())


def test_without_a_sample_activations_are_said_to_be_missing() -> None:
    engine = shardwise.initialize(model(), config=AUTO).engine
    assert chosen(engine) == (0, "none", 2 * ROWS, 1)
    assert "pass initialize(sample_batch=...)" in engine._resolution.notes[-1].reason
    engine.destroy()


def test_a_sample_of_the_training_data_is_taken() -> None:
    data = [sample()[0] for _ in range(2 * ROWS)]
    zero = {"stage": "auto", "offload_optimizer": {"device": "none"}}
    config = {**AUTO, "zero_optimization": zero, "memory_budget": "1300KiB"}
    engine = shardwise.initialize(model(), config=config, training_data=data).engine
    assert chosen(engine)[2] < 2 * ROWS and next(iter(engine.training_dataloader)).shape[0] == chosen(engine)[2]
    engine.destroy()


def test_a_sample_that_only_the_script_can_split_is_not_taken() -> None:
    data = TensorDataset(torch.ones(2, 6), torch.ones(2))
    assert sample_of(None, data, None, 2) is None
    assert [part.shape for part in sample_of(None, data, None, 1)] == [(1, 6), (1,)]


class Unreadable(list[torch.Tensor]):
    """A dataset whose files only worker processes may open."""

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("a sample was read")


def test_training_data_is_read_only_for_a_choice() -> None:
    data = Unreadable([sample()[0] for _ in range(2 * ROWS)])
    fixed = {"train_batch_size": 2 * ROWS, "train_micro_batch_size_per_gpu": ROWS, "optimizer": AUTO["optimizer"]}
    shardwise.initialize(model(), config=fixed, training_data=data).engine.destroy()
    with pytest.raises(AssertionError, match="a sample was read"):
        shardwise.initialize(model(), config={**AUTO, "memory_budget": "1300KiB"}, training_data=data)


class Indexed(Net):
    """It runs with all of its layers only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(6):
            x = self.layers[number](x).relu()
        return x.mean()


class OnValues(Net):
    """It does not run on fake tensors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * x.sum().item()


@pytest.mark.parametrize(("kind", "known"), [thorough(Net, True), (Indexed, True), (OnValues, False)])
def test_models_that_take_no_targets_or_all_layers_or_values(kind: type[Net], known: bool) -> None:
    data = TensorDataset(sample(2 * ROWS), torch.zeros(2 * ROWS))
    zero = {"stage": "auto", "offload_optimizer": {"device": "none"}}
    config = {**AUTO, "zero_optimization": zero, "memory_budget": "1300KiB"}
    engine = shardwise.initialize(kind(), config=config, training_data=data).engine
    reason = next(note.reason for note in engine._resolution.notes if note.path == "zero_optimization.stage")
    assert (chosen(engine)[2] < 2 * ROWS) is known and ("the model raises" in reason) is not known
    engine.destroy()


@on_ranks(2)
def test_any_error_of_planning_is_raised_on_all_ranks() -> None:
    config = {**AUTO, "cost_budget": {"amount": 1, "rank_hour": 1.0, "steps": 1, "rates": "absent.json"}}
    with pytest.raises(UsageError, match=r"CommandLineError: .*absent\.json"):
        shardwise.initialize(model(), config=config, sample_batch=sample())


def machine(tmp_path: Any) -> str:
    facts = dict(when="now", host_name="elsewhere", processor="p", cores=2, device="cpu", torch="2", threads=1)
    add = OperatorTime(name="aten.add.Tensor", seconds=1e-3, flops=0, moved=1000)
    product = OperatorTime(name="aten.addmm.default", seconds=1.0, flops=10**6, moved=1000)
    file = tmp_path / "machine.json"
    Machine(**facts, operators={"a": add, "b": product}).save(file)
    return str(file)


def test_a_training_that_costs_too_much_does_not_begin(tmp_path: Any) -> None:
    budget = {"amount": 1e-9, "rank_hour": 2.0, "steps": 10, "rates": machine(tmp_path)}
    with pytest.raises(ConfigError, match=r"cost_budget.amount: 10 steps of .* pay for 0 steps"):
        shardwise.initialize(model(), config={**FIXED, "cost_budget": budget}, sample_batch=sample())
    budget["amount"] = 1e9
    engine = shardwise.initialize(model(), config={**FIXED, "cost_budget": budget}, sample_batch=sample()).engine
    assert "the fastest by " in engine._resolution.notes[-1].reason
    engine.destroy()
    with pytest.raises(UsageError, match="sample_batch"):
        shardwise.initialize(model(), config={**AUTO, "cost_budget": budget})


@pytest.mark.parametrize(
    ("more", "kind", "message"),
    [
        ({"memory_budget": "1GiB", "memory_limits": {"device": "2GiB"}}, ConflictError, "the same limit"),
        ({"cost_budget": {"amount": 3}}, ConfigError, "needs `cost_budget.steps`"),
    ],
)
def test_budgets_that_contradict(more: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        shardwise.initialize(model(), config={**AUTO, **more})


def test_pipelines_are_not_chosen_when_they_are_built() -> None:
    with pytest.raises(ConfigError, match="shardwise plan --pp"):
        shardwise.initialize(PipelineModule([nn.Linear(4, 4)], loss_fn=nn.MSELoss()), config=AUTO)


def test_a_pipeline_takes_the_micro_batch_of_the_batch_equation() -> None:
    config = {**AUTO, "zero_optimization": {"stage": 1}}
    pipeline = PipelineModule([nn.Linear(4, 4)], loss_fn=nn.MSELoss())
    data = TensorDataset(torch.ones(2 * ROWS, 4), torch.ones(2 * ROWS, 4))
    engine = shardwise.initialize(pipeline, config=config, training_data=data).engine
    assert engine.train_micro_batch_size_per_gpu() == 2 * ROWS
    engine.destroy()


@pytest.mark.parametrize("budget", ["1GiB", "1100KiB"])
def test_parameters_are_offloaded_without_the_optimizer(budget: str) -> None:
    zero = {"stage": "auto", "offload_param": {"device": "cpu" if budget == "1GiB" else "auto"}}
    config = {**FIXED, "train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "memory_budget": budget}
    engine = shardwise.initialize(model(), config=config, sample_batch=sample()).engine
    section = engine._resolution.config.zero_optimization
    assert (section.stage, section.offload_param.device) == (3, "cpu")
    assert section.offload_optimizer is None or section.offload_optimizer.device == "none"
    engine.destroy()
