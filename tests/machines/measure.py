"""Times and bytes of several machines: network namespaces of this computer.

    python -m tests.machines.measure [--only start,throttled,lost] [--losses 50]      (make machines)

Needs root and what `make test-machines` needs. Results go to bench/results:

- `machines_start`: seconds from the command to the end of the first step, four ranks on one machine and on two.
- `machines_throttled`: two machines of two ranks, each limited to 100 Mbit/s: seconds and sent bytes of a step; seconds
  also with 20 ms between them, there and back.
- `machines_lost`: three machines of one rank, one is killed and returns, again and again: seconds without training.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from harness import Row, options_of, save, show

from tests.machines.lab import Lab, missing
from tests.machines.losses import STEPS, lose_machines

RATE = "100mbit"
ROUND_TRIP = 0.02
"""Seconds from one machine to another and back: each passes two cables, twice."""
ADAM = {"type": "AdamW", "params": {"lr": 1e-3}}
ZERO3 = {"stage": 3, "stage3_param_persistence_threshold": 0}
CODES = {"zero_quantized_weights": True, "zero_hpz_partition_size": 2, "zero_quantized_gradients": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "ZeRO 1": {"optimizer": ADAM, "zero_optimization": {"stage": 1}},
    "1-bit Adam": {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 1}}},
    "ZeRO 3": {"optimizer": ADAM, "zero_optimization": ZERO3},
    "HSDP": {"optimizer": ADAM, "zero_optimization": {**ZERO3, "mics_shard_size": 2}},
    "ZeRO++": {"optimizer": ADAM, "zero_optimization": {**ZERO3, **CODES}},
    "DiLoCo, every 8 steps": {
        "optimizer": ADAM,
        "zero_optimization": {"stage": 1},
        "local_sgd": {"enabled": True, "sync_every": 8, "replica_size": 2},
    },
}
RECOVERED = re.compile(r"recovered from a change of machines in .*; ([\d.]+) s beyond the start")


def start(lab: Lab, rounds: int) -> Iterator[Row]:
    """Measure the time until the first step has ended."""
    hosts = lab.folder / "hostfile"
    layouts = {
        "one machine": ("", ["--nproc", "4"]),
        "one machine, by ssh": (lab.hostfile(4, [1]).read_text(), ["-H", str(hosts)]),
        "two machines, by ssh": (lab.hostfile(2, [1, 2]).read_text(), ["-H", str(hosts)]),
    }
    found: dict[str, list[float]] = {name: [] for name in layouts}
    for name, (content, options) in [*layouts.items()] * rounds:
        hosts.write_text(content)
        began = time.perf_counter()
        process = lab.train(options, STEPS, "1", "1", "0")
        assert process.stdout is not None
        if not any("step 0" in line for line in process.stdout):
            raise RuntimeError(process.communicate()[1])
        found[name].append(time.perf_counter() - began)
        process.communicate(timeout=60)
    for name, seconds in found.items():
        yield {"system": name, "setting": {"ranks": 4}, "start_s": statistics.median(seconds)}


def throttled(lab: Lab) -> Iterator[Row]:
    """Measure steps of two machines with a slow network between them, near and far."""
    for number in (1, 2):
        lab.throttle(number, RATE)
    try:
        near = {name: _steps(lab, config) for name, config in SETTINGS.items()}
        for number in (1, 2):
            lab.delay(number, ROUND_TRIP / 4)
        for name, config in SETTINGS.items():
            row: Row = {"system": name, "setting": {}, "step_s": near[name]["seconds"]}
            row |= {"sent_mb": near[name]["sent"] / 1e6, "far_step_s": _steps(lab, config)["seconds"]}
            yield row
    finally:
        for number in (1, 2):
            lab.throttle(number)
            lab.delay(number, 0)


def _steps(lab: Lab, config: dict[str, Any]) -> dict[str, float]:
    script = str(Path(__file__).parent / "traffic.py")
    process = lab.train(["-H", str(lab.hostfile(2, [1, 2]))], script, json.dumps(config))
    out, err = process.communicate(timeout=300)
    found = re.search(r"traffic (\{.*\})", out)
    if found is None:
        raise RuntimeError(err)
    row: dict[str, float] = json.loads(found[1])
    return row


def lost(lab: Lab, losses: int) -> Iterator[Row]:
    """Measure recoveries, and compare the steps with those of one machine."""
    with tempfile.TemporaryDirectory() as directory:
        trial = lose_machines(lab, losses, Path(directory))
    trial.check(losses)
    beyond = [float(found) for found in RECOVERED.findall(trial.err)]
    yield {
        "system": "a machine is lost and returns",
        "setting": {},
        "count": losses,
        "recovery_s": statistics.median(trial.seconds),
        "longest_s": max(trial.seconds),
        "beyond_start_s": statistics.median(beyond),
    }


def main() -> None:
    """Measure what the command line asks for."""
    options = options_of(__doc__, {"losses": 2, "rounds": 1}, only="start,throttled,lost", losses=50, rounds=5)
    if reason := missing():
        raise SystemExit(reason)
    with Lab(3) as lab:
        measures = {
            "start": lambda: start(lab, options.rounds),
            "throttled": lambda: throttled(lab),
            "lost": lambda: lost(lab, options.losses),
        }
        for name in options.only.split(","):
            rows = []
            for row in measures[name]():
                show([row])
                rows.append(row)
            save(options, f"machines_{name}", rows, command=f"python -m tests.machines.measure --only {name}")


if __name__ == "__main__":
    main()
