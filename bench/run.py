"""All benchmarks on CPU ranks, one after the other, then their plots, and the tables of the README and the docs.

    python bench/run.py [--only step_time,memory] [--python PYTHON] [--quick] [--list]

Each part is a command that can be run by itself; its JSON in bench/results has the command, the machine and the
versions. `--python` names the interpreter of the measured programs: one that also has DeepSpeed installed adds it to
the comparison. A part that fails does not keep the others from running; its table keeps its former figures, and the
exit code is 1. `--quick` tries everything out on tiny models in a few minutes and leaves its figures in build/bench.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from _jobs import RESULTS, ROOT, parser, read

PARTS: dict[str, list[str]] = {
    "step_time": [
        "step_time.py --dtype fp32",
        "step_time.py --dtype bf16",
        "step_time.py --dtype fp32 --accumulation 4 --rounds 4 --steps 1",
    ],
    "ranks": [f"step_time.py --size 7M --dtype fp32 --nproc {nproc} --rounds 5 --steps 1" for nproc in (1, 2, 4, 8)],
    "groups": ["groups.py"],
    "tensor": [f"tensor.py --size {size}" for size in ("27M", "53M")],
    "pipeline": [
        "pipeline.py --micro-batches 8",
        "pipeline_idle.py",
        "pipeline_idle.py --nproc 2,4 --micro-batches 8 --uneven",
    ],
    "memory": ["memory.py"],
    "largest_batch": ["largest_batch.py"],
    "longest_sequence": [f"longest_sequence.py --limit 320 --nproc {nproc}" for nproc in (2, 4)],
    "startup": ["startup.py"],
    "growth": ["growth.py"],
    "host_time": ["host_time.py"],
    "monitoring": [f"monitoring.py --nproc {nproc}" for nproc in (1, 2)],
    "comm": ["comm_gloo.py"],
    "optimizer": ["cpu_adam.py"],
    "offload": [
        "offload.py",
        *(f"offload_time.py --place {place} --nproc {nproc}" for place in ("host", "disk") for nproc in (1, 2)),
        "offload_memory.py",
    ],
    "plan": ["plan_time.py"],
    "checkpoint": [
        "checkpoint_io.py --nproc 1",
        "checkpoint_io.py --nproc 2",
        "checkpoint_async.py --nproc 2",
        "checkpoint_async.py --nproc 2 --cached",
        "memory_copies.py --nproc 2",
        "checkpoint_memory.py",
    ],
    "convergence": ["convergence.py"],
}
"""Commands by part."""


def main() -> int:
    """Run the parts; return the exit code."""
    found = parser(__doc__)
    found.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    found.add_argument("--python", default=sys.executable, help="interpreter of the measured programs")
    found.add_argument("--list", action="store_true", help="print the parts and their commands")
    options = read(found)
    chosen = options.only.split(",")
    unknown = [part for part in chosen if part not in PARTS]
    if unknown:
        found.error(f"no part is named {unknown[0]!r}; there are {', '.join(PARTS)}")
    if options.list:
        for part in chosen:
            print(part, *(f"    python bench/{command}" for command in PARTS[part]), sep="\n")
        return 0
    more = (["--quick"] if options.quick else []) + (
        [] if options.results == RESULTS else ["--results", str(options.results)]
    )
    environment = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONUNBUFFERED": "1", **os.environ}
    failed = []
    for part in chosen:
        for command in PARTS[part]:
            print(f"\n== {command}", flush=True)
            start = time.perf_counter()
            script, *arguments = command.split()
            full = [options.python, f"bench/{script}", *arguments, *more]
            if subprocess.run(full, cwd=ROOT, env=environment).returncode:
                failed.append(command)
            print(f"-- {time.perf_counter() - start:.0f} s", flush=True)
    here = Path(__file__).parent
    pages = (
        []
        if options.results != RESULTS
        else ["README.md", "docs/numbers.md", "docs/convergence.md", "docs/pipeline.md"]
    )
    for script, arguments in (("plot.py", []), ("table.py", pages)):
        command = [sys.executable, str(here / script), "--results", str(options.results), *arguments]
        if subprocess.run(command, cwd=ROOT).returncode:
            failed.append(script)
    for command in failed:
        print(f"failed: {command}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
