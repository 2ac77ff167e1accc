"""Time of the host for a layer and step: what a program spends beside the computing itself.

    python bench/host_time.py [--device cpu] [--rounds 30] [--world 8] [--dtypes bf16,fp32]

On a GPU the host launches and the device computes, and where the device is fast one waits for the host. A GPT whose
tensors are so small that computing takes next to nothing is trained with many layers and with few; the difference of
the two over that of the layers is what a layer costs. Ranks are imagined (torch's fake process group), so that no
communication takes any time. All systems are built in one process and take turns (a b b a); figures are medians of
steps. PyTorch's own share, which all have, is the row "alone".

On CUDA the clock stops when the host has launched everything; the device is waited for between steps, and kernel
launches are counted by torch's profiler. On the CPU the kernels of the tiny model are among the time of every row, and
`beside` rows take the branches for a device with streams, which on the CPU do nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from unittest import mock

from _gpu import imagined_ranks, keep, reason
from _jobs import parser, read

if TYPE_CHECKING:
    from _systems import Case, Run

FEW, MANY = 8, 24
PHASES = ("forward", "backward", "step")


def systems(world: int) -> dict[str, Callable[[Case], Run]]:
    """Return what is compared on so many imagined ranks; on one rank state is divided because it is forced to be."""
    from _systems import ONE, SYSTEMS

    if world == 1:
        return {
            name: ONE[name] for name in ("alone", "FSDP2", "shardwise", *(f"shardwise {i} forced" for i in range(4)))
        }
    names = ["alone", "DDP", "FSDP2", "FSDP2 no reshard", *(f"shardwise {stage}" for stage in range(4))]
    return {name: SYSTEMS[name] for name in names} | {"DDP": _ddp}


def _ddp(case: Case) -> Run:
    """DDP that does not ask the imagined ranks' sums for a result, which they have not."""
    import torch
    import torch.distributed as dist
    from _systems import PlainRun, ddp

    def reduce(_, bucket):  # type: ignore[no-untyped-def]  # DDP refuses the annotations of `typing`
        buffer = bucket.buffer()
        dist.all_reduce(buffer, async_op=True).wait()
        done = torch.futures.Future(devices=[buffer.device] if case.device == "cuda" else None)
        done.set_result(buffer)
        return done

    run = ddp(case)
    assert isinstance(run, PlainRun)
    run.model.register_comm_hook(None, reduce)
    return run


