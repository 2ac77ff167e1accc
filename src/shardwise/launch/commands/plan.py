"""`shardwise plan`: memory plan of a training job on many ranks, made in one process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.errors import CommandLineError, UsageError
from shardwise.launch.console import parse_bytes, parse_speeds
from shardwise.launch.options import command_of

if TYPE_CHECKING:
    from torch import nn

    from shardwise.config import Config
    from shardwise.engine.plans import MemoryPlans, Room
    from shardwise.plan.clock import Rates
    from shardwise.plan.time import TimePlan

_MICRO, _STEPS = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_MEASURED_S = 30.0
"""Seconds for operators of a model that the rates of this machine lack."""


def register(app: typer.Typer) -> None:
    """Add the subcommand."""
    # Options that are not of this command are the script's.
    app.command("plan", context_settings={"ignore_unknown_options": True})(command_of(Request, plan))


@dataclass(frozen=True)
class Request:
    """What is planned; the options of `shardwise plan` are made from these fields."""

    given: Annotated[
        tuple[str, ...],
        typer.Argument(
            help="Models, and a configuration as --config; or SCRIPT.py and its arguments. A model is a name "
            "(bloom-560m, llama-70b, gpt2-xl, t5-3b, mixtral-8x7b, ...), sizes (n=24,h=1024,m=16,b=1,l=512: layers, "
            "width, heads, sequences, tokens; v: vocabulary), a directory or config.json of transformers, a name in "
            "the local cache of the Hugging Face hub, or module:function, which is called without arguments.",
            metavar="MODEL... [CONFIG] | SCRIPT [ARGS]...",
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
        str | None,
        typer.Option(metavar="FILE", help="Configuration; default: the script's, or AdamW in the precision given."),
    ] = None
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16, without a configuration.")] = "fp32"
    micro_batch: Annotated[
        int | None, typer.Option(metavar="N", help="Sequences in a micro-batch; default: as configured, else 1.")
    ] = None
    accumulation: Annotated[
        int | None,
        typer.Option(
            "--accumulation",
            "--micro-batches",
            metavar="N",
            help="Micro-batches in a step; default: as configured, else 1.",
        ),
    ] = None
    length: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Tokens in a sequence; default: 512, or the most that the model takes. 0: no activations."
        ),
    ] = None
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
    price: Annotated[
        float | None, typer.Option(metavar="P", help="Of a card for an hour: what a step and 10^9 tokens cost.")
    ] = None
    units: Annotated[
        bool, typer.Option("--units", help="With rates: FLOPs, bytes that operators move, and bytes sent, by unit.")
    ] = False
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
        counts = (self.ranks, self.local_ranks, self.micro_batch, self.accumulation, self.pp, self.chunks)
        if min(count for count in counts if count is not None) < 1 or (self.length or 0) < 0:
            raise CommandLineError(
                "--ranks, --local-ranks, --micro-batch, --accumulation, --pp and --chunks are 1 or more, --length 0 or "
                "more."
            )
        if self.price is not None and self.price < 0:
            raise CommandLineError(f"--price {self.price}: give 0 or more.")
        if self.units and self.time is None and self.card is None:
            raise CommandLineError("--units: give --card NAME or --time FILE, too.")
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

    @property
    def sharers(self) -> int:
        """Ranks that share a machine."""
        return self.local_ranks or min(self.ranks, 8 if self.card else self.ranks)

    def rooms(self) -> list[Room]:
        """Return the bytes available to one rank. Raises CommandLineError."""
        from shardwise.engine.plans import Room
        from shardwise.memory import Tier

        limits = (
            (Tier.DEVICE, self.device_limit, 1),
            (Tier.HOST, self.host_limit, self.sharers),
            (Tier.DISK, self.disk_limit, self.sharers),
        )
        return [
            Room((tier,), parse_bytes(written, f"--{tier.value}-limit") // ranks)
            for tier, written, ranks in limits
            if written is not None
        ]

    def speeds(self) -> tuple[float, float] | None:
        """Return the bytes/s that a rank reads from and writes to its disk. Raises CommandLineError."""
        return None if self.disk_speed is None else parse_speeds(self.disk_speed)

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
            return Cluster.of(self.card, self.link, self.sharers)
        except UsageError as error:
            raise CommandLineError(f"{error}.") from None

    def settings(self, configured: dict[str, Any] | None = None, sequences: int | None = None) -> dict[str, Any]:
        """Return the configuration with the batch and pipeline of the options. Raises CommandLineError.

        Args:
            configured: by a script, if the options name no configuration.
            sequences: of a micro-batch, by the name of the model.
        """
        from shardwise.config import load

        if self.config is not None:
            configured = load(self.config)
        if configured is not None and self.precision != "fp32":
            raise CommandLineError(f"--precision {self.precision}: the configuration decides; leave the option out.")
        if configured is None:
            configured = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
            configured |= {} if self.precision == "fp32" else {self.precision: {"enabled": True}}
        changed: dict[str, Any] = {_MICRO: self.micro_batch or sequences, _STEPS: self.accumulation}
        changed = {name: size for name, size in changed.items() if size is not None}
        if changed or not isinstance(configured.get("train_batch_size"), int):
            numbers = {name: configured[name] for name in (_MICRO, _STEPS) if isinstance(configured.get(name), int)}
            changed = {_MICRO: 1, _STEPS: 1, **numbers, **changed}
            configured = {name: value for name, value in configured.items() if name != "train_batch_size"}
        pipeline = {"stages": self.pp, "schedule": self.schedule, "chunks": self.chunks}
        if given := {key: value for key, value in pipeline.items() if value is not None}:
            changed["pipeline"] = {**configured.get("pipeline", {}), **given}
        return {**configured, **changed}

    def names(self) -> tuple[tuple[str, ...], str | None]:
        """Return the names of the models, and the file of the configuration. Raises CommandLineError."""
        from shardwise.plan.models import is_model_config

        *names, last = self.given
        if self.given[0].endswith(".py"):
            raise CommandLineError(f"{self.given[0]}: --page is of models, not of scripts; give module:function.")
        if option := next((name for name in self.given if name.startswith("-")), None):
            raise CommandLineError(f"{option}: there is no such option; only a script (.py) takes options of its own.")
        if not names or not last.endswith(".json") or is_model_config(last):
            return self.given, self.config
        if self.config is not None:
            raise CommandLineError(f"{last} and --config {self.config}: give one configuration.")
        return tuple(names), last

    def subjects(self) -> Iterator[Subject]:
        """Yield what is planned. Raises CommandLineError, UsageError for scripts, and ConfigError."""
        if self.given[0].endswith(".py"):
            yield _of_script(self, self.given[0], self.given[1:])
            return
        names, config = self.names()
        for name in names:
            yield _of_name(replace(self, config=config), name)

    def tokens(self, model: nn.Module, name: str, named: int | None = None) -> int:
        """Return the tokens of a sequence; `named` by the name of the model. Raises CommandLineError."""
        from shardwise.plan.models import LENGTH, longest

        most = longest(model)
        length = next((size for size in (self.length, named) if size is not None), min(LENGTH, most or LENGTH))
        if most is not None and length > most:
            raise CommandLineError(f"--length {length}: {name} takes sequences of {most} tokens at most.")
        return length


@dataclass(frozen=True)
class Subject:
    """A model with what is known of its training.

    Attributes:
        settings, config: the configuration as given, and resolved.
        batch: a micro-batch; None: no activations.
        sizes: of the micro-batch, in words.
        client: arguments `optimizer` and `model_parameters` of `initialize`.
    """

    name: str
    model: nn.Module
    settings: dict[str, Any]
    config: Config
    batch: Any
    sizes: str
    client: dict[str, Any] = field(default_factory=dict)

    @property
    def is_pipeline(self) -> bool:
        """Whether the model is planned in stages."""
        from shardwise.pipe import PipelineModule

        return self.config.pipeline.has_stages or isinstance(self.model, PipelineModule)

    @property
    def parameters(self) -> int:
        """Number of parameter elements."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def title(self, ranks: int) -> str:
        """Return the heading of the tables."""
        enabled = [kind for kind in ("bf16", "fp16") if getattr(self.config, kind).enabled]
        return (
            f"{self.name}: {self.parameters:,} parameters, {ranks} rank{'s' * (ranks > 1)}, "
            f"{(enabled or ['fp32'])[0]}, micro-batch of {self.sizes}, "
            f"accumulation {self.config.gradient_accumulation_steps}"
        )


