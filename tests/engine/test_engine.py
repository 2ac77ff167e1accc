"""The engine's own state: boundaries, counters, batch sizes, what a step reports, attributes, several engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import pytest
import torch
from torch import nn

import shardwise
from shardwise.errors import BatchSizeError, ConfigError, DesyncError, NotScalarError, SyncError, UsageError
from tests.harness import on_ranks, thorough
from tests.harness.training import SGD, engine_of


def build(stage: int = 0, **extra: Any) -> Any:
    torch.manual_seed(1)
    return engine_of(nn.Linear(3, 1), stage, SGD, **extra)


def one(engine: Any, value: float = 1.0) -> torch.Tensor:
    loss = engine(torch.full((2, 3), value)).mean()
    engine.backward(loss)
    return loss


@on_ranks(2)
def test_steps_happen_at_boundaries_only() -> None:
    engine = build(gradient_accumulation_steps=3)
    expected = [(1, 0), (2, 0), (3, 12), (4, 12), (5, 12), (6, 24)]
    for micro_steps, samples in expected:
        assert engine.is_gradient_accumulation_boundary() is (micro_steps % 3 == 0)
        one(engine)
        engine.step()
        assert engine.was_step_applied() is (micro_steps % 3 == 0)
        seen = engine.global_steps, engine.micro_steps, engine.global_samples
        assert seen == (micro_steps // 3, micro_steps, samples)


@on_ranks(2)
def test_a_step_reports_norm_clipping_and_lr() -> None:
    engine = build(gradient_clipping=0.5)
    assert engine.get_global_grad_norm() is None
    one(engine)
    engine.step()
    step = engine.last_step
    assert engine.get_global_grad_norm() == pytest.approx(2.0)  # d mean(w . 1 + b) = (1, 1, 1, 1)
    assert float(step.clip_coefficient) == pytest.approx(0.25, rel=1e-5)
    assert step.applied and step.lr == (0.1,) and step.loss_scale == 1.0


@on_ranks(2)
def test_a_script_may_add_up_losses_in_place() -> None:
    engine = build(gradient_accumulation_steps=2, anomaly_watch={"enabled": True})
    total = one(engine, 1.0).detach()
    engine.step()
    total += one(engine, 5.0).detach()
    engine.step()
    assert float(engine.last_step.loss) == pytest.approx(float(total) / 2)


@on_ranks(2)
def test_dropout_is_the_same_if_a_script_declares_boundaries_and_steps_once_a_window() -> None:
    weights = []
    for declares in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 1))
        engine = engine_of(model, 1, SGD, gradient_accumulation_steps=2, sample_seed=1)
        for micro in range(4):
            loss = engine(torch.ones(2, 64)).mean()
            if declares:
                engine.set_gradient_accumulation_boundary(micro % 2 == 1)
            engine.backward(loss)
            if micro % 2 or not declares:
                engine.step()
        assert engine.global_steps == 2
        engine.destroy()
        weights.append(model[1].weight.detach().clone())
    assert torch.equal(*weights)


@pytest.mark.parametrize("stage", [thorough(0), 3])
@on_ranks(2)
def test_the_engines_zero_grad_drops_a_window_and_the_optimizers_does_not(stage: int) -> None:
    weights = []
    for by in ("", "optimizer", "engine"):
        engine = build(stage, gradient_accumulation_steps=2)
        for value in (1.0, 5.0):
            if by:
                (engine.optimizer if by == "optimizer" else engine).zero_grad()
            one(engine, value)
            engine.step()
        engine.destroy()
        weights.append(engine.module.weight.detach().clone())
    untouched, optimizers, engines = weights
    assert torch.equal(untouched, optimizers)
    # Half of the mean of the gradients 1 and 5 is missing.
    assert torch.allclose(engines - untouched, torch.tensor(0.1 * 0.5))


@on_ranks(2)
def test_batch_sizes_change_together() -> None:
    engine = build(gradient_accumulation_steps=2)
    assert engine.get_batch_info() == (8, 2, 2)
    engine.set_train_batch_size(16)
    assert engine.get_batch_info() == (16, 2, 4)
    engine.set_train_micro_batch_size(3)
    assert engine.get_batch_info() == (24, 3, 4)
    assert [len(batch) for batch in engine.deepspeed_io(torch.ones(12, 1))] == [3, 3]
    for wrong, words in ((0, "positive multiple of 6"), (7, "nearest is 6")):
        with pytest.raises(BatchSizeError, match=words):
            engine.set_train_batch_size(wrong)


@on_ranks(1)
def test_checkpoints_have_the_batch_sizes_that_a_script_has_set(tmp_path: Path) -> None:
    engine = build(sample_seed=1)
    engine.set_train_micro_batch_size(3)
    engine.save_checkpoint(str(tmp_path))
    assert engine.load_checkpoint(str(tmp_path))[0] is not None


@on_ranks(2)
def test_the_length_of_windows_changes_between_them() -> None:
    engine = build(gradient_accumulation_steps=4)

    def window(*values: float) -> float:
        before = engine.module.weight.detach().clone()
        for value in values:
            one(engine, value)
            engine.step()
        return float((before - engine.module.weight.detach()).sum())

    whole = window(1.0, 1.0, 1.0, 1.0)
    engine.set_train_batch_size(engine.train_batch_size() // 4 * 3)
    assert engine.global_steps == 1 and window(1.0, 1.0, 1.0) == pytest.approx(whole)
    engine.set_gradient_accumulation_boundary(True)
    window(3.0)  # ends early
    engine.set_gradient_accumulation_boundary(None)
    assert engine.global_steps == 3 and window(1.0, 1.0, 1.0) == pytest.approx(whole)
    assert engine.global_steps == 4
    one(engine, 1.0)
    engine.step()
    with pytest.raises(BatchSizeError, match="has had 1 micro-batches"):
        engine.set_train_batch_size(engine.train_batch_size() * 2)


@on_ranks(1)
def test_misuse_is_explained() -> None:
    engine, sharded = build(), build(2)
    calls: list[tuple[Any, type[Exception], str]] = [
        (lambda: engine.backward(torch.ones(2, requires_grad=True)), NotScalarError, r"\(2,\)"),
        (lambda: engine.backward(3.0), UsageError, "float"),
        (lambda: engine.backward(torch.ones(())), UsageError, "does not require a gradient"),
        (lambda: sharded.no_sync().__enter__(), SyncError, "stage 2"),
    ]
    for call, kind, words in calls:
        with pytest.raises(kind, match=words):
            call()
    with engine.no_sync(), pytest.raises(SyncError, match="no_sync"):
        engine.step()
    engine.destroy()
    sharded.destroy()
    with pytest.raises(UsageError, match="has been destroyed"):
        sharded.step()


@on_ranks(2)
def test_attributes_that_clients_read() -> None:
    engine = build(1)
    assert type(engine).__name__ == "Engine" and str(engine.device) == "cpu" and engine.dist_backend == "gloo"
    assert (engine.train().training, engine.eval().training, engine.module.training) == (True, False, False)
    assert engine.in_features == 3  # of the module
    sizes = engine.world_size, engine.dp_world_size, engine.mp_world_size, engine.seq_dp_world_size
    assert sizes == (2, 2, 1, 2)
    assert engine.config["zero_optimization"]["stage"] == 1
    assert sorted(engine.param_names.values()) == ["bias", "weight"]
    assert sorted(engine.state_dict()) == ["module.bias", "module.weight"]


@runtime_checkable
class Stepped(Protocol):
    """What frameworks ask for before they step something."""

    param_groups: list[dict[Any, Any]]
    defaults: dict[Any, Any]
    state: dict[Any, Any]

    def step(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...


class WithState(nn.Linear):
    """A module whose attribute has the name of an optimizer's."""

    state = "the module's"


