"""HTML page of the report: headings, numbers and tables, and the figures' data.

Content from files is escaped. A Content-Security-Policy allows only the page's own two scripts and no requests.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from shardwise._version import __version__
from shardwise.errors import ReportError
from shardwise.units import UNKNOWN, format_count, format_duration, format_percent, format_size

from .figures import Figure, figures
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
    summary = Summary(run)
    drawn = figures(summary)
    script = resources.files(__package__).joinpath("page.js").read_text(encoding="utf-8")
    style = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    hashes = " ".join(_hash(code) for code in (script, library))
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"
    title = f"{_text(run.about.get('model')) or 'Run'} - {run.path.resolve().name}"
    packed = base64.b64encode(gzip.compress(library.encode(), mtime=0)).decode()
    specs = json.dumps([figure.spec for figure in drawn.values()], allow_nan=False, separators=(",", ":"))
    return "".join(
        [
            "<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n",
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
            "<meta name='viewport' content='width=device-width, initial-scale=1'>\n",
            f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n",
            *_sections(summary, drawn),
            f"<footer>shardwise {escape(__version__)}, from {escape(str(run.path))}. Drawn by plotly.js.</footer>\n",
            "</main>\n",
            f"<script type='application/json' id='figures'>{_inside_script(specs)}</script>\n",
            f"<script type='text/plain' id='library'>{packed}</script>\n" if drawn else "",
            f"<script>{script}</script>\n</body>\n</html>\n",
        ]
    )


def _hash(code: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}'"


def _inside_script(text: str) -> str:
    """Escape JSON, because it must not close its script element."""
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        return ""
    return value if len(value) <= MOST_TEXT else f"{value[:MOST_TEXT]} …"


def _sections(summary: Summary, drawn: Mapping[str, Figure]) -> Iterable[str]:
    run = summary.run
    yield from _head(summary)
    if run.notes:
        notes = "".join(f"<li>{escape(_text(note))}</li>" for note in run.notes)
        heading = "<h2 id='notes'>Not everything could be read</h2>"
        yield f"<section class='notes' aria-labelledby='notes'>{heading}<ul>{notes}</ul></section>\n"
    if not summary.points:
        yield (
            "<section><h2>No steps yet</h2><p>No rank has written a step: the run has just begun, or has ended before "
            "its first step.</p></section>\n"
        )
    yield from _warnings(run.events, _configured(run))
    box = {name: _figure(figure) for name, figure in drawn.items()}
    yield _two_columns(box.get("loss", ""), box.get("speed", ""))
    yield _two_columns(box.get("memory", ""), box.get("tiers", ""))
    yield _memory_table(summary)
    yield _two_columns(box.get("communication", "") + _ranks_table(summary), box.get("units", ""))
    yield box.get("gradients", "")
    yield box.get("timeline", "")
    yield from _configuration(run)


def _two_columns(left: str, right: str) -> str:
    return f"<div class='pair'><div>{left}</div><div>{right}</div></div>\n" if left and right else left or right


def _figure(figure: Figure) -> str:
    name = f"title-{figure.name}"
    return (
        f"<section aria-labelledby='{name}'><h2 id='{name}'>{escape(figure.title)}</h2><figure>"
        f"<div class='chart' id='chart-{figure.name}' style='height:{figure.height}px' role='img' "
        f"aria-labelledby='{name}' aria-describedby='caption-{figure.name}'></div>"
        f"<figcaption id='caption-{figure.name}'>{escape(figure.caption)}</figcaption></figure></section>\n"
    )


# -- the head ----------------------------------------------------------------------------------------------------------


def _head(summary: Summary) -> Iterable[str]:
    about, ranks = summary.run.about, summary.ranks
    yield f"<h1>{escape(_text(about.get('model')) or 'Run')}</h1>\n"
    parameters, world = number(about.get("parameters")), number(about.get("world")) or len(ranks)
    stage = about.get("stage")
    under = [
        f"{format_count(parameters)} parameters" if parameters else "",
        f"ZeRO stage {stage}" if isinstance(stage, int) else "",
        f"{format_count(world)} rank{'s' * (world != 1)}" if world else "",
        _machines(summary),
        _period(summary),
    ]
    yield f"<p class='under'>{escape(' · '.join(part for part in under if part))}</p>\n"
    yield "<dl class='tiles'>"
    for name, value, small in _tiles(summary):
        yield f"<div class='tile'><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(small)}</small></dd></div>"
    yield "</dl>\n"
    facts = list(_facts(summary))
    if facts:
        rows = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
        yield f"<section aria-labelledby='run'><h2 id='run'>The run</h2><dl class='facts'>{rows}</dl></section>\n"


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


def _warnings(events: Sequence[Event], configured: Sequence[Event]) -> Iterable[str]:
    events = [*configured, *events]
    if not events:
        yield "<section aria-labelledby='warnings'><h2 id='warnings'>Warnings</h2><p>None.</p></section>\n"
        return
    kinds: dict[str, list[Event]] = {}
    for event in events:
        kinds.setdefault(_text(event.get("kind")) or "warning", []).append(event)
    yield f"<section aria-labelledby='warnings'><h2 id='warnings'>Warnings ({len(events):,})</h2><ul class='kinds'>"
    for kind, own in sorted(kinds.items(), key=lambda item: (item[0] == "warning", -len(item[1]))):
        # The kind "warning" has many causes.
        several = list({_text(event.get("text")): event for event in own}.values())
        advised = [event for event in own if _text(event.get("advice"))] or own
        for event in several[:8] if kind == "warning" else advised[-1:]:
            yield _kind(kind, event, own if kind != "warning" else [event])
    yield "</ul>"
    if len(events) > 1:
        yield f"<details><summary>One by one{_of_listed(len(events))}</summary>{_list(events[-_LISTED:])}</details>"
    yield "</section>\n"


def _of_listed(count: int) -> str:
    return f" (the last {_LISTED} of {count:,})" if count > _LISTED else ""


def _kind(kind: str, event: Event, all_of_it: Sequence[Event]) -> str:
    ranks = sorted({one["rank"] for one in all_of_it if isinstance(one.get("rank"), int)})
    steps = [one["step"] for one in all_of_it if isinstance(one.get("step"), int)]
    caption = [
        f"{len(all_of_it)} times" if len(all_of_it) > 1 else "",
        (f"steps {min(steps)} to {max(steps)}" if len(set(steps)) > 1 else f"step {steps[0]}") if steps else "",
        f"rank{'s' * (len(ranks) > 1)} {_some(ranks)}" if ranks else "",
    ]
    bad = " class='error'" if event.get("level") in ("error", "critical") else ""
    advice = _text(event.get("advice"))
    return (
        f"<li{bad}><div class='head'><b>{escape(kind.replace('_', ' '))}</b>"
        f"<span>{escape(', '.join(part for part in caption if part))}</span></div>"
        f"<p>{escape(_text(event.get('text')))}</p>"
        + (f"<p class='advice'>{escape(advice)}</p>" if advice else "")
        + "</li>"
    )


def _some(ranks: Sequence[int]) -> str:
    return (
        ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{', '.join(map(str, ranks[:8]))} and {len(ranks) - 8} more"
    )


def _list(events: Sequence[Event]) -> str:
    rows = []
    for event in events:
        at = number(event.get("time"))
        clock = time.strftime("%H:%M:%S", time.localtime(at)) if at and 0 < at < 1e11 else UNKNOWN
        facts = {name: value for name, value in event.items() if name not in _KNOWN}
        more = f"\n{json.dumps(facts, ensure_ascii=False)[:500]}" if facts else ""
        step = event.get("step")
        cells = (clock, step if isinstance(step, int) else UNKNOWN, event.get("rank", UNKNOWN), event.get("kind", ""))
        rows.append(
            "<tr>"
            + "".join(f"<td>{escape(str(cell)[:80])}</td>" for cell in cells)
            + f"<td class='text'>{escape(_text(event.get('text')) + more)}</td></tr>"
        )
    heads = "".join(f"<th scope='col'>{name}</th>" for name in ("time", "step", "rank", "kind", "what"))
    return _scroll(
        "Warnings, one by one", f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


# -- tables ------------------------------------------------------------------------------------------------------------


def _scroll(name: str, table: str) -> str:
    return f"<div class='scroll' role='region' aria-label='{escape(name)}' tabindex='0'>{table}</div>"


def _table(name: str, columns: Sequence[str], rows: Iterable[Sequence[str]], total: bool = False) -> str:
    head = "".join(f"<th scope='col'{' class=n' * bool(place)}>{escape(c)}</th>" for place, c in enumerate(columns))
    body = []
    found = list(rows)
    for line, cells in enumerate(found):
        mark = " class='total'" if total and line == len(found) - 1 else ""
        body.append(
            f"<tr{mark}><th scope='row'>{escape(cells[0])}</th>"
            + "".join(f"<td class='n'>{escape(cell)}</td>" for cell in cells[1:])
            + "</tr>"
        )
    return _scroll(name, f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>")


def _memory_table(summary: Summary) -> str:
    rank = summary.largest
    if rank is None:
        return ""
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
    table = _table("Memory against plan", ("", "planned", "measured", "difference"), rows, total=True)
    caption = (
        f"Most that rank {rank.number} held at once in each category, which need not be at the same moment."
        + ("" if planned else " There is no plan: run_log.plan is off, or the plan could not be made.")
        + _moved(rank)
    )
    return (
        "<section aria-labelledby='against'><h2 id='against'>Memory against plan</h2>"
        f"{table}<p class='after'>{escape(caption)}</p></section>\n"
    )


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


def _ranks_table(summary: Summary) -> str:
    ranks = summary.ranks
    if not ranks:
        return ""
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
    columns = ("rank", "step", "waits", "share", "was last", "device", "process")
    verdict = _verdict(known) if on_host and len(known) > 1 else ""
    caption = (
        "Sorted by who waits least: the others wait for that one. Was last: at how many points it waited least of all. "
        "Times are of a step in the mean, without the first."
    )
    if not on_host:
        caption += " With NCCL the device waits, not the host, so waiting is not seen here: see the timeline."
    return (
        "<section aria-labelledby='ranks'><h2 id='ranks'>Ranks</h2>"
        + (f"<p>{escape(verdict)}</p>" if verdict else "")
        + _table("Ranks", columns, rows)
        + f"<p class='after'>{escape(caption)}</p></section>\n"
    )


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


def _configuration(run: Run) -> Iterable[str]:
    found = run.about.get("configuration")
    if isinstance(found, dict):
        text = json.dumps(found, indent=2, ensure_ascii=False)
        yield (
            "<section aria-labelledby='configuration'><h2 id='configuration'>Configuration</h2><details>"
            "<summary>Every value that the run used; keys and passwords are left out</summary>"
            f"<pre tabindex='0'>{escape(text)}</pre></details></section>\n"
        )
