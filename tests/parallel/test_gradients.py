"""All gradients and their norm against one process: stages, what ranks share, and what parameters are, together.

The model has parameters that are tied, replicated, frozen, divided and of experts. A rank may have no labels.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.moe import MoE
from shardwise.parallel import DistributedAttention, current
from shardwise.parallel.sequence import run_of
from shardwise.registry import part_of
from shardwise.utils import safe_get_full_grad
from tests.harness import run_ranks
from tests.parallel.random_decoders import IGNORED, WORDS, Decoder, Traits, plain_attention

TOKENS, ROWS = 8, 2
FROZEN = ("blocks.0.mlp.up_proj.weight", "blocks.1.attention.k_proj.weight", "blocks.0.norm_before_mlp.weight")
RULES = {
    "layer_specs": [
        {
            "patterns": [r".*attention\.[qkv]_proj\.weight$", r".*mlp\.(gate|up)_proj\.weight$"],
            "partition_type": "column",
        },
        {"patterns": [r".*attention\.o_proj\.weight$", r".*mlp\.down_proj\.weight$"], "partition_type": "row"},
    ]
}


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any = None) -> torch.Tensor:
    return plain_attention(q, k, v)


def build(sequence: int, experts: int) -> nn.Module:
    """A decoder whose last MLP are experts; the same values for any number of ranks."""
    torch.manual_seed(11)
    shared = DistributedAttention(attend, scatter_idx=1, gather_idx=2) if sequence > 1 else attend

    def mixture(width: int) -> nn.Module:
        return MoE(width, nn.Linear(width, width), 4, experts, k=2, drop_tokens=False, top2_2nd_expert_sampling=False)

    model = Decoder(Traits(11, tied=True, experts=True, keys=4), attend=shared, experts=mixture)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in FROZEN)
        with torch.no_grad():  # nothing is at its usual first value
            shift = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
            parameter.add_(0.0 if "deepspeed_experts" in name else 0.2 * shift)
    return model


def rows_of(copies: int, without: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels of all copies of the model; `without`: the first half of all tokens and rows has no labels."""
    ids = torch.randint(WORDS, (copies * ROWS, TOKENS), generator=torch.Generator().manual_seed(3))
    labels = torch.cat([ids[:, 1:], torch.full((len(ids), 1), IGNORED)], dim=1)
    labels[0, 2:4] = IGNORED  # not as many on all ranks
    if without and copies > 1:
        labels[: len(ids) // 2] = IGNORED
    elif without:
        labels[:, : TOKENS // 2] = IGNORED
    return ids, labels


def trained(cases: list[tuple[int, int, int, int, bool]]) -> list[Any]:
    found = []
    for stage, tensor, sequence, experts, without in cases:
        shardwise.init_distributed(verbose=False)
        copies = dist.get_world_size() // tensor // sequence
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": ROWS,
            "sequence_parallel_size": sequence,
            "gradient_clipping": 0.01,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }
        if tensor > 1:
            config["tensor_parallel"] = {"autotp_size": tensor, "partition_config": RULES}
        engine, *_ = shardwise.initialize(model=build(sequence, experts), config=config)
        ids, labels = rows_of(copies, without)
        first = engine.get_data_parallel_rank() * ROWS
        group = current()
        span = slice(*run_of(TOKENS, sequence, 0 if group is None else group.rank))
        ids, labels = (x[first : first + ROWS, span].contiguous() for x in (ids, labels))
        positions = torch.arange(TOKENS)[span].expand(ROWS, -1).contiguous()
        loss = engine(ids, positions, labels)
        engine.backward(loss, weight=int((labels != IGNORED).sum()))
        grads = {
            part_of(p).name or n: safe_get_full_grad(p) for n, p in engine.module.named_parameters() if p.requires_grad
        }
        engine.step()
        found.append((float(engine.last_step.grad_norm), grads))
        engine.destroy()
    return found


def check(world: int, cases: list[tuple[int, int, int, int, bool]]) -> None:
    told = run_ranks(trained, world, cases)
    for case, *ranks in zip(cases, *told, strict=True):
        _, tensor, sequence, _, without = case
        model = build(1, 1)
        ids, labels = rows_of(world // tensor // sequence, without)
        logits_loss = model(ids, None, labels)
        logits_loss.backward()
        expected = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in expected.values() if g is not None))
        found = {name: grad for _, grads in ranks for name, grad in grads.items()}
        assert found.keys() == expected.keys(), case
        for rank, (own, _) in enumerate(ranks):
            assert own == pytest.approx(norm, rel=1e-5), (case, rank)
        for name, grad in expected.items():
            wanted = torch.zeros_like(found[name]) if grad is None else grad
            off = float((found[name] - wanted).norm())
            assert off <= 1e-5 * float(wanted.norm()) + 1e-7 * norm, (case, name, off, float(wanted.norm()))


PAIRS = [(1, 2, 1), (1, 1, 2), (1, 2, 2)]
"""Ranks of tensors, sequences and experts, on 2 ranks."""

FOURS = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2), (1, 4, 4)]
"""The same on 4 ranks."""


def test_all_gradients_and_the_norm() -> None:
    check(2, [(stage, *PAIRS[stage % 3], stage != 1) for stage in range(4)])
    check(4, [(3, 2, 1, 1, True)])  # one copy of the model has no labels, and exchanges more than the other


@pytest.mark.thorough
@pytest.mark.parametrize("stage", range(4))
def test_all_gradients_and_the_norm_of_every_arrangement(stage: int) -> None:
    check(4, [(stage, *ranks, without) for ranks in FOURS for without in (False, True)])
    check(2, [(stage, *ranks, without) for ranks in PAIRS for without in (False, True)])
