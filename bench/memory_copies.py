"""What a copy of the training state in memory costs, and how fast a job goes on from it.

    python bench/memory_copies.py [--nproc 2] [--layers 12] [--repeat 5]

A stage-3 engine with AdamW in fp32 (12 bytes a parameter). Seconds that training is blocked (the slowest rank), the
median of `--repeat` rounds in which the candidates take turns:

- one node: into a tmpfs that all ranks share;
- a node for each rank: the same, and each part travels to the next rank over the process group;
- `save_checkpoint` to disk, with everything on it at the end;
- a plain copy of all tensors into buffers that exist already, as the least that any copy takes;
- `engine.resume()` from memory (checksums compared), and from disk (files in the page cache).

Results: bench/results/memory_copies_<ranks>.json.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from _jobs import answer, in_job, parser, ranks, read, worst
from checkpoint_io import CONFIG, make_model, step, tensors

import shardwise
from shardwise.comm.environment import MEMORY_DIRECTORY
from shardwise.engine import faults


def engine_with_copies(layers: int, directory: str) -> shardwise.Engine:
    """Return an engine that has taken a step, and copies into a directory when it is told to."""
    os.environ[MEMORY_DIRECTORY] = directory
    faults._engines = itertools.count()
    config = {**CONFIG, "checkpoint": {"memory_copies": {"every": 1 << 30}}}
    engine, *_ = shardwise.initialize(model=make_model(layers), config=config)
    step(engine)
    return engine


def measure(options: argparse.Namespace) -> None:
    """Measure on this rank; rank 0 answers with the seconds of the slowest one."""
    box = [None]
    if dist.get_rank() == 0:
        box = [(tempfile.mkdtemp(dir=options.memory), tempfile.mkdtemp(dir=options.directory))]
    dist.broadcast_object_list(box)
    memory, disk = box[0]
    rank = dist.get_rank()
    seconds: dict[str, list[float]] = {}
    sizes: dict[str, int] = {}
    places = {"one node": f"{memory}/shared", "a node for each rank": f"{memory}/node{rank}"}
    for name, place in places.items():
        engine = engine_with_copies(options.layers, place)
        buffers = [torch.empty_like(values) for values in tensors(engine)]

        def plain(engine: shardwise.Engine = engine, buffers: list[torch.Tensor] = buffers) -> None:
            for buffer, values in zip(buffers, tensors(engine), strict=True):
                buffer.copy_(values)

        candidates: dict[str, Callable[[], object]] = {
            f"copy, {name}": engine.copy_to_memory,
            f"resume from memory, {name}": lambda engine=engine: engine.resume(f"{memory}/nothing"),
        }
        if name == "one node":
            candidates["save_checkpoint"] = lambda engine=engine: engine.save_checkpoint(disk, tag="a")
            candidates["load_checkpoint"] = lambda engine=engine: engine.load_checkpoint(disk, tag="a")
            candidates["plain copy"] = plain
        for _ in range(options.repeat):
            for label, action in candidates.items():
                dist.barrier()
                start = time.perf_counter()
                action()
                (slowest,) = worst(time.perf_counter() - start)
                seconds.setdefault(label, []).append(slowest)
        copy = engine.last_memory_copy
        sizes[name] = copy.held_bytes
        sizes["part"] = copy.own_bytes
        engine.destroy()
        dist.barrier()
    if rank == 0:
        shutil.rmtree(memory)
        shutil.rmtree(disk)
    answer({"seconds": {name: statistics.median(times) for name, times in seconds.items()}, "sizes": sizes})


def main() -> None:
    """Measure, print and keep the results."""
    found = parser(__doc__)
    found.add_argument("--nproc", type=int, default=2)
    found.add_argument("--layers", type=int, default=12)
    found.add_argument("--repeat", type=int, default=5)
    found.add_argument("--memory", default="/dev/shm")
    found.add_argument("--directory", default=".")
    options = read(found)
    if options.quick:
        options.layers, options.repeat = 1, 1
    if in_job():
        shardwise.init_distributed(verbose=False)
        measure(options)
        return
    from _machine import save

    answered = ranks(options.nproc)
    part = answered["sizes"]["part"]
    rows = [
        {"operation": name, "seconds": round(seconds, 4), "gb_per_s_and_rank": round(part / seconds / 1e9, 2)}
        for name, seconds in answered["seconds"].items()
    ]
    for row in rows:
        print(f"{row['operation']:44} {row['seconds']:8.3f} s  {row['gb_per_s_and_rank']:6.2f} GB/s and rank")
    save(options.results, f"memory_copies_{options.nproc}", rows, ranks=options.nproc, bytes=answered["sizes"])


if __name__ == "__main__":
    main()
