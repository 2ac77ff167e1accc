"""Figures of the report as data and layout of plotly.js.

Colours are names beginning with "@", which the page replaces by the light or dark theme. Names from files go through
`shown`, because plotly.js interprets some HTML in texts.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.units import format_duration, format_size, size_unit

from .reading import Span
from .summing import Rank, Summary, names_by_size, smoothed

Spec = dict[str, Any]

MOST_SPANS = 3000  # maximum number of timeline spans in a figure
MOST_IN_LANE = 160  # maximum number of timeline spans of each thread or stream: a few distinguishable steps
# Timeline colours; later categories are drawn above earlier ones.
_CATEGORIES = {
    "idle": "@line",
    "wait": "@quiet",
    "compute": "@c1",
    "step": "@c3",
    "move": "@c5",
    "gather": "@c2",
    "reduce": "@c4",
    "collective": "@c6",
    "stage": "@c7",
    "message": "@quiet",
}
_COLOURS = ("@c1", "@c2", "@c3", "@c4", "@c5", "@c6", "@c7", "@quiet")
_TIERS = {"device": "@c1", "host": "@c2", "disk": "@c3"}
_PHASES = {"forward": "@c1", "backward": "@c2", "step": "@c3"}
_LANES = {"ticks": "", "showgrid": False, "zeroline": False}  # an axis with names instead of numbers
_ROW = 22  # pixels of a bar including its gap


@dataclass(frozen=True)
class Figure:
    """One figure; `name` is the identifier in the page."""

    name: str
    title: str
    caption: str
    data: list[Spec]
    layout: Spec
    height: int = 320

    @property
    def spec(self) -> Spec:
        """Input of the page's script."""
        return {"name": self.name, "data": self.data, "layout": self.layout}


def shown(name: str, most: int = 60) -> str:
    """Escape and shorten a text from a file for plotly.js.

    >>> shown('<a href="x">y</a>')
    '&lt;a href="x"&gt;y&lt;/a&gt;'
    """
    return html.escape(name if len(name) <= most else f"{name[: most - 1]}…", quote=False)


def _drawn(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None or not math.isfinite(value) else float(f"{value:.6g}") for value in values]


def _line(name: str, x: Sequence[Any], y: Sequence[float | None], colour: str, **more: Any) -> Spec:
    line = {"color": colour, "width": 2, **more.pop("line", {})}
    return {"type": "scatter", "mode": "lines", "name": name, "x": list(x), "y": _drawn(y), "line": line, **more}


def _layout(*axes: tuple[str, Spec], x: str = "step", shares: Sequence[float] = (1.0,), **more: Any) -> Spec:
    gap = 0.09 if len(axes) > 1 else 0.0
    room = 1.0 - gap * (len(axes) - 1)
    top = 1.0
    layout: Spec = {"xaxis": {"title": {"text": x}}}
    for place, ((title, own), share) in enumerate(zip(axes, shares, strict=True)):
        bottom = max(0.0, top - share / sum(shares) * room)
        layout[f"yaxis{place + 1 if place else ''}"] = {
            "title": {"text": title},
            "domain": [round(bottom, 4), round(top, 4)],
            **own,
        }
        top = bottom - gap
    lowest = f"y{len(axes) if len(axes) > 1 else ''}"
    layout["xaxis"]["anchor"] = lowest
    return {**layout, **more}


def _together(summary: Summary) -> str:
    most = max((point.steps for point in summary.points), default=1)
    return f" Each point is {most} steps." if most > 1 else ""


def figures(summary: Summary) -> dict[str, Figure]:
    """Return all non-empty figures by name."""
    makers: tuple[Callable[[Summary], Figure | None], ...] = (
        loss,
        speed,
        gradients,
        memory,
        tiers,
        communication,
        units,
        timeline,
    )
    found = [figure for make in makers if (figure := make(summary)) is not None]
    return {figure.name: figure for figure in found}


