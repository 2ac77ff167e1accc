"""Importing is cheap: what it loads is counted, because time is not the same on any two machines."""

from __future__ import annotations

import subprocess
import sys

SMALL = {"annotated_types", "isal", "psutil", "pydantic", "pydantic_core", "typing_extensions", "typing_inspection"}


USED = "initialize, init_distributed, zero, comm, checkpoint, data, memory, optim, schedules, utils"
UNUSED = {"wandb", "mlflow", "tensorboard", "comet_ml", "shardwise.monitor.files", "shardwise.monitor.runlog", "rich"}


def loaded(before: str, statement: str, after: str = "") -> set[str]:
    """Modules outside the standard library that a statement loads in a new process; `after` follows it there."""
    code = f"{before}; import sys; old = set(sys.modules); {statement}; print(*sys.modules.keys() - old)\n{after}"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    roots = {name: name.split(".")[0] for name in done.stdout.split()}
    return {name for name, root in roots.items() if root not in sys.stdlib_module_names and not root.startswith("_")}


def test_the_package_loads_itself_only() -> None:
    assert loaded("pass", "import shardwise") == {"shardwise", "shardwise._allocator", "shardwise._version"}


def test_an_engine_loads_a_few_small_packages_over_torch_and_what_is_asked_for() -> None:
    """An engine with an optimizer of the library loads no compiler, and without monitors none of them."""
    found = loaded(
        "import torch, numpy, safetensors.torch",
        f"from shardwise import {USED}",
        "import threading\n"
        "config = {'train_batch_size': 2, 'optimizer': {'type': 'AdamW', 'params': {'lr': 0.1}}}\n"
        "engine = initialize(model=torch.nn.Linear(3, 1), config=config).engine\n"
        "engine.backward(engine(torch.ones(2, 3)).mean()); engine.step(); engine.zero_grad()\n"
        "engine.optimizer.load_state_dict(engine.optimizer.state_dict())\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "engine.monitor.write_events(None)\n"
        "assert not engine.monitor.enabled and engine.last_step.loss is None and engine.monitor.flush()\n"
        f"assert not {UNUSED} & set(sys.modules)\n"
        "assert not [t for t in threading.enumerate() if t.name.startswith('shardwise-monitor')]\n",
    )
    assert {name.split(".")[0] for name in found} - {"shardwise"} <= SMALL
