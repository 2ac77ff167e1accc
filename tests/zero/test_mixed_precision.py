"""fp16 and bf16: masters, wires, and outputs that are scaled for a plain backward()."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.errors import UsageError
from shardwise.utils import safe_get_full_grad
from tests.harness import on_ranks, run_ranks, thorough
from tests.harness.training import (
    SGD,
    Setting,
    assert_close,
    config_of,
    engine_of,
    gradients,
    masters,
    plain,
    start,
)
from tests.models import CASES, FORMS, Case, form_case

# -- against plain loops -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt", thorough("tuple"), "object", thorough("hugging_face")])
@on_ranks(2)
def test_a_plain_backward_is_scaled_whatever_the_model_returns(name: str) -> None:
    case: Case = form_case(name) if name in FORMS else CASES[name]
    setting = Setting(stage=2, precision="fp16", scale=1024.0)
    expected = plain(case, setting, 2, steps=1).gradients[0]
    for stage in (2, 3):
        engine = start(case, setting.with_stage(stage))
        case.loss(engine, case.data(0, 0, dist.get_rank(), torch.float16)).backward()
        assert_close(gradients(engine.module), expected, 2.0**-9)
        engine.step()
        assert engine.was_step_applied()


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.tanh(self.first(x))
        return h, self.second(h)


@on_ranks(2)
def test_outputs_that_depend_on_each_other_are_scaled_once() -> None:
    """One output is computed from another inside the model: the scale must enter once."""
    torch.manual_seed(2)
    model, plainly = TwoOutputs(), TwoOutputs()
    plainly.load_state_dict(model.state_dict())
    engine = engine_of(model, 3, SGD, fp16={"enabled": True, "loss_scale": 64.0})
    for one, dtype in ((engine, torch.float16), (plainly, torch.float32)):
        first, second = one(torch.ones(2, 3, dtype=dtype))
        (first.float().sum() + second.float().sum()).backward()
    found = gradients(model)
    for name, parameter in plainly.named_parameters():
        assert torch.allclose(found[name], parameter.grad, rtol=2e-2, atol=2e-3), name


# -- what travels and what is added up ---------------------------------------------------------------------------------


DIVISIONS: list[dict[str, Any]] = [
    {},
    {"prescale_gradients": True},
    {"gradient_predivide_factor": 4.0},
    {"gradient_allreduce_op": "sum"},
]
WIRES = {None: 0.0, "fp32": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-10}
SUMS = {None: 0.0, "fp32": 0.0, "bf16": 2.0**-7, "fp16": 2.0**-9}


@pytest.mark.parametrize("stage", [thorough(0), thorough(1), 2, thorough(3)])
@on_ranks(3)
def test_combinations_of_division_wire_sum_and_clipping(stage: int) -> None:
    """Every division, and what else is drawn: the plain loop's gradient, within roundings."""
    case, world = CASES["gpt"], 3
    choose = random.Random(stage)
    for division in DIVISIONS[: 3 if stage == 3 else 4]:  # stage 3 refuses sums
        wire, sums = choose.choice(list(WIRES)), choose.choice(list(SUMS))
        extra = {**division, "communication_data_type": wire, "data_types": {"grad_accum_dtype": sums}}
        clip, accumulation = choose.choice([0.0, 0.25]), choose.choice([1, 2, 3])
        setting = Setting(stage, 300, accumulation=accumulation, clip=clip, extra=tuple(extra.items()))
        engine = start(case, setting)
        times = world if "gradient_allreduce_op" in extra else 1
        bound = 2e-6 + WIRES[wire] + SUMS[sums]
        for micro in range(accumulation):
            engine.backward(case.loss(engine, case.data(0, micro, dist.get_rank(), torch.float32)))
            if micro == 0 and accumulation > 1:
                first = plain(case, replace(setting, clip=0.0, lr=0.0, accumulation=1), world, steps=1)
                part = {name: value * times / accumulation for name, value in first.gradients[0].items()}
                assert_close(gradients(engine.module), part, bound, f"first micro-batch, {setting}")
            if micro < accumulation - 1:
                engine.step()
        loop = plain(case, replace(setting, clip=0.0, lr=0.0), world, steps=1)
        expected = {name: value * times for name, value in loop.gradients[0].items()}
        assert_close(gradients(engine.module), expected, bound, str(setting))
        engine.step()
        norm = math.sqrt(sum(float(value.double().square().sum()) for value in expected.values()))
        factor = min(1.0, clip / norm) if clip else 1.0
        stepped = {name: loop.masters[name] - 0.1 * factor * value for name, value in expected.items()}
        assert_close(masters(engine.module), stepped, bound, str(setting))
        report = engine.last_step
        assert float(report.grad_norm) == pytest.approx(norm, rel=bound)
        assert float(report.clipped_norm) == pytest.approx(norm * factor, rel=bound)
        told = report.clip_coefficient
        assert told is None if not clip else float(told) == pytest.approx(factor, rel=2 * bound)
        assert report.weight is None and report.overflow is None and report.applied
        engine.destroy()


