"""Loops of reinforcement learning from feedback: several engines in one process, against one process without any.

PPO as trainers write it: an actor that generates with gathered weights, a critic, a reference and a reward model,
forward passes of other lengths under no_grad between steps, state off the device between phases, and a moving average
of parameters. GRPO with a loss that takes the head's weight itself, called through the engine.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardwise
from shardwise.zero import GatheredParameters
from shardwise.zero.units.status import ZeroParamStatus
from tests.harness import on_ranks, thorough
from tests.harness.training import config_of, loop, masters
from tests.models import GPT

ROWS, PROMPT, EPOCHS, ROUNDS, BETA = 2, 4, 2, 2, 0.9
PAD = 0
Tensors = dict[str, torch.Tensor]


class Policy(nn.Module):
    """A language model in two parts, as those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT(layers=2, head="functional")
        self.lm_head = nn.Linear(12, 31, bias=False)
        self.model.forward = MethodType(_hidden, self.model)  # type: ignore[method-assign]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.model(tokens))


class Critic(nn.Module):
    """Value of each position."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.value = Policy(), nn.Linear(31, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.value(self.body(tokens)).squeeze(-1)


def _hidden(gpt: GPT, tokens: torch.Tensor) -> torch.Tensor:
    x = gpt.tokens(tokens) + gpt.places.weight[: tokens.shape[1]]
    for block in gpt.blocks:
        x = block(x)
    return gpt.norm(x)


def built() -> dict[str, nn.Module]:
    torch.manual_seed(11)
    actor, critic = Policy(), Critic()
    models = {"actor": actor, "critic": critic, "reference": copy.deepcopy(actor), "reward": copy.deepcopy(critic)}
    for model in models.values():  # the instance's forward is bound to the module that was copied
        body = model.model if isinstance(model, Policy) else model.body.model
        body.forward = MethodType(_hidden, body)  # type: ignore[method-assign]
    with torch.no_grad():
        models["reference"].lm_head.weight.mul_(0.9)
        models["reward"].value.weight.mul_(-2.0)
    return {**models, "average": copy.deepcopy(actor)}


def prompts(number: int, rank: int) -> torch.Tensor:
    return torch.randint(1, 31, (ROWS, PROMPT), generator=torch.Generator().manual_seed(40 * number + rank))


def new_tokens(number: int, rank: int) -> int:
    return 3 + (number + 2 * rank) % 3  # ranks generate different numbers of tokens


def generated(model: Callable[[torch.Tensor], torch.Tensor], number: int, rank: int) -> torch.Tensor:
    ids = prompts(number, rank)
    with torch.no_grad():
        for _ in range(new_tokens(number, rank)):
            ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
    return ids


def log_probs(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Of the tokens after the prompt."""
    found = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return found[:, PROMPT - 1 :]


class Experience:
    """What a round of one rank learns from."""

    def __init__(self, run: Callable[[str, torch.Tensor], torch.Tensor], ids: torch.Tensor) -> None:
        with torch.no_grad():
            self.ids = ids
            self.old = log_probs(run("actor", ids), ids)
            against = self.old - log_probs(run("reference", ids), ids)
            self.values = run("critic", ids)[:, PROMPT:]
            rewards = -0.1 * against
            rewards[:, -1] += run("reward", ids)[:, -1]
            self.returns = rewards.flip(1).cumsum(1).flip(1)
            advantages = self.returns - self.values
            self.advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-4)


def policy_loss(logits: torch.Tensor, seen: Experience) -> torch.Tensor:
    ratio = (log_probs(logits, seen.ids) - seen.old).exp()
    return -torch.minimum(ratio * seen.advantages, ratio.clamp(0.8, 1.2) * seen.advantages).mean()


def value_loss(values: torch.Tensor, seen: Experience) -> torch.Tensor:
    return (values[:, PROMPT:] - seen.returns).square().mean()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4, foreach=False)


# -- PPO ---------------------------------------------------------------------------------------------------------------


def plain_ppo(ranks: int) -> dict[str, Tensors]:
    models = built()
    optimizers = {name: optimizer_of(models[name]) for name in ("actor", "critic")}
    for number in range(ROUNDS):
        texts = [generated(models["actor"], number, rank) for rank in range(ranks)]
        seen = [Experience(lambda name, ids: models[name](ids), ids) for ids in texts]
        for _ in range(EPOCHS):
            for name, loss in (("actor", policy_loss), ("critic", value_loss)):
                optimizers[name].zero_grad()
                for one in seen:
                    (loss(models[name](one.ids), one) / ranks).backward()
                optimizers[name].step()
            _average(models["actor"].parameters(), models["average"].parameters())
    return {name: {key: p.detach() for key, p in models[name].named_parameters()} for name in models}


def _average(own: Iterable[nn.Parameter], average: Iterable[nn.Parameter]) -> None:
    with torch.no_grad():
        for parameter, mean in zip(own, average, strict=True):
            mean.data.copy_(BETA * mean.data + (1 - BETA) * parameter.data)


