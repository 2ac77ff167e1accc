"""A training step on one CUDA device: plain PyTorch, DDP, FSDP2, DeepSpeed and shardwise.

    python bench/gpu_train.py [--size 163M|1.4B] [--dtype bf16|fp16|fp32] [--world 1|8] [--some] [--names "alone,FSDP2"]

With `--world 1` all are on one rank. "shardwise N forced" gathers, releases and reduces over that rank as over several,
"shardwise" does not. With more, the ranks but this one are imagined (torch's "fake" backend): each system holds its
part of the state and launches all it launches, but nothing is sent, and the numbers trained with are wrong.

Memory first, one system at a time with nothing else on the device: what it holds between steps, highest allocated and
reserved bytes of a step, kernels launched in one; then, after `--lengths` steps of random sequence lengths, how much of
what is reserved was never allocated in them. Then time: as many systems as fit take turns in one process (a b b a) with
plain PyTorch among them; the device is waited for before and after a turn. "Ratio" is the median over turns of the
time over plain PyTorch's in the same turn. "Launch" is the time until the host has launched a step; the update is timed
apart from the passes. Tokens a second follow from the median.

A trained token costs 6 N + 12 L d T FLOPs (Chowdhery et al., 2022, appendix B), where N counts the parameters of
blocks, norm and head but not the embeddings, L is layers, d width, T tokens in a sequence; the causal half is not taken
off. The peak is the one that the vendor states for dense products; what a large product reaches is measured beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from _gpu import HALF, Device, attempt, child, imagined_ranks, keep, one_rank, options_of, reason, stated_peak, tell

BASE = "alone"
FULL = 0.85
"""Part of the device that systems which take turns may take together, by what was measured of each."""
WARM = 3
SOME = ("alone", "shardwise", "FSDP2", "shardwise 3 forced", "DeepSpeed 3")
"""Those that `--some` measures."""
LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
"""Beginnings of the calls of the driver that a profile shows; ranges of the profiler are none of them."""
IMAGINED = ("DDP", "FSDP2", "FSDP2 no reshard", *(f"shardwise {stage}" for stage in range(4)))
"""Those that can be one of several imagined ranks."""


def flops_per_token(shape: Any) -> float:
    """Return the model FLOPs of a trained token; see the module docstring.

    Args:
        shape: a `_systems.Size`.
    """
    embeddings = (shape.vocabulary + shape.length) * shape.width
    return 6 * (shape.parameters - embeddings) + 12 * shape.layers * shape.width * shape.length


def systems(world: int) -> dict[str, Callable[[Any], Any]]:
    """Return what is compared, by name."""
    from _systems import ONE, SYSTEMS, available

    every = ONE if world == 1 else {name: SYSTEMS[name] for name in (BASE, *IMAGINED)}
    there = available()
    return {name: made for name, made in every.items() if not name.startswith("DeepSpeed") or name in there}


def case_of(options: argparse.Namespace) -> Any:
    """Return what is trained."""
    from _systems import SIZES, Case

    shape = SIZES[options.shape_name or options.size]
    return Case(shape, options.dtype == "bf16", device=options.device, fp16=options.dtype == "fp16")


def steps_of(run: Any, count: int) -> None:
    """Make some steps."""
    for _ in range(count):
        run.step()
    run.finish()


def update_of(run: Any) -> None:
    """Apply the gradients."""
    run.update()
    run.finish()


def launches_of(run: Any) -> int:
    """Return how many kernels, copies and fills the host launches in a step."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        steps_of(run, 1)
        torch.cuda.synchronize()
    return sum(event.name.startswith(LAUNCHES) for event in profile.events())