def _of_name(request: Request, name: str) -> Subject:
    from shardwise.config import resolve
    from shardwise.pipe import PipelineModule
    from shardwise.plan.models import letters_of, micro_batch, named_model

    letters = letters_of(name)
    for letter, option, value in (("b", "--micro-batch", request.micro_batch), ("l", "--length", request.length)):
        if letter in letters and value is not None:
            raise CommandLineError(f"{name} and {option} {value}: give one of the two.")
    settings = request.settings(sequences=letters.get("b"))
    config = resolve(settings, world_size=request.ranks).config
    staged = config.pipeline.has_stages
    model = named_model(name, request.recompute, pipeline=staged)
    sequences, length = int(config.train_micro_batch_size_per_gpu or 1), request.tokens(model, name, letters.get("l"))
    staged = staged or isinstance(model, PipelineModule)
    batch = micro_batch(model, sequences, length, pipeline=staged, parts=config.sequence_parallel_size)
    sizes = f"{sequences} x {length} tokens" if length else "no activations"
    return Subject(name, model, settings, config, batch, sizes)


def _of_script(request: Request, script: str, arguments: tuple[str, ...]) -> Subject:
    from shardwise.pipe import PipelineModule
    from shardwise.plan.models import micro_batch
    from shardwise.plan.script import model_of_script

    if request.recompute:
        raise CommandLineError(f"--recompute: {script} decides by itself what it recomputes; leave the option out.")
    found = model_of_script(
        script, arguments, request.ranks, request.sharers, request.settings, with_batch=request.length != 0
    )
    model, config, batch = found.model, found.config, found.batch
    sequences, sizes = int(config.train_micro_batch_size_per_gpu or 1), "no activations"
    if batch is not None:
        sizes = f"{sequences} of training_data"
    elif length := request.tokens(model, script):
        staged = config.pipeline.has_stages or isinstance(model, PipelineModule)
        batch = micro_batch(model, sequences, length, pipeline=staged, parts=config.sequence_parallel_size)
        sizes = f"{sequences} x {length} token ids, because initialize has no training_data"
    client = {"optimizer": found.optimizer, "model_parameters": found.model_parameters}
    return Subject(script, model, found.settings, config, batch, sizes, client)


