"""What recording a timeline costs: the time of a step with it over the time without, in one job, in turns.

    python bench/timeline.py [--nproc 2] [--size 7M] [--rounds 30] [--steps 3]

One engine at stage 3 makes the same steps in turns with and without a recording (off, on, on, off, ...). Comparing
clocks and writing the file, before and after the recorded steps, is not counted. The ratio is the median over pairs of
neighbouring turns. `--keep DIR` records once more at the end, and leaves the files there.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from typing import Any

from _jobs import answer, in_job, parser, ranks, read, start_group


def measure(options: argparse.Namespace) -> None:
    """Take turns on this rank; rank 0 answers with seconds a step, and events a step."""
    import torch
    import torch.distributed as dist
    from _systems import SIZES, Case

    import shardwise
    from shardwise.profile.trace import read as read_timelines

    start_group("shardwise")
    case = Case(SIZES[options.size], options.dtype == "bf16")
    config = {
        "train_micro_batch_size_per_gpu": case.size.rows,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "bf16": {"enabled": case.bf16},
    }
    engine, *_ = shardwise.initialize(model=case.model(), config=config)
    ids = case.batch()

    def steps() -> float:
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(options.steps):
            engine.backward(engine(ids))
            engine.step()
        total = torch.tensor((time.perf_counter() - begin) / options.steps)
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    found: dict[str, list[float]] = {"off": [], "on": []}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(-2, options.rounds):
            for name in ("off", "on") if turn % 2 == 0 else ("on", "off"):
                recording: Any = engine.record_timeline(folder) if name == "on" else contextlib.nullcontext()
                with recording:
                    seconds = steps()
                if turn >= 0:
                    found[name].append(seconds)
        events = len(read_timelines(folder)[0].events) / options.steps if dist.get_rank() == 0 else 0
    if options.keep:
        with engine.record_timeline(options.keep):
            steps()
    engine.destroy()
    answer({"seconds": found, "events": events})


def main() -> None:
    """Run the turns, print the ratio and keep it."""
    known = parser(__doc__)
    known.add_argument("--size", default="7M", help="name of a model of _systems.py")
    known.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    known.add_argument("--nproc", type=int, default=2, help="number of ranks")
    known.add_argument("--rounds", type=int, default=30, help="pairs of turns")
    known.add_argument("--steps", type=int, default=3, help="optimizer steps in a turn")
    known.add_argument("--keep", help="leave a timeline in this directory")
    options = read(known)
    if options.quick:
        options.size, options.rounds = "tiny", 2
    if in_job():
        measure(options)
        return
    from _machine import save

    found = ranks(options.nproc)
    off, on = (found["seconds"][name] for name in ("off", "on"))
    ratios = sorted(b / a for a, b in zip(off, on, strict=True))
    quarter = len(ratios) // 4
    row = {
        "off_ms": statistics.median(off) * 1e3,
        "on_ms": statistics.median(on) * 1e3,
        "ratio": statistics.median(ratios),
        "ratio_quartiles": [ratios[quarter], ratios[-1 - quarter]],
        "events_a_step": found["events"],
    }
    low, high = row["ratio_quartiles"]
    print(f"{options.size} {options.dtype} on {options.nproc} ranks: off {row['off_ms']:.1f} ms a step,", end=" ")
    print(f"on {row['on_ms']:.1f} ms, ratio {row['ratio']:.3f} (half of the pairs {low:.3f} to {high:.3f}),", end=" ")
    print(f"{row['events_a_step']:.0f} events a step")
    save(options.results, f"timeline_{options.size}_{options.dtype}_{options.nproc}", [row])


if __name__ == "__main__":
    main()
