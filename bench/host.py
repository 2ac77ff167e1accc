"""Costs that must not grow: host time of a layer, with the number of layers too, and memory over many steps.

    python bench/host.py [--what layer] [--gpu] [--device cpu] [--world 8] [--dtypes bf16,fp32] [--rounds 20]
    python bench/host.py --what layers|lengths [--nproc 2] [--systems "DDP;shardwise 3"]

*layer*: on a GPU the host launches and the device computes, and where the device is fast one waits for the host. A GPT
whose tensors are so small that computing takes next to nothing is trained with many layers and with few; the difference
of the two over that of the layers is the cost of a layer. Ranks are imagined (torch's fake process group), so that no
communication takes any time. All systems are built in one process and take turns; figures are medians of steps.
PyTorch's own share, which all have, is the row "alone". On CUDA the clock stops when the host has launched everything;
the device is waited for between steps, and launches are counted by torch's profiler. On the CPU the kernels of
the tiny model are among the time of every row, and rows "as on a device" take the branches for a device with streams,
which on the CPU do nothing.

*layers*: a GPT so narrow that computing costs next to nothing, with 4 to 96 layers, all depths of all systems taking
turns in one job. Processor time of a step, of all threads of a rank, over the number of layers.

*lengths*: a job for each system trains on sequences of random length; resident size, freed memory given back, after 20
and after 200 steps, of the rank in which it grew most.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import itertools
import logging
import random
import statistics
import sys
import time
from collections.abc import Iterator
from unittest import mock

import torch
from harness import (
    Device,
    Row,
    data_of,
    group_of,
    job,
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
from systems import SETS, Case, Run, Size, installed

FEW, MANY = 8, 24
PHASES = ("forward", "backward", "step", "whole")
LEFT_OUT = ("alone", "FSDP2 no reshard", "DeepSpeed 1", "DeepSpeed 2", "shardwise 3 Init")


@contextlib.contextmanager
def as_device() -> Iterator[None]:
    """Have the CPU take the branches of a device: its streams do nothing, and count as beside the host all the same."""
    from shardwise.device.streams import HostStreams, overrides

    streams = HostStreams()
    streams.beside = True
    with mock.patch.dict(overrides, {"cpu": streams}):
        yield


# -- a layer -----------------------------------------------------------------------------------------------------------


def timed_step(run: Run, device: Device) -> list[float]:
    """Return the milliseconds that the host takes for each phase of a step, and for all."""
    device.wait()
    times = [time.perf_counter()]
    loss = run.loss()
    times.append(time.perf_counter())
    run.backward(loss)
    times.append(time.perf_counter())
    run.update()
    times.append(time.perf_counter())
    device.wait()
    parts = [1e3 * (b - a) for a, b in itertools.pairwise(times)]
    return [*parts, sum(parts)]


def measure_layer(kind: str, names: list[str], case: Case, options: argparse.Namespace) -> list[Row]:
    """Return a row of figures a layer for each system of a set; one that cannot be built is left out."""
    device = Device(options.device)
    runs: dict[tuple[str, int], Run] = {}
    for name in names:
        try:
            for layers in (FEW, MANY):
                size = dataclasses.replace(case.size, layers=layers)
                runs[name, layers] = SETS[kind][name](dataclasses.replace(case, size=size))
        except Exception as error:
            runs = {key: run for key, run in runs.items() if key[0] != name}
            print(f"{name}: {reason(error)}", file=sys.stderr, flush=True)
    ways = {key: lambda run=run: [timed_step(run, device) for _ in range(options.steps)] for key, run in runs.items()}
    turns(ways, 0, warm=2)
    gc.collect()
    gc.freeze()  # the models of all systems are not looked through in the turn of one
    found = {key: [step for turn in own for step in turn] for key, own in turns(ways, options.rounds, warm=0).items()}
    gc.unfreeze()
    rows: list[Row] = []
    for name in dict.fromkeys(name for name, _ in runs):
        few, many = ([statistics.median(one) for one in zip(*found[name, n], strict=True)] for n in (FEW, MANY))
        row: Row = {"system": name}
        row |= {f"{phase}_ms": (b - a) / (MANY - FEW) for phase, a, b in zip(PHASES, few, many, strict=True)}
        if device.is_cuda:
            steps = (functools.partial(timed_step, runs[name, n], device) for n in (FEW, MANY))
            less, more = map(device.launches, steps)
            row["launches"] = (more - less) / (MANY - FEW)
        rows.append(row)
    for run in runs.values():
        run.finish()
        run.close()
    whole = {row["system"]: row["whole_ms"] for row in rows}
    for row in rows:
        row |= {f"over_{base.lower()}": row["whole_ms"] / whole[base] for base in ("alone", "FSDP2") if base in whole}
    return rows


def layer_rows(options: argparse.Namespace) -> list[Row]:
    """Measure all precisions, ranks and, on the CPU, both kinds of branches."""
    width = options.width or (128 if options.device == "cuda" else 64)  # memory of CUDA is aligned
    size = Size(width=width, layers=FEW, heads=4, vocabulary=64, rows=1, length=8)
    rows: list[Row] = []
    for dtype in options.dtypes.split(","):
        for world in (options.world, 1):
            kind = "one" if world == 1 else "imagined"
            names = [name for name in SETS[kind] if not name.startswith("DeepSpeed")]
            if world == 1:
                names = [name for name in names if name not in ("DDP", "FSDP2 no reshard")]
            if options.systems:
                names = [name for name in options.systems.split(";") if name in SETS[kind]]
            for branches in (False, True) if options.device == "cpu" else (True,):
                patched = as_device() if branches and options.device == "cpu" else contextlib.nullcontext()
                case = Case(size, dtype == "bf16", device=options.device)
                with patched, own_group(world, options.device, imagined=True):
                    measured = measure_layer(kind, names, case, options)
                setting = {"dtype": dtype, "ranks": world, "as_device": branches}
                rows += [{"system": row["system"], "setting": setting, **row} for row in measured]
                show(rows[-len(measured) :])
    return rows


# -- many layers, and many steps ---------------------------------------------------------------------------------------


def measure_layers(options: argparse.Namespace) -> list[Row]:
    """Take turns on this rank; return the processor time of a step over the number of layers."""
    runs = {
        (name, depth): SETS["zero"][name](Case(Size(8, depth, 1, 16, 1, 4), False))
        for name in options.systems.split(";")
        for depth in map(int, options.depths.split(","))
    }

    def step(run: Run) -> float:
        figures = spent(lambda: (run.step(), run.finish()))
        return over_ranks(figures)["processor"]

    found = turns({key: functools.partial(step, run) for key, run in runs.items()}, options.rounds, warm=3)
    return [
        {"system": name, "setting": {"layers": depth}, "a_layer_us": statistics.median(values) / depth * 1e6}
        for (name, depth), values in found.items()
    ]


def measure_lengths(options: argparse.Namespace) -> list[Row]:
    """Train one system on this rank; return the resident size at two points, and its highest growth."""
    case, lengths, sizes = Case(Size(128, 4, 4, 1024, 2, 256), False), random.Random(0), []
    run = SETS["zero"][options.systems](case)
    for step in range(1, options.train + 1):
        run.ids = torch.randint(0, case.size.vocabulary, (case.size.rows, lengths.randint(1, case.size.length)))
        run.step()
        if step in (options.early, options.train):
            run.finish()
            sizes.append(trimmed() / 2**20)
    figures = {"early_mib": sizes[0], "late_mib": sizes[1], "grown_mib": sizes[1] - sizes[0]}
    return [{"system": options.systems, **over_ranks(figures, "max")}]


def main() -> None:
    """Measure, print the figures and keep them."""
    options = options_of(__doc__, **data_of("options.toml")["host"])
    logging.getLogger("shardwise").setLevel(logging.WARNING)
    notes = {"rounds": options.rounds, "steps": options.steps}
    layers = options.what == "layers"
    serve(measure_layers if layers else measure_lengths, options, group_of("shardwise" if layers else options.systems))
    if options.what == "layer":
        save(options, "gpu_host_time" if options.gpu else "host_time", layer_rows(options), **notes)
    else:
        every = [name for name in installed(SETS["zero"]) if name not in LEFT_OUT]
        names = options.systems.split(";") if options.systems else every
        together = [";".join(names)] if options.what == "layers" else names
        rows = [row for some in together for row in job(options.nproc, "--systems", some)]
        show(rows)
        save(options, f"growth_{options.what}_{options.nproc}", rows, train=options.train, early=options.early, **notes)


if __name__ == "__main__":
    main()
