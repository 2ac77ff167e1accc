"""LAMB and the base of layer-wise optimizers, in one process: the papers' numbers, options, bad input."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.memory import Accountant, memory_sources, track_activations
from shardwise.optim import Lamb, Sharding, build, group_shardings, sharding_of
from tests.optim.reference import Lars, WrittenLamb, WrittenLars

SHAPES = [(7, 5), (5,), (), (3, 2, 4), (1,)]
DEFAULTS = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.05, "max_coeff": 2.0, "min_coeff": 0.5}


def weights(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    random = torch.Generator().manual_seed(5)
    made = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in SHAPES]
    made[1].zero_()  # a fresh bias: its norm is zero
    return [torch.nn.Parameter(value.to(dtype)) for value in made]


def gradients(step: int, dtype: torch.dtype) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(100 + step)
    return [
        torch.randn(shape, generator=random, dtype=torch.float64).mul(10.0 ** (step - 1)).to(dtype) for shape in SHAPES
    ]


LARS = {"lr": 0.1, "trust": 0.01, "momentum": 0.9, "weight_decay": 0.05}


def compare(ours: torch.optim.Optimizer, written: Any, dtype: torch.dtype, tolerance: float) -> None:
    for step in range(4):
        for optimizer in (ours, written):
            params = [p for group in optimizer.param_groups for p in group["params"]]
            for parameter, gradient in zip(params, gradients(step, dtype), strict=True):
                parameter.grad = gradient
        before = [p.grad.clone() for group in ours.param_groups for p in group["params"]]
        ours.step()
        written.step()
        for mine, theirs, gradient in zip(
            (p for group in ours.param_groups for p in group["params"]),
            (p for group in written.param_groups for p in group["params"]),
            before,
            strict=True,
        ):
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
            assert torch.equal(mine.grad, gradient)  # nobody else's memory is written over


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 3e-6)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias_correction": False},
        {"eps_inside_sqrt": True},
        {"eps_inside_sqrt": True, "bias_correction": False, "weight_decay": 0.0},
        {"max_coeff": 1e9, "min_coeff": 0.0},
    ],
)
def test_lamb_is_that_of_the_paper(options: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    ours, theirs = weights(dtype), weights(dtype)
    lamb = Lamb([{"params": ours[:3]}, {"params": ours[3:], "lr": 0.3, "max_coeff": 1.5}], **{**DEFAULTS, **options})
    groups = [{"params": theirs[:3]}, {"params": theirs[3:], "lr": 0.3, "max_coeff": 1.5}]
    written = WrittenLamb(groups, **{**DEFAULTS, **options})
    compare(lamb, written, dtype, tolerance)
    ratios = [written.state[p]["ratio"] for p in theirs]
    assert lamb.get_lamb_coeffs() == pytest.approx(ratios, rel=max(tolerance, 1e-7) * 10)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 3e-6)])
def test_another_one_on_the_base(dtype: torch.dtype, tolerance: float) -> None:
    ours, theirs = weights(dtype), weights(dtype)
    compare(Lars(ours, **LARS), WrittenLars([{"params": theirs}], **LARS), dtype, tolerance)


def test_the_documented_example() -> None:
    page = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text()
    code = next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class Lars" in block)
    ours, theirs = weights(torch.float64), weights(torch.float64)
    scope: dict[str, Any] = {"model": torch.nn.ParameterList(ours)}
    exec(code, scope)
    options = {key: value for key, value in scope["optimizer"].defaults.items() if key != "params"}
    compare(scope["optimizer"], WrittenLars([{"params": theirs}], **options), torch.float64, 1e-12)


def test_absent_gradients_are_passed_over_and_sparse_ones_refused() -> None:
    first, second, third = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    lamb = Lamb([first, second, third], lr=0.1)
    assert lamb.get_lamb_coeffs() == []
    second.grad = torch.ones(2)
    lamb.step(lambda: torch.zeros(()))
    assert torch.equal(first, torch.ones(2)) and not torch.equal(second, torch.ones(2))
    coefficients = lamb.get_lamb_coeffs()
    assert coefficients[0] == coefficients[2] == 1.0 != coefficients[1] or coefficients == [1.0, 1.0, 1.0]
    assert lamb.state[first] == {} or first not in lamb.state
    second.grad = torch.ones(2).to_sparse()
    with pytest.raises(RuntimeError, match="dense"):
        lamb.step()


def test_by_name() -> None:
    built = build("Lamb", weights(torch.float32), {"lr": 0.5, "betas": [0.8, 0.9], "max_grad_norm": 0.0}, device="cpu")
    assert type(built) is Lamb and built.defaults["betas"] == (0.8, 0.9) and built.defaults["lr"] == 0.5
    assert sharding_of(built)[0] is Sharding.NORMS and group_shardings(built) == [Sharding.NORMS]


def test_memory_of_a_step_is_that_of_adam() -> None:
    from shardwise.precision.tensornorms import TensorNorms

    found = memory_sources(torch.nn.ParameterList([torch.zeros(100_000)]), optimizer=Lamb)
    assert (found.optimizer, found.optimizer_counters) == (800_004, 4)
    for norms, least, most in ((False, 40_000, 90_000), (True, 0, 1000)):  # alone, it leaves the gradient as it is
        weight = torch.nn.Parameter(torch.ones(10_000))  # larger ones are widened in memory that all share
        weight.grad = torch.ones(10_000)
        lamb = Lamb([weight])
        if norms:
            lamb.shardwise_norms = TensorNorms.local([{"params": [weight]}], overwrites=True)
        lamb.step()
        with track_activations(Accountant()) as accountant:
            lamb.step()
        assert least <= accountant.peak_total <= most
