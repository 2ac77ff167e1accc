"""The tutorial's script, which knows nothing of shardwise, by the command `deepspeed`: one loss at all stages."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "zero_dp_training.py"
ROWS, LENGTH, RANKS, BATCH = 32, 32, 2, 4

pytest.importorskip("transformers")


def run(stage: int, comms: Path) -> str:
    """Start it as a user would and return what it prints."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = f"{ROOT / 'dropin'}:{environment.get('PYTHONPATH', '')}"
    options = [f"--stage={stage}", f"--rows={ROWS}", f"--length={LENGTH}", f"--comms_file={comms}"]
    command = [sys.executable, "-m", "deepspeed.launcher.runner", f"--num_gpus={RANKS}", str(SCRIPT), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.limit(900)
def test_every_stage(tmp_path: Path) -> None:
    parameters, losses = 0, []
    for stage in range(4):
        comms = tmp_path / f"{stage}.json"
        output = run(stage, comms)
        logged = re.findall(r"Device (\d) - ZeRO Stage: (\d)", output)
        assert sorted(logged) == [("0", str(stage)), ("1", str(stage))]
        held = [int(count.replace(",", "")) for count in re.findall(r"parameter count=([\d,]+)", output)]
        parameters = parameters or held[0]
        assert held == [parameters] * RANKS if stage == 0 else sum(held) == parameters and max(held) < 0.6 * parameters
        assert "lr=0.00015; betas=(0.9, 0.999); eps=1e-08" in output
        losses.append([float(loss) for loss in re.findall(r"Loss: ([\d.]+)", output)])
        assert len(losses[0]) == ROWS // RANKS // BATCH and losses[-1] == losses[0]
        assert len(re.findall(r"RANK=0 MEMSTATS Memory stats after training step .*max=", output)) == len(losses[0])
        assert "RANK=1 MEMSTATS" not in output
        times = json.loads(comms.read_text())
        assert {"reduce_scatter", "all_gather", "all_reduce"} <= times.keys()
        assert all(taken and min(taken) > 0 for sizes in times.values() for taken in sizes.values())
        table = output[output.index("Comm. Op") :]
        assert {"reduce_scatter", "all_gather", "log_summary_barrier"} <= set(table.split())
