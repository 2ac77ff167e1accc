"""All gradients and their norm against one process: stages, what ranks share, and what parameters are, together.

The model has parameters that are tied, replicated, frozen, divided and of experts. A rank may have no labels: its loss
is 0 / 0 and has the weight 0, and the rank takes part in the exchanges of the backward pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.moe import MoE
from shardwise.parallel import DistributedAttention, RingAttention, current, mean_loss
from shardwise.parallel.sequence import run_of
from shardwise.registry import part_of
from shardwise.utils import safe_get_full_grad
from tests.harness import run_ranks, thorough
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


@dataclass(frozen=True)
class Case:
    """A ZeRO stage, and how many ranks share a tensor, a sequence and experts.

    Attributes:
        without: half of the tokens or copies has no labels.
        weight: form of the weight of the loss, or "mean_loss".
        ring: attention of a ring in place of an exchange of heads.
        recompute: attention is recomputed in the backward pass.
    """

    stage: int
    tensor: int = 1
    sequence: int = 1
    experts: int = 1
    without: bool = True
    weight: str = "int"
    ring: bool = False
    recompute: bool = False


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any = None) -> torch.Tensor:
    return plain_attention(q, k, v)


def build(sequence: int, experts: int, *, ring: bool = False, recompute: bool = False) -> nn.Module:
    """A decoder whose last MLP are experts; the same values for any number of ranks."""
    torch.manual_seed(11)
    shared: Any = DistributedAttention(attend, scatter_idx=1, gather_idx=2) if sequence > 1 else attend
    if ring:
        around = RingAttention()
        shared = lambda q, k, v, mask: around(q, k, v)  # noqa: E731

    def mixture(width: int) -> nn.Module:
        return MoE(width, nn.Linear(width, width), 4, experts, k=2, drop_tokens=False, top2_2nd_expert_sampling=False)

    model = Decoder(Traits(11, tied=True, experts=True, keys=4), attend=shared, experts=mixture)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in FROZEN)
        with torch.no_grad():  # nothing is at its usual first value
            shift = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
            parameter.add_(0.0 if "deepspeed_experts" in name else 0.2 * shift)
    for block in model.blocks if recompute else ():
        block.attention.forward = recomputed(block.attention.forward)  # type: ignore[union-attr]
    return model


def recomputed(forward: Any) -> Any:
    return lambda *args: checkpoint(forward, *args, use_reentrant=False)


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


def trained(cases: list[Case]) -> list[Any]:
    found = []
    for case in cases:
        shardwise.init_distributed(verbose=False)
        copies = dist.get_world_size() // case.tensor // case.sequence
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": ROWS,
            "sequence_parallel_size": case.sequence,
            "gradient_clipping": 0.01,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": case.stage, "stage3_param_persistence_threshold": 0},
        }
        if case.tensor > 1:
            config["tensor_parallel"] = {"autotp_size": case.tensor, "partition_config": RULES}
        model = build(case.sequence, case.experts, ring=case.ring, recompute=case.recompute)
        engine, *_ = shardwise.initialize(model=model, config=config)
        ids, labels = rows_of(copies, case.without)
        first = engine.get_data_parallel_rank() * ROWS
        group = current()
        span = slice(*run_of(TOKENS, case.sequence, 0 if group is None else group.rank))
        ids, labels = (x[first : first + ROWS, span].contiguous() for x in (ids, labels))
        positions = torch.arange(TOKENS)[span].expand(ROWS, -1).contiguous()
        loss, tokens = engine(ids, positions, labels), (labels != IGNORED).sum()
        if case.weight == "mean_loss":
            engine.backward(mean_loss(loss, tokens))
        else:
            engine.backward(loss, weight={"int": int, "float": float, "tensor": torch.clone}[case.weight](tokens))
        grads = {
            part_of(p).name or n: safe_get_full_grad(p) for n, p in engine.module.named_parameters() if p.requires_grad
        }
        engine.step()
        found.append((float(engine.last_step.grad_norm), grads))
        engine.destroy()
    return found


def check(world: int, cases: list[Case]) -> None:
    told = run_ranks(trained, world, cases)
    for case, *ranks in zip(cases, *told, strict=True):
        model = build(1, 1)
        ids, labels = rows_of(world // case.tensor // case.sequence, case.without)
        model(ids, None, labels).backward()
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


PAIRS = [
    Case(0, sequence=2),
    Case(1, experts=2, without=False, weight="float"),
    Case(2, sequence=2, weight="mean_loss"),
    Case(3, sequence=2, experts=2, weight="tensor", recompute=True),
    Case(1, sequence=2, ring=True),
]
FOURS = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2), (1, 4, 4)]
"""Ranks of tensors, sequences and experts."""


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (2, PAIRS),
        (4, [Case(3, 2)]),  # one copy of the model has no labels, and exchanges more than the other
        *(thorough(4, [Case(stage, *ranks, without=stage != 1) for ranks in FOURS]) for stage in range(4)),
    ],
    ids=["2", "4", *(f"stage {stage}" for stage in range(4))],
)
def test_all_gradients_and_the_norm(world: int, cases: list[Case]) -> None:
    check(world, cases)
