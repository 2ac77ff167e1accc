"""Our optimizers in the engine: every way of stepping gives the same bits, also again after an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise.utils import safe_get_full_fp32_param
from tests.harness import on_ranks, thorough
from tests.harness.engines import end_engines
from tests.harness.training import bits, engine_of, gradients
from tests.models import CASES

HOWS = ("", "hook", "wrapper", "scheduler", "raises", "hook after raising")


def train(stage: int, how: str) -> tuple[str, list[Any]]:
    case = CASES["odd_mlp"]
    config: dict[str, Any] = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.3}
    config["fp16"] = {"enabled": True, "loss_scale": 256}
    if how == "scheduler":
        config["scheduler"] = {"type": "ConstantLR", "params": {"factor": 1.0}}
    engine = engine_of(case.make(), stage, {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}, **config)
    optimizer = engine.optimizer
    seen: list[Any] = []

    def look(*_: Any) -> None:
        """Gradients are in `.grad`, unscaled and clipped, for those who look."""
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        seen.append(all(grad is not None and float(grad.norm()) < 0.31 for grad in grads))

    if how == "hook":
        optimizer.register_step_pre_hook(look)
    if how == "wrapper":
        inner = optimizer.step
        optimizer.step = lambda *args: (look(), inner(*args))[1]
    for step in range(3):
        for micro in range(2):
            engine.backward(case.loss(engine, case.data(step, micro, engine.global_rank, torch.float16)))
            if micro == 1 and "rais" in how and step == 1:
                seen += interrupt(engine, optimizer)
                if "hook" in how:
                    handle = optimizer.register_step_pre_hook(look)
                    engine.step()
                    handle.remove()
                    continue
            engine.step()
    return bits(engine), seen


def interrupt(engine: Any, optimizer: Any) -> list[bool]:
    """Let the step fail once before anything is stepped; the gradients are what they were."""
    before = gradients(engine.module)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    handle = optimizer.register_step_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    handle.remove()
    after = gradients(engine.module)
    return [torch.allclose(after[name], value, rtol=1e-6) for name, value in before.items()]


@pytest.mark.parametrize("stage", [thorough(0), 3])
@on_ranks(2)
def test_every_way_of_stepping_gives_the_same_bits(stage: int) -> None:
    digests = set()
    for how in HOWS:
        digest, seen = train(stage, how)
        digests.add(digest)
        assert all(seen) and bool(seen) == (how not in ("", "scheduler")), how
        end_engines()
    assert len(digests) == 1


@on_ranks(1)
def test_gradients_in_fp16_are_unscaled_in_fp32() -> None:
    """Step along gradients of 2e-8, which fp16 accumulators hold times the loss scale only."""
    keys = {"fp16": {"enabled": True, "initial_scale_power": 16}, "data_types": {"grad_accum_dtype": "fp16"}}
    lion = {"type": "Lion", "params": {"lr": 0.02}}
    engine = engine_of(torch.nn.Linear(4, 1, bias=False), 0, lion, **keys)
    before = safe_get_full_fp32_param(engine.module.weight)
    engine.backward(engine(torch.ones(2, 4, dtype=torch.float16)).float().sum() * 1e-8)
    engine.step()
    after = safe_get_full_fp32_param(engine.module.weight)
    assert torch.allclose(before - after, torch.full((1, 4), 0.02), rtol=5e-3)
