"""Time of one training step with state on the host or on a disk, of shardwise and DeepSpeed taking turns in one job.

    python bench/offload_time.py --place host|disk [--nproc 1] [--size 98M] [--dtype bf16] [--directory DIR]

As step_time.py: systems take turns, forwards and then backwards through the list; ratios of medians count. "passes" is
the time of the forward and backward passes, "update" that of the optimizer's step. DeepSpeed steps with its own
DeepSpeedCPUAdam; its systems are left out where they fail (its extensions need a compiler and libaio's headers). On CPU
ranks the device is a part of the same memory: what is shown is the cost of moving and of stepping elsewhere.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from _jobs import ROOT, answer, contest, in_job, ranks, read, start_group


def measure(options: argparse.Namespace) -> None:
    """Take turns on this rank; rank 0 answers with seconds of passes and updates of each turn."""
    import torch
    import torch.distributed as dist
    from _systems import OFFLOADED, Case

    start_group("shardwise")
    case = Case(options.shape, options.dtype == "bf16")
    made = OFFLOADED[options.place]
    runs, missing = {}, {}
    for name in options.systems:
        try:
            run = made[name](case, str(options.directory))
            for _ in range(3):
                run.step()
            run.finish()
            runs[name] = run
        except Exception as error:
            if name.startswith("shardwise"):
                raise
            missing[name] = f"{type(error).__name__}: {error}"[:500]
    found: dict[str, list[list[float]]] = {name: [] for name in runs}
    for turn in range(-1, options.rounds):
        for name in runs if turn % 2 == 0 else reversed(runs):
            run, spent = runs[name], [0.0, 0.0]
            dist.barrier()
            for _ in range(options.steps):
                start = time.perf_counter()
                run.passes()
                between = time.perf_counter()
                run.update()
                spent = [spent[0] + between - start, spent[1] + time.perf_counter() - between]
            start = time.perf_counter()
            run.finish()
            spent[1] += time.perf_counter() - start
            total = torch.tensor(spent, dtype=torch.float64)
            dist.all_reduce(total)
            if turn >= 0:
                found[name].append((total / options.steps / dist.get_world_size()).tolist())
    answer({"seconds": found, "missing": missing})


def rows_of(seconds: dict[str, list[list[float]]]) -> list[dict[str, Any]]:
    """Return a row of medians for each system, with the ratio to DeepSpeed in the same setting."""
    medians = {name: statistics.median(map(sum, turns)) for name, turns in seconds.items()}
    rows = []
    for name, turns in seconds.items():
        peer = name.replace("shardwise", "DeepSpeed")
        rows.append(
            {
                "system": name,
                "median_ms": medians[name] * 1e3,
                "lowest_ms": min(map(sum, turns)) * 1e3,
                "highest_ms": max(map(sum, turns)) * 1e3,
                "passes_ms": statistics.median(turn[0] for turn in turns) * 1e3,
                "update_ms": statistics.median(turn[1] for turn in turns) * 1e3,
                "over_resident": medians[name] / medians["shardwise 3"] if "shardwise 3" in medians else None,
                "over_deepspeed": medians[name] / medians[peer] if peer in medians and peer != name else None,
            }
        )
    return rows


def main() -> None:
    """Run the contest, print the table and keep it."""
    from _systems import OFFLOADED

    parser = contest(__doc__, size="98M", dtype="bf16", nproc=1, rounds=6)
    parser.add_argument("--place", choices=OFFLOADED, default="host")
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps in a turn")
    parser.add_argument("--directory", type=Path, help="on the disk; default: build/")
    asked = parser.parse_args().systems
    options = read(parser)
    peers = importlib.util.find_spec("deepspeed") is not None and not options.quick
    installed = [name for name in OFFLOADED[options.place] if peers or not name.startswith("DeepSpeed")]
    options.systems = asked.split(";") if asked else installed
    if in_job():
        measure(options)
        return
    from _machine import save

    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.directory or ROOT / "build") as directory:
        found = ranks(options.nproc, "--directory", directory)
    rows = rows_of(found["seconds"])
    for row in rows:
        ratio = "" if row["over_deepspeed"] is None else f"  over DeepSpeed {row['over_deepspeed']:.2f}"
        print(
            f"{row['system']:46s} median {row['median_ms']:6.0f} ms ({row['lowest_ms']:6.0f} to "
            f"{row['highest_ms']:6.0f})  passes {row['passes_ms']:6.0f}  update {row['update_ms']:6.0f}{ratio}"
        )
    for name, reason in found["missing"].items():
        print(f"without {name}: {reason}")
    save(
        options.results,
        f"offload_time_{options.place}_{options.size}_{options.dtype}_{options.nproc}",
        rows,
        rounds=options.rounds,
        steps_per_round=options.steps,
        missing=found["missing"],
    )


if __name__ == "__main__":
    main()
