"""What it costs to watch a run: steps with everything on, over steps with everything off, in one job, by turns.

    python bench/monitoring.py [--nproc 2] [--size 7M] [--rounds 10] [--steps 10] [--parts]

Two engines with the same model are built in the same processes: one with every section of `SECTIONS`, one with none.
They take turns of `--steps` steps, one first and then the other first. A turn begins with a barrier and ends when
everything that its steps have launched has arrived. Each round gives a ratio; the figure is the median of the ratios.
Beside time on the wall stands that of the processor, of all threads of a rank, which other programs disturb less; both
are means of the ranks. `--parts` adds an engine for each section alone. The thread that looks for collectives that
wait is one of the process, and runs in all turns.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _jobs import answer, contest, in_job, ranks, read, start_group

NOTHING, EVERYTHING = "nothing", "everything"
STAGE = 3
"""Of ZeRO: the one with most collectives."""

SECTIONS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "prints": lambda folder: {},
    "times of the parts": lambda folder: {"wall_clock_breakdown": True},
    "memory at the phases": lambda folder: {"memory_breakdown": True},
    "throughput": lambda folder: {"timers": {"throughput": {"enabled": True}}},
    "monitors": lambda folder: {
        name: {"enabled": True, "output_path": str(folder), "job_name": name}
        for name in ("csv_monitor", "jsonl_monitor")
    },
    "communication log": lambda folder: {"comms_logger": {"enabled": True, "path": str(folder / "comm")}},
    "waits": lambda folder: {"stall_limit": 30},
    "run log": lambda folder: {"run_log": {"enabled": True, "path": str(folder / "run"), "plan": False}},
    "progress": lambda folder: {"progress": {"mode": "lines"}},
    "anomalies": lambda folder: {"anomaly_watch": {"enabled": True}},
}
"""What is switched on, by name: keys of the configuration. Each has `steps_per_print` 10, too."""

OFF: dict[str, Any] = {"steps_per_print": 0, "timers": {"throughput": {"enabled": False}}, "stall_limit": 0}


def settings(name: str, folder: Path) -> dict[str, Any]:
    """Return the keys of one of the systems."""
    if name == NOTHING:
        return OFF
    chosen = SECTIONS if name == EVERYTHING else {name: SECTIONS[name]}
    found = OFF | {"steps_per_print": 10}
    for keys in chosen.values():
        found |= keys(folder)
    return found


def measure(options: argparse.Namespace) -> None:
    """Take turns on this rank; rank 0 answers with seconds a step on the wall and of the processor."""
    import torch
    import torch.distributed as dist
    from _systems import Case, EngineRun

    import shardwise as ours

    start_group("shardwise")
    logging.getLogger("shardwise").setLevel(logging.INFO)
    case = Case(options.shape, options.dtype == "bf16")
    names = [NOTHING, EVERYTHING, *(SECTIONS if options.parts else ())]
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        dist.broadcast_object_list(shared)
        folder = shared[0]
        runs = {}
        for place, name in enumerate(names):
            config = {
                "train_micro_batch_size_per_gpu": case.size.rows,
                "zero_optimization": {"stage": STAGE},
                "bf16": {"enabled": case.bf16},
                "gradient_clipping": 1.0,  # as nearly all training has it; the norm is judged by "anomalies"
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
                **settings(name, Path(folder, str(place))),
            }
            runs[name] = EngineRun(case, ours.initialize(model=case.model(), config=config)[0])
        found: dict[str, list[list[float]]] = {name: [] for name in runs}
        for turn in range(-1, options.rounds):
            for name in runs if turn % 2 else reversed(runs):
                run = runs[name]
                dist.barrier()
                wall, processor = time.perf_counter(), time.process_time()
                for _ in range(options.steps):
                    run.step()
                run.finish()
                spent = [time.perf_counter() - wall, time.process_time() - processor]
                total = torch.tensor(spent, dtype=torch.float64)
                dist.all_reduce(total)
                if turn >= 0:
                    found[name].append((total / options.steps / dist.get_world_size()).tolist())
        for run in runs.values():
            run.close()
        dist.barrier()
        answer(found)


def rows_of(found: dict[str, list[list[float]]]) -> list[dict[str, Any]]:
    """Return a row of medians for each system; what it costs is in percent of a step with nothing on."""
    rows = []
    for name, turns in found.items():
        over = [
            [100 * (own / base - 1) for own, base in zip(mine, theirs, strict=True)]
            for mine, theirs in zip(turns, found[NOTHING], strict=True)
        ]
        rows.append(
            {
                "system": name,
                "median_ms": 1e3 * statistics.median(turn[0] for turn in turns),
                "processor_ms": 1e3 * statistics.median(turn[1] for turn in turns),
                "over_percent": statistics.median(one[0] for one in over),
                "processor_over_percent": statistics.median(one[1] for one in over),
                "processor_over_percent_of_rounds": sorted(one[1] for one in over),
            }
        )
    return rows


def main() -> None:
    """Run the contest, print the table and keep it."""
    parser = contest(__doc__, size="7M", dtype="fp32", nproc=2, rounds=10)
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps in a turn")
    parser.add_argument("--parts", action="store_true", help="each section alone, too")
    options = read(parser)
    if in_job():
        measure(options)
        return
    from _machine import save

    rows = rows_of(ranks(options.nproc))
    for row in rows:
        print(
            f"{row['system']:22s} median {row['median_ms']:7.1f} ms ({row['over_percent']:+.2f} %)  processor "
            f"{row['processor_ms']:7.1f} ms ({row['processor_over_percent']:+.2f} %)"
        )
    save(
        options.results,
        f"monitoring_{options.size}_{options.dtype}_{options.nproc}",
        rows,
        rounds=options.rounds,
        steps_per_round=options.steps,
        stage=STAGE,
    )


if __name__ == "__main__":
    main()