def gathered_average(own: nn.Module, average: nn.Module) -> None:
    """As OpenRLHF writes it: parameters that are elsewhere are gathered pair by pair."""
    for parameter, mean in zip(own.parameters(), average.parameters(), strict=True):
        pair = [p for p in (parameter, mean) if getattr(p, "ds_status", None) == ZeroParamStatus.NOT_AVAILABLE]
        with GatheredParameters(pair, modifier_rank=0, enabled=bool(pair)):
            _average([parameter], [mean])


def engines_of(stage: int) -> dict[str, Any]:
    models = built()
    found = {}
    for name, model in models.items():
        trained = name in ("actor", "critic")
        config = config_of(stage if trained else 3, rows=ROWS, zero={"stage3_prefetch_bucket_size": 500})
        optimizer = optimizer_of(model) if trained else None
        if not trained:
            model.requires_grad_(False)
        found[name] = shardwise.initialize(model=model, optimizer=optimizer, config=config)[0]
    return found


@pytest.mark.parametrize("stage", [3, *map(thorough, range(3))])
@on_ranks(2)
def test_ppo_of_five_engines_is_that_of_one_process(stage: int) -> None:
    rank, engines, expected = dist.get_rank(), engines_of(stage), plain_ppo(2)
    state = ["optim_states", "hp_params"]
    for number in range(ROUNDS):
        for name in ("actor", "critic"):
            engines[name].offload_states(include=state)
        with engines["actor"].gathered():  # ranks call the module different numbers of times
            ids = generated(engines["actor"].module, number, rank)
        engines["actor"].train()
        seen = Experience(lambda name, ids: engines[name](ids), ids)
        for name in ("reference", "reward"):
            engines[name].offload_states()
        for name in ("actor", "critic"):
            engines[name].reload_states()
        for _ in range(EPOCHS):
            for name, loss in (("actor", policy_loss), ("critic", value_loss)):
                engines[name].backward(loss(engines[name](seen.ids), seen))
                with torch.no_grad():  # an evaluation of another length between backward pass and step
                    engines["critic" if name == "actor" else "actor"](prompts(number, rank))
                engines[name].step()
            gathered_average(engines["actor"].module, engines["average"].module)
        for name in ("reference", "reward"):
            engines[name].reload_states()
    for name, engine in engines.items():
        found = masters(engine.module)
        for key, value in expected[name].items():
            assert torch.allclose(found[key], value, atol=2e-5), (stage, name, key)
        assert engine.global_steps == (ROUNDS * EPOCHS if name in ("actor", "critic") else 0)


# -- GRPO --------------------------------------------------------------------------------------------------------------


def fused_loss(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Log-probabilities from hidden states and the head's weight, in chunks, without all logits at once."""
    total = hidden.new_zeros(())
    for chunk, targets in zip(hidden[:, :-1].split(2, 1), ids[:, 1:].split(2, 1), strict=True):
        log = F.linear(chunk, weight).log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
        total = total + ((log - log.detach()).exp() * advantages[:, None]).sum()
    return -total / ids.numel()


def group_advantages(ids: torch.Tensor) -> torch.Tensor:
    rewards = (ids[:, PROMPT:] % 5).float().mean(1)
    return (rewards - rewards.mean()) / (rewards.std() + 1e-4)


def step_of(module: Policy, ids: torch.Tensor) -> torch.Tensor:
    return fused_loss(module.model(ids), module.lm_head.weight, ids, group_advantages(ids))


def plain_grpo(ranks: int) -> Tensors:
    model = built()["actor"]

    def losses(number: int) -> list[torch.Tensor]:
        return [step_of(model, generated(model, number, rank)) for rank in range(ranks)]

    return loop(model, optimizer_of(model), losses, 3)


def redirected(engine: Any, function: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """As TRL calls a loss through an engine: the module's forward is another function for one call."""
    module = engine.module
    original = module.forward

    def once(*given: Any) -> torch.Tensor:
        module.forward = original
        return function(module, *given)

    module.forward = once
    return engine(*args)


@pytest.mark.parametrize("stage", [3, *map(thorough, range(3))])
@on_ranks(2)
def test_grpo_with_a_loss_that_takes_the_weight_of_the_head(stage: int) -> None:
    expected, model = plain_grpo(2), built()["actor"]
    config = config_of(stage, rows=ROWS)
    engine = shardwise.initialize(model=model, optimizer=optimizer_of(model), config=config)[0]
    for number in range(3):
        with GatheredParameters(list(engine.module.parameters())):
            ids = generated(engine.module, number, dist.get_rank())
        engine.backward(redirected(engine, step_of, ids))
        engine.step()
    found = masters(engine.module)
    for name, value in expected.items():
        assert torch.allclose(found[name], value, atol=2e-5), (stage, name)
