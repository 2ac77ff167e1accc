"""docs/reference/deepspeed-names.md and the type stubs are made from the tables."""

from __future__ import annotations

import runpy
from pathlib import Path

from tests.dropin.reference import PAGE


def test_the_page_is_up_to_date() -> None:
    PAGE.check()


def test_the_type_stubs_are_up_to_date() -> None:
    root = Path(__file__).parents[2] / "dropin"
    written = {str(file.relative_to(root)): file.read_text() for file in root.rglob("*.pyi")}
    assert written == runpy.run_path(str(root / "stubs.py"))["files"](), "run `python dropin/stubs.py`"
