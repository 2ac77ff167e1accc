"""Pictures of the time of a pipeline's ranks: SVG, text for a terminal, trace events.

The spans may be simulated or measured. The SVG and the text show computations; the trace shows all actions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import Any

from shardwise.errors import UsageError
from shardwise.pipeline.actions import COMPUTATIONS, Op
from shardwise.pipeline.simulator import Span


@dataclass(frozen=True)
class _Style:
    """Letter, background in a terminal (of 256 colours), background and text in an SVG."""

    letter: str
    ansi: int
    fill: tuple[int, int, int]
    ink: str


_STYLES = {
    Op.FORWARD: _Style("F", 75, (0, 114, 178), "#fff"),
    Op.BACKWARD: _Style("B", 79, (0, 158, 115), "#fff"),
    Op.BACKWARD_INPUT: _Style("I", 214, (230, 159, 0), "#1d2329"),
    Op.BACKWARD_WEIGHT: _Style("W", 176, (204, 121, 167), "#1d2329"),
}
_LEFT, _TOP, _ROW, _WIDEST = 62, 34, 26, 30_000  # pixels


class _Timeline:
    """Computations by rank, the start and end of all, and the chunk of each stage on its rank.

    `short` is a duration that most computations reach; a box of this duration has space for its label.
    """

    def __init__(self, spans: Iterable[Span]) -> None:
        shown = sorted((s for s in spans if s.action.op in COMPUTATIONS), key=lambda span: (span.rank, span.start))
        if not any(span.end > span.start for span in shown):
            raise UsageError("cannot draw the time of a pipeline: no forward or backward in the spans takes time")
        self.ranks: dict[int, list[Span]] = defaultdict(list)
        for span in shown:
            self.ranks[span.rank].append(span)
        self.start, self.end = min(span.start for span in shown), max(span.end for span in shown)
        durations = sorted(span.end - span.start for span in shown if span.end > span.start)
        self.short = durations[len(durations) // 4]
        self.digits = len(str(max(span.action.micro_batch for span in shown)))
        self.ops = [op for op in _STYLES if any(span.action.op is op for span in shown)]
        self.chunks = {
            stage: chunk
            for computations in self.ranks.values()
            for chunk, stage in enumerate(sorted({span.action.stage for span in computations}))
        }


def svg(spans: Iterable[Span], title: str = "", unit: str = "") -> str:
    """Return an SVG with a row for each rank and a box with the micro-batch for each computation.

    The first stage of a rank has full colours; the following ones have lighter colours.

    Args:
        unit: unit of the times, for the label of the axis.
    """
    line = _Timeline(spans)
    duration = line.end - line.start
    scale = min(max((8 + 7 * line.digits) / line.short, 420 / duration), _WIDEST / duration)
    right, bottom = _LEFT + scale * duration, _TOP + _ROW * len(line.ranks)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{right + 12:.0f}" height="{bottom + 46}" '
        'font-family="system-ui, sans-serif" font-size="11" fill="#1d2329">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        _text(_LEFT, 20, title, 'font-size="13" font-weight="600"'),
    ]
    for row, (rank, computations) in enumerate(line.ranks.items()):
        y = _TOP + _ROW * row
        parts += [_text(_LEFT - 8, y + 16, f"rank {rank}", 'text-anchor="end"')]
        parts += [_box(_LEFT, y, right - _LEFT, "#f2f4f6")]
        for span in computations:
            x, width = _LEFT + scale * (span.start - line.start), scale * (span.end - span.start)
            fill, ink = _colours(span.action.op, line.chunks[span.action.stage])
            label = str(span.action.micro_batch)
            about = f"{span.action}: {span.start:g} to {span.end:g} {unit}".rstrip()
            parts.append(f"<g><title>{escape(about)}</title>{_box(x, y, width, fill)}")
            if width >= 4 + 6 * len(label):
                parts.append(_text(x + width / 2, y + 16, label, f'text-anchor="middle" fill="{ink}"'))
            parts.append("</g>")
    parts.append(_text(_LEFT, bottom + 11, f"{line.start:.4g}", 'fill="#5b6570"'))
    parts.append(_text(right, bottom + 11, f"{line.end:.4g} {unit}".rstrip(), 'fill="#5b6570" text-anchor="end"'))
    x = float(_LEFT)
    for op in line.ops:
        name = _words(op)
        for chunk in range(1 + max(line.chunks.values())):
            parts.append(_box(x, bottom + 22, 14, _colours(op, chunk)[0], height=14))
            x += 16
        parts.append(_text(x + 4, bottom + 33, name))
        x += 18 + 6 * len(name)
    return "\n".join([*parts, "</svg>", ""])


def _words(op: Op) -> str:
    return op.value.replace("_", " ")


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{escape(text)}</text>'


def _box(x: float, y: float, width: float, fill: str, height: int = _ROW - 3) -> str:
    return f'<rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height}" fill="{fill}" stroke="#fff"/>'


def _colours(op: Op, chunk: int) -> tuple[str, str]:
    """Return the colours of a box and of its text."""
    style = _STYLES[op]
    share = 1 - 0.6**chunk  # of white
    fill = "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in style.fill)
    return fill, style.ink if chunk == 0 else "#1d2329"


def text_chart(spans: Iterable[Span], columns: int | None = None, colour: bool = False) -> str:
    """Return a line of text for each rank, with a letter and the micro-batch for each computation.

    The letters are F (forward), B (backward), I (input gradient) and W (weight gradient), in lower case for all stages
    of a rank but its first; a dot is idle time.

    Args:
        columns: width of the time; None: wide enough for the labels.
        colour: use ANSI colours.
    """
    line = _Timeline(spans)
    scale = (2 + line.digits) / line.short if columns is None else columns / (line.end - line.start)
    margin = len(f"rank {max(line.ranks)} ")
    rows = []
    for rank, computations in line.ranks.items():
        row, used = f"rank {rank} ".ljust(margin), 0
        for span in computations:
            begin, end = (round(scale * (time - line.start)) for time in (span.start, span.end))
            style, chunk = _STYLES[span.action.op], line.chunks[span.action.stage]
            letter = style.letter.lower() if chunk else style.letter
            width = max(end - max(begin, used), 0)
            cell = f"{letter}{span.action.micro_batch}".ljust(width - 1, "-").ljust(width)[:width]
            row += "." * (begin - used) + (f"\x1b[30;48;5;{style.ansi}m{cell}\x1b[0m" if colour and cell else cell)
            used = max(used, end)
        rows.append(row.rstrip())
    return "\n".join([*rows, ""])


def trace_events(spans: Iterable[Span], microseconds: float = 1e6) -> list[dict[str, Any]]:
    """Return events of the Trace Event Format, which ui.perfetto.dev opens: a process for each rank.

    Args:
        microseconds: length of the spans' unit.
    """
    events: list[dict[str, Any]] = []
    ranks = set()
    for rank, action, start, end in spans:
        ranks.add(rank)
        number = f" {action.micro_batch}" if action.micro_batch >= 0 else ""
        events.append(
            {
                "name": _words(action.op) + number,
                "cat": "compute" if action.op in COMPUTATIONS else "pipeline",
                "ph": "X",
                "ts": round(start * microseconds, 3),
                "dur": round((end - start) * microseconds, 3),
                "pid": rank,
                "tid": 0,
                "args": {"stage": action.stage, "micro_batch": action.micro_batch},
            }
        )
    names = [
        {"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
        for rank in sorted(ranks)
    ]
    return names + events
