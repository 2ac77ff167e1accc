"""Optimizers that need more than single elements: norms of tensors (LAMB), whole matrices beside shards (Muon)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.errors import ConfigError
from shardwise.memory import Category
from shardwise.optim import Lamb, Muon
from shardwise.utils import safe_get_full_optimizer_state
from tests.harness import of_all_ranks, on_ranks
from tests.harness.training import OwnAdamW, Tensors, engine_of, masters, take_steps
from tests.models import CASES, Case, regression, squared
from tests.optim.reference import WrittenMuon

# -- LAMB --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks(2)
def test_ratios_of_all_tensors_are_known_on_every_rank_from_one_small_exchange(stage: int) -> None:
    case = CASES["gpt"]
    model = case.make()
    lamb = Lamb(model.parameters(), lr=0.01)
    for rank in range(2):
        (case.loss(model, case.data(0, 0, rank, torch.float32)) / 2).backward()
    lamb.step()
    engine = engine_of(case.make(), stage, {"type": "LAMB", "params": {"lr": 0.01}})
    engine.backward(case.loss(engine, case.data(0, 0, dist.get_rank(), torch.float32)))
    first = engine.ledger.sequence
    engine.step()
    sent = [(r.op, r.size) for r in engine.ledger.records(since=first) if r.label == "tensor_norms"]
    ratios = engine.optimizer.get_lamb_coeffs()
    assert ratios == pytest.approx(lamb.get_lamb_coeffs(), rel=1e-4)
    assert sent == [("all_reduce", 2 * len(ratios) * 8)]


# -- whole tensors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "kind"), [(1, "muon"), (3, "undeclared")])
@on_ranks(3)
def test_no_rank_holds_all(stage: int, kind: str) -> None:
    case = CASES["gpt_groups"]
    model = case.make()
    muon = kind == "muon"
    optimizer = Muon(model.named_parameters(), lr=1e-2) if muon else OwnAdamW(model.parameters(), lr=1e-2)
    engine = engine_of(model, stage, optimizer)
    take_steps(engine, case, [0])
    held = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    state = engine.accountant.live[Category.OPTIMIZER]
    matrices = [p for group in optimizer.param_groups if group.get("use_muon") for p in group["params"]]
    sizes = [p.numel() for p in model.parameters()]
    padding = 16 * 64 * 3 if muon else 0
    assert sum(of_all_ranks(held)) <= sum(sizes) + padding
    assert held <= sum(sizes) / 3 + max(sizes) + padding
    assert state <= 1.6 * sum(of_all_ranks(state)) / 3
    assert 0 < len(matrices) < 13 or not muon


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


def by_name(kind: str, stage: int) -> tuple[Tensors, Tensors]:
    """Return masters and state of a model after two steps."""
    torch.manual_seed(3)
    optimizer = {"type": kind, "params": {"muon_lr": 0.01}}
    engine = engine_of(Words(), stage, optimizer, zero={"reduce_bucket_size": 200})
    take_steps(engine, WORDS, range(2))
    states = {}
    for name, p in engine.module.named_parameters():
        for key in ("momentum_buffer", "exp_avg"):
            value = safe_get_full_optimizer_state(p, key)
            if value is not None:
                states[f"{name} {key}"] = value
    found, groups = masters(engine.module), engine.optimizer.param_groups
    engine.destroy()
    assert [(group["use_muon"], group["lr"]) for group in groups] == [(True, 0.01), (False, 3e-4)]
    assert [len(group["params"]) for group in groups] == [4, 8]
    return found, states


@on_ranks(2)
def test_muon_by_name() -> None:
    """Hidden matrices are orthogonalised; embedding, head and vectors have moments."""
    (values, states), (others, more) = by_name("muon", 0), by_name("Muon", 3)
    assert values.keys() == others.keys() and states.keys() == more.keys()
    assert all(torch.equal(value, others[name]) for name, value in values.items())
    assert all(torch.equal(value, more[name]) for name, value in states.items())
    matrices = {*(f"hidden.{n}.weight momentum_buffer" for n in range(3)), "wide.weight momentum_buffer"}
    assert {name for name in states if name.endswith("momentum_buffer")} == matrices
    assert len(states) == 12 and {"embed.weight exp_avg", "lm_head.weight exp_avg"} < states.keys()


class Stacks(nn.Module):
    """Three matrices in one parameter, of which each is a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 10)
        self.experts = nn.Parameter(torch.randn(3, 10, 10) / 3)
        self.last = nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for matrix in self.experts:
            x = x + torch.tanh(x @ matrix.T)
        return self.last(x)


STACKS = Case("stacks", Stacks, regression(7, 3), lambda model, batch: squared(model(batch["x"]), batch["y"]))


@on_ranks(2)
def test_matrices_of_a_stack_are_stepped_one_by_one() -> None:
    params = {"lr": 0.05, "weight_decay": 0.1, "stacked": ["expert"]}
    model = STACKS.make()
    groups = [
        {"params": [p for p in model.parameters() if (p.dim() > 1) == flag], "use_muon": flag} for flag in (True, False)
    ]
    written = WrittenMuon(groups, momentum=0.95, nesterov=True, ns_steps=5, betas=(0.9, 0.95), eps=1e-10, **params)
    for step in range(2):
        for rank in range(2):
            (STACKS.loss(model, STACKS.data(step, 0, rank, torch.float32)) / 2).backward()
        written.step()
        model.zero_grad()
    found = []
    for stage, device in ((1, "none"), (3, "none"), (3, "cpu")):
        zero = {"offload_optimizer": {"device": device}}
        engine = engine_of(STACKS.make(), stage, {"type": "Muon", "params": params}, zero=zero)
        take_steps(engine, STACKS, range(2))
        found.append(masters(engine.module))
        engine.destroy()
    for name, parameter in model.named_parameters():
        assert all(torch.equal(values[name], found[0][name]) for values in found), name
        torch.testing.assert_close(found[0][name], parameter.detach(), rtol=0, atol=1e-3)  # a step is of about 0.05


class WrongMethod(torch.optim.SGD):
    shardwise_sharding = "mixed"

    def shardwise_group_sharding(self, group: dict[str, Any]) -> str:
        return "half"


def test_wrong_declarations() -> None:
    model = Words()
    with pytest.raises(ConfigError, match="expected 'elementwise', 'norms' or 'whole', found 'half'"):
        shardwise.initialize(model=model, optimizer=WrongMethod(model.parameters()), config={"train_batch_size": 2})
