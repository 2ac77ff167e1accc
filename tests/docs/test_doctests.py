"""Examples in docstrings run."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

import shardwise

ROOT = Path(shardwise.__file__).parent
FILES = sorted(file for file in ROOT.rglob("*.py") if ">>> " in file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_examples_run(file: Path) -> None:
    for package in re.findall(
        r"^(?: *>>> )?from (mlflow|transformers)\b", file.read_text(encoding="utf-8"), re.MULTILINE
    ):
        pytest.importorskip(package)
    name = ".".join(("shardwise", *file.relative_to(ROOT).with_suffix("").parts))
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.testmod(importlib.import_module(name), optionflags=options).failed == 0
