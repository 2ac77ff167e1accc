"""What all benchmarks share: options, the processes that measure, the device, turns, and the one form of results.

A benchmark is one script in two roles. Called by hand it starts itself, with the same options and perhaps more, as a
job of several ranks (`job`) or as one process (`child`); there `serve` measures, and gives rank 0's figures back.

A result file has the command, the time, the machine, notes, and rows of system, setting, metric, value and unit. A
benchmark gives `save` one dictionary a system: "system", "setting", and a figure for each metric, whose name may end in
its unit ("median_ms"). A figure is a number, a text, or a list with one for each round, rank or step.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from string import Template
from typing import Any

import psutil
import torch
import torch.distributed as dist

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
QUICK_RESULTS = ROOT / "build" / "bench"
"""Where quick runs leave their files: they try the benchmarks out, and their figures mean nothing."""
UNITS = {
    "ms": "ms",
    "us": "us",
    "ns": "ns",
    "s": "s",
    "mb": "MB",
    "mib": "MiB",
    "gib": "GiB",
    "gb_per_s": "GB/s",
    "percent": "%",
    "bytes": "bytes",
    "bytes_a_parameter": "bytes/parameter",
    "s_per_gb": "s/GB",
}
"""Ends of the names of metrics, and units."""
V100_PEAK = 125e12
"""FLOP/s in fp16 of the card that the papers on offloading have used."""
LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
"""Beginnings of the calls of the driver that a profile shows; ranges of the profiler are none of them."""
_ANSWER = "SHARDWISE_BENCH_ANSWER"
_LOAD = [round(value, 2) for value in os.getloadavg()]
"""What others keep the machine busy with: read before the benchmark begins."""

Row = dict[str, Any]


# -- options -----------------------------------------------------------------------------------------------------------


def options_of(description: str | None, quick: Mapping[str, Any] | None = None, **defaults: Any) -> Any:
    """Parse the command line.

    Args:
        description: of the script.
        quick: defaults of a run that only tries the script out; numbers that are given are not larger then.
        defaults: options and their defaults, whose type they have; False: a switch. "directory" becomes one below
            build/ unless another is named.
    """
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--quick", action="store_true", help="try it out on tiny models; results go to build/bench")
    found.add_argument("--results", type=Path, help="where the JSON goes; default bench/results")
    found.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    found.add_argument("--role", default="", help="used by the processes that measure")
    for name, default in defaults.items():
        how: dict[str, Any] = {"action": "store_true"} if default is False else {"type": type(default)}
        found.add_argument(f"--{name.replace('_', '-')}", default=default, **how)
    is_quick = found.parse_known_args()[0].quick
    if is_quick:
        found.set_defaults(**(quick or {}))
    options = found.parse_args()
    for name, most in (quick or {}).items():
        if is_quick and isinstance(most, int):
            setattr(options, name, min(getattr(options, name), most))
    options.results = (options.results or (QUICK_RESULTS if is_quick else RESULTS)).resolve()
    if getattr(options, "directory", None) == "":
        (ROOT / "build").mkdir(exist_ok=True)
        options.directory = str(ROOT / "build")
    if options.device == "cuda" and not torch.cuda.is_available():
        found.error("there is no CUDA device; --device cpu --quick tries the script out")
    return options


# -- processes ---------------------------------------------------------------------------------------------------------


def in_job() -> bool:
    """Whether this process was started to measure."""
    return _ANSWER in os.environ


def job(nproc: int, *more: str) -> Any:
    """Run this script as `nproc` ranks with its own options and some more; return what rank 0 answers."""
    command = [sys.executable, "-m", "shardwise.launch", "run", "--nproc", str(nproc), "--no-local-rank"]
    threads = {"OMP_NUM_THREADS": "1", **os.environ}
    done, found = _run([*command, *sys.argv, *more], threads)
    if done.returncode or found is None:
        sys.exit(f"{shlex.join([*sys.argv, *more])} failed:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return found


def child(*more: str, limit: float = 600.0) -> Any:
    """Run this script with its own options and some more in one process; return what it answers.

    One that fails, or takes longer than `limit` seconds, has "failed" in its last answer, or in a last row of "all".
    """
    own = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29541"}
    done, answered = _run([sys.executable, *sys.argv, *more], {**os.environ, **own, **meet}, limit)
    found: Any = answered or {}
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()][-12:]
        print("\n".join(last), file=sys.stderr, flush=True)
        failed = {"failed": (last[-1] if last else f"exit code {done.returncode}")[:500]}
        return [*found, {"system": "all", **failed}] if isinstance(found, list) else found | failed
    return found


def _run(
    command: list[str], environment: dict[str, str], limit: float | None = None
) -> tuple[subprocess.CompletedProcess[str], Any]:
    """Run a process that measures; return how it ended, and its last answer."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "answer.json"
        environment = {"GLOO_SOCKET_IFNAME": "lo", **environment, _ANSWER: str(file)}
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environment)
        except subprocess.TimeoutExpired:
            done = subprocess.CompletedProcess(command, 124, "", f"took more than {limit:.0f} s")
        return done, json.loads(file.read_text()) if file.exists() else None


