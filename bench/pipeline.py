"""Time, idle share and memory of a training step of a pipeline, beside torch.distributed.pipelining and DeepSpeed.

    python bench/pipeline.py [--nproc 2] [--size 27M] [--micro-batches 8] [--systems "torch 1f1b,shardwise 1f1b"]

All systems are built in the same processes, with the same layers, cuts and data, and take turns, forwards and backwards
through the list. Each rank is one stage (two for schedules with several chunks). A turn is some steps of all
micro-batches with a fused AdamW step. "idle" is the share of the batch in which a rank computes nothing (of this
library, measured around each computation); "memory" is the highest resident size of a rank in a turn over that before.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

from _jobs import answer, contest, forget_peak, in_job, ranks, read, resident, start_group, trimmed, worst

SYSTEMS = [
    *(f"shardwise {name}" for name in ("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zbv")),
    *(f"torch {name}" for name in ("gpipe", "1f1b", "interleaved", "zbv")),
    "DeepSpeed",
]
CHUNKS = {"interleaved": 2, "zbv": 2}


def layers(size: Any) -> list[tuple[Any, ...]]:
    """Return class and arguments of each layer."""
    import torch
    import torch.nn.functional as F
    from _systems import Block
    from torch import nn

    class Tokens(nn.Module):
        def __init__(self, vocabulary: int, length: int, width: int) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))

    class Head(nn.Module):
        def __init__(self, width: int, vocabulary: int) -> None:
            super().__init__()
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(self.norm(x), self.head.weight)

    blocks = [(Block, size.width, size.heads) for _ in range(size.layers)]
    first, last = (Tokens, size.vocabulary, size.length, size.width), (Head, size.width, size.vocabulary)
    return [first, *blocks, last]


def loss_of(output: Any, ids: Any) -> Any:
    """Return the mean cross-entropy."""
    import torch.nn.functional as F

    return F.cross_entropy(output.flatten(0, 1).float(), ids.flatten())


def cuts(count: int, stages: int) -> list[int]:
    """Return the first layer of each stage, and the number of layers: blocks are spread evenly."""
    blocks = count - 2
    return [0, *(1 + blocks * stage // stages for stage in range(1, stages)), count]


def batches(options: argparse.Namespace) -> list[Any]:
    """Return the micro-batches of a step."""
    import torch

    generator = torch.Generator().manual_seed(1)
    size = options.shape
    return [
        torch.randint(0, size.vocabulary, (size.rows, size.length), generator=generator)
        for _ in range(options.micro_batches)
    ]


def of_shardwise(options: argparse.Namespace, name: str) -> tuple[Callable[[], Any], Any]:
    """Return a function that makes a step, and the engine."""
    import shardwise
    from shardwise.pipe import LayerSpec, PipelineModule

    specs, chunks = [LayerSpec(*layer) for layer in layers(options.shape)], CHUNKS.get(name, 1)
    model = PipelineModule(
        specs, num_stages=options.nproc, loss_fn=loss_of, partition_method=cuts(len(specs), options.nproc * chunks)
    )
    config = {
        "train_micro_batch_size_per_gpu": options.shape.rows,
        "gradient_accumulation_steps": options.micro_batches,
        "bf16": {"enabled": options.dtype == "bf16"},
        "pipeline": {"schedule": name, "chunks": chunks},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    engine = shardwise.initialize(model=model, config=config)[0]
    data = [(ids, ids) for ids in batches(options)]
    return lambda: engine.train_batch(iter(data)), engine


def of_deepspeed(options: argparse.Namespace, name: str) -> tuple[Callable[[], Any], Any]:
    """Return a function that makes a step."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    deepspeed.init_distributed("gloo")
    specs = [LayerSpec(*layer) for layer in layers(options.shape)]
    model = PipelineModule(specs, num_stages=options.nproc, loss_fn=loss_of, partition_method="uniform")
    config = {
        "train_micro_batch_size_per_gpu": options.shape.rows,
        "gradient_accumulation_steps": options.micro_batches,
        "bf16": {"enabled": options.dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "steps_per_print": 10**9,
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    data = [(ids, ids) for ids in batches(options)]
    return lambda: engine.train_batch(iter(data)), None


def of_torch(options: argparse.Namespace, name: str) -> tuple[Callable[[], Any], Any]:
    """Return a function that makes a step."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed import pipelining

    rank, world, chunks = dist.get_rank(), options.nproc, CHUNKS.get(name, 1)
    specs = layers(options.shape)
    stages, edges = world * chunks, cuts(len(specs), world * chunks)
    own = [rank, 2 * world - 1 - rank] if name == "zbv" else [rank + world * chunk for chunk in range(chunks)]
    parts = [nn.Sequential(*(cls(*args) for cls, *args in specs[edges[n] : edges[n + 1]])) for n in own]
    if options.dtype == "bf16":
        parts = [part.to(torch.bfloat16) for part in parts]
    made = [
        pipelining.PipelineStage(part, number, stages, torch.device("cpu"))
        for number, part in zip(own, parts, strict=True)
    ]
    optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=1e-4, fused=True)
    kinds = {
        "gpipe": pipelining.ScheduleGPipe,
        "1f1b": pipelining.Schedule1F1B,
        "interleaved": pipelining.ScheduleInterleaved1F1B,
        "zbv": pipelining.ScheduleZBVZeroBubble,
    }
    several = chunks > 1
    schedule = kinds[name](made if several else made[0], options.micro_batches, loss_fn=loss_of)
    ids = torch.cat(batches(options))
    first, last = 0 in own, stages - 1 in own

    def step() -> None:
        optimizer.zero_grad()
        schedule.step(*([ids] if first else []), **({"target": ids, "losses": []} if last else {}))
        optimizer.step()

    return step, None


def make(options: argparse.Namespace, system: str) -> tuple[Callable[[], Any], Any]:
    """Build a system."""
    kind, _, name = system.partition(" ")
    return {"shardwise": of_shardwise, "torch": of_torch, "DeepSpeed": of_deepspeed}[kind](options, name)


def measure(options: argparse.Namespace) -> None:
    """Take turns on this rank; rank 0 answers with seconds a step, idle shares and memory."""
    import torch.distributed as dist

    start_group("shardwise" if any(name.startswith("shardwise") for name in options.systems) else "torch")
    runs = {name: make(options, name) for name in options.systems}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    memory: dict[str, float] = {}
    idle: dict[str, float | None] = {}
    for turn in range(-1, options.rounds):
        for name in runs if turn % 2 == 0 else reversed(runs):
            step, engine = runs[name]
            before = trimmed()
            forget_peak()
            dist.barrier()
            begun = time.perf_counter()
            for _ in range(options.steps):
                step()
            dist.barrier()
            spent = (time.perf_counter() - begun) / options.steps
            if turn >= 0:
                seconds[name].append(worst(spent)[0])
                memory[name] = worst(resident("VmHWM") - before)[0]
    for name, (step, engine) in runs.items():
        if engine is None:
            idle[name] = None
            continue
        with engine.record_idle() as times:
            step()
        idle[name] = times.idle_share
    answer({"seconds": seconds, "memory": memory, "idle": idle})


def available() -> list[str]:
    """Return the systems whose packages are installed."""
    return [name for name in SYSTEMS if name != "DeepSpeed" or importlib.util.find_spec("deepspeed")]


def main() -> None:
    """Run the contest, print the table and keep it."""
    parser = contest(__doc__, size="27M", dtype="fp32", nproc=2, rounds=5)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps in a turn")
    given = parser.parse_args()
    if given.systems is None:
        # The smallest model has too few layers for several stages a rank.
        fit = [name for name in available() if not given.quick or name.partition(" ")[2] not in CHUNKS]
        parser.set_defaults(systems=",".join(fit))
    options = read(parser)
    if in_job():
        measure(options)
        return
    from _machine import save

    found = ranks(options.nproc)
    medians = {name: statistics.median(times) for name, times in found["seconds"].items()}
    others = [time for name, time in medians.items() if not name.startswith("shardwise")]
    best = min(others) if others else min(medians.values())
    rows = []
    for name, median in medians.items():
        row = {"system": name, "median_ms": median * 1e3, "ratio_to_best_other": median / best}
        row |= {"idle_share": found["idle"][name], "memory_mb": found["memory"][name] / 1e6}
        rows.append(row)
        idle = "" if row["idle_share"] is None else f"  idle {row['idle_share']:4.0%}"
        figures = f"median {median * 1e3:7.0f} ms  ratio {median / best:.2f}  memory {row['memory_mb']:6.0f} MB"
        print(f"{name:24s} {figures}{idle}")
    save(
        options.results,
        f"pipeline_{options.size}_{options.dtype}_{options.nproc}_m{options.micro_batches}",
        rows,
        rounds=options.rounds,
    )


if __name__ == "__main__":
    main()
