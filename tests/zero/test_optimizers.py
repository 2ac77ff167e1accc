"""Kinds of optimizers, ways of giving them, state that they already have, and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.config import names as known
from shardwise.errors import ConfigError, UsageError
from shardwise.optim import build
from shardwise.utils import safe_get_full_optimizer_state
from tests.harness import on_ranks, run_ranks, thorough
from tests.harness.training import (
    Setting,
    Tensors,
    assert_close,
    assert_no_worse,
    digest,
    each,
    engine_of,
    make_optimizer,
    masters,
    parameters_digest,
    plain,
    take_steps,
)
from tests.models import CASES, GPT, Case, language, language_loss, regression, regression_loss

WITH_BIASES = Case("with_biases", lambda: nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3)),
                   regression(5, 3), regression_loss)  # fmt: skip
NAMES = sorted({*known.NATIVE_OPTIMIZERS, *known.torch_optimizers()} - known.UNUSABLE_OPTIMIZERS.keys() - {"Muon"})


def options_of(name: str) -> dict[str, Any]:
    return {"lr": 1e-2, "bias_correction": True} if name in ("adam", "adamw") else {"lr": 1e-2}


# An optimizer of each way of sharding.
@pytest.mark.parametrize("names", [["lamb", "muon", "onebitadam", "Adafactor", "Rprop"], thorough(NAMES)])
@on_ranks(2)
def test_every_name_trains_at_every_stage(names: list[str]) -> None:
    assert {*names} <= {*NAMES}
    for name in names:

        def make(groups: Any, name: str = name) -> torch.optim.Optimizer:
            return build(name, groups, options_of(name), device="cpu")

        loop, exact = (plain(WITH_BIASES, Setting(), 2, 2, wide=wide, optimizer=make) for wide in (False, True))
        digests = set()
        for stage in (0,) if name in known.ONEBIT_STAGES else (0, 3):
            config = {**Setting(stage=stage).config(), "optimizer": {"type": name, "params": options_of(name)}}
            engine, *_ = shardwise.initialize(model=WITH_BIASES.make(), config=config)
            take_steps(engine, WITH_BIASES, range(2))
            found = masters(engine.module)
            digests.add(digest(list(found.values())) + parameters_digest(engine.module))
            # Orthogonalisation amplifies rounding of small singular values, in whichever order sums are formed.
            slack = 5e-5 if name == "muon" else 3e-7
            assert_no_worse(found, loop.masters, exact.masters, name, slack=slack)
            engine.destroy()
        assert len(digests) == 1, name


# -- state that an instance already has --------------------------------------------------------------------------------


def warmed_up(kind: str, case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model after two plain steps on rank 0's data, with its optimizer."""
    model = case.make()
    optimizer = make_optimizer(kind, case.groups(model), 1e-2)
    for step in range(2):
        optimizer.zero_grad(set_to_none=False)
        case.loss(model, case.data(100 + step, 0, 0, torch.float32)).backward()
        optimizer.step()
    return model, optimizer


# An Adam step divides by a square root that may be small, and Muon's iteration amplifies rounding of the gradient.
@pytest.mark.parametrize(("kind", "bound"), [("own Adagrad", 2e-5), thorough("subclass", 2e-5), ("Muon", 2e-3)])
@on_ranks(2)
def test_existing_state_is_sharded_with_its_optimizer(kind: str, bound: float) -> None:
    case = CASES["gpt_groups"]
    plainly, optimizer = warmed_up(kind, case)
    for step in range(2):
        optimizer.zero_grad(set_to_none=False)
        for rank in range(2):
            (case.loss(plainly, case.data(step, 0, rank, torch.float32)) / 2).backward()
        optimizer.step()
    expected = {name: p.detach() for name, p in plainly.named_parameters()}
    digests = set()
    for stage, cap in ((0, None), (3, 50)):
        model, optimizer = warmed_up(kind, case)
        config = Setting(stage, cap).config()
        engine, same, *_ = shardwise.initialize(model=model, optimizer=optimizer, config=config)
        assert same is optimizer is engine.optimizer
        take_steps(engine, case, range(2))
        found = masters(engine.module)
        engine.destroy()
        assert_close(found, expected, bound, kind)
        digests.add(digest(list(found.values())))
    assert len(digests) == 1


