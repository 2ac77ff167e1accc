"""Every statement that public scripts and libraries import with: it works, or fails because its author asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise_deepspeed.entries import tomllib

STATEMENTS: dict[str, dict[str, str]] = tomllib.loads((Path(__file__).parent / "imports.toml").read_text())
pytestmark = pytest.mark.usefixtures("installed")


@pytest.mark.parametrize("who", STATEMENTS["works"])
def test_statements_work(who: str) -> None:
    for statement in STATEMENTS["works"][who].strip().splitlines():
        names: dict[str, Any] = {}
        exec(statement, names)  # this project's own list
        assert len(names) > 1, statement


@pytest.mark.parametrize("who", STATEMENTS["fails"])
def test_statements_that_ask_get_an_answer(who: str) -> None:
    for statement in STATEMENTS["fails"][who].strip().splitlines():
        with pytest.raises(ImportError):
            exec(statement, {})
