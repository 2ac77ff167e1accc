"""Plans of transformers' models, whose masks of attention depend on what a batch hides."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardwise
from shardwise.memory import Category, track_activations
from tests.harness import run_ranks, thorough

WORDS, LENGTH = 32, 64


def activations(attention: str, kind: str) -> tuple[float, int]:
    """Most bytes of activations of a step, as planned and as measured."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": LENGTH}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=WORDS, **shape, **heads, use_cache=False, attn_implementation=attention)
    )
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = shardwise.initialize(model=model, config=config)
    ids = torch.randint(WORDS, (2, LENGTH))
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if kind != "ids":
        batch["attention_mask"] = torch.ones_like(ids)
    if kind == "padded":
        batch["attention_mask"][0, LENGTH // 2 :] = 0
    for _ in range(2):
        engine.accountant.reset_peak()
        with track_activations(engine.accountant):
            loss = engine(**batch).loss
            engine.backward(loss)
            del loss
            engine.step()
    measured = engine.accountant.peak[Category.ACTIVATIONS]
    report = engine.memory_report(batch)
    engine.destroy()
    return next(row.planned for row in report.rows if row.name == "activations"), measured


@pytest.mark.parametrize(
    ("kind", "attention"), [("ids", "sdpa"), ("whole", "eager"), ("padded", "sdpa"), thorough("padded", "eager")]
)
def test_masks_are_planned_where_they_are_made(attention: str, kind: str) -> None:
    ((planned, measured),) = run_ranks(activations, 1, attention, kind)
    assert planned == pytest.approx(measured, rel=0.03)
