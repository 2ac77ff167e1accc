"""HTML page of the report: numbers and tables for the template `page.html`, and the figures' data.

The template escapes content from files. A Content-Security-Policy allows only the page's own two scripts and no
requests.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from shardwise._version import __version__
from shardwise.errors import ReportError
from shardwise.units import UNKNOWN, format_count, format_duration, format_percent, format_size

from .figures import figures
from .reading import MOST_TEXT, Event, Run, read_run
from .rows import highest, number
from .summing import Rank, Summary

PACKAGE = "plotly"
_KNOWN = ("time", "step", "rank", "level", "text", "kind", "advice")
_LISTED = 200  # maximum number of individually listed warnings


def write_report(directory: Path, out: Path | None = None) -> Path:
    """Write the report of a run directory, by default to `report.html` in it, and return its path.

    Raises a ReportError if the directory has no run, plotly is not installed, or the file cannot be written.
    """
    library = _library()
    page = render(read_run(directory), library)
    out = directory / "report.html" if out is None else out
    hidden = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        hidden.write_text(page, encoding="utf-8", errors="replace")  # JSON may contain unpaired surrogates
        os.replace(hidden, out)
    except OSError as error:
        hidden.unlink(missing_ok=True)
        raise ReportError(f"{out}: cannot be written: {error.strerror}. Name another file with -o") from error
    return out


def _library() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ReportError(
            f'the report is drawn by the package "{PACKAGE}", which cannot be imported ({error}); '
            '`pip install "shardwise[report]"`'
        ) from error
    return str(get_plotlyjs())


def render(run: Run, library: str) -> str:
    """Return the page of a run; `library` is plotly.js."""
    from jinja2 import Environment
    from markupsafe import Markup

    summary, about = Summary(run), run.about
    drawn = figures(summary)
    html, script, style = (
        resources.files(__package__).joinpath(f"page.{suffix}").read_text("utf-8") for suffix in ("html", "js", "css")
    )
    hashes = " ".join(script_hash(code) for code in (script, library))
    heading = _text(about.get("model")) or "Run"
    configuration = about.get("configuration")
    shown = json.dumps(configuration, indent=2, ensure_ascii=False) if isinstance(configuration, dict) else ""
    events = [*_configured(run), *run.events]
    specs = json.dumps([figure.spec for figure in drawn.values()], allow_nan=False, separators=(",", ":"))
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(html).render(
        policy=Markup(f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"),
        title=f"{heading} - {run.path.resolve().name}",
        style=Markup(style),
        heading=heading,
        under=_under(summary),
        tiles=_tiles(summary),
        facts=list(_facts(summary)),
        notes=[_text(note) for note in run.notes],
        steps=summary.points,
        events=len(events),
        kinds=_kinds(events),
        listed=[_listed(event) for event in events[-_LISTED:]],
        figures=drawn,
        memory=_memory(summary),
        ranks=_ranks(summary),
        configuration=shown,
        version=__version__,
        path=run.path,
        specs=Markup(_inside_script(specs)),
        packed=base64.b64encode(gzip.compress(library.encode(), mtime=0)).decode() if drawn else "",
        script=Markup(script),
    )


def script_hash(code: str) -> str:
    """Return the source expression of a script for a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}'"


def _inside_script(text: str) -> str:
    """Escape JSON, because it must not close its script element."""
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        return ""
    return value if len(value) <= MOST_TEXT else f"{value[:MOST_TEXT]} …"


# -- the head ----------------------------------------------------------------------------------------------------------


def _under(summary: Summary) -> list[str]:
    about = summary.run.about
    parameters, world = number(about.get("parameters")), number(about.get("world")) or len(summary.ranks)
    stage = about.get("stage")
    return [
        f"{format_count(parameters)} parameters" if parameters else "",
        f"ZeRO stage {stage}" if isinstance(stage, int) else "",
        f"{format_count(world)} rank{'s' * (world != 1)}" if world else "",
        _machines(summary),
        _period(summary),
    ]


def _machines(summary: Summary) -> str:
    about = summary.run.about
    ranks = about.get("ranks")
    hosts = {summary.host(rank) for rank in range(len(ranks) if isinstance(ranks, list) else 0)} - {None}
    device = _text(about.get("device")).replace("cpu", "CPU")
    where = f"{len(hosts)} machines" if len(hosts) > 1 else next((f"on {_text(host)}" for host in hosts), "")
    return " ".join(part for part in (where, f"({device})" if device else "") if part)


