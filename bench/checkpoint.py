"""Checkpoints: saving and loading, in the background, in memory, and what a load takes of memory.

    python bench/checkpoint.py --what io [--nproc 2] [--layers 24] [--rounds 6] [--systems "shardwise;disk"]
    python bench/checkpoint.py --what background [--nproc 2] [--layers 24] [--rounds 5] [--cached]
    python bench/checkpoint.py --what background --gpu [--device cuda] [--size 400M] [--rounds 3]
    python bench/checkpoint.py --what copies [--nproc 2] [--layers 12] [--rounds 5]
    python bench/checkpoint.py --what memory [--layers 5]

On CPU ranks the state is that of linear layers with AdamW in fp32, 12 bytes a parameter, sharded at stage 3; with --gpu
that of a GPT in bf16 with fp32 masters, 14 bytes a parameter, on one rank. In every round all take turns.

*io*: the same bytes for all (DTensors for torch.distributed.checkpoint, a list of plain tensors on each rank for
torch.save). GB/s of all ranks together, medians. Every way of saving ends with the bytes on disk: what a system has not
flushed itself is flushed in the measured time. *disk* is files of as many bytes, written in 4 MiB blocks and flushed,
and read into one block over and over: what nothing can be faster than. *cold* means that the files were dropped from
the page cache before. Processor time is that of all threads and ranks. Memory is the highest resident size during the
operation above that before it, summed over ranks, over the checkpoint's size. Each system should be first in as many
rounds, because a virtual machine that has given free memory back needs time to fill the page cache again. *direct* is
`checkpoint.writer.type` "fast": written past the page cache. torch.save and torch.load neither verify bytes nor can
load into another layout.

*background*: "blocked" is the time for which the script does not go on, "written" that until the bytes are on the disk.
Steps go on meanwhile; "slowdown" is the time of one over that of a step between saves, "first_step" that of the first,
which may have to wait for a copy. "copy" copies the same tensors into host memory that is there already (page-locked
for CUDA). torch.distributed.checkpoint's async_save saves the same tensors, in a thread and on a CPU in a process, with
its staged copy reused where torch allows that. Ratios are of one round. The first round, which makes buffers, is apart.

*copies*: seconds that training is blocked, of the slowest rank. *one node*: into a tmpfs that all ranks share; *a node
for each rank*: each part also travels to the next rank over the process group. Beside them `save_checkpoint`,
`load_checkpoint` (files in the page cache), `engine.resume()` from memory, and a plain copy of all tensors.

*memory*: a checkpoint of one rank is loaded into a fresh engine on 1, 2 and 4 ranks at stages 0 to 3. Resident sizes
above that of the bare process, summed over ranks, over the size of the checkpoint: after loading, and the highest
during it. Reading a whole state dict on every rank would take a checkpoint's size each.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from harness import (
    Device,
    Row,
    answer,
    child,
    data_of,
    forget_peak,
    highest_resident,
    job,
    medians,
    options_of,
    over_ranks,
    own_group,
    reason,
    save,
    serve,
    shared_folder,
    show,
    spent,
    trimmed,
)
from systems import SIZES, Case, config_of, installed
from systems import shardwise as training_of
from torch import nn

WIDTH, BLOCK, STEPS = 2048, 4 << 20, 3
"""Of a layer; bytes of a block of "disk"; steps between saves that steps during saves are compared with."""
KEEPS_STAGED = hasattr(dist, "all_gather_single")
"""Whether torch's stager may be used again: that of 2.11 raises in its second save."""


def engine_of(layers: int, stage: int = 3, width: int = WIDTH, trained: bool = True, **keys: Any) -> Any:
    """Return an engine of linear layers; if `trained`, it has taken a step, so that the optimizer has state.

    The others are for loads, whose memory is compared with the shards.
    """
    import shardwise

    zero = {"stage": stage, **({} if trained else {"stage3_param_persistence_threshold": 0})}
    config = config_of(1, 1e-3, zero_optimization=zero, checkpoint=keys)
    with shardwise.zero.Init(config_dict_or_path=config, enabled=stage == 3):
        model = model_of(layers, width)
    engine, *_ = shardwise.initialize(model=model, config=config)
    if trained:
        step(engine, width)
    return engine


