"""Models whose blocks are called in an order and a number that are drawn at random for each rank and micro-batch."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.harness.training import Setting
from tests.models import Batch, Case

WIDTH = 6
CALLS = ["plain"] * 6 + ["recomputed", "by hand", "without gradient", "of detached"]

Plan = list[tuple[int, str]]
"""Which block is called, and how."""


class Block(nn.Module):
    """Two layers of a width of its own, so that units differ in size."""

    def __init__(self, hidden: int, gain: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH, bias=False)
        self.gain = nn.Parameter(torch.randn(hidden) / 10) if gain else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x))
        return x + self.down(hidden if self.gain is None else hidden * self.gain) / 3


class Blocks(nn.Module):
    """Calls its blocks as it is told."""

    def __init__(self, choice: random.Random, number: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block(choice.randint(3, 20), choice.random() < 0.4) for _ in range(number))

    def forward(self, x: torch.Tensor, plan: Plan) -> torch.Tensor:
        x = self.first(x)
        for index, how in plan:
            block = self.blocks[index]
            if how == "plain":
                x = block(x)
            elif how == "recomputed":
                x = checkpoint(block, x, use_reentrant=False)
            elif how == "by hand":
                x = x + torch.tanh(F.linear(F.linear(x, block.up.weight), block.down.weight)) / 10
            elif how == "without gradient":
                with torch.no_grad():
                    found = block(x)
                x = x + found / 10
            else:
                x = x + block(x.detach()) / 10
        return self.last(x).float().square().mean()


def drawn(number: int, *, stage: int | None = None) -> tuple[Case, Setting]:
    """Return a model with its schedule of calls, and a setting; None: of any stage.

    In the first step all ranks call each block once.
    """
    choice = random.Random(number)
    blocks, calm = choice.randint(2, 6), choice.choice([0.0, 0.4])
    zero = (
        ("reduce_bucket_size", choice.choice([1, 50, 100, 300])),
        ("stage3_prefetch_bucket_size", choice.choice([0, 1, 100, 1000])),
    )
    setting = Setting(
        choice.choice([0, 1, 2, 2, 3, 3]) if stage is None else stage,
        accumulation=choice.choice([1, 2, 2, 3]),
        clip=choice.choice([0.0, 1.0]),
        optimizer=choice.choice(["SGD", "momentum"]),
        zero=zero,
    )

    def plan(seed: int) -> Plan:
        once = [(index, "plain") for index in range(blocks)]
        chance = random.Random(f"{number} {seed}")
        if seed < 64 * 64 or chance.random() < calm:
            return once
        return [(chance.randrange(blocks), chance.choice(CALLS)) for _ in range(chance.randint(0, 3 * blocks))]

    def batch(generator: torch.Generator, seed: int) -> Batch:
        return {"x": torch.randn(1, 4, generator=generator), "plan": plan(seed)}

    def build() -> nn.Module:
        return Blocks(random.Random(number), blocks)

    return Case(f"blocks {number}", build, batch, lambda model, given: model(given["x"], given["plan"])), setting
