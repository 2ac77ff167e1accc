"""`shardwise plan`: memory plan of a training job on many ranks, made in one process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.launch.console import parse_bytes
from shardwise.units import format_size, size_unit

if TYPE_CHECKING:
    from shardwise.engine.pipeline_plans import ScheduleFacts
    from shardwise.engine.plans import Room, SettingPlan

_MEASURED_S = 30.0
"""Seconds for operators of a model that the rates of this machine lack."""

PARTS = {
    "parameters": ("parameters",),
    "gradients": ("gradients",),
    "optimizer": ("master weights", "optimizer state"),
    "buffers": ("communication buffers", "gathered window"),
    "activations": ("activations",),
    "other": ("other",),
}
"""Columns of the table, and their categories."""


def register(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command("plan")(plan)


def plan(
    models: Annotated[
        list[str],
        typer.Argument(
            help="bloom-560m, bloom-1b1, bloom-7b1, llama-7b, llama-13b, llama-70b, or module:function of your own, "
            "which is called without arguments and returns a module that takes token ids.",
            metavar="MODEL...",
        ),
    ],
    ranks: Annotated[int, typer.Option(metavar="N", help="Ranks of the job.")] = 8,
    stages: Annotated[
        str | None, typer.Option(metavar="LIST", help="ZeRO stages; default: 0,1,2,3, of a pipeline 1.")
    ] = None,
    pp: Annotated[
        int | None, typer.Option("--pp", metavar="N", help="Ranks of a pipeline; default: as configured, else none.")
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(metavar="NAME", help="Schedule of the pipeline; default: as configured, else 1f1b.")
    ] = None,
    chunks: Annotated[
        int | None, typer.Option(metavar="V", help="Stages of each rank; default: the fewest that the schedule has.")
    ] = None,
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="Configuration; default: AdamW in the precision given.")
    ] = None,
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16, without a configuration.")] = "fp32",
    micro_batch: Annotated[int, typer.Option(metavar="N", help="Sequences in a micro-batch.")] = 1,
    accumulation: Annotated[
        int, typer.Option("--accumulation", "--micro-batches", metavar="N", help="Micro-batches in a step.")
    ] = 1,
    length: Annotated[int, typer.Option(metavar="N", help="Tokens in a sequence; 0: no activations.")] = 512,
    device_limit: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory of a rank's device, such as 80GiB: marks the stages that fit."),
    ] = None,
    host_limit: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory of a machine.")] = None,
    disk_limit: Annotated[str | None, typer.Option(metavar="SIZE", help="Free space of a machine's disk.")] = None,
    local_ranks: Annotated[
        int | None, typer.Option(metavar="N", help="Ranks that share a machine; default: all.")
    ] = None,
    disk_speed: Annotated[
        str | None,
        typer.Option(metavar="READ,WRITE", help="GB/s of a rank's disk, to estimate the time of offloading per step."),
    ] = None,
    time: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Rates of `shardwise bench machine`: the time of a step is planned, too."),
    ] = None,
    recompute: Annotated[bool, typer.Option("--recompute", help="Recompute the layers of the named models.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print bytes as one JSON object.")] = False,
) -> None:
    """Print the memory of one rank at each ZeRO stage, from a dry run of an accumulation window on fake tensors.

    No job and no device is needed; the fake tensors are CPU tensors. Sizes are in powers of 10, with the unit in the
    heading. For state that the configuration offloads, the memory of host and disk and the bytes per step are printed,
    too. Your own module is called with token ids of shape (sequences, tokens).

    Of a pipeline (--pp, or pipeline.stages of the configuration) each rank of the pipeline has a row, and the simulated
    idle time of the schedule is printed. Your own module is then a PipelineModule, with token ids as inputs and labels,
    or a model of transformers.
    """
    from shardwise.config import load, resolve
    from shardwise.engine.plans import plan_model
    from shardwise.errors import CommandLineError
    from shardwise.launch.models import micro_batch as micro_batch_of
    from shardwise.launch.models import named_model
    from shardwise.pipe import PipelineModule

    if precision not in ("fp32", "bf16", "fp16"):
        raise CommandLineError(f"--precision {precision}: give fp32, bf16 or fp16.")
    counts = [ranks, micro_batch, accumulation, *(value for value in (pp, chunks) if value is not None)]
    if min(counts) < 1 or length < 0:
        raise CommandLineError(
            "--ranks, --micro-batch, --accumulation, --pp and --chunks are 1 or more, --length 0 or more."
        )
    rooms = _rooms(device_limit, host_limit, disk_limit, local_ranks or ranks)
    speeds = _speeds(disk_speed)
    settings: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
    if precision != "fp32":
        settings[precision] = {"enabled": True}
    if config is not None:
        settings = load(config)
    settings = {
        **{key: value for key, value in settings.items() if key != "train_batch_size"},
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
    }
    requested = {"stages": pp, "schedule": schedule, "chunks": chunks}
    if any(value is not None for value in requested.values()):
        given = {key: value for key, value in requested.items() if value is not None}
        settings["pipeline"] = {**settings.get("pipeline", {}), **given}
    resolved = resolve(settings, world_size=ranks).config
    positions = resolved.pipeline.stages
    found: dict[str, Any] = {}
    for name in models:
        model = named_model(name, recompute, pipeline=positions not in ("auto", 1))
        pipeline = positions not in ("auto", 1) or isinstance(model, PipelineModule)
        if not pipeline and (schedule is not None or chunks is not None):
            raise CommandLineError(f"--schedule and --chunks are of pipelines, and {name} is none. Give --pp, too.")
        numel = sum(parameter.numel() for parameter in model.parameters())
        chosen = _chosen(stages or ("1" if pipeline else "0,1,2,3"))
        batch = micro_batch_of(model, micro_batch, length, pipeline=pipeline)
        made = plan_model(model, settings, ranks=ranks, stages=chosen, batch=batch, rooms=rooms)
        if as_json:
            found[name] = {"parameters": numel, "plans": [_as_dict(one) for one in made.plans]}
            if made.schedule is not None:
                found[name]["schedule"] = asdict(made.schedule)
            continue
        enabled = [kind for kind in ("bf16", "fp16") if getattr(resolved, kind).enabled]
        sizes = f"{micro_batch} x {length} tokens" if length else "no activations"
        title = (
            f"{name}: {numel:,} parameters, {ranks} rank{'s' * (ranks > 1)}, {(enabled or ['fp32'])[0]}, "
            f"micro-batch of {sizes}, accumulation {accumulation}"
        )
        _show(title, made.plans, speeds, bool(rooms))
        if time is not None:
            _show_times(model, settings, time, ranks, chosen, batch)
        if made.schedule is not None:
            _show_schedule(made.schedule)
        if made.schedule is not None and 3 in chosen and any(made.schedule.all_gathered["pass"]):
            totals = {}
            for value in made.schedule.all_gathered:
                changed = {**settings, "pipeline": {**settings["pipeline"], "unsharded_for": value}}
                plans = plan_model(model, changed, ranks=ranks, stages=[3], batch=batch).plans
                totals[value] = max(one.total or 0 for one in plans)
            _show_unsharded(made.schedule, totals)
        typer.echo("")
    if as_json:
        typer.echo(json.dumps(found, indent=2))


def _chosen(stages: str) -> list[int]:
    from shardwise.errors import CommandLineError

    chosen = [int(stage) for stage in stages.split(",") if stage in ("0", "1", "2", "3")]
    if len(chosen) != len(stages.split(",")):
        raise CommandLineError(f"--stages {stages}: give some of 0, 1, 2 and 3, with commas.")
    return chosen


def _as_dict(one: SettingPlan) -> dict[str, Any]:
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


def _rooms(device: str | None, host: str | None, disk: str | None, sharers: int) -> list[Room]:
    from shardwise.engine.plans import Room
    from shardwise.memory import Tier

    found = []
    for tier, written, ranks in ((Tier.DEVICE, device, 1), (Tier.HOST, host, sharers), (Tier.DISK, disk, sharers)):
        if written is not None:
            found.append(Room((tier,), parse_bytes(written, f"--{tier.value}-limit") // ranks))
    return found


def _speeds(written: str | None) -> tuple[float, float] | None:
    from shardwise.errors import CommandLineError

    if written is None:
        return None
    try:
        read, write = (float(part) * 1e9 for part in written.split(","))
    except ValueError:
        read = write = 0.0
    if min(read, write) <= 0:
        raise CommandLineError(f"--disk-speed {written}: give two numbers above 0, GB/s of reading and of writing.")
    return read, write


def _elsewhere(one: SettingPlan, speeds: tuple[float, float] | None) -> Iterator[str]:
    from shardwise.engine.traffic import Traffic

    for tier, size in one.elsewhere.items():
        moved = one.moved.get(tier, {"read": 0, "written": 0})
        if tier == "disk" and speeds is not None:
            costs = str(Traffic(tier, moved["read"], moved["written"], *speeds))
            yield f"stage {one.setting.stage}: {format_size(size)} on {costs}"
        else:
            sizes = f"reads {format_size(moved['read'])} and writes {format_size(moved['written'])}"
            yield f"stage {one.setting.stage}: {format_size(size)} on {tier}: a step {sizes} on each rank."


def _show(
    title: str, plans: tuple[SettingPlan, ...], speeds: tuple[float, float] | None = None, judged: bool = False
) -> None:
    largest = max((one.total or 0 for one in plans), default=0)
    unit, scale = size_unit(largest)
    typer.echo(title)
    placed = any(one.position is not None for one in plans)
    head = ("zero", "rank") if placed else ("stage",)
    titles = "".join(f"{name:>5}" for name in head) + "".join(f"{name:>12}" for name in (*PARTS, "total"))
    typer.echo(f"{titles}  {unit}" + "  fits" * judged)
    for one in plans:
        sizes = [
            sum(one.peaks[category] for category in part) if set(part) <= one.peaks.keys() else None
            for part in PARTS.values()
        ]
        numbers = (one.setting.stage, one.position) if placed else (one.setting.stage,)
        cells = ("-" if size is None else f"{size / scale:.2f}" for size in (*sizes, one.total))
        fits = {True: "yes", False: "no", None: "?"}[one.fits]
        row = "".join(f"{number:>5}" for number in numbers) + "".join(f"{cell:>12}" for cell in cells)
        typer.echo(row + f"{fits:>10}" * judged)
    for one in plans:
        for line in _elsewhere(one, speeds):
            typer.echo(line)
    if judged and any(one.fits is None for one in plans):
        typer.echo(
            "fits ?: some of what is needed, or some of what there is, is not known. Give --device-limit, --host-limit "
            "and, where state is on a disk, --disk-limit; a length above 0 for activations."
        )
    for note in dict.fromkeys(one.note for one in plans if one.note):
        typer.echo(note)


def _show_times(model: Any, settings: dict[str, Any], file: str, ranks: int, stages: list[int], batch: Any) -> None:
    """Print the time of a step at each stage, and what is sent."""
    from shardwise.plan.rates import Machine
    from shardwise.plan.time import plan_times

    machine = Machine.load(file)
    limit = _MEASURED_S if machine.is_here() else 0.0
    plans = plan_times(model, settings, machine, ranks=ranks, stages=stages, batch=batch, limit=limit)
    phases = ("forward", "backward", "step")
    columns = ("step", *phases[:2], "update", "computing", "waiting", "host")
    typer.echo("stage" + "".join(f"{name:>12}" for name in columns) + "  ms")
    for one in plans:
        took = one.time
        seconds = (took.total, *(took.phases[phase] for phase in phases), took.computing, took.waiting, took.host)
        typer.echo(f"{one.stage:>5}" + "".join(f"{1e3 * each:>12.1f}" for each in seconds))
    for one in plans:
        sent = ", ".join(
            f"{op} ({group}) {format_size(size)} in {1e3 * one.time.collectives[op, group]:.1f} ms"
            for (op, group), size in one.time.sent.items()
            if size
        )
        if sent:
            typer.echo(f"stage {one.stage} sends {sent}")
    share = max(one.estimated for one in plans)
    whose = "measured here" if limit else f"measured on {machine.host_name} ({machine.processor}), not on this machine"
    typer.echo(f"rates {whose}, {machine.when}; {share:.0%} of the computing is estimated from other sizes")


def _show_schedule(facts: ScheduleFacts) -> None:
    """Print stages and simulated idle time of a pipeline."""
    typer.echo(
        f"{facts.name}, {facts.micro_batches} micro-batches, simulated; idle: for stages of equal times"
        + ("" if facts.idle_by_flops is None else ", and in proportion to FLOPs")
    )
    rows: list[tuple[str, ...]] = [("rank", "layers", "parameters", "in flight", "idle")]
    if facts.idle_by_flops is not None:
        rows[0] = (*rows[0], "by FLOPs")
    for rank, layers in enumerate(facts.layers):
        shares = [idle[rank] for idle in (facts.idle, facts.idle_by_flops) if idle is not None]
        numbers = f"{facts.parameters[rank]:,}", str(facts.in_flight[rank])
        rows.append((str(rank), layers, *numbers, *(f"{share:.1%}" for share in shares)))
    means = [sum(idle) / len(idle) for idle in (facts.idle, facts.idle_by_flops) if idle is not None]
    rows.append(("all", "", f"{sum(facts.parameters):,}", "", *(f"{mean:.1%}" for mean in means)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        typer.echo("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def _show_unsharded(facts: ScheduleFacts, totals: dict[str, int]) -> None:
    """Print what each value of `pipeline.unsharded_for` costs at ZeRO stage 3."""
    typer.echo("stage 3, pipeline.unsharded_for: parameters that the rank with most receives in a step, largest total")
    for value, received in facts.all_gathered.items():
        typer.echo(f"{value:>5}{format_size(max(received)):>16}{format_size(totals[value]):>16}")