class _Stream:
    """One that launches at once."""

    def use(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def wait(self, mark: Any) -> None:
        pass


class _Mark:
    """One that has been reached."""

    def wait(self) -> None:
        pass

    def reached(self) -> bool:
        return True


class Streams:
    """Streams that do nothing, beside the host all the same: the CPU takes the branches of a device."""

    beside = True

    def make(self, name: str, *, urgent: bool = True) -> _Stream:
        """Return a stream."""
        return _Stream()

    def current(self) -> _Stream:
        """Return a stream."""
        return _Stream()

    def mark(self) -> _Mark:
        """Return a mark."""
        return _Mark()

    def block(self, mark: _Mark, limit: timedelta) -> bool:
        """Wait for nothing."""
        return True

    def on_host(self) -> AbstractContextManager[Any]:
        """Change nothing."""
        return contextlib.nullcontext()


@contextlib.contextmanager
def as_device() -> Iterator[None]:
    """Have the CPU take the branches of a device: streams."""
    from shardwise.device.streams import overrides

    with mock.patch.dict(overrides, {"cpu": Streams()}):
        yield


def _wait(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def timed_step(run: Run) -> list[float]:
    """Return the seconds that the host takes for each phase of a step."""
    _wait(run.case.device)
    start = time.perf_counter()
    loss = run.loss()
    forward = time.perf_counter()
    run.backward(loss)
    backward = time.perf_counter()
    run.update()
    end = time.perf_counter()
    _wait(run.case.device)
    return [forward - start, backward - forward, end - backward]


def launches(run: Run) -> int:
    """Return how many kernels a step launches on a CUDA device."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        timed_step(run)
    return sum(event.count for event in seen.key_averages() if "LaunchKernel" in event.key)


def measure(makers: Mapping[str, Callable[[Case], Run]], case: Case, rounds: int, steps: int) -> list[dict[str, Any]]:
    """Return a row of figures a layer for each system.

    Args:
        makers: the systems, by name.
        case: what they train; its number of layers does not matter.
        rounds: turns that each system has.
        steps: of a turn.
    """

    def with_layers(layers: int) -> Case:
        return dataclasses.replace(case, size=dataclasses.replace(case.size, layers=layers))

    runs: dict[tuple[str, int], Run] = {}
    for name, make in makers.items():
        try:
            runs |= {(name, layers): make(with_layers(layers)) for layers in (FEW, MANY)}
        except Exception as error:
            print(f"{name}: {reason(error)}", file=sys.stderr, flush=True)
    found: dict[Any, list[list[float]]] = {which: [] for which in runs}
    for turn in range(-2, rounds):
        if turn == 0:
            gc.collect()
            gc.freeze()  # the models of all systems are not looked through in the turn of one
        for which in runs if turn % 2 == 0 else reversed(runs):
            seconds = [timed_step(runs[which]) for _ in range(steps)]
            if turn >= 0:
                found[which] += seconds
    gc.unfreeze()
    rows = []
    for name in dict.fromkeys(name for name, _ in runs):
        few, many = (
            [statistics.median(phases) for phases in zip(*(((*s, sum(s))) for s in found[name, layers]), strict=True)]
            for layers in (FEW, MANY)
        )
        figures = [(high - low) * 1e3 / (MANY - FEW) for low, high in zip(few, many, strict=True)]
        row = {"system": name, **dict(zip((f"{phase}_ms" for phase in (*PHASES, "whole")), figures, strict=True))}
        if case.device == "cuda":
            row["launches"] = (launches(runs[name, MANY]) - launches(runs[name, FEW])) / (MANY - FEW)
        rows.append(row)
    for run in runs.values():
        run.finish()
        run.close()
    return rows


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give rows the ratio of their whole time to that of "alone" and of "FSDP2"."""
    whole = {row["system"]: row["whole_ms"] for row in rows}
    for row in rows:
        for base in ("alone", "FSDP2"):
            if base in whole:
                row[f"over_{base.lower()}"] = row["whole_ms"] / whole[base]
    return rows


def cases(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all precisions, ranks and, on the CPU, both kinds of branches; return rows that say which they are of.

    Systems that cannot be built are left out, and so is what is measured with one that fails later.
    """
    from _systems import Case, Size

    size = Size(width=options.width, layers=FEW, heads=4, vocabulary=64, rows=1, length=8)
    rows = []
    for dtype in options.dtypes.split(","):
        for world in (options.world, 1):
            for beside in (False, True) if options.device == "cpu" else (True,):
                as_on_device = as_device() if beside and options.device == "cpu" else contextlib.nullcontext()
                makers = systems(world)
                if options.only:
                    makers = {name: makers[name] for name in options.only.split(",") if name in makers}
                case = Case(size, dtype == "bf16", device=options.device)
                with as_on_device, imagined_ranks(world, options.device):
                    try:
                        measured = compared(measure(makers, case, options.rounds, options.steps))
                    except Exception as error:
                        print(f"{dtype}, {world} ranks: {reason(error)}", file=sys.stderr, flush=True)
                        continue
                for row in measured:
                    rows.append({"dtype": dtype, "world": world, "beside": beside, **row})
                    print(show(rows[-1]), flush=True)
    return rows


def show(row: dict[str, Any]) -> str:
    """Return a row as a line."""
    phases = "  ".join(f"{phase} {row[f'{phase}_ms']:6.3f}" for phase in (*PHASES, "whole"))
    ratios = "  ".join(f"/{base} {row[f'over_{base}']:4.2f}" for base in ("alone", "fsdp2") if f"over_{base}" in row)
    launched = f"  launches {row['launches']:.0f}" if "launches" in row else ""
    where = f"{row['dtype']} world {row['world']}{' beside' if row['beside'] else ''}"
    return f"{where:20s} {row['system']:18s} {phases} ms  {ratios}{launched}"


def main() -> None:
    """Measure, print and keep the figures."""
    import torch

    found = parser(__doc__)
    found.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    found.add_argument("--dtypes", default="bf16,fp32", help="precisions, separated by commas")
    found.add_argument("--world", type=int, default=8, help="imagined ranks")
    found.add_argument(
        "--width", type=int, help="of the model; default 64, and 128 on CUDA, to which memory is aligned"
    )
    found.add_argument("--rounds", type=int, default=20)
    found.add_argument("--steps", type=int, default=3, help="optimizer steps in a turn")
    found.add_argument("--only", help="names, separated by commas; default: all")
    options = read(found)
    options.rounds = 1 if options.quick else options.rounds
    options.width = options.width or (128 if options.device == "cuda" else 64)
    logging.getLogger("shardwise").setLevel(logging.WARNING)
    from _machine import save

    rows = cases(options)
    notes = {"device": options.device, "width": options.width, "rounds": options.rounds, "steps": options.steps}
    if options.device == "cpu":
        save(options.results, "host_time", rows, **notes)
    if options.device == "cuda" or options.quick:
        keep(options, "host", rows, **notes)  # among the others of one device


if __name__ == "__main__":
    main()
