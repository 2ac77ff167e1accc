"""Ranks of `shardwise bench machine`: `python -m shardwise.launch.machine_measure FILE SECONDS`; rank 0 writes FILE.

A single rank measures operators and the host, several ranks what changes where they share a machine, and collectives.
"""

from __future__ import annotations

import datetime
import os
import platform
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.comm.communicator import Communicator
from shardwise.comm.ledger import Ledger
from shardwise.comm.setup import destroy, init_distributed, local_rank
from shardwise.device.choice import choose_device
from shardwise.engine.plans import planners_of
from shardwise.launch.comm_measure import Exchange
from shardwise.memory.dryrun import loss_of
from shardwise.plan.architectures import Decoder, Shape
from shardwise.plan.clock import Costs, step_time
from shardwise.plan.events import Launch, Operator, Recorder
from shardwise.plan.models import tokens
from shardwise.plan.rates import CollectiveTime, Crowd, Machine, Operators, measure_operators

_SIZES = tuple(1 << power for power in (10, 14, 17, 20, 23, 25))
_REDUCTIONS = ("reduce_scatter", "all_reduce")
_OPS = ("all_gather", *_REDUCTIONS, "all_to_all", "broadcast")
_WIDTHS = (256, 768, 1536)
"""Of the decoders whose operators are measured; those of other sizes are interpolated."""
_LENGTH, _ROWS, _WORDS = 256, 2, 8192
_SMALL, _SMALL_LENGTH = Shape(8, 256, 4, 1024), 128
"""The host is a part of what its step takes."""
_TINY = Shape(16, 16, 1, 32)
"""Its operators take no time: what a step takes is the host's."""
_SHORT = 4
_MIDDLE = Shape(1, _WIDTHS[1], _WIDTHS[1] // 64, _WORDS)
"""Its step shows what operators and collectives take together."""
_MOST = 3.0
"""The most that is believed of what a step takes longer than its parts."""
_STEPS = 4
_TRIALS = 5
_FEW_TRIALS = 3
"""Of what takes long."""


def of_this_machine(device: torch.device) -> Machine:
    """Return a description without rates."""
    return Machine(
        when=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        host_name=socket.gethostname(),
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        device="cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
        torch=torch.__version__,
        threads=torch.get_num_threads(),
    )


def recorded(shape: Shape, config: dict[str, object], length: int = _LENGTH, ranks: int = 1) -> Recorder:
    """Return what a rank does in a step of a small decoder."""
    recorder = Recorder(chunks=True)
    with torch.device("meta"):
        model = Decoder(shape)
    (planner,), _ = planners_of(model, config, ranks, tokens(_ROWS, length))
    planner.record(planner.target.setting, recorder)
    return recorder


def operators_of(recorder: Recorder) -> dict[str, Operator]:
    """Return the operators of a recording by signature."""
    events = (event for one in recorder.passes for _, event in one.events)
    return {event.signature: event for event in events if isinstance(event, Operator)}


def _config(precision: str, stage: int = 0) -> dict[str, object]:
    given = {} if precision == "fp32" else {precision: {"enabled": True}}
    return {
        "train_micro_batch_size_per_gpu": _ROWS,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage},
        "steps_per_print": None,
        **given,
    }


