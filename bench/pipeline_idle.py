"""Step time, idle share and activations of pipelines of throttled layers, measured and simulated.

    python bench/pipeline_idle.py [--nproc 2,4,6,8] [--micro-batches 16] [--schedules naive,gpipe,1f1b] [--uneven]

Each layer of the model sleeps for a set time in its forward pass, and in its gradients of inputs and of weights. So the
ranks of a pipeline do not compete for cores, and two cores suffice for eight ranks. Everything else is real: processes,
messages over Gloo, the order of actions, and the engine. The model has two layers for each rank, and the same time as a
whole for each number of ranks. With --uneven, layers take between 0.7 and 1.3 times the mean.

A run replaces the results of its schedules and numbers of ranks, and keeps the others. "step" is the time from the
first to the last computation of any rank; of --rounds steps the fastest counts, because other programs of the machine
only slow steps down. "idle" is the share of the step in which a rank computes nothing, "activations" the peak of the
accountant's category on any rank. Simulated figures are those of `shardwise.pipe.simulate` for the same times, with
messages of no duration.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from _jobs import answer, in_job, parser, ranks, read, start_group

SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "v-half", "dualpipe-v")
ROWS, WIDTH = 256, 64
UNEVEN = (1.0, 0.7, 1.3, 0.85, 1.15)
"""Times of consecutive layers over the mean, again from the begin after the last."""


def factors(options: argparse.Namespace, layers: int) -> list[float]:
    """Return the time of each layer over the mean of all."""
    found = [UNEVEN[number % len(UNEVEN)] if options.uneven else 1.0 for number in range(layers)]
    return [factor * layers / sum(found) for factor in found]


class Throttle:
    """Sleeps; the time by which one sleep is too long shortens the next."""

    def __init__(self) -> None:
        self.late = 0.0

    def __call__(self, seconds: float, begun: float | None = None) -> None:
        """Return `seconds` after `begun` (None: now)."""
        begun = time.perf_counter() if begun is None else begun
        time.sleep(max(0.0, begun + seconds - self.late - time.perf_counter()))
        self.late = min(max(0.0, self.late + time.perf_counter() - begun - seconds), seconds)


throttle = Throttle()


def layer_class() -> Any:
    """Return the class of a throttled layer; torch is imported in the job only."""
    import torch
    from torch import nn

    class Wait(torch.autograd.Function):
        """Identity, whose backward pass sleeps."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
            ctx.seconds = seconds
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            throttle(ctx.seconds)
            return gradient, None

    class Throttled(nn.Module):
        """A linear layer that takes `seconds` for its forward pass, and for each of its gradients."""

        def __init__(self, seconds: float) -> None:
            super().__init__()
            self.linear, self.seconds = nn.Linear(WIDTH, WIDTH, bias=False), seconds
            self.linear.weight.register_hook(lambda _: throttle(seconds))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            begun = time.perf_counter()
            output: torch.Tensor = Wait.apply(self.linear(x), self.seconds).tanh().tanh().tanh()
            throttle(self.seconds, begun)
            return output

    return Throttled


