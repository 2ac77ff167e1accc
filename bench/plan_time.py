"""Planned against measured time of a step, for ranks that share this machine.

    python bench/plan_time.py [--ranks 1,2,4] [--steps 10] [--seconds 9]

The machine is measured once for each number of ranks (`shardwise bench machine`). Each setting is then planned, and
trained as many steps as are asked for, of which the median counts. The settings of one number of ranks are trained in
one job, one after the other. The ratio is planned by measured time. "pairs" is the share of pairs of settings of one
number of ranks that take at least 10 % different times, and whose order is planned right.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import Row, job, options_of, over_ranks, save, serve, show, spent
from systems import SIZES, Case, Size, engine_config, shardwise

SHAPES = {**SIZES, "wide": Size(768, 2, 12, 4096, 4, 64)}


@dataclass(frozen=True)
class Setting:
    """What is trained: a size of `SHAPES`, how its state is divided, and where the optimizer's state lies."""

    size: str
    stage: int
    bf16: bool = False
    accumulation: int = 1
    recompute: bool = False
    tensor: int = 1
    offload: bool = False

    def __str__(self) -> str:
        """Return the setting in words."""
        more = ", recompute" * self.recompute + ", tensor 2" * (self.tensor > 1) + ", offload" * self.offload
        dtype = "bf16" if self.bf16 else "fp32"
        return f"{self.size} {dtype}, ZeRO {self.stage}, {self.accumulation} micro-batches{more}"

    @property
    def case(self) -> Case:
        """What is trained."""
        return Case(SHAPES[self.size], self.bf16, self.accumulation, tensor=self.tensor, recompute=self.recompute)

    @property
    def zero(self) -> dict[str, Any]:
        """Keys of `zero_optimization` besides the stage."""
        return {"offload_optimizer": {"device": "cpu"}} if self.offload else {}


SETTINGS = [
    Setting("7M", 0),
    Setting("7M", 1),
    Setting("7M", 2, accumulation=4),
    Setting("7M", 3),
    Setting("7M", 3, accumulation=4, recompute=True),
    Setting("7M", 3, bf16=True),
    Setting("7M", 1, tensor=2),
    Setting("wide", 0),
    Setting("wide", 3, accumulation=2),
    Setting("wide", 2, offload=True),
    Setting("wide", 3, tensor=2),
    Setting("27M", 1),
    Setting("27M", 3, bf16=True, accumulation=2, recompute=True),
]


def settings_of(ranks: int) -> list[Setting]:
    """Return the settings that so many ranks can have."""
    return [one for one in SETTINGS if ranks % one.tensor == 0]


def measure(options: argparse.Namespace) -> list[float]:
    """Return the seconds of a step of each setting."""
    found = []
    for setting in settings_of(dist.get_world_size()):
        run = shardwise(setting.case, setting.stage, **setting.zero)
        times = [spent(run.step)["wall"] for _ in range(options.steps + 3)]
        run.finish()
        found.append(over_ranks({"wall": statistics.median(times[3:])})["wall"])
        run.close()
    return found


def plan(options: argparse.Namespace, ranks: int, folder: str) -> tuple[list[float], float]:
    """Return the planned seconds of a step of each setting, and those that measuring the machine took."""
    from typer.testing import CliRunner

    from shardwise.launch.cli import app
    from shardwise.plan.rates import Machine
    from shardwise.plan.time import plan_times

    file, begun = Path(folder, f"{ranks}.json"), time.perf_counter()
    command = ["bench", "machine", "--nproc", str(ranks), "--out", str(file), "--seconds", str(options.seconds)]
    done = CliRunner().invoke(app, command)
    if done.exit_code:
        raise SystemExit(done.output)
    took, machine, found = time.perf_counter() - begun, Machine.load(file), []
    torch.set_num_threads(1)
    for setting in settings_of(ranks):
        case = replace(setting.case, device="meta")
        model, batch = case.model(), case.batch()
        given: dict[str, Any] = {"ranks": ranks, "stages": [setting.stage], "batch": batch, "limit": 30.0}
        found.append(
            plan_times(model, engine_config(case, setting.stage, **setting.zero), machine, **given)[0].time.total
        )
    return found, took


def ordered(pairs: list[tuple[float, float]]) -> tuple[int, int]:
    """Return how many pairs of settings differ in measured time, and how many of those are planned in that order."""
    chosen = [(a, b) for a, b in itertools.combinations(pairs, 2) if max(a[1], b[1]) >= 1.1 * min(a[1], b[1])]
    return len(chosen), sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in chosen)


def main() -> None:
    """Plan, train, print the table and keep it."""
    options = options_of(
        __doc__, quick={"ranks": "2", "steps": 2, "seconds": 2.0}, ranks="1,2,4", steps=10, seconds=9.0
    )
    serve(measure, options)
    rows: list[Row] = []
    errors, compared, right, longest = [], 0, 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        for ranks in map(int, options.ranks.split(",")):
            planned, took = plan(options, ranks, folder)
            measured = job(ranks)
            for setting, ours, real in zip(settings_of(ranks), planned, measured, strict=True):
                rows.append({"system": str(setting), "setting": {"ranks": ranks}, "planned_ms": 1e3 * ours})
                rows[-1] |= {"measured_ms": 1e3 * real, "ratio": ours / real}
                errors.append(abs(ours / real - 1))
            found = ordered(list(zip(planned, measured, strict=True)))
            compared, right, longest = compared + found[0], right + found[1], max(longest, took)
    errors.sort()
    whole: Row = {"system": f"{len(errors)} settings", "setting": {}, "machine_s": longest}
    whole |= {"median_error_percent": 100 * statistics.median(errors)}
    whole |= {"high_error_percent": 100 * errors[round(0.9 * (len(errors) - 1))]}
    whole |= {"pairs_percent": 100 * right / max(1, compared)}
    show([*rows, whole])
    save(options, "plan_steps", rows, steps=options.steps)
    save(options, "plan_steps_errors", [whole], steps=options.steps)


if __name__ == "__main__":
    main()