def model_of(layers: int, width: int = WIDTH) -> nn.Module:
    """Return linear layers."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def step(engine: Any, width: int = WIDTH, rows: int = 1) -> None:
    """Train one step."""
    engine.backward(engine(torch.randn(rows, width)).square().mean())
    engine.step()


def tensors(engine: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that this rank has of a checkpoint: 16-bit parameters, master weights and optimizer state."""
    update = engine.sharded.update
    yield from (p.detach() for p in engine.module.parameters() if p.dtype != torch.float32)
    for tensor in engine.sharded.registry:
        yield from (values for _, _, values in update.master_pieces(tensor.index))
        for key in ("exp_avg", "exp_avg_sq"):
            yield from (values for _, _, values in update.state_pieces(tensor.index, key))


# -- saving and loading ------------------------------------------------------------------------------------------------


class System(NamedTuple):
    """Ways to write everything below a path, and to read it back into the place that it came from, on each rank."""

    save: Callable[[str], object]
    load: Callable[[str], object]


def disk(size: int) -> System:
    """Write and read as many bytes as the checkpoint has, without anything else."""
    block, rank = memoryview(bytearray(os.urandom(1 << 20) * 4)), dist.get_rank()
    count = size // dist.get_world_size() // BLOCK

    def save(path: str) -> None:
        with open(f"{path}/{rank}", "wb", buffering=0) as file:
            for _ in range(count):
                file.write(block)

    def load(path: str) -> None:
        with open(f"{path}/{rank}", "rb", buffering=0) as file:
            while file.readinto(block):
                pass

    return System(save, load)


def by_engine(engine: Any) -> System:
    """Save and load a checkpoint of an engine of shardwise or DeepSpeed."""
    return System(
        functools.partial(engine.save_checkpoint, tag="a"), functools.partial(engine.load_checkpoint, tag="a")
    )


def plain(engine: Any) -> System:
    """torch.save of a list of the tensors that each rank holds."""
    rank = dist.get_rank()

    def load(path: str) -> None:
        loaded = torch.load(f"{path}/{rank}.pt", weights_only=True)
        for values, saved in zip(tensors(engine), loaded, strict=True):
            values.copy_(saved)

    # Views are cloned: torch.save would write the whole storage behind each.
    return System(lambda path: torch.save([values.clone() for values in tensors(engine)], f"{path}/{rank}.pt"), load)


def distributed(layers: int) -> System:
    """torch.distributed.checkpoint of sharded tensors, with its default settings, by which it flushes."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {
        f"{layer}.{name}.{kind}": distribute_tensor(torch.randn(shape), mesh, [Shard(0)])
        for layer in range(layers)
        for name, shape in (("weight", (WIDTH, WIDTH)), ("bias", (WIDTH,)))
        for kind in ("value", "exp_avg", "exp_avg_sq")
    }
    return System(
        lambda path: dcp.save(state, storage_writer=dcp.FileSystemWriter(path)),
        lambda path: dcp.load(state, storage_reader=dcp.FileSystemReader(path)),
    )


def peer_of(layers: int) -> Any:
    """Return an engine of DeepSpeed."""
    import deepspeed

    model = model_of(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "steps_per_print": 10**9}
    config["zero_allow_untested_optimizer"] = True
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    step(engine)
    return engine


def each_file(path: str, action: Callable[[int], object], part: int = 0, parts: int = 1) -> None:
    """Open each file below a directory, or every so manieth of them, and do something with its descriptor."""
    files = sorted(os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
    for file in files[part::parts]:
        descriptor = os.open(file, os.O_RDONLY)
        action(descriptor)
        os.close(descriptor)


def timed(system: System, operation: str, path: str) -> Row:
    """Do an operation; return seconds, and of all ranks together processor seconds and bytes of memory taken."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0 and operation == "save":
        shutil.rmtree(path, ignore_errors=True)
        os.mkdir(path)
    if rank == 0 and operation == "load_cold":
        each_file(path, lambda descriptor: os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED))

    def act() -> None:
        if operation == "save":
            system.save(path)
            dist.barrier()
            each_file(path, os.fsync, rank, world)
        else:
            system.load(path)
        dist.barrier()

    figures: dict[str, float] = {}
    memory = Device("cpu").taken(lambda: figures.update(spent(act)))
    return {"wall": figures["wall"], **over_ranks({"processor": figures["processor"], "memory": max(0, memory)}, "sum")}


OPERATIONS = ("save", "load", "load_cold")
MAKERS: dict[str, Callable[[int], System]] = {
    "disk": lambda layers: disk(size_of(layers)),
    "shardwise": lambda layers: by_engine(engine_of(layers)),
    "shardwise direct": lambda layers: by_engine(engine_of(layers, writer={"type": "fast"})),
    "torch.save": lambda layers: plain(engine_of(layers)),
    "torch DCP": distributed,
    "DeepSpeed": lambda layers: by_engine(peer_of(layers)),
}


