"""Names of this package that docstrings and pages give exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"`(shardwise(?:_deepspeed)?(?:\.\w+)+)(?:\(\))?`")
CODE = [file for folder in ("src", "dropin") for file in sorted((ROOT / folder).rglob("*.py"))]
FILES = [*CODE, *sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]


def exists(name: str) -> bool:
    """Return whether a dotted name is a module, or an attribute of one."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            fields = getattr(found, "__annotations__", {})
            if not hasattr(found, part) and part not in fields:
                return False
            found = getattr(found, part, None)
        return True
    return False


@pytest.mark.parametrize("where", ["src", "dropin", "docs", "README.md"])
def test_names_exist(where: str) -> None:
    files = [file for file in FILES if file.relative_to(ROOT).parts[0] == where]
    named = {(name, str(file.relative_to(ROOT))) for file in files for name in NAME.findall(file.read_text("utf-8"))}
    assert [pair for pair in sorted(named) if not exists(pair[0])] == []
