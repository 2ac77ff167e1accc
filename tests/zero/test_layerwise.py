"""Optimizers that need more than single elements: norms of tensors (LAMB), whole matrices beside shards (Muon)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import shardwise
from shardwise.errors import ConfigError
from shardwise.memory import Category
from shardwise.optim import Lamb, Muon
from shardwise.utils import safe_get_full_optimizer_state, safe_set_full_optimizer_state
from shardwise.zero.updates.owner_sharded import owners
from tests.harness import run_ranks
from tests.harness.training import (
    Setting,
    Tensors,
    masters,
    take_steps,
)
from tests.models import CASES, Case, regression, squared

# -- LAMB --------------------------------------------------------------------------------------------------------------


def coefficients(stage: int) -> tuple[list[float], list[tuple[str, int]]]:
    case = CASES["gpt"]
    engine, *_ = shardwise.initialize(
        model=case.make(),
        config={**Setting(stage=stage).config(), "optimizer": {"type": "LAMB", "params": {"lr": 0.01}}},
    )
    engine.backward(case.loss(engine, case.data(0, 0, dist.get_rank(), torch.float32)))
    first = engine.ledger.sequence
    engine.step()
    sent = [(r.op, r.size) for r in engine.ledger.records(since=first) if r.label == "tensor_norms"]
    ratios = engine.optimizer.get_lamb_coeffs()
    engine.destroy()
    return ratios, sent


def test_ratios_of_all_tensors_are_known_on_every_rank_from_one_small_exchange() -> None:
    case = CASES["gpt"]
    model = case.make()
    lamb = Lamb(model.parameters(), lr=0.01)
    for rank in range(2):
        (case.loss(model, case.data(0, 0, rank, torch.float32)) / 2).backward()
    lamb.step()
    for stage in (0, 1, 3):
        for ratios, sent in run_ranks(coefficients, 2, stage):
            assert ratios == pytest.approx(lamb.get_lamb_coeffs(), rel=1e-4)
            assert sent == [("all_reduce", 2 * len(ratios) * 8)]


# -- whole tensors -----------------------------------------------------------------------------------------------------


@given(costs=st.lists(st.integers(0, 1000), max_size=40), world=st.integers(1, 9))
def test_owners_are_balanced(costs: list[int], world: int) -> None:
    found = owners(costs, world)
    load = [sum(cost for cost, rank in zip(costs, found, strict=True) if rank == r) for r in range(world)]
    assert len(found) == len(costs) and all(0 <= rank < world for rank in found)
    assert max(load) <= sum(costs) / world + max(costs, default=0)


class Undeclared(torch.optim.AdamW):
    """Says nothing: whole tensors."""


def holdings(kind: str, stage: int) -> tuple[int, int, int, int, int]:
    """Elements of masters and bytes of state on this rank, trained elements, the largest tensor, and what Muon has."""
    case = CASES["gpt_groups"]
    model = case.make()
    makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "Adafactor": lambda: torch.optim.Adafactor(model.parameters(), lr=1e-2),
        "undeclared": lambda: Undeclared(model.parameters(), lr=1e-2),
        "muon": lambda: Muon(model.named_parameters(), lr=1e-2),
    }
    engine, optimizer, *_ = shardwise.initialize(
        model=model, optimizer=makers[kind](), config=Setting(stage=stage).config()
    )
    take_steps(engine, case, [0])
    held = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    state = engine.accountant.live[Category.OPTIMIZER]
    matrices = [p for group in optimizer.param_groups if group.get("use_muon") for p in group["params"]]
    result = (
        held,
        state,
        sum(p.numel() for p in model.parameters()),
        max(p.numel() for p in model.parameters()),
        len(matrices),
    )
    engine.destroy()
    return result


@pytest.mark.parametrize(("world", "kind"), [(2, "muon"), (3, "undeclared")])
def test_no_rank_holds_all(kind: str, world: int) -> None:
    for stage in (1, 3):
        found = run_ranks(holdings, world, kind, stage)
        total, largest = found[0][2:4]
        padding = 16 * 64 * world if kind == "muon" else 0
        assert sum(held for held, *_ in found) <= total + padding
        for held, state, _, _, matrices in found:
            assert held <= total / world + largest + padding
            assert state <= 1.6 * sum(s for _, s, *_ in found) / world
            assert kind != "muon" or 0 < matrices < 13


# -- configuration -----------------------------------------------------------------------------------------------------


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(7, 12)
        self.hidden = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.wide = nn.Linear(12, 30)
        self.lm_head = nn.Linear(30, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.hidden:
            x = x + torch.tanh(layer(x))
        return self.lm_head(torch.tanh(self.wide(x)))


WORDS = Case("words", Words, regression(7, 3), lambda model, batch: squared(model(batch["x"]), batch["y"]))


def step(engine: Any, number: int) -> None:
    engine.backward(WORDS.loss(engine, WORDS.data(number, 0, dist.get_rank(), torch.float32)))
    engine.step()


def by_name(kind: str, params: dict[str, Any], stage: int) -> tuple[Tensors, list[Any], Tensors]:
    config = {**Setting(stage=stage, cap=200).config(), "optimizer": {"type": kind, "params": params}}
    config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    model = Words()
    WORDS_STATE = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=WORDS_STATE) / 3)
    engine, optimizer, *_ = shardwise.initialize(model=model, config=config)
    for number in range(2):
        step(engine, number)
    states = {}
    for name, p in model.named_parameters():
        for key in ("momentum_buffer", "exp_avg"):
            value = safe_get_full_optimizer_state(p, key)
            if value is not None:
                states[f"{name} {key}"] = value
                safe_set_full_optimizer_state(p, torch.full_like(value, 0.25), key)
                again = safe_get_full_optimizer_state(p, key)
                assert again is not None and bool((again == 0.25).all())
    groups = [(type(optimizer).__name__, group["use_muon"], group["lr"]) for group in optimizer.param_groups]
    result = masters(model), groups, states
    engine.destroy()
    assert [len(group["params"]) for group in optimizer.param_groups] == [4, 8]
    return result


def test_muon_by_name_on_ranks() -> None:
    found = [run_ranks(by_name, 2, kind, {"muon_lr": 0.01}, stage)[0] for kind, stage in (("muon", 0), ("Muon", 3))]
    for masters_, groups, states in found:
        assert groups == [("Muon", True, 0.01), ("Muon", False, 3e-4)]
        assert all(torch.equal(value, found[0][0][name]) for name, value in masters_.items())
        kinds = {name: name.split()[1] for name in states}
        matrices = [f"hidden.{n}.weight momentum_buffer" for n in range(3)] + ["wide.weight momentum_buffer"]
        assert sorted(name for name, kind in kinds.items() if kind == "momentum_buffer") == sorted(matrices)
        assert len(kinds) == 12 and "embed.weight exp_avg" in kinds and "lm_head.weight exp_avg" in kinds
        assert all(torch.equal(value, found[0][2][name]) for name, value in states.items())


def test_what_a_configuration_may_not_say() -> None:
    def refusal(kind: str, **params: Any) -> str:
        config = {"train_batch_size": 2, "optimizer": {"type": kind, "params": params}}
        with pytest.raises(ConfigError) as error:
            shardwise.initialize(model=Words(), config=config)
        return str(error.value)

    assert 'did you mean "lamb"' in refusal("lambb")
    assert "gradient_clipping" in refusal("Lamb", max_grad_norm=1.0)
    assert "no such variant" in refusal("lamb", amsgrad=True)
    assert "did you mean `optimizer.params.max_coeff`" in refusal("lamb", max_coef=1.0)
    assert 'expected one of "gram", "standard"' in refusal("Muon", ns_method="polar")
    assert "unsplit" in refusal("muon", per_head_muon=True)
    assert "adam_lr: expected a number >= 0" in refusal("muon", adam_lr=-1)


class WithoutMethod(torch.optim.SGD):
    shardwise_sharding = "mixed"


class WithWrongMethod(torch.optim.SGD):
    shardwise_sharding = "mixed"

    def shardwise_group_sharding(self, group: dict[str, Any]) -> str:
        return "half"


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (WithoutMethod, "no method shardwise_group_sharding"),
        (WithWrongMethod, "expected 'elementwise', 'norms' or 'whole', found 'half'"),
    ],
)
def test_wrong_declarations(cls: type[torch.optim.SGD], message: str) -> None:
    model = Words()
    with pytest.raises(ConfigError, match=message):
        shardwise.initialize(model=model, optimizer=cls(model.parameters(), lr=0.1), config={"train_batch_size": 2})
