"""Models and data for training over shared sequences, and the loop of one process to compare with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from shardwise.errors import UsageError
from shardwise.parallel import DistributedAttention, share_attention, split, token_loss
from tests.families import build
from tests.harness.training import SGD, engine_of

VOCABULARY, ROWS = 37, 2

Batch = dict[str, torch.Tensor]


class Block(nn.Module):
    def __init__(self, width: int, heads: int, shared: bool) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        attention = scaled_dot_product_attention
        self.attend: Any = DistributedAttention(attention, scatter_idx=1, gather_idx=2) if shared else attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, length, width))
        return x + self.down(torch.tanh(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Three heads, which two ranks cannot have evenly."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, 12), nn.Embedding(32, 12)
        self.blocks = nn.ModuleList(Block(12, 3, shared) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids) + self.places(position_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt(shared: bool) -> nn.Module:
    torch.manual_seed(7)
    return GPT(shared)


def llama(shared: bool) -> nn.Module:
    """Eight query heads for two key heads."""
    model: nn.Module = build("llama untied", 7, max_position_embeddings=64, attn_implementation="sdpa", use_cache=False)
    return share_attention(model) if shared else model


MODELS = {"gpt": gpt, "llama": llama}


def loss_of(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    found = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"])
    return token_loss(found if isinstance(found, torch.Tensor) else found.logits, batch["shift_labels"])


def data(step: int, copies: int, length: int = 15) -> Batch:
    """The batch of all copies of the model: rows of odd length, the first tokens of some without a label."""
    torch.manual_seed(100 + step)
    tokens = torch.randint(VOCABULARY, (copies * ROWS, length))
    labels = tokens.clone()
    for row in range(len(labels)):
        labels[row, : 3 * row + 2] = -100
    return {"input_ids": tokens, "labels": labels}


def sharing(model: nn.Module, stage: int = 3, **more: Any) -> Any:
    """Return an engine of two ranks that share sequences."""
    return engine_of(model, stage, SGD, sequence_parallel_size=2, **more)


@contextlib.contextmanager
def warned() -> Iterator[list[str]]:
    """Give the warnings of the comparison of a model over shared sequences with one process."""
    texts: list[str] = []
    with (
        mock.patch("shardwise.parallel.proof.warn_once", texts.append),
        mock.patch("shardwise.parallel.block_gradients.warn_once", texts.append),
    ):
        yield texts


def first_step(engine: Any) -> tuple[str, list[str]]:
    """Train one step and end the engine; return how the step ends, and warnings."""
    end = "trains"
    with warned() as texts:
        try:
            loss, tokens = loss_of(engine, split(data(0, 1, length=30)))
            engine.backward(loss, weight=tokens)
            engine.step()
            assert all(module.training for module in engine.module.modules())
        except UsageError as error:
            end = str(error)
    engine.destroy()
    return end, texts
