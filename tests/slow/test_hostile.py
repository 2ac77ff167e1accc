"""A small part of `make hostile`: processes that call every port of a job change no bit of its result."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.jobs import environment

ROOT = Path(__file__).parents[2]


@pytest.mark.thorough
@pytest.mark.limit(600)
def test_forged_messages_change_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.slow.hostile", "--minutes", "0.3", "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment(), cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    rows = json.loads((tmp_path / "hostile.json").read_text())["rows"]
    result = {row["metric"]: row["value"] for row in rows}
    assert result["episodes_that_differ"] == 0 and result["calls"] > 0 and result["rescues"] > 0
