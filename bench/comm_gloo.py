"""Collectives of an engine on Gloo ranks of one machine, through messages and through memory, and torch's own.

    python bench/comm_gloo.py [--worlds 2 4] [--repeat 15]

For each operation, number of ranks and size of the whole buffer: milliseconds of the slowest rank, fastest of
`--repeat` rounds (the median is in the JSON too). The candidates of a row take turns within a round, so that
load from elsewhere falls on all of them. Results: bench/results/comm_gloo.json.
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _jobs import parser, read
from _machine import save

from shardwise.comm.communicator import Communicator
from shardwise.comm.intra_node_transport import VARIABLE
from shardwise.comm.ledger import Ledger
from shardwise.compat import all_gather_single, reduce_scatter_single

KIB = 1024
SIZES = [4 * KIB, 64 * KIB, KIB * KIB, 8 * KIB * KIB, 32 * KIB * KIB]

Launch = Callable[[], Any]


def communicators() -> dict[str, Communicator]:
    """Return one that sends messages, and one that reads its peers' memory."""
    found = {}
    for name in ("messages", "memory"):
        os.environ[VARIABLE] = name
        found[name] = Communicator(None, Ledger(), torch.device("cpu"), name=name)
    return found


def candidates(op: str, size: int, comms: dict[str, Communicator]) -> dict[str, Launch]:
    """The ways to do `op` on a buffer of `size` bytes; each returns a handle with `wait()`."""
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    full = torch.randn(size // 4)
    half = full.bfloat16()
    piece = full.numel() // world
    own = full[rank * piece : (rank + 1) * piece]
    out = torch.zeros(piece)
    if op == "all_gather":
        found: dict[str, Launch] = {"torch": lambda: all_gather_single(full, own, group=group, async_op=True)}
        ours = {"": lambda comm: comm.all_gather([(full, own)], op)}
    else:
        found = {"torch": lambda: reduce_scatter_single(out, full, group=group, async_op=True)}
        ours = {
            "": lambda comm: comm.reduce_scatter([(out, full)], op),
            ", bf16": lambda comm: comm.reduce_scatter([(out, half)], op),
        }
    for name, comm in comms.items():
        for suffix, launch in ours.items():
            found[name + suffix] = functools.partial(launch, comm)
    return found


def measure(op: str, size: int, repeat: int, comms: dict[str, Communicator]) -> dict[str, dict[str, float]]:
    """Milliseconds (min and median over rounds) of the slowest rank, per candidate."""
    launches = candidates(op, size, comms)
    times: dict[str, list[float]] = {name: [] for name in launches}
    inner = max(1, min(20, (1 << 20) // size))
    for round_number in range(repeat + 1):
        for place in range(len(launches)):
            # Another order in each round: on a busy machine the scheduler favours some places over others.
            name, launch = list(launches.items())[(place + round_number) % len(launches)]
            dist.barrier()
            start = time.perf_counter()
            for _ in range(inner):
                launch().wait()
            elapsed = torch.tensor([time.perf_counter() - start])
            dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
            if round_number:  # the first round warms up
                times[name].append(elapsed.item() * 1e3 / inner)
    return {name: {"min": min(ms), "median": statistics.median(ms)} for name, ms in times.items()}


def work(rank: int, world: int, port: int, repeat: int, results: Any) -> None:
    """One rank: all operations and sizes."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    comms = communicators()
    for op in ("all_gather", "reduce_scatter"):
        for size in SIZES:
            times = measure(op, size, repeat, comms)
            if rank == 0:
                results.put({"op": op, "ranks": world, "bytes": size, "ms": times})
    for comm in comms.values():
        comm.destroy()
    dist.destroy_process_group()


def show(row: dict[str, Any]) -> None:
    """Print one row: the milliseconds of each candidate and how much faster than torch the others are."""
    base = row["ms"]["torch"]["min"]
    cells = [f"torch {base:8.3f}"]
    for name, ms in row["ms"].items():
        if name != "torch":
            cells.append(f"{name} {ms['min']:8.3f} ({base / ms['min']:4.1f}x)")
    print(f"{row['op']:15}{row['ranks']:3} ranks {row['bytes'] // KIB:7} KiB   " + "   ".join(cells), flush=True)


def main() -> None:
    """Run the benchmark and save its rows."""
    found = parser(__doc__)
    found.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    found.add_argument("--repeat", type=int, default=15)
    found.add_argument("--name", default="comm_gloo", help="name of the JSON file")
    options = read(found)
    if options.quick:
        options.worlds, options.repeat = [2], 1
    torch.set_num_threads(1)
    rows = []
    for world in options.worlds:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        results = mp.get_context("spawn").SimpleQueue()
        context = mp.start_processes(
            work, (world, store.port, options.repeat, results), nprocs=world, join=False, start_method="spawn"
        )
        while not context.join(timeout=0.2):
            while not results.empty():
                rows.append(results.get())
                show(rows[-1])
        while not results.empty():
            rows.append(results.get())
            show(rows[-1])
    print("written:", save(options.results, options.name, rows, unit="milliseconds of the slowest rank"))


if __name__ == "__main__":
    main()