def plan(request: Request) -> None:
    """Print the memory of one rank at each ZeRO stage, from a dry run of an accumulation window on fake tensors.

    No job and no device is needed; the fake tensors are CPU tensors. Sizes are in powers of 10, with the unit in the
    heading. For state that the configuration offloads, the memory of host and disk and the bytes per step are printed,
    too. Your own module is called with token ids of shape (sequences, tokens).

    A script runs up to its shardwise.initialize (or deepspeed.initialize, of the drop-in) as rank 0 of ranks that are
    not there, and its parameters take no memory. Options that are not listed here are the script's, and all after --.

    Of a pipeline (--pp, or pipeline.stages of the configuration) each rank of the pipeline has a row, and the simulated
    idle time of the schedule is printed. Your own module is then a PipelineModule, with token ids as inputs and labels,
    or a model of transformers.
    """
    from shardwise.engine.plans import plan_model
    from shardwise.plan.text import time_lines, unit_lines
    from shardwise.plan.time import plan_steps

    if request.page is not None:
        _write_page(request, request.page)
        return
    rooms, rates, found = request.rooms(), request.rates(), {}
    for subject in request.subjects():
        if not subject.is_pipeline and (request.schedule is not None or request.chunks is not None):
            raise CommandLineError(
                f"--schedule and --chunks are of pipelines, and {subject.name} is none. Give --pp, too."
            )
        stages = request.chosen("1" if subject.is_pipeline else "0,1,2,3")
        model, settings = subject.model, subject.settings
        given: dict[str, Any] = {"ranks": request.ranks, "batch": subject.batch, "stages": stages, "rooms": rooms}
        given |= {"local_ranks": None if request.card else request.local_ranks, **subject.client}
        times: list[TimePlan] = []
        if rates is None:
            made = plan_model(model, settings, **given)
        else:
            made, times = plan_steps(
                model, settings, rates, **given, limit=_MEASURED_S, slowest=request.slowest, disk=request.speeds()
            )
        if request.as_json:
            found[subject.name] = _as_dict(subject, made)
            if rates is not None:
                found[subject.name] |= {"times": [one.as_dict(request.price) for one in times], "rates": rates.origin}
            continue
        for line in (subject.title(request.ranks), *_lines(request, subject, made, stages)):
            typer.echo(line)
        for line in time_lines(times, rates.origin, request.price) if rates is not None else ():
            typer.echo(line)
        for one in times if request.units else ():
            for line in unit_lines(one):
                typer.echo(line)
        typer.echo("")
    if request.as_json:
        typer.echo(json.dumps(found, indent=2))


def _write_page(request: Request, file: str) -> None:
    from shardwise.checkpoint.reader import workers
    from shardwise.config import load
    from shardwise.plan.page import page_models, write_page

    names, file_of_config = request.names()
    config = None if file_of_config is None else load(file_of_config)
    typer.echo(f"{file}: about 100 short dry runs for each model and precision, which take minutes", err=True)
    try:
        write_page(page_models(names, config, workers=workers()), Path(file))
    except UsageError as error:
        raise CommandLineError(f"{error}.") from None


def _as_dict(subject: Subject, made: MemoryPlans) -> dict[str, Any]:
    found: dict[str, Any] = {
        "parameters": subject.parameters,
        "plans": [
            {
                "stage": one.setting.stage,
                **({} if one.position is None else {"pipeline_rank": one.position}),
                **{name: getattr(one, name) for name in ("peaks", "total", "elsewhere", "moved", "fits", "note")},
            }
            for one in made.plans
        ],
    }
    if made.schedule is not None:
        found["schedule"] = asdict(made.schedule)
    return found


def _lines(request: Request, subject: Subject, made: MemoryPlans, stages: list[int]) -> Iterator[str]:
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
            pipeline = {**subject.settings["pipeline"], "unsharded_for": value}
            changed = {**subject.settings, "pipeline": pipeline}
            given: dict[str, Any] = {"ranks": request.ranks, "batch": subject.batch, **subject.client}
            local = None if request.card else request.local_ranks
            plans = plan_model(subject.model, changed, stages=[3], local_ranks=local, **given).plans
            totals[value] = max(one.total or 0 for one in plans)
        yield from unsharded_lines(made.schedule, totals)
