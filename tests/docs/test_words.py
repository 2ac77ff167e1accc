"""What the pages say exists, and what they say is missing is missing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardwise.config.unsupported import UNSUPPORTED
from shardwise.engine import PipelineEngine

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OF_AN_INSTANCE = {"accountant", "device", "global_steps", "last_load", "last_step", "module", "optimizer", "resumed"}
OF_AN_INSTANCE |= {"data", "global_samples", "job", "micro_steps", "monitor", "skipped_steps"}
ELSEWHERE = {"coalesce_grad_reduction", "flops_profiler", "safetensors"}  # named because they are not there


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_members_of_the_engine_that_a_page_names_exist(page: Path) -> None:
    for name in set(re.findall(r"`engine\.(\w+)", page.read_text(encoding="utf-8"))) - ELSEWHERE:
        assert name in OF_AN_INSTANCE or hasattr(PipelineEngine, name), f"engine.{name}"


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_what_is_called_missing_is_refused(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8").partition("not there yet")[2].partition("\n## ")[0]
    keys = {
        "ZenFlow": "zero_optimization.zenflow",
        "eigenvalues": "eigenvalue.enabled",
    }
    for words, key in keys.items():
        assert words in text and any(entry["path"] == key for entry in UNSUPPORTED), words