def loss(summary: Summary) -> Figure | None:
    """Return the plot of loss and learning rate."""
    points = summary.points
    x = [point.step for point in points]
    losses = [point.mean("loss") for point in points]
    rates = [point.mean("lr") for point in points]
    if not any(value is not None for value in (*losses, *rates)):
        return None
    over = max(2, len(points) // 20)
    data = [_line("lr", x, rates, "@c2", yaxis="y2", showlegend=False)]
    caption = f"Learning rate of the first parameter group.{_together(summary)}"
    if any(value is not None for value in losses):
        data = [
            _line("loss", x, losses, "@c1", opacity=0.4, line={"width": 1}),
            _line(f"mean of {over}", x, smoothed(losses, over), "@c1"),
            *data,
        ]
        caption = f"Loss in the mean over ranks; the thick line is a mean of {over} points. {caption}"
    return Figure(
        "loss",
        "Loss and learning rate",
        caption,
        data,
        _layout(("loss", {}), ("lr", {"tickformat": ".1e", "rangemode": "tozero", "nticks": 4}), shares=(3, 1)),
        420,
    )


def speed(summary: Summary) -> Figure | None:
    """Return the plot of throughput and step time."""
    points = [point for point in summary.points if point.seconds is not None]
    if not points:
        return None
    x = [point.step for point in points]
    tokens = any(row.tokens for point in points for row in point.ranks.values())
    what = "tokens" if tokens else "samples"
    rates = []
    for point in points:
        row = next(iter(point.ranks.values()))
        rates.append(getattr(row, what) / row.seconds if row.seconds else None)
    data = [_line(f"{what}/s", x, rates, "@c1", showlegend=False)]
    parts = [name for name in _PHASES if any(point.phase(name) for point in points)]
    for name in parts:
        seconds = [point.phase(name) for point in points]
        data.append(_line(name, x, seconds, _PHASES[name], yaxis="y2", stackgroup="parts", line={"width": 0}))
    data.append(_line("step time", x, [point.seconds for point in points], "@ink", yaxis="y2", line={"width": 1.5}))
    usual = sorted(point.seconds or 0.0 for point in points)[min(len(points) - 1, int(0.98 * len(points)))]
    range_of = {"range": [0, 1.3 * usual]} if max(point.seconds or 0.0 for point in points) > 2 * usual else {}
    caption = (
        f"Above, {what} of all ranks in a second. Below, seconds of a step: the line is the slowest rank's from the "
        "end of one step to the end of the next"
    )
    if parts:
        caption += ", the areas are its parts in the mean over ranks; the gap is data, and the rest of the script"
    return Figure(
        "speed",
        "Throughput and step time",
        f"{caption}.{_together(summary)}",
        data,
        _layout(
            (f"{what}/s", {"rangemode": "tozero"}), ("seconds", {"rangemode": "tozero", **range_of}), shares=(1, 1.4)
        ),
        460,
    )


def gradients(summary: Summary) -> Figure | None:
    """Return the plot of gradient norm and loss scale."""
    points = summary.points
    x = [point.step for point in points]
    norms = [point.most("grad_norm") for point in points]
    scales = [point.mean("loss_scale") for point in points]
    panels: list[tuple[str, Spec]] = []
    data = []
    if any(value is not None for value in norms):
        spread = [value for value in norms if value and math.isfinite(value)]
        wide = bool(spread) and max(spread) > 30 * min(spread)
        panels.append(("norm", {"type": "log", "dtick": 1} if wide else {"rangemode": "tozero"}))
        data.append(_line("norm", x, norms, "@c1", showlegend=False))
    if any(value is not None for value in scales):
        panels.append(("loss scale", {"type": "log", "dtick": "D1"}))
        axis = f"y{len(panels) if len(panels) > 1 else ''}"
        data.append(_line("loss scale", x, scales, "@c2", yaxis=axis, showlegend=False, line={"shape": "hv"}))
    if not panels:
        return None
    bad = sum(value is not None and not math.isfinite(value) for value in norms)
    caption = "Norm of all gradients before clipping" + (", and the loss scale" if len(panels) > 1 else "") + "."
    if bad:
        caption += f" At {bad} point{'s' * (bad > 1)} the norm is not finite, and not drawn."
    skipped = max((rank.whole.skipped for rank in summary.ranks), default=0)
    if skipped:
        caption += f" {skipped} step{'s' * (skipped > 1)} skipped."
    layout = _layout(*panels, shares=[2, 1][: len(panels)])
    title = "Gradient norm and loss scale" if len(panels) > 1 else panels[0][0].replace("norm", "gradient norm")
    return Figure("gradients", title[:1].upper() + title[1:], caption + _together(summary), data, layout)


def memory(summary: Summary) -> Figure | None:
    """Return the plot of memory by category, of the rank with the highest device memory."""
    rank = summary.largest
    if rank is None:
        return None
    held = [(point.step, row.memory["device"]) for point, row in _of(summary, rank) if "device" in row.memory]
    names = names_by_size(each for _, each in held)
    most = max(each.peak for _, each in held)
    plan, limit = summary.planned("tiers").get("device"), summary.limits().get("device")
    unit, size = size_unit(max(most, plan or 0.0))
    x = [step for step, _ in held]
    data = []
    for place, name in enumerate(names):
        sizes = [each.at_peak.get(name, 0.0) / size for _, each in held]
        colour = _COLOURS[min(place, len(_COLOURS) - 1)]
        data.append(_line(shown(name), x, sizes, colour, stackgroup="held", line={"width": 0}))
    if not names:
        data.append(_line("held", x, [each.peak / size for _, each in held], "@c1"))
    data += _levels(x, size, {"planned": plan, "limit": limit if limit and limit < 3 * most else None})
    caption = (
        f"What rank {rank.number} held on its device when it held most in a step: at most {format_size(most)}"
        + (f", planned {format_size(plan)}" if plan else "")
        + (f", limit {format_size(limit)}" if limit else "")
        + ". Activations are counted under track_activations only."
    )
    axis = {"rangemode": "tozero"}
    return Figure("memory", "Memory by category", caption + _together(summary), data, _layout((unit, axis)), 380)


def tiers(summary: Summary) -> Figure | None:
    """Return the plot of memory by tier, and of the process."""
    rank = summary.largest
    if rank is None:
        return None
    rows = _of(summary, rank)
    x = [point.step for point, _ in rows]
    names = [name for name in _TIERS if any(name in row.memory for _, row in rows)]
    planned = summary.planned("tiers")
    sizes = [held.peak for _, row in rows for held in row.memory.values()]
    unit, size = size_unit(max(*sizes, *(row.resident for _, row in rows), 1.0))
    data = []
    for name in names:
        peaks = [row.memory[name].peak / size if name in row.memory else 0.0 for _, row in rows]
        data.append(_line(name, x, peaks, _TIERS[name]))
        if planned.get(name):
            level = planned[name] / size
            data.append(
                _line(f"{name}, planned", x, [level] * len(x), _TIERS[name], line={"dash": "dot", "width": 1.5})
            )
    resident = [row.resident / size or None for _, row in rows]
    if any(resident):
        data.append(_line("process", x, resident, "@soft"))
    caption = (
        f"Rank {rank.number}: most that each tier held in a step, what was planned for it, and the resident size of "
        "the process, in which are also Python, torch and data."
    )
    return Figure(
        "tiers", "Memory by tier", caption + _together(summary), data, _layout((unit, {"rangemode": "tozero"})), 340
    )


def _of(summary: Summary, rank: Rank) -> list[tuple[Any, Any]]:
    return [(point, point.ranks[rank.number]) for point in summary.points if rank.number in point.ranks]


def _levels(x: Sequence[int], size: int, levels: Mapping[str, float | None]) -> list[Spec]:
    dashes = {"planned": "dash", "limit": "solid"}
    return [
        _line(name, [x[0], x[-1]], [level / size] * 2, "@ink", line={"dash": dashes[name], "width": 1.5})
        for name, level in levels.items()
        if level
    ]


def _bars(
    name: str, title: str, caption: str, panels: Sequence[tuple[str, Mapping[str, float], Callable[[float], str]]]
) -> Figure:
    names = list(panels[0][1])[::-1]
    labels = [shown(one, 26) for one in names]
    width = (1.0 - 0.08 * (len(panels) - 1)) / len(panels)
    axis = {"automargin": True, **_LANES, "tickvals": list(range(len(names))), "ticktext": labels}
    data: list[Spec] = []
    layout: Spec = {"yaxis": axis, "bargap": 0.35, "showlegend": False}
    for place, (unit, values, words) in enumerate(panels):
        suffix = str(place + 1) if place else ""
        sizes = [values[one] for one in names]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "y": list(range(len(names))),
                "x": _drawn(sizes),
                "xaxis": f"x{suffix}",
                "marker": {"color": _COLOURS[place]},
                "text": [words(value) for value in sizes],
                "textposition": "auto",
                "cliponaxis": False,
                "hovertext": [f"{label}: {words(value)}" for label, value in zip(labels, sizes, strict=True)],
                "hoverinfo": "text",
            }
        )
        start = place * (width + 0.08)
        layout[f"xaxis{suffix}"] = {
            "title": {"text": unit},
            "domain": [round(start, 4), round(start + width, 4)],
            "rangemode": "tozero",
            "nticks": 4,
            "showticklabels": False,
        }
    return Figure(name, title, caption, data, layout, 90 + _ROW * max(2, len(names)) + 10 * len(names))


