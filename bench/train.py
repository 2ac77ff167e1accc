"""A training step of each system: time, memory and start, on CPU ranks or on one CUDA device.

    python bench/train.py [--set zero|groups|tensor|host|disk] [--what time|memory|start] [--nproc 2] [--size 27M]
    python bench/train.py --set one|imagined [--device cuda] [--size 163M|1.4B] [--dtype bf16|fp16|fp32]

Sets of systems are those of systems.py; `--systems` names some, separated by semicolons.

*time*: all systems are built in the same processes and take turns of `--steps` steps, forwards and then backwards
through the list, so that a noisy machine is noisy for all of them. A turn begins with a barrier and ends when
everything that its steps have launched has arrived. Times are medians of turns and means of ranks; a ratio is the
median of the ratios within a turn. Processor time is that of all threads of a rank. "passes" is the time of forward and
backward passes, "update" the rest. "over_alone" is the time over that of the same model without communication.
"blocked" (shardwise only) is the time spent in collectives' `wait()`, from the ledger: what was not hidden behind
computation, waiting for slower ranks included. The set "groups" also has the bytes that a rank sends a parameter and
step within its group and to others; those of a collective over several groups count as if each rank sent directly to
each other one. Losses are those after equally many steps.

*memory*: every system runs in a job of its own. Each rank first loads all code (it trains a model of a few kilobytes
with the same system), notes its resident size, then builds the model in fp32 on every rank and trains some steps. The
figure is the highest resident size since less the noted one, of the worst rank, in bytes a parameter. Beside it stand
the highest sums of bytes that shardwise's accountant has counted, and by tier what `engine.memory_report` has planned.

*start*: import times of new processes over `import torch`, and the time from the call that builds a system to the end
of its first step, in a job of its own, with imports, process group and model before the clock starts.

Sets "one" and "imagined" have one process. Of 8 imagined ranks (torch's "fake" backend) each system holds its part of
the state and launches all it launches, but nothing is sent. Memory comes first, one system at a time with nothing else
on the device: held between steps, highest allocated and reserved, kernels launched in a step; then, after `--lengths`
steps of random sequence lengths, the part of reserved memory that was never allocated in them ("slack"). For time, as
many systems as fit take turns with plain PyTorch among them. "launch" is the time until the host has launched a step.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from harness import (
    Device,
    Row,
    answer,
    attempt,
    child,
    data_of,
    forget_peak,
    group_of,
    highest_resident,
    job,
    medians,
    options_of,
    over_ranks,
    own_group,
    reason,
    save,
    serve,
    show,
    spent,
    trimmed,
    turns,
)
from systems import GROUP, SETS, SIZES, Case, Size, base_of, installed, loaded

ONE_PROCESS = ("one", "imagined")
WITHOUT = {
    "time": ("shardwise 3 Init",),
    "memory": ("alone",),
    "start": (
        *("alone", "FSDP2 no reshard", "shardwise 3 Init"),
        *(f"{system} {stage}" for system in ("DeepSpeed", "shardwise") for stage in (1, 2)),
    ),
}
"""Systems that are left out unless they are named."""
WARM, MEMORY_STEPS = 3, 3
FULL = 0.85
"""Part of the device that systems which take turns may take together, by what was measured of each."""
SOME = "alone;shardwise;FSDP2;shardwise 3 forced;DeepSpeed 3"
"""Systems that `--some` measures."""
IMPORTS = {
    "shardwise": "import shardwise",
    "shardwise with initialize": "import shardwise; shardwise.initialize",
    "DDP": "from torch.nn.parallel import DistributedDataParallel",
    "FSDP2": "from torch.distributed.fsdp import fully_shard",
    "DeepSpeed": "import deepspeed",
}
DRAWN, INTERVAL, DRAWN_POINTS = "shardwise 3, all on disk", 1e-3, 250
"""The system whose memory is read all through one step, how often in seconds, and the points that are kept."""


def size_of(options: argparse.Namespace) -> Size:
    """Return the size of the model and its batch; the quick one is tiny, and its rows go by the given name."""
    return SIZES["tiny" if options.quick else options.size]


def case_of(options: argparse.Namespace) -> Case:
    """Return what is trained."""
    half = {"bf16": options.dtype == "bf16", "fp16": options.dtype == "fp16"}
    return Case(
        size_of(options),
        accumulation=options.accumulation,
        device=options.device,
        directory=options.directory,
        **half,
    )


def steps_of(run: Any, count: int) -> None:
    """Make some steps."""
    for _ in range(count):
        run.step()
    run.finish()


def update_of(run: Any) -> None:
    """Apply the gradients."""
    run.update()
    run.finish()


# -- time --------------------------------------------------------------------------------------------------------------


def turn_of(run: Any, steps: int, device: Device) -> dict[str, float]:
    """Make some steps; return the seconds of each."""
    first = run.ledger.sequence if run.ledger is not None else 0
    passes = 0.0

    def train() -> None:
        nonlocal passes
        for _ in range(steps):
            start = time.perf_counter()
            run.passes()
            passes += time.perf_counter() - start
            run.update()
        run.finish()
        device.wait()

    device.wait()
    figures = spent(train)
    waited = sum(record.waited or 0.0 for record in run.ledger.records(since=first)) if run.ledger is not None else 0.0
    figures |= {"blocked": waited, "passes": passes, "update": figures["wall"] - passes}
    figures = {name: value / steps for name, value in figures.items()}
    if device.is_cuda:
        figures["launch"] = device.launching(functools.partial(steps_of, run, 1))
        figures["passes"] = device.seconds(run.passes)
        figures["update"] = device.seconds(functools.partial(update_of, run))
    return over_ranks(figures)


def measure_time(options: argparse.Namespace) -> Row:
    """Take turns on this rank; return the figures of each turn, and what else is told of a system."""
    device, case = Device(options.device), case_of(options)
    runs: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for name in options.systems.split(";"):
        try:
            runs[name] = SETS[options.set][name](case)
            steps_of(runs[name], WARM)
        except Exception as error:
            if name.startswith("shardwise") and options.set not in ONE_PROCESS:
                raise
            runs.pop(name, None)
            failed[name] = reason(error)
            device.forget()
    ways = {name: functools.partial(turn_of, run, options.steps, device) for name, run in runs.items()}
    found = turns(ways, options.rounds, warm=2)
    more: dict[str, Row] = {}
    for name, run in runs.items():
        with torch.no_grad():
            more[name] = over_ranks({"loss": float(run.loss().detach())})
        if options.set == "groups":
            dist.barrier()
            within, between = (size / case.size.parameters for size in sent(run))
            more[name] |= {"within_bytes_a_parameter": within, "between_bytes_a_parameter": between}
        if run.ledger is not None:
            more[name]["has_ledger"] = True
    return {"turns": found, "more": more, "failed": failed}


def time_rows(options: argparse.Namespace, found: Row) -> list[Row]:
    """Return a row for each system that took turns."""
    rows: list[Row] = []
    everything: dict[str, list[dict[str, float]]] = found["turns"]
    for name, own in everything.items():
        base = base_of(options.set, name, everything)
        of_turns = {
            key: statistics.median(a[key] / b[key] for a, b in zip(own, everything[base], strict=True))
            for key in ("wall", "processor")
        }
        figures, more = medians(own), dict(found["more"][name])
        row: Row = {"system": name, "median_ms": figures["wall"] * 1e3}
        for key in ("processor", "passes", "update", "launch"):
            row[f"{key}_ms"] = figures[key] * 1e3 if key in figures else None
        row |= {"ratio": of_turns["wall"], "processor_ratio": of_turns["processor"]}
        if more.pop("has_ledger", False):
            row["blocked_share"] = figures["blocked"] / figures["wall"]
        if "alone" in everything:
            row["over_alone"] = figures["wall"] / medians(everything["alone"])["wall"]
        peer = name.replace("shardwise", "DeepSpeed")
        if options.set in ("host", "disk") and peer != name and peer in everything:
            row["over_deepspeed"] = figures["wall"] / medians(everything[peer])["wall"]
        if options.set == "tensor":
            row["loss_differs"] = abs(more["loss"] / found["more"][base]["loss"] - 1)
        shape = size_of(options)
        tokens = shape.rows * shape.length * options.accumulation / figures["wall"]
        row |= {"tokens_per_s": tokens, "tflops": tokens * shape.flops_per_token / 1e12, **more}
        rows.append(row)
    return rows


# -- bytes within and between groups -----------------------------------------------------------------------------------

FACTORS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
"""How often each byte of a buffer crosses: sent to where it is summed, or to all, or both."""


def split(size: int, members: Sequence[int], op: str) -> tuple[float, float]:
    """Return the bytes that a rank of a collective over some ranks sends within its group, and to others."""
    own = dist.get_rank() // GROUP
    near = sum(1 for member in members if member // GROUP == own) - 1
    share = FACTORS[op] * size / len(members)
    return share * near, share * (len(members) - 1 - near)


def counter() -> Any:
    """Return a dispatch mode that keeps (operation, bytes of the whole buffer, ranks) of each collective."""
    from torch.utils._python_dispatch import TorchDispatchMode

    known = {
        "_allgather_base_": ("all_gather", 0),
        "_reduce_scatter_base_": ("reduce_scatter", 1),
        "allreduce_": ("all_reduce", 0),
    }

    class Counter(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[tuple[str, int, list[int]]] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func._schema.name.removeprefix("c10d::")
            if name in known:
                op, place = known[name]
                buffers = args[place] if isinstance(args[place], (list, tuple)) else [args[place]]
                group = next(a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()))
                members = dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))
                self.seen.append((op, sum(buffer.nbytes for buffer in buffers), members))
            return func(*args, **(kwargs or {}))

    return Counter()


def sent(run: Any) -> tuple[float, float]:
    """Make one step; return the bytes within and between groups: those of torch's dispatcher, or of the ledger."""
    world, rank = dist.get_world_size(), dist.get_rank()
    members = {
        "shard": [GROUP * (rank // GROUP) + place for place in range(GROUP)],
        "replicate": list(range(rank % GROUP, world, GROUP)),
        "data_parallel": list(range(world)),
    }
    if run.ledger is None:
        with counter() as counted:
            run.step()
        found = counted.seen
    else:
        run.finish()
        first = run.ledger.sequence
        steps_of(run, 1)
        records = [r for r in run.ledger.records(since=first) if r.op in FACTORS and r.size > 4096]
        found = [(record.op, record.size, members[record.group]) for record in records]
    parts = [split(size, ranks, op) for op, size, ranks in found]
    return sum(part[0] for part in parts), sum(part[1] for part in parts)


# -- memory of ranks ---------------------------------------------------------------------------------------------------


def measure_memory(options: argparse.Namespace) -> Row:
    """Run one system on this rank; return the worst rank's figures."""
    make, case = SETS[options.set][options.systems], case_of(options)
    bare = loaded(make, case)
    forget_peak()
    run = make(case)
    figures = {"building": highest_resident() - bare}
    elsewhere = options.set in ("host", "disk")
    if elsewhere:  # its model is built in memory that training need not have
        figures |= by_tier(run, "planned")
        trimmed()
        forget_peak()
    steps_of(run, MEMORY_STEPS)
    figures["peak"] = highest_resident() - bare
    if elsewhere:
        figures |= by_tier(run, "counted")
    if run.accountant is not None:
        figures |= {"tracked": run.accountant.peak_total, "tracked_building": run.accountant.construction_peak}
    found: Row = {
        f"{name}_bytes_a_parameter": value / case.size.parameters for name, value in over_ranks(figures, "max").items()
    }
    return found | {"course": course(run) if options.systems == DRAWN else None}


def by_tier(run: Any, kind: str) -> dict[str, int]:
    """Return the bytes of each tier at their highest, without activations, which nothing tracks in training."""
    if run.accountant is None:
        return {}
    report, field = run.engine.memory_report(), {"planned": "planned", "counted": "measured"}[kind]
    found = {"device": getattr(report.total, field), "host": 0, "disk": 0}
    found |= {row.name: getattr(row, field) for row in report.elsewhere}
    return {f"{kind}_{name}": value or 0 for name, value in found.items()}


def course(run: Any) -> dict[str, Any]:
    """Return the highest bytes by tier and kind in each interval of one step, and when its phases begin."""
    from shardwise.memory import Category, Tier, track_activations

    accountant, ended = run.accountant, threading.Event()
    samples: list[tuple[float, dict[Tier, dict[Category, int]]]] = []

    def sample() -> None:
        while not ended.wait(INTERVAL):
            samples.append((time.perf_counter() - start, {tier: accountant.live_in(tier) for tier in Tier}))

    with track_activations(accountant):
        steps_of(run, 1)  # makes what is made once
        thread = threading.Thread(target=sample)
        start = time.perf_counter()
        thread.start()
        marks = {"forward": 0.0}
        loss = run.loss()
        marks["backward"] = time.perf_counter() - start
        run.engine.backward(loss)
        del loss
        marks["step"] = time.perf_counter() - start
        update_of(run)
        marks["end"] = time.perf_counter() - start
        ended.set()
        thread.join()
    length = marks["end"] / DRAWN_POINTS
    highest: dict[str, dict[str, list[int]]] = {tier.value: {} for tier in Tier}
    for tier in Tier:
        for kind in Category:
            values: list[int | None] = [None] * DRAWN_POINTS
            for when, live in samples:
                place = min(int(when / length), DRAWN_POINTS - 1)
                values[place] = max(values[place] or 0, live[tier][kind])
            for place, value in enumerate(values):  # where there is no sample, the last one holds
                values[place] = (values[place - 1] if place else 0) if value is None else value
            if any(values):
                highest[tier.value][kind.value] = values  # type: ignore[assignment]
    return {"marks": marks, "interval": length, "bytes": highest}


# -- start -------------------------------------------------------------------------------------------------------------


def measure_start(options: argparse.Namespace) -> Row:
    """Build one system on this rank and make its first step; return the slowest rank's seconds."""
    system = options.systems
    exec(next(code for name, code in reversed(IMPORTS.items()) if system.startswith(name.split()[0])), {})
    case = case_of(options)
    ready = case.model()
    make = functools.partial(SETS[options.set][system], dataclasses.replace(case, build=lambda: ready))
    dist.barrier()
    start = time.perf_counter()
    run = make()
    built = time.perf_counter()
    steps_of(run, 1)
    return over_ranks({"build_s": built - start, "first_step_s": time.perf_counter() - built}, "max")


def import_seconds(statement: str) -> float:
    """Return the seconds that a statement takes in a new process that has imported torch."""
    code = f"import time, torch; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def start_rows(options: argparse.Namespace, names: Sequence[str]) -> list[Row]:
    """Return a row for each system's import, and for each system's first step."""
    chosen = [name for name in IMPORTS if any(system.startswith(name.split()[0]) for system in names)]
    imports = turns(
        {name: functools.partial(import_seconds, IMPORTS[name]) for name in chosen}, 2 * options.rounds, warm=0
    )
    rows: list[Row] = [
        {"system": name, "setting": {"of": "import"}, "over_torch_s": statistics.median(values)}
        for name, values in imports.items()
    ]
    jobs = {name: functools.partial(job, options.nproc, "--systems", name) for name in names}
    for name, found in turns(jobs, options.rounds, warm=0).items():
        rows.append({"system": name, "setting": {"of": "first step"}, **medians(found)})
    return rows


# -- one process -------------------------------------------------------------------------------------------------------


def device_memory(name: str, options: argparse.Namespace, device: Device) -> Row:
    """Return the memory of one system, and its launches; nothing else is on the device."""
    device.forget()
    before, case = device.memory()[0], case_of(options)
    run = SETS[options.set][name](case)
    steps_of(run, WARM)
    device.wait()
    held = device.memory()[0] - before
    device.forget()
    steps_of(run, 2)
    device.wait()
    allocated, reserved = device.peaks()
    found: Row = {"held": held, "allocated": allocated - before, "reserved": reserved - before}
    if device.is_cuda:
        found["launches"] = device.launches(functools.partial(steps_of, run, 1))
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
    return found | {"left": device.memory()[0] - before}


def measure_device_memory(options: argparse.Namespace) -> Row:
    """Measure one system after the other; answer after each, too: it may end the process."""
    found: dict[str, Row] = {}
    for name in options.systems.split(";"):
        found[name] = attempt({}, functools.partial(device_memory, name, options, Device(options.device)))
        answer({"rows": found})
    return {"rows": found}


def through(role: str, names: Sequence[str], limit: float) -> dict[str, Row]:
    """Return the rows of systems that are measured one after the other; one that ends the process is left out."""
    rows: dict[str, Row] = {}
    left = list(names)
    while left:
        found = child("--role", role, "--systems", ";".join(left), limit=limit)
        rows |= found.get("rows", {})
        left = [name for name in left if name not in rows]
        if left:
            rows[left[0]] = {"failed": found.get("failed", "it has ended the process")}
            left = left[1:]
    return rows


def together(names: Sequence[str], memory: dict[str, Row], total: int) -> list[list[str]]:
    """Return which systems take turns together, so that they fit with plain PyTorch among them.

    >>> memory = {name: {"held": 3, "allocated": 4} for name in ("alone", "a", "b", "c")}
    >>> together(["alone", "a", "b", "c"], memory, 12)
    [['alone', 'a', 'b'], ['alone', 'c']]
    """

    def taken(chosen: Sequence[str]) -> int:
        rows = [memory[name] for name in chosen]
        return sum(row["held"] for row in rows) + max(row["allocated"] - row["held"] for row in rows)

    there = [name for name in names if "held" in memory.get(name, {})]
    base = [name for name in there if name == "alone"]
    found: list[list[str]] = []
    for name in there:
        if name not in base:
            if found and taken([*found[-1], name]) <= FULL * total:
                found[-1].append(name)
            else:
                found.append([*base, name])
    return found or ([base] if base else [])


def one_process(options: argparse.Namespace, names: Sequence[str]) -> list[Row]:
    """Measure memory and then time, each in processes of their own; return a row for each system."""
    device = Device(options.device)
    memory = through("memory", names, options.limit)
    all_chosen = together(names, memory, device.total)
    rows: dict[str, Row] = {name: {"system": name} for name in names}
    peak = device.peak_flops(options.dtype != "fp32")
    for name, figures in memory.items():
        sizes = {key: figures.pop(key) for key in ("held", "allocated", "reserved", "left") if key in figures}
        rows[name] |= {f"{key}_gib": size / 2**30 for key, size in sizes.items()} | figures
    for chosen in all_chosen:
        found = child("--role", "time", "--systems", ";".join(chosen), limit=options.limit)
        timed = {row["system"]: row for row in time_rows(options, found)} if "turns" in found else {}
        told = found.get("failed")
        reasons = told if isinstance(told, dict) else dict.fromkeys(chosen, told)
        for name in chosen:
            rows[name] |= timed.get(name, {"failed": reasons.get(name) or "was not timed"})
            if "median_ms" in rows[name]:
                rows[name].pop("failed", None)
                rows[name]["of_peak"] = rows[name]["tflops"] * 1e12 / peak if peak else None
    return list(rows.values())


def measure(options: argparse.Namespace) -> Any:
    """Measure what the role says in this process."""
    if options.role == "memory":
        return measure_device_memory(options)
    return {"time": measure_time, "memory": measure_memory, "start": measure_start}[options.what](options)


def main() -> None:
    """Measure, print the figures and keep them."""
    options = options_of(__doc__, **data_of("options.toml")["train"])
    if options.set in ONE_PROCESS:
        group = own_group(options.nproc, options.device)
    else:
        group = group_of("shardwise" if options.what == "time" else options.systems, options.device)
    serve(measure, options, group)
    every = [name for name in installed(SETS[options.set]) if name not in WITHOUT[options.what]]
    if options.quick:
        every = [name for name in every if not name.startswith("DeepSpeed")]
        every = [every[0], *(name for name in every if name == "DDP"), every[-1]]
    if options.some:
        every = [name for name in every if name in SOME.split(";")]
    names = options.systems.split(";") if options.systems else list(dict.fromkeys(every))
    size = size_of(options)
    notes: Row = {"rounds": options.rounds, "steps": options.steps, "size": dataclasses.asdict(size)}
    ending = f"{options.size}_{options.dtype}_{options.nproc}"
    ending += f"_accumulation{options.accumulation}" if options.accumulation > 1 else ""
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        more = ("--directory", directory)
        if options.set in ONE_PROCESS:
            rows = one_process(options, names)
        elif options.what == "time":
            found = job(options.nproc, "--systems", ";".join(names), *more)
            rows, notes["failed"] = time_rows(options, found), found["failed"]
        elif options.what == "start":
            rows = start_rows(options, names)
        else:
            rows, peaks = [], dict[str, float]()
            for name in names:
                rows.append({"system": name, **job(options.nproc, "--systems", name, *more)})
                notes["course"] = rows[-1].pop("course") or notes.get("course")
                peaks[name] = rows[-1]["peak_bytes_a_parameter"]
                rows[-1]["ratio"] = peaks[name] / peaks[base_of(options.set, name, peaks)]
    setting = {"set": options.set, "what": options.what, "model": options.size, "ranks": options.nproc}
    rows = [{**row, "setting": setting | row.get("setting", {})} for row in rows]
    show(rows)
    prefix = "gpu" if options.set in ONE_PROCESS else options.what
    save(options, f"{prefix}_{options.set}_{ending}", rows, **notes)


if __name__ == "__main__":
    main()
