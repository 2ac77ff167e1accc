"""The command `accelerate launch` on CPU ranks: what it starts finds the drop-in and trains as its options say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise_deepspeed.version import VERSION
from tests.dropin.clients import MISSING
from tests.dropin.test_commands import DIRECTORY
from tests.dropin.test_modules import package
from tests.harness import thorough

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

SCRIPT = """
import json, sys
import torch
from accelerate import Accelerator
from accelerate.utils import DummyOptim

torch.manual_seed(0)
accelerator = Accelerator()
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
given = accelerator.deepspeed_plugin.deepspeed_config
make = DummyOptim if "optimizer" in given else torch.optim.AdamW
rows = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
loader = torch.utils.data.DataLoader(rows, batch_size=2)
model, optimizer, loader = accelerator.prepare(model, make(model.parameters(), lr=0.01), loader)
losses = []
for batch in loader:
    with accelerator.accumulate(model):
        loss = (model(batch) - batch.sum(1, keepdim=True)).pow(2).mean()
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(accelerator.reduce(loss.detach(), "mean").item())
state = accelerator.get_state_dict(model)
told = {
    "kind": f"{type(model).__module__}.{type(model).__qualname__}",
    "stage": model.zero_optimization_stage(),
    "accumulation": model.gradient_accumulation_steps(),
    "clipping": model.gradient_clipping(),
    "ranks": accelerator.num_processes,
    "steps": model.global_steps,
    "losses": losses,
    "elements": sum(value.numel() for value in state.values()) if accelerator.is_main_process else 0,
}
if accelerator.is_main_process:
    print("told", json.dumps(told))
model.destroy()
"""


def launched(directory: Path, *options: str) -> dict[str, Any]:
    """What the first rank prints of a script that `accelerate launch` starts with these options on two ranks."""
    site = package(directory / "site", VERSION, (DIRECTORY / "deepspeed" / "__init__.py").read_text())
    script = directory / "train.py"
    script.write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    environment |= {"PYTHONPATH": f"{site}:{os.environ.get('PYTHONPATH', '')}", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"HF_HOME": str(directory), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", *options]
    command += ["--num_processes", "2", "--main_process_port", "0", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, cwd=directory)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("told "))[5:])


def plain() -> list[float]:
    """The losses of that script in one process without Accelerate."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batches = torch.randn(16, 4, generator=torch.Generator().manual_seed(1)).view(2, 2, 2, 2, 4)
    losses = []
    for window in batches:
        optimizer.zero_grad()
        for of_ranks in window:
            loss = torch.stack([(model(x) - x.sum(1, keepdim=True)).pow(2).mean() for x in of_ranks]).mean()
            (loss / 2).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return losses


YAML = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
mixed_precision: 'no'
num_machines: 1
num_processes: 2
use_cpu: false
deepspeed_config:
  zero_stage: 3
  zero3_init_flag: false
  zero3_save_16bit_model: true
  gradient_accumulation_steps: 2
  gradient_clipping: 0.5
  offload_optimizer_device: none
  offload_param_device: none
"""

CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.01}},
}

FLAGS = "--use_deepspeed --zero_stage 2 --gradient_accumulation_steps 2 --gradient_clipping 0.5"


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (3, "--config_file accelerate.yaml"),
        thorough(2, FLAGS),
        thorough(1, "--use_deepspeed --deepspeed_config_file config.json"),
    ],
)
def test_what_is_launched_trains_as_told(stage: int, options: str, tmp_path: Path) -> None:
    (tmp_path / "accelerate.yaml").write_text(YAML)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    told = launched(tmp_path, *options.split())
    assert told.pop("losses") == pytest.approx(plain(), rel=1e-5)
    assert told == {
        "kind": "shardwise_deepspeed.engine.DeepSpeedEngine",
        "stage": stage,
        "accumulation": 2,
        "clipping": 0.5,
        "ranks": 2,
        "steps": 2,
        "elements": 97,
    }