def engine_of(options: argparse.Namespace, schedule: str, world: int) -> Any:
    """Return the engine of a schedule: two layers for each rank."""
    import shardwise
    from shardwise.pipe import LayerSpec, PipelineModule
    from shardwise.pipeline.schedules import placement_of

    layer = layer_class()
    each = options.milliseconds / 1e3 / (2 * world)
    specs = [LayerSpec(layer, each * factor) for factor in factors(options, 2 * world)]
    stages = len(placement_of(schedule, world))
    model = PipelineModule(
        specs,
        num_stages=world,
        loss_fn=lambda output, _: output.mean(),
        partition_method=[2 * world // stages * number for number in range(stages + 1)],
    )
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": options.micro_batches,
        "pipeline": {"schedule": schedule, "chunks": stages // world},
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
    }
    return shardwise.initialize(model=model, config=config)[0]


def with_times_of(idle: Any, schedule: Any) -> float:
    """Return the simulated time of a step whose computations take their mean measured times."""
    from shardwise.pipe import Times, simulate
    from shardwise.pipeline.actions import COMPUTATIONS

    found = idle.by_stage()
    means = {op: [times.get(op, (0.0, 0))[0] for times in found.values()] for op in COMPUTATIONS}
    return simulate(schedule, Times(**{op.value: values for op, values in means.items()})).makespan


def measure(options: argparse.Namespace) -> None:
    """Run each schedule on this rank; rank 0 answers with figures by schedule."""
    import torch
    import torch.distributed as dist

    from shardwise.memory import Category, track_activations
    from shardwise.pipe import make_schedule

    start_group("shardwise")
    world = dist.get_world_size()
    data = [(torch.ones(ROWS, WIDTH), None)] * options.micro_batches
    found: dict[str, Any] = {}
    for schedule in options.chosen:
        engine = engine_of(options, schedule, world)
        engine.accountant.reset_peak()
        with track_activations(engine.accountant):
            engine.train_batch(iter(data))
        peak = torch.tensor(engine.accountant.peak[Category.ACTIVATIONS], dtype=torch.int64)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        made, runs = make_schedule(schedule, world, options.micro_batches), []
        for _ in range(options.rounds):
            with engine.record_idle() as idle:
                engine.train_batch(iter(data))
            runs.append((idle.duration, [share for _, share in sorted(idle.idle().items())], with_times_of(idle, made)))
        if options.pictures and dist.get_rank() == 0:
            idle.svg(f"{options.pictures}/{schedule}_{world}.svg", f"{schedule} on {world} ranks, measured")
        duration, shares, own = min(runs, key=lambda run: run[0])
        found[schedule] = {"step": duration, "idle": shares, "activations": int(peak), "own_times": own}
        engine.destroy()
    answer(found)


def simulated(options: argparse.Namespace, schedule: str, world: int) -> dict[str, Any]:
    """Return the figures of the simulator."""
    from shardwise.pipe import Times, make_schedule, simulate

    made = make_schedule(schedule, world, options.micro_batches)
    per_stage = 2 * world // made.stages
    each, layers = options.milliseconds / 1e3 / (2 * world), factors(options, 2 * world)
    times = [each * sum(layers[per_stage * n : per_stage * (n + 1)]) for n in range(made.stages)]
    # A stage keeps its input, three tensors of each layer, and after its input gradient two: those of the linear layer.
    tensor = ROWS * WIDTH * 4
    kept = [tensor * (3 * per_stage + (stage > 0)) for stage in range(made.stages)]
    found = simulate(made, Times(times, times, times), activations=kept, kept=2 * per_stage / (3 * per_stage + 1))
    return {"step": found.makespan, "idle": list(found.idle), "activations": max(found.peak)}


def row_of(schedule: str, world: int, measured: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """Return a row of results, and print it."""
    row = {
        "schedule": schedule,
        "ranks": world,
        "step_ms": measured["step"] * 1e3,
        "simulated_step_ms": expected["step"] * 1e3,
        "ratio": measured["step"] / expected["step"],
        "ratio_own_times": measured["step"] / measured["own_times"],
        "idle_share": statistics.mean(measured["idle"]),
        "simulated_idle_share": statistics.mean(expected["idle"]),
        "activations_mb": measured["activations"] / 1e6,
        "simulated_activations_mb": expected["activations"] / 1e6,
        "idle_by_rank": measured["idle"],
        "simulated_idle_by_rank": expected["idle"],
    }
    differs = max(abs(a - b) for a, b in zip(measured["idle"], expected["idle"], strict=True))
    print(
        f"{world} ranks {schedule:12s} step {row['step_ms']:6.0f} ms (simulated {row['simulated_step_ms']:6.0f}, "
        f"ratio {row['ratio']:.3f}; with the measured times of computations {row['ratio_own_times']:.3f})  "
        f"idle {row['idle_share']:5.1%} ({row['simulated_idle_share']:5.1%}, ranks differ by {differs:.1%} or less)  "
        f"activations {row['activations_mb']:5.2f} MB ({row['simulated_activations_mb']:5.2f})",
        flush=True,
    )
    return row


def key(row: dict[str, Any]) -> tuple[int, int]:
    """Return the place of a row in the results."""
    return row["ranks"], SCHEDULES.index(row["schedule"])


def main() -> None:
    """Run the schedules on each number of ranks, print the figures and keep them."""
    known = parser(__doc__)
    known.add_argument("--nproc", default="2,4,6,8", help="numbers of ranks, separated by commas")
    known.add_argument("--micro-batches", type=int, default=16)
    known.add_argument("--milliseconds", type=float, default=480.0, help="of a forward pass of the whole model")
    known.add_argument("--schedules", default=",".join(SCHEDULES))
    known.add_argument("--rounds", type=int, default=3, help="measured steps")
    known.add_argument("--uneven", action="store_true", help="layers take different times")
    known.add_argument("--pictures", help="leave a picture of a measured step of each schedule in this directory")
    options = read(known)
    options.chosen = options.schedules.split(",")
    if options.quick:
        options.nproc, options.micro_batches, options.rounds, options.milliseconds = "2", 2, 1, 8.0
    if in_job():
        measure(options)
        return
    from _machine import save

    name = f"pipeline_idle_m{options.micro_batches}" + ("_uneven" if options.uneven else "")
    file = options.results / f"{name}.json"
    rows = {key(row): row for row in json.loads(file.read_text())["rows"]} if file.exists() else {}
    for world in map(int, options.nproc.split(",")):
        found = ranks(world)
        for schedule in options.chosen:
            row = row_of(schedule, world, found[schedule], simulated(options, schedule, world))
            rows[key(row)] = row
        save(options.results, name, [rows[place] for place in sorted(rows)])


if __name__ == "__main__":
    main()
