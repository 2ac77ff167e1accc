"""checkpoint(): the bits of training without it, less memory; what is not built is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise import checkpointing
from shardwise.errors import ConfigError, NotBuiltError, UsageError
from shardwise.memory import Category, track_activations
from shardwise.recompute import options
from shardwise.utils import safe_get_full_grad
from tests.harness import run_ranks
from tests.models import GPT, language_loss

Runner = Callable[..., Any]

RUNNERS: dict[str, Runner] = {
    "kept": lambda block, x: block(x),
    "recomputed": lambda block, x: checkpointing.checkpoint(block, x),
    "by keyword": lambda block, x: checkpointing.checkpoint(lambda *, debug: block(debug), debug=x),
    "other name": lambda block, x: checkpointing.non_reentrant_checkpoint(block, x),
}


def trained(runner: str, stage: int) -> tuple[list[dict[str, torch.Tensor]], int]:
    """Two steps with dropout and a frozen block: gradients, and the most that activations have taken."""
    torch.manual_seed(0)
    model = GPT(layers=4, dim=16, head="tied", dropout=0.2)
    model.run = RUNNERS[runner]
    model.blocks[0].requires_grad_(False)  # the input of the first checkpoint that trains anything needs no gradient
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    model.tokens.requires_grad_(False)
    engine = shardwise.initialize(model=model, config=config)[0]
    generator = torch.Generator().manual_seed(7 + engine.global_rank)
    torch.manual_seed(10 + engine.global_rank)
    found = []
    for step in range(2):
        batch = {"tokens": torch.randint(31, (4, 13), generator=generator)}
        if step == 0:
            engine.backward(language_loss(engine, batch))
        else:
            with track_activations(engine.accountant) as accountant:
                engine.backward(language_loss(engine, batch))
            peak = accountant.peak[Category.ACTIVATIONS]
        gradients = {n: safe_get_full_grad(p) for n, p in model.named_parameters() if p.requires_grad}
        found.append({name: value.clone() for name, value in gradients.items() if value is not None})
        engine.step()
    engine.destroy()
    return found, peak


def by_runner(stage: int) -> dict[str, Any]:
    return {runner: trained(runner, stage) for runner in RUNNERS}


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_are_the_same_and_memory_is_less(stage: int) -> None:
    for found in run_ranks(by_runner, 2, stage):
        gradients, most = found.pop("kept")
        assert len(gradients) == 2 and len(gradients[0]) > 20
        for runner, (others, peak) in found.items():
            for mine, theirs in zip(gradients, others, strict=True):
                assert mine.keys() == theirs.keys()
                assert all(torch.equal(mine[name], theirs[name]) for name in mine), runner
            assert peak < 0.6 * most, runner


class Twice(nn.Module):
    """Nested arguments and results, a keyword of torch's own, and a value that is no tensor."""

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor], scale: float, *, use_reentrant: torch.Tensor) -> Any:
        left, right = pair
        return {"sum": left * use_reentrant + right, "scaled": (left * scale).exp()}


def test_nested_arguments() -> None:
    values = [torch.randn(3, requires_grad=number != 1) for number in range(3)]

    def losses(call: Callable[..., Any]) -> list[torch.Tensor]:
        made = call(Twice(), (values[0], values[1]), 2.0, use_reentrant=values[2])
        return [made["sum"].square().sum() + made["scaled"].sum()]

    plain = torch.autograd.grad(losses(lambda module, *args, **kwargs: module(*args, **kwargs)), values[::2])
    again = torch.autograd.grad(losses(checkpointing.checkpoint), values[::2])
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(UsageError, match="expected something that can be called, found Tensor"):
        checkpointing.checkpoint(torch.ones(1), torch.ones(1))  # type: ignore[arg-type]


# -- configure ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def unconfigured() -> Iterator[None]:
    before, options._configured = options._configured, False
    yield
    options._configured = before


class Parallel:
    """A model-parallel unit of so many model-parallel ranks."""

    def __init__(self, size: int) -> None:
        self.size = size

    def get_model_parallel_world_size(self) -> int:
        return self.size

    def get_data_parallel_world_size(self) -> int:
        return 1


def test_defaults_are_taken(unconfigured: None, tmp_path: Path) -> None:
    assert not checkpointing.is_configured()
    checkpointing.configure(
        mpu_=None,
        partition_activations=False,
        contiguous_checkpointing=None,
        num_checkpoints=4,
        checkpoint_in_cpu=False,
        profile=None,
    )
    assert checkpointing.is_configured()
    section = {"partition_activations": False, "number_checkpoints": 4, "profile": False}
    written = tmp_path / "config.json"
    written.write_text(json.dumps({"train_batch_size": 2, "activation_checkpointing": section}))
    checkpointing.configure(Parallel(1), deepspeed_config=str(written))
    checkpointing.partition_activations_in_checkpoint(False)
    checkpointing.reset()
    assert checkpointing.is_configured()


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("partition_activations", "tensor-parallel ranks"),
        ("contiguous_checkpointing", "in one buffer"),
        ("checkpoint_in_cpu", "to host memory"),
        ("synchronize", "synchronizing the device"),
        ("profile", "timing checkpointed functions"),
    ],
)
def test_what_is_not_built_is_refused(unconfigured: None, option: str, reason: str) -> None:
    options_given: dict[str, Any] = {option: True}
    with pytest.raises(NotBuiltError, match=rf"configure\({option}=True\).*{reason}"):
        checkpointing.configure(None, **options_given)
    assert not checkpointing.is_configured()


def test_model_parallelism_is_refused(unconfigured: None) -> None:
    with pytest.raises(NotBuiltError, match="model-parallel size is 2"):
        checkpointing.configure(Parallel(2))
    with pytest.raises(NotBuiltError, match="tensor-parallel ranks"):
        checkpointing.partition_activations_in_checkpoint(True)
    assert not checkpointing.is_configured()


def test_a_configuration_is_checked(unconfigured: None) -> None:
    def given(section: dict[str, Any]) -> dict[str, Any]:
        return {"train_batch_size": 2, "activation_checkpointing": section}

    with pytest.raises(NotBuiltError, match=r"activation_checkpointing\.cpu_checkpointing"):
        checkpointing.configure(None, given({"cpu_checkpointing": True}))
    with pytest.raises(ConfigError, match=r"cpu_checkpoint\b"):
        checkpointing.configure(None, given({"cpu_checkpoint": True}))
    assert not checkpointing.is_configured()
