"""Time of one training step of each system, taking turns in one job, and how much of it is communication.

    python bench/step_time.py [--nproc 2] [--size 27M] [--dtype fp32|bf16] [--accumulation 4] [--systems "DDP,FSDP2"]

All systems are built in the same processes and take turns of `--steps` steps, forwards and then backwards through the
list (a b b a), so that a noisy machine is noisy for all of them. The figures that count are ratios of medians. A turn
begins with a barrier and ends when everything the steps have launched has arrived, so that no system sends while
another one computes. Beside time on the wall stands that of the processor, of all threads of a rank, which other
programs disturb less. Figures are means of the ranks.

Communication shows in two ways. "over alone" is the time over that of the same model without communication, trained in
the same processes; it includes what a system computes beside the model, and at stages 1 to 3 a rank steps only its
share of the parameters. "blocked" (shardwise only) is the part of the step in which the program stood still in a
collective's `wait()`, from the ledger: what was not hidden behind computation, waiting for slower ranks included.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from _jobs import answer, contest, in_job, ranks, read, start_group

BASES = ("DDP", "alone")


def measure(options: argparse.Namespace) -> None:
    """Take turns on this rank; rank 0 answers with seconds a step on the wall, of the processor, and blocked."""
    import torch
    import torch.distributed as dist
    from _systems import SYSTEMS, Case

    start_group("shardwise")
    case = Case(options.shape, options.dtype == "bf16", options.accumulation)
    runs = {name: SYSTEMS[name](case) for name in options.systems}
    found: dict[str, list[list[float]]] = {name: [] for name in runs}
    for turn in range(-2, options.rounds):
        for name in runs if turn % 2 == 0 else reversed(runs):
            run = runs[name]
            first = run.ledger.sequence if run.ledger is not None else 0
            dist.barrier()
            wall, processor = time.perf_counter(), time.process_time()
            for _ in range(options.steps):
                run.step()
            run.finish()
            spent = [time.perf_counter() - wall, time.process_time() - processor, 0.0]
            if run.ledger is not None:
                spent[2] = sum(record.waited or 0.0 for record in run.ledger.records(since=first))
            total = torch.tensor(spent, dtype=torch.float64)
            dist.all_reduce(total)
            if turn >= 0:
                found[name].append((total / options.steps / dist.get_world_size()).tolist())
    ledgers = [name for name, run in runs.items() if run.ledger is not None]
    answer({"seconds": found, "ledgers": ledgers})


def rows_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row of medians and ratios for each system."""
    medians = {
        name: [statistics.median(turn[column] for turn in turns) for column in range(3)]
        for name, turns in found["seconds"].items()
    }
    alone = medians.get("alone")
    base = next((medians[name] for name in BASES if name in medians), next(iter(medians.values())))
    rows = []
    for name, turns in found["seconds"].items():
        wall, processor, blocked = medians[name]
        rows.append(
            {
                "system": name,
                "median_ms": wall * 1e3,
                "lowest_ms": min(turn[0] for turn in turns) * 1e3,
                "highest_ms": max(turn[0] for turn in turns) * 1e3,
                "processor_ms": processor * 1e3,
                "ratio": wall / base[0],
                "processor_ratio": processor / base[1],
                "over_alone": wall / alone[0] if alone else None,
                "blocked_ms": blocked * 1e3 if name in found["ledgers"] else None,
                "blocked_share": blocked / wall if name in found["ledgers"] else None,
            }
        )
    return rows


def show(row: dict[str, Any]) -> str:
    """Return a row as a line."""
    blocked = "" if row["blocked_share"] is None else f"  blocked {row['blocked_share']:4.0%}"
    return (
        f"{row['system']:18s} median {row['median_ms']:6.0f} ms ({row['lowest_ms']:6.0f} to {row['highest_ms']:6.0f})  "
        f"ratio {row['ratio']:.2f}  processor {row['processor_ms']:6.0f} ms  "
        f"ratio {row['processor_ratio']:.2f}{blocked}"
    )


def main() -> None:
    """Run the contest, print the table and keep it."""
    parser = contest(__doc__, size="27M", dtype="fp32", nproc=2, rounds=6)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps in a turn")
    options = read(parser, without=["shardwise 3 Init"])
    if in_job():
        measure(options)
        return
    from _machine import save

    rows = rows_of(ranks(options.nproc))
    for row in rows:
        print(show(row))
    suffix = f"_accumulation{options.accumulation}" if options.accumulation > 1 else ""
    save(
        options.results,
        f"step_time_{options.size}_{options.dtype}_{options.nproc}{suffix}",
        rows,
        rounds=options.rounds,
        steps_per_round=options.steps,
        ratios_to=next((name for name in BASES if name in options.systems), options.systems[0]),
    )


if __name__ == "__main__":
    main()