def _period(summary: Summary) -> str:
    begun = number(summary.run.about.get("time"))
    ended = max((rank.whole.time for rank in summary.ranks), default=0.0)
    if not begun or not 0 < begun < 1e11:
        return ""
    caption = time.strftime("%Y-%m-%d %H:%M", time.localtime(begun))
    return f"{caption}, {format_duration(ended - begun)}" if ended > begun else caption


def _tiles(summary: Summary) -> Iterable[tuple[str, str, str]]:
    total = number(summary.run.about.get("total_steps"))
    skipped = max((rank.whole.skipped for rank in summary.ranks), default=0)
    small = [f"of {format_count(total)}" if total else "", f"{skipped} skipped" if skipped else ""]
    yield "Steps", format_count(summary.steps), ", ".join(part for part in small if part)
    if summary.last_loss is not None:
        first = next((loss for point in summary.points if (loss := point.mean("loss")) is not None), None)
        yield "Loss", f"{summary.last_loss:.4g}", f"mean of the last tenth; first {first:.4g}"
    yield "Step time", format_duration(summary.step_seconds), "mean, without the first"
    what = "tokens" if summary.rate("tokens") else "samples"
    per_rank = summary.rate(what)
    ranks = len(summary.ranks)
    small_rate = f"{format_count(per_rank / ranks)} a rank" if per_rank and ranks > 1 else ""
    yield f"{what.capitalize()}/s", format_count(per_rank), small_rate
    if summary.largest is not None:
        peak = summary.largest.whole.memory["device"].peak
        plan, limit = summary.planned("tiers").get("device"), summary.limits().get("device")
        against = f"planned {format_size(plan)}" if plan else "no plan"
        yield "Peak on the device", format_size(peak), f"{against}, limit {format_size(limit)}" if limit else against
    waits = [rank.waited / rank.step_seconds for rank in summary.ranks if rank.step_seconds]
    if ranks > 1 and waits:
        yield "Waiting for others", format_percent(sum(waits) / len(waits), 1.0), "of the time, in the mean over ranks"


def _facts(summary: Summary) -> Iterable[tuple[str, str]]:
    about = summary.run.about
    batch, versions = about.get("batch"), about.get("versions")
    if isinstance(batch, dict):
        total, micro, steps = (format_count(number(batch.get(name))) for name in ("total", "micro", "accumulation"))
        yield "Batch", f"{total} samples a step: micro-batch {micro}, accumulation {steps}"
    if isinstance(about.get("optimizer"), str):
        yield "Optimizer", _text(about["optimizer"])
    if isinstance(about.get("precision"), str):
        yield "Precision", _text(about["precision"])
    if isinstance(versions, dict):
        yield "Versions", ", ".join(f"{_text(name)} {_text(value)}" for name, value in versions.items())
    if summary.run.resumed:
        steps = ", ".join(str(step) for step in summary.run.resumed[:10])
        yield "Resumed", f"after step {steps}; rows of steps that were taken twice are those of the last time"


# -- warnings ----------------------------------------------------------------------------------------------------------


def _configured(run: Run) -> list[Event]:
    found = run.about.get("warnings")
    begun = run.about.get("time")
    texts = [text for text in found if isinstance(text, str)] if isinstance(found, list) else []
    return [{"kind": "configuration", "text": text, "rank": 0, "level": "warning", "time": begun} for text in texts]


def _kinds(events: Sequence[Event]) -> Iterable[dict[str, Any]]:
    """Yield the warnings by kind, the most frequent one first."""
    kinds: dict[str, list[Event]] = {}
    for event in events:
        kinds.setdefault(_text(event.get("kind")) or "warning", []).append(event)
    for kind, own in sorted(kinds.items(), key=lambda item: (item[0] == "warning", -len(item[1]))):
        # The kind "warning" has many causes.
        several = list({_text(event.get("text")): event for event in own}.values())
        advised = [event for event in own if _text(event.get("advice"))] or own
        for event in several[:8] if kind == "warning" else advised[-1:]:
            yield _kind(kind, event, own if kind != "warning" else [event])


def _kind(kind: str, event: Event, all_of_it: Sequence[Event]) -> dict[str, Any]:
    ranks = sorted({one["rank"] for one in all_of_it if isinstance(one.get("rank"), int)})
    steps = [one["step"] for one in all_of_it if isinstance(one.get("step"), int)]
    return {
        "name": kind.replace("_", " "),
        "caption": [
            f"{len(all_of_it)} times" if len(all_of_it) > 1 else "",
            (f"steps {min(steps)} to {max(steps)}" if len(set(steps)) > 1 else f"step {steps[0]}") if steps else "",
            f"rank{'s' * (len(ranks) > 1)} {_some(ranks)}" if ranks else "",
        ],
        "bad": event.get("level") in ("error", "critical"),
        "text": _text(event.get("text")),
        "advice": _text(event.get("advice")),
    }