@on_ranks(2)
def test_an_engine_can_stand_where_an_optimizer_is_stepped() -> None:
    config = {"train_batch_size": 2, "zero_optimization": {"stage": 2}}
    for model in (nn.Linear(3, 1), WithState(3, 1)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        engine = shardwise.initialize(model=model, optimizer=optimizer, config=config)[0]
        assert isinstance(engine, Stepped)
        assert engine.param_groups is optimizer.param_groups and engine.defaults is optimizer.defaults
        assert not isinstance(model, WithState) or engine.state == "the module's"
        engine.state = "the script's"
        assert engine.state == "the script's"
        engine.destroy()
    evaluated = shardwise.initialize(model=nn.Linear(3, 1), model_parameters=[], config=config)[0]
    assert not hasattr(evaluated, "param_groups")


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        return (self.left if left else self.right)(x)


def branching(stage: int, differ: bool, zero: dict[str, Any] | None = None, **config: Any) -> None:
    engine = engine_of(Branch(), stage, SGD, zero=zero, **config)
    try:
        for step in range(2):
            left = step == 0 or not (differ and engine.global_rank == 1)
            engine.backward(engine(torch.ones(2, 3), left).mean())
            engine.step()
    finally:
        engine.destroy()


@pytest.mark.parametrize("stage", [thorough(0), 3])
@on_ranks(2)
def test_different_branches_are_followed_or_reported(stage: int) -> None:
    branching(stage, True)
    branching(stage, False, strict_sync=True)
    with pytest.raises(DesyncError, match=r"ranks \[1\].*rank 0 \['left'\], rank 1 \['right'\]"):
        branching(stage, True, strict_sync=True)
    words = r"ignore_unused_parameters.*on rank 0 right.weight, right.bias; on rank 1 right.weight, right.bias"
    with pytest.raises(UsageError, match=words):
        branching(2, False, {"ignore_unused_parameters": False})


@pytest.mark.parametrize("norm", [thorough(True), False])
@on_ranks(2)
def test_parameters_unused_on_one_rank_are_an_error_on_all(norm: bool) -> None:
    zero = {"ignore_unused_parameters": False, "compute_grad_norm": norm}
    engine = engine_of(Branch(), 2, SGD, zero=zero)
    first = engine.global_rank == 0
    loss = engine(torch.ones(2, 3), True).sum() + (0 if first else engine(torch.ones(2, 3), False).sum())
    engine.backward(loss)
    with pytest.raises(UsageError, match=r"on rank 0 right\.weight, right\.bias\. Freeze"):
        engine.step()


def interrupted(engine: Any, how: str) -> None:
    """Begin a step that the optimizer ends with an exception."""
    handle = engine.optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    handle.remove()
    assert all(p.grad is None for g in engine.optimizer.param_groups for p in g["params"])
    if how == "another pass":
        one(engine)
        with pytest.raises(UsageError, match="zero_grad"):
            engine.step()
        engine.zero_grad()
        one(engine)
        engine.step()
        one(engine)


@pytest.mark.parametrize(("stage", "clip"), [thorough(0, 0.5), thorough(2, 0.5), (3, 0.0), thorough(3, 0.5)])
@on_ranks(2)
def test_a_step_that_raised_can_be_taken_again(stage: int, clip: float) -> None:
    found = []
    for how in ("", "optimizer raises", "another pass"):
        engine = build(stage, gradient_accumulation_steps=2, gradient_clipping=clip)
        one(engine)
        engine.step()
        one(engine)
        if how:
            interrupted(engine, how)
        engine.step()
        engine.destroy()
        found.append((engine.module.weight.detach().clone(), engine.get_global_grad_norm()))
    for weight, norm in found[1:]:
        assert torch.equal(weight, found[0][0]) and norm == found[0][1]


@on_ranks(2)
def test_the_type_on_the_wire_can_be_changed() -> None:
    engine = build(2)
    sizes = []
    assert engine.communication_data_type is torch.float32
    for dtype in (None, "bf16", torch.float32):
        if dtype is not None:
            engine.communication_data_type = dtype
        one(engine)
        engine.step()
        sizes.append([r.size for r in engine.ledger.records() if r.op == "reduce_scatter"][-1])
    assert sizes[0] == sizes[2] == 2 * sizes[1]
    with pytest.raises(ConfigError, match="communication_data_type"):
        engine.communication_data_type = torch.int8
    assert engine.communication_data_type is torch.float32


@pytest.mark.parametrize("stage", [thorough(0), 3])
@on_ranks(2)
def test_conversions_that_would_take_parameters_away_are_refused(stage: int) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model.register_buffer("shared", model[1].running_mean)
    engine = engine_of(model, stage, SGD, bf16={"enabled": True})
    same = [engine.to(engine.device), engine.cpu(), engine.to("cpu"), engine.bfloat16(), engine.to(torch.bfloat16)]
    same += [engine.to(torch.device("cpu", 0))]  # another name of the same device
    assert all(e is engine for e in same)
    assert model.shared is model[1].running_mean and model.shared.dtype is torch.bfloat16
    for convert in (engine.half, engine.double, engine.float, lambda: engine.to(torch.float64)):
        with pytest.raises(UsageError, match=r"before initialize\(\) or after engine.destroy"):
            convert()
    with pytest.raises(UsageError, match=r"engine.to_empty\(\)"):
        engine.to_empty(device="cpu")
    engine.backward(engine(torch.eye(3, dtype=torch.bfloat16)).float().square().mean())
    engine.step()
    engine.destroy()
    assert engine.float().module[0].weight.dtype is torch.float32


def step(engine: Any) -> None:
    engine.backward(engine(torch.ones(2, 3)).mean())
    engine.step()


@pytest.mark.parametrize(
    ("stage", "how"), [(0, "destroyed"), (3, "wrapped again"), thorough(0, "wrapped again"), thorough(3, "destroyed")]
)
@on_ranks(2)
def test_an_engine_that_is_no_more_says_so_and_disturbs_nobody(stage: int, how: str, tmp_path: Path) -> None:
    model, directory = nn.Linear(3, 1), tmp_path
    torch.nn.init.ones_(model.weight)
    engine = engine_of(model, stage, SGD)
    step(engine)
    newer = engine_of(model, stage, SGD) if how == "wrapped again" else None
    engine.destroy()
    engine.destroy()
    for call in (
        lambda: engine(torch.ones(2, 3)),
        lambda: engine.backward(torch.ones((), requires_grad=True)),
        engine.step,
        engine.gathered,
        engine.memory_report,
        engine.module_state_dict,
        lambda: engine.no_sync().__enter__(),
        lambda: engine.save_checkpoint(directory),
        lambda: engine.load_checkpoint(directory),
        lambda: engine.save_16bit_model(directory),
        lambda: engine.export(directory),
        lambda: engine.load_weights(directory),
        lambda: engine.load_module_state_dict({}),
        engine._consolidated_16bit_state_dict,
    ):
        with pytest.raises(UsageError, match="the engine has been destroyed") as caught:
            call()
        assert ("initialize() again" in str(caught.value)) == (newer is not None)
    engine.zero_grad()
    if newer is not None:
        step(newer)
        newer.destroy()
    assert type(model.weight) is nn.Parameter
    assert torch.allclose(model.weight, torch.tensor(0.8 if newer else 0.9))


def test_forward_is_compiled_once() -> None:
    engine = shardwise.initialize(model=nn.Linear(2, 1), config={"train_batch_size": 1})[0]
    assert not engine.is_compiled
    graphs = 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    for name in ("schedule", "compiled_autograd_enabled"):
        with pytest.raises(UsageError, match=rf"engine\.compile\({name}=.*: .* not built yet"):
            engine.compile(**{name: [1]})
    engine.compile(backend=backend, compile_kwargs={"dynamic": False})
    engine.compile(backend="nonsense")  # compiled already
    assert engine.is_compiled and engine(torch.ones(1, 2)).shape == (1, 1) and graphs >= 1
    engine.destroy()
