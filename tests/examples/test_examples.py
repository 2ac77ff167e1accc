"""The examples run as their users would run them, a few steps each."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def launch(script: str, *options: str) -> str:
    command = [sys.executable, "-m", "shardwise.launch", "run", "--nproc", "2", str(EXAMPLES / script), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_pretraining_stops_and_goes_on(tmp_path: Path) -> None:
    config = json.loads((EXAMPLES / "pretrain_gpt.json").read_text())
    config["scheduler"]["params"] |= {"total_num_steps": 4, "warmup_num_steps": 2}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    once, twice = tmp_path / "once", tmp_path / "twice"
    options = ("--config", str(file), "--sample", "24", "--out")
    launch("pretrain_gpt.py", *options, str(once))
    launch("pretrain_gpt.py", *options, str(twice), "--steps", "2")
    output = launch("pretrain_gpt.py", *options, str(twice), "--resume")
    assert "after 4 steps" in output
    for word in ("planned", "measured", "floor", "optimizer", "activations"):
        assert word in output
    # The second run ends in the same text, and so in the same parameters.
    assert (once / "sample.txt").read_text() == (twice / "sample.txt").read_text()
    assert (once / "loss.png").stat().st_size > 10_000
    assert (twice / "latest").read_text().strip() == "global_step4"


@pytest.mark.parametrize(("family", "stage"), [("bloom", 3), ("llama", 1)])
def test_finetuning_lowers_the_loss(family: str, stage: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    saved = tmp_path / "saved"
    output = launch("finetune_hf.py", "--family", family, "--stage", str(stage), "--steps", "10", "--save", str(saved))
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert len(losses) == 2
    assert losses[1] < losses[0] - 0.5
    assert (saved / "model.safetensors").is_file()
