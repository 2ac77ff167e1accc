"""checkpoint(): the bits of training without it, less memory; what is not built is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import shardwise
from shardwise import checkpointing
from shardwise.errors import ConfigError, UsageError
from shardwise.memory import Category, Tier, track_activations
from shardwise.parallel.tensor.group import TensorGroup
from shardwise.recompute import settings
from shardwise.recompute.partitioned import dividing
from shardwise.utils import safe_get_full_grad
from shardwise_deepspeed import checkpointing as script
from tests.harness import on_ranks, thorough
from tests.harness.training import ADAMW, engine_of
from tests.models import GPT, language_loss

Runner = Callable[..., Any]

RUNNERS: dict[str, Runner] = {
    "kept": lambda block, x: block(x),
    "recomputed": lambda block, x: checkpointing.checkpoint(block, x),
    "by keyword": lambda block, x: checkpointing.checkpoint(lambda *, debug: block(debug), debug=x),
    "other name": lambda block, x: script.non_reentrant_checkpoint(block, x),
}


def trained(runner: str, stage: int, selective: str | None = None) -> tuple[list[dict[str, torch.Tensor]], int]:
    """Two steps with dropout and a frozen block: gradients, and the most that activations have taken."""
    torch.manual_seed(0)
    model = GPT(layers=4, dim=16, head="tied", dropout=0.2)
    model.run = RUNNERS[runner]
    model.blocks[0].requires_grad_(False)  # the input of the first checkpoint that trains anything needs no gradient
    model.tokens.requires_grad_(False)
    engine = engine_of(model, stage, ADAMW, activation_checkpointing={"selective": selective})
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


@pytest.mark.parametrize("stage", [thorough(0), 3])
@on_ranks(2)
def test_gradients_are_the_same_and_memory_is_less(stage: int) -> None:
    gradients, most = trained("kept", stage)
    assert len(gradients) == 2 and len(gradients[0]) > 20
    for runner in ("recomputed", "by keyword", "other name"):
        others, peak = trained(runner, stage)
        for mine, theirs in zip(gradients, others, strict=True):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[name], theirs[name]) for name in mine), runner
        assert peak < 0.6 * most, runner
    for selective in ("every_second_matmul", "matmuls"):
        others, more = trained("recomputed", stage, selective)
        for mine, theirs in zip(gradients, others, strict=True):
            assert all(torch.equal(mine[name], theirs[name]) for name in mine), selective
        assert peak < more < most, selective
        peak = more


def test_a_retained_graph_repeats_the_numbers_of_the_tracker() -> None:
    tracker, x = checkpointing.get_cuda_rng_tracker(), torch.ones(64, requires_grad=True)

    def dropped(x: torch.Tensor) -> torch.Tensor:
        with tracker.fork():
            return F.dropout(x, 0.5).square()

    tracker.reset()
    tracker.add("model-parallel-rng", 5)
    try:
        out = checkpointing.checkpoint(dropped, x)
        first, second = (torch.autograd.grad(out.sum(), x, retain_graph=True)[0] for _ in range(2))
    finally:
        tracker.reset()
    assert torch.equal(first, 2 * out) and torch.equal(second, first) and (first == 0).any()


def test_nested_arguments() -> None:
    """With a keyword of torch's own, and a value that is no tensor."""

    def twice(pair: tuple[torch.Tensor, torch.Tensor], scale: float, *, use_reentrant: torch.Tensor) -> Any:
        left, right = pair
        return {"sum": left * use_reentrant + right, "scaled": (left * scale).exp()}

    values = [torch.randn(3, requires_grad=number != 1) for number in range(3)]

    def losses(call: Callable[..., Any]) -> list[torch.Tensor]:
        made = call(twice, (values[0], values[1]), 2.0, use_reentrant=values[2])
        return [made["sum"].square().sum() + made["scaled"].sum()]

    plain = torch.autograd.grad(losses(lambda function, *args, **kwargs: function(*args, **kwargs)), values[::2])
    again = torch.autograd.grad(losses(checkpointing.checkpoint), values[::2])
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


# -- configure ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def unconfigured() -> Iterator[None]:
    before, script._configured = (script._configured, settings.of_script()), False
    yield
    script._configured = before[0]
    settings.set_script(before[1])


def parallel(size: int) -> Any:
    """A model-parallel unit of so many model-parallel ranks."""
    return SimpleNamespace(get_model_parallel_world_size=lambda: size, get_data_parallel_world_size=lambda: 1)


def test_defaults_are_taken(unconfigured: None, tmp_path: Path) -> None:
    assert not script.is_configured()
    script.configure(None, None, partition_activations=False, num_checkpoints=4, checkpoint_in_cpu=False)
    assert script.is_configured()
    section = {"partition_activations": False, "number_checkpoints": 4, "profile": False}
    written = tmp_path / "config.json"
    written.write_text(json.dumps({"train_batch_size": 2, "activation_checkpointing": section}))
    script.configure(parallel(1), deepspeed_config=str(written))
    script.reset()
    assert script.is_configured()


def test_saved_inputs_may_be_divided(unconfigured: None) -> None:
    script.configure(parallel(1), partition_activations=True)
    assert settings.of_script().partition_activations
    x = torch.ones(2048, requires_grad=True)
    checkpointing.checkpoint(torch.sin, x).sum().backward()  # one rank has all of it
    script.partition_activations_in_checkpoint(False)
    assert not settings.of_script().partition_activations
    script.configure(parallel(2), partition_activations=True)
    with pytest.raises(UsageError, match=r"nothing connects the model-parallel ranks of configure\(mpu_\)"):
        checkpointing.checkpoint(torch.sin, x)


