"""What a benchmark ran on, and how its numbers are kept."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from shardwise._version import __version__

_LOAD = [round(value, 2) for value in os.getloadavg()]
"""What others keep the machine busy with: read before the benchmark begins."""


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """Describe processor, memory, GPU, threads, load before the benchmark and versions."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    peer = importlib.util.find_spec("deepspeed") is not None
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30, 1),
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


def save(folder: Path, name: str, rows: list[dict[str, Any]], **notes: Any) -> Path:
    """Write `<folder>/<name>.json`: command, machine, time, notes and rows; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    script = Path(sys.argv[0])
    record = {
        "benchmark": name,
        "command": f"python {script.parent.name}/{script.name} {shlex.join(sys.argv[1:])}".strip(),
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        **notes,
        "rows": rows,
    }
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    partial.replace(path)
    return path
