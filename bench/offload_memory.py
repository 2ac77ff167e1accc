"""Memory by tier with state on the host or on a disk: planned, counted and resident; and its course over one step.

    python bench/offload_memory.py [--size 98M] [--dtype bf16] [--nproc 1] [--systems "shardwise 3;..."]

As memory.py: every system runs in a job of its own, whose ranks first load all code and note their resident size;
bytes are the highest above that, of the worst rank, divided by the number of parameters. For shardwise they stand
beside what `engine.memory_report` has planned before the first step and what its accountant has counted, by tier.

A thread reads the accountant every millisecond during one step of "all on disk", with activations tracked: the figures
of `offload_step.png`, as the highest in each of a few hundred intervals.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from _jobs import ROOT, answer, contest, forget_peak, in_job, ranks, read, resident, start_group, trimmed, worst

STEPS = 3
DRAWN = "shardwise 3, all on disk"
INTERVAL = 1e-3
DRAWN_POINTS = 250


def measure(options: argparse.Namespace) -> None:
    """Run one system on this rank; rank 0 answers with the worst rank's figures."""
    from _systems import OFFLOADED, SIZES, Case

    (system,) = options.systems
    make = {name: made for group in OFFLOADED.values() for name, made in group.items()}[system]
    start_group(system)
    small = make(Case(SIZES["tiny"], options.dtype == "bf16"), str(options.directory))
    for _ in range(2):
        small.step()
    small.finish()
    small.close()
    del small
    bare = trimmed()
    forget_peak()
    case = Case(options.shape, options.dtype == "bf16")
    run = make(case, str(options.directory))
    parameters = case.size.parameters
    planned = _by_tier(run, case, "planned") if run.accountant is not None else {}
    trimmed()
    forget_peak()
    for _ in range(STEPS):
        run.step()
    run.finish()
    peak = resident("VmHWM") - bare
    counted = _by_tier(run, case, "measured") if run.accountant is not None else {}
    course = _course(run) if system == DRAWN else None
    names = list(planned)
    most = worst(peak, *(planned[name] for name in names), *(counted[name] for name in names))
    answer(
        {
            "system": system,
            "parameters": parameters,
            "peak": most[0] / parameters,
            "planned": {n: v / parameters for n, v in zip(names, most[1 : 1 + len(names)], strict=True)},
            "counted": {n: v / parameters for n, v in zip(names, most[1 + len(names) :], strict=True)},
            "course": course,
        }
    )


def _by_tier(run: Any, case: Any, field: str) -> dict[str, int]:
    """Return the bytes of each tier at their highest: without activations, which nobody tracks while it trains."""
    report = run.engine.memory_report()
    found = {"device": getattr(report.total, field), "host": 0, "disk": 0}
    found |= {row.name: getattr(row, field) for row in report.elsewhere}
    return {name: value or 0 for name, value in found.items()}


def _course(run: Any) -> dict[str, Any]:
    """Return bytes by tier and kind over the time of one step, and when its phases begin."""
    from shardwise.memory import Category, Tier, track_activations

    accountant, ended = run.accountant, threading.Event()
    samples: list[tuple[float, dict[Tier, dict[Category, int]]]] = []

    def sample() -> None:
        while not ended.wait(INTERVAL):
            samples.append((time.perf_counter() - start, {tier: accountant.live_in(tier) for tier in Tier}))

    with track_activations(accountant):
        run.step()  # what is made once
        run.finish()
        thread = threading.Thread(target=sample)
        start = time.perf_counter()
        thread.start()
        marks = {"forward": 0.0}
        loss = run.loss()
        marks["backward"] = time.perf_counter() - start
        run.engine.backward(loss)
        del loss
        marks["step"] = time.perf_counter() - start
        run.update()
        run.finish()
        marks["end"] = time.perf_counter() - start
        ended.set()
        thread.join()
    length = marks["end"] / DRAWN_POINTS
    highest: dict[str, dict[str, list[int]]] = {tier.value: {} for tier in Tier}
    for tier in Tier:
        for kind in Category:
            values = [0] * DRAWN_POINTS
            for when, live in samples:
                place = min(int(when / length), DRAWN_POINTS - 1)
                values[place] = max(values[place], live[tier][kind])
            if any(values):
                highest[tier.value][kind.value] = values
    seen = {min(int(when / length), DRAWN_POINTS - 1) for when, _ in samples}
    for kinds in highest.values():
        for values in kinds.values():
            for place in range(1, DRAWN_POINTS):
                if place not in seen:
                    values[place] = values[place - 1]
    return {"marks": marks, "interval": length, "bytes": highest}


def main() -> None:
    """Run every system, print the table and keep it."""
    from _systems import OFFLOADED

    parser = contest(__doc__, size="98M", dtype="bf16", nproc=1, rounds=1)
    parser.add_argument("--directory", type=Path, help="on the disk; default: build/")
    asked = parser.parse_args().systems
    options = read(parser)
    peers = importlib.util.find_spec("deepspeed") is not None and not options.quick
    every = dict.fromkeys(name for group in OFFLOADED.values() for name in group)
    installed = [name for name in every if peers or not name.startswith("DeepSpeed")]
    options.systems = asked.split(";") if asked else [DRAWN] if options.quick else installed
    if in_job():
        measure(options)
        return
    from _machine import save

    rows: list[dict[str, Any]] = []
    course = None
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.directory or ROOT / "build") as directory:
        for system in options.systems:
            row = ranks(options.nproc, "--systems", system, "--directory", directory)
            course = row.pop("course") or course
            planned, counted = row.pop("planned"), row.pop("counted")
            row |= {f"planned_{tier}": value for tier, value in planned.items()}
            row |= {f"counted_{tier}": value for tier, value in counted.items()}
            rows.append(row)
            tiers = "  ".join(f"{tier} {planned[tier]:5.2f} {counted[tier]:5.2f}" for tier in planned)
            print(f"{system:32s} peak {row['peak']:6.2f} B/parameter  planned, counted: {tiers}", flush=True)
    name = f"offload_memory_{options.size}_{options.dtype}_{options.nproc}"
    save(options.results, name, rows, steps=STEPS, course=course)


if __name__ == "__main__":
    main()