def _some(ranks: Sequence[int]) -> str:
    return (
        ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{', '.join(map(str, ranks[:8]))} and {len(ranks) - 8} more"
    )


def _listed(event: Event) -> tuple[str, ...]:
    at = number(event.get("time"))
    clock = time.strftime("%H:%M:%S", time.localtime(at)) if at and 0 < at < 1e11 else UNKNOWN
    facts = {name: value for name, value in event.items() if name not in _KNOWN}
    more = f"\n{json.dumps(facts, ensure_ascii=False)[:500]}" if facts else ""
    step = event.get("step")
    cells = (clock, step if isinstance(step, int) else UNKNOWN, event.get("rank", UNKNOWN), event.get("kind", ""))
    return (*(str(cell)[:80] for cell in cells), _text(event.get("text")) + more)


# -- tables ------------------------------------------------------------------------------------------------------------


def _memory(summary: Summary) -> dict[str, Any]:
    rank = summary.largest
    if rank is None:
        return {}
    device = rank.whole.memory["device"]
    planned = summary.planned("categories")
    # The first row of a rank includes memory of the engine's construction.
    names = [name for name, size in highest(device.peaks, planned).items() if size]
    rows = [
        [
            name,
            format_size(planned.get(name)),
            format_size(device.peaks.get(name, 0.0)),
            _beyond(device.peaks, planned, name),
        ]
        for name in names
    ]
    tiers = summary.planned("tiers")
    for tier in (*[name for name in rank.whole.memory if name != "device"], "device"):
        peak = rank.whole.memory[tier].peak
        rows.append(
            [f"on {tier}, at most", format_size(tiers.get(tier)), format_size(peak), _beyond({tier: peak}, tiers, tier)]
        )
    caption = (
        f"Most that rank {rank.number} held at once in each category, which need not be at the same moment."
        + ("" if planned else " There is no plan: run_log.plan is off, or the plan could not be made.")
        + _moved(rank)
    )
    return {"rows": rows, "caption": caption}


def _moved(rank: Rank) -> str:
    each = [
        f" {tier}: {format_size(read / rank.whole.steps)} read and {format_size(written / rank.whole.steps)} written"
        for tier, (read, written) in rank.whole.moved.items()
    ]
    return f" Moved in a step:{';'.join(each)}." if each else ""


def _beyond(measured: Mapping[str, float], planned: Mapping[str, float], name: str) -> str:
    if not planned.get(name) or name not in measured:
        return UNKNOWN
    return f"{100 * (measured[name] / planned[name] - 1):+.0f} %".replace("-0 %", "0 %").replace("+0 %", "0 %")


def _ranks(summary: Summary) -> dict[str, Any]:
    ranks = summary.ranks
    if not ranks:
        return {}
    known = [rank for rank in ranks if rank.step_seconds]
    on_host = summary.run.about.get("waits_on_host") is not False
    rows = []
    for rank in sorted(ranks, key=lambda rank: rank.waited):
        seconds = rank.step_seconds
        device = rank.whole.memory.get("device")
        rows.append(
            [
                f"{rank.number}" + (f" ({rank.host})" if rank.host else ""),
                format_duration(seconds),
                format_duration(rank.waited),
                format_percent(rank.waited, seconds or 0.0),
                format_count(rank.last) if len(ranks) > 1 else UNKNOWN,
                format_size(device.peak if device else None),
                format_size(rank.whole.resident or None),
            ]
        )
    verdict = _verdict(known) if on_host and len(known) > 1 else ""
    caption = (
        "Sorted by who waits least: the others wait for that one. Was last: at how many points it waited least of all. "
        "Times are of a step in the mean, without the first."
    )
    if not on_host:
        caption += " With NCCL the device waits, not the host, so waiting is not seen here: see the timeline."
    return {"rows": rows, "verdict": verdict, "caption": caption}


def _verdict(ranks: Sequence[Rank]) -> str:
    ordered = sorted(ranks, key=lambda rank: rank.waited)
    slowest, others = ordered[0], ordered[1:]
    theirs = sum(rank.waited for rank in others) / len(others)
    step = max(rank.step_seconds or 0.0 for rank in ranks)
    if theirs - slowest.waited < 0.05 * step:
        return "No rank is waited for more than the others."
    return (
        f"Rank {slowest.number} is waited for: it waits {format_duration(slowest.waited)} in a step, the others "
        f"{format_duration(theirs)}. Without the difference a step would take up to "
        f"{format_percent(theirs - slowest.waited, step)} less."
    )