def communication(summary: Summary) -> Figure | None:
    """Return the plot of bytes sent and time waited, by operation."""
    found = {op: values for op, values in summary.communication.items() if values[2] or values[3]}
    if not found:
        return None
    ordered = dict(sorted(found.items(), key=lambda item: item[1][2], reverse=True)[:12])
    ranks = len(summary.ranks)
    who = f"{ranks} ranks together" if ranks > 1 else "one rank"
    caption = f"All steps, {who}. Sent is what goes on the wire; waited is how long the host stood still for results."
    if summary.run.about.get("waits_on_host") is False:
        caption += " With NCCL the device waits, not the host: see the timeline."
    return _bars(
        "communication",
        "Communication by operation",
        caption,
        (
            ("sent", {op: values[2] for op, values in ordered.items()}, format_size),
            ("waited", {op: values[3] for op, values in ordered.items()}, format_duration),
        ),
    )


def units(summary: Summary) -> Figure | None:
    """Return the plot of the longest waits for collectives, by unit."""
    found = dict(list(summary.units.items())[:12])
    if not found:
        return None
    steps = sum(rank.steady.steps for rank in summary.ranks)
    each = {name: seconds / steps for name, seconds in found.items()}
    caption = (
        "Seconds of a step that a rank waited for collectives, by what they moved: parameters or gradients of a unit, "
        "the norm (gradient_norm), times of day (clocks). A mean without the first row; each row of the log has the "
        "eight longest."
    )
    return _bars("units", "Longest waits", caption, (("waited in a step", each, format_duration),))