def size_of(layers: int) -> int:
    """Return the bytes of a checkpoint of linear layers."""
    return 12 * layers * (WIDTH * WIDTH + WIDTH)


def io(options: argparse.Namespace) -> list[Row]:
    """Let systems take turns on this rank; return the rows."""
    size = size_of(options.layers)
    names = options.systems.split(";")
    made = {name: MAKERS[name](options.layers) for name in names}
    found: dict[tuple[str, str], list[Row]] = {}
    with shared_folder(options.directory) as folder:
        for turn in range(options.rounds):
            # Who comes first changes, so that nobody always finds the disk as the one before has left it.
            order = names[turn % len(names) :] + names[: turn % len(names)]
            for operation, name in itertools.product(OPERATIONS, order):
                found.setdefault((name, operation), []).append(timed(made[name], operation, f"{folder}/{name}"))
    middle = {key: medians(figures) for key, figures in found.items()}
    rows: list[Row] = []
    for name in names:
        rows.append({"system": name, "setting": {"ranks": dist.get_world_size()}})
        for operation in OPERATIONS:
            figures = middle[name, operation]
            rows[-1] |= {
                f"{operation}_gb_per_s": size / figures["wall"] / 1e9,
                f"{operation}_processor_s_per_gb": figures["processor"] / size * 1e9,
                f"{operation}_memory": max(turn["memory"] for turn in found[name, operation]) / size,
            }
            if "disk" in names:
                rows[-1][f"{operation}_of_disk"] = middle["disk", operation]["wall"] / figures["wall"]
    return rows


# -- in the background -------------------------------------------------------------------------------------------------