@on_ranks(2)
def test_masters_keep_the_initial_precision() -> None:
    """Masters start from the user's fp32 values, not from their 16-bit rounding."""
    model = CASES["gpt"].make()
    wanted = {name: p.detach().clone() for name, p in model.named_parameters()}
    start(CASES["gpt"], Setting(stage=3, precision="fp16"), model)
    found = masters(model)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    with shardwise.zero.GatheredParameters(list(model.parameters())):
        assert all(torch.equal(p, wanted[n].half()) for n, p in model.named_parameters())


class Coded(nn.Module):
    """A linear layer with quantized weights, and a factor that is trained."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.codes = nn.Parameter((10 * torch.randn(6, 6, generator=generator)).to(dtype), requires_grad=False)
        self.factor = nn.Parameter(torch.ones(6))
        self.register_buffer("more", (10 * torch.randn(6, generator=generator)).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.codes.to(x.dtype) * self.factor + self.more.to(x.dtype)


@pytest.mark.parametrize(("stage", "early"), [(0, False), (3, False), (3, True)])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int16], ids=str)  # backends send neither
@on_ranks(2)
def test_frozen_codes_stay_as_those_of_the_first_rank(dtype: torch.dtype, stage: int, early: bool) -> None:
    rank, wanted, config = dist.get_rank(), Coded(dtype, 0), config_of(stage, SGD, bf16={"enabled": True})
    with shardwise.zero.Init(config_dict_or_path=config, enabled=early):
        model = Coded(dtype, rank)
    engine = shardwise.initialize(model=model, config=config)[0]
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 6, dtype=torch.bfloat16)).float().square().mean())
        engine.step()
    saved = engine.module_state_dict()
    assert (stage == 3 and rank) or torch.equal(saved["codes"].float(), wanted.codes.float())
    with engine.gathered():
        assert model.factor.dtype is torch.bfloat16 and (model.factor != 1).all()
        for found, old in ((model.codes, wanted.codes), (model.more, wanted.more)):
            assert found.dtype is dtype and torch.equal(found.float(), old.float())


# -- losses that do not come from the engine's outputs -----------------------------------------------------------------


class Keeper(nn.Module):
    """Keeps its loss beside its output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x)
        self.loss = out.float().square().mean()
        return out


def kept_loss(precision: str, stage: int, ways: dict[int, str]) -> list[Any]:
    """Two micro-batches; how rank 1 computes and differentiates its losses differs from rank 0."""
    engine = engine_of(Keeper(), stage, SGD, gradient_accumulation_steps=2, **{precision: {"enabled": True}})
    message, way = "", ways[dist.get_rank()]
    for attempt in (way, "engine"):
        for micro in range(2):
            x = torch.full((2, 3), 0.5 + micro).to(engine.module.layer.weight.dtype)
            out = (engine.module if attempt == "module" else engine)(x)
            if attempt == "engine":
                engine.backward(engine.module.loss)
            elif attempt == "output":
                out.float().square().mean().backward()
            else:
                engine.module.loss.backward()
            if not micro:
                engine.step()
        gradient = safe_get_full_grad(engine.module.layer.weight).clone()
        try:
            engine.step()
            break
        except UsageError as error:
            message = str(error)
            engine.zero_grad()
    return [message, gradient]


def test_gradients_without_the_loss_scale_are_refused_on_every_rank() -> None:
    expected = run_ranks(kept_loss, 2, "fp16", 3, {0: "engine", 1: "engine"})[0]
    assert not expected[0]
    for wrong in ("module", "kept"):
        for message, gradient in run_ranks(kept_loss, 2, "fp16", 3, {0: "output", 1: wrong}):
            assert message.startswith("engine.step(): on ranks [1] gradients"), message
            assert "engine.backward(loss)" in message
            assert torch.equal(gradient, expected[1])
    for way in ("output", "module", "kept"):
        same, other = (run_ranks(kept_loss, 2, "bf16", 3, dict.fromkeys((0, 1), w))[0] for w in (way, "engine"))
        assert not same[0]
        assert torch.equal(same[1], other[1])
