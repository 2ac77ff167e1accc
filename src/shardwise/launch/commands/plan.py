"""`shardwise plan`: memory plan of a training job on many ranks, made in one process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.errors import CommandLineError, UsageError
from shardwise.launch.console import parse_bytes
from shardwise.launch.options import command_of

if TYPE_CHECKING:
    from torch import nn

    from shardwise.config import Resolution
    from shardwise.engine.plans import MemoryPlans, Room, SettingPlan
    from shardwise.plan.clock import Rates
    from shardwise.plan.time import TimePlan

_MEASURED_S = 30.0
"""Seconds for operators of a model that the rates of this machine lack."""


def register(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command("plan")(command_of(Request, plan))


@dataclass(frozen=True)
class Request:
    """What is planned; the options of `shardwise plan` are made from these fields."""

    models: Annotated[
        tuple[str, ...],
        typer.Argument(
            help="bloom-560m, bloom-1b1, bloom-7b1, llama-7b, llama-13b, llama-70b, or module:function of your own, "
            "which is called without arguments and returns a module that takes token ids.",
            metavar="MODEL...",
        ),
    ]
    ranks: Annotated[int, typer.Option(metavar="N", help="Ranks of the job.")] = 8
    stages: Annotated[
        str | None, typer.Option(metavar="LIST", help="ZeRO stages; default: 0,1,2,3, of a pipeline 1.")
    ] = None
    pp: Annotated[
        int | None, typer.Option("--pp", metavar="N", help="Ranks of a pipeline; default: as configured, else none.")
    ] = None
    schedule: Annotated[
        str | None, typer.Option(metavar="NAME", help="Schedule of the pipeline; default: as configured, else 1f1b.")
    ] = None
    chunks: Annotated[
        int | None, typer.Option(metavar="V", help="Stages of each rank; default: the fewest that the schedule has.")
    ] = None
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="Configuration; default: AdamW in the precision given.")
    ] = None
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16, without a configuration.")] = "fp32"
    micro_batch: Annotated[int, typer.Option(metavar="N", help="Sequences in a micro-batch.")] = 1
    accumulation: Annotated[
        int, typer.Option("--accumulation", "--micro-batches", metavar="N", help="Micro-batches in a step.")
    ] = 1
    length: Annotated[int, typer.Option(metavar="N", help="Tokens in a sequence; 0: no activations.")] = 512
    device_limit: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory of a rank's device, such as 80GiB: marks the stages that fit."),
    ] = None
    host_limit: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory of a machine.")] = None
    disk_limit: Annotated[str | None, typer.Option(metavar="SIZE", help="Free space of a machine's disk.")] = None
    local_ranks: Annotated[
        int | None, typer.Option(metavar="N", help="Ranks that share a machine; default: all, with --card 8.")
    ] = None
    disk_speed: Annotated[
        str | None,
        typer.Option(metavar="READ,WRITE", help="GB/s of a rank's disk, to estimate the time of offloading per step."),
    ] = None
    time: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Rates of `shardwise bench machine`: the time of a step is planned, too."),
    ] = None
    card: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Card, such as h100: the time of a step is planned from its data sheet."),
    ] = None
    link: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Link between machines, such as infiniband-ndr, or 8xinfiniband-ndr."),
    ] = None
    slowest: Annotated[
        float, typer.Option(metavar="FACTOR", help="One rank takes so many times as long to compute.")
    ] = 1.0
    recompute: Annotated[bool, typer.Option("--recompute", help="Recompute the layers of the named models.")] = False
    page: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Write a page on which settings of the models are tried out in a browser. Of the other options only "
            "--config has a meaning then.",
        ),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print bytes as one JSON object.")] = False

    def __post_init__(self) -> None:
        if self.precision not in ("fp32", "bf16", "fp16"):
            raise CommandLineError(f"--precision {self.precision}: give fp32, bf16 or fp16.")
        counts = (self.ranks, self.micro_batch, self.accumulation, self.pp, self.chunks)
        if min(count for count in counts if count is not None) < 1 or self.length < 0:
            raise CommandLineError(
                "--ranks, --micro-batch, --accumulation, --pp and --chunks are 1 or more, --length 0 or more."
            )
        if self.slowest < 1:
            raise CommandLineError(f"--slowest {self.slowest}: give 1 or more.")
        self.speeds()  # refused before the long work
        self.rates()

    def chosen(self, default: str) -> list[int]:
        """Return the ZeRO stages. Raises CommandLineError."""
        stages = self.stages or default
        found = [int(stage) for stage in stages.split(",") if stage in ("0", "1", "2", "3")]
        if len(found) != len(stages.split(",")):
            raise CommandLineError(f"--stages {stages}: give some of 0, 1, 2 and 3, with commas.")
        return found

    def rooms(self) -> list[Room]:
        """Return the bytes available to one rank. Raises CommandLineError."""
        from shardwise.engine.plans import Room
        from shardwise.memory import Tier

        sharers = self.local_ranks or self.ranks
        limits = (
            (Tier.DEVICE, self.device_limit, 1),
            (Tier.HOST, self.host_limit, sharers),
            (Tier.DISK, self.disk_limit, sharers),
        )
        return [
            Room((tier,), parse_bytes(written, f"--{tier.value}-limit") // ranks)
            for tier, written, ranks in limits
            if written is not None
        ]

    def speeds(self) -> tuple[float, float] | None:
        """Return the bytes/s that a rank reads from and writes to its disk. Raises CommandLineError."""
        if self.disk_speed is None:
            return None
        try:
            read, write = (float(part) * 1e9 for part in self.disk_speed.split(","))
        except ValueError:
            read = write = 0.0
        if min(read, write) <= 0:
            raise CommandLineError(
                f"--disk-speed {self.disk_speed}: give two numbers above 0, GB/s of reading and of writing."
            )
        return read, write

    def rates(self) -> Rates | None:
        """Return how fast the machines are; None: no time is planned. Raises CommandLineError."""
        if self.card is None:
            if self.link is not None:
                raise CommandLineError("--link is of cards from data sheets: give --card, too.")
            from shardwise.plan.rates import Machine

            return None if self.time is None else Machine.load(self.time)
        if self.time is not None:
            raise CommandLineError("--time has measured rates, and --card those of a data sheet: give one of them.")
        from shardwise.plan.cluster import Cluster

        try:
            return Cluster.of(self.card, self.link, self.local_ranks or min(self.ranks, 8))
        except UsageError as error:
            raise CommandLineError(f"{error}.") from None

    def settings(self) -> dict[str, Any]:
        """Return the configuration, or the default one, with the batch and pipeline of the options."""
        from shardwise.config import load

        settings: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
        if self.precision != "fp32":
            settings[self.precision] = {"enabled": True}
        if self.config is not None:
            settings = load(self.config)
        settings = {
            **{key: value for key, value in settings.items() if key != "train_batch_size"},
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.accumulation,
        }
        pipeline = {"stages": self.pp, "schedule": self.schedule, "chunks": self.chunks}
        if given := {key: value for key, value in pipeline.items() if value is not None}:
            settings["pipeline"] = {**settings.get("pipeline", {}), **given}
        return settings


def plan(request: Request) -> None:
    """Print the memory of one rank at each ZeRO stage, from a dry run of an accumulation window on fake tensors.

    No job and no device is needed; the fake tensors are CPU tensors. Sizes are in powers of 10, with the unit in the
    heading. For state that the configuration offloads, the memory of host and disk and the bytes per step are printed,
    too. Your own module is called with token ids of shape (sequences, tokens).

    Of a pipeline (--pp, or pipeline.stages of the configuration) each rank of the pipeline has a row, and the simulated
    idle time of the schedule is printed. Your own module is then a PipelineModule, with token ids as inputs and labels,
    or a model of transformers.
    """
    from shardwise.config import resolve
    from shardwise.engine.plans import plan_model
    from shardwise.pipe import PipelineModule
    from shardwise.plan.models import micro_batch, named_model
    from shardwise.plan.text import time_lines
    from shardwise.plan.time import plan_times

    if request.page is not None:
        _write_page(request, request.page)
        return
    rooms, settings, rates = request.rooms(), request.settings(), request.rates()
    resolution = resolve(settings, world_size=request.ranks)
    configured = resolution.config.pipeline.stages not in ("auto", 1)
    found: dict[str, Any] = {}
    for name in request.models:
        model = named_model(name, request.recompute, pipeline=configured)
        pipeline = configured or isinstance(model, PipelineModule)
        if not pipeline and (request.schedule is not None or request.chunks is not None):
            raise CommandLineError(f"--schedule and --chunks are of pipelines, and {name} is none. Give --pp, too.")
        stages = request.chosen("1" if pipeline else "0,1,2,3")
        batch = micro_batch(model, request.micro_batch, request.length, pipeline=pipeline)
        made = plan_model(model, settings, ranks=request.ranks, stages=stages, batch=batch, rooms=rooms)
        times: list[TimePlan] = []
        if rates is not None:
            given = {"ranks": request.ranks, "stages": stages, "batch": batch}
            times = plan_times(model, settings, rates, **given, limit=_MEASURED_S, slowest=request.slowest)
        if request.as_json:
            found[name] = _as_dict(model, made)
            if rates is not None:
                found[name] |= {"times": [one.as_dict() for one in times], "rates": rates.origin}
            continue
        typer.echo(_title(name, model, request, resolution))
        for line in _lines(request, model, settings, made, stages, batch):
            typer.echo(line)
        for line in time_lines(times, rates.origin) if rates is not None else ():
            typer.echo(line)
        typer.echo("")
    if request.as_json:
        typer.echo(json.dumps(found, indent=2))


def _write_page(request: Request, file: str) -> None:
    from shardwise.checkpoint.parallel import workers
    from shardwise.config import load
    from shardwise.plan.page import page_models, write_page

    config = None if request.config is None else load(request.config)
    typer.echo(f"{file}: about 100 short dry runs for each model and precision, which take minutes", err=True)
    try:
        write_page(page_models(request.models, config, workers=workers()), Path(file))
    except UsageError as error:
        raise CommandLineError(f"{error}.") from None


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _as_dict(model: nn.Module, made: MemoryPlans) -> dict[str, Any]:
    found: dict[str, Any] = {"parameters": _size(model), "plans": [_plan_as_dict(one) for one in made.plans]}
    if made.schedule is not None:
        found["schedule"] = asdict(made.schedule)
    return found


def _plan_as_dict(one: SettingPlan) -> dict[str, Any]:
    return {
        "stage": one.setting.stage,
        **({} if one.position is None else {"pipeline_rank": one.position}),
        "peaks": one.peaks,
        "total": one.total,
        "elsewhere": one.elsewhere,
        "moved": one.moved,
        "fits": one.fits,
        "note": one.note,
    }


def _title(name: str, model: nn.Module, request: Request, resolution: Resolution) -> str:
    enabled = [kind for kind in ("bf16", "fp16") if getattr(resolution.config, kind).enabled]
    sizes = f"{request.micro_batch} x {request.length} tokens" if request.length else "no activations"
    return (
        f"{name}: {_size(model):,} parameters, {request.ranks} rank{'s' * (request.ranks > 1)}, "
        f"{(enabled or ['fp32'])[0]}, micro-batch of {sizes}, accumulation {request.accumulation}"
    )


def _lines(
    request: Request, model: nn.Module, settings: dict[str, Any], made: MemoryPlans, stages: list[int], batch: Any
) -> Iterator[str]:
    """Yield the tables: memory, and of a pipeline its schedule."""
    from shardwise.engine.plans import plan_model
    from shardwise.plan.text import memory_lines, schedule_lines, unsharded_lines

    yield from memory_lines(made.plans, request.speeds(), judged=bool(request.rooms()))
    if made.schedule is None:
        return
    yield from schedule_lines(made.schedule)
    if 3 in stages and any(made.schedule.all_gathered["pass"]):
        totals = {}
        for value in made.schedule.all_gathered:
            changed = {**settings, "pipeline": {**settings["pipeline"], "unsharded_for": value}}
            plans = plan_model(model, changed, ranks=request.ranks, stages=[3], batch=batch).plans
            totals[value] = max(one.total or 0 for one in plans)
        yield from unsharded_lines(made.schedule, totals)
