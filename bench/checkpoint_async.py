"""Saving in the background: how long training stands, how much slower it is meanwhile, how fast the bytes are written.

    python bench/checkpoint_async.py [--nproc 2] [--layers 24] [--rounds 5] [--cached] [--directory .]

A stage-3 engine with AdamW in fp32 (12 bytes a parameter). In every round the candidates take turns: one warm copy of
what the rank saves into a reused buffer, a save in the foreground, one in the background, and
torch.distributed.checkpoint's async_save of the same tensors, in a thread and in a process, with its staged copy reused
and files flushed. Training goes on until the bytes are on disk; its steps are compared with steps between saves. All
ratios are of one round, so that what else keeps the machine busy touches both sides: medians over the rounds. The first
save, which makes its memory and starts the process, is told apart.
Results: bench/results/checkpoint_async_<ranks>.json, with --cached checkpoint_async_<ranks>_cached.json.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _jobs import answer, in_job, parser, ranks, read, worst
from checkpoint_io import CONFIG, WIDTH, tensors
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import shardwise

STEPS = 3
"""Steps between saves that steps during saves are compared with."""


class Training:
    """The engine and its steps; all ranks make the same number of them."""

    def __init__(self, layers: int, rows: int, *, cached: bool) -> None:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        self.bytes = 12 * sum(parameter.numel() for parameter in model.parameters())
        config = {**CONFIG, "checkpoint": {"writer": {"type": "python"}}} if cached else CONFIG
        self.engine, *_ = shardwise.initialize(model=model, config=config)
        self.batch = torch.randn(rows, WIDTH)
        self.step(done=True)

    def step(self, done: bool) -> bool:
        """Train one step; return whether all ranks are done with something."""
        self.engine.backward(self.engine(self.batch).square().mean())
        self.engine.step()
        left = torch.tensor([0.0 if done else 1.0])
        dist.all_reduce(left)
        return not left.item()

    def steps(self) -> float:
        """Return the seconds of a step while nothing is written."""
        start = time.perf_counter()
        for _ in range(STEPS):
            self.step(done=True)
        return (time.perf_counter() - start) / STEPS

    def until(self, done: Callable[[], bool]) -> tuple[float, int]:
        """Train until something is done on all ranks; return the seconds of a step, and how many there were."""
        start, count = time.perf_counter(), 0
        while True:
            count += 1
            if self.step(done()):
                return (time.perf_counter() - start) / count, count


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of an action that all ranks begin together, the slowest rank's, and its result."""
    dist.barrier()
    start = time.perf_counter()
    result = action()
    return worst(time.perf_counter() - start)[0], result


def measure(options: argparse.Namespace) -> None:
    """Measure on this rank; rank 0 answers with the figures of each round and candidate."""
    shardwise.init_distributed()
    training = Training(options.layers, options.rows, cached=options.cached)
    engine, rank = training.engine, dist.get_rank()
    box = [tempfile.mkdtemp(dir=options.directory) if rank == 0 else None]
    dist.broadcast_object_list(box)
    path = str(box[0])
    held = list(tensors(engine))
    buffers = [torch.empty_like(values) for values in held]
    # It keeps its staged copy; pinned memory and asynchronous staging need a GPU.
    stagers = {
        kind: DefaultStager(StagingOptions(False, kind == "process", False, False)) for kind in ("thread", "process")
    }
    group = dist.new_group(backend="gloo")  # DCP's own collectives must not mix with those of training
    rounds: list[dict[str, dict[str, float]]] = []
    for _ in range(options.rounds + 1):
        found: dict[str, dict[str, float]] = {}
        for buffer, values in zip(buffers, held, strict=True):
            buffer.copy_(values)
        calm = training.steps()
        # After steps, as saves are: what they have left in caches is the same.
        copy, _ = timed(lambda: [b.copy_(v) for b, v in zip(buffers, held, strict=True)])
        foreground, _ = timed(lambda: engine.save_checkpoint(path, tag="a", asynchronous=False))
        found["foreground"] = {"blocked": foreground, "written": foreground}

        training.steps()
        blocked, _ = timed(lambda: engine.save_checkpoint(path, tag="b", asynchronous=True))
        busy, count = training.until(lambda: not engine.checkpoint_pending)
        engine.wait_for_checkpoint()
        report = engine.last_async_save
        written = worst(report.written)[0]
        found["background"] = {"blocked": blocked, "written": written, "slowdown": busy / calm, "steps": count}

        for kind, stager in stagers.items():
            state = {f"{rank}.{index}": values for index, values in enumerate(held)}
            storage = dcp.FileSystemWriter(f"{path}/{kind}", overwrite=True)
            calm = training.steps()
            start = time.perf_counter()
            save = functools.partial(
                dcp.async_save,
                state,
                storage_writer=storage,
                async_checkpointer_type=AsyncCheckpointerType(kind),
                async_stager=stager,
                process_group=group,
            )
            blocked, future = timed(save)
            busy, count = training.until(future.done)
            future.result()
            written = worst(time.perf_counter() - start)[0]
            found[f"DCP, {kind}"] = {"blocked": blocked, "written": written, "slowdown": busy / calm, "steps": count}
        for figures in found.values():
            figures["over_copy"] = figures["blocked"] / copy
            figures["over_foreground"] = figures["blocked"] / foreground
            figures["gb_per_s"] = training.bytes / 1e9 / figures["written"]
            figures["copy"] = copy
        rounds.append(found)
    engine.destroy()
    for stager in stagers.values():
        stager.close()
    if rank == 0:
        shutil.rmtree(path)
    answer({"bytes": training.bytes, "rounds": rounds})


def main() -> None:
    """Measure, print and keep the results."""
    found = parser(__doc__)
    found.add_argument("--nproc", type=int, default=2)
    found.add_argument("--layers", type=int, default=24)
    found.add_argument("--rows", type=int, default=64, help="rows of a rank's batch")
    found.add_argument("--rounds", type=int, default=5, help="besides the first")
    found.add_argument(
        "--cached", action="store_true", help='write through the page cache: checkpoint.writer.type "python"'
    )
    found.add_argument("--directory", default=".")
    options = read(found)
    if options.quick:
        options.layers, options.rounds = 1, 1
    if in_job():
        measure(options)
        return
    from _machine import save

    answered = ranks(options.nproc)
    first, *rest = answered["rounds"]
    rows = []
    for name in first:
        figures = {
            key: round(statistics.median(one[name][key] for one in rest), 3) for key in first[name] if key != "steps"
        }
        rows.append({"save": name, **figures, "first_over_copy": round(first[name]["over_copy"], 3)})
        print(
            f"{name:14} stands {figures['blocked']:7.3f} s = {figures['over_copy']:6.2f} copies (first "
            f"{rows[-1]['first_over_copy']:6.2f}); steps x {figures.get('slowdown', 1.0):5.2f}; "
            f"{figures['gb_per_s']:5.2f} GB/s"
        )
    notes = {
        "unit": "seconds of the slowest rank; ratios within a round; medians of rounds",
        "gigabytes": round(answered["bytes"] / 1e9, 2),
        "ranks": options.nproc,
        "load_after": [round(value, 2) for value in os.getloadavg()],
    }
    save(options.results, f"checkpoint_async_{options.nproc}{'_cached' * options.cached}", rows, **notes)


if __name__ == "__main__":
    main()
