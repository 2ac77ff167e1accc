"""Importing is cheap: what it loads is counted, because time is not the same on any two machines."""

from __future__ import annotations

import subprocess
import sys

SMALL = {"annotated_types", "isal", "psutil", "pydantic", "pydantic_core", "typing_extensions", "typing_inspection"}


def loaded(before: str, statement: str) -> set[str]:
    """Modules outside the standard library that a statement loads in a new process."""
    code = f"{before}; import sys; old = set(sys.modules); {statement}; print(*sys.modules.keys() - old)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    roots = {name: name.split(".")[0] for name in done.stdout.split()}
    return {name for name, root in roots.items() if root not in sys.stdlib_module_names and not root.startswith("_")}


def test_the_package_loads_itself_only() -> None:
    assert loaded("pass", "import shardwise") == {"shardwise", "shardwise._allocator", "shardwise._version"}


def test_what_is_used_loads_a_few_small_packages_over_torch() -> None:
    names = "initialize, init_distributed, zero, comm, checkpoint, data, memory, optim, schedules, utils"
    found = loaded("import torch, numpy, safetensors.torch", f"from shardwise import {names}")
    assert {name.split(".")[0] for name in found} - {"shardwise"} <= SMALL


UNUSED = {"wandb", "mlflow", "tensorboard", "comet_ml", "shardwise.monitor.files", "shardwise.monitor.runlog", "rich"}


def test_a_plain_engine_loads_neither_the_compiler_nor_monitors() -> None:
    code = (
        "import sys, torch, shardwise, threading\n"
        "config, x = {'train_batch_size': 2}, torch.ones(2, 3)\n"
        "shardwise.initialize(model=torch.nn.Linear(3, 1), config=config).engine(x)\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "config |= {'optimizer': {'type': 'SGD', 'params': {'lr': 0.1}}}\n"
        "engine = shardwise.initialize(model=torch.nn.Linear(3, 1), config=config).engine\n"
        "engine.backward(engine(x).mean()); engine.step()\n"
        "engine.monitor.write_events(None)\n"
        "assert not engine.monitor.enabled and engine.last_step.loss is None and engine.monitor.flush()\n"
        f"assert not {UNUSED} & set(sys.modules)\n"
        "assert not [t for t in threading.enumerate() if t.name.startswith('shardwise-monitor')]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
