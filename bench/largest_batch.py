"""The largest batch that fits a limit of memory, and how fast it trains and is evaluated.

    python bench/largest_batch.py [--limit 640] [--length 32] [--size 27M] [--nproc 2] [--systems "DDP,FSDP2"]

Every system runs in a job of its own. `--limit` is in MiB of resident memory of each rank above the bare process (as in
memory.py): it stands for the device. The batch of a rank is doubled until the highest resident size of a training step
of some rank exceeds the limit, then bisected. Optimizer state exists before the search; freed memory is given back to
the system before every try. Times are medians of a few steps (training) and forward passes (evaluation) with the batch
that was found, of the slowest rank; samples a second are those of all ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

from _jobs import (
    answer,
    bare_size,
    contest,
    forget_peak,
    in_job,
    ranks,
    read,
    resident,
    start_group,
    trimmed,
    worst,
)

REPEATS = 3
MOST = 1024
"""No larger batch is tried."""


def largest(fits: Callable[[int], bool], most: int = MOST) -> int:
    """Return the largest number up to `most` that fits, where all up to some number do; 0 if 1 does not.

    >>> largest(lambda rows: rows <= 11)
    11
    >>> largest(lambda rows: False), largest(lambda rows: True, most=64)
    (0, 64)
    """
    good, bad = 0, 1
    while bad <= most and fits(bad):
        good, bad = bad, 2 * bad
    bad = min(bad, most + 1)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def slowest(action: Callable[[], None]) -> float:
    """Return the median of the seconds of some repetitions, of the slowest rank each time."""
    import torch.distributed as dist

    seconds = []
    for _ in range(REPEATS):
        dist.barrier()
        start = time.perf_counter()
        action()
        seconds += worst(time.perf_counter() - start)
    return statistics.median(seconds)


def measure(options: argparse.Namespace) -> None:
    """Search on this rank, in step with the others; rank 0 answers with the row."""
    import torch.distributed as dist
    from _systems import SYSTEMS, Case

    (system,) = options.systems
    one = Case(dataclasses.replace(options.shape, rows=1, length=options.length), options.dtype == "bf16")
    start_group(system)
    bare = bare_size(SYSTEMS[system], one)
    run = SYSTEMS[system](one)
    run.step()
    run.step()

    def step() -> None:
        run.step()
        run.finish()

    peaks: dict[int, float] = {}

    def fits(rows: int) -> bool:
        run.ids = dataclasses.replace(one, size=dataclasses.replace(one.size, rows=rows)).batch()
        run.finish()
        trimmed()
        forget_peak()
        step()
        peaks[rows] = worst(resident("VmHWM") - bare)[0] / 2**20
        return peaks[rows] <= options.limit

    rows = largest(fits)
    row: dict[str, Any] = {"system": system, "batch_per_rank": rows, "bare_mib": bare / 2**20}
    if rows:
        row["peak_mib"] = peaks[rows]
        fits(rows)  # the batch from now on
        train, evaluation = slowest(step), slowest(run.evaluate)
        samples = rows * dist.get_world_size()
        row |= {
            "train_ms": train * 1e3,
            "eval_ms": evaluation * 1e3,
            "train_samples_per_s": samples / train,
            "eval_samples_per_s": samples / evaluation,
        }
    answer(row)


def main() -> None:
    """Run every system, print the table and keep it."""
    parser = contest(__doc__, size="27M", dtype="fp32", nproc=2, rounds=1)
    parser.add_argument("--limit", type=float, default=640, help="MiB of a rank above the bare process")
    parser.add_argument("--length", type=int, default=32, help="tokens in a sequence")
    options = read(parser, without=["alone", "FSDP2 no reshard", "shardwise 3 Init"])
    if options.quick:
        options.limit, options.length = 4, 8
    if in_job():
        measure(options)
        return
    from _machine import save

    rows = []
    for system in options.systems:
        row = ranks(options.nproc, "--systems", system)
        rows.append(row)
        line = f"{system:18s} batch {row['batch_per_rank']:3d} a rank"
        if row["batch_per_rank"]:
            line += (
                f"  peak {row['peak_mib']:4.0f} MiB  training step {row['train_ms']:6.0f} ms "
                f"({row['train_samples_per_s']:5.1f} samples/s)  evaluation {row['eval_ms']:6.0f} ms"
            )
        print(line, flush=True)
    name = f"largest_batch_{options.size}_{options.dtype}_{options.nproc}"
    save(options.results, name, rows, limit_mib=options.limit, length=options.length, repeats=REPEATS)


if __name__ == "__main__":
    main()
