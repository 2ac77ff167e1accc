"""Loss scales where a gradient crosses the borders of engines and calls, and where no step follows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.errors import UsageError
from tests.harness import on_ranks, thorough
from tests.harness.training import assert_close, engine_of, make_optimizer, masters
from tests.zero.test_loops import network, noise, plain_adversarial


def fp16(scale: float) -> dict[str, Any]:
    return {"fp16": {"enabled": True, "loss_scale": scale, "auto_cast": True}}


def adversaries(*scales: float | None) -> list[Any]:
    torch.manual_seed(5)
    return [
        engine_of(model, 2, make_optimizer("momentum", model.parameters(), 0.1), **(fp16(scale) if scale else {}))
        for model, scale in zip((network(4, 9, 5), network(5, 7, 1)), scales, strict=True)
    ]


@pytest.mark.parametrize("scales", [(64.0, 1024.0), (None, 1024.0)])
@pytest.mark.parametrize("told", [True, thorough(False)])
@on_ranks(2)
def test_a_gradient_through_another_engine_has_one_scale(told: bool, scales: tuple[float | None, float]) -> None:
    generator, critic = adversaries(*scales)
    for step in range(3):
        z, real = noise(step, dist.get_rank())
        with torch.no_grad():
            fake = generator(z)
        critic.backward(critic(fake).mean() - critic(real).mean())
        critic.step()
        loss = -critic(generator(z)).mean()
        if told:
            generator.backward(loss)
        else:
            loss.backward()
        generator.step()
        critic.zero_grad()
    for engine, expected in zip((generator, critic), plain_adversarial(), strict=True):
        assert_close(masters(engine.module), expected, 2.0**-8)
        engine.destroy()


@on_ranks(2)
def test_gradients_with_another_engines_scale_are_not_stepped() -> None:
    generator, critic = adversaries(64.0, 1024.0)
    generator.backward(critic(generator(noise(0, 0)[0])).mean())
    generator.step()
    with pytest.raises(UsageError, match="another engine's backward"):
        critic.step()
    for engine in (generator, critic):
        engine.destroy()


@on_ranks(2)
def test_an_engine_without_an_optimizer_passes_gradients_on_unscaled() -> None:
    torch.manual_seed(5)
    critic = network(5, 7, 1)
    plain = copy.deepcopy(critic)
    engine = engine_of(critic, 0, None, **fp16(1024.0))
    inputs = torch.ones(2, 5)
    found = []
    for model in (plain, engine):
        x = inputs.clone().requires_grad_()
        model(x).float().sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-2, atol=1e-3)
    engine.destroy()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = torch.tanh(self.inner(x))
        return self.kept * 2


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_outputs_that_become_inputs_are_scaled_once(stage: int) -> None:
    torch.manual_seed(1)
    model = Recurrent()
    plain = copy.deepcopy(model)
    engine = engine_of(model, stage, make_optimizer("momentum", model.parameters(), 0.1), **fp16(1024.0))
    x = torch.full((2, 4), 0.5)
    engine(engine(engine(x))).float().sum().backward()
    engine.step()
    optimizer = make_optimizer("momentum", plain.parameters(), 0.1)
    plain(plain(plain(x))).sum().backward()
    optimizer.step()
    assert_close(masters(model), {name: p.detach() for name, p in plain.named_parameters()}, 2.0**-8)
    engine.destroy()


@on_ranks(2)
def test_gradients_that_are_handed_out_have_no_scale() -> None:
    """By inputs, parameters and activations inside; also with a penalty on them, and outputs changed in place."""
    torch.manual_seed(1)
    model = Recurrent()
    plain = copy.deepcopy(model)
    engine = engine_of(model, 0, make_optimizer("momentum", model.parameters(), 0.1), **fp16(1024.0))
    found = []
    for one, inner in ((plain, plain), (engine, model)):
        x = torch.full((2, 4), 0.5, requires_grad=True)
        out = one(x)
        out /= 4
        by = torch.autograd.grad(out.float().sum(), [x, inner.inner.weight, inner.kept], create_graph=True)
        found.append([gradient.detach().float() for gradient in by])
        penalty = by[0].float().square().sum()
        one.backward(penalty) if one is engine else penalty.backward()
    for given, expected in zip(*found[::-1], strict=True):
        torch.testing.assert_close(given, expected, rtol=1e-2, atol=1e-3)
    engine.step()
    make_optimizer("momentum", plain.parameters(), 0.1).step()
    assert_close(masters(model), {name: p.detach() for name, p in plain.named_parameters()}, 2.0**-8)
    engine.destroy()
