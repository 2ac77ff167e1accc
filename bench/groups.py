"""What is sent within and between groups of ranks, and the time of a step, of HSDP and its like.

    python bench/groups.py [--nproc 4] [--size 27M] [--dtype bf16] [--accumulation 4]

Groups of two neighbouring ranks stand for nodes; all ranks are on this machine. Bytes are those of the collectives that
a rank launches in a step, divided by the number of parameters; those of a collective over several groups are counted as
if each rank sent directly to each other one, which is what shardwise does on CPU. FSDP2's are counted as its
collectives reach torch's dispatcher, shardwise's by its ledger. Systems take turns as in step_time.py.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

from _jobs import answer, contest, in_job, ranks, read, start_group

FACTORS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
"""How often each byte of a buffer crosses: sent to where it is summed, or to all, or both."""


def split(size: int, members: Sequence[int], group: int, op: str) -> tuple[float, float]:
    """Return the bytes that a rank of a collective over some ranks sends within its group, and to others."""
    import torch.distributed as dist

    own = dist.get_rank() // group
    near = sum(1 for member in members if member // group == own) - 1
    share = FACTORS[op] * size / len(members)
    return share * near, share * (len(members) - 1 - near)


def counter() -> Any:
    """Return a dispatch mode that keeps (operation, bytes of the whole buffer, ranks) of each collective."""
    import torch
    import torch.distributed as dist
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


def sent(run: Any, group: int) -> tuple[float, float]:
    """Make one step; return the bytes within and between groups."""
    import torch.distributed as dist

    world, rank = dist.get_world_size(), dist.get_rank()
    members = {
        "shard": [group * (rank // group) + place for place in range(group)],
        "replicate": list(range(rank % group, world, group)),
        "data_parallel": list(range(world)),
    }
    found = []
    if run.ledger is None:
        with counter() as counted:
            run.step()
        found = counted.seen
    else:
        run.finish()
        first = run.ledger.sequence
        run.step()
        run.finish()
        records = [r for r in run.ledger.records(since=first) if r.op in FACTORS and r.size > 4096]
        found = [(record.op, record.size, members[record.group]) for record in records]
    parts = [split(size, ranks, group, op) for op, size, ranks in found]
    return sum(part[0] for part in parts), sum(part[1] for part in parts)


def measure(options: argparse.Namespace) -> None:
    """Take turns on this rank; rank 0 answers with seconds a step, and bytes."""
    import torch
    import torch.distributed as dist
    from _systems import GROUP, GROUPED, Case

    start_group("shardwise")
    case = Case(options.shape, options.dtype == "bf16", options.accumulation)
    runs = {name: make(case) for name, make in GROUPED.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(-2, options.rounds):
        for name in runs if turn % 2 == 0 else reversed(runs):
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(options.steps):
                runs[name].step()
            runs[name].finish()
            total = torch.tensor((time.perf_counter() - begin) / options.steps)
            dist.all_reduce(total)
            if turn >= 0:
                seconds[name].append(total.item() / dist.get_world_size())
    amounts = {}
    for name, run in runs.items():
        dist.barrier()
        amounts[name] = [size / case.size.parameters for size in sent(run, GROUP)]
    answer({"seconds": seconds, "bytes": amounts})


def main() -> None:
    """Run the contest, print the table and keep it."""
    parser = contest(__doc__, size="27M", dtype="bf16", nproc=4, rounds=4)
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps in a turn")
    options = read(parser)
    if in_job():
        measure(options)
        return
    from _machine import save

    found = ranks(options.nproc)
    medians = {name: statistics.median(turns) for name, turns in found["seconds"].items()}
    base = medians["FSDP2 groups"]
    rows = [
        {
            "system": name,
            "median_ms": median * 1e3,
            "ratio": median / base,
            "bytes_within": found["bytes"][name][0],
            "bytes_between": found["bytes"][name][1],
        }
        for name, median in medians.items()
    ]
    for row in rows:
        print(
            f"{row['system']:40s} {row['median_ms']:6.0f} ms  ratio {row['ratio']:.2f}  "
            f"within {row['bytes_within']:6.2f}  between {row['bytes_between']:5.2f} bytes a parameter"
        )
    save(
        options.results,
        f"groups_{options.size}_{options.dtype}_{options.nproc}_accumulation{options.accumulation}",
        rows,
        rounds=options.rounds,
        steps_per_round=options.steps,
        ratios_to="FSDP2 groups",
    )


if __name__ == "__main__":
    main()
