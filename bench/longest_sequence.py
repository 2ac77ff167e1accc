"""The longest sequence that fits a limit of memory: alone, in tiles, and shared by ranks.

    python bench/longest_sequence.py [--limit 640] [--nproc 2] [--ways "plain,tiled,shared,shared tiled"]

A small decoder with a large vocabulary trains on one sequence a group of ranks, by ZeRO stage 3. `--limit` is in MiB of
resident memory of each rank above that before the first long sequence (as in largest_batch.py): it stands for the
activations' part of a device. The length is doubled until some rank's highest resident size in a training step exceeds
the limit, then bisected, in steps of `--step` tokens. Ways: `plain` gives each rank a sequence of its own; `recomputed`
keeps inputs of layers only; `tiled` computes loss and MLP in tiles besides; `shared` lets all ranks share a sequence.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from _jobs import answer, forget_peak, in_job, parser, ranks, read, resident, start_group, trimmed, worst
from largest_batch import largest

WAYS = ("plain", "recomputed", "tiled", "shared", "shared recomputed", "shared tiled")


def decoder(words: int, width: int, layers: int, way: str) -> Any:
    """Return a decoder that gives loss and tokens; attention works on shared sequences if there are any."""
    import torch
    from torch import nn
    from torch.nn.functional import scaled_dot_product_attention
    from torch.utils.checkpoint import checkpoint

    from shardwise.parallel import DistributedAttention, TiledMLP, tiled_loss, token_loss

    tiled, recomputed, heads = "tiled" in way, "recomputed" in way or "tiled" in way, 4

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            self.mlp = TiledMLP(mlp) if tiled else mlp
            core = scaled_dot_product_attention
            self.attention = DistributedAttention(core, scatter_idx=1, gather_idx=2) if "shared" in way else core

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows, tokens, _ = x.shape
            q, k, v = self.qkv(self.norm1(x)).view(rows, tokens, 3, heads, -1).permute(2, 0, 3, 1, 4)
            x = x + self.out(self.attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))
            return x + self.mlp(self.norm2(x))

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.blocks = nn.Embedding(words, width), nn.ModuleList(Block() for _ in range(layers))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
            x = self.words(ids)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if recomputed else block(x)
            hidden = self.norm(x)
            return tiled_loss(self.head, hidden, labels, tiles=64) if tiled else token_loss(self.head(hidden), labels)

    torch.manual_seed(0)
    return Decoder()


def measure(options: argparse.Namespace, way: str) -> None:
    """Search on this rank, in step with the others; rank 0 answers with the row."""
    import torch
    import torch.distributed as dist

    import shardwise
    from shardwise.parallel import split

    start_group("shardwise")
    shared = dist.get_world_size() if "shared" in way else 1
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "sequence_parallel_size": shared,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3},
    }
    model = decoder(options.words, options.width, options.layers, way)
    engine, *_ = shardwise.initialize(model=model, config=config)
    seconds: dict[int, float] = {}
    peaks: dict[int, float] = {}

    def step(tokens: int) -> None:
        whole = torch.randint(options.words, (1, tokens + 1), generator=torch.Generator().manual_seed(tokens))
        pair = (whole[:, :-1], whole[:, 1:])
        ids, labels = split(pair) if shared > 1 else pair
        loss, counted = engine(ids, labels)
        engine.backward(loss, weight=counted)
        engine.step()

    for _ in range(2):
        step(4 * dist.get_world_size())
    before = trimmed()

    def fits(steps: int) -> bool:
        tokens = steps * options.step
        trimmed()
        forget_peak()
        start = time.perf_counter()
        step(tokens)
        peaks[tokens], seconds[tokens] = worst((resident("VmHWM") - before) / 2**20, time.perf_counter() - start)
        return peaks[tokens] <= options.limit

    tokens = largest(fits, options.most // options.step) * options.step
    found = {"tokens": tokens, "peak_mib": peaks.get(tokens), "seconds": seconds.get(tokens)}
    engine.destroy()
    answer({"way": way, **found})


def main() -> None:
    """Run every way, print the table and keep it."""
    found = parser(__doc__)
    found.add_argument("--limit", type=float, default=640, help="MiB of a rank above what the model takes")
    found.add_argument("--nproc", type=int, default=2, help="number of ranks")
    found.add_argument("--ways", default=",".join(WAYS), help="separated by commas")
    found.add_argument("--words", type=int, default=32768, help="words of the vocabulary")
    found.add_argument("--width", type=int, default=256)
    found.add_argument("--layers", type=int, default=4)
    found.add_argument("--step", type=int, default=256, help="tokens by which lengths differ")
    found.add_argument("--most", type=int, default=1 << 17, help="no longer sequence is tried")
    found.add_argument("--way", help=argparse.SUPPRESS)
    options = read(found)
    if options.quick:
        options.limit, options.words, options.width, options.layers = 24, 4096, 32, 2
        options.step, options.most = 64, 2048
    if in_job():
        measure(options, options.way)
        return
    from _machine import save

    rows = []
    for way in options.ways.split(","):
        row = ranks(options.nproc, "--way", way)
        rows.append(row)
        shown = f"{way:18s} {row['tokens']:7d} tokens"
        if row["tokens"]:
            shown += f"  peak {row['peak_mib']:5.0f} MiB  training step {row['seconds']:6.2f} s"
        print(shown, flush=True)
    kept = {name: getattr(options, name) for name in ("limit", "words", "width", "layers", "step")}
    save(options.results, f"longest_sequence_{options.nproc}", rows, **kept)


if __name__ == "__main__":
    main()
