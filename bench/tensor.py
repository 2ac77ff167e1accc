"""Tensor parallelism beside torch's own: time of a step, memory and losses of the same GPT on 4 ranks.

    python bench/tensor.py [--size 27M] [--dtype fp32|bf16] [--only time,memory] [--systems "TP 4,shardwise 1 + TP 4"]

Matrices are divided over 2 ranks of which there are 2 pairs, or over all 4. torch's own is `parallelize_module`, and
FSDP2 over the ranks with the same part; shardwise has ZeRO stages over these. Queries, keys, values and the first layer
of each MLP are divided by output features, the layers after them by input features, and the output layer by words,
whose logits are put together; embeddings and norms are whole.

*time*: all systems take turns of `--steps` steps in one job, forwards and then backwards through the list, as in
step_time.py. Their losses after equally many steps are compared. *memory*: as in memory.py, of each in a job of its
own: highest resident size above the bare process, of the worst rank, over the parameters of the whole model.

Ratios are to torch's own over as many ranks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from _jobs import answer, bare_size, contest, forget_peak, in_job, ranks, read, resident, start_group, worst

MEMORY_STEPS = 3
PARTS = ("time", "memory")


def measure_time(options: argparse.Namespace) -> None:
    """Take turns on this rank; rank 0 answers with seconds a step, on the wall and of the processor, and losses."""
    import torch
    import torch.distributed as dist
    from _systems import TENSOR, Case

    start_group("shardwise")
    runs = {}
    for name in options.systems:
        size, make = TENSOR[name]
        runs[name] = make(Case(options.shape, options.dtype == "bf16", tensor=size))
    seconds: dict[str, list[list[float]]] = {name: [] for name in runs}
    for turn in range(-2, options.rounds):
        for name in runs if turn % 2 == 0 else reversed(runs):
            dist.barrier()
            wall, processor = time.perf_counter(), time.process_time()
            for _ in range(options.steps):
                runs[name].step()
            runs[name].finish()
            spent = [time.perf_counter() - wall, time.process_time() - processor]
            total = torch.tensor(spent, dtype=torch.float64)
            dist.all_reduce(total)
            if turn >= 0:
                seconds[name].append((total / options.steps / dist.get_world_size()).tolist())
    losses = {}
    for name, run in runs.items():
        with torch.no_grad():
            loss = run.loss().detach().double()
        dist.all_reduce(loss)
        losses[name] = loss.item() / dist.get_world_size()
    answer({"seconds": seconds, "losses": losses})


def measure_memory(options: argparse.Namespace) -> None:
    """Run one system on this rank; rank 0 answers with the worst rank's bytes."""
    import torch.distributed as dist
    from _systems import TENSOR, Case

    (system,) = options.systems
    size, make = TENSOR[system]
    case = Case(options.shape, options.dtype == "bf16", tensor=size)
    start_group(system)
    bare = bare_size(make, case)
    forget_peak()
    run = make(case)
    built = resident("VmHWM")
    forget_peak()
    for _ in range(MEMORY_STEPS):
        run.step()
    tracked = run.accountant.peak_total if run.accountant is not None else 0
    peak, building, tracked = worst(resident("VmHWM") - bare, built - bare, tracked)
    answer({"peak": peak, "building": building, "tracked": tracked or None})
    if dist.is_initialized():
        dist.destroy_process_group()  # torch aborts where a process ends with the groups of a mesh


def rows_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure, and return a row of figures for each system."""
    from _systems import TENSOR

    only = options.only.split(",")
    found: dict[str, dict[str, Any]] = {name: {"system": name} for name in options.systems}
    if "time" in only:
        told = ranks(options.nproc, "--role", "time")
        for name, row in found.items():
            turns = told["seconds"][name]
            wall, processor = (statistics.median(turn[column] for turn in turns) * 1e3 for column in range(2))
            lowest, highest = (pick(turn[0] for turn in turns) * 1e3 for pick in (min, max))
            row |= {"median_ms": wall, "lowest_ms": lowest, "highest_ms": highest, "processor_ms": processor}
            row["loss"] = told["losses"][name]
            row["turns_ms"] = [turn[0] * 1e3 for turn in turns]
    if "memory" in only:
        parameters = options.shape.parameters
        for name, row in found.items():
            told = ranks(options.nproc, "--role", "memory", "--systems", name)
            row |= {field: value and value / parameters for field, value in told.items()}
    bases: dict[int, dict[str, Any]] = {}
    for name, row in found.items():
        base = bases.setdefault(TENSOR[name][0], row)
        if "time" in only:
            pairs = list(zip(row["turns_ms"], base["turns_ms"], strict=True))
            row["ratio"] = statistics.median(own / other for own, other in pairs)
            row["processor_ratio"] = row["processor_ms"] / base["processor_ms"]
            row["loss_differs"] = abs(row["loss"] / base["loss"] - 1)
        if "memory" in only:
            row["memory_ratio"] = row["peak"] / base["peak"]
    return list(found.values())


def show(row: dict[str, Any]) -> str:
    """Return a row as a line."""
    line = f"{row['system']:18s}"
    if "ratio" in row:
        line += (
            f"  median {row['median_ms']:6.0f} ms ({row['lowest_ms']:6.0f} to {row['highest_ms']:6.0f})  "
            f"ratio {row['ratio']:.2f}  processor ratio {row['processor_ratio']:.2f}  "
            f"loss {row['loss']:.5f} (differs by {row['loss_differs']:.0e})"
        )
    if "peak" in row:
        line += f"  peak {row['peak']:5.2f} B/parameter  ratio {row['memory_ratio']:.2f}"
    return line


def main() -> None:
    """Run the contest, print the table and keep it."""
    from _systems import TENSOR

    parser = contest(__doc__, size="27M", dtype="fp32", nproc=4, rounds=8)
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps in a turn")
    parser.add_argument("--only", default=",".join(PARTS), help="what is measured, separated by commas")
    parser.add_argument("--role", choices=PARTS, help=argparse.SUPPRESS)
    asked = parser.parse_args().systems
    options = read(parser)
    options.systems = asked.split(",") if asked else list(TENSOR)
    if in_job():
        measure_time(options) if options.role == "time" else measure_memory(options)
        return
    from _machine import save

    rows = rows_of(options)
    for row in rows:
        print(show(row))
    save(
        options.results,
        f"tensor_{options.size}_{options.dtype}_{options.nproc}",
        rows,
        rounds=options.rounds,
        steps_per_round=options.steps,
        memory_steps=MEMORY_STEPS,
        ratios_to="torch's own over as many ranks",
    )


if __name__ == "__main__":
    main()
