"""All benchmarks of one CUDA device, one after the other; one file of results, and the page docs/gpu.md.

    python bench/gpu.py [--only device,step] [--minutes 9] [--missing] [--quick] [--list]

Each part is a command that can be run by itself; all leave their figures in bench/results/gpu.json, where one that is
measured anew replaces its former figures. `--minutes` ends in time on a machine that is lent for so long: no command is
begun that may take longer than what is left, and one that does is ended. `--missing` leaves out what the file has
already, so that calls one after the other measure everything. A command that fails does not keep others from running;
the exit code is then 1. At the end stands what was asked of this device, and what was found.

`--device cpu --quick` tries everything out without a device, on tiny models; figures go to build/bench.

On a machine without a network the interpreter of the machine does, with PYTHONPATH=src, if its packages are there;
`python bench/gpu.py --needs` names those that are missing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from _gpu import FILE
from _jobs import RESULTS, ROOT, parser, read
from gpu_page import targets

PARTS: dict[str, list[tuple[str, str, int]]] = {
    "device": [("device", "gpu_device.py", 60)],
    "step": [
        ("train 163M bf16", "gpu_train.py --size 163M --dtype bf16", 240),
        ("train 163M bf16 8 ranks", "gpu_train.py --size 163M --dtype bf16 --world 8", 150),
    ],
    "host": [("host", "host_time.py", 120)],
    "optimizer": [("optimizer", "optimizer_kernels.py", 90)],
    "trace": [("trace", "gpu_trace.py", 90)],
    "large": [("train 1.4B bf16", "gpu_train.py --size 1.4B --dtype bf16 --rounds 4 --steps 2 --lengths 30", 360)],
    "limited": [("offload limited", "gpu_offload.py --what limited", 480)],
    "cost": [("offload cost", "gpu_offload.py --what cost", 300)],
    "checkpoint": [("checkpoint", "gpu_checkpoint.py", 120)],
    "fp16": [("train 163M fp16", "gpu_train.py --size 163M --dtype fp16 --some", 120)],
    "largest": [("offload largest", "gpu_offload.py --what largest", 480)],
}
"""By part: names of results, the commands that leave them, and seconds that each may take; the most telling first."""
NEEDED = ("torch", "pydantic", "safetensors", "psutil", "matplotlib", "typer", "rich")
WANTED = ("deepspeed", "transformers", "triton")


def needs() -> int:
    """Print which packages are there; return the exit code."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    for name in (*NEEDED, *WANTED):
        there = importlib.util.find_spec(name) is not None
        print(
            f"{name:14s} {'there' if there else 'missing' if name in NEEDED else 'missing; what needs it is left out'}"
        )
    return 1 if missing else 0


def run(command: list[str], environment: dict[str, str], limit: float) -> int:
    """Run a command; return its exit code, or that of `timeout`, 124. Nothing that it has started goes on behind it."""
    with subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True) as process:
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            print(f"took more than {limit} s: {' '.join(command)}", file=sys.stderr)
            return 124
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def main() -> int:
    """Run the parts; return the exit code."""
    found = parser(__doc__)
    found.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    found.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    found.add_argument("--minutes", type=float, default=float("inf"), help="end in so many minutes")
    found.add_argument("--missing", action="store_true", help="only what the file of results does not have")
    found.add_argument("--list", action="store_true", help="print the parts and their commands")
    found.add_argument("--needs", action="store_true", help="print which packages are missing")
    options = read(found)
    if options.needs:
        return needs()
    chosen = options.only.split(",")
    unknown = [part for part in chosen if part not in PARTS]
    if unknown:
        found.error(f"no part is named {unknown[0]!r}; there are {', '.join(PARTS)}")
    commands = [(name, command, limit) for part in chosen for name, command, limit in PARTS[part]]
    if options.list:
        for name, command, limit in commands:
            print(f"{name:28s} python bench/{command}    ({limit} s at most)")
        return 0
    path, begun = options.results / f"{FILE}.json", time.monotonic()
    threads = {"OMP_NUM_THREADS": "1"} if options.device == "cpu" else {}
    environment = {"PYTHONWARNINGS": "ignore", "PYTHONUNBUFFERED": "1", **os.environ, **threads}
    failed, left = [], []
    for name, command, limit in commands:
        known = json.loads(path.read_text())["parts"] if path.exists() else {}
        if options.missing and name in known:
            continue
        remaining = options.minutes * 60 - (time.monotonic() - begun)
        if remaining < limit:
            left.append(name)
            continue
        print(f"\n== {name}: {command}", flush=True)
        start = time.monotonic()
        script, *arguments = command.split()
        full = [sys.executable, str(Path("bench") / script), *arguments, "--device", options.device]
        full += ["--results", str(options.results)] + (["--quick"] if options.quick else [])
        if run(full, environment, limit):
            failed.append(name)
        print(f"-- {time.monotonic() - start:.0f} s", flush=True)
    known = json.loads(path.read_text())["parts"] if path.exists() else {}
    print()
    for target in targets(known):
        print(target)
    if options.results == RESULTS:
        pages = [str(ROOT / page) for page in ("README.md", "docs/numbers.md", "docs/gpu.md")]
        subprocess.run([sys.executable, "bench/table.py", *pages], cwd=ROOT, check=True)
    for name in left:
        print(f"not begun, for want of time: {name}", file=sys.stderr)
    for name in failed:
        print(f"failed: {name}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
