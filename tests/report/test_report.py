"""The report of a run: what is in it, what damaged files do to it, and that nothing in them gets out of hand."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html.parser
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import ReportError
from shardwise.launch.cli import main
from shardwise.report import reading, summing, write_report
from shardwise.report.figures import figures
from shardwise.report.page import render
from shardwise.report.reading import read_run
from shardwise.report.rows import Row
from shardwise.report.summing import Summary
from shardwise.runfiles import FORMAT, RUN, events_file, steps_file
from tests.harness import thorough
from tests.harness.tables import tables

TABLES = tables(__file__)

EVIL = "</script><img src=x onerror=alert(1)><script>alert(2)</script><a href='javascript:alert(3)'>&amp;\u2028"
LIBRARY = "var Plotly = 1; // </script>"


def row(step: int, rank: int = 0, **more: Any) -> dict[str, Any]:
    waited = 0.1 if rank == 1 else 0.6
    return {
        **TABLES["row"],
        **{"time": 1.7e9 + step, "step": step, "samples": 8 * step, "lr": [0.1 / step], "applied": step != 3},
        "loss": 5.0 / step + rank,
        "communication": {"all_gather": [2, 100, 50, waited], "all_reduce": [1, 8, 8, 0.0]},
        "units": {"layers.0": waited},
        **more,
    }


ABOUT = {**TABLES["about"], "format": FORMAT}


def write(path: Path, steps: int = 6, ranks: int = 2, about: Any = ABOUT, **more: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / RUN).write_text(json.dumps(about))
    for rank in range(ranks):
        text = "".join(json.dumps(row(step, rank, **more)) + "\n" for step in range(1, steps + 1))
        (path / steps_file(rank)).write_text(text)
    return path


def warn(path: Path, rank: int, **event: Any) -> None:
    with open(path / events_file(rank), "a") as file:
        file.write(json.dumps({"time": 1.7e9, "rank": rank, "level": "warning", "text": "told", **event}) + "\n")


class Page(html.parser.HTMLParser):
    """What a browser would see."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[str | None, str]] = []
        self.said: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append((dict(attrs).get("type"), ""))

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][0] == "script" and self.cdata_elem == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif not self.cdata_elem:
            self.said.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.said))

    @property
    def figures(self) -> dict[str, Any]:
        return {one["name"]: one for one in json.loads(next(s for t, s in self.scripts if t == "application/json"))}


def test_a_run(tmp_path: Path) -> None:
    path = write(tmp_path / "run")
    warn(path, 1, kind="loss_spike", step=4, advice="Lower the learning rate.")
    warn(path, 1, kind="loss_spike", step=5, advice="Lower the learning rate.")
    page = Page(render(read_run(path), LIBRARY))
    text = page.text
    for part in TABLES["parts"]:
        assert part in text, (part, text)
    drawn = page.figures
    assert list(drawn) == ["loss", "speed", "gradients", "memory", "tiers", "communication", "units"]
    loss, lr = drawn["loss"]["data"][0], drawn["loss"]["data"][-1]
    assert loss["x"] == [1, 2, 3, 4, 5, 6] and loss["y"][1] == 3.0  # 2.5 and 3.5
    assert lr["yaxis"] == "y2" and lr["y"][1] == 0.05
    stack = {trace["name"]: trace["y"] for trace in drawn["memory"]["data"]}
    assert (stack["parameters"][0], stack["gathered window"][0], stack["planned"][0]) == (60, 40, 110)
    assert drawn["communication"]["data"][0]["x"] == [2 * 6 * 8, 2 * 6 * 50]
    charts = {attrs["id"] for tag, attrs in page.elements if attrs.get("class") == "chart"}
    assert charts == {f"chart-{name}" for name in drawn}
    assert [tag for tag, _ in page.elements].count("h1") == 1


