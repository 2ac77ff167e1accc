"""What ranks with parts of tensors hold: the dry run against what is measured, and losses over large vocabularies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.engine.plans import plan_model
from shardwise.memory import Accountant, Category, track_activations
from shardwise.parallel import tiled_loss
from tests.harness import run_ranks, thorough
from tests.parallel.tensor.test_tokens import config, ids, made

LENGTH = 48


def planned(kind: str, stage: int, norms: bool) -> Any:
    """Most bytes in each category, as planned and as measured over two windows."""
    adam = {"type": "AdamW", "params": {"lr": 1e-3}}
    engine, *_ = shardwise.initialize(
        model=made(kind), config=config(stage, norms, optimizer=adam, gradient_accumulation_steps=1)
    )
    batch = {"input_ids": ids(0, LENGTH), "labels": ids(0, LENGTH)}
    for window in range(3):
        if window == 1:
            engine.accountant.reset_peak()
        with track_activations(engine.accountant):
            loss = engine(**batch).loss
            engine.backward(loss)
            del loss
            engine.step()
            engine.sharded.finish_gathers()
    measured, most = dict(engine.accountant.peak), engine.accountant.peak_total
    report = engine.memory_report(batch)
    found = {row.name: row.planned for row in report.rows}
    engine.destroy()
    return found, {category.value: size for category, size in measured.items()}, (report.total.planned, most)


@pytest.mark.parametrize(
    ("kind", "stage", "norms", "world"),
    [("gpt2", 3, True, 2), thorough("llama", 1, False, 4), thorough("llama", 2, True, 2), thorough("gpt2", 0, True, 4)],
)
def test_the_dry_run_is_what_is_measured(kind: str, stage: int, norms: bool, world: int) -> None:
    for found, measured, (total, most) in run_ranks(planned, world, kind, stage, norms):
        assert total == pytest.approx(most, rel=0.03), (found, measured)
        for name in ("parameters", "gradients", "optimizer state", "activations"):
            assert found[name] == pytest.approx(measured[name], rel=0.03), name


def test_plans_for_ranks_that_there_are_not() -> None:
    from shardwise.launch.architectures import Decoder, Shape

    with torch.device("meta"):
        model = Decoder(Shape(8, 2048, 16, 8000, inner=5504, llama=True))
    numel = sum(parameter.numel() for parameter in model.parameters())
    adam = {"type": "AdamW", "params": {"lr": 1e-4}}
    given = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "optimizer": adam}
    one, eight = (
        plan_model(model, {**given, "tensor_parallel": {"autotp_size": size}}, ranks=64, stages=[1]).plans[0].peaks
        for size in (1, 8)
    )
    whole = sum(
        p.numel() for name, p in model.named_parameters() if p.dim() == 1 or name in ("tokens.weight", "head.weight")
    )
    assert eight["parameters"] <= 2 * (numel / 8 + whole) < one["parameters"] / 3
    assert eight["optimizer state"] == pytest.approx(one["optimizer state"], rel=0.02)  # divided over all ranks anyhow


class Head(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.head = nn.Linear(8, words, bias=False)

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor, tiles: int) -> torch.Tensor:
        return tiled_loss(self.head, hidden, labels, tiles=tiles)[0]


def loss_over(tokens: int, words: int, tiles: int) -> Any:
    """Loss, gradient of the hidden states and most bytes of activations of a tiled loss over divided words."""
    torch.manual_seed(1)
    model, hidden = Head(words), torch.randn(1, tokens, 8, requires_grad=True)
    labels = torch.randint(words, (1, tokens))
    rules = {"layer_specs": [{"patterns": ["head"], "partition_type": "column"}], "use_default_specs": False}
    tensor = {"autotp_size": 2, "partition_config": rules}
    given = {
        "train_micro_batch_size_per_gpu": 1,
        "tensor_parallel": tensor,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    engine, *_ = shardwise.initialize(model=model, config=given)
    with track_activations(Accountant()) as accountant:
        loss = engine.module(hidden, labels, tiles)
        loss.backward()
        peak = accountant.peak[Category.ACTIVATIONS]
    found = loss.item(), hidden.grad, peak
    engine.destroy()
    return found


@pytest.mark.parametrize(("tokens", "words", "tiles"), [(512, 4096, 64), thorough(8192, 131072, 64)])
def test_a_loss_over_divided_words_in_tiles(tokens: int, words: int, tiles: int) -> None:
    """It peaks below a tenth of the bytes of all logits in fp32."""
    torch.manual_seed(1)
    model, hidden = Head(words), torch.randn(1, tokens, 8, requires_grad=True)
    labels = torch.randint(words, (1, tokens))
    loss = model(hidden, labels, tiles)
    loss.backward()
    for found, gradient, peak in run_ranks(loss_over, 2, tokens, words, tiles):
        assert found == pytest.approx(loss.item(), rel=1e-5)
        torch.testing.assert_close(gradient, hidden.grad, rtol=1e-4, atol=1e-8)
        assert peak < 0.1 * tokens * words * 4
