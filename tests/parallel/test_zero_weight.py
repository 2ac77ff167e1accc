"""A rank whose loss has the weight 0 (no token with a label) takes part in the exchanges of the backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import shardwise
from shardwise.moe import MoE
from shardwise.parallel import DistributedAttention, RingAttention, mean_loss, split
from shardwise.registry import part_of
from shardwise.utils import safe_get_full_grad
from tests.harness import run_ranks, thorough

WIDTH, WORDS, TOKENS = 16, 24, 8
KINDS = ("ulysses", "ring", "experts", "part", "recomputed")


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    def __init__(self, attend: Any) -> None:
        super().__init__()
        self.qkv, self.attend = nn.Linear(WIDTH, 3 * WIDTH), attend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        return x + self.attend(q, k, v).transpose(1, 2).flatten(2)


class Sum(torch.autograd.Function):
    """Adds up over ranks, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        total = grad.clone()
        dist.all_reduce(total)
        return total


class Part(nn.Module):
    """Each rank has half of the inner features, and computes them for the tokens of both."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(WIDTH, 2 * WIDTH) / 8) for _ in range(2))
        self.size = size
        if size > 1:
            rank, run = dist.get_rank(), 2 * WIDTH // size
            for name in ("up", "down"):
                box = [(0, WIDTH), (rank * run, (rank + 1) * run)]
                part = nn.Parameter(getattr(self, name).detach()[:, rank * run : (rank + 1) * run].clone())
                setattr(self, name, part)
                shardwise.declare_part(part, ranks=[rank], shape=[WIDTH, 2 * WIDTH], box=box)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.size == 1:
            return x + torch.tanh(x @ self.up) @ self.down.T
        slots = [torch.zeros_like(x) for _ in range(self.size)]
        slots[dist.get_rank()] = x
        everyone = Sum.apply(torch.cat(slots))
        made = Sum.apply(torch.tanh(everyone @ self.up) @ self.down.T)
        return x + made.chunk(self.size)[dist.get_rank()]


def model_of(kind: str, size: int) -> nn.Module:
    torch.manual_seed(3)
    layers: list[nn.Module] = [nn.Embedding(WORDS, WIDTH)]
    for _ in range(2):
        if kind == "experts":
            experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
            layers.append(MoE(WIDTH, experts, 4, size, k=2, drop_tokens=False, top2_2nd_expert_sampling=False))
        elif kind == "part":
            layers.append(Part(size))
        elif size > 1 and kind == "ring":
            layers.append(Attention(RingAttention()))
        else:
            layers.append(Attention(DistributedAttention(causal, scatter_idx=1, gather_idx=2) if size > 1 else causal))
    return Decoder(layers, nn.Linear(WIDTH, WORDS), kind == "recomputed" and size > 1)


class Decoder(nn.Module):
    def __init__(self, layers: list[nn.Module], head: nn.Module, recomputed: bool) -> None:
        super().__init__()
        self.layers, self.head, self.recomputed = nn.ModuleList(layers), head, recomputed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.recomputed and isinstance(layer, Attention):
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)  # type: ignore[attr-defined]
                continue
            found = layer(x)
            x = x + found[0] if isinstance(found, tuple) else found
        return self.head(x)


def batch_of() -> dict[str, torch.Tensor]:
    """The first half of the tokens has no label."""
    ids = torch.arange(2 * TOKENS).view(2, TOKENS) * 5 % WORDS
    labels = (ids + 1) % WORDS
    labels[:, : TOKENS // 2] = -100
    return {"input_ids": ids, "shift_labels": labels}


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean, written so that without a label it and its gradient are 0 / 0."""
    each = cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return each.sum() / (labels != -100).sum()


def weight_of(form: str, tokens: torch.Tensor) -> Any:
    return {"int": int(tokens), "float": float(tokens), "tensor": tokens}[form]


def trained(cases: list[tuple[str, int, str]]) -> list[dict[str, torch.Tensor | None]]:
    found = []
    for kind, stage, form in cases:
        shardwise.init_distributed(verbose=False)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "sequence_parallel_size": 2 if kind in ("ulysses", "ring", "recomputed") else 1,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }
        engine, *_ = shardwise.initialize(model=model_of(kind, 2), config=config)
        if config["sequence_parallel_size"] == 2:
            part = split(batch_of())
        else:
            part = {name: value.chunk(2, dim=1)[dist.get_rank()].contiguous() for name, value in batch_of().items()}
        loss = loss_of(engine(part["input_ids"]), part["shift_labels"])
        tokens = (part["shift_labels"] != -100).sum()
        if form == "mean_loss":
            engine.backward(mean_loss(loss, tokens))
        else:
            engine.backward(loss, weight=weight_of(form, tokens))
        grads = {part_of(p).name or name: safe_get_full_grad(p) for name, p in engine.module.named_parameters()}
        found.append(grads)
        engine.step()
        assert bool(torch.isfinite(engine.last_step.grad_norm))
        engine.destroy()
    return found


QUICK = [("ulysses", 2, "int"), ("ring", 3, "tensor"), ("experts", 1, "float"), ("part", 0, "int")]
QUICK += [("recomputed", 3, "int"), ("ulysses", 0, "mean_loss")]
FORMS = ("int", "float", "tensor")
WHOLE = [[(kind, stage, form) for stage in range(4) for form in FORMS] for kind in KINDS]


@pytest.mark.parametrize(
    "cases",
    [QUICK, *(thorough(cases) for cases in WHOLE)],
    ids=["quick", *KINDS],
)
def test_a_rank_without_labels_contributes_zeros(cases: list[tuple[str, int, str]]) -> None:
    for case, first, second in zip(cases, *run_ranks(trained, 2, cases), strict=True):
        found = {**first, **second}
        model, batch = model_of(case[0], 1), batch_of()
        if case[0] in ("experts", "part"):
            logits = torch.cat([model(ids) for ids in batch["input_ids"].chunk(2, dim=1)], dim=1)
        else:
            logits = model(batch["input_ids"])
        loss_of(logits, batch["shift_labels"]).backward()
        for name, parameter in model.named_parameters():
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6, msg=lambda m, c=case: f"{c}: {m}")
