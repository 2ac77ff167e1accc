"""A decoder whose ranks share tensors, sequences and experts, and the loop of one process to compare with."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from shardwise.moe import MoE
from shardwise.parallel import DistributedAttention, token_loss
from shardwise.parallel.data import complete

WIDTH, HEADS, INNER, WORDS, TOKENS, ROWS, EXPERTS = 16, 4, 24, 20, 9, 2, 4

RULES = {
    "layer_specs": [
        {"patterns": [r"\.(q|k|v|up)\.weight$"], "partition_type": "column"},
        {"patterns": [r"\.(o|down)\.weight$"], "partition_type": "row"},
        {"patterns": [r"^head\.weight$"], "partition_type": "column", "gather_output": True},
    ]
}


class Block(nn.Module):
    """Attention, and an MLP or experts of which no token is dropped."""

    def __init__(self, sequence: bool, experts: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        if experts:
            each = nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH))
            how = {"k": 2, "drop_tokens": False, "top2_2nd_expert_sampling": False}
            self.experts = MoE(WIDTH, each, EXPERTS, experts, **how)  # type: ignore[arg-type]
        else:
            self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        core = scaled_dot_product_attention
        self.attend: Any = DistributedAttention(core, scatter_idx=1, gather_idx=2) if sequence else core

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (
            layer(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2).contiguous()
            for layer in (self.q, self.k, self.v)
        )
        x = x + self.o(self.attend(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        y = self.norm2(x)
        return x + (self.experts(y)[0] if hasattr(self, "experts") else self.down(nn.functional.gelu(self.up(y))))


class Decoder(nn.Module):
    """Two blocks, of which the second has experts if there are any; the head's weight is that of the embedding."""

    def __init__(self, sequence: bool = False, experts: int = 0) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(Block(sequence, experts if number else 0) for number in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        nn.init.normal_(self.words.weight, std=0.3)
        self.head.weight = self.words.weight
        self.blocks[0].k.weight.requires_grad_(False)  # type: ignore[union-attr]
        self.norm.bias.requires_grad_(False)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids) + self.places(position_ids)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def decoder(sequence: bool = False, experts: int = 0) -> Decoder:
    torch.manual_seed(3)
    return Decoder(sequence, experts)


def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return token_loss(model(batch["input_ids"], batch["position_ids"]), batch["shift_labels"])


def data(step: int, micro: int, copies: int) -> dict[str, torch.Tensor]:
    """The micro-batch of all copies of the model; rows have other numbers of labels."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro)
    tokens = torch.randint(WORDS, (copies * ROWS, TOKENS), generator=generator)
    labels = tokens.clone()
    for row in range(len(labels)):
        labels[row, : 2 * row % TOKENS + micro] = -100
    return {"input_ids": tokens, "labels": labels}


def alone(
    steps: int, copies: int, accumulation: int, clip: float, experts: bool, dtype: torch.dtype = torch.float64
) -> list[Any]:
    """Train in one process; return loss, norm, gradients and parameters of each step."""
    model = decoder(experts=int(experts)).to(dtype)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1, momentum=0.9)
    told = []
    for step in range(steps):
        parts = [loss_of(model, complete(data(step, micro, copies))) for micro in range(accumulation)]
        tokens = sum(int(count) for _, count in parts)
        loss = torch.stack([one * count for one, count in parts]).sum() / tokens
        optimizer.zero_grad()
        loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip))
        optimizer.step()
        told.append((loss.item(), norm, grads, {name: p.detach().clone() for name, p in model.named_parameters()}))
    return told
