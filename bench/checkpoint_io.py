"""Saving and loading a checkpoint: shardwise, torch.save, torch.distributed.checkpoint, DeepSpeed, and the bare disk.

    python bench/checkpoint_io.py [--nproc 2] [--layers 24] [--repeat 3] [--directory .] [--only shardwise,disk]

The same bytes for all: a model and AdamW's state in fp32, 12 bytes a parameter, sharded at ZeRO stage 3 (DTensors for
torch.distributed.checkpoint, a list of plain tensors on each rank for torch.save). GB/s of all ranks together: the
median of `--repeat` rounds in which the systems take turns. Every way of saving ends with the bytes on disk: what a
system has not flushed itself is flushed in the measured time. *disk* is files of as many bytes, written in blocks of
4 MiB and flushed, and read into one block over and over: what nothing can be faster than. *cold* means that the files
were dropped from the page cache before. Processor time is that of all threads and ranks, in seconds a GB, which other
jobs on the machine disturb less. Memory is the highest resident size during the operation above that before it,
summed over ranks, over the checkpoint's size; what a load has to make anew (the state of a fresh optimizer) was there
before. *direct* is `checkpoint.writer.type` "fast": written past the page cache, from where a following load then has
nothing. torch.save and torch.load neither verify bytes nor can load into another layout.
Results: bench/results/checkpoint_io_<ranks>.json.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from _jobs import answer, forget_peak, in_job, parser, ranks, read, resident, trimmed
from torch import nn

import shardwise

WIDTH = 2048
BLOCK = 4 << 20
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3},
}
OPERATIONS = ("save", "load", "load cold")
SYSTEMS = ("disk", "shardwise", "shardwise direct", "torch.save", "torch DCP", "DeepSpeed")


class System(Protocol):
    """Something that saves and loads; each rank calls with the same empty or filled directory."""

    def save(self, path: str) -> None:
        """Write everything below `path`."""

    def load(self, path: str) -> None:
        """Read it back into the place that it came from."""


def make_model(layers: int) -> nn.Module:
    """Return the model whose state is saved."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def step(engine: Any) -> None:
    """Train one step, so that the optimizer has state."""
    engine.backward(engine(torch.randn(1, WIDTH)).square().mean())
    engine.step()


class Disk:
    """As many bytes as the checkpoint has, without anything else."""

    def __init__(self, size: int) -> None:
        self.block = memoryview(bytearray(os.urandom(1 << 20) * 4))
        self.count = size // dist.get_world_size() // BLOCK

    def save(self, path: str) -> None:
        """Write this rank's part."""
        with open(f"{path}/{dist.get_rank()}", "wb", buffering=0) as file:
            for _ in range(self.count):
                file.write(self.block)

    def load(self, path: str) -> None:
        """Read it."""
        with open(f"{path}/{dist.get_rank()}", "rb", buffering=0) as file:
            while file.readinto(self.block):
                pass


def tensors(engine: Any) -> Iterator[torch.Tensor]:
    """Yield what this rank holds of master weights and optimizer state."""
    update = engine.sharded.update
    for tensor in engine.sharded.registry:
        yield from (values for _, _, values in update.master_pieces(tensor.index))
        for key in ("exp_avg", "exp_avg_sq"):
            yield from (values for _, _, values in update.state_pieces(tensor.index, key))


class Ours:
    """An engine of shardwise, which writes through the page cache or past it."""

    def __init__(self, layers: int, *, direct: bool = False) -> None:
        config = {**CONFIG, "checkpoint": {"writer": {"type": "fast"}}} if direct else CONFIG
        self.engine, *_ = shardwise.initialize(model=make_model(layers), config=config)
        step(self.engine)

    def save(self, path: str) -> None:
        """Save a checkpoint."""
        self.engine.save_checkpoint(path, tag="a")

    def load(self, path: str) -> None:
        """Load it."""
        self.engine.load_checkpoint(path, tag="a")


class Plain:
    """torch.save of the tensors that each rank holds."""

    def __init__(self, ours: Ours) -> None:
        self.ours = ours

    def save(self, path: str) -> None:
        """Save a list of tensors. Views are cloned: torch.save would write the whole storage behind each."""
        torch.save([values.clone() for values in tensors(self.ours.engine)], f"{path}/{dist.get_rank()}.pt")

    def load(self, path: str) -> None:
        """Load them and copy them to their places."""
        loaded = torch.load(f"{path}/{dist.get_rank()}.pt", weights_only=True)
        for values, saved in zip(tensors(self.ours.engine), loaded, strict=True):
            values.copy_(saved)