def answer(value: Any) -> None:
    """Hand rank 0's figures to the process that started this one; called again, those of before are replaced."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        _write(Path(os.environ[_ANSWER]), json.dumps(value))


def leave_group() -> None:
    """End the process group of a job once all ranks are done."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


@contextlib.contextmanager
def group_of(system: str, device: str = "cpu") -> Iterator[None]:
    """Be a rank of a job, whose process group is started in the way of one system: the others' code is not loaded."""
    backend = "nccl" if device == "cuda" else "gloo"
    if system.startswith("shardwise"):
        import shardwise

        shardwise.init_distributed()
    elif system.startswith("DeepSpeed"):
        import deepspeed

        deepspeed.init_distributed(backend)
    else:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(backend)
    yield
    leave_group()


def serve(
    measure: Callable[[argparse.Namespace], Any],
    options: argparse.Namespace,
    group: contextlib.AbstractContextManager[None] | None = None,
) -> None:
    """In a process that was started to measure: measure within a group (default: shardwise's), answer, and end."""
    if in_job():
        with group or group_of("shardwise"):
            answer(measure(options))
        sys.exit()


@contextlib.contextmanager
def own_group(world: int, device: str, imagined: bool | None = None) -> Iterator[None]:
    """Be the only rank of a group, or the first of several that are imagined: collectives are launched and do nothing.

    Args:
        world: number of ranks.
        device: "cuda" or "cpu".
        imagined: default: where there are several.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if device == "cuda":
        torch.cuda.set_device(0)
    fake = world > 1 if imagined is None else imagined
    backend = "fake" if fake else "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=FakeStore() if fake else dist.HashStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def shared_folder(directory: str | None = None) -> Iterator[str]:
    """Have a new directory that all ranks know."""
    box = [tempfile.mkdtemp(dir=directory) if dist.get_rank() == 0 else None]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(box)
    try:
        yield str(box[0])
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(str(box[0]), ignore_errors=True)


# -- what is measured with ---------------------------------------------------------------------------------------------


class Device:
    """A CUDA device, or the CPU in its place, which has no clock and no allocator of its own.

    Attributes:
        kind, name: what it is.
        is_cuda: whether there is anything to measure but the time.
    """

    def __init__(self, kind: str) -> None:
        self.kind, self.is_cuda = kind, kind == "cuda"
        self.name = torch.cuda.get_device_name() if self.is_cuda else "cpu"

    @property
    def total(self) -> int:
        """Bytes of its memory; of the CPU, as many as a tiny test may take for it."""
        return torch.cuda.mem_get_info()[1] if self.is_cuda else 1 << 30

    def peak_flops(self, half: bool) -> float | None:
        """Return the vendor's FLOP/s, or None if the table of the library does not have the device."""
        from shardwise.profile.peaks import peak_of

        peak = peak_of(self.name, torch.float16 if half else torch.float32)
        return None if peak is None else peak.tflops * 1e12

    def wait(self) -> None:
        """Wait for all that has been launched."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def seconds(self, action: Callable[[], Any]) -> float:
        """Return the seconds that an action takes, with all work that it has launched."""
        self.wait()
        start = time.perf_counter()
        action()
        self.wait()
        return time.perf_counter() - start

    def launching(self, action: Callable[[], Any]) -> float:
        """Return the seconds until the host has launched an action; the device begins it with nothing else to do."""
        self.wait()
        start = time.perf_counter()
        action()
        spent = time.perf_counter() - start
        self.wait()
        return spent

    def launches(self, action: Callable[[], Any]) -> int:
        """Return how many kernels, copies and fills the host launches on a CUDA device in an action."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.seconds(action)
        return sum(event.name.startswith(LAUNCHES) for event in profile.events())

    def memory(self) -> tuple[int, int]:
        """Return the bytes that are allocated and those that torch has reserved."""
        return (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) if self.is_cuda else (0, 0)

    def peaks(self) -> tuple[int, int]:
        """Return the highest of both since `forget`."""
        return (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if self.is_cuda else (0, 0)

    def forget(self) -> None:
        """Give back unused memory, and let the peaks begin anew."""
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def taken(self, action: Callable[[], Any], before: int | None = None) -> int:
        """Return the bytes that there are at most in an action above those before: allocated, or resident on a CPU."""
        if self.is_cuda:
            self.forget()
            start = self.memory()[0]
            self.seconds(action)
            return self.peaks()[0] - (start if before is None else before)
        start = trimmed()
        forget_peak()
        action()
        return highest_resident() - (start if before is None else before)

    def limit(self, size: int) -> None:
        """Let torch have no more than so many bytes of the device."""
        if self.is_cuda:
            torch.cuda.set_per_process_memory_fraction(min(1.0, size / self.total))


def turns(
    ways: Mapping[Any, Callable[[], Any]], rounds: int, warm: int = 1, timed: bool = False
) -> dict[Any, list[Any]]:
    """Let ways take turns, forwards and then backwards through the list; return the result of each turn that counts.

    Args:
        ways: functions.
        rounds, warm: turns that count, and turns before them.
        timed: seconds are the result.
    """
    found: dict[Any, list[Any]] = {name: [] for name in ways}
    for turn in range(-warm, rounds):
        for name in ways if turn % 2 == 0 else reversed(ways):
            start = time.perf_counter()
            value = ways[name]()
            if turn >= 0:
                found[name].append(time.perf_counter() - start if timed else value)
    return found


def medians(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each figure."""
    return {name: statistics.median(one[name] for one in values) for name in values[0]}


def over_ranks(figures: Mapping[str, float], op: str = "mean") -> dict[str, float]:
    """Return the "mean", "max" or "sum" over the ranks of each figure; imagined ranks have none."""
    if dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return dict(figures)
    values = torch.tensor(list(figures.values()), dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM)
    if op == "mean":
        values /= dist.get_world_size()
    return dict(zip(figures, values.tolist(), strict=True))


def spent(action: Callable[[], Any]) -> dict[str, float]:
    """Return seconds on the wall and of the processor, of all threads, for an action that all ranks begin together."""
    dist.barrier()
    wall, processor = time.perf_counter(), time.process_time()
    action()
    return {"wall": time.perf_counter() - wall, "processor": time.process_time() - processor}


def resident() -> int:
    """Return the resident size in bytes."""
    return psutil.Process().memory_info().rss


def highest_resident() -> int:
    """Return the highest resident size since `forget_peak`, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def trimmed() -> int:
    """Give freed memory back to the system, and return the resident size in bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident()


def forget_peak() -> None:
    """Let the highest resident size begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def most_that(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest number up to `most` that fits, where all up to some number do; 0 if 1 does not.

    >>> most_that(lambda rows: rows <= 11, 1024)
    11
    >>> most_that(lambda rows: False, 64), most_that(lambda rows: True, 64)
    (0, 64)
    """
    good, bad = 0, 1
    while bad <= most and fits(bad):
        good, bad = bad, 2 * bad
    bad = min(bad, most + 1)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def reason(error: BaseException) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def attempt(row: Row, measure: Callable[[], Row]) -> Row:
    """Return a row with the figures of `measure`, or with "failed" and the reason."""
    try:
        return row | measure()
    except Exception as error:
        print(f"{row}: {reason(error)}", file=sys.stderr, flush=True)
        return row | {"failed": reason(error)}


# -- results -----------------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """Describe processor, memory, GPU, threads, load before the benchmark and versions."""
    named = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    from shardwise._version import __version__  # DeepSpeed's own runs have no shardwise

    peer = importlib.util.find_spec("deepspeed") is not None
    return {
        "processor": named[0].split(":", 1)[1].strip() if named else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cuda": torch.version.cuda,
        "threads_per_process": int(os.environ.get("OMP_NUM_THREADS", "1")),
        "load_average": _LOAD,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deepspeed": importlib.metadata.version("deepspeed") if peer else None,
        "shardwise": __version__,
        "system": f"{platform.system()} {platform.release()}",
    }


def unit_of(metric: str) -> tuple[str, str]:
    """Return the name of a metric without its unit, and the unit.

    >>> unit_of("median_ms"), unit_of("save_gb_per_s"), unit_of("ratio")
    (('median', 'ms'), ('save', 'GB/s'), ('ratio', ''))
    """
    end = max((end for end in UNITS if metric.endswith(f"_{end}")), key=len, default="")
    return (metric.removesuffix(f"_{end}"), UNITS[end]) if end else (metric, "")


def long(rows: Sequence[Row]) -> list[Row]:
    """Return a row of system, setting, metric, value and unit for each figure; None and what is empty is left out."""
    found = []
    for row in rows:
        key = {"system": row["system"], "setting": row.get("setting", {})}
        for metric, value in row.items():
            if metric not in key and value is not None:
                name, unit = unit_of(metric)
                found.append({**key, "metric": name, "value": value, "unit": unit})
    return found


def wide(rows: Sequence[Row]) -> list[Row]:
    """Return a dictionary for each system and setting: "system", what was set, and figures by metric and unit."""
    ends = {unit: end for end, unit in UNITS.items()}
    found: dict[str, Row] = {}
    for row in rows:
        one = found.setdefault(json.dumps([row["system"], row["setting"]]), {"system": row["system"], **row["setting"]})
        name = "_".join(filter(None, (row["metric"], ends.get(row["unit"], ""))))
        one[name] = row["value"]
    return list(found.values())


def load(folder: Path, name: str) -> Row | None:
    """Return a result file with its rows as `wide` has them, or None if it is not there."""
    path = folder / f"{name}.json"
    if not path.exists():
        return None
    record: Row = json.loads(path.read_text())
    return record | {"rows": wide(record["rows"])}


def save(options: argparse.Namespace, name: str, rows: Sequence[Row], partial: bool = False, **notes: Any) -> None:
    """Write the file of a benchmark: command, time, machine, notes and rows, one a line.

    `partial`: rows are missing; `run.py --missing` measures it again.
    """
    script = Path(sys.argv[0])
    command = f"python {script.parent.name}/{script.name} {shlex.join(sys.argv[1:])}".strip()
    record = {
        "benchmark": name,
        "command": notes.pop("command", command),
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        **({"partial": True} if partial else {}),
        "notes": notes,
    }
    options.results.mkdir(parents=True, exist_ok=True)
    _write(options.results / f"{name}.json", text_of(record, long(rows)))


def data_of(name: str, **values: Any) -> dict[str, Any]:
    """Return a TOML file of this folder, with values in the place of `$name`."""
    return tomllib.loads(Template(Path(__file__).with_name(name).read_text("utf-8")).safe_substitute(values))


def text_of(record: Row, rows: Sequence[Row]) -> str:
    """Return the text of a result file."""
    head = json.dumps(record, indent=1).removesuffix("\n}")
    return head + ',\n "rows": [\n' + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n ]\n}\n"


def show(rows: Sequence[Row]) -> None:
    """Print a line for each row."""
    for row in rows:
        name = ", ".join(map(str, (row["system"], *row.get("setting", {}).values())))
        figures = (
            f"{metric} {value:.4g}" if isinstance(value, float) else f"{metric} {value}"
            for metric, value in row.items()
            if metric not in ("system", "setting") and not isinstance(value, (list, dict)) and value is not None
        )
        print(f"{name:44s} {'  '.join(figures)}", flush=True)


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)
