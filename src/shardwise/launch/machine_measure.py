"""Ranks of `shardwise bench machine`: `python -m shardwise.launch.machine_measure FILE SECONDS`; rank 0 writes FILE.

A single rank measures operators and the host, several ranks what changes where they share a machine, and collectives.
"""

from __future__ import annotations

import datetime
import functools
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
from shardwise.plan.events import Operator, Recorder
from shardwise.plan.models import tokens
from shardwise.plan.rates import CollectiveTime, Crowd, Machine, Operators, measure_operators

_SIZES = tuple(1 << power for power in (10, 14, 17, 20, 23, 25))
_OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")
_WIDTHS = (256, 768, 1536)
"""Of the decoders whose operators are measured; those of other sizes are interpolated."""
_LENGTH, _ROWS, _WORDS = 256, 2, 8192
_TINY = Shape(16, 16, 1, 32)
"""Its operators take no time: what a step takes is the host's."""
_SHORT = 4
_STEPS = 12


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


def recorded(shape: Shape, config: dict[str, object], length: int = _LENGTH) -> Recorder:
    """Return what a rank does in a step of a small decoder."""
    recorder = Recorder()
    with torch.device("meta"):
        model = Decoder(shape)
    (planner,), _ = planners_of(model, config, 1, tokens(_ROWS, length))
    planner.record(planner.target.setting, recorder)
    return recorder


def operators_of(recorder: Recorder) -> dict[str, Operator]:
    """Return the operators of a recording by signature."""
    events = (event for one in recorder.passes for _, event in one.events)
    return {event.signature: event for event in events if isinstance(event, Operator)}


def _config(precision: str) -> dict[str, object]:
    given = {} if precision == "fp32" else {precision: {"enabled": True}}
    return {"train_micro_batch_size_per_gpu": _ROWS, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, **given}


def measure(comm: Communicator, limit: float) -> Machine:
    """Measure the operators of a single rank in at most about `limit` seconds, or several ranks. A collective."""
    machine = of_this_machine(comm.device)
    if comm.world == 1:
        cases = [(width, precision) for width in _WIDTHS for precision in ("fp32", "bf16")]
        for width, precision in cases:
            shape = Shape(1, width, width // 64, _WORDS)
            found, share = recorded(shape, _config(precision)), limit / len(cases)
            machine.operators |= measure_operators(found.calls, operators_of(found), comm.device, share)
        machine.host = max(0.0, _host(machine, comm.device))
    else:
        for count in _counts(comm.world):
            if count > 1 and comm.world % count == 0:
                # All groups at once, as those of tensor parallelism are.
                groups = [list(range(first, first + count)) for first in range(0, comm.world, count)]
                group = comm if count == comm.world else comm.part(groups, f"machine.{count}")
                machine.collectives += [_collective(comm, group, op, size) for op in _OPS for size in _SIZES]
        machine.crowds = [_crowd(comm, count) for count in _counts(comm.world)]
        machine.interference = _interference(comm)
    return machine


def _counts(world: int) -> list[int]:
    return sorted({1, world, *(1 << power for power in range(world.bit_length()))} & set(range(1, world + 1)))


def _timed(comm: Communicator, run: Callable[[], object], trials: int = 5) -> float:
    """Return the seconds of the slowest rank: the median of some trials."""
    times = []
    for _ in range(trials):
        comm.barrier("machine.barrier")
        begun = time.perf_counter()
        run()
        if comm.device.type == "cuda":
            torch.cuda.synchronize(comm.device)
        times.append(time.perf_counter() - begun)
    return max(comm.exchange(statistics.median(times), "machine.times"))


def _collective(comm: Communicator, group: Communicator, op: str, size: int) -> CollectiveTime:
    exchange = Exchange(group, op, torch.float32, size)
    exchange.fill()
    inner = max(1, min(10, (1 << 20) // exchange.size))
    exchange.ours()

    def run() -> None:
        for _ in range(inner):
            exchange.ours()

    return CollectiveTime(op=op, ranks=group.world, size=exchange.size, seconds=_timed(comm, run) / inner)


def _works(device: torch.device) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return a computation and a movement of memory, of some ten milliseconds on a core."""
    factor = torch.rand(768, 768, device=device)
    source = torch.rand(4 << 20, device=device)
    target = torch.empty_like(source)

    def move() -> None:
        for _ in range(4):
            torch.add(source, 1.0, out=target)

    def compute() -> None:
        for _ in range(4):
            torch.mm(factor, factor)

    return compute, move


def _crowd(comm: Communicator, count: int) -> Crowd:
    """Measure how much longer work takes with the first `count` ranks at work than with one."""
    found = []
    for work in _works(comm.device):
        work()

        def of(ranks: int, work: Callable[[], object] = work) -> float:
            return _timed(comm, work if comm.rank < ranks else lambda: None)

        found.append(max(1.0, of(count) / of(1)))
    return Crowd(ranks=count, computing=found[0], moving=found[1])


def _interference(comm: Communicator) -> float:
    """Measure by how much a collective in flight delays the computing of all ranks, per second of flight."""
    compute, _ = _works(comm.device)
    size = 1 << 22
    full = torch.zeros(size * comm.world, device=comm.device)
    own = torch.zeros(size, device=comm.device)
    gather = functools.partial(comm.all_gather, [(full, own)], "machine.gather")

    def fly() -> None:
        gather().wait()

    def both() -> None:
        handle = gather()
        compute()
        handle.wait()

    flight, work, together = _timed(comm, fly), _timed(comm, compute), _timed(comm, both)
    hidden = min(flight, work)
    return min(1.0, max(0.0, (together - max(flight, work)) / hidden))


def _host(machine: Machine, device: torch.device) -> float:
    """Return the seconds that a step of a tiny model takes besides its operators, for each of them."""
    import shardwise

    config = _config("fp32") | {"steps_per_print": None}
    found = recorded(_TINY, config, _SHORT)
    operators = measure_operators(found.calls, operators_of(found), device, 10.0)
    count = sum(isinstance(event, Operator) for one in found.passes for _, event in one.events)
    costs = Costs(Operators(operators, machine.crowd(1)).seconds, lambda launch: 0.0)
    planned = step_time(found.passes, 1, costs).total
    model = Decoder(_TINY)
    engine = shardwise.initialize(model=model, config=config).engine
    batch = torch.zeros(_ROWS, _SHORT, dtype=torch.int64, device=device)
    times = []
    for _ in range(_STEPS):
        begun = time.perf_counter()
        engine.backward(loss_of(engine(batch)))
        engine.step()
        times.append(time.perf_counter() - begun)
    engine.destroy()
    return (statistics.median(times) - planned) / count


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