class Distributed:
    """torch.distributed.checkpoint of sharded tensors."""

    def __init__(self, layers: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.state = {
            f"{layer}.{name}.{kind}": distribute_tensor(torch.randn(shape), mesh, [Shard(0)])
            for layer in range(layers)
            for name, shape in (("weight", (WIDTH, WIDTH)), ("bias", (WIDTH,)))
            for kind in ("value", "exp_avg", "exp_avg_sq")
        }

    def save(self, path: str) -> None:
        """Save with the file system writer and its default settings, by which it flushes."""
        import torch.distributed.checkpoint as dcp

        dcp.save(self.state, storage_writer=dcp.FileSystemWriter(path))

    def load(self, path: str) -> None:
        """Load in place."""
        import torch.distributed.checkpoint as dcp

        dcp.load(self.state, storage_reader=dcp.FileSystemReader(path))


class Peer:
    """An engine of DeepSpeed."""

    def __init__(self, layers: int) -> None:
        import deepspeed

        model = make_model(layers)
        config = {**CONFIG, "zero_allow_untested_optimizer": True, "steps_per_print": 10**9}
        del config["optimizer"]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        step(self.engine)

    def save(self, path: str) -> None:
        """Save a checkpoint."""
        self.engine.save_checkpoint(path, tag="a")

    def load(self, path: str) -> None:
        """Load it."""
        self.engine.load_checkpoint(path, tag="a")


def files(path: str) -> Iterator[str]:
    """Yield all files below a directory."""
    for directory, _, names in os.walk(path):
        yield from (os.path.join(directory, name) for name in sorted(names))


def flush(path: str) -> None:
    """Bring this rank's share of the files to disk."""
    for number, name in enumerate(files(path)):
        if number % dist.get_world_size() == dist.get_rank():
            descriptor = os.open(name, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def drop_from_cache(path: str) -> None:
    """Forget the file contents that the system has in memory."""
    for name in files(path):
        descriptor = os.open(name, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def timed(system: System, operation: str, path: str) -> tuple[float, float, float]:
    """Do an operation; return seconds, and of all ranks together processor seconds and bytes of memory taken."""
    if dist.get_rank() == 0 and operation == "save":
        shutil.rmtree(path, ignore_errors=True)
        os.mkdir(path)
    if dist.get_rank() == 0 and operation == "load cold":
        drop_from_cache(path)
    before = trimmed()
    forget_peak()
    dist.barrier()
    start, processor = time.perf_counter(), time.process_time()
    if operation == "save":
        system.save(path)
        dist.barrier()
        flush(path)
    else:
        system.load(path)
    dist.barrier()
    seconds = time.perf_counter() - start
    grown = max(0, resident("VmHWM") - before)
    together = torch.tensor([time.process_time() - processor, grown], dtype=torch.float64)
    dist.all_reduce(together)
    return seconds, together[0].item(), together[1].item()


def measure(options: argparse.Namespace) -> None:
    """Measure on this rank; rank 0 answers with the rows."""
    torch.manual_seed(0)
    if not dist.is_initialized():
        shardwise.init_distributed()
    ours = Ours(options.layers)
    size = 12 * options.layers * (WIDTH * WIDTH + WIDTH)
    makers = {
        "disk": lambda: Disk(size),
        "shardwise": lambda: ours,
        "shardwise direct": lambda: Ours(options.layers, direct=True),
        "torch.save": lambda: Plain(ours),
        "torch DCP": lambda: Distributed(options.layers),
        "DeepSpeed": lambda: Peer(options.layers),
    }
    systems: dict[str, System] = {name: makers[name]() for name in options.chosen}
    box = [tempfile.mkdtemp(dir=options.directory) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    figures: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for turn in range(options.repeat):
        # Who comes first changes, so that nobody always finds the disk as the one before has left it.
        order = options.chosen[turn % len(options.chosen) :] + options.chosen[: turn % len(options.chosen)]
        for operation in OPERATIONS:
            for name in order:
                figures.setdefault((name, operation), []).append(timed(systems[name], operation, f"{box[0]}/{name}"))
    if dist.get_rank() == 0:
        shutil.rmtree(str(box[0]))
    seconds, processor = (
        {key: statistics.median(turn[column] for turn in turns) for key, turns in figures.items()} for column in (0, 1)
    )
    rows = []
    for name in options.chosen:
        row: dict[str, Any] = {"system": name}
        for operation in OPERATIONS:
            key = operation.replace(" ", "_")
            row[f"{key}_gb_per_s"] = round(size / seconds[name, operation] / 1e9, 3)
            row[f"{key}_processor"] = round(processor[name, operation] / size * 1e9, 3)
            row[f"{key}_memory"] = round(max(turn[2] for turn in figures[name, operation]) / size, 3)
            if "disk" in options.chosen:
                row[f"{key}_of_disk"] = round(seconds["disk", operation] / seconds[name, operation], 3)
        rows.append(row)
    answer({"bytes": size, "rows": rows})


def main() -> None:
    """Measure, print and keep the results."""
    found = parser(__doc__)
    found.add_argument("--nproc", type=int, default=1)
    found.add_argument("--layers", type=int, default=24)
    found.add_argument("--repeat", type=int, default=3)
    found.add_argument("--directory", default=".")
    found.add_argument("--only", help=f"systems, separated by commas; default: of {', '.join(SYSTEMS)} those installed")
    options = read(found)
    if options.quick:
        options.layers, options.repeat = 1, 1
    installed = [name for name in SYSTEMS if name != "DeepSpeed" or importlib.util.find_spec("deepspeed") is not None]
    options.chosen = options.only.split(",") if options.only else installed
    if in_job():
        measure(options)
        return
    from _machine import save

    answered = ranks(options.nproc)
    for row in answered["rows"]:
        fields = [operation.replace(" ", "_") for operation in OPERATIONS]
        speeds = "  ".join(f"{field} {row[f'{field}_gb_per_s']:6.2f}" for field in fields)
        processor = f"{row['save_processor']:.2f}, {row['load_processor']:.2f}"
        memory = f"{row['save_memory']:.2f}, {row['load_memory']:.2f}"
        print(f"{row['system']:12} GB/s: {speeds}   processor s/GB {processor}   memory {memory}")
    notes = {"unit": "GB/s of all ranks", "gigabytes": round(answered["bytes"] / 1e9, 2), "ranks": options.nproc}
    save(options.results, f"checkpoint_io_{options.nproc}", answered["rows"], **notes)


if __name__ == "__main__":
    main()