def measure(comm: Communicator, limit: float) -> Machine:
    """Measure the operators of a single rank in at most about `limit` seconds, or several ranks. A collective."""
    machine = of_this_machine(comm.device)
    if comm.world == 1:
        cases = [(width, precision) for width in _WIDTHS for precision in ("fp32", "bf16")]
        for width, precision in cases:
            shape = Shape(1, width, width // 64, _WORDS)
            found, share = recorded(shape, _config(precision)), limit / len(cases)
            machine.operators |= measure_operators(found.calls, operators_of(found), comm.device, share)
        machine.host = _host(machine, comm.device)
    else:
        for count in _counts(comm.world):
            if comm.world % count == 0:
                # All groups at once, as those of tensor parallelism are.
                groups = [list(range(first, first + count)) for first in range(0, comm.world, count)]
                group = comm if count == comm.world else comm.part(groups, f"machine.{count}")
                machine.collectives += [_collective(comm, group, op, size) for op in _OPS for size in _SIZES]
                machine.collectives += [
                    _collective(comm, group, op, size, narrow=True) for op in _REDUCTIONS for size in _SIZES[::2]
                ]
        machine.crowds = [_crowd(comm)]
        longer, count, known = _communicating(machine, comm, _TINY, _SHORT)
        machine.launch = max(0.0, longer - known) / count
        longer, count, known = _communicating(machine, comm, _MIDDLE, _LENGTH)
        machine.interference = min(_MOST, max(0.0, (longer - count * machine.launch) / known))
    return machine


def _counts(world: int) -> list[int]:
    return sorted({world, *(1 << power for power in range(1, world.bit_length()))})


def _timed(
    comm: Communicator,
    run: Callable[[], object],
    of: Callable[[list[float]], float] = statistics.median,
    trials: int = _FEW_TRIALS,
) -> float:
    """Return the seconds of the slowest rank: `of` some trials."""
    times = []
    for _ in range(trials):
        comm.barrier("machine.barrier")
        begun = time.perf_counter()
        run()
        if comm.device.type == "cuda":
            torch.cuda.synchronize(comm.device)
        times.append(time.perf_counter() - begun)
    return max(comm.exchange(of(times), "machine.times"))


def _collective(comm: Communicator, group: Communicator, op: str, size: int, *, narrow: bool = False) -> CollectiveTime:
    exchange = Exchange(group, op, torch.bfloat16 if narrow else torch.float32, size)
    exchange.fill()
    inner = max(1, min(10, (1 << 20) // exchange.size))
    exchange.ours()

    def run() -> None:
        for _ in range(inner):
            exchange.ours()

    seconds = _timed(comm, run, trials=_TRIALS) / inner
    return CollectiveTime(op=op, ranks=group.world, size=exchange.size, narrow=narrow, seconds=seconds)


def _works(device: torch.device) -> tuple[Callable[[], object], ...]:
    """Return passes of a decoder in fp32 and bf16, and a movement of memory, none of which the cache can hold."""
    batch = _batch(_LENGTH, device)

    def passes(dtype: torch.dtype) -> Callable[[], object]:
        with device:
            model = Decoder(_MIDDLE).to(dtype)
        return lambda: loss_of(model(batch)).backward()

    source = torch.rand(4 << 20, device=device)
    target = torch.empty_like(source)

    def move() -> None:
        for _ in range(16):
            torch.add(source, 1.0, out=target)

    return passes(torch.float32), passes(torch.bfloat16), move


def _crowd(comm: Communicator) -> Crowd:
    """Measure how much longer work takes with all ranks at work than with one."""
    found = []
    for work in _works(comm.device):
        work()

        def of(ranks: int, work: Callable[[], object] = work) -> float:
            def until_all_are_done() -> None:  # ranks without a core begin late
                if comm.rank < ranks:
                    work()
                comm.barrier("machine.barrier")

            return _timed(comm, until_all_are_done, min)  # another program makes it longer

        found.append(max(1.0, of(comm.world) / of(1)))
    computing, narrow, moving = found
    return Crowd(ranks=comm.world, computing=computing, narrow=narrow, moving=moving)


def _host(machine: Machine, device: torch.device) -> float:
    """Return the seconds that steps of small layers take besides their operators, for each of these."""
    found = []
    for precision in ("fp32", "bf16"):
        recorder = recorded(_SMALL, _config(precision), _SMALL_LENGTH)
        operators = measure_operators(recorder.calls, operators_of(recorder), device, 10.0)
        costs = Costs(Operators(operators, machine.crowd(1)).seconds, lambda launch: 0.0)
        rest = _step_of_engine(_SMALL, _SMALL_LENGTH, device, 0, precision) - step_time(recorder.passes, 1, costs).total
        found.append(rest / sum(1 for _ in recorder.of(Operator)))
    return max(0.0, statistics.mean(found))


def _communicating(machine: Machine, comm: Communicator, shape: Shape, length: int) -> tuple[float, int, float]:
    """Return what a step at stage 3 takes longer than its computing, and (on rank 0) the number of its collectives and
    the seconds that they take by themselves.
    """
    with comm.device:
        model = Decoder(shape)
    optimizer, batch = torch.optim.AdamW(model.parameters(), lr=1e-4), _batch(length, comm.device)

    def compute() -> None:
        optimizer.zero_grad()
        loss_of(model(batch)).backward()

    passes = _median(compute, comm.barrier)
    update = _median(optimizer.step, comm.barrier) / comm.world  # a rank steps its share
    whole = _step_of_engine(shape, length, comm.device, 3, between=comm.barrier)
    longer = max(comm.exchange(whole - passes - update, "machine.times"))
    if comm.rank != 0:
        return longer, 1, 1.0  # rank 0 writes the file
    launches = list(recorded(shape, _config("fp32", stage=3), length, comm.world).of(Launch))
    return longer, len(launches), sum(map(machine.costs(comm.world).collective, launches))


def _step_of_engine(
    shape: Shape,
    length: int,
    device: torch.device,
    stage: int,
    precision: str = "fp32",
    between: Callable[[str], object] = len,
) -> float:
    import shardwise

    with device:
        model = Decoder(shape)
    engine, batch = shardwise.initialize(model=model, config=_config(precision, stage)).engine, _batch(length, device)

    def step() -> None:
        engine.backward(loss_of(engine(batch)))
        engine.step()

    found = _median(step, between)
    engine.destroy()
    return found


def _median(step: Callable[[], object], between: Callable[[str], object]) -> float:
    times = []
    for _ in range(_STEPS):
        between("machine.barrier")
        begun = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:])


def _batch(length: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(_ROWS, length, dtype=torch.int64, device=device)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    """Measure as one rank of a job."""
    init_distributed(verbose=False)
    device = choose_device(local_rank()) if dist.get_backend() != "gloo" else torch.device("cpu")
    comm = Communicator(None, Ledger(), device, name="machine")
    machine = measure(comm, float(sys.argv[2]))
    if comm.rank == 0:
        machine.save(sys.argv[1])
    comm.destroy()
    destroy()


if __name__ == "__main__":
    main()
