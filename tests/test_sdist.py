"""What the tests read is in the source distribution."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_what_tests_read_is_in_the_source_distribution() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11 and later
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    read = {
        name
        for path in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r'\bROOT / "([^"/]+)', path.read_text())
        if (ROOT / name).exists()
    }
    assert "bench" in read and read <= {*targets["sdist"]["include"], "pyproject.toml"}


def test_the_tests_of_all_versions_exist() -> None:
    text = (ROOT / "noxfile.py").read_text()
    named = re.findall(r'"(tests/[\w/]+\.py)"', text)
    assert len(named) > 10 and all((ROOT / name).exists() for name in named)
