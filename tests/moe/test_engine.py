"""Experts divided over ranks, beneath every ZeRO stage, against one process that has all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise.errors import UsageError
from shardwise.moe import MoE
from shardwise.registry import part_of
from shardwise.utils import safe_get_full_fp32_param, safe_get_full_grad
from tests.harness import RankFailure, run_ranks
from tests.moe.models import EXPERTS, TOKENS, WIDTH, Model, batch, expert

STEPS, CLIP, RATE = 11, 0.05, 0.05
DROPS = {"k": 2, "capacity_factor": 0.7, "use_rts": False, "top2_2nd_expert_sampling": False}
KEEPS = {"k": 2, "drop_tokens": False, "top2_2nd_expert_sampling": False}
ONE = {"k": 1, "use_rts": False, "use_residual": True}


def config(stage: int, accumulation: int = 1, optimizer: str = "SGD", **more: Any) -> dict[str, Any]:
    params = {"lr": RATE, "momentum": 0.9} if optimizer == "SGD" else {"lr": 1e-2}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIP,
        "optimizer": {"type": optimizer, "params": params},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }


def started(stage: int, ep_size: int, options: dict[str, Any], accumulation: int = 1, **more: Any) -> Any:
    if ep_size > 1:
        shardwise.init_distributed(verbose=False)
    engine, *_ = shardwise.initialize(model=Model(ep_size, **options), config=config(stage, accumulation, **more))
    return engine


def steps(engine: Any, first: int, last: int) -> list[tuple[float, float, dict[str, torch.Tensor]]]:
    """Train; return loss, norm and gradients of each step, the latter by the names of tensors."""
    told = []
    for step in range(first, last):
        total = 0.0
        for micro in range(engine.gradient_accumulation_steps()):
            loss = engine(batch(step, micro, dist.get_rank()))
            engine.backward(loss)
            total += loss.item() / engine.gradient_accumulation_steps()
            if engine.is_gradient_accumulation_boundary():
                found = {part_of(p).name or n: safe_get_full_grad(p) for n, p in engine.module.named_parameters()}
            engine.step()
        told.append((total, float(engine.last_step.grad_norm), found))
    return told


def divided(stage: int, ep_size: int, options: dict[str, Any], accumulation: int) -> list[Any]:
    engine = started(stage, ep_size, options, accumulation)
    told = steps(engine, 0, STEPS)
    engine.destroy()
    return told


def alone(world: int, options: dict[str, Any], accumulation: int, dtype: torch.dtype = torch.float64) -> list[Any]:
    """The same training by one process, which has all experts and each rank's batches, one after the other."""
    model = Model(1, **options).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    told = []
    for step in range(STEPS):
        losses = []
        optimizer.zero_grad(set_to_none=False)
        for rank in range(world):
            own = [model(batch(step, micro, rank).to(dtype)) / accumulation for micro in range(accumulation)]
            (sum(own) / world).backward()  # type: ignore[union-attr]
            losses.append(sum(loss.item() for loss in own))
        grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP))
        optimizer.step()
        told.append((losses, norm, grads))
    return told


def compare(world: int, stage: int, ep_size: int, options: dict[str, Any], accumulation: int) -> None:
    """Gradients differ by 1e-6 of a tensor's norm, or where terms cancel by no more than a plain loop's, twice."""
    expected, rounded = (alone(world, options, accumulation, dtype) for dtype in (torch.float64, torch.float32))
    for rank, told in enumerate(run_ranks(divided, world, stage, ep_size, options, accumulation)):
        for step, ((loss, norm, grads), (losses, whole, others)) in enumerate(zip(told, expected, strict=True)):
            assert loss == pytest.approx(losses[rank], rel=1e-6), (rank, step)
            assert norm == pytest.approx(whole, rel=1e-6) and norm > CLIP, (rank, step)
            here = EXPERTS // ep_size
            assert sum(".deepspeed_experts." in name for name in grads) == 2 * here * 4
            for name, grad in grads.items():
                off, plain = ((some - others[name]).norm() for some in (grad, rounded[step][2][name]))
                limit = max(1e-6 * others[name].norm(), 2 * plain)
                assert off <= limit, (rank, step, name, float(off), float(limit))


@pytest.mark.parametrize(("stage", "options", "accumulation"), [(1, DROPS, 2), (3, KEEPS, 1)])
def test_four_ranks_are_one_process(stage: int, options: dict[str, Any], accumulation: int) -> None:
    compare(4, stage, 2, options, accumulation)


@pytest.mark.thorough
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("options", [DROPS, KEEPS, ONE])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_any_number_of_ranks_is_one_process(
    world: int, stage: int, options: dict[str, Any], accumulation: int, ep_size: int
) -> None:
    if ep_size <= world:
        compare(world, stage, ep_size, options, accumulation)
