"""Time of one training step of each system, taking turns in one run.

    shardwise run --nproc 2 bench/step_time.py [--dtype fp32|bf16] [--accumulation 4] [--rounds 10] [--systems a,b]

All systems are built in the same processes and make one step each, forwards and then backwards through the list
(a b b a), so that a noisy machine is noisy for all of them. The figures that count are ratios of medians. Beside time
on the wall stands that of the processor, of all threads of all ranks, which other programs disturb less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from _machine import save
from _systems import SIZES, SYSTEMS, Case, Run, available

import shardwise

BASE = "DDP"


def measure(runs: dict[str, Run], rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    """Return seconds on the wall and of the processor (mean of the ranks) of every step."""
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in runs}
    for turn in range(-2, rounds):
        for name in runs if turn % 2 == 0 else reversed(runs):
            dist.barrier()
            wall, processor = time.perf_counter(), time.process_time()
            runs[name].step()
            spent = torch.tensor([time.perf_counter() - wall, time.process_time() - processor])
            dist.all_reduce(spent)
            if turn >= 0:
                for values, value in zip(found[name], spent.tolist(), strict=True):
                    values.append(value / dist.get_world_size())
    return found


def main() -> None:
    """Run the contest and print the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="27M", choices=SIZES)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--systems", help="names, separated by commas; default: all that are installed")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    shardwise.init_distributed()
    world = dist.get_world_size()
    case = Case(SIZES[options.size], options.dtype == "bf16", options.accumulation)
    names = options.systems.split(",") if options.systems else [n for n in available() if not n.endswith("Init")]
    found = measure({name: SYSTEMS[name](case) for name in names}, options.rounds)
    if dist.get_rank() == 0:
        rows: list[dict[str, Any]] = []
        medians = {name: [statistics.median(values) for values in both] for name, both in found.items()}
        base = medians.get(BASE, medians[names[0]])
        for name, (walls, _) in found.items():
            wall, processor = medians[name]
            row = {
                "system": name,
                "median_ms": wall * 1e3,
                "lowest_ms": min(walls) * 1e3,
                "highest_ms": max(walls) * 1e3,
                "processor_ms": processor * 1e3,
                "ratio": wall / base[0],
                "processor_ratio": processor / base[1],
            }
            rows.append(row)
            print(
                f"{name:18s} median {row['median_ms']:6.0f} ms ({row['lowest_ms']:6.0f} to {row['highest_ms']:6.0f})  "
                f"ratio {row['ratio']:.2f}  processor {row['processor_ms']:6.0f} ms  ratio {row['processor_ratio']:.2f}"
            )
        suffix = f"_accumulation{options.accumulation}" if options.accumulation > 1 else ""
        command = f"shardwise run --nproc {world} bench/step_time.py --dtype {options.dtype}"
        save(
            f"step_time_{options.size}_{options.dtype}_{world}{suffix}",
            rows,
            command=command + (f" --accumulation {options.accumulation}" if suffix else ""),
            rounds=options.rounds,
            ratios_to=BASE if BASE in medians else names[0],
        )
    dist.barrier()


if __name__ == "__main__":
    main()
