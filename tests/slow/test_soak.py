"""A tenth of `make soak`: a job whose ranks are killed while saving and while training loses nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.jobs import environment

ROOT = Path(__file__).parents[2]


@pytest.mark.thorough
@pytest.mark.limit(900)
def test_kills_of_both_kinds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.slow.soak", "--kills", "2", "--seed", "1", "--device", "cpu"]
    # How long a recovery takes depends on what else the machine does; `make soak` has a limit.
    command += ["--results", str(tmp_path), "--directory", str(tmp_path), "--limit-s", "600"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment(), cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    rows = json.loads((tmp_path / "soak.json").read_text())["rows"]
    result = {row["metric"]: row["value"] for row in rows}
    kills = result["killed_saving"], result["killed_training"]
    assert min(kills) >= 2
    assert 0 < result["recoveries"] <= sum(kills)  # one kill may come during another
    assert result["lost"] == 0
