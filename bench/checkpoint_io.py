"""Saving and loading a checkpoint against torch.save and torch.load of the same tensors.

    python bench/checkpoint_io.py [--nproc 2] [--layers 24] [--repeat 3] [--directory .]

A stage-3 engine with AdamW in fp32 (12 bytes a parameter). GB/s of all ranks together, best of `--repeat` rounds in
which the candidates take turns. Both ways of saving end with the bytes on disk (fsync). "cold" means that the files
were dropped from the page cache before. torch.load neither verifies bytes nor can load into another layout.
Results: bench/results/checkpoint_io_<ranks>.json.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from _jobs import answer, in_job, parser, ranks, read
from torch import nn

import shardwise

WIDTH = 2048
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3},
}


def tensors(engine: shardwise.Engine) -> Iterator[torch.Tensor]:
    """Yield what this rank holds of master weights and optimizer state."""
    update = engine.sharded.update
    for tensor in engine.sharded.registry:
        yield from (values for _, _, values in update.master_pieces(tensor.index))
        for key in ("exp_avg", "exp_avg_sq"):
            yield from (values for _, _, values in update.state_pieces(tensor.index, key))


def drop_from_cache(path: str) -> None:
    """Forget the file contents that the system has in memory."""
    for directory, _, names in os.walk(path):
        for name in names:
            descriptor = os.open(os.path.join(directory, name), os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def candidates(engine: shardwise.Engine, path: str, rank: int) -> dict[str, Callable[[], object]]:
    """The actions, in an order in which each finds the files that it reads."""
    own = f"{path}/rank{rank}.pt"

    def torch_save() -> None:
        with open(own, "wb") as file:
            # Views are cloned: torch.save would write the whole storage behind each.
            torch.save([values.clone() for values in tensors(engine)], file)
            file.flush()
            os.fsync(file.fileno())

    def torch_load() -> None:
        for values, loaded in zip(tensors(engine), torch.load(own, weights_only=True), strict=True):
            values.copy_(loaded)

    return {
        "save_checkpoint": lambda: engine.save_checkpoint(path, tag="a"),
        "torch.save": torch_save,
        "load_checkpoint, cached": lambda: engine.load_checkpoint(path, tag="a"),
        "torch.load, cached": torch_load,
        "load_checkpoint, cold": lambda: engine.load_checkpoint(path, tag="a"),
        "torch.load, cold": torch_load,
    }


def measure(options: argparse.Namespace) -> None:
    """Measure on this rank; rank 0 answers with the fastest seconds of each operation."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(options.layers)))
    size = 12 * sum(parameter.numel() for parameter in model.parameters())
    engine, *_ = shardwise.initialize(model=model, config=CONFIG)
    engine.backward(engine(torch.randn(1, WIDTH)).square().mean())
    engine.step()
    rank, world = engine.global_rank, engine.world_size
    box = [tempfile.mkdtemp(dir=options.directory) if rank == 0 else None]
    if world > 1:
        dist.broadcast_object_list(box)
    path = str(box[0])
    seconds: dict[str, list[float]] = {}
    for _ in range(options.repeat):
        for name, action in candidates(engine, path, rank).items():
            if name.endswith("cold") and rank == 0:
                drop_from_cache(path)
            engine._comm.barrier()
            start = time.perf_counter()
            action()
            engine._comm.barrier()
            seconds.setdefault(name, []).append(time.perf_counter() - start)
    engine.destroy()
    if rank == 0:
        shutil.rmtree(path)
    answer({"bytes": size, "seconds": {name: min(times) for name, times in seconds.items()}})


def main() -> None:
    """Measure, print and keep the results."""
    found = parser(__doc__)
    found.add_argument("--nproc", type=int, default=1)
    found.add_argument("--layers", type=int, default=24)
    found.add_argument("--repeat", type=int, default=3)
    found.add_argument("--directory", default=".")
    options = read(found)
    if options.quick:
        options.layers, options.repeat = 1, 1
    if in_job():
        measure(options)
        return
    from _machine import save

    answered = ranks(options.nproc)
    size = answered["bytes"]
    rows = [
        {"operation": name, "gb_per_s": round(size / seconds / 1e9, 2)} for name, seconds in answered["seconds"].items()
    ]
    for row in rows:
        print(f"{row['operation']:26} {row['gb_per_s']:6.2f} GB/s")
    name = f"checkpoint_io_{options.nproc}"
    notes = {"unit": "GB/s of all ranks", "gigabytes": round(size / 1e9, 2), "ranks": options.nproc}
    save(options.results, name, rows, **notes)


if __name__ == "__main__":
    main()
