"""Checkpoints of one CUDA device: how long training stands, how much slower it is meanwhile, and how fast bytes move.

    python bench/gpu_checkpoint.py [--size 400M] [--rounds 3] [--directory build]

An engine at stage 3 on one rank, in bf16 with fp32 masters and AdamW: 14 bytes a parameter are saved. In each round the
ways take turns: a save in the foreground, one in the background, torch.distributed.checkpoint's async_save of the same
tensors with a page-locked copy that it keeps, torch.save, and a load. "Blocked" is the time for which the script does
not go on, "written" that until the bytes are on the disk. Steps go on while bytes are written; "slowdown" is the time
of one over that of a step between saves. The first round, which makes buffers, is told apart. "Down" is the time in
which the same tensors are copied into page-locked memory that is there already: what a save cannot be faster than,
unless it leaves the device to copy while the script goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _gpu import Device, child, keep, one_rank, options_of, reason, tell

KEEPS_STAGED = hasattr(torch.distributed, "all_gather_single")
"""Whether torch's stager may be used again: that of 2.11 raises in its second save."""
STEPS = 3
"""Steps between saves that steps during saves are compared with."""


def tensors(engine: Any) -> Iterator[Any]:
    """Yield the tensors of a checkpoint: parameters, master weights and optimizer state."""
    update = engine.sharded.update
    yield from (parameter.detach() for parameter in engine.module.parameters())
    for tensor in engine.sharded.registry:
        yield from (values for _, _, values in update.master_pieces(tensor.index))
        for key in ("exp_avg", "exp_avg_sq"):
            yield from (values for _, _, values in update.state_pieces(tensor.index, key))


