"""Hugging Face families, built from tiny configurations, train under every stage to the losses of plain PyTorch.

The plain run is one process over the global batch. Losses agree to 2e-6 (they are about 4; fp32 has 2.4e-7 of that in
its last bit, and a few roundings differ: fused AdamW against the loop, ranks summed in fp32).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardwise
from tests.harness import run_ranks, thorough
from tests.harness.training import engine_of

transformers = pytest.importorskip("transformers")

VOCABULARY, STEPS = 64, 3
TOLERANCE = 2e-6
SMALL = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
BLOCKS = SMALL | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
CALM = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 64}
RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8, "share_att_key": True}


def family(name: str, head: str, **options: Any) -> Callable[[], Any]:
    """Return what makes a tiny model of a family."""
    config, model = getattr(transformers, f"{name}Config"), getattr(transformers, name + head)
    return lambda: model(config(**options))


FAMILIES: dict[str, Callable[[], Any]] = {
    "bloom": family("Bloom", "ForCausalLM", **SMALL, hidden_size=32, n_layer=2, n_head=4),
    "opt": family(
        "OPT", "ForCausalLM", **BLOCKS, ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=64, dropout=0.0
    ),
    "gpt2": family(
        "GPT2", "LMHeadModel", **SMALL, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
    "llama": family("Llama", "ForCausalLM", **BLOCKS, max_position_embeddings=64),
    "bert": family("Bert", "ForMaskedLM", **BLOCKS, **CALM),
    "deberta": family("DebertaV2", "ForMaskedLM", **BLOCKS, **CALM, **RELATIVE, norm_rel_ebd="layer_norm"),
    "t5": family(
        "T5", "ForConditionalGeneration", vocab_size=VOCABULARY, d_model=32, num_layers=2, num_heads=4, d_ff=64, d_kv=8,
        dropout_rate=0.0, decoder_start_token_id=0,
    ),
    "mixtral": family(
        "Mixtral", "ForCausalLM", **BLOCKS, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        max_position_embeddings=64,
    ),
}  # fmt: skip


def make(family: str, checkpointing: str = "") -> Any:
    torch.manual_seed(0)
    model = FAMILIES[family]()
    if checkpointing:
        options = {"use_reentrant": checkpointing == "reentrant"}
        if hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
        else:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    return model.train()


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step * 10 + rank)
    return torch.randint(3, VOCABULARY, (2, 12), generator=generator)


def plain(family: str, world: int) -> list[list[float]]:
    """Losses of each rank's batches, by step, of one process that trains on the global batch."""
    model = make(family)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        row = []
        for rank in range(world):
            loss = model(input_ids=batch(step, rank), labels=batch(step, rank)).loss
            (loss / world).backward()
            row.append(loss.item())
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(row)
    return losses


def train(family: str, stage: int, built_sharded: bool = False, checkpointing: str = "") -> list[float]:
    torch.manual_seed(0)
    with shardwise.zero.Init(enabled=built_sharded):
        model = make(family, checkpointing)
    engine = engine_of(model, stage, {"type": "AdamW", "params": {"lr": 1e-3}})
    losses = []
    for step in range(STEPS):
        ids = batch(step, engine.global_rank)
        loss = engine(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    assert engine.sharded.unsharder.late == 0
    engine.destroy()
    return losses


def in_every_way(family: str, checkpointing: str) -> dict[str, list[float]]:
    if checkpointing:
        return {f"stage {stage}": train(family, stage, checkpointing=checkpointing) for stage in (0, 3)}
    found = {f"stage {stage}": train(family, stage) for stage in range(4)}
    return found | {"built sharded": train(family, 3, built_sharded=True)}


@pytest.mark.parametrize(
    ("family", "checkpointing"),
    [
        *(thorough(name, "") for name in FAMILIES if name != "mixtral"),
        ("mixtral", ""),
        thorough("llama", "reentrant"),
        thorough("t5", "reentrant"),
        ("t5", "not reentrant"),
    ],
)
def test_every_stage_trains_like_plain_pytorch(family: str, checkpointing: str) -> None:
    expected = plain(family, 2)
    assert expected[-1] != expected[0]
    for rank, found in enumerate(run_ranks(in_every_way, 2, family, checkpointing)):
        for how, losses in found.items():
            assert losses == pytest.approx([row[rank] for row in expected], abs=TOLERANCE), (how, rank)