def memory_of(name: str, options: argparse.Namespace, device: Device) -> dict[str, Any]:
    """Return the memory of one system, and its launches; nothing else is on the device."""
    device.forget()
    before = device.memory()[0]
    case = case_of(options)
    run = systems(options.world)[name](case)
    steps_of(run, WARM)
    device.wait()
    held = device.memory()[0] - before
    device.forget()
    steps_of(run, 2)
    device.wait()
    allocated, reserved = device.peaks()
    found: dict[str, Any] = {"held": held, "allocated": allocated - before, "reserved": reserved - before}
    if device.is_cuda:
        found["launches"] = launches_of(run)
    lengths = random.Random(0)
    device.forget()
    for _ in range(options.lengths):
        size = dataclasses.replace(case.size, length=lengths.randint(1, case.size.length))
        run.ids = dataclasses.replace(case, size=size).batch()
        run.step()
    run.finish()
    device.wait()
    allocated, reserved = device.peaks()
    found["slack"] = 1 - allocated / reserved if reserved else None
    run.close()
    del run
    device.forget()
    found["left"] = device.memory()[0] - before
    return found


def measure_memory(options: argparse.Namespace, device: Device) -> None:
    """Measure one system after the other; each is told as it is done."""
    found: dict[str, Any] = {}
    for name in options.names.split(","):
        found[name] = attempt({"system": name}, functools.partial(memory_of, name, options, device))
        tell({"rows": found})


def measure_time(options: argparse.Namespace, device: Device) -> None:
    """Let systems take turns; tell the seconds of a step, until it is launched, and of its update, by turn."""
    made, case = systems(options.world), case_of(options)
    runs, failed = {}, {}
    for name in options.names.split(","):
        try:
            runs[name] = made[name](case)
            steps_of(runs[name], WARM)
        except Exception as error:
            runs.pop(name, None)
            failed[name] = reason(error)
            device.forget()
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in runs}
    for turn in range(-2, options.rounds):
        for name in runs if turn % 2 == 0 else reversed(runs):
            run = runs[name]
            whole = device.seconds(functools.partial(steps_of, run, options.steps)) / options.steps
            launched = device.launching(functools.partial(steps_of, run, 1))
            run.passes()
            update = device.seconds(functools.partial(update_of, run))
            if turn >= 0:
                found[name].append((whole, launched, update))
    tell({"seconds": found, "failed systems": failed})


def groups(names: Sequence[str], memory: dict[str, Any], total: int) -> list[list[str]]:
    """Return which systems take turns together, so that they fit with plain PyTorch among them.

    >>> row = {"held": 3, "allocated": 4}
    >>> groups(["alone", "a", "b", "c"], {name: row for name in ("alone", "a", "b", "c")}, 10)
    [['alone', 'a'], ['alone', 'b'], ['alone', 'c']]
    >>> groups(["alone", "a", "b", "c"], {name: row for name in ("alone", "a", "b", "c")}, 12)
    [['alone', 'a', 'b'], ['alone', 'c']]
    """

    def taken(together: Sequence[str]) -> int:
        rows = [memory[name] for name in together]
        return sum(row["held"] for row in rows) + max(row["allocated"] - row["held"] for row in rows)

    there = [name for name in names if "held" in memory.get(name, {})]
    base = [BASE] if BASE in there else []
    found: list[list[str]] = []
    for name in there:
        if name == BASE:
            continue
        if found and taken([*found[-1], name]) <= FULL * total:
            found[-1].append(name)
        else:
            found.append([*base, name])
    return found or ([base] if base else [])


def through(role: str, names: Sequence[str], limit: float) -> dict[str, Any]:
    """Return the rows of systems that are measured one after the other; one that ends the process is left out."""
    rows: dict[str, Any] = {}
    left = list(names)
    while left:
        found = child("--child", role, "--names", ",".join(left), limit=limit)
        rows |= found.get("rows", {})
        left = [name for name in left if name not in rows]
        if left:
            rows[left[0]] = {"system": left[0], "failed": found.get("failed", "it has ended the process")}
            left = left[1:]
    return rows