def test_the_page_fetches_nothing_and_runs_its_own_scripts_only(tmp_path: Path) -> None:
    text = render(read_run(write(tmp_path / "run")), LIBRARY)
    page = Page(text)
    policy = next(attrs["content"] for tag, attrs in page.elements if tag == "meta" and "http-equiv" in attrs)
    assert policy is not None and policy.startswith("default-src 'none'; script-src 'sha256-")
    runs = [script for kind, script in page.scripts if kind is None]
    packed = next(script for kind, script in page.scripts if kind == "text/plain")
    assert gzip.decompress(base64.b64decode(packed)).decode() == LIBRARY
    for code in (*runs, LIBRARY):
        assert base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() in policy
    assert len(runs) == 1
    assert not [attrs for _, attrs in page.elements if "src" in attrs or "href" in attrs]
    assert "http://" not in text and "https://" not in text


def test_text_from_files_is_data(tmp_path: Path) -> None:
    evil = {
        name: EVIL for name in ("model", "device", "optimizer", "precision", "format", "stage", "parameters", "world")
    }
    about = {**ABOUT, **evil, "ranks": [{"host": EVIL}] * 2, "warnings": [EVIL], "versions": {EVIL: EVIL}}
    about |= {"configuration": {EVIL: EVIL}, "plan": {"tiers": {EVIL: 5, "device": 3}, "categories": {EVIL: 7}}}
    held = {"live": 1, "peak": 2, "at_peak": {EVIL: 1, "half \ud800": 1}, "peaks": {EVIL: 2}}
    counts = {"communication": {EVIL: [1, 2, 3, 0.5]}, "units": {EVIL: 0.5}, "phases": {EVIL: 1.0}}
    path = write(tmp_path / "run", about=about, memory={"device": held, EVIL: held}, **counts)
    warn(path, 0, kind=EVIL, text=EVIL, advice=EVIL, level=EVIL, step=EVIL, **{EVIL: EVIL})
    spans = [{"name": EVIL, "cat": EVIL, "ph": "X", "ts": 1, "dur": 2, "pid": 0, "tid": EVIL, "args": {EVIL: EVIL}}]
    (path / "timeline-0.json").write_text(json.dumps({"traceEvents": spans}))
    text = render(read_run(path), LIBRARY)
    page = Page(text)
    assert {tag for tag, _ in page.elements}.isdisjoint({"img", "a", "iframe"})
    assert [kind for kind, _ in page.scripts] == ["application/json", "text/plain", None]
    assert not [name for _, attrs in page.elements for name in attrs if name.startswith("on")]
    # plotly.js reads some HTML in texts, so there it is escaped once more.
    assert "<" not in json.dumps(page.figures)
    assert EVIL.partition("<img")[2][:20] in page.text


def test_what_is_damaged_is_said_and_the_rest_is_shown(tmp_path: Path) -> None:
    path = write(tmp_path / "run", about={**ABOUT, "format": 99})
    lines = (path / steps_file(0)).read_text().splitlines(True)
    lines[1] = "}{\n"
    lines[2] = '{"no": "step"}\n'
    lines[3] = "[" * 100_000 + "\n"
    lines[5] = lines[5][:50]
    (path / steps_file(0)).write_text("".join(lines))
    (path / steps_file(2)).write_bytes(b"\xff\xfe\n")
    with open(path / steps_file(1), "a") as file:
        file.write('{"step": 7, "lo')
    (path / "timeline-0.json").write_text("{")
    (path / "timeline-1.json").write_text('{"traceEvents": [1, {"ph": "X", "pid": "x"}]}')
    run = read_run(path)
    notes = "\n".join(run.notes)
    for part in (
        "run.json: format 99, and this version of shardwise reads format 1",
        "steps-00000.jsonl: 3 lines damaged (the first is line 2)",
        "steps-00000.jsonl: 1 line without a step",
        "steps-00001.jsonl: the last line is not whole",
        "steps-00002.jsonl: 1 line damaged",
        "steps-00002.jsonl: no step was written",
        "timeline-0.json is damaged",
        "timeline-1.json: 2 events without a rank or a time",
    ):
        assert part in notes, notes
    assert {rank: len(rows) for rank, rows in run.rows.items()} == {0: 2, 1: 6}
    assert "Not everything could be read" in Page(render(run, LIBRARY)).text


@pytest.mark.parametrize("about", ["", "[]", "{", None])
def test_without_what_is_run(about: str | None, tmp_path: Path) -> None:
    path = write(tmp_path / "run")
    if about is None:
        (path / RUN).unlink()
    else:
        (path / RUN).write_text(about)
    run = read_run(path)
    assert len(run.notes) == 1 and "run.json" in run.notes[0]
    assert "Steps 6" in Page(render(run, LIBRARY)).text


