"""Plans of transformers' models, whose masks of attention depend on what a batch hides."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise.memory import Category, track_activations
from tests.harness import on_ranks, thorough
from tests.harness.training import engine_of

WORDS, LENGTH = 32, 64


@pytest.mark.parametrize(
    ("kind", "attention"),
    [thorough("ids", "sdpa"), ("whole", "eager"), ("padded", "sdpa"), thorough("padded", "eager")],
)
@on_ranks(1)
def test_masks_are_planned_where_they_are_made(attention: str, kind: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": LENGTH}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=WORDS, **shape, **heads, use_cache=False, attn_implementation=attention)
    )
    engine = engine_of(model, 0, {"type": "SGD", "params": {"lr": 0.1}})
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
    assert engine.memory_report(batch).row(Category.ACTIVATIONS).planned == pytest.approx(measured, rel=0.03)