def row_of(name: str, options: argparse.Namespace, timed: dict[str, Any], memory: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a system."""
    row = {"system": name, **{key: value for key, value in memory.items() if key == "failed"}}
    for key in ("held", "allocated", "reserved", "left"):
        row[f"{key}_gib"] = memory[key] / 2**30 if key in memory else None
    row |= {"launches": memory.get("launches"), "slack": memory.get("slack")}
    own = timed["seconds"].get(name)
    if not own:
        return row | {"failed": timed["failed"].get(name, row.get("failed", "was not timed"))}
    step, launched, update = (statistics.median(turn[column] for turn in own) for column in range(3))
    base = timed["base"][name]
    tokens = options.shape.rows * options.shape.length / step
    flops = tokens * flops_per_token(options.shape)
    peak = stated_peak(timed["name"], options.dtype in HALF)
    return row | {
        "median_ms": step * 1e3,
        "ratio": statistics.median(a[0] / b[0] for a, b in zip(own, base, strict=True)) if base else None,
        "launch_ms": launched * 1e3,
        "update_ms": update * 1e3,
        "tokens_per_s": tokens,
        "tflops": flops / 1e12,
        "of_peak": flops / peak if peak else None,
    }


def quick(options: argparse.Namespace) -> None:
    """Make the options those of a quick run."""
    options.shape_name, options.rounds, options.steps, options.lengths = "tiny", 1, 1, 2
    options.names = options.names or ("alone,FSDP2,shardwise 3" if options.world > 1 else "alone,shardwise 3 forced")


def main() -> None:
    """Measure memory and then time; print a line for each system and keep them."""
    options = options_of(
        __doc__,
        quick=quick,
        size="163M",
        dtype="bf16",
        world=1,
        rounds=8,
        steps=3,
        lengths=100,
        names="",
        limit=300,
        some=False,
        shape_name="",
    )
    if options.child:
        group = one_rank(options.device) if options.world == 1 else imagined_ranks(options.world, options.device)
        measure = {"memory": measure_memory, "time": measure_time}[options.child]
        with group:
            measure(options, Device(options.device))
        return
    from _systems import SIZES

    options.shape = SIZES[options.shape_name or options.size]
    device = Device(options.device)
    there = list(systems(options.world))
    names = options.names.split(",") if options.names else [name for name in there if name in SOME or not options.some]
    memory = through("memory", names, options.limit)
    timed: dict[str, Any] = {"seconds": {}, "failed": {}, "base": {}, "name": device.name}
    for together in groups(names, memory, device.total):
        found = child("--child", "time", "--names", ",".join(together), limit=options.limit)
        seconds = found.get("seconds", {})
        timed["failed"] |= dict.fromkeys(together, found.get("failed", "")) | found.get("failed systems", {})
        timed["base"] |= {name: seconds.get(BASE) for name in together}
        timed["seconds"] |= seconds
    rows = [row_of(name, options, timed, memory.get(name, {})) for name in names]
    for row in rows:
        if "median_ms" not in row:
            print(f"{row['system']:20s} failed: {row['failed']}", flush=True)
            continue
        ratio = "" if row["ratio"] is None else f"  ratio {row['ratio']:.3f}"
        share = "" if row["of_peak"] is None else f" {row['of_peak']:.2f} of the peak"
        slack = "" if row["slack"] is None else f" slack {row['slack']:.3f}"
        print(
            f"{row['system']:20s} {row['median_ms']:8.2f} ms{ratio}  launch {row['launch_ms']:7.2f} ms"
            f"  update {row['update_ms']:6.2f} ms  {row['tokens_per_s']:8.0f} tokens/s{share}"
            f"  allocated {row['allocated_gib']:5.2f} reserved {row['reserved_gib']:5.2f} GiB{slack}",
            flush=True,
        )
    part = f"train {options.size} {options.dtype}" + (f" {options.world} ranks" if options.world > 1 else "")
    keep(options, part, rows, size=dataclasses.asdict(options.shape), parameters=options.shape.parameters)


if __name__ == "__main__":
    main()
