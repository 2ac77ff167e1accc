"""What must not grow: host time of a layer with the number of layers, memory with steps of changing length.

    python bench/growth.py [--nproc 2] [--rounds 10] [--systems "DDP,shardwise 3"]

Host time: a GPT so narrow that computing costs next to nothing, with 4 to 96 layers, all depths of all systems taking
turns in one job. Processor time of a step, of all threads of a rank, over the number of layers; medians, mean of the
ranks. Lengths: a job for each system trains on sequences of random length; resident size, freed memory given back,
after 20 and after 200 steps, of the rank in which it grew most.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from _jobs import answer, contest, in_job, ranks, read, start_group, trimmed, worst

DEPTHS = (4, 8, 16, 32, 64, 96)
QUICK_DEPTHS = (2, 4)
STEPS, EARLY = 200, 20
QUICK_STEPS, QUICK_EARLY = 6, 3


def measure_depths(systems: list[str], depths: tuple[int, ...], rounds: int) -> None:
    """Take turns on this rank; rank 0 answers with the median processor seconds of a step by system and depth."""
    from _systems import SYSTEMS, Case, Size

    start_group("shardwise")
    runs = {
        (system, depth): SYSTEMS[system](Case(Size(8, depth, 1, 16, 1, 4), False))
        for system in systems
        for depth in depths
    }
    found: dict[tuple[str, int], list[float]] = {key: [] for key in runs}
    for turn in range(-3, rounds):
        for key in runs if turn % 2 == 0 else reversed(runs):
            start = time.process_time()
            runs[key].step()
            runs[key].finish()
            (spent,) = mean(time.process_time() - start)
            if turn >= 0:
                found[key].append(spent)
    answer([[*key, statistics.median(values)] for key, values in found.items()])


def mean(*figures: float) -> list[float]:
    """Return the mean of each figure over the ranks."""
    import torch
    import torch.distributed as dist

    values = torch.tensor(figures, dtype=torch.float64)
    dist.all_reduce(values)
    return (values / dist.get_world_size()).tolist()


def measure_lengths(system: str, steps: int, early: int) -> None:
    """Train one system on this rank; rank 0 answers with the resident size at two points and its highest growth."""
    import torch
    from _systems import SYSTEMS, Case, Size

    start_group(system)
    case = Case(Size(128, 4, 4, 1024, 2, 256), False)
    run, lengths, sizes = SYSTEMS[system](case), random.Random(0), []
    for step in range(1, steps + 1):
        run.ids = torch.randint(0, case.size.vocabulary, (case.size.rows, lengths.randint(1, case.size.length)))
        run.step()
        if step in (early, steps):
            run.finish()
            sizes.append(trimmed())
    before, after, grown = worst(sizes[0], sizes[1], sizes[1] - sizes[0])
    answer({"system": system, "early_mib": before / 2**20, "late_mib": after / 2**20, "grown_mib": grown / 2**20})


def main() -> None:
    """Measure both, print the tables and keep them."""
    parser = contest(__doc__, size="tiny", dtype="fp32", nproc=2, rounds=10)
    parser.add_argument("--lengths", action="store_true", help="used by the jobs that measure changing lengths")
    options = read(parser, without=["alone", "FSDP2 no reshard", "DeepSpeed 1", "DeepSpeed 2", "shardwise 3 Init"])
    depths = QUICK_DEPTHS if options.quick else DEPTHS
    steps, early = (QUICK_STEPS, QUICK_EARLY) if options.quick else (STEPS, EARLY)
    if in_job():
        if options.lengths:
            (system,) = options.systems
            measure_lengths(system, steps, early)
        else:
            measure_depths(options.systems, depths, options.rounds)
        return
    from _machine import save

    by_system: dict[str, dict[int, float]] = {}
    for system, depth, seconds in ranks(options.nproc):
        by_system.setdefault(system, {})[depth] = seconds / depth * 1e6
    rows: list[dict[str, Any]] = []
    for system, per_layer in by_system.items():
        rows.append({"system": system, "microseconds_per_layer": per_layer})
        cells = "  ".join(f"{value:6.0f}" for value in per_layer.values())
        print(f"{system:18s} microseconds a layer at {', '.join(map(str, per_layer))} layers: {cells}", flush=True)
    save(options.results, f"growth_layers_{options.nproc}", rows, rounds=options.rounds)

    rows = []
    for system in options.systems:
        rows.append(ranks(options.nproc, "--lengths", "--systems", system))
        row = rows[-1]
        print(
            f"{system:18s} resident after {early} steps {row['early_mib']:6.1f} MiB, after {steps} "
            f"{row['late_mib']:6.1f} MiB, grown {row['grown_mib']:5.1f} MiB",
            flush=True,
        )
    save(options.results, f"growth_lengths_{options.nproc}", rows, steps=steps, early=early)


if __name__ == "__main__":
    main()
