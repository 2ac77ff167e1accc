"""Train a BERT on long sequences with sparse attention, and compare time and memory of a step with dense attention.

    shardwise run --nproc 2 examples/sparse_attention.py [--tokens 2048] [--steps 20] [--mode bigbird]

The model is a small BERT of transformers without weights. Sequences are runs of equal words, some of which are hidden;
the model has to find these in what stands around them. The section `sparse_attention` of examples/sparse_attention.json
is all that makes attention sparse; the last lines are of the same model without it. See docs/sparse-attention.md.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForMaskedLM

import shardwise
from shardwise.memory import track_activations

WORDS, HIDDEN = 64, 3  # size of the vocabulary, and the word that stands for hidden ones


def model_of(tokens: int) -> BertForMaskedLM:
    """Return a small BERT for sequences of so many tokens."""
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    calm = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(0)
    return BertForMaskedLM(BertConfig(vocab_size=WORDS, max_position_embeddings=tokens, **sizes, **calm))


def samples(tokens: int) -> list[dict[str, torch.Tensor]]:
    """Return sequences of runs of equal words; every eighth word is hidden on average."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(64):
        words = torch.randint(4, 12, (-(-tokens // 64),), generator=generator).repeat_interleave(64)[:tokens]
        hidden = torch.rand(tokens, generator=generator) < 1 / 8
        labels = words.masked_fill(~hidden, -100)
        found.append({"input_ids": words.masked_fill(hidden, HIDDEN), "labels": labels})
    return found


def train(config: dict[str, Any], tokens: int, steps: int, name: str) -> None:
    """Train, and print loss, time and memory."""
    engine, _, loader, _ = shardwise.initialize(
        model=model_of(tokens).train(), config=config, training_data=samples(tokens)
    )
    batches = iter(shardwise.RepeatingLoader(loader))
    times: list[float] = []
    losses: list[float] = []
    for _ in range(steps):
        batch = {key: value.to(engine.device) for key, value in next(batches).items()}
        begun = time.perf_counter()
        with track_activations(engine.accountant):
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
        times.append(time.perf_counter() - begun)
        losses.append(loss.item())
    if engine.global_rank == 0:
        peak = engine.accountant.peak_total / 2**20
        print(
            f"{name}: loss {losses[0]:.2f} to {losses[-1]:.2f}, {min(times):.2f} s a step, at most {peak:.0f} MiB",
            flush=True,
        )
    engine.destroy()


def main() -> None:
    """Train with the section, and a few steps without."""
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found.add_argument("--config", type=Path, default=Path(__file__).with_suffix(".json"))
    found.add_argument("--mode", help="another layout than the configuration's")
    found.add_argument("--tokens", type=int, default=2048, help="of a sequence")
    found.add_argument("--steps", type=int, default=20)
    options = found.parse_args()
    config = json.loads(options.config.read_text())
    if options.mode:
        config["sparse_attention"] = {"mode": options.mode, "block": config["sparse_attention"]["block"]}
    train(config, options.tokens, options.steps, f"sparse ({config['sparse_attention']['mode']})")
    config.pop("sparse_attention")
    train(config, options.tokens, min(3, options.steps), "dense")


if __name__ == "__main__":
    main()
