"""The tutorial's script, which knows nothing of shardwise, by the command `deepspeed`: the losses of plain PyTorch."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

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


def plain() -> tuple[int, list[float]]:
    """The same training in one process: the number of parameters, and the losses on rank 0's rows."""
    spec = importlib.util.spec_from_file_location("zero_dp_training", SCRIPT)
    assert spec is not None and spec.loader is not None
    script: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    model, rows = script.load(None, LENGTH, ROWS)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-4, weight_decay=0.0)
    samplers = [torch.utils.data.DistributedSampler(rows, RANKS, rank) for rank in range(RANKS)]
    losses = []
    loaders = [torch.utils.data.DataLoader(rows, BATCH, sampler=sampler) for sampler in samplers]
    for batches in zip(*loaders, strict=True):
        optimizer.zero_grad()
        here = [model(batch["input_ids"], labels=batch["labels"]).loss for batch in batches]
        (sum(here) / RANKS).backward()
        optimizer.step()
        losses.append(here[0].item())
    return sum(parameter.numel() for parameter in model.parameters()), losses


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("stages", [(0, 3), (1, 2)])
def test_every_stage(stages: tuple[int, int], tmp_path: Path) -> None:
    parameters, expected = plain()
    assert len(expected) == ROWS // RANKS // BATCH
    found = {}
    for stage in stages:
        comms = tmp_path / f"{stage}.json"
        output = run(stage, comms)
        logged = re.findall(r"Device (\d) - ZeRO Stage: (\d)", output)
        assert sorted(logged) == [("0", str(stage)), ("1", str(stage))]
        held = [int(count.replace(",", "")) for count in re.findall(r"parameter count=([\d,]+)", output)]
        assert held == [parameters] * RANKS if stage == 0 else sum(held) == parameters and max(held) < 0.6 * parameters
        assert "lr=0.00015; betas=(0.9, 0.999); eps=1e-08" in output
        found[stage] = [float(loss) for loss in re.findall(r"Loss: ([\d.]+)", output)]
        assert found[stage] == pytest.approx(expected, rel=1e-5)
        assert len(re.findall(r"RANK=0 MEMSTATS Memory stats after training step .*max=", output)) == len(expected)
        assert "RANK=1 MEMSTATS" not in output
        times = json.loads(comms.read_text())
        assert {"reduce_scatter", "all_gather", "all_reduce"} <= times.keys()
        assert all(taken and min(taken) > 0 for sizes in times.values() for taken in sizes.values())
        table = output[output.index("Comm. Op") :]
        assert {"reduce_scatter", "all_gather", "log_summary_barrier"} <= set(table.split())
    assert found[stages[0]] == found[stages[1]]
