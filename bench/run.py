"""All benchmarks of CPU ranks, or of one CUDA device, one after the other; then plots, and the tables of the docs.

    python bench/run.py [--device cpu|cuda] [--only step_time,memory] [--python PYTHON] [--quick] [--list]

Each part is a command that can be run by itself; its JSON in bench/results has the command, the machine and the
versions. `--python` names the interpreter of the measured programs: one that also has DeepSpeed installed adds it to
the comparison. A part that fails does not keep the others from running; its table keeps its former figures, and the
exit code is 1. `--quick` tries everything out on tiny models in a few minutes and leaves its figures in build/bench.

On a machine that is lent for a time, `--minutes` ends in time: no command is begun that may take longer than the time
left, and one that does is ended. `--missing` leaves out each command whose file is there, so that calls one after the
other measure everything. At the end stand the figures that are asked of a CUDA device, and those found. `--rehearse`
tries its parts out on a CPU. On a machine without a network its own interpreter does, with PYTHONPATH=src, if its
packages are there; `--needs` names those that are missing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
_DOCS = ("numbers", "convergence", "pipeline", "gpu", "local-sgd", "memory", "model-compression", "unequal", "zeropp")
_DOCS += ("sparse-attention", "kernels")
PAGES = ("README.md", *(f"docs/{page}.md" for page in _DOCS))
Part = list[tuple[str, str, int]]
"""Names of files, the commands that leave them, and the seconds that each may take."""


def _cpu(*commands: str) -> Part:
    return [("", command, 36000) for command in commands]


CPU: dict[str, Part] = {
    "step_time": _cpu(
        "train.py --nproc 2",
        "train.py --nproc 2 --dtype bf16",
        "train.py --nproc 2 --accumulation 4 --rounds 4 --steps 1",
    ),
    "ranks": _cpu(*(f"train.py --size 7M --nproc {nproc} --rounds 5 --steps 1" for nproc in (1, 2, 4, 8))),
    "groups": _cpu("train.py --set groups --dtype bf16 --nproc 4 --accumulation 4 --rounds 4 --steps 1"),
    "tensor": _cpu(
        *(
            f"train.py --set tensor --what {what} --size {size} --nproc 4 --rounds 8"
            for size in ("27M", "53M")
            for what in ("time", "memory")
        )
    ),
    "pipeline": _cpu(
        "pipeline.py",
        "pipeline.py --what idle --micro-batches 16 --rounds 3",
        "pipeline.py --what idle --ranks 2,4 --rounds 3 --uneven",
    ),
    "memory": _cpu("train.py --what memory --size 98M --dtype bf16 --nproc 4"),
    "largest_batch": _cpu("limits.py"),
    "longest_sequence": _cpu(*(f"limits.py --what sequence --limit 320 --nproc {nproc}" for nproc in (2, 4))),
    "startup": _cpu("train.py --what start --nproc 2 --rounds 3"),
    "growth": _cpu("host.py --what layers --rounds 10", "host.py --what lengths"),
    "host_time": _cpu("host.py"),
    "monitoring": _cpu(*(f"overhead.py --nproc {nproc}" for nproc in (1, 2))),
    "unequal": _cpu("unequal.py"),
    "sparse_attention": _cpu("sparse_attention.py"),
    "kernels": _cpu("kernels.py"),
    "plan_time": _cpu("plan_time.py"),
    "optimizer": _cpu("micro.py --what adam"),
    "offload": _cpu(
        "offload.py",
        *(
            f"train.py --set {place} --size 98M --dtype bf16 --nproc {nproc}"
            for place in ("host", "disk")
            for nproc in (1, 2)
        ),
        *(f"train.py --set {place} --what memory --size 98M --dtype bf16" for place in ("host", "disk")),
    ),
    "plan": _cpu("micro.py --what plan"),
    "checkpoint": _cpu(
        "checkpoint.py --nproc 1",
        "checkpoint.py --nproc 2",
        "checkpoint.py --what background --nproc 2 --rounds 5",
        "checkpoint.py --what background --nproc 2 --rounds 5 --cached",
        "checkpoint.py --what copies --nproc 2 --layers 12 --rounds 5",
        "checkpoint.py --what memory --layers 5",
    ),
    "convergence": _cpu("convergence.py"),
    "curriculum": _cpu("curriculum.py", "curriculum.py --what layers"),
    "distillation": _cpu("distillation.py"),
    "inference": _cpu("inference.py"),
}
ONE = "train.py --set one --rounds 8 --steps 3"
CUDA: dict[str, Part] = {
    "device": [("gpu_device", "micro.py --what device", 60)],
    "step": [
        ("gpu_one_163M_bf16_1", f"{ONE} --size 163M --dtype bf16", 240),
        (
            "gpu_imagined_163M_bf16_8",
            "train.py --set imagined --nproc 8 --rounds 8 --steps 3 --size 163M --dtype bf16",
            150,
        ),
    ],
    "host": [("gpu_host_time", "host.py --gpu", 120)],
    "optimizer": [("gpu_optimizer", "micro.py --what optimizers --elements 200000000 --rounds 5", 90)],
    "trace": [("gpu_trace", "trace.py", 90)],
    "large": [
        (
            "gpu_one_1.4B_bf16_1",
            "train.py --set one --size 1.4B --dtype bf16 --rounds 4 --steps 2 --lengths 30",
            360,
        )
    ],
    "limited": [("gpu_offload_limited", "offload_train.py --what limited", 480)],
    "cost": [("gpu_offload_cost", "offload_train.py --what cost", 300)],
    "checkpoint": [("gpu_checkpoint", "checkpoint.py --what background --gpu", 120)],
    "sparse_attention": [("gpu_sparse_attention", "sparse_attention.py --rounds 20", 240)],
    "kernels": [("gpu_kernels", "kernels.py --rounds 20", 180)],
    "fp16": [("gpu_one_163M_fp16_1", f"{ONE} --size 163M --dtype fp16 --some", 120)],
    "largest": [("gpu_offload_largest", "offload_train.py --what largest", 480)],
}
"""By part, the most telling first."""
NEEDED = ("torch", "pydantic", "safetensors", "psutil", "matplotlib", "typer", "rich")
WANTED = ("deepspeed", "transformers", "triton")


def needs() -> int:
    """Print which packages are there; return the exit code."""
    missing = [name for name in (*NEEDED, *WANTED) if importlib.util.find_spec(name) is None]
    for name in (*NEEDED, *WANTED):
        lost = "missing" if name in NEEDED else "missing; the parts that need it are left out"
        print(f"{name:14s} {lost if name in missing else 'there'}")
    return int(any(name in NEEDED for name in missing))


def run(command: list[str], environment: dict[str, str], limit: float) -> int:
    """Run a command; return its exit code, or that of `timeout`, 124. Nothing that it has started goes on behind it."""
    with subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True) as process:
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            print(f"took more than {limit} s: {shlex.join(command)}", file=sys.stderr)
            return 124
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def main() -> int:
    """Run the parts; return the exit code."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    found.add_argument("--rehearse", action="store_true", help="the parts of a CUDA device, on a CPU")
    found.add_argument("--only", help="parts, separated by commas")
    found.add_argument("--python", default=sys.executable, help="interpreter of the measured programs")
    found.add_argument("--minutes", type=float, default=float("inf"), help="end in so many minutes")
    found.add_argument("--missing", action="store_true", help="only the commands whose files are not there")
    found.add_argument("--quick", action="store_true", help="tiny models; results go to build/bench")
    found.add_argument("--results", type=Path, help="where the JSON goes; default bench/results")
    found.add_argument("--list", action="store_true", help="print the parts and their commands")
    found.add_argument("--needs", action="store_true", help="print which packages are missing")
    options = found.parse_args()
    if options.needs:
        return needs()
    options.device = "cpu" if options.rehearse else options.device
    parts = CUDA if options.rehearse or options.device == "cuda" else CPU
    chosen = options.only.split(",") if options.only else list(parts)
    unknown = [part for part in chosen if part not in parts]
    if unknown:
        found.error(f"no part is named {unknown[0]!r}; there are {', '.join(parts)}")
    if options.list:
        for part in chosen:
            print(part, *(f"    python bench/{command}" for _, command, _ in parts[part]), sep="\n")
        return 0
    results = (options.results or (ROOT / "build" / "bench" if options.quick else RESULTS)).resolve()
    more = ["--device", options.device, "--results", str(results)] + ["--quick"] * options.quick
    threads = {"OMP_NUM_THREADS": "1"} if options.device == "cpu" else {}
    environment = {"PYTHONWARNINGS": "ignore", "PYTHONUNBUFFERED": "1", **threads, **os.environ}
    begun, failed, left = time.monotonic(), [], []
    for name, command, limit in (one for part in chosen for one in parts[part]):
        if options.missing and name and (results / f"{name}.json").exists():
            continue
        if options.minutes * 60 - (time.monotonic() - begun) < limit:
            left.append(command)
            continue
        print(f"\n== {command}", flush=True)
        start = time.monotonic()
        script, *arguments = command.split()
        if run([options.python, f"bench/{script}", *arguments, *more], environment, limit):
            failed.append(command)
        print(f"-- {time.monotonic() - start:.0f} s", flush=True)
    pages = PAGES if results == RESULTS else ("--targets",) if parts is CUDA else ()
    for script in ("plot.py", "report.py")[parts is CUDA :]:
        after = [
            sys.executable,
            f"bench/{script}",
            "--results",
            str(results),
            *(pages if script == "report.py" else ()),
        ]
        if subprocess.run(after, cwd=ROOT).returncode:
            failed.append(script)
    for command in left:
        print(f"not begun, for want of time: {command}", file=sys.stderr)
    for command in failed:
        print(f"failed: {command}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
