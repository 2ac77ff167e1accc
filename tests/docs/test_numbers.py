"""The numbers in the README and the docs are those of the benchmarks' results."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
PAGES = [
    str(page.relative_to(ROOT))
    for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))
    if "<!-- table " in page.read_text()
]


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return runpy.run_path(str(ROOT / "bench" / "report.py"))


@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_what_was_measured(report: dict[str, Any], page: str) -> None:
    written = (ROOT / page).read_text()
    assert report["page"](written, RESULTS) == written, f"run `python bench/report.py {page}`"
    for name in re.findall(r"\]\(images/(\w+\.(?:png|svg))\)", written):
        if (RESULTS / name).exists():
            assert (ROOT / page).with_name("images").joinpath(name).read_bytes() == (RESULTS / name).read_bytes()


def test_every_result_has_rows_of_one_form() -> None:
    files = sorted(RESULTS.glob("*.json"))
    assert len(files) > 40
    for file in files:
        record = json.loads(file.read_text())
        assert record.keys() == {"benchmark", "command", "when", "machine", "notes", "rows"}, file.name
        assert record["benchmark"] == file.stem and {"torch", "cores"} <= record["machine"].keys()
        for row in record["rows"]:
            assert list(row) == ["system", "setting", "metric", "value", "unit"], file.name
        keys = [json.dumps([row["system"], row["setting"], row["metric"], row["unit"]]) for row in record["rows"]]
        assert len(keys) == len(set(keys)), file.name


def test_sequences_stay_within_the_limit_that_is_shown(report: dict[str, Any]) -> None:
    rows = report["load"](RESULTS, "longest_sequence_2")["rows"]
    assert rows and all(row["peak_mib"] <= row["limit_mib"] for row in rows if row["tokens"])


def test_missing_figures_are_dashes(report: dict[str, Any], tmp_path: Path) -> None:
    lines = report["TABLES"]["readme"].lines(tmp_path)
    row = next(line for line in lines if line.startswith("| DeepSpeed 2 "))
    assert set(row.split("|")[2:-1]) == {" - "}
    others = [table for name, table in report["TABLES"].items() if name != "readme"]
    assert all(table.lines(tmp_path) == ["Not measured yet."] for table in others)


def test_rows_keep_what_was_measured(report: dict[str, Any], tmp_path: Path) -> None:
    harness = runpy.run_path(str(ROOT / "bench" / "harness.py"))
    row = {"system": "a", "setting": {"ranks": 2}, "median_ms": 1.5, "save_gb_per_s": 2.0, "runs": [1, 2], "gone": None}
    rows = harness["long"]([row])
    assert rows[0] == {
        "system": "a", "setting": {"ranks": 2}, "metric": "median", "value": 1.5, "unit": "ms"
    }  # fmt: skip
    assert [row["unit"] for row in rows] == ["ms", "GB/s", ""]
    assert harness["wide"](rows) == [
        {"system": "a", "ranks": 2, "median_ms": 1.5, "save_gb_per_s": 2.0, "runs": [1, 2]}
    ]
