"""`shardwise choose`: the configuration for a model on a cluster."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.errors import CommandLineError
from shardwise.launch.console import parse_bytes, parse_speeds
from shardwise.launch.options import command_of

if TYPE_CHECKING:
    from torch import nn

    from shardwise.engine.plans import Room
    from shardwise.plan.clock import Rates
    from shardwise.plan.search import Candidate, Search

_MEASURED_S = 5.0
"""Seconds for the operators of a setting that the rates of this machine lack."""


def register(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command("choose")(command_of(Request, choose))


@dataclass(frozen=True)
class Request:
    """What is searched; the options of `shardwise choose` are made from these fields."""

    model: Annotated[str, typer.Argument(help="As of `shardwise plan`.", metavar="MODEL")]
    ranks: Annotated[int, typer.Option(metavar="N", help="Ranks of the job; with --objective ranks at most.")] = 8
    card: Annotated[str | None, typer.Option(metavar="NAME", help="Card, whose data sheet gives the rates.")] = None
    link: Annotated[str | None, typer.Option(metavar="NAME", help="Link between machines.")] = None
    local_ranks: Annotated[
        int | None, typer.Option(metavar="N", help="Ranks of a machine; default: all, with --card 8.")
    ] = None
    time: Annotated[
        str | None, typer.Option(metavar="FILE", help="Rates of `shardwise bench machine` in the place of a card's.")
    ] = None
    device_limit: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of a rank's device; default: the card's.")
    ] = None
    host_limit: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory of a machine.")] = None
    disk_limit: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Free space of a machine's disk; without it no state lies there.")
    ] = None
    disk: Annotated[str | None, typer.Option(metavar="DIR", help="Directory of state on a disk.")] = None
    disk_speed: Annotated[
        str | None, typer.Option(metavar="READ,WRITE", help="With --time: GB/s of a rank's disk.")
    ] = None
    batch: Annotated[int | None, typer.Option(metavar="N", help="Sequences of a step; default: any number.")] = None
    length: Annotated[int, typer.Option(metavar="N", help="Tokens in a sequence.")] = 512
    config: Annotated[str | None, typer.Option(metavar="FILE", help="The rest of the configuration.")] = None
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16, without a configuration.")] = "bf16"
    objective: Annotated[str, typer.Option(help="throughput, latency, cost or ranks.")] = "throughput"
    tensor: Annotated[str, typer.Option(metavar="LIST", help="Sizes of tensor parallelism.")] = "1"
    cost_budget: Annotated[
        str | None,
        typer.Option(metavar="AMOUNT,PRICE,STEPS", help="Most that STEPS steps may cost, PRICE a rank-hour."),
    ] = None
    out: Annotated[str | None, typer.Option(metavar="FILE", help="Write the configuration there.")] = None

    def __post_init__(self) -> None:
        from shardwise.plan.search import OBJECTIVES

        if self.objective not in OBJECTIVES:
            raise CommandLineError(f"--objective {self.objective}: give one of {', '.join(OBJECTIVES)}.")
        if self.precision not in ("fp32", "bf16", "fp16"):
            raise CommandLineError(f"--precision {self.precision}: give fp32, bf16 or fp16.")
        if (self.card is None) == (self.time is None):
            raise CommandLineError("give --card NAME or --time FILE: times are planned by rates.")
        if min(self.ranks, self.length, self.batch or 1, self.local_ranks or 1) < 1:
            raise CommandLineError("--ranks, --local-ranks, --length and --batch are 1 or more.")
        if self.disk_limit is not None and self.disk is None:
            raise CommandLineError("--disk-limit: give --disk DIR, too, where the state is to lie.")
        if self.disk_speed is not None and self.time is None:
            raise CommandLineError("--disk-speed is for --time; machines of --card have their own.")

    @property
    def sharers(self) -> int:
        """Ranks that share a machine."""
        return self.local_ranks or min(self.ranks, 8 if self.card else self.ranks)

    def numbers(self, option: str, written: str, kind: type = int) -> list[Any]:
        """Return numbers above 0 with commas between them. Raises CommandLineError."""
        try:
            found = [kind(part) for part in written.split(",")]
        except ValueError:
            found = [0]
        if min(found) <= 0:
            raise CommandLineError(f"{option} {written}: give numbers above 0, with commas.")
        return found


def choose(request: Request) -> None:
    """Write the configuration for a model on a cluster: the best setting that fits, with a reason for each value.

    Searched are ZeRO stages, micro-batches (with accumulation for --batch), state on the device, the host or a disk,
    recomputed layers of the named models, sizes of tensor parallelism, and numbers of ranks. Memory comes from dry
    runs, times from the rates of a card's data sheet or of a measured machine.
    """
    from shardwise.plan.configurations import choose as best_of
    from shardwise.plan.configurations import with_reasons
    from shardwise.plan.models import micro_batch

    objective: Any = request.objective
    rates, settings = _rates(request), _settings(request)
    counts = [request.ranks]
    if objective in ("ranks", "cost"):
        counts = sorted({request.ranks, *(1 << power for power in range(request.ranks.bit_length()))})
        counts = [count for count in counts if count <= request.ranks]
    found = best_of(
        lambda recompute: _model(request.model, recompute),
        settings,
        micro_batch(_model(request.model, False), 1, request.length, pipeline=False),
        ranks=counts,
        rooms=_rooms(request, rates),
        rates=rates,
        objective=objective,
        tensor=request.numbers("--tensor", request.tensor),
        recompute=(False,) if ":" in request.model else (False, True),
        batch=request.batch,
        ways=_ways(request),
        limit=_MEASURED_S,
        progress=_progress if sys.stderr.isatty() else None,
    )
    typer.echo(
        f"{found.settings} settings in {found.seconds:.1f} s: {found.planned} planned, "
        f"{found.too_large + found.unplanned} too large, "
        f"{found.slower} slower by their passes, {sum(found.refused.values())} refused"
    )
    if not found.ranking:
        raise CommandLineError(_nothing(found))
    for line in _table(found):
        typer.echo(line)
    best = found.ranking[0]
    if request.cost_budget is not None:
        check_cost(request, best)
    text = with_reasons(best, found, settings, objective, rates.origin)
    if request.out is None:
        typer.echo(text)
    else:
        Path(request.out).write_text(text, encoding="utf-8")
        typer.echo(f"{request.out} has the first setting")


def _rates(request: Request) -> Rates:
    if request.time is not None:
        from shardwise.plan.rates import Machine

        found = Machine.load(request.time)
        if request.disk_speed is not None:
            found.disk = parse_speeds(request.disk_speed)
        if request.disk_limit is not None and found.disk is None:
            raise CommandLineError(f"--disk-limit: {request.time} has no speed of a disk; give --disk-speed, too.")
        return found
    from shardwise.plan.cluster import Cluster

    assert request.card is not None
    return Cluster.of(request.card, request.link, request.sharers)


def _settings(request: Request) -> dict[str, Any]:
    from shardwise.config import load

    if request.config is not None:
        chosen = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        return {key: value for key, value in load(request.config).items() if key not in chosen}
    settings: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
    return settings if request.precision == "fp32" else {**settings, request.precision: {"enabled": True}}


def _model(name: str, recompute: bool) -> nn.Module:
    from shardwise.plan.models import named_model

    return named_model(name, recompute)


def _rooms(request: Request, rates: Rates) -> list[Room]:
    from shardwise.engine.plans import Room
    from shardwise.memory import Tier
    from shardwise.plan.cluster import Cluster

    found = []
    if request.device_limit is not None:
        found.append(Room((Tier.DEVICE,), parse_bytes(request.device_limit, "--device-limit")))
    elif isinstance(rates, Cluster):
        found.append(Room((Tier.DEVICE,), int(rates.card.memory)))
    else:
        raise CommandLineError("--time: give --device-limit SIZE, the memory that a rank has.")
    for tier, written in ((Tier.HOST, request.host_limit), (Tier.DISK, request.disk_limit)):
        if written is not None:
            found.append(Room((tier,), parse_bytes(written, f"--{tier.value}-limit") // request.sharers))
    return found


def _ways(request: Request) -> list[Any]:
    from shardwise.engine.plans import offloads

    ways = offloads() if request.disk is None else offloads(request.disk)
    return [
        way
        for way in ways
        if ("cpu" not in way.devices or request.host_limit) and ("nvme" not in way.devices or request.disk_limit)
    ]


def _table(found: Search) -> list[str]:
    from shardwise.units import format_size

    lines = [f"{'ms a step':>10}{'samples/s':>11}{'device':>12}  setting"]
    for one in found.ranking:
        assert one.plan is not None and one.time is not None
        more = "".join(f", {key}" for key in one.branch.keys) + ", recomputed" * one.branch.recompute
        lines.append(
            f"{1e3 * one.time.total:>10.1f}{one.samples / one.time.total:>11.1f}{format_size(one.plan.total):>12}"
            f"  {one.setting}{more}"
        )
    return lines


def _nothing(found: Search) -> str:
    from shardwise.plan.search import in_words

    return (
        f"nothing fits. {in_words(found)} State on the host is searched with --host-limit, on a disk with --disk and "
        "--disk-limit; more ranks divide more."
    )


def check_cost(request: Request, best: Candidate) -> None:
    """Print what the training costs. Raises CommandLineError if it is more than the budget."""
    assert best.time is not None and request.cost_budget is not None
    numbers = request.numbers("--cost-budget", request.cost_budget, float)
    if len(numbers) != 3:
        raise CommandLineError(f"--cost-budget {request.cost_budget}: give MOST,PRICE,STEPS.")
    amount, price, steps = numbers
    cost = steps * best.time.total / 3600 * best.branch.ranks * price
    if cost > amount:
        raise CommandLineError(
            f"{steps:g} steps of {best.time.total:.3g} s on {best.branch.ranks} ranks at {price:g} an hour cost "
            f"{cost:.4g}, more than {amount:g}, with the first setting; the budget is enough for "
            f"{int(steps * amount / cost)} steps."
        )
    typer.echo(f"{steps:g} steps cost {cost:.4g}")


def _progress(done: int, whole: int) -> None:
    sys.stderr.write(f"\r{done} of {whole} settings" if done + 1 < whole else "\r\033[K")
    sys.stderr.flush()
