"""The README's numbers are those of the benchmarks' results."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_readme_shows_what_was_measured() -> None:
    table = runpy.run_path(str(ROOT / "bench" / "table.py"))
    readme = (ROOT / "README.md").read_text()
    assert table["fill"](readme) == readme, "run `python bench/table.py README.md`"
