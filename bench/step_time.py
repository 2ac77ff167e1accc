"""Time of one training step: every ZeRO stage against DistributedDataParallel, in one run.

All contestants are built in the same processes and take turns (forwards, then backwards through the list), so that a
noisy machine is noisy for all of them. The figure that counts is the ratio of medians.

    shardwise run --nproc 2 bench/step_time.py [--dtype fp32|bf16] [--rounds 10]

DDP computes bf16 by autocast on fp32 weights, with fused AdamW.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _machine import save
from torch import nn

import shardwise


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix positions, then features."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A small GPT that returns its own loss."""

    def __init__(self, width: int = 512, layers: int = 8, vocabulary: int = 1024, length: int = 128) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 8) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy of the ids themselves."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), ids.flatten())


def ddp(ids: torch.Tensor, bf16: bool) -> Callable[[], None]:
    """Make one step of DistributedDataParallel."""
    model = nn.parallel.DistributedDataParallel(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def engine(stage: int, ids: torch.Tensor, bf16: bool) -> Callable[[], None]:
    """Make one step of an engine."""
    made, *_ = shardwise.initialize(
        model=GPT(),
        config={
            "train_micro_batch_size_per_gpu": ids.shape[0],
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": bf16},
        },
    )

    def step() -> None:
        made.backward(made(ids))
        made.step()

    return step


def main() -> None:
    """Run the contest and print the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--local_rank", type=int, default=0)
    options = parser.parse_args()
    shardwise.init_distributed()
    bf16 = options.dtype == "bf16"
    torch.manual_seed(0)
    ids = torch.randint(0, 1024, (4, 128))
    contestants = {"DDP": ddp(ids, bf16)} | {f"stage {stage}": engine(stage, ids, bf16) for stage in range(4)}
    wall: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(-2, options.rounds):
        for name in contestants if turn % 2 == 0 else reversed(contestants):
            dist.barrier()
            start = time.perf_counter()
            contestants[name]()
            if turn >= 0:
                wall[name].append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        base = statistics.median(wall["DDP"])
        rows = {
            name: {
                "median_ms": statistics.median(times) * 1e3,
                "lowest_ms": min(times) * 1e3,
                "highest_ms": max(times) * 1e3,
                "ratio_to_ddp": statistics.median(times) / base,
            }
            for name, times in wall.items()
        }
        for name, row in rows.items():
            print(
                f"{name:8s} median {row['median_ms']:7.0f} ms  lowest {row['lowest_ms']:7.0f}  "
                f"highest {row['highest_ms']:7.0f}  ratio {row['ratio_to_ddp']:.2f}"
            )
        save(
            f"step_time_{options.dtype}_{dist.get_world_size()}",
            [{"contestant": name, **row} for name, row in rows.items()],
            command=f"shardwise run --nproc {dist.get_world_size()} bench/step_time.py --dtype {options.dtype}",
            rounds=options.rounds,
        )
    dist.barrier()


if __name__ == "__main__":
    main()
