"""Job, pass group and norm group are apart: ranks with other units step together, as stages of a pipeline do."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.comm.communicator import Communicator
from shardwise.comm.domain import Domain, Domains
from shardwise.comm.ledger import Ledger
from shardwise.config.schema import Config
from shardwise.engine.stepping import stepping_of
from shardwise.memory import Accountant
from shardwise.optim.states import is_elementwise_state
from shardwise.precision.dtypes import policy_from_config
from shardwise.zero.model import ShardedModel, Sharding
from shardwise.zero.units.plan import Plan
from tests.harness import run_ranks

SIZES = [(6, 5), (7, 3, 4)]
"""Widths of the layers of each stage: their parameters differ in number and size."""


def stage(number: int) -> nn.Sequential:
    torch.manual_seed(number)
    widths = SIZES[number]
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))


def batch(number: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * number + rank)
    return torch.randn(3, SIZES[number][0], generator=generator)


def loss_of(model: nn.Module, number: int, rank: int) -> torch.Tensor:
    return (model(batch(number, rank)) ** 2).mean()


def two_stages(zero_stage: int) -> dict[str, Any]:
    """Ranks 0 and 1 train one module, ranks 2 and 3 another; gradients are clipped by the norm of both."""
    job = Communicator(None, Ledger(), torch.device("cpu"))
    number = job.rank // 2
    own = job.part([[0, 1], [2, 3]], "pass")
    domain = Domain(own)
    config = Config(train_batch_size=2, zero_optimization={"stage": zero_stage})
    model = stage(number)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded = ShardedModel(
        model,
        optimizer,
        Sharding(
            stepping=stepping_of(optimizer),
            is_elementwise=is_elementwise_state,
            plan=Plan.of(config.zero_optimization, domain),
            policy=policy_from_config(config),
            domains=Domains(domain),
            device=torch.device("cpu"),
            accountant=Accountant(),
            norm_group=job,
        ),
    )
    norms, own_norms = [], []
    for _ in range(2):
        sharded.backward([loss_of(model, number, own.rank)])
        assert sharded.sums is not None and sharded.reducer is not None
        sharded.reducer.complete_window()
        squares, facts, tensors = sharded.sums.total(sharded.sums.own_squares(), [1.0], tensors=True)
        norm = (squares.sqrt() / own.world).item()
        assert tensors is not None
        norms.append((norm, facts.item()))
        own_norms.append((tensors.sqrt() / own.world).tolist())
        sharded.step(min(1.0, 1.0 / norm) / own.world)
        sharded.end_window(applied=True)
    sharded.close()
    found = {
        "norms": norms,
        "own": own_norms,
        "values": [parameter.detach().clone() for parameter in model.parameters()],
    }
    job.destroy()
    return found


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_the_norm_is_that_of_all_pass_groups(zero_stage: int) -> None:
    found = run_ranks(two_stages, 4, zero_stage)
    models = [stage(number) for number in range(2)]
    parameters = [parameter for model in models for parameter in model.parameters()]
    expected, by_tensor = [], []
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = None
        for number, model in enumerate(models):
            for rank in range(2):
                (loss_of(model, number, rank) / 2).backward()
        by_tensor.append([[float(p.grad.norm()) for p in model.parameters()] for model in models])  # type: ignore[union-attr]
        expected.append(float(nn.utils.clip_grad_norm_(parameters, 1.0)))
        with torch.no_grad():
            for parameter in parameters:
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
    for rank, answer in enumerate(found):
        for (norm, ranks), wanted in zip(answer["norms"], expected, strict=True):
            assert norm == pytest.approx(wanted, rel=1e-6) and ranks == 4
        for own, whole in zip(answer["own"], by_tensor, strict=True):
            assert own == pytest.approx(whole[rank // 2], rel=1e-6)
        for value, parameter in zip(answer["values"], models[rank // 2].parameters(), strict=True):
            assert torch.allclose(value, parameter, rtol=1e-5, atol=1e-6)
