"""A small model with experts, and the mixture written down token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardwise.moe import MoE

WIDTH, EXPERTS, TOKENS = 8, 4, 6


def expert() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))


class Block(nn.Module):
    def __init__(self, ep_size: int, **options: Any) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        experts = nn.ModuleList(expert() for _ in range(EXPERTS))
        self.moe = MoE(WIDTH, experts, EXPERTS, ep_size, **options)

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made, l_aux, _ = self.moe(torch.tanh(self.dense(values)))
        return values + made, l_aux


class Model(nn.Module):
    """Blocks with experts; gives the loss."""

    def __init__(self, ep_size: int, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(Block(ep_size, **options) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        total = values.new_zeros(())
        for block in self.blocks:
            values, l_aux = block(values)
            total = total + 0.01 * l_aux
        return self.head(values).square().mean() + total


def batch(step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    return torch.randn(2, TOKENS, WIDTH, generator=generator)


def plain(
    tokens: torch.Tensor, gate: torch.Tensor, experts: Sequence[nn.Module], k: int, capacity_factor: float | None
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """A mixture of experts, token by token; `capacity_factor` None: nothing is dropped."""
    count = len(experts)
    probabilities = torch.softmax(tokens @ gate.T, dim=1)
    chosen = [sorted(range(count), key=lambda e, row=row: -row[e])[:k] for row in probabilities.tolist()]
    room = math.inf
    if capacity_factor is not None:
        room = max(math.ceil(len(tokens) * k * capacity_factor / count), 4)
    pairs = [(t, c) for c in range(k) for t in range(len(tokens))]
    if k > 2:
        pairs.sort(key=lambda pair: -probabilities[pair[0], chosen[pair[0]][pair[1]]].item())
    taken = [0] * count
    kept: list[list[int]] = [[] for _ in tokens]
    for t, c in pairs:
        if taken[chosen[t][c]] < room:
            kept[t].append(chosen[t][c])
        taken[chosen[t][c]] += 1
    rows = []
    for t, mine in enumerate(kept):
        whole = sum(probabilities[t, e] for e in mine) if k > 1 else 1.0
        row = torch.zeros_like(tokens[t])
        for e in mine:
            row = row + probabilities[t, e] / whole * experts[e](tokens[t])
        rows.append(row)
    judged = [chosen[t][c] for t in range(len(tokens)) for c in range(1 if k == 2 else k)]
    parts = torch.tensor([judged.count(e) / len(judged) for e in range(count)], dtype=tokens.dtype)
    loss = count * (parts * probabilities.mean(0)).sum()
    return torch.stack(rows), loss, taken