class Training:
    """An engine, its steps, and what is saved of it; all ranks make the same number of steps."""

    def __init__(self, options: argparse.Namespace, folder: str) -> None:
        self.device, self.folder = Device(options.device), folder
        self.options = options
        if options.gpu:
            run = training_of(Case(SIZES[options.size], bf16=True, device=options.device), 3)
            self.engine, self._train = run.engine, run.step
            run.step()
        else:
            self.engine = engine_of(options.layers, **({"writer": {"type": "python"}} if options.cached else {}))
            self._train = functools.partial(step, self.engine, WIDTH, options.rows)
        pinned = self.device.is_cuda
        self.host = [torch.empty_like(values, device="cpu", pin_memory=pinned) for values in self.held]
        self.bytes = over_ranks({"": float(sum(values.nbytes for values in self.held))}, "sum")[""]
        # DCP's own collectives must not mix with those of training.
        self.group = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None
        self.stagers: dict[str, Any] = {}
        self.calm = 0.0

    @property
    def held(self) -> list[Any]:
        """What is saved; a load may have made other tensors of it."""
        return list(tensors(self.engine))

    def steps(self) -> None:
        """Train some steps while nothing is written."""
        self.calm = self.device.seconds(lambda: [self._train() for _ in range(STEPS)]) / STEPS

    def until(self, done: Callable[[], bool]) -> float:
        """Train until something is done on all ranks; return the seconds of a step."""
        start = time.perf_counter()
        for count in itertools.count(1):
            self._train()
            self.device.wait()
            if not over_ranks({"left": 0.0 if done() else 1.0})["left"]:
                return (time.perf_counter() - start) / count
        raise AssertionError

    def blocking(self, action: Callable[[], Any]) -> dict[str, float]:
        """Do something that all ranks begin together; return the slowest rank's seconds."""
        dist.barrier()
        return over_ranks({"blocked": self.device.seconds(action)}, "max")

    def copy(self) -> dict[str, float]:
        """Copy everything to the host."""
        held = self.held
        return self.blocking(lambda: [b.copy_(v, non_blocking=True) for b, v in zip(self.host, held, strict=True)])

    def foreground(self) -> dict[str, float]:
        """Save, and wait for it."""
        found = self.blocking(lambda: self.engine.save_checkpoint(f"{self.folder}/a", tag="a", asynchronous=False))
        return {**found, "written": found["blocked"]}

    def load(self) -> dict[str, float]:
        """Load what was saved last."""
        return self.blocking(lambda: self.engine.load_checkpoint(f"{self.folder}/a", tag="a"))

    def torch_save(self) -> dict[str, float]:
        """Save the same tensors with torch.save."""
        held = [values.clone() for values in self.held]
        return self.blocking(lambda: torch.save(held, f"{self.folder}/{dist.get_rank()}.pt"))

    def background(self) -> dict[str, float]:
        """Save while training goes on."""
        dist.barrier()
        start = time.perf_counter()
        self.engine.save_checkpoint(f"{self.folder}/b", tag="b", asynchronous=True)
        blocked = time.perf_counter() - start
        first = self.device.seconds(self._train)
        busy = self.until(lambda: not self.engine.checkpoint_pending)
        self.engine.wait_for_checkpoint()
        written = time.perf_counter() - start
        worst = over_ranks({"blocked": blocked, "written": written}, "max")
        return {**worst, "first_step": first / self.calm, "slowdown": busy / self.calm}

    def dcp(self, kind: str) -> dict[str, float]:
        """Save the same tensors with async_save, while training goes on."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        if kind not in self.stagers or not KEEPS_STAGED:
            cuda = self.device.is_cuda
            self.stagers[kind] = DefaultStager(StagingOptions(cuda, kind == "process", cuda, cuda))
        state = {f"{dist.get_rank()}.{index}": values for index, values in enumerate(self.held)}
        where: Row = {"process_group": self.group} if self.group is not None else {"no_dist": True}
        dist.barrier()
        start = time.perf_counter()
        pending = dcp.async_save(
            state,
            storage_writer=dcp.FileSystemWriter(f"{self.folder}/{kind}", overwrite=True),
            async_checkpointer_type=AsyncCheckpointerType(kind),
            async_stager=self.stagers[kind],
            **where,
        )
        if hasattr(pending, "staging_completion"):
            pending.staging_completion.result()
            pending = pending.upload_completion
        blocked = time.perf_counter() - start
        busy = self.until(pending.done)
        pending.result()
        worst = over_ranks({"blocked": blocked, "written": time.perf_counter() - start}, "max")
        return {**worst, "slowdown": busy / self.calm}


def background(options: argparse.Namespace) -> list[Row]:
    """Let the ways take turns on this rank; return the rows."""
    found: list[dict[str, dict[str, float]]] = []
    failed: dict[str, str] = {}
    rows: list[Row] = []
    with shared_folder(options.directory) as folder:
        training = Training(options, folder)
        ways: dict[str, Callable[[], dict[str, float]]] = {
            "copy": training.copy,
            "foreground": training.foreground,
            "background": training.background,
            "load": training.load,
            "torch.save": training.torch_save,
            "DCP, thread": functools.partial(training.dcp, "thread"),
        }
        if not options.gpu:
            ways["DCP, process"] = functools.partial(training.dcp, "process")
        for _ in range(options.rounds + 1):
            found.append({})
            for name, way in ways.items():
                if name not in failed:
                    training.steps()  # what they have left in caches is the same for all
                    try:
                        found[-1][name] = way()
                    except Exception as error:
                        if dist.get_world_size() > 1:
                            raise
                        failed[name] = reason(error)
            rows = rows_of(training, list(ways), found, failed)
            answer(rows)  # of the rounds so far, if the next one takes too long
        for stager in training.stagers.values():
            stager.close()
        training.engine.destroy()
    return rows


def rows_of(
    training: Training, names: Sequence[str], found: Sequence[dict[str, dict[str, float]]], failed: dict[str, str]
) -> list[Row]:
    """Return the rows of the rounds so far."""
    writer = "cached" if training.options.cached else "direct"
    first, later = found[0], found[1:]
    rows: list[Row] = []
    for name in names:
        row: Row = {"system": name, "setting": {"writer": writer}}
        there = [one for one in later if name in one]
        if name in failed or not there:
            rows.append(row | {"failed": failed.get(name, "no round")})
            continue
        figures = medians([one[name] for one in there])
        row |= {f"{key}_s" if key in ("blocked", "written") else key: value for key, value in figures.items()}
        for base in ("copy", "foreground"):
            ratios = (one[name]["blocked"] / one[base]["blocked"] for one in there if base in one)
            row[f"over_{base}"] = statistics.median(ratios)
        row |= {"first_s": first[name]["blocked"], "first_over_copy": first[name]["blocked"] / first["copy"]["blocked"]}
        rows.append(row | {"written_gb_per_s": training.bytes / figures.get("written", figures["blocked"]) / 1e9})
    return rows


# -- copies in memory --------------------------------------------------------------------------------------------------


def copies(options: argparse.Namespace) -> list[Row]:
    """Measure on this rank; return the rows."""
    from shardwise.comm.environment import MEMORY_DIRECTORY
    from shardwise.engine import faults

    found: dict[str, list[float]] = {}
    part = 0
    with shared_folder(options.memory) as memory, shared_folder(options.directory) as disk:
        own = {"one node": f"{memory}/shared", "a node for each rank": f"{memory}/node{dist.get_rank()}"}
        for name, place in own.items():
            os.environ[MEMORY_DIRECTORY] = place
            faults._engines = itertools.count()
            engine = engine_of(options.layers, memory_copies={"every": 1 << 30})
            engine.resume(f"{memory}/nothing")  # copies of a run that does not resume are passed over
            buffers = [torch.empty_like(values) for values in tensors(engine)]
            ways: dict[str, Callable[[], object]] = {
                f"copy, {name}": engine.copy_to_memory,
                f"resume from memory, {name}": functools.partial(engine.resume, f"{memory}/nothing"),
            }
            if name == "one node":
                ways["save_checkpoint"] = functools.partial(engine.save_checkpoint, disk, tag="a")
                ways["load_checkpoint"] = functools.partial(engine.load_checkpoint, disk, tag="a")
                ways["plain copy"] = lambda buffers=buffers, engine=engine: [
                    buffer.copy_(values) for buffer, values in zip(buffers, tensors(engine), strict=True)
                ]
            for _ in range(options.rounds):
                for label, action in ways.items():
                    found.setdefault(label, []).append(over_ranks(spent(action), "max")["wall"])
            part = engine.last_memory_copy.own_bytes
            engine.destroy()
            dist.barrier()
    middle = {name: statistics.median(values) for name, values in found.items()}
    return [
        {"system": name, "slowest_s": seconds, "a_rank_gb_per_s": part / seconds / 1e9}
        for name, seconds in middle.items()
    ]


# -- memory of a load --------------------------------------------------------------------------------------------------


def loads(options: argparse.Namespace) -> list[Row]:
    """Save, or load at several stages, on this rank; return the resident sizes of all ranks together."""
    tiny = engine_of(1, width=8)
    tiny.save_checkpoint(f"{options.directory}/tiny")
    tiny.load_checkpoint(f"{options.directory}/tiny")
    tiny.destroy()
    if not options.stages:
        engine_of(options.layers, 0).save_checkpoint(options.directory, tag="a")
        return []
    rows, size = list[Row](), size_of(options.layers)
    for stage in map(int, options.stages.split(",")):
        bare = trimmed()
        engine = engine_of(options.layers, stage, trained=False)
        trimmed()
        forget_peak()
        dist.barrier()
        engine.load_checkpoint(options.directory, tag="a")
        found = over_ranks({"highest": highest_resident() - bare, "held": trimmed() - bare}, "sum")
        held, highest = found["held"] / size, found["highest"] / size
        row: Row = {"system": f"stage {stage}", "setting": {"ranks": dist.get_world_size()}}
        rows.append(row | {"held": held, "highest": highest, "above": highest - held})
        engine.destroy()
        del engine
    return rows


def main() -> None:
    """Measure, print the figures and keep them."""
    options = options_of(__doc__, **data_of("options.toml")["checkpoint"])
    measure = {"io": io, "background": background, "copies": copies, "memory": loads}[options.what]
    serve(measure, options, own_group(1, options.device) if options.gpu else None)
    if options.gpu:
        found = child(limit=options.limit)
        rows = found if isinstance(found, list) else [{"system": "all", "failed": found["failed"]}]
        show(rows)
        name, ended = f"gpu_checkpoint_{options.what}".removesuffix("_background"), rows[-1]["system"] != "all"
        save(options, name, rows, partial=not ended, size=options.size)
    else:
        names = options.systems or ";".join(installed(MAKERS))
        if options.what == "memory":
            with tempfile.TemporaryDirectory(dir=options.directory) as path:
                job(1, "--directory", path)
                stages = "3" if options.quick else "0,1,2,3"
                worlds = map(int, options.widths.split(","))
                rows = [row for n in worlds for row in job(n, "--directory", path, "--stages", stages)]
        else:
            rows = job(options.nproc, "--systems", names)
        file = {"io": "checkpoint_io", "background": "checkpoint_async", "copies": "memory_copies"}.get(options.what)
        file = f"{file}_{options.nproc}" if file else "checkpoint_memory"
        show(rows)
        file += "_cached" * options.cached
        save(options, file, rows, gigabytes=size_of(options.layers) / 1e9, rounds=options.rounds)


if __name__ == "__main__":
    main()