@on_ranks(2)
def test_step_counts_may_differ_between_parameters() -> None:
    """The second layer was used in every plain step, the first one in none but the last."""

    def made(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for step in range(steps):
            optimizer.zero_grad()
            hidden = model[0](torch.ones(2, 3)) if step >= 2 else torch.ones(2, 5)
            model[1](hidden).square().sum().backward()
            optimizer.step()
        return model, optimizer

    model, optimizer = made(3)
    engine = engine_of(model, 3, optimizer)
    engine.backward(engine(torch.ones(2, 3)).square().sum())
    engine.step()
    expected, plainly = made(4)
    assert_close(masters(model), {n: p.detach() for n, p in expected.named_parameters()}, 1e-6)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        state = safe_get_full_optimizer_state(ours, "exp_avg_sq")
        assert state is not None and torch.allclose(state, plainly.state[theirs]["exp_avg_sq"], rtol=1e-5)


@on_ranks(2)
def test_state_in_16_bits_goes_on_in_fp32() -> None:
    """An instance that has stepped bf16 parameters goes on with fp32 masters and state."""
    torch.manual_seed(3)
    model = nn.Linear(5, 3).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 5, dtype=torch.bfloat16)).float().square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    engine = engine_of(model, 2, optimizer, bf16={"enabled": True})
    losses = []
    for _ in range(2):
        loss = engine(torch.ones(2, 5, dtype=torch.bfloat16)).float().square().sum()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.float32}
    assert losses[1] < losses[0]


