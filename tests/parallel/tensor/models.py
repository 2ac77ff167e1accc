"""Models of tests of tensor parallelism, and how one process trains them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise

WIDTH, INNER, WORDS, TOKENS, ROWS = 16, 24, 20, 6, 2
MOMENTUM = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}


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


def trained(
    engine: Any, steps: int, loss_of: Callable[[int, slice, int], torch.Tensor] | None = None
) -> tuple[list[float], float, dict[str, Any]]:
    """Train on each copy's rows; return mean losses, the last norm, and each parameter with what it is part of.

    Args:
        engine: of a divided model.
        steps: of the optimizer.
        loss_of: makes the loss of a step from the rows of this copy and the number of all; None: that of the decoder.
    """

    def of_decoder(step: int, rows: slice, count: int) -> torch.Tensor:
        loss: torch.Tensor = engine(data(step, count)[rows])
        return loss

    own, losses = engine.get_data_parallel_rank(), []
    for step in range(steps):
        loss = (loss_of or of_decoder)(step, slice(own * ROWS, (own + 1) * ROWS), engine.dp_world_size * ROWS)
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
        engine.backward(loss)
        engine.step()
    with shardwise.zero.GatheredParameters(list(engine.module.parameters())):
        registry = engine.sharded.registry
        parts = {t.name: (t, p.detach().clone()) for t, p in zip(registry, registry.parameters, strict=True)}
    return losses, float(engine.get_global_grad_norm()), parts


def check(found: Any, expected: Any, bound: float = 1e-5, least: float = 0.0) -> None:
    """Compare what a rank has found with one process: losses, the last norm, and every parameter.

    Args:
        found: by `trained`.
        expected: losses, last gradients and parameters.
        bound: relative; ten times as much for the norm.
        least: norm of a parameter from which on its bound is relative.
    """
    losses, grads, exact = expected
    norm = torch.stack([grad.norm() for grad in grads.values()]).norm()
    assert found[0] == pytest.approx(losses, rel=bound)
    assert found[1] == pytest.approx(float(norm), rel=10 * bound)
    assert {tensor.name for tensor, _ in found[2].values()} <= exact.keys()
    for name, (tensor, value) in found[2].items():
        assert tensor.global_shape == exact[name].shape
        assert (value - exact[name]).norm() <= bound * max(float(exact[name].norm()), least), name
