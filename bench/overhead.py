"""The cost of watching a run: steps with it over steps without, in one job, by turns.

    python bench/overhead.py [--what monitoring] [--nproc 2] [--size 7M] [--rounds 10] [--steps 10]
    python bench/overhead.py --what timeline [--rounds 30] [--steps 3] [--keep DIR]

*monitoring*: two engines with the same model are built in the same processes: one that watches all (`watched`), one
that watches nothing. *timeline*: one engine makes the same steps with and without
a recording; comparing clocks and writing the file, before and after the recorded steps, is not counted. `--keep`
records once more at the end, and leaves the files there.

They take turns of `--steps` steps. A turn begins with a barrier and ends when everything that its steps have launched
has arrived. Each round gives a ratio; the figure is the median of the ratios. Beside time on the wall stands that of
the processor, of all threads of a rank, which other programs disturb less; both are means of the ranks. The thread that
looks for collectives that wait is one of the process, and runs in all turns.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from harness import Row, data_of, job, medians, options_of, over_ranks, save, serve, shared_folder, show, spent, turns
from systems import SIZES, Case, EngineRun, shardwise

NOTHING, EVERYTHING = "nothing", "everything"
OFF: dict[str, Any] = {"steps_per_print": 0, "timers": {"throughput": {"enabled": False}}, "stall_limit": 0}


def watched(folder: Path) -> dict[str, Any]:
    """Return the keys that switch everything on."""
    monitors = ("csv_monitor", "jsonl_monitor")
    return {
        "steps_per_print": 10,
        "wall_clock_breakdown": True,
        "memory_breakdown": True,
        "timers": {"throughput": {"enabled": True}},
        **{name: {"enabled": True, "output_path": str(folder), "job_name": name} for name in monitors},
        "comms_logger": {"enabled": True, "path": str(folder / "comm")},
        "stall_limit": 30,
        "run_log": {"enabled": True, "path": str(folder / "run"), "plan": False},
        "progress": {"mode": "lines"},
        "anomaly_watch": {"enabled": True},
    }


def engine_of(case: Case, keys: dict[str, Any], **zero: Any) -> Any:
    """Return an engine at stage 3, which has most collectives, with some keys."""
    # Nearly all training clips; the norm is judged by `anomaly_watch`.
    return shardwise(case, 3, keys={"gradient_clipping": 1.0, **keys}, **zero)


def turn_of(run: EngineRun, steps: int, within: Callable[[], Any] = contextlib.nullcontext) -> dict[str, float]:
    """Return the seconds of a step within a context that is not counted."""

    def train() -> None:
        for _ in range(steps):
            run.step()
        run.finish()

    with within():
        figures = spent(train)
    return over_ranks({name: value / steps for name, value in figures.items()})


def measure(options: argparse.Namespace) -> Row:
    """Take turns on this rank; return seconds a step on the wall and of the processor of each turn."""
    logging.getLogger("shardwise").setLevel(logging.INFO)
    with shared_folder() as folder:
        return measured(options, folder)


def measured(options: argparse.Namespace, folder: str) -> Row:
    """Return what `measure` does; files are below `folder`."""
    from shardwise.profile.trace import read

    case = Case(SIZES[options.size], options.dtype == "bf16")
    if options.what == "timeline":
        run = engine_of(case, {}, stage3_param_persistence_threshold=0)
        record = functools.partial(run.engine.record_timeline, folder)
        runs = [run]
        ways = {
            NOTHING: functools.partial(turn_of, run, options.steps),
            EVERYTHING: functools.partial(turn_of, run, options.steps, record),
        }
    else:
        runs = [engine_of(case, OFF), engine_of(case, watched(Path(folder)))]
        ways = {
            name: functools.partial(turn_of, run, options.steps)
            for name, run in zip((NOTHING, EVERYTHING), runs, strict=True)
        }
    found: Row = {"turns": turns(ways, options.rounds, warm=2)}
    if options.what == "timeline":
        found["events"] = len(read(folder)[0].events) / options.steps if dist.get_rank() == 0 else 0
        if options.keep:
            turn_of(runs[0], options.steps, functools.partial(runs[0].engine.record_timeline, options.keep))
    for run in runs:
        run.close()
    dist.barrier()
    return found


def main() -> None:
    """Run the contest, print the table and keep it."""
    options = options_of(__doc__, **data_of("options.toml")["overhead"])
    serve(measure, options)
    found = job(options.nproc)
    rows: list[Row] = []
    for name, own in found["turns"].items():
        over = {
            key: sorted(100 * (a[key] / b[key] - 1) for a, b in zip(own, found["turns"][NOTHING], strict=True))
            for key in ("wall", "processor")
        }
        figures, quarter = medians(own), len(own) // 4
        row: Row = {"system": name, "setting": {"ranks": options.nproc}}
        row |= {"median_ms": figures["wall"] * 1e3, "processor_ms": figures["processor"] * 1e3}
        row |= {"over_percent": statistics.median(over["wall"])}
        row |= {"processor_over_percent": statistics.median(over["processor"])}
        row["half_of_rounds"] = [over["processor"][quarter], over["processor"][-1 - quarter]]
        rows.append(row)
    if "events" in found:
        rows[-1]["events_a_step"] = found["events"]
    show(rows)
    name = f"{options.what}_{options.size}_{options.dtype}_{options.nproc}"
    save(options, name, rows, rounds=options.rounds, steps=options.steps)


if __name__ == "__main__":
    main()
