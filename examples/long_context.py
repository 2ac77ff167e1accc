"""Train on sequences that are too long for one rank: ranks share them, layers are recomputed, the loss is tiled.

    shardwise run --nproc 2 examples/long_context.py [--tokens 4096] [--steps 20]

On a machine without a GPU the processor plays the device: what a rank holds there is counted, and limited
(`memory_limits.device` of examples/long_context.json). The script first gives every rank a whole sequence, in the plain
way, and shows how that is refused; then it trains with all three. See docs/sequence.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention

import shardwise
from shardwise import checkpointing
from shardwise.memory import OutOfMemoryError, track_activations
from shardwise.parallel import DistributedAttention, SequenceLoader, begin, end, tiled_loss, token_loss

WORDS, WIDTH, HEADS, LAYERS = 2048, 64, 4, 2


class Block(nn.Module):
    """A block of a transformer; attention sees the whole sequence, also if this rank has some of its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.attention = DistributedAttention(scaled_dot_product_attention, scatter_idx=1, gather_idx=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Returns the mean loss over a rank's tokens, and their number."""

    def __init__(self, tokens: int, frugal: bool) -> None:
        super().__init__()
        self.frugal = frugal
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(tokens, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, shift_labels: torch.Tensor) -> Any:
        x = self.words(input_ids) + self.places(position_ids)
        for block in self.blocks:
            x = checkpointing.checkpoint(block, x) if self.frugal else block(x)
        x = self.norm(x)
        if self.frugal:
            return tiled_loss(self.head, x, shift_labels, tiles=16)
        return token_loss(self.head(x), shift_labels)


def samples(tokens: int) -> list[torch.Tensor]:
    """Return sequences of some of the words, each so many after the last."""
    return [(torch.arange(tokens) * (1 + n % 7) + 31 * n) % 128 for n in range(64)]


def collate(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Make a batch; labels are shifted when it is split."""
    ids = torch.stack(rows)
    return {"input_ids": ids, "labels": ids}


def train(config: dict[str, Any], tokens: int, steps: int, *, frugal: bool) -> float:
    """Train, and return the highest number of MiB that this rank has held on the device.

    Raises:
        OutOfMemoryError: that was more than the limit.
    """
    begin(config["sequence_parallel_size"])  # so that the same code serves whole sequences, too
    torch.manual_seed(0)
    engine, _, loader, _ = shardwise.initialize(
        model=Decoder(tokens, frugal), config=config, training_data=samples(tokens), collate_fn=collate
    )
    try:
        batches = iter(shardwise.RepeatingLoader(SequenceLoader(loader)))
        for step in range(steps):
            batch = {name: part.to(engine.device) for name, part in next(batches).items()}
            with track_activations(engine.accountant):
                loss, counted = engine(**batch)
                engine.backward(loss, weight=counted)
                engine.step()
            if engine.global_rank == 0 and (step % 5 == 0 or step + 1 == steps):
                print(f"step {step:3d}  loss {loss.item():.2f} of {int(counted)} tokens of {tokens}", flush=True)
        return float(engine.accountant.peak_total) / 2**20
    finally:
        engine.destroy()
        end()


def main() -> None:
    """Try it the plain way, then with the three."""
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found.add_argument("--config", type=Path, default=Path(__file__).with_suffix(".json"))
    found.add_argument("--tokens", type=int, default=4096, help="of a sequence")
    found.add_argument("--steps", type=int, default=20)
    options = found.parse_args()
    config = json.loads(options.config.read_text())
    shardwise.init_distributed(verbose=False)
    first = torch.distributed.get_rank() == 0
    try:
        train({**config, "sequence_parallel_size": 1}, options.tokens, 1, frugal=False)
    except OutOfMemoryError as error:
        if first:
            print(f"a whole sequence on every rank is refused:\n  {str(error).splitlines()[0]}\n", flush=True)
    peak = train(config, options.tokens, options.steps, frugal=True)
    if first:
        print(f"with {config['sequence_parallel_size']} ranks a sequence {peak:.1f} MiB on each", flush=True)


if __name__ == "__main__":
    main()
