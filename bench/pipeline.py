"""Training steps of pipelines: beside other systems, and of throttled layers beside the simulator.

    python bench/pipeline.py [--nproc 2] [--size 27M] [--micro-batches 8] [--systems "torch 1f1b;shardwise 1f1b"]
    python bench/pipeline.py --what idle [--ranks 2,4,6,8] [--micro-batches 16] [--systems "naive;1f1b"] [--uneven]

*contest*: torch.distributed.pipelining and DeepSpeed beside shardwise. All systems are built in the same processes,
with the same layers, cuts and data, and take turns, forwards and backwards through the list. Each rank is one stage
(two for schedules with several chunks). A turn is some steps of all micro-batches with a fused AdamW step. "idle" is
the share of the batch in which a rank computes nothing (of this library, measured around each computation); "memory"
is the highest resident size of a rank in a turn over that before. The ratio is to the best of the other systems.

*idle*: each layer of the model sleeps for a set time in its forward pass, and in its gradients of inputs and of
weights. So the ranks of a pipeline do not compete for cores, and two cores suffice for eight ranks. Everything else is
real: processes, messages over Gloo, the order of actions, and the engine. The model has two layers for each rank, and
the same time as a whole for each number of ranks. With --uneven, layers take between 0.7 and 1.3 times the mean. "step"
is the time from the first to the last computation of any rank; of --rounds steps the fastest counts, because other
programs of the machine only slow steps down. "idle" is the share of the step in which a rank computes nothing,
"activations" the peak of the accountant's category on any rank. Simulated figures are those of
`shardwise.pipe.simulate` for the same times, with messages of no duration.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import (
    Device,
    Row,
    data_of,
    group_of,
    job,
    medians,
    options_of,
    over_ranks,
    save,
    serve,
    show,
    spent,
    turns,
)
from systems import SIZES, Block, config_of, installed
from torch import nn

SYSTEMS = [
    *(f"shardwise {name}" for name in ("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zbv")),
    *(f"torch {name}" for name in ("gpipe", "1f1b", "interleaved", "zbv")),
    "DeepSpeed",
]
CHUNKS = {"interleaved": 2, "zbv": 2}


def layers(size: Any) -> list[tuple[Any, ...]]:
    """Return class and arguments of each layer."""

    class Tokens(nn.Module):
        def __init__(self, vocabulary: int, length: int, width: int) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))

    class Head(nn.Module):
        def __init__(self, width: int, vocabulary: int) -> None:
            super().__init__()
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(self.norm(x), self.head.weight)

    blocks = [(Block, size.width, size.heads) for _ in range(size.layers)]
    first, last = (Tokens, size.vocabulary, size.length, size.width), (Head, size.width, size.vocabulary)
    return [first, *blocks, last]


def loss_of(output: Any, ids: Any) -> Any:
    """Return the mean cross-entropy."""
    return F.cross_entropy(output.flatten(0, 1).float(), ids.flatten())


def cuts(count: int, stages: int) -> list[int]:
    """Return the first layer of each stage, and the number of layers: blocks are spread evenly."""
    blocks = count - 2
    return [0, *(1 + blocks * stage // stages for stage in range(1, stages)), count]


def batches(options: argparse.Namespace) -> list[Any]:
    """Return the micro-batches of a step."""
    generator = torch.Generator().manual_seed(1)
    size = SIZES[options.size]
    return [
        torch.randint(0, size.vocabulary, (size.rows, size.length), generator=generator)
        for _ in range(options.micro_batches)
    ]


def of_engine(options: argparse.Namespace, name: str, library: str = "shardwise") -> tuple[Callable[[], Any], Any]:
    """Return a function that makes a step of shardwise or DeepSpeed, and shardwise's engine."""
    root, pipe = importlib.import_module(library), importlib.import_module(f"{library}.pipe")
    size, chunks, is_ours = SIZES[options.size], CHUNKS.get(name, 1), library == "shardwise"
    specs = [pipe.LayerSpec(*layer) for layer in layers(size)]
    config = config_of(size.rows, gradient_accumulation_steps=options.micro_batches)
    if is_ours:
        config["pipeline"] = {"schedule": name, "chunks": chunks}
    else:
        root.init_distributed("gloo")
        config["optimizer"]["params"] |= {"torch_adam": True, "fused": True}  # as the others have
        config["steps_per_print"] = 10**9
    parts = cuts(len(specs), options.nproc * chunks) if is_ours else "uniform"
    model = pipe.PipelineModule(specs, num_stages=options.nproc, loss_fn=loss_of, partition_method=parts)
    engine = root.initialize(model=model, config=config)[0]
    data = [(ids, ids) for ids in batches(options)]
    return lambda: engine.train_batch(iter(data)), engine if is_ours else None


