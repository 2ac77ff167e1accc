"""The numbers in the README and the docs are those of the benchmarks' results."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return runpy.run_path(str(ROOT / "bench" / "table.py"))


@pytest.mark.parametrize(
    "page", ["README.md", "docs/numbers.md", "docs/convergence.md", "docs/gpu.md", "docs/pipeline.md"]
)
def test_a_page_shows_what_was_measured(table: dict[str, Any], page: str) -> None:
    written = (ROOT / page).read_text()
    assert table["page"](ROOT / page, table["Results"](RESULTS)) == written, (
        f"run `python bench/table.py README.md docs/numbers.md`: {page} is not made of bench/results"
    )
    for name in re.findall(r"\]\(images/(\w+\.png|pipeline_idle\.svg)\)", written):
        assert (ROOT / page).with_name("images").joinpath(name).read_bytes() == (RESULTS / name).read_bytes()


def test_sequences_stay_within_the_limit_that_is_shown(table: dict[str, Any]) -> None:
    header, _, *rows = table["longest"](table["Results"](RESULTS))
    names = [cell.strip() for cell in header.split("|")]
    limit, peak = names.index("limit, MiB"), names.index("peak, MiB")
    assert rows
    for row in rows:
        cells = row.split("|")
        assert float(cells[peak]) <= float(cells[limit])


def test_missing_figures_are_dashes(table: dict[str, Any], tmp_path: Path) -> None:
    results = table["Results"](tmp_path)
    row = next(line for line in table["short"](results).splitlines() if line.startswith("| DeepSpeed 2 "))
    assert set(row.split("|")[2:-1]) == {" - "}
    for section in table["SECTIONS"]:
        assert section.lines(results)[-1] == "Not measured yet."