class Training:
    """An engine, its steps, and what is saved of it."""

    def __init__(self, size: Any, device: Device, directory: Path) -> None:
        from _systems import Case, shardwise

        self.device, self.directory = device, directory
        self.run = shardwise(Case(size, bf16=True, device=device.kind), 3)
        self.run.step()
        self.bytes = sum(values.nbytes for values in self.held)
        self.stager: Any = None
        self.host = [torch.empty_like(values, device="cpu", pin_memory=device.is_cuda) for values in self.held]

    @property
    def held(self) -> list[Any]:
        """What is saved; a load may have made other tensors of it."""
        return list(tensors(self.run.engine))

    def steps(self, count: int = STEPS) -> float:
        """Return the seconds of a step while nothing is written."""
        return self.device.seconds(lambda: [self.run.step() for _ in range(count)]) / count

    def until(self, done: Callable[[], bool]) -> float:
        """Train until something is done; return the seconds of a step."""
        count = 0
        start = time.perf_counter()
        while True:
            self.run.step()
            self.device.wait()
            count += 1
            if done():
                return (time.perf_counter() - start) / count

    def down(self) -> dict[str, float]:
        """Copy everything to the host."""

        held = self.held

        def copy() -> None:
            for target, values in zip(self.host, held, strict=True):
                target.copy_(values, non_blocking=True)

        return {"blocked": self.device.seconds(copy)}

    def foreground(self) -> dict[str, float]:
        """Save, and wait for it."""
        path = self.directory / "foreground"
        spent = self.device.seconds(lambda: self.run.engine.save_checkpoint(path, tag="a", asynchronous=False))
        return {"blocked": spent, "written": spent}

    def background(self) -> dict[str, float]:
        """Save while training goes on."""
        engine, calm = self.run.engine, self.steps()
        start = time.perf_counter()
        engine.save_checkpoint(self.directory / "background", tag="a", asynchronous=True)
        blocked = time.perf_counter() - start
        first = self.device.seconds(self.run.step)  # it may have to wait for the copy
        busy = self.until(lambda: not engine.checkpoint_pending)
        engine.wait_for_checkpoint()
        written = time.perf_counter() - start
        return {"blocked": blocked, "first_step": first / calm, "slowdown": busy / calm, "written": written}

    def load(self) -> dict[str, float]:
        """Load what was saved last."""
        path = self.directory / "foreground"
        spent = self.device.seconds(lambda: self.run.engine.load_checkpoint(path, tag="a"))
        return {"blocked": spent}

    def torch_save(self) -> dict[str, float]:
        """Save the same tensors with torch.save."""
        held, file = self.held, self.directory / "tensors.pt"
        return {"blocked": self.device.seconds(lambda: torch.save(held, file))}

    def torch_background(self) -> dict[str, float]:
        """Save the same tensors with async_save, while training goes on."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        if self.stager is None or not KEEPS_STAGED:
            pinned = self.device.is_cuda
            self.stager = DefaultStager(StagingOptions(pinned, False, pinned, pinned))
        calm = self.steps()
        state = {str(number): values for number, values in enumerate(self.held)}
        writer = dcp.FileSystemWriter(self.directory / "dcp", overwrite=True)
        start = time.perf_counter()
        pending = dcp.async_save(
            state,
            storage_writer=writer,
            async_checkpointer_type=AsyncCheckpointerType.THREAD,
            async_stager=self.stager,
            no_dist=True,
        )
        if hasattr(pending, "staging_completion"):
            pending.staging_completion.result()
            pending = pending.upload_completion
        blocked = time.perf_counter() - start
        busy = self.until(pending.done)
        pending.result()
        return {"blocked": blocked, "slowdown": busy / calm, "written": time.perf_counter() - start}


WAYS: dict[str, Callable[[Training], dict[str, float]]] = {
    "down": Training.down,
    "foreground": Training.foreground,
    "background": Training.background,
    "load": Training.load,
    "torch.save": Training.torch_save,
    "torch async_save": Training.torch_background,
}


def measure(options: argparse.Namespace) -> None:
    """Let the ways take turns; tell what each has taken in each round."""
    from _systems import SIZES

    device = Device(options.device)
    directory = Path(tempfile.mkdtemp(dir=options.directory or None))
    rounds: list[dict[str, dict[str, float]]] = []
    failed: dict[str, str] = {}
    try:
        training = Training(SIZES[options.size], device, directory)
        for _ in range(options.rounds + 1):
            rounds.append({})
            for name, way in WAYS.items():
                if name not in failed:
                    try:
                        rounds[-1][name] = way(training)
                    except Exception as error:
                        failed[name] = reason(error)
            tell({"bytes": training.bytes, "rounds": rounds, "failed ways": failed})
        training.run.close()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def rows_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each way: medians of all rounds but the first, and what the first has taken."""
    first, later = found["rounds"][0], found["rounds"][1:]
    rows = []
    for name in WAYS:
        if name in found["failed ways"]:
            rows.append({"way": name, "failed": found["failed ways"][name]})
            continue
        there = [one[name] for one in later if name in one]
        row: dict[str, Any] = {"way": name, "first_s": first[name]["blocked"]}
        for key in first[name]:
            row[f"{key}_s" if key in ("blocked", "written") else key] = statistics.median(one[key] for one in there)
        row["gb_per_s"] = found["bytes"] / row.get("written_s", row["blocked_s"]) / 1e9
        rows.append(row)
    return rows


def quick(options: argparse.Namespace) -> None:
    """Make the options those of a quick run."""
    options.size, options.rounds = "tiny", 1


def main() -> None:
    """Measure in a process of its own, print and keep it."""
    options = options_of(__doc__, quick=quick, size="400M", rounds=3, directory="", limit=240)
    if options.child:
        with one_rank(options.device):
            measure(options)
        return
    from _systems import SIZES

    found = child("--child", "measure", "--directory", options.directory, limit=options.limit)
    rows = rows_of(found) if len(found.get("rounds", ())) > 1 else [{"way": "all", "failed": found["failed"]}]
    for row in rows:
        if "failed" in row:
            print(f"{row['way']:18s} failed: {row['failed']}", flush=True)
            continue
        others = "  ".join(f"{key} {row[key]:.3f}" for key in ("written_s", "first_step", "slowdown") if key in row)
        print(
            f"{row['way']:18s} blocked {row['blocked_s']:.4f} s (first {row['first_s']:.3f})  "
            f"{row['gb_per_s']:.2f} GB/s  {others}",
            flush=True,
        )
    keep(options, "checkpoint", rows, size=dataclasses.asdict(SIZES[options.size]), bytes=found.get("bytes"))


if __name__ == "__main__":
    main()
