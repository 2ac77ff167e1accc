"""What the benchmarks share: their options, jobs of several ranks, and the resident size of a process.

A benchmark of several ranks is one script in two roles. Called by hand it starts itself as a job, with the same options
and perhaps more; in the job, where `in_job()` is true, every rank measures and rank 0 hands the figures back.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
QUICK_RESULTS = ROOT / "build" / "bench"
"""Where quick runs leave their files: they try the benchmarks out, and their figures mean nothing."""

_ANSWER = "SHARDWISE_BENCH_ANSWER"


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--quick", action="store_true", help="try it out on tiny models; results go to build/bench")
    found.add_argument("--results", type=Path, help="where the JSON goes; default bench/results")
    return found


def contest(description: str | None, *, size: str, dtype: str, nproc: int, rounds: int) -> argparse.ArgumentParser:
    """Return a parser for a benchmark that compares systems, with the given defaults."""
    found = parser(description)
    found.add_argument("--size", default=size, help="name of a model of _systems.py")
    found.add_argument("--dtype", choices=("fp32", "bf16"), default=dtype)
    found.add_argument("--nproc", type=int, default=nproc, help="number of ranks")
    found.add_argument("--rounds", type=int, default=rounds)
    found.add_argument("--systems", help="names, separated by commas; default: all that are installed")
    return found


def read(found: argparse.ArgumentParser, without: Sequence[str] = ()) -> argparse.Namespace:
    """Parse the command line, and find `options.shape`; a quick run has the smallest, one round and two systems.

    Args:
        found: a parser of this module, with the benchmark's own options.
        without: systems that are left out unless they are named.
    """
    options = found.parse_args()
    options.results = (options.results or (QUICK_RESULTS if options.quick else RESULTS)).resolve()
    if "systems" in options:
        from _systems import SIZES, available

        options.shape = SIZES["tiny" if options.quick else options.size]
        options.rounds = 1 if options.quick else options.rounds
        chosen = options.systems or ("DDP,shardwise 3" if options.quick else None)
        options.systems = chosen.split(",") if chosen else [n for n in available() if n not in without]
    return options


def in_job() -> bool:
    """Whether this process is a rank of a job that `ranks` has started."""
    return _ANSWER in os.environ


def ranks(nproc: int, *more: str) -> Any:
    """Run this script as `nproc` ranks with its own options and some more; return what rank 0 gives to `answer`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "shardwise.launch", "run", "--nproc", str(nproc), "--no-local-rank"]
        environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **os.environ, _ANSWER: str(file)}
        command += [sys.argv[0], *sys.argv[1:], *more]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode or not file.exists():
            sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
        return json.loads(file.read_text())


def start_group(system: str) -> None:
    """Start the process group of a job in the way of one system, so that the others' code is not loaded."""
    if system.startswith("shardwise"):
        import shardwise

        shardwise.init_distributed()
    elif system.startswith("DeepSpeed"):
        import deepspeed
        import torch

        deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    else:
        import torch
        import torch.distributed as dist

        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")


def answer(value: Any) -> None:
    """Hand rank 0's figures to the process that started the job, and end the process group."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        Path(os.environ[_ANSWER]).write_text(json.dumps(value))
    dist.barrier()
    dist.destroy_process_group()


def worst(*figures: float) -> list[float]:
    """Return the highest of each figure over the ranks."""
    import torch
    import torch.distributed as dist

    values = torch.tensor(figures, dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return values.tolist()


def resident(field: str = "VmRSS") -> int:
    """Return a field of /proc/self/status in bytes: resident size, or `VmHWM`, the highest since `forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; this benchmark needs Linux")


def trimmed() -> int:
    """Give freed memory back to the system, and return the resident size in bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident()


def forget_peak() -> None:
    """Let the highest resident size begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def bare_size(make: Callable[[Any], Any], case: Any) -> int:
    """Load all code of a system by training a tiny model; return the resident size of the bare process.

    Args:
        make: the system, of `_systems.py`.
        case: what will be trained, with another size.
    """
    from _systems import SIZES

    run = make(dataclasses.replace(case, size=SIZES["tiny"]))
    for _ in range(2):
        run.step()
    run.evaluate()
    run.finish()
    run.close()
    del run
    return trimmed()
