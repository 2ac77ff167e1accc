"""Decoders drawn at random over shared sequences and divided experts: those of one process, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardwise
from shardwise.errors import ConfigError, UsageError
from shardwise.moe import MoE
from shardwise.parallel import DistributedAttention
from shardwise.parallel.sequence import run_of
from shardwise.registry import part_of
from shardwise.utils import safe_get_full_grad
from tests.harness import run_ranks
from tests.parallel.random_decoders import IGNORED, ROWS, TOKENS, Decoder, Traits, ids_of, plain_attention

Found = tuple[float, dict[str, torch.Tensor]] | str


def whole_masks(traits: Traits) -> Any:
    """Attention that makes its masks itself, of all the tokens that it gets."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        places = torch.arange(q.shape[2], device=q.device)
        apart = places[:, None] - places
        seen = torch.ones_like(apart, dtype=torch.bool) if traits.mask == "none" else apart >= 0
        if traits.mask == "window":
            seen = seen & (apart < 4)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    return attention


def shared_attention(how: str, traits: Traits) -> Any:
    """Attention over shared sequences as scripts have it."""
    if how == "own tokens":
        return plain_attention
    if how == "own masks":
        return DistributedAttention(plain_attention, scatter_idx=1, gather_idx=2)
    layer = DistributedAttention(whole_masks(traits), scatter_idx=1, gather_idx=2)
    return lambda q, k, v, mask: layer(q, k, v)


def mixture(size: int) -> Any:
    def made(width: int) -> nn.Module:
        experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        return MoE(width, experts, 4, size, k=2, drop_tokens=False, top2_2nd_expert_sampling=False)

    return made


def build(traits: Traits, attend: Any = None, experts: int = 0) -> nn.Module:
    torch.manual_seed(traits.seed)
    model = Decoder(traits, attend=attend, experts=mixture(experts) if experts else None)
    for name, parameter in model.named_parameters():
        shift = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
        with torch.no_grad():
            parameter.add_(0.0 if "deepspeed_experts" in name else 0.3 * shift)
    return model


def trained(cases: list[tuple[int, str]], tensor: int = 1) -> list[Found]:
    """Take one step's gradients over two ranks, each `tensor` ranks where layers are divided, too."""
    found: list[Found] = []
    for seed, how in cases:
        shardwise.init_distributed(verbose=False)
        rank, experts = dist.get_rank() // tensor, how == "experts"
        traits = Traits.drawn(seed, experts=experts)
        config = {
            "train_micro_batch_size_per_gpu": ROWS,
            "sequence_parallel_size": 1 if experts else 2,
            "tensor_parallel": {"autotp_size": tensor},
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": seed % 4, "stage3_param_persistence_threshold": 0},
        }
        if experts:
            ids = ids_of(0, 2 * ROWS)[rank * ROWS : (rank + 1) * ROWS]
            batch, model = [ids], build(traits, experts=2)
        else:
            ids, span = ids_of(0), slice(*run_of(TOKENS, 2, rank))
            labels = F.pad(ids[:, 1:], (0, 1), value=IGNORED)
            positions = torch.arange(TOKENS).expand_as(ids)
            batch = [x[:, span].contiguous() for x in (ids, positions, labels)]
            model = build(traits, attend=shared_attention(how, traits))
        try:
            engine, *_ = shardwise.initialize(model=model, config=config)
        except ConfigError as error:
            found.append(str(error))
            continue
        try:
            loss = engine(*batch)
            tokens = ROWS * (TOKENS - 1) if experts else int((batch[2] != IGNORED).sum())
            engine.backward(loss, weight=tokens)
            total = torch.tensor([loss.item() * tokens, tokens], dtype=torch.float64)
            dist.all_reduce(total)
            grads = {part_of(p).name or n: safe_get_full_grad(p) for n, p in engine.module.named_parameters()}
            found.append((float(total[0] / total[1]), {n: g for n, g in grads.items() if g is not None}))
        except (UsageError, ConfigError) as error:
            found.append(str(error))
        engine.destroy()
    return found


REFUSED = (
    "DistributedAttention",
    "exchange of heads",
    "at least as many attention heads",
    "does not compute what it computes whole",
    "is divided",
)
"""What a refusal says: of attention to own tokens, of few heads, and of layers that cannot be divided."""


def check(cases: list[tuple[int, str]], tensor: int = 1) -> int:
    """Return how many of the decoders are refused."""
    refused, wrong = 0, []
    for (seed, how), *told in zip(cases, *run_ranks(trained, 2 * tensor, cases, tensor), strict=True):
        traits = Traits.drawn(seed, experts=how == "experts")
        if isinstance(told[0], str):
            refused += 1
            assert set(told) == {told[0]} and any(words in told[0] for words in REFUSED), told[0]
            continue
        model = build(traits, experts=1 if traits.experts else 0)
        loss = model(ids_of(0, 2 * ROWS if traits.experts else ROWS))
        loss.backward()
        found = {name: grad for one in told for name, grad in one[1].items()}
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        most = max(float(grad.norm()) for grad in grads.values())
        off = {name: float((found[name] - grad).norm()) for name, grad in grads.items()}
        off = {name: by for name, by in off.items() if by > 2e-5 * float(grads[name].norm()) + 1e-6 * most}
        if off or told[0][0] != pytest.approx(loss.item(), rel=1e-5):
            wrong.append(
                f"{how}, {traits}: loss {told[0][0]}, expected {loss.item()}; gradients off by {off} of {most}"
            )
    assert not wrong, "\n".join(wrong)
    return refused


def kinds(seed: int) -> list[str]:
    """How the decoder of a seed may be run over shared sequences."""
    traits = Traits.drawn(seed)
    return ["own tokens", "own masks", "experts"] + (["whole masks"] if traits.places != "alibi" else [])


def test_a_few_decoders() -> None:
    masked = [seed for seed in range(20) if "whole masks" in kinds(seed)][:3]
    cases = [(0, "own masks"), (1, "own tokens"), (3, "experts"), (4, "experts")]
    assert check(cases + [(seed, "whole masks") for seed in masked]) >= 1


def test_a_few_divided_decoders() -> None:
    right = [(seed, "whole masks") for seed in (6, 9)]
    assert check([*right, (7, "own tokens"), (0, "whole masks")], tensor=2) == 2


@pytest.mark.thorough
@pytest.mark.parametrize("first", range(0, 80, 20))
def test_more_divided_decoders(first: int) -> None:
    assert check([(seed, how) for seed in range(first, first + 20) for how in kinds(seed) if how != "experts"], 2) >= 20


@pytest.mark.thorough
@pytest.mark.parametrize("first", range(0, 80, 20))
def test_more_decoders(first: int) -> None:
    assert check([(seed, how) for seed in range(first, first + 20) for how in kinds(seed)]) >= 20
