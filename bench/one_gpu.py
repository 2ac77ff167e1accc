"""One CUDA device: plain PyTorch, FSDP2 on one rank, and shardwise at each stage.

    python bench/one_gpu.py [--size 163M] [--dtype bf16] [--rounds 10] [--systems "alone,FSDP2,shardwise 3"]

Time: all systems are built in one process and take turns (a b b a) of `--steps` steps; the device is waited for before
and after. Tokens a second follow from the median. MFU is model FLOPs over time over the peak of the device: a trained
token costs 6 N + 12 L d T FLOPs (Chowdhery et al., 2022, appendix B), where N counts the parameters of blocks, norm and
head but not the embeddings, L is layers, d width, T tokens in a sequence; the causal half is not taken off. The peak is
the one that the vendor states for dense bf16 (or fp32 without TF32), where the device is known, and what a large matrix
product reaches is measured beside it.

Optimizer step: the time of the last call, norm and checks included. AdamW must read gradient, parameter and two moments
and write the last three: 28 bytes a parameter in fp32; on bf16 parameters with fp32 masters 2 more for the copy. These
bytes over the time, against what a copy of a large tensor moves (bytes read and written).

Memory: a process for each system, which trains for a few steps; highest allocated and reserved bytes of torch's
allocator. Then `--length-steps` steps of random sequence lengths: how much "reserved minus allocated" has grown from
step 20 to the last.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from _jobs import answer, contest, in_job, ranks, read, start_group

# Dense TFLOP/s as stated by the vendor: bf16, fp32 without TF32. The first name found in the device's counts.
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
BASE = "alone"
EARLY = 20


def flops_per_token(shape: Any) -> float:
    """Return the model FLOPs of a trained token; see the module docstring.

    Args:
        shape: a `_systems.Size`.
    """
    embeddings = (shape.vocabulary + shape.length) * shape.width
    return 6 * (shape.parameters - embeddings) + 12 * shape.layers * shape.width * shape.length


def stated_peak(device: str, bf16: bool) -> float | None:
    """Return the vendor's FLOP/s of a device by its name, or None if it is not in the table.

    >>> stated_peak("NVIDIA H200", bf16=True)
    989400000000000.0
    """
    return next((peaks[0 if bf16 else 1] * 1e12 for name, peaks in PEAKS.items() if name in device), None)


class Clock:
    """Waits for a device and measures around what runs on it."""

    def __init__(self, device: str) -> None:
        import torch

        self.wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None

    def seconds(self, action: Callable[[], Any]) -> float:
        """Return the seconds that an action takes, with all work that it has queued."""
        self.wait()
        start = time.perf_counter()
        action()
        self.wait()
        return time.perf_counter() - start

    def fastest(self, action: Callable[[], Any], repeat: int = 10) -> float:
        """Return the least seconds of some repetitions, after one that warms up."""
        action()
        return min(self.seconds(action) for _ in range(repeat))


def device_speed(device: str, bf16: bool, quick: bool) -> dict[str, float]:
    """Return what the device reaches: FLOP/s of a matrix product and bytes a second of a copy, read and written."""
    import torch

    clock, side = Clock(device), 256 if quick else 8192
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16 if bf16 else torch.float32) for _ in range(2))
    source = torch.empty(2**20 if quick else 2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return {
        "product_flops": 2 * side**3 / clock.fastest(lambda: torch.mm(a, b)),
        "copy_bytes_per_s": 2 * source.nbytes / clock.fastest(lambda: target.copy_(source)),
    }


def case_of(options: argparse.Namespace) -> Any:
    """Return the case that is trained."""
    from _systems import Case

    return Case(options.shape, options.dtype == "bf16", device=options.device)


def steps_of(run: Any, count: int) -> None:
    """Make some steps."""
    for _ in range(count):
        run.step()
    run.finish()


def update_of(run: Any) -> None:
    """Apply the gradients."""
    run.update()
    run.finish()


def measure_time(options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of a step and of its update in every turn, by system, and the device's speed."""
    from _systems import SYSTEMS

    case, clock = case_of(options), Clock(options.device)
    speed = device_speed(options.device, case.bf16, options.quick)
    runs = {name: SYSTEMS[name](case) for name in options.systems}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for turn in range(-2, options.rounds):
        for name in runs if turn % 2 == 0 else reversed(runs):
            run = runs[name]
            whole = clock.seconds(functools.partial(steps_of, run, options.steps))
            run.passes()
            update = clock.seconds(functools.partial(update_of, run))
            if turn >= 0:
                found[name].append((whole / options.steps, update))
    return {"speed": speed, "seconds": found}


