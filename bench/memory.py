"""Peak resident memory of each system above the bare process, in bytes per parameter.

    python bench/memory.py [--size 98M] [--dtype bf16] [--nproc 4] [--systems "DDP,shardwise 3"]

Every system runs in a job of its own. Each rank first loads all code (it trains a model of a few kilobytes with the
same system), notes its resident size, then builds the model in the ordinary way, in fp32 on every rank, and trains a
few steps. What counts is the highest resident size since (`VmHWM` of Linux) less the noted one, of the worst rank.
Beside it stand the highest sums of bytes that shardwise's accountant has counted.
"""

from __future__ import annotations

import argparse
from typing import Any

from _jobs import answer, bare_size, contest, forget_peak, in_job, ranks, read, resident, start_group, worst

STEPS = 3


def measure(options: argparse.Namespace) -> None:
    """Run one system on this rank; rank 0 answers with the worst rank's figures."""
    from _systems import SYSTEMS, Case

    (system,) = options.systems
    case = Case(options.shape, options.dtype == "bf16")
    start_group(system)
    bare = bare_size(SYSTEMS[system], case)
    forget_peak()
    run = SYSTEMS[system](case)
    built = resident("VmHWM")
    for _ in range(STEPS):
        run.step()
    tracked = run.accountant.peak_total if run.accountant is not None else 0
    construction = run.accountant.construction_peak if run.accountant is not None else 0
    peak, building, tracked, construction, bare = worst(
        resident("VmHWM") - bare, built - bare, tracked, construction, bare
    )
    parameters = case.size.parameters
    answer(
        {
            "system": system,
            "parameters": parameters,
            "peak": peak / parameters,
            "building": building / parameters,
            "tracked": tracked / parameters or None,
            "tracked_building": construction / parameters or None,
            "bare_mib": bare / 2**20,
        }
    )


def main() -> None:
    """Run every system, print the table and keep it."""
    options = read(contest(__doc__, size="98M", dtype="bf16", nproc=4, rounds=1), without=["alone"])
    if in_job():
        measure(options)
        return
    from _machine import save

    rows: list[dict[str, Any]] = []
    for system in options.systems:
        row = ranks(options.nproc, "--systems", system)
        rows.append(row)
        tracked = "" if row["tracked"] is None else f"  tensor bytes {row['tracked']:5.2f}"
        print(
            f"{system:18s} peak {row['peak']:6.2f} B/parameter  while building {row['building']:5.2f}{tracked}",
            flush=True,
        )
    save(options.results, f"memory_{options.size}_{options.dtype}_{options.nproc}", rows, steps=STEPS)


if __name__ == "__main__":
    main()
