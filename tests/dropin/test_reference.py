"""docs/reference/deepspeed-names.md is made from the tables."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tests.dropin.reference import update

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "deepspeed-names.md"


def test_the_page_is_up_to_date() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert update(text) == text, "run `python -m tests.dropin.reference docs/reference/deepspeed-names.md`"


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a line"):
        update("no marks")


def test_the_type_stubs_are_up_to_date() -> None:
    root = PAGE.parents[2] / "dropin"
    written = {str(file.relative_to(root)): file.read_text() for file in root.rglob("*.pyi")}
    assert written == runpy.run_path(str(root / "stubs.py"))["files"](), "run `python dropin/stubs.py`"
