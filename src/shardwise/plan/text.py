"""Plans as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shardwise.engine.traffic import Traffic
from shardwise.units import format_size, size_unit

if TYPE_CHECKING:
    from shardwise.engine.pipeline_plans import ScheduleFacts
    from shardwise.engine.plans import SettingPlan
    from shardwise.plan.time import TimePlan

PARTS = {
    "parameters": ("parameters",),
    "gradients": ("gradients",),
    "optimizer": ("master weights", "optimizer state"),
    "buffers": ("communication buffers", "gathered window"),
    "activations": ("activations",),
    "other": ("other",),
}
"""Columns of the table, and their categories."""


def memory_lines(
    plans: Sequence[SettingPlan], speeds: tuple[float, float] | None = None, *, judged: bool = False
) -> Iterator[str]:
    """Yield the memory of one rank in each setting, and of what lies elsewhere.

    Args:
        speeds: bytes/s that a rank reads from and writes to its disk.
        judged: whether the plans are compared with limits.
    """
    unit, scale = size_unit(max((one.total or 0 for one in plans), default=0))
    placed = any(one.position is not None for one in plans)
    head = ("zero", "rank") if placed else ("stage",)
    titles = "".join(f"{name:>5}" for name in head) + "".join(f"{name:>12}" for name in (*PARTS, "total"))
    yield f"{titles}  {unit}" + "  fits" * judged
    for one in plans:
        sizes = [
            sum(one.peaks[category] for category in part) if set(part) <= one.peaks.keys() else None
            for part in PARTS.values()
        ]
        numbers = (one.setting.stage, one.position) if placed else (one.setting.stage,)
        cells = ("-" if size is None else f"{size / scale:.2f}" for size in (*sizes, one.total))
        fits = {True: "yes", False: "no", None: "?"}[one.fits]
        row = "".join(f"{number:>5}" for number in numbers) + "".join(f"{cell:>12}" for cell in cells)
        yield row + f"{fits:>10}" * judged
    for one in plans:
        yield from _elsewhere(one, speeds)
    if judged and any(one.fits is None for one in plans):
        yield (
            "fits ?: some of what is needed, or some of what there is, is not known. Give --device-limit, --host-limit "
            "and, where state is on a disk, --disk-limit; a length above 0 for activations."
        )
    yield from dict.fromkeys(one.note for one in plans if one.note)


def _elsewhere(one: SettingPlan, speeds: tuple[float, float] | None) -> Iterator[str]:
    for tier, size in one.elsewhere.items():
        moved = one.moved.get(tier, {"read": 0, "written": 0})
        if tier == "disk" and speeds is not None:
            costs = str(Traffic(tier, moved["read"], moved["written"], *speeds))
            yield f"stage {one.setting.stage}: {format_size(size)} on {costs}"
        else:
            sizes = f"reads {format_size(moved['read'])} and writes {format_size(moved['written'])}"
            yield f"stage {one.setting.stage}: {format_size(size)} on {tier}: a step {sizes} on each rank."


def time_lines(plans: Sequence[TimePlan], origin: str, price: float | None = None) -> Iterator[str]:
    """Yield the time of a step at each stage, what is sent, and where the rates come from; `price`: a card's hour."""
    phases = {"forward": "forward", "backward": "backward", "step": "update", "transfers": "transfers", "idle": "idle"}
    shown = {phase: name for phase, name in phases.items() if any(phase in one.time.phases for one in plans)}
    yield (
        "stage" + "".join(f"{name:>12}" for name in ("step", *shown.values(), "computing", "waiting", "host")) + "  ms"
    )
    for one in plans:
        took = one.time
        seconds = (took.total, *(took.phases[phase] for phase in shown), took.computing, took.waiting, took.host)
        yield f"{one.stage:>5}" + "".join(f"{1e3 * each:>12.1f}" for each in seconds)
    for one in plans:
        facts = [f"{one.tokens / one.time.total:,.0f} {'tokens' if one.tokens > one.samples else 'samples'}/s"]
        if one.share_of_peak is not None:
            facts.append(f"{one.share_of_peak:.1%} of the cards' peak FLOP/s")
        if one.idle:
            facts.append(f"bubble {sum(one.idle) / len(one.idle):.1%}")
        if one.time.transfers:
            hidden = one.time.transfers - one.time.phases["transfers"]
            facts.append(f"{1e3 * one.time.transfers:.1f} ms of transfers, {1e3 * hidden:.1f} under the backward pass")
        if price is not None:
            cost = one.cost(price)
            facts.append(f"a step costs {cost:.4g}, 10^9 tokens {1e9 * cost / one.tokens:,.0f}")
        yield f"stage {one.stage}: {', '.join(facts)}"
    for one in plans:
        sent = ", ".join(
            f"{what[0]} ({', '.join(filter(None, (what[1], one.time.links[what])))}) {format_size(size)} in "
            f"{1e3 * one.time.collectives[what]:.1f} ms"
            for what, size in one.time.sent.items()
            if size
        )
        if sent:
            yield f"stage {one.stage} sends {sent}"
    share = max(one.estimated for one in plans)
    yield origin + (f"; {share:.0%} of the computing is estimated from other sizes" if share else "")


def unit_lines(plan: TimePlan) -> Iterator[str]:
    """Yield what the ranks compute, move and send for each unit in a step; of a pipeline the rank that has the unit."""
    rows = [("unit", "GFLOP", "operators move", "sends")]
    for unit, work in plan.time.units.items():
        rows.append((unit, f"{work.flops / 1e9:,.1f}", format_size(work.moved), format_size(work.sent)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    yield f"stage {plan.stage}:"
    for unit, *cells in rows:
        yield "  ".join([unit.ljust(widths[0]), *map(str.rjust, cells, widths[1:])])


def schedule_lines(facts: ScheduleFacts) -> Iterator[str]:
    """Yield stages and simulated idle time of a pipeline."""
    yield f"{facts.name}, {facts.micro_batches} micro-batches, simulated; idle: for stages of equal times" + (
        "" if facts.idle_by_flops is None else ", and in proportion to FLOPs"
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
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))


def unsharded_lines(facts: ScheduleFacts, totals: dict[str, int]) -> Iterator[str]:
    """Yield what each value of `pipeline.unsharded_for` costs at ZeRO stage 3."""
    yield "stage 3, pipeline.unsharded_for: parameters that the rank with most receives in a step, largest total"
    for value, received in facts.all_gathered.items():
        yield f"{value:>5}{format_size(max(received)):>16}{format_size(totals[value]):>16}"