def measure_memory(options: argparse.Namespace) -> dict[str, float]:
    """Return peaks of one system in bytes, and the growth of what is reserved but not allocated."""
    import torch
    from _systems import SYSTEMS

    (system,) = options.systems
    case = case_of(options)
    run = SYSTEMS[system](case)
    for _ in range(3):
        run.step()
    run.finish()
    if options.device != "cuda":
        return dict.fromkeys(("allocated", "reserved", "slack_grown"), 0.0)
    peaks = {"allocated": float(torch.cuda.max_memory_allocated()), "reserved": float(torch.cuda.max_memory_reserved())}
    lengths, slack = random.Random(0), []
    for step in range(1, options.length_steps + 1):
        size = dataclasses.replace(case.size, length=lengths.randint(1, case.size.length))
        run.ids = dataclasses.replace(case, size=size).batch()
        run.step()
        if step in (EARLY, options.length_steps):
            run.finish()
            torch.cuda.synchronize()
            slack.append(torch.cuda.memory_reserved() - torch.cuda.memory_allocated())
    return {**peaks, "slack_grown": float(slack[-1] - slack[0])}


def row_of(system: str, options: argparse.Namespace, timed: dict[str, Any], memory: dict[str, float]) -> dict[str, Any]:
    """Return the figures of a system."""
    shape, bf16 = options.shape, options.dtype == "bf16"
    base = timed["seconds"].get(BASE) or next(iter(timed["seconds"].values()))
    step, update = (statistics.median(turn[column] for turn in timed["seconds"][system]) for column in range(2))
    tokens = shape.rows * shape.length / step
    peak = stated_peak(timed["device"], bf16)
    moved = shape.parameters * (30 if bf16 and system.startswith("shardwise") else 28) / update
    return {
        "system": system,
        "median_ms": step * 1e3,
        "ratio": step / statistics.median(turn[0] for turn in base),
        "tokens_per_s": tokens,
        "mfu": tokens * flops_per_token(shape) / peak if peak else None,
        "of_measured_product": tokens * flops_per_token(shape) / timed["speed"]["product_flops"],
        "update_ms": update * 1e3,
        "step_gb_per_s": moved / 1e9,
        "step_over_copy": moved / timed["speed"]["copy_bytes_per_s"],
        "allocated_gib": memory["allocated"] / 2**30,
        "reserved_gib": memory["reserved"] / 2**30,
        "slack_grown_mib": memory["slack_grown"] / 2**20,
    }


def main() -> None:
    """Measure time in one process and memory in one for each system; print the table and keep it."""
    parser = contest(__doc__, size="163M", dtype="bf16", nproc=1, rounds=10)
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps in a turn")
    parser.add_argument("--length-steps", type=int, default=200, help="steps of random sequence lengths")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tries the script out")
    parser.add_argument("--memory", action="store_true", help="used by the processes that measure memory")
    options = read(parser)
    compared = [BASE, "FSDP2", *(f"shardwise {stage}" for stage in range(4))]
    if in_job():
        start_group("shardwise")
        answer(measure_memory(options) if options.memory else measure_time(options))
        return
    import torch
    from _machine import save

    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --device cpu --quick tries the script out")
    systems = [name for name in compared if name in options.systems]
    timed = ranks(1, "--systems", ",".join(systems))
    timed["device"] = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    rows = []
    for system in systems:
        rows.append(row_of(system, options, timed, ranks(1, "--memory", "--systems", system)))
        row = rows[-1]
        used = "" if row["mfu"] is None else f"  MFU {row['mfu']:.2f}"
        bandwidth = f"{row['step_gb_per_s']:5.0f} GB/s ({row['step_over_copy']:.2f} of a copy)"
        print(
            f"{system:12s} {row['median_ms']:7.1f} ms  ratio {row['ratio']:.2f}  "
            f"{row['tokens_per_s']:8.0f} tokens/s{used}  "
            f"update {row['update_ms']:6.2f} ms {bandwidth}  "
            f"allocated {row['allocated_gib']:5.2f} reserved {row['reserved_gib']:5.2f} GiB  "
            f"slack grown {row['slack_grown_mib']:.0f} MiB",
            flush=True,
        )
    peak = stated_peak(timed["device"], options.dtype == "bf16")
    notes = {"size": dataclasses.asdict(options.shape), "dtype": options.dtype, "device": timed["device"]}
    save(options.results, "one_gpu", rows, **notes, **timed["speed"], stated_peak=peak)


if __name__ == "__main__":
    main()