def of_torch(options: argparse.Namespace, name: str) -> tuple[Callable[[], Any], Any]:
    """Return a function that makes a step."""
    from torch.distributed import pipelining

    rank, world, chunks = dist.get_rank(), options.nproc, CHUNKS.get(name, 1)
    specs = layers(SIZES[options.size])
    stages, edges = world * chunks, cuts(len(specs), world * chunks)
    own = [rank, 2 * world - 1 - rank] if name == "zbv" else [rank + world * chunk for chunk in range(chunks)]
    parts = [nn.Sequential(*(cls(*args) for cls, *args in specs[edges[n] : edges[n + 1]])) for n in own]
    made = [
        pipelining.PipelineStage(part, number, stages, torch.device("cpu"))
        for number, part in zip(own, parts, strict=True)
    ]
    optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=1e-4, fused=True)
    kinds = {
        "gpipe": pipelining.ScheduleGPipe,
        "1f1b": pipelining.Schedule1F1B,
        "interleaved": pipelining.ScheduleInterleaved1F1B,
        "zbv": pipelining.ScheduleZBVZeroBubble,
    }
    several = chunks > 1
    schedule = kinds[name](made if several else made[0], options.micro_batches, loss_fn=loss_of)
    ids = torch.cat(batches(options))
    first, last = 0 in own, stages - 1 in own

    def step() -> None:
        optimizer.zero_grad()
        schedule.step(*([ids] if first else []), **({"target": ids, "losses": []} if last else {}))
        optimizer.step()

    return step, None


def turn_of(step: Callable[[], Any], steps: int) -> dict[str, float]:
    """Make some steps; return seconds a step, and the memory that they take, of the worst rank."""
    figures: dict[str, float] = {}

    def train() -> None:
        for _ in range(steps):
            step()
        dist.barrier()

    memory = Device("cpu").taken(lambda: figures.update(spent(train)))
    return over_ranks({"step": figures["wall"] / steps, "memory": memory}, "max")


def contest(options: argparse.Namespace) -> list[Row]:
    """Take turns on this rank; return a row for each system."""
    of_peer = functools.partial(of_engine, library="deepspeed")
    makers = {"shardwise": of_engine, "torch": of_torch, "DeepSpeed": of_peer}
    runs = {}
    for system in options.systems.split(";"):
        kind, _, name = system.partition(" ")
        runs[system] = makers[kind](options, name)
    found = turns(
        {name: functools.partial(turn_of, step, options.steps) for name, (step, _) in runs.items()}, options.rounds
    )
    middle = {name: medians(figures) for name, figures in found.items()}
    best = min(
        (figures["step"] for name, figures in middle.items() if not name.startswith("shardwise")),
        default=min(figures["step"] for figures in middle.values()),
    )
    rows: list[Row] = []
    for name, (step, engine) in runs.items():
        figures = middle[name]
        row: Row = {"system": name, "median_ms": figures["step"] * 1e3, "ratio": figures["step"] / best}
        if engine is not None:
            with engine.record_idle() as times:
                step()
            row["idle_share"] = times.idle_share
        rows.append(row | {"memory_mb": figures["memory"] / 1e6})
    return rows


# -- throttled layers --------------------------------------------------------------------------------------------------

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


class Wait(torch.autograd.Function):
    """Identity, whose backward pass sleeps."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        """Return x."""
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Return the gradient after a while."""
        throttle(ctx.seconds)
        return gradient, None


class Throttled(nn.Module):
    """A linear layer that takes `seconds` for its forward pass, and for each of its gradients."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(WIDTH, WIDTH, bias=False), seconds
        self.linear.weight.register_hook(lambda _: throttle(seconds))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer, and sleep."""
        begun = time.perf_counter()
        output: torch.Tensor = Wait.apply(self.linear(x), self.seconds).tanh().tanh().tanh()
        throttle(self.seconds, begun)
        return output


