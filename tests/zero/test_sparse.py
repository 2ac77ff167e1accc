"""Sparse gradients of embeddings are made dense and reduced like all others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.harness import run_ranks
from tests.harness.training import Outcome, Setting, assert_identical, assert_no_worse, plain, train
from tests.models import Batch, Case

WORDS, WIDTH = 401, 7  # rows do not begin where ranges of ranks do


class Bags(nn.Module):
    """Two tables of which few rows are used, one of them by two lookups, and a dense rest."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, sparse=True, padding_idx=0)
        self.bags = nn.EmbeddingBag(97, WIDTH, mode="sum", sparse=True)
        self.inner = nn.Linear(WIDTH, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, batch: Batch) -> torch.Tensor:
        x = self.words(batch["words"]).sum(1)
        x = x + self.words(batch["words"][:, :1]).squeeze(1)
        if batch["bags"] is not None:
            x = x + self.bags(batch["bags"])
        return self.head(torch.tanh(self.inner(x)))


def few(generator: torch.Generator, seed: int) -> Batch:
    """Few rows, several of them twice; some ranks have no bags."""
    words = torch.randint(0, WORDS, (2, 3), generator=generator)
    words[1, 0] = words[0, 0]
    bags = torch.randint(0, 97, (2, 2), generator=generator) if seed % 3 else None
    return {"words": words, "bags": bags, "target": torch.randn(2, 3, generator=generator)}


def bags_loss(model: Any, batch: Batch) -> torch.Tensor:
    return (model(batch).float() - batch["target"].float()).square().mean()


class Tied(nn.Module):
    """A table that is also a head, without a module that says so: the gradient is dense on ranks that use the head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(41, WIDTH, sparse=True)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: Batch) -> torch.Tensor:
        x = torch.tanh(self.mix(self.words(batch["words"]).sum(1)))
        return F.linear(x, self.words.weight).sum(1, keepdim=True) if batch["head"] else x


def some_heads(generator: torch.Generator, seed: int) -> Batch:
    words = torch.randint(0, 41, (2, 2), generator=generator)
    return {"words": words, "head": seed % 4 == 1, "target": torch.randn(2, 1, generator=generator)}


CASES = {"bags": Case("bags", Bags, few, bags_loss), "tied": Case("tied", Tied, some_heads, bags_loss)}


def train_all(name: str, settings: list[Setting]) -> list[Outcome]:
    return [train(CASES[name], setting, 3) for setting in settings]


@pytest.mark.parametrize(("name", "world"), [("bags", 3), ("tied", 2)])
def test_every_stage_has_the_same_bits_and_those_of_one_process(name: str, world: int) -> None:
    setting = Setting(optimizer="AdamW", clip=0.5, extra=(("sparse_gradients", True),))
    settings = [setting.with_stage(stage) for stage in range(4)]
    loop, exact = (plain(CASES[name], setting, world, wide=wide) for wide in (False, True))
    for outcomes in run_ranks(train_all, world, name, settings):
        for stage, outcome in enumerate(outcomes):
            assert_identical(outcomes[0], outcome, f"{name}, stage {stage}")
        assert_no_worse(outcomes[0].masters, loop.masters, exact.masters, name, slack=2e-7)