def test_saved_inputs_that_are_modified_are_errors_where_inputs_are_divided() -> None:
    x, mask = torch.ones(4, requires_grad=True), torch.ones(4)
    with dividing(TensorGroup(None, [[0], [1]], 0)):
        y = checkpointing.checkpoint(torch.mul, x.sin(), mask).sum()
    mask.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_a_configuration_is_checked(unconfigured: None) -> None:
    for value in ("some", True):
        section = {"train_batch_size": 2, "activation_checkpointing": {"partition_activations": value}}
        with pytest.raises(ConfigError, match="partition_activations") if value == "some" else nullcontext():
            script.configure(None, section)
        assert script.is_configured() is (value is True)
    assert settings.of_script().partition_activations


# -- what the settings do ----------------------------------------------------------------------------------------------


def blocks(layers: int = 3) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Dropout(0.3)) for _ in range(layers)))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpointing.checkpoint(block, x)
        return x.square().mean()


def step(section: dict[str, Any], **more: Any) -> tuple[int, int, dict[str, torch.Tensor]]:
    """One step: bytes on the host after the forward and after the backward pass, and the weights."""
    torch.manual_seed(2)
    config = {"train_batch_size": 512, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **more}
    engine = shardwise.initialize(model=Checkpointed(), config=config | {"activation_checkpointing": section})[0]
    loss = engine(torch.randn(512, 512))
    forward = engine.accountant.live_in(Tier.HOST)[Category.ACTIVATIONS]
    engine.backward(loss)
    backward = engine.accountant.live_in(Tier.HOST)[Category.ACTIVATIONS]
    engine.step()
    weights = {name: value.clone() for name, value in engine.module_state_dict().items()}
    engine.destroy()
    return forward, backward, weights


def test_inputs_on_the_host(unconfigured: None) -> None:
    """By the engine's configuration, or by the script's; the engine counts the bytes either way."""
    size = 512 * 512 * 4
    nowhere, _, plain = step({})
    assert nowhere == 0
    by_config = step({"cpu_checkpointing": True})
    kept = step({"cpu_checkpointing": True, "contiguous_memory_optimization": True})
    script.configure(None, checkpoint_in_cpu=True)
    by_script = step({})
    for forward, backward, weights in (by_config, kept, by_script):
        assert forward == 3 * size  # the first is the batch, which the checkpoint knows nothing of
        assert all(torch.equal(plain[name], weights[name]) for name in plain)
        assert backward == (3 * size if weights is kept[2] else 0)
    assert step({"cpu_checkpointing": True}, activation_offload={"min_bytes": size + 1})[0] == 0
    script.configure(None)
    assert step({})[0] == 0


def test_a_section_that_no_call_reads_is_warned_of(unconfigured: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="shardwise"):
        step({"cpu_checkpointing": True})
        assert "activation_checkpointing" not in caplog.text
        other = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
        with mock.patch.object(checkpointing, "checkpoint", other):
            step({})
            assert "activation_checkpointing" not in caplog.text
            step({"cpu_checkpointing": True, "selective": "matmuls"})
    assert "activation_checkpointing: cpu_checkpointing, selective had no effect" in caplog.text


def test_settings_without_an_engine(unconfigured: None) -> None:
    script.configure(None, checkpoint_in_cpu=True, contiguous_checkpointing=True, synchronize=True)
    torch.manual_seed(1)
    model, x = blocks(), torch.randn(512, 512, requires_grad=True)

    def gradients(call: Callable[..., Any]) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(9)
        y = x
        for block in model.children():
            y = call(block, y)
        return torch.autograd.grad(y.sum(), [x, *model.parameters()])

    plain = gradients(lambda block, y: block(y))
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(plain, gradients(checkpointing.checkpoint), strict=True))
    (lane,) = settings.mover()._lanes.values()
    lane.pool._take_back()
    assert len(lane.pool._kept) == 2  # the inputs of the second and the third; a leaf stays where it is
    script.reset()
    assert not lane.pool._kept


def test_times(unconfigured: None, caplog: pytest.LogCaptureFixture) -> None:
    script.configure(None, profile=True)
    checkpointing.times(clear=True)
    x = torch.randn(64, 512)
    for _ in range(2):
        out = checkpointing.checkpoint(blocks(), x).sum() + checkpointing.checkpoint(lambda *, y: y.exp(), y=x).sum()
        out.backward()
    with torch.no_grad():
        checkpointing.checkpoint(blocks(), x)
    found = checkpointing.times()
    (of_lambda,) = (times for name, times in found.items() if "lambda" in name)
    assert (found["Sequential"].calls, of_lambda.calls) == (3, 2)
    assert 0 < found["Sequential"].recompute < found["Sequential"].backward < 60 and found["Sequential"].forward > 0
    assert of_lambda.recompute == of_lambda.backward == 0  # its input needs no gradient, so that it is not called again
    assert checkpointing.times(clear=True) == found and not checkpointing.times()
    script.configure(None)
    with caplog.at_level("INFO", logger="shardwise"):
        step({"profile": True})
    assert "step=1 checkpointed Sequential: 3 calls: forward" in caplog.text
    assert not checkpointing.times()
