"""Train a GPT in stages: each rank has some of the layers, and micro-batches flow through them.

    shardwise run --nproc 2 examples/pipeline.py                           # one pipeline of two stages
    shardwise run --nproc 4 examples/pipeline.py                           # two pipelines, with different samples
    shardwise run --nproc 2 examples/pipeline.py --schedule zb-h1          # less idle time
    shardwise run --nproc 1 examples/pipeline.py --stages 1                # the same model on one rank

Nothing is downloaded: the model reads bytes, and learns from the Python language reference, which comes with Python. At
the end a table and a chart show in which part of a step each rank of the first pipeline was idle.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import shardwise
from shardwise.pipe import LayerSpec, PipelineModule, TiedLayerSpec

LENGTH, WIDTH, HEADS = 64, 128, 4


class Embedding(nn.Embedding):
    """Embeds bytes and adds their positions."""

    def __init__(self) -> None:
        super().__init__(256, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        for weight in (self.weight, self.places.weight):
            nn.init.normal_(weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return vectors of width WIDTH."""
        return super().forward(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix positions, then features."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def head(embedding: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return logits: the head has the weight of the embedding."""
    return F.linear(x, embedding.weight)


def loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of each next byte."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def text() -> torch.Tensor:
    """Return passages of the Python language reference as bytes; [passages, LENGTH]."""
    from pydoc_data.topics import topics

    symbols = torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()))
    return symbols[: len(symbols) // LENGTH * LENGTH].view(-1, LENGTH)


def main() -> None:
    """Train for some steps; print the loss and the idle time."""
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found.add_argument("--config", type=Path, default=Path(__file__).with_suffix(".json"))
    found.add_argument("--stages", type=int, help="overrides pipeline.stages")
    found.add_argument("--schedule", help="overrides pipeline.schedule")
    found.add_argument("--steps", type=int, default=30)
    found.add_argument("--picture", type=Path, help="write the picture of a step as SVG")
    options = found.parse_args()
    config = json.loads(options.config.read_text())
    if options.stages is not None:
        config["pipeline"]["stages"] = options.stages
    if options.schedule is not None:
        config["pipeline"]["schedule"] = options.schedule

    torch.manual_seed(0)
    layers = [
        TiedLayerSpec("bytes", Embedding),
        *(LayerSpec(Block) for _ in range(8)),
        LayerSpec(nn.LayerNorm, WIDTH),
        TiedLayerSpec("bytes", Embedding, forward_fn=head),
    ]
    model = PipelineModule(layers, loss_fn=loss)
    # The loader gives the ranks of one pipeline the same samples.
    engine, _, _, _ = shardwise.initialize(model=model, training_data=list(text()), config=config)
    engine.set_batch_fn(lambda ids: (ids, ids))
    here = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"rank {engine.global_rank} has stage {engine.stage_id} of {engine.num_stages}, {here:,} parameters", flush=True
    )
    for step in range(options.steps):
        mean = engine.train_batch()
        if engine.global_rank == 0 and (step % 10 == 0 or step + 1 == options.steps):
            print(f"step {step:3d}  loss {mean.item():.3f}", flush=True)
    with engine.record_idle() as idle:
        engine.train_batch()
    if engine.global_rank == 0:
        print(idle)
        print(idle.chart(110))
        if options.picture is not None:
            idle.svg(options.picture, f"one step of {config['pipeline']['schedule']}")
    engine.destroy()


if __name__ == "__main__":
    main()