class Assigning(torch.optim.Optimizer):
    """Gives each parameter new memory."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * p.grad


class AssigningByElement(Assigning):
    shardwise_sharding = "elementwise"


@pytest.mark.parametrize("world", [1, 2])
@on_ranks("world")
def test_an_optimizer_may_assign_data(world: int) -> None:
    expected = plain(WITH_BIASES, Setting(), world, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1)).masters
    for kind, stage in itertools.product((Assigning, AssigningByElement), (0, 2)):
        engine = engine_of(WITH_BIASES.make(), stage, kind)
        take_steps(engine, WITH_BIASES, range(3))
        found = masters(engine.module)
        assert_close(found, expected, 1e-6)
        assert parameters_digest(engine.module) == digest(list(found.values()))
        engine.destroy()


class Evaluating(torch.optim.SGD):
    """Has other parameters for evaluation, as schedule-free optimizers do."""

    @torch.no_grad()
    def eval(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0)

    def train(self) -> None:
        """Keep the parameters."""


class EvaluatingByElement(Evaluating):
    shardwise_sharding = "elementwise"


@on_ranks(2)
def test_the_model_has_what_an_optimizer_writes_for_evaluation() -> None:
    for kind, stage in ((Evaluating, 0), (Evaluating, 1), (EvaluatingByElement, 1), (EvaluatingByElement, 3)):
        engine = engine_of(nn.Linear(5, 3), stage, lambda ps, kind=kind: kind(ps, lr=0.1), bf16={"enabled": True})
        x = torch.ones(2, 5, dtype=torch.bfloat16)
        engine.backward(engine(x).square().sum())
        engine.step()
        assert engine(x).any()
        engine.optimizer.eval()
        assert not engine(x).any()
        engine.destroy()
        assert "eval" not in vars(engine.optimizer)


@on_ranks(2)
def test_an_optimizer_that_stays_in_its_mode_publishes_nothing() -> None:
    """Trainers call train() for each micro-batch."""
    engine = engine_of(nn.Linear(5, 3), 1, lambda ps: Evaluating(ps, lr=0.1), bf16={"enabled": True})
    for group in engine.optimizer.param_groups:
        group["train_mode"] = False
    engine.ledger.reset()
    engine.optimizer.eval()
    assert not engine.ledger.totals
    engine.optimizer.train()
    assert engine.ledger.totals


# -- ways of giving an optimizer ---------------------------------------------------------------------------------------


def train_given(way: str) -> Tensors:
    case = CASES["gpt_groups"]
    model = case.make()
    groups = case.groups(model)
    config = Setting(stage=3).config()
    optimizer: Any = None
    parameters: Any = None
    if way == "instance":
        optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True)
    elif way == "class":
        optimizer, parameters = torch.optim.AdamW, [{"lr": 1e-2, **group} for group in groups]
    elif way == "callable":
        optimizer, parameters = (lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True)), groups
    else:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}}
        parameters = groups if way == "config" else None
    engine, built, *_ = shardwise.initialize(
        model=model, optimizer=optimizer, model_parameters=parameters, config=config
    )
    assert built is engine.optimizer and (way != "instance" or built is optimizer)
    assert type(built).__name__ == "AdamW"
    options = [(group["lr"], group["weight_decay"]) for group in built.param_groups]
    assert options == ([(1e-2, 0.01)] if way == "all" else [(1e-2, 0.1), (3e-2, 0.0)])
    take_steps(engine, case, range(3))
    return masters(model)


def test_instance_class_callable_and_config_are_the_same() -> None:
    ways = ("instance", "class", "callable", "config", "all")
    expected, *others, _ = run_ranks(each, 2, train_given, [(way,) for way in ways])[0]
    for found in others:
        for name, value in expected.items():
            # The class is built without fused=True, whose rounding differs.
            assert torch.allclose(found[name], value, rtol=1e-4, atol=1e-6), name


@on_ranks(2)
def test_groups_keep_their_options_and_are_edited_in_place() -> None:
    model = GPT(layers=1, head="own")
    halves = list(model.parameters())
    optimizer = torch.optim.SGD([{"params": halves[:3], "name": "first"}, {"params": halves[3:]}], lr=0.1)
    optimizer.add_param_group({"params": [], "name": "nothing", "lr": 0.7})
    identity = [id(group) for group in optimizer.param_groups]
    engine, *_ = shardwise.initialize(model=model, optimizer=optimizer, config=Setting(stage=2).config())
    assert [id(group) for group in optimizer.param_groups] == identity
    optimizer.param_groups[0]["lr"] = 0.0
    before = masters(model)
    loss = language_loss(engine, language(torch.Generator().manual_seed(1), 1))
    engine.backward(loss)
    engine.step()
    after = masters(model)
    names = [name for name, _ in model.named_parameters()]
    moved = [name for name in names if not torch.equal(before[name], after[name])]
    assert len(moved) > 5 and set(moved) <= set(names[3:])
    assert engine.get_lr() == [0.0, 0.1, 0.7]
    assert [group.get("name") for group in optimizer.param_groups] == ["first", None, "nothing"]


# -- refusals ----------------------------------------------------------------------------------------------------------


class Named(torch.optim.SGD):
    """An optimizer that keeps the names of what its constructor got."""

    def __init__(self, parameters: list[tuple[str, nn.Parameter]], lr: float) -> None:
        super().__init__([parameter for _, parameter in parameters], lr)
        self.chosen = parameters


class Captured(Named):
    """An optimizer that may step what its constructor got."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize(("kind", "warned"), [(Named, False), (Captured, True)])
def test_parameters_that_an_optimizer_keeps_are_named(
    kind: type[Named], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(3, 2)
    engine = shardwise.initialize(model, kind([*model.named_parameters()], 0.1), config=Setting().config()).engine
    engine.destroy()
    assert ("keeps parameters of the model in its attribute 'chosen'" in caplog.text) is warned


@on_ranks(2)
def test_what_cannot_be_sharded_is_refused_with_the_reason() -> None:
    model, extra = nn.Linear(3, 2), nn.Parameter(torch.zeros(2))
    for optimizer, error, words in (
        (torch.optim.LBFGS(model.parameters()), ConfigError, "LBFGS.*inner products"),
        (torch.optim.SparseAdam(model.parameters()), ConfigError, "SparseAdam.*use Adam"),
        (torch.optim.SGD([*model.parameters(), extra], lr=0.1), UsageError, r"group 0.*\(2,\).*not in the model"),
    ):
        with pytest.raises(error, match=f"(?s){words}"):
            shardwise.initialize(model=model, optimizer=optimizer, config=Setting(stage=1).config())
        assert all(type(p) is nn.Parameter for p in model.parameters())
