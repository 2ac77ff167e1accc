"""Several engines in one graph, and loss scales where a gradient crosses their borders and those of calls."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.errors import UsageError
from tests.harness import on_ranks, thorough
from tests.harness.training import Tensors, assert_close, engine_of, make_optimizer, masters


def fp16(scale: float) -> dict[str, Any]:
    return {"fp16": {"enabled": True, "loss_scale": scale, "auto_cast": True}}


def networks() -> list[nn.Module]:
    """Return a generator and a critic."""
    torch.manual_seed(5)
    return [nn.Sequential(nn.Linear(a, b), nn.Tanh(), nn.Linear(b, c)) for a, b, c in ((4, 9, 5), (5, 7, 1))]


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    return make_optimizer("momentum", model.parameters(), 0.1)


def adversaries(stage: int, *scales: float | None) -> list[Any]:
    return [
        engine_of(model, stage, stepped(model), zero={"reduce_bucket_size": 40}, **(fp16(scale) if scale else {}))
        for model, scale in zip(networks(), scales, strict=True)
    ]


def noise(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step * 10 + rank)
    return torch.randn(4, 4, generator=generator), torch.randn(4, 5, generator=generator)


def parameters(model: nn.Module) -> Tensors:
    return {name: p.detach() for name, p in model.named_parameters()}


def plain_adversarial() -> list[Tensors]:
    generator, critic = networks()
    optimizers = [stepped(generator), stepped(critic)]
    for step in range(3):
        batches = [noise(step, rank) for rank in range(2)]
        sum((critic(generator(z).detach()).mean() - critic(real).mean()) / 2 for z, real in batches).backward()
        optimizers[1].step()
        generator.zero_grad()
        sum(-critic(generator(z)).mean() / 2 for z, _ in batches).backward()
        optimizers[0].step()
        critic.zero_grad()
    return [parameters(generator), parameters(critic)]


@pytest.mark.parametrize(
    ("stage", "scales", "bound"),
    [(3, (None, None), 2e-6), (2, (64.0, 1024.0), 2.0**-8), (2, (None, 1024.0), 2.0**-8)],
    ids=str,
)
@pytest.mark.parametrize("told", [True, thorough(False)])
@on_ranks(2)
def test_two_engines_train_against_each_other(told: bool, stage: int, scales: tuple[Any, Any], bound: float) -> None:
    """The critic is trained on real and generated data, the generator through the critic."""
    generator, critic = adversaries(stage, *scales)
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
        assert_close(masters(engine.module), expected, bound)


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_a_critic_may_be_frozen_before_its_first_backward_pass(stage: int) -> None:
    generator, critic = adversaries(stage, None, None)
    z, real = noise(0, dist.get_rank())
    critic.module.requires_grad_(False)
    generator.backward(-critic(generator(z)).mean())
    generator.step()
    critic.module.requires_grad_(True)
    critic.backward(critic(real).mean())
    critic.step()
    plain = networks()
    batches = [noise(0, rank) for rank in range(2)]
    sum(-plain[1](plain[0](z)).mean() / 2 for z, _ in batches).backward()
    stepped(plain[0]).step()
    plain[1].zero_grad()
    sum(plain[1](real).mean() / 2 for _, real in batches).backward()
    stepped(plain[1]).step()
    for engine, expected in zip((generator, critic), plain, strict=True):
        assert_close(masters(engine.module), parameters(expected), 2e-6)


@on_ranks(2)
def test_gradients_with_another_engines_scale_are_not_stepped() -> None:
    generator, critic = adversaries(2, 64.0, 1024.0)
    generator.backward(critic(generator(noise(0, 0)[0])).mean())
    generator.step()
    with pytest.raises(UsageError, match="another engine's backward"):
        critic.step()


@on_ranks(2)
def test_an_engine_without_an_optimizer_passes_gradients_on_unscaled() -> None:
    critic = networks()[1]
    plain = copy.deepcopy(critic)
    engine = engine_of(critic, 0, None, **fp16(1024.0))
    inputs = torch.ones(2, 5)
    found = []
    for model in (plain, engine):
        x = inputs.clone().requires_grad_()
        model(x).float().sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-2, atol=1e-3)


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
    engine = engine_of(model, stage, stepped(model), **fp16(1024.0))
    x = torch.full((2, 4), 0.5)
    engine(engine(engine(x))).float().sum().backward()
    engine.step()
    optimizer = stepped(plain)
    plain(plain(plain(x))).sum().backward()
    optimizer.step()
    assert_close(masters(model), parameters(plain), 2.0**-8)


@on_ranks(2)
def test_gradients_that_are_handed_out_have_no_scale() -> None:
    """By inputs, parameters and activations inside; also with a penalty on them, and outputs changed in place."""
    torch.manual_seed(1)
    model = Recurrent()
    plain = copy.deepcopy(model)
    engine = engine_of(model, 0, stepped(model), **fp16(1024.0))
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
    stepped(plain).step()
    assert_close(masters(model), parameters(plain), 2.0**-8)
