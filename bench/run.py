"""All benchmarks of CPU ranks, or of one CUDA device, one after the other; then plots, and the tables of the docs.

    python bench/run.py [--device cpu|cuda] [--only step_time,memory] [--python PYTHON] [--quick] [--list]

Each part is a command that can be run by itself; its JSON in bench/results has the command, the machine and the
versions. `--python` names the interpreter of the measured programs: one that also has DeepSpeed installed adds it to
the comparison. A part that fails does not keep the others from running; its table keeps its former figures, and the
exit code is 1. One that is ended may leave some rows, marked as partial. `--quick` tries everything out on tiny models
in a few minutes and leaves its figures in build/bench.

On a machine that is lent for a time, `--minutes` ends in time: no command is begun that may take longer than the time
left, and one that does is ended. `--missing` leaves out each command whose file is complete, so that calls one after
the other measure everything. At the end stand the figures that are asked of a CUDA device, and those found.
`--rehearse` tries its parts out on a CPU. On a machine without a network its own interpreter does, with PYTHONPATH=src,
if its packages are there; `--needs` names those that are missing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from pydantic import TypeAdapter

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
_PAGES = (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))
PAGES = [str(path) for path in _PAGES if "<!-- table " in path.read_text("utf-8")]
Part = list[tuple[str, str, int]]
"""Names of files, the commands that leave them, and the seconds that each may take."""


def parts_of(device: str) -> dict[str, Part]:
    """Return the parts of parts.toml for a device."""
    found = tomllib.loads((ROOT / "bench" / "parts.toml").read_text("utf-8"))[device]
    each = {name: [("", one, 36000) if isinstance(one, str) else one for one in part] for name, part in found.items()}
    return TypeAdapter(dict[str, Part]).validate_python(each)


NEEDED = ("torch", "pydantic", "safetensors", "psutil", "matplotlib", "typer", "rich")
WANTED = ("deepspeed", "transformers", "triton")


def needs() -> int:
    """Print which packages are there; return the exit code."""
    missing = [name for name in (*NEEDED, *WANTED) if importlib.util.find_spec(name) is None]
    for name in (*NEEDED, *WANTED):
        lost = "missing" if name in NEEDED else "missing; the parts that need it are left out"
        print(f"{name:14s} {lost if name in missing else 'there'}")
    return int(any(name in NEEDED for name in missing))


def is_complete(file: Path) -> bool:
    """Return True if a result file has all rows of its benchmark."""
    return file.exists() and not json.loads(file.read_text("utf-8")).get("partial")


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
    on_cuda = options.rehearse or options.device == "cuda"
    parts = parts_of("cuda" if on_cuda else "cpu")
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
        if options.missing and name and is_complete(results / f"{name}.json"):
            continue
        if options.minutes * 60 - (time.monotonic() - begun) < limit:
            left.append(command)
            continue
        print(f"\n== {command}", flush=True)
        start = time.monotonic()
        script, *arguments = shlex.split(command)
        if run([options.python, f"bench/{script}", *arguments, *more], environment, limit):
            failed.append(command)
        print(f"-- {time.monotonic() - start:.0f} s", flush=True)
    pages = PAGES if results == RESULTS else ("--targets",) if on_cuda else ()
    for script, more in [("plot.py", ())] * (not on_cuda) + [("report.py", pages)]:
        after = [sys.executable, f"bench/{script}", "--results", str(results), *more]
        if subprocess.run(after, cwd=ROOT).returncode:
            failed.append(script)
    for command in left:
        print(f"not begun, for want of time: {command}", file=sys.stderr)
    for command in failed:
        print(f"failed: {command}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