def window(spans: Sequence[Span]) -> list[Span]:
    """Return the spans in time order; only the middle ones if there are too many for a page."""
    ordered = sorted(spans, key=lambda span: span.start)
    most = min(MOST_SPANS, MOST_IN_LANE * len({(span.rank, span.lane) for span in ordered}))
    first = max(0, (len(ordered) - most) // 2)
    return ordered[first : first + most]


def timeline(summary: Summary) -> Figure | None:
    """Return the timeline plot of the ranks."""
    spans = window(summary.run.spans)
    if not spans:
        return None
    begin = spans[0].start
    lanes = sorted({(span.rank, span.lane) for span in spans}, reverse=True)
    several = {rank for rank, _ in lanes if sum(one == rank for one, _ in lanes) > 1}
    labels = [shown(f"rank {rank}, {lane}" if rank in several else f"rank {rank}", 22) for rank, lane in lanes]
    places = {lane: place for place, lane in enumerate(lanes)}
    data = []
    categories = [*_CATEGORIES, *sorted({span.category for span in spans} - set(_CATEGORIES))]
    for category in categories:
        own = [span for span in spans if span.category == category]
        if own:
            data.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "name": shown(category or "other"),
                    "base": [round((span.start - begin) / 1e3, 4) for span in own],
                    "x": [round(span.length / 1e3, 4) for span in own],
                    "y": [places[span.rank, span.lane] for span in own],
                    "marker": {"color": _CATEGORIES.get(category, "@quiet"), "line": {"width": 0}},
                    "hovertext": [f"{shown(span.name)}: {format_duration(span.length / 1e6)}" for span in own],
                    "hoverinfo": "text",
                    "width": 0.8,
                }
            )
    left = len(summary.run.spans) - len(spans)
    caption = "What each rank did at each time."
    if left:
        caption += f" {left:,} parts before and after are left out; the file has all (open it in ui.perfetto.dev)."
    layout = {
        "barmode": "overlay",
        "xaxis": {"title": {"text": "milliseconds"}, "rangemode": "nonnegative"},
        "yaxis": {"tickvals": list(range(len(lanes))), "ticktext": labels, **_LANES},
    }
    return Figure("timeline", "Timeline", caption, data, layout, 130 + 26 * max(2, len(lanes)))
