"""All sockets on which the processes of a job listen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import psutil, torch, torch.distributed as dist, shardwise
zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": zero}
config["checkpoint"] = {"memory_copies": {"every": 1}}
engine = shardwise.initialize(torch.nn.Linear(8, 8), config=config).engine
for step in range(2):
    engine.backward(engine(torch.randn(1, 8)).sum())
    engine.step()
dist.barrier()
if dist.get_rank() == 0:
    launcher = psutil.Process().parent()
    for process in [launcher, *launcher.children(recursive=True)]:
        for one in process.net_connections("inet"):
            if one.status == psutil.CONN_LISTEN:
                print("listens", one.laddr.ip, flush=True)
dist.barrier()
engine.destroy()
"""


def test_a_job_on_one_machine_listens_on_loopback_only(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "shardwise.launch", "run", "--nproc", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = [line.rpartition("listens ")[2] for line in done.stdout.splitlines() if "listens" in line]
    assert len(found) > 2 and set(found) <= {"127.0.0.1", "::1"}
