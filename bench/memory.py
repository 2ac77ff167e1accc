"""Peak resident memory of each system above the bare process, in bytes per parameter.

    python bench/memory.py [--size 98M] [--dtype bf16] [--nproc 4] [--systems "DDP,shardwise 3"]

Every system runs in a job of its own. Each rank first loads all code (it trains a model of a few kilobytes with the
same system), notes its resident size, then builds the model in the ordinary way, in fp32 on every rank, and trains a
few steps. What counts is the highest resident size since (`VmHWM` of Linux) less the noted one, of the worst rank.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

STEPS = 4


def resident(field: str) -> int:
    """Return a field of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; this benchmark needs Linux")


def measure(system: str, size: str, bf16: bool, out: Path) -> None:
    """Run one system on this rank; rank 0 writes the worst rank's figures."""
    import torch
    import torch.distributed as dist
    from _systems import GPT, SIZES, SYSTEMS, Case, Size

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if system.startswith("shardwise"):
        import shardwise

        shardwise.init_distributed()
    elif system.startswith("DeepSpeed"):
        import deepspeed

        deepspeed.init_distributed("gloo")
    else:
        dist.init_process_group("gloo")

    tiny = SYSTEMS[system](Case(Size(16, 2, 2, 32, 1, 8), bf16))
    for _ in range(2):
        tiny.step()
    tiny.close()
    del tiny
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    bare = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the highest resident size begins anew

    case = Case(SIZES[size], bf16)
    run = SYSTEMS[system](case)
    built = resident("VmHWM")
    for _ in range(STEPS):
        run.step()
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in GPT(case.size).parameters())
    tracked = run.accountant.peak_total if run.accountant is not None else 0
    construction = run.accountant.construction_peak if run.accountant is not None else 0
    figures = torch.tensor([resident("VmHWM") - bare, built - bare, tracked, construction, bare])
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        peak, building, tracked, construction, bare = figures.tolist()
        row: dict[str, Any] = {
            "system": system,
            "parameters": parameters,
            "peak": peak / parameters,
            "building": building / parameters,
            "tracked": tracked / parameters or None,
            "tracked_building": construction / parameters or None,
            "bare_mib": bare / 2**20,
        }
        out.write_text(json.dumps(row))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Run every system and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="98M")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--systems", help="names, separated by commas; default: all that are installed")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure, options.size, options.dtype == "bf16", options.out)
        return

    from _machine import save
    from _systems import available

    rows = []
    for system in options.systems.split(",") if options.systems else available():
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "row.json"
            command = [sys.executable, "-m", "shardwise.launch", "run", "--nproc", str(options.nproc)]
            command += ["--no_local_rank", __file__, "--size", options.size, "--dtype", options.dtype]
            command += ["--measure", system, "--out", str(out)]
            done = subprocess.run(command, capture_output=True, text=True)
            if not out.exists():
                sys.exit(f"{system} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
            row = json.loads(out.read_text())
        rows.append(row)
        tracked = "" if row["tracked"] is None else f"  tensor bytes {row['tracked']:5.2f}"
        print(
            f"{system:18s} peak {row['peak']:6.2f} B/parameter  while building {row['building']:5.2f}{tracked}",
            flush=True,
        )
    save(
        f"memory_{options.size}_{options.dtype}_{options.nproc}",
        rows,
        command=f"python bench/memory.py --size {options.size} --dtype {options.dtype} --nproc {options.nproc}",
        steps=STEPS,
    )


if __name__ == "__main__":
    main()
