"""Local SGD and DiLoCo: replicas against a simulation of all replicas in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from tests.harness import of_all_ranks, on_ranks
from tests.harness.training import parameters_digest
from tests.models import CASES

CASE = CASES["gpt"]
INNER = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
}


def engine_of(stage: int = 0, inner: str = "AdamW", size: int = 1, precision: str = "fp32", **local: Any) -> Any:
    model = CASE.make()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1500},
        "local_sgd": {"enabled": True, "replica_size": size, **local},
        "bf16": {"enabled": precision == "bf16"},
    }
    return shardwise.initialize(model=model, optimizer=INNER[inner](model.parameters()), config=config)[0]


def train(engine: Any, steps: range, rank: int | None = None) -> None:
    for step in steps:
        rank = dist.get_rank() if rank is None else rank
        engine.backward(CASE.loss(engine, CASE.data(step, 0, rank, torch.float32)))
        engine.step()


class Simulated:
    """Replicas in one process, with DiLoCo's algorithm; `replicas` has the ranks of each replica."""

    def __init__(self, replicas: list[list[int]], inner: str, every: int, outer: Any) -> None:
        self.replicas, self.every = replicas, every
        self.models = [CASE.make() for _ in replicas]
        self.inner = [INNER[inner](model.parameters()) for model in self.models]
        self.agreed = CASE.make()
        self.outer = outer(list(self.agreed.parameters()))

    def step(self, number: int) -> None:
        for ranks, model, inner in zip(self.replicas, self.models, self.inner, strict=True):
            losses = [CASE.loss(model, CASE.data(number, 0, rank, torch.float32)) for rank in ranks]
            inner.zero_grad()
            (sum(losses) / len(losses)).backward()
            inner.step()
        if (number + 1) % self.every == 0:
            self.exchange()

    def exchange(self) -> None:
        groups = zip(self.agreed.parameters(), *(model.parameters() for model in self.models), strict=True)
        for agreed, *own in groups:
            agreed.grad = torch.stack([agreed.detach() - one.detach() for one in own]).mean(0)
        self.outer.step()
        for model in self.models:
            model.load_state_dict(self.agreed.state_dict())


def nesterov(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def assert_same(engine: Any, model: nn.Module, tolerance: float = 1e-5) -> None:
    found = engine.module_state_dict()
    for name, expected in model.state_dict().items():
        assert torch.allclose(found[name].float(), expected, rtol=tolerance, atol=tolerance), name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_two_replicas(stage: int) -> None:
    simulated = Simulated([[0], [1]], "AdamW", 3, nesterov)
    engine = engine_of(stage, sync_every=3)
    for step in range(9):
        simulated.step(step)
        train(engine, range(step, step + 1))
        assert_same(engine, simulated.models[dist.get_rank()])
    assert len(set(of_all_ranks(parameters_digest(engine.module)))) == 1
    engine.destroy()
