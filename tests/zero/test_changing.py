"""Parameters that `forward` changes in place, as codebooks and clamped weights are, keep the change at every stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise
from tests.harness import run_ranks
from tests.zero.training import masters

STEPS = 3


class Changing(nn.Module):
    """Changes a codebook, a weight of its own, and one of another module."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.ones(5), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(5))
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.codes.mul_(0.9)
            self.scale.clamp_(max=0.98)
            self.last.weight.clamp_(-0.2, 0.2)
        return self.last(self.first(x) * self.codes * self.scale)


class Model(nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.blocks, self.head = nn.ModuleList(Changing() for _ in range(2)), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x).float().mean()


class WholeSGD(torch.optim.SGD):
    """Does not say how it may be split: gets whole tensors."""


def start(stage: int, kind: type = torch.optim.SGD, precision: str = "fp32", recompute: bool = False) -> Any:
    torch.manual_seed(0)
    model = Model(recompute)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 20},
        "bf16": {"enabled": precision == "bf16"},
    }
    optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return shardwise.initialize(model=model, optimizer=optimizer, config=config)[0]


def batch(engine: Any, number: int) -> torch.Tensor:
    x = torch.arange(6.0).view(2, 3) + number + dist.get_rank()
    return x.to(engine.module.head.weight.dtype)


def values_of(engine: Any) -> dict[str, torch.Tensor]:
    with shardwise.zero.GatheredParameters(engine.module.parameters()):
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def trained(stage: int, kind: type, precision: str, recompute: bool) -> list[dict[str, torch.Tensor]]:
    engine = start(stage, kind, precision, recompute)
    for number in range(STEPS):
        engine.backward(engine(batch(engine, number)))
        engine.step()
    found = [values_of(engine), masters(engine.module)]
    engine.destroy()
    return found


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, WholeSGD])
def test_changes_within_forward_are_kept_at_every_stage(kind: type, precision: str, recompute: bool) -> None:
    expected = run_ranks(trained, 2, 0, kind, precision, recompute)[0]
    times = STEPS * (2 if recompute else 1)
    torch.testing.assert_close(expected[0]["blocks.0.codes"].float(), torch.full((5,), 0.9**times), rtol=2e-2, atol=0)
    for stage in (2, 3):
        for found in run_ranks(trained, 2, stage, kind, precision, recompute):
            for wanted, got in zip(expected, found, strict=True):
                for name, value in wanted.items():
                    assert torch.equal(value, got[name]), (stage, name)


def evaluated(stage: int) -> list[torch.Tensor]:
    """Return the codes after passes without a graph: alone, and with everything gathered around."""
    engine = start(stage)
    codes = []
    with torch.no_grad():
        engine(batch(engine, 0))
        codes.append(values_of(engine)["blocks.1.codes"])
        with engine.gathered():
            engine(batch(engine, 0))
        codes.append(values_of(engine)["blocks.1.codes"])
    engine.destroy()
    return codes


def test_changes_in_passes_that_are_not_differentiated() -> None:
    expected = [torch.ones(5) * 0.9, torch.ones(5) * 0.9 * 0.9]
    for stage in (0, 3):
        for codes in run_ranks(evaluated, 2, stage):
            torch.testing.assert_close(codes, expected)


def discarded() -> float:
    engine = start(3)
    codes = engine.module.blocks[0].codes
    with torch.no_grad(), shardwise.zero.GatheredParameters(codes):
        codes.zero_()
    value = values_of(engine)["blocks.0.codes"].sum().item()
    engine.destroy()
    return value


def test_changes_in_a_block_without_a_modifier_are_dropped() -> None:
    assert run_ranks(discarded, 2) == [5.0, 5.0]
