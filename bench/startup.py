"""Time until training runs: importing, and from the call that builds a system to the end of its first step.

    python bench/startup.py [--nproc 2] [--size 27M] [--rounds 3] [--systems "DDP,shardwise 3"]

Import: what `import shardwise` with its `initialize` takes after `import torch`, and what others take, each in a new
process, taking turns; the median. First step: every round starts a job for each system. Its ranks have imported the
system, formed the process group and built the model before the clock starts; `initialize` (or the wrapper and the
optimizer) and the first step follow. Seconds of the slowest rank, medians of the rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import subprocess
import sys
import time
from typing import Any

from _jobs import answer, contest, in_job, ranks, read, start_group, worst

IMPORTS = {
    "shardwise": "import shardwise",
    "shardwise with initialize": "import shardwise; shardwise.initialize",
    "DDP": "from torch.nn.parallel import DistributedDataParallel",
    "FSDP2": "from torch.distributed.fsdp import fully_shard",
    "DeepSpeed": "import deepspeed",
}
LEFT_OUT = ("alone", "FSDP2 no reshard", "DeepSpeed 1", "DeepSpeed 2", "shardwise 1", "shardwise 2", "shardwise 3 Init")


def import_seconds(statement: str) -> float:
    """Return the seconds that a statement takes in a new process that has imported torch."""
    code = f"import time, torch; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def imports(systems: list[str], rounds: int) -> list[dict[str, Any]]:
    """Return a row for each system's import."""
    chosen = [name for name in IMPORTS if any(system.startswith(name.split()[0]) for system in systems)]
    seconds: dict[str, list[float]] = {name: [] for name in chosen}
    for turn in range(rounds):
        for name in chosen if turn % 2 == 0 else reversed(chosen):
            seconds[name].append(import_seconds(IMPORTS[name]))
    return [
        {"import": name, "seconds_over_torch": statistics.median(values), "lowest": min(values), "highest": max(values)}
        for name, values in seconds.items()
    ]


def measure(options: argparse.Namespace) -> None:
    """Build one system on this rank and make its first step; rank 0 answers with the slowest rank's seconds."""
    import torch.distributed as dist
    from _systems import GPT, SYSTEMS, Case

    @dataclasses.dataclass(frozen=True)
    class Built(Case):
        """A case whose model is there already."""

        ready: Any = None

        def model(self) -> GPT:
            """Return the model."""
            return self.ready

    (system,) = options.systems
    start_group(system)
    exec(next(code for name, code in reversed(IMPORTS.items()) if system.startswith(name.split()[0])), {})
    case = Case(options.shape, options.dtype == "bf16")
    case = Built(case.size, case.bf16, ready=case.model())
    dist.barrier()
    start = time.perf_counter()
    run = SYSTEMS[system](case)
    built = time.perf_counter()
    run.step()
    run.finish()
    answer(worst(built - start, time.perf_counter() - built, time.perf_counter() - start))


def main() -> None:
    """Measure imports and first steps, print the tables and keep them."""
    options = read(contest(__doc__, size="27M", dtype="fp32", nproc=2, rounds=3), without=LEFT_OUT)
    if in_job():
        measure(options)
        return
    from _machine import save

    imported = imports(options.systems, 2 * options.rounds)
    for row in imported:
        print(f"import {row['import']:26s} {row['seconds_over_torch']:5.2f} s over torch", flush=True)
    found: dict[str, list[list[float]]] = {system: [] for system in options.systems}
    for turn in range(options.rounds):
        for system in options.systems if turn % 2 == 0 else reversed(options.systems):
            found[system].append(ranks(options.nproc, "--systems", system))
    rows = []
    for system, turns in found.items():
        build, first, total = (statistics.median(turn[column] for turn in turns) for column in range(3))
        rows.append({"system": system, "build_s": build, "first_step_s": first, "total_s": total})
        print(f"{system:18s} built in {build:5.2f} s  first step {first:5.2f} s  together {total:5.2f} s", flush=True)
    name = f"startup_{options.size}_{options.dtype}_{options.nproc}"
    save(options.results, name, rows, imports=imported, rounds=options.rounds)


if __name__ == "__main__":
    main()
