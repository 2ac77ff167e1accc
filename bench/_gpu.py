"""What the benchmarks of one device share: its clock and its memory, the process that is measured, and the one file.

Each benchmark is one script in two roles, as those of several ranks are (`_jobs`). Called by hand, or by `gpu.py`, it
starts itself as a child for each thing that must not be disturbed by what was measured before. All results go to one
file, bench/results/gpu.json, which has a part for each: parts that are measured anew replace their former figures and
leave the others. With `--device cpu --quick` everything runs without a device, on tiny models.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from _jobs import _ANSWER, ROOT, parser, read

PEAKS = {
    "B200": (2250.0, 75.0),
    "H200": (989.4, 66.9),
    "H100 PCIe": (756.0, 51.2),
    "H100": (989.4, 66.9),
    "A100": (312.0, 19.5),
    "L40S": (362.0, 91.6),
    "L4": (121.0, 30.3),
    "A10G": (70.0, 35.0),
    "RTX 4090": (165.2, 82.6),
    "RTX 3090": (71.0, 35.6),
}
"""Dense TFLOP/s as stated by the vendor: 16 bits, fp32 without TF32. The first name found in the device's counts."""
V100_PEAK = 125e12
"""FLOP/s in fp16 of the card that the papers on offloading have used."""
HALF = ("bf16", "fp16")
FILE = "gpu"


def stated_peak(device: str, half: bool) -> float | None:
    """Return the vendor's FLOP/s of a device by its name, or None if it is not in the table.

    >>> stated_peak("NVIDIA H200", half=True)
    989400000000000.0
    """
    return next((peaks[0 if half else 1] * 1e12 for name, peaks in PEAKS.items() if name in device), None)


class Device:
    """A CUDA device, or the CPU in its place, which has no clock and no allocator of its own.

    Args:
        kind: "cuda" or "cpu".

    Attributes:
        kind, name: what it is.
    """

    def __init__(self, kind: str) -> None:
        import torch

        self.kind = kind
        self.name = torch.cuda.get_device_name() if kind == "cuda" else "cpu"

    @property
    def is_cuda(self) -> bool:
        """Whether there is anything to measure but the time."""
        return self.kind == "cuda"

    @property
    def total(self) -> int:
        """Bytes of its memory; of the CPU, what a tiny test may take for it."""
        import torch

        return torch.cuda.mem_get_info()[1] if self.is_cuda else 1 << 30

    def wait(self) -> None:
        """Wait for all that has been launched."""
        import torch

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

    def fastest(self, action: Callable[[], Any], repeat: int = 10) -> float:
        """Return the least seconds of some repetitions, after one that warms up."""
        action()
        return min(self.seconds(action) for _ in range(repeat))

    def memory(self) -> tuple[int, int]:
        """Return the bytes that are allocated and those that torch has reserved."""
        import torch

        return (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) if self.is_cuda else (0, 0)

    def peaks(self) -> tuple[int, int]:
        """Return the highest of both since `forget`."""
        import torch

        return (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if self.is_cuda else (0, 0)

    def forget(self) -> None:
        """Give back what nobody uses, and let the peaks begin anew."""
        import torch

        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def limit(self, size: int) -> None:
        """Let torch have no more than so many bytes of the device."""
        import torch

        if self.is_cuda:
            torch.cuda.set_per_process_memory_fraction(min(1.0, size / self.total))


def options_of(
    description: str | None, *, quick: Callable[[argparse.Namespace], None] | None = None, **more: Any
) -> Any:
    """Parse the command line of a benchmark of one device.

    Args:
        description: of the script.
        quick: makes the options those of a quick run; None: they stay.
        more: further options: a default value each, whose type they have; False: a switch. `directory`, where files
            of any size may be written, is build/ unless another is named.
    """
    found = parser(description)
    found.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tries the script out")
    found.add_argument("--child", default="", help="used by the processes that measure")
    for name, default in more.items():
        how: dict[str, Any] = {"action": "store_true"} if default is False else {"type": type(default)}
        found.add_argument(f"--{name.replace('_', '-')}", default=default, **how)
    options = read(found)
    if options.quick and quick is not None:
        quick(options)
    if more.get("directory") == options.__dict__.get("directory") == "":
        (ROOT / "build").mkdir(exist_ok=True)
        options.directory = str(ROOT / "build")
    if options.device == "cuda" and not options.child:
        import torch

        if not torch.cuda.is_available():
            found.error("there is no CUDA device; --device cpu --quick tries the script out")
    return options


def child(*more: str, limit: float = 600.0) -> Any:
    """Run this script with its own options and some more in a process of its own; return what it gives to `answer`.

    One that fails, or takes longer than `limit` seconds, answers {"failed": why}: others are measured all the same.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "answer.json"
        own = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29541", "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, *sys.argv, *more]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=limit,
                cwd=ROOT,
                env={**os.environ, **own, **meet, _ANSWER: str(file)},
            )
        except subprocess.TimeoutExpired:
            found = json.loads(file.read_text()) if file.exists() else {}
            return found | {"failed": f"took more than {limit:.0f} s"}
        found = json.loads(file.read_text()) if file.exists() else {}
        if done.returncode:
            last = [line for line in done.stderr.splitlines() if line.strip()][-12:]
            print("\n".join(last), file=sys.stderr, flush=True)
            found |= {"failed": (last[-1] if last else f"exit code {done.returncode}")[:500]}
        return found


def tell(value: Any) -> None:
    """Hand figures to the process that has started this one; called again, those of before are replaced."""
    target = Path(os.environ[_ANSWER])
    partial = target.with_suffix(".partial")
    partial.write_text(json.dumps(value))
    partial.replace(target)


@contextlib.contextmanager
def one_rank(device: str) -> Iterator[None]:
    """Be the only rank of a process group."""
    import torch.distributed as dist

    if device == "cuda":
        import torch

        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def imagined_ranks(world: int, device: str) -> Iterator[None]:
    """Be the first of some ranks of which the others do not exist: collectives are launched, and do nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if device == "cuda":
        import torch

        torch.cuda.set_device(0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def reason(error: BaseException) -> str:
    """Return an error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


def attempt(row: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a row with what `measure` has found, or with "failed" and the reason."""
    try:
        return row | measure()
    except Exception as error:
        print(f"{row}: {reason(error)}", file=sys.stderr, flush=True)
        return row | {"failed": reason(error)}


def keep(options: argparse.Namespace, part: str, rows: Sequence[dict[str, Any]], **notes: Any) -> None:
    """Put the figures of a part into the file, in place of its former ones."""
    from _machine import machine

    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / f"{FILE}.json"
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"benchmark": FILE, "parts": {}}
    script = Path(sys.argv[0])
    record["machine"] = machine()
    record["parts"][part] = {
        "command": f"python {script.parent.name}/{script.name} {' '.join(sys.argv[1:])}".strip(),
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "gpu": record["machine"]["gpu"],
        "torch": record["machine"]["torch"],
        **notes,
        "rows": list(rows),
    }
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    partial.replace(path)
