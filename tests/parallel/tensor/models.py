"""Models of tests of tensor parallelism, and how one process trains them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

WIDTH, INNER, WORDS, TOKENS, ROWS = 16, 24, 20, 6, 2


class Block(nn.Module):
    """Attention of four heads without a mask, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        x = x + self.o(y)
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        nn.init.normal_(self.words.weight, std=0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.roll(-1, 1).flatten())


RULES = {
    "layer_specs": [
        {"patterns": [r"\.(q|k|v|up)\.weight$"], "partition_type": "column"},
        {"patterns": [r"\.(o|down)\.weight$"], "partition_type": "row"},
        {"patterns": [r"^head\.weight$"], "partition_type": "column", "gather_output": True},
    ]
}


def decoder(tied: bool = False, seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(tied)


def data(step: int, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(0, WORDS, (rows, TOKENS), generator=generator)


def alone(steps: int, copies: int, dtype: torch.dtype = torch.float64, **how: Any) -> Any:
    """Train in one process; return losses, the last gradients and the parameters."""
    model = decoder(**how).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        loss = model(data(step, copies * ROWS))
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return losses, grads, {name: p.detach().clone() for name, p in model.named_parameters()}