def throttled_engine(options: argparse.Namespace, schedule: str, world: int) -> Any:
    """Return the engine of a schedule: two layers for each rank."""
    import shardwise
    from shardwise.pipe import LayerSpec, PipelineModule
    from shardwise.pipeline.schedules import placement_of

    each = options.milliseconds / 1e3 / (2 * world)
    specs = [LayerSpec(Throttled, each * factor) for factor in factors(options, 2 * world)]
    stages = len(placement_of(schedule, world))
    model = PipelineModule(
        specs,
        num_stages=world,
        loss_fn=lambda output, _: output.mean(),
        partition_method=[2 * world // stages * number for number in range(stages + 1)],
    )
    config = config_of(
        1,
        gradient_accumulation_steps=options.micro_batches,
        pipeline={"schedule": schedule, "chunks": stages // world},
        optimizer={"type": "SGD", "params": {"lr": 1e-3}},
    )
    return shardwise.initialize(model=model, config=config)[0]


def throttled_steps(options: argparse.Namespace) -> Row:
    """Run each schedule on this rank; return figures by schedule."""
    from shardwise.memory import Category, track_activations

    world = dist.get_world_size()
    data = [(torch.ones(ROWS, WIDTH), None)] * options.micro_batches
    found: dict[str, Any] = {}
    for schedule in options.systems.split(";"):
        engine = throttled_engine(options, schedule, world)
        engine.accountant.reset_peak()
        with track_activations(engine.accountant):
            engine.train_batch(iter(data))
        peak = over_ranks({"": engine.accountant.peak[Category.ACTIVATIONS]}, "max")[""]
        runs = []
        for _ in range(options.rounds):
            with engine.record_idle() as idle:
                engine.train_batch(iter(data))
            runs.append((idle.duration, [share for _, share in sorted(idle.idle().items())]))
        if options.pictures and dist.get_rank() == 0:
            idle.svg(f"{options.pictures}/{schedule}_{world}.svg", f"{schedule} on {world} ranks, measured")
        duration, shares = min(runs, key=lambda run: run[0])
        found[schedule] = {"step": duration, "idle": shares, "activations": peak}
        engine.destroy()
    return found


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


def row_of(schedule: str, world: int, measured: Row, expected: Row) -> Row:
    """Return a row of results."""
    layers = "0.7 to 1.3 times the mean" if measured["uneven"] else "equal"
    idle, simulated_idle = measured["idle"], expected["idle"]
    share, simulated_share = statistics.mean(idle), statistics.mean(simulated_idle)
    return {
        "system": schedule,
        "setting": {"ranks": world, "layers": layers},
        "step_s": measured["step"],
        "simulated_step_s": expected["step"],
        "ratio": measured["step"] / expected["step"],
        "idle_share": share,
        "simulated_idle_share": simulated_share,
        "idle_differs_percent": 100 * abs(share - simulated_share),
        "rank_idle_differs_percent": 100 * max(abs(a - b) for a, b in zip(idle, simulated_idle, strict=True)),
        "activations_mb": measured["activations"] / 1e6,
        "simulated_activations_mb": expected["activations"] / 1e6,
    }


def main() -> None:
    """Measure, print the figures and keep them."""
    # The smallest model has too few layers for several stages a rank.
    fit = [name for name in installed(SYSTEMS) if name.partition(" ")[2] not in CHUNKS and name != "DeepSpeed"]
    options = options_of(__doc__, **data_of("options.toml")["pipeline"])
    group = group_of("torch" if options.what == "contest" and "shardwise" not in options.systems else "shardwise")
    serve(contest if options.what == "contest" else throttled_steps, options, group)
    if options.what == "contest":
        names = options.systems or ";".join(fit if options.quick else installed(SYSTEMS))
        rows = job(options.nproc, "--systems", names)
        show(rows)
        name = f"pipeline_{options.size}_fp32_{options.nproc}_m{options.micro_batches}"
        save(options, name, rows, rounds=options.rounds)
    else:
        names = options.systems or ";".join(SCHEDULES)
        rows = []
        for world in map(int, options.ranks.split(",")):
            found = job(world, "--systems", names)
            for schedule in names.split(";"):
                measured = {**found[schedule], "uneven": options.uneven}
                rows.append(row_of(schedule, world, measured, simulated(options, schedule, world)))
            show(rows[-len(found) :])
        save(options, f"pipeline_idle_m{options.micro_batches}" + "_uneven" * options.uneven, rows)


if __name__ == "__main__":
    main()
