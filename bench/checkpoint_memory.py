"""Host memory while a checkpoint is loaded, at every stage and on several numbers of ranks.

    python bench/checkpoint_memory.py [--layers 5] [--directory .]

A checkpoint of one rank (250 MB: weights and AdamW's state in fp32) is loaded into a fresh engine on 1, 2 and 4 ranks
at stages 0 to 3. Resident sizes above that of the bare process (before the engine was built, with all code loaded),
summed over ranks, over the size of the checkpoint: after loading, and the highest during it. What a layout holds
differs, what loading needs besides should not: reading a whole state dict on every rank takes a checkpoint's size each.
Results: bench/results/checkpoint_memory.json.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from _jobs import answer, forget_peak, in_job, parser, ranks, read, resident, trimmed
from torch import nn

import shardwise

WIDTH = 2048


def build(layers: int, width: int, stage: int) -> Any:
    """Return an engine."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    with shardwise.zero.Init(config_dict_or_path=config, enabled=stage == 3):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    return shardwise.initialize(model=model, config=config)[0]


def train(engine: Any, width: int) -> None:
    """Train one step."""
    engine.backward(engine(torch.randn(1, width)).square().mean())
    engine.step()


def measure(options: argparse.Namespace) -> None:
    """Save, or load at several stages, on this rank; rank 0 answers with the resident sizes of all ranks together."""
    if not dist.is_initialized():
        shardwise.init_distributed()
    tiny = build(1, 8, 3)
    train(tiny, 8)
    tiny.save_checkpoint(f"{options.directory}/tiny")
    tiny.load_checkpoint(f"{options.directory}/tiny")
    tiny.destroy()
    if not options.stages:
        engine = build(options.layers, WIDTH, 0)
        train(engine, WIDTH)
        engine.save_checkpoint(options.directory, tag="a")
        answer([])
        return
    figures = []
    for stage in map(int, options.stages.split(",")):
        bare = trimmed()
        engine = build(options.layers, WIDTH, stage)
        trimmed()
        forget_peak()
        dist.barrier()
        engine.load_checkpoint(options.directory, tag="a")
        highest = resident("VmHWM")
        sizes = torch.tensor([highest - bare, trimmed() - bare], dtype=torch.float64)
        dist.all_reduce(sizes)
        figures.append({"stage": stage, "highest": sizes[0].item(), "held": sizes[1].item()})
        engine.destroy()
        del engine
    answer(figures)


def main() -> None:
    """Measure, print and keep the results."""
    found = parser(__doc__)
    found.add_argument("--layers", type=int, default=5)
    found.add_argument("--directory", default=".")
    found.add_argument("--stages", default="", help="of the jobs that load; none: the job saves")
    options = read(found)
    if options.quick:
        options.layers = 1
    if in_job():
        measure(options)
        return
    from _machine import save

    size = 12 * options.layers * (WIDTH * WIDTH + WIDTH)
    path = tempfile.mkdtemp(dir=options.directory)
    rows = []
    try:
        ranks(1, "--directory", path)
        for world in (2,) if options.quick else (1, 2, 4):
            for figures in ranks(world, "--directory", path, "--stages", "3" if options.quick else "0,1,2,3"):
                held, highest = figures["held"] / size, figures["highest"] / size
                row = {"stage": figures["stage"], "ranks": world, "held": round(held, 3), "highest": round(highest, 3)}
                rows.append({**row, "above": round(highest - held, 3)})
                print(f"stage {row['stage']}, {world} ranks: held {held:.2f}, highest {highest:.2f}", flush=True)
    finally:
        shutil.rmtree(path)
    save(options.results, "checkpoint_memory", rows, unit="of the checkpoint's size", megabytes=round(size / 1e6))


if __name__ == "__main__":
    main()