def test_no_steps_yet(tmp_path: Path) -> None:
    page = Page(render(read_run(write(tmp_path / "run", ranks=0)), LIBRARY))
    assert "No steps yet" in page.text and page.figures == {}


@pytest.mark.parametrize(
    "wrong", [None, 1e400, *map(thorough, ("x", [1], [], {}, -1, True, {"a": {"b": []}}, "nan", 10**400))]
)
def test_any_value_may_be_anything(wrong: Any) -> None:
    for name in set(row(1)) - {"step"}:
        found = Row.of({**row(5), name: wrong})
        assert found is not None
        run = reading.Run(Path("."), {**ABOUT, "plan": wrong, "limits": wrong}, {0: [found, found.then(found)]})
        assert Page(render(run, LIBRARY)).figures, name
    for name in ABOUT:
        assert Page(render(reading.Run(Path("."), {**ABOUT, name: wrong}), LIBRARY)).text, name


def test_a_job_that_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    path = write(tmp_path / "run", steps=6, ranks=1)
    with open(path / steps_file(0), "a") as file:
        for step in range(5, 9):
            file.write(json.dumps(row(step, loss=100.0)) + "\n")
    run = read_run(path)
    assert [(one.step, one.loss == 100.0) for one in run.rows[0]] == [(n, n > 4) for n in range(1, 9)]
    assert run.resumed == [4] and "Resumed after step 4" in Page(render(run, LIBRARY)).text


def test_long_runs_are_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MOST_ROWS", 10)
    monkeypatch.setattr(summing, "MOST_POINTS", 5)
    run = read_run(write(tmp_path / "run", steps=100, ranks=1))
    rows = run.rows[0]
    assert 10 <= len(rows) < 20 and sum(one.steps for one in rows) == 100
    assert [one.first for one in rows] == [1, *(one.step + 1 for one in rows[:-1])]
    assert sum(one.communication["all_gather"][0] for one in rows) == 200
    summary = Summary(run)
    assert summary.ranks[0].whole.seconds == pytest.approx(100)
    assert sum(one.skipped for one in rows) == 1


def test_figures_are_what_plotly_takes(tmp_path: Path) -> None:
    graphs = pytest.importorskip("plotly.graph_objects")
    path = write(tmp_path / "run", loss_scale=1024.0)
    spans = [{"name": "f", "cat": "wait", "ph": "X", "ts": 1, "dur": 2, "pid": 0, "tid": 1}]
    (path / "timeline-0.json").write_text(json.dumps(spans))
    drawn = figures(Summary(read_run(path)))
    assert len(drawn) == 8
    for figure in drawn.values():
        spec = json.loads(re.sub(r'"@\w+"', '"#123456"', json.dumps(figure.spec)))
        assert graphs.Figure(data=spec["data"], layout=spec["layout"]).data  # raises for what plotly does not know


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("plotly")
    path = write(tmp_path / "run")
    with pytest.raises(SystemExit) as ended:
        main(["report", str(path)])
    assert ended.value.code == 0 and capsys.readouterr().out.strip() == str(path / "report.html")
    size = (path / "report.html").stat().st_size
    assert 500_000 < size < 4_000_000
    assert sorted(entry.name for entry in path.iterdir()) == sorted(["report.html", RUN, steps_file(0), steps_file(1)])
    with pytest.raises(ReportError, match="cannot be written"):
        write_report(path, tmp_path / "no" / "x.html")


def test_errors_name_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ReportError, match="does not exist"):
        read_run(tmp_path / "no")
    with pytest.raises(ReportError, match="nothing of a run is here"):
        read_run(tmp_path)
    write(tmp_path / "run")
    with pytest.raises(ReportError, match=r"such as \S*/run"):
        read_run(tmp_path)
    with pytest.raises(ReportError, match="is a file"):
        read_run(tmp_path / "run" / RUN)
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ReportError, match=r'pip install "shardwise\[report\]"'):
        write_report(tmp_path / "run")
