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

from shardwise.comm.communicator import Communicator, Handle
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
_OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")
_WIDTHS = (256, 768, 1536)
"""Of the decoders whose operators are measured; those of other sizes are interpolated."""
_LENGTH, _ROWS, _WORDS = 256, 2, 8192
_TINY = Shape(16, 16, 1, 32)
"""Its operators take no time: what a step takes is the host's."""
_SHORT = 4
_STEPS = 12
_TRIALS = 5


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
    recorder = Recorder()
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
        machine.crowds = [_crowd(comm, count) for count in _counts(comm.world)]
        machine.interference = _interference(comm)
        machine.launch = _launch(machine, comm)
    return machine


def _counts(world: int) -> list[int]:
    return sorted({world, *(1 << power for power in range(1, world.bit_length()))})


def _timed(
    comm: Communicator, run: Callable[[], object], of: Callable[[list[float]], float] = statistics.median
) -> float:
    """Return the seconds of the slowest rank: `of` some trials."""
    times = []
    for _ in range(_TRIALS):
        comm.barrier("machine.barrier")
        begun = time.perf_counter()
        run()
        if comm.device.type == "cuda":
            torch.cuda.synchronize(comm.device)
        times.append(time.perf_counter() - begun)
    return max(comm.exchange(of(times), "machine.times"))


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
    """Return a pass of a decoder, and a movement of memory, neither of which the cache can hold."""
    width = _WIDTHS[1]
    with device:
        model = Decoder(Shape(1, width, width // 64, _WORDS))
    source = torch.rand(4 << 20, device=device)
    batch = torch.zeros(_ROWS, _LENGTH, dtype=torch.int64, device=device)
    target = torch.empty_like(source)

    def move() -> None:
        for _ in range(16):
            torch.add(source, 1.0, out=target)

    def compute() -> None:
        loss_of(model(batch)).backward()

    return compute, move


def _crowd(comm: Communicator, count: int) -> Crowd:
    """Measure how much longer work takes with the first `count` ranks at work than with one."""
    found = []
    for work in _works(comm.device):
        work()

        def of(ranks: int, work: Callable[[], object] = work) -> float:
            def until_all_are_done() -> None:  # ranks without a core begin late
                if comm.rank < ranks:
                    work()
                comm.barrier("machine.barrier")

            return _timed(comm, until_all_are_done, min)  # another program makes it longer

        found.append(max(1.0, of(count) / of(1)))
    return Crowd(ranks=count, computing=found[0], moving=found[1])


def _interference(comm: Communicator) -> float:
    """Measure by how much collectives in flight delay the computing of all ranks, per second of flight."""
    compute, _ = _works(comm.device)
    size = max(1, (1 << 24) // comm.world)
    full = [torch.zeros(size * comm.world, device=comm.device) for _ in range(4)]
    own = torch.zeros(size, device=comm.device)

    def launch() -> list[Handle]:
        return [comm.all_gather([(one, own)], "machine.gather") for one in full]

    def fly() -> None:
        for one in launch():
            one.wait()

    def both() -> None:
        works = launch()
        compute()
        for one in works:
            one.wait()

    flight, work, together = _timed(comm, fly), _timed(comm, compute), _timed(comm, both)
    return min(1.0, max(0.0, (together - max(flight, work)) / min(flight, work)))


def _host(machine: Machine, device: torch.device) -> float:
    """Return the seconds that a step of a tiny model takes besides its operators, for each of them."""
    found = recorded(_TINY, _config("fp32"), _SHORT)
    operators = measure_operators(found.calls, operators_of(found), device, 10.0)
    count = sum(1 for _ in found.of(Operator))
    costs = Costs(Operators(operators, machine.crowd(1)).seconds, lambda launch: 0.0)
    return max(0.0, _step_of_engine(device, stage=0) - step_time(found.passes, 1, costs).total) / count


def _launch(machine: Machine, comm: Communicator) -> float:
    """Return the seconds that a step of a tiny model at stage 3 takes longer than one without an engine, besides its
    collectives, for each of them.
    """
    with comm.device:
        model = Decoder(_TINY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        loss_of(model(_short_batch(comm.device))).backward()
        optimizer.step()
        optimizer.zero_grad()

    plain, whole = _median(step, comm.barrier), _step_of_engine(comm.device, stage=3, between=comm.barrier)
    launches = list(recorded(_TINY, _config("fp32", stage=3), _SHORT, comm.world).of(Launch))
    known = sum(map(machine.costs(comm.world).collective, launches))
    slowest = max(comm.exchange(whole - plain - known, "machine.times"))
    return max(0.0, slowest) / len(launches)


def _step_of_engine(device: torch.device, stage: int, between: Callable[[str], object] = len) -> float:
    import shardwise

    engine = shardwise.initialize(model=Decoder(_TINY), config=_config("fp32", stage)).engine

    def step() -> None:
        engine.backward(loss_of(engine(_short_batch(device))))
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
    return statistics.median(times)


def _short_batch(device: torch.device) -> torch.Tensor:
    return torch.zeros(_ROWS, _SHORT, dtype=torch.int64, device=device)


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
