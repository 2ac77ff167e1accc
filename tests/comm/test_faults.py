"""Mistakes and accidents on some ranks of a job: each is named, and ends the job or not as it should."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.comm.stall_watchdog import EXIT_CODE
from tests.harness import thorough
from tests.harness.jobs import free_port, run_job
from tests.harness.tables import tables

SCRIPT = """
import os, signal, sys, time
import torch
import shardwise
fault, ranks = sys.argv[1], int(os.environ["WORLD_SIZE"])
shardwise.init_distributed()
torch.manual_seed(0)
layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))
def own(place):
    if fault == place and step == 2 and rank == 0:
        torch.distributed.all_reduce(torch.zeros(7))  # OWN PLACE
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = layers
    def forward(self, x, order):
        for index in order:
            x = self.layers[index](x)  # LAYER
            if fault == "forward" and step == 2 and rank == 0 and index == 1:
                shardwise.comm.all_reduce(torch.zeros(7))  # FORWARD
        if x.requires_grad:
            x.register_hook(lambda _: own("gradient"))
        return x
config = {
    "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}, "stall_limit": 1.0,
    "strict_sync": fault in ("skips", "shape"),
}
engine, *_ = shardwise.initialize(model=Model(), config=config)
rank = torch.distributed.get_rank()
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 1
    def __getitem__(self, index):
        time.sleep(6)  # SLOW LOADER
        return index
def train(order):
    loss = engine(torch.ones(2, 16), order).sum()  # FIRST
    engine.backward(loss)  # TRAIN
    engine.step()
for step in range(3 if fault == "uneven" and rank == 1 else 4):
    order = [0, 1, 2, 3]
    if step == 2 and rank == 1:
        if fault == "extra":
            engine.eval(); engine(torch.ones(2, 16), order); engine.train()  # EXTRA
        elif fault == "root":
            torch.distributed.broadcast(torch.ones(3), 1)  # ROOT
        elif fault == "save":
            engine.save_checkpoint("saved")  # SAVE
        elif fault == "loader":
            list(torch.utils.data.DataLoader(Slow()))
        elif fault == "stopped":
            if not os.fork():  # lets it go on again
                parent = os.getppid(); time.sleep(12); os.kill(parent, signal.SIGCONT); os._exit(0)
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault == "skips":
            order = [0, 1, 3]
    elif step == 2 and fault == "root":
        torch.distributed.broadcast(torch.ones(3), 0)  # OTHER ROOT
    if fault == "shape" and step == 2:
        shardwise.comm.all_reduce(torch.ones(2 + rank % 2))  # SHAPE
    train(order)
if fault == "uneven":
    engine.save_checkpoint("saved")  # LAST
print(f"rank {rank} is done", flush=True)
engine.destroy()
torch.distributed.destroy_process_group()
"""


FAULTS = tables(__file__)["faults"]
"""Exit code of the job, null: of the watchdog; patterns in its standard error, @NAME: a line with that comment."""


def runs_in(process: Path, directory: Path) -> bool:
    try:
        return (process / "cwd").readlink() == directory
    except OSError:
        return False


@pytest.mark.parametrize(
    ("fault", "ranks"),
    # The judgement of the others is tested in test_stalls.py.
    [("forward", 2), thorough("extra", 4), thorough("shape", 4), *(thorough(f, 2) for f in FAULTS if f != "forward")],
)
def test_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, ranks: int) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    lines = {text.partition("# ")[2]: number for number, text in enumerate(SCRIPT.splitlines(), 1)}
    begin = time.monotonic()
    monkeypatch.chdir(tmp_path)
    job = run_job("--nproc", ranks, "train.py", fault)
    monkeypatch.undo()
    print(job.stdout, job.stderr, time.monotonic() - begin)
    code, *patterns = FAULTS[fault]
    assert job.returncode == (EXIT_CODE if code is None else code)
    said = re.sub(r"^\[rank \d+\] ", "", job.stderr, flags=re.MULTILINE)
    for pattern in patterns:
        placed = re.sub(r"@([A-Z ]*[A-Z])", lambda name: rf"train\.py:{lines[name[1]]}", pattern)
        assert re.search(placed, said), placed
    if code == 0:
        assert job.stdout.count("is done") == ranks
    assert not [path for path in Path("/proc").glob("[0-9]*") if runs_in(path, tmp_path)]


ADOPTED = """
import torch, shardwise
torch.distributed.init_process_group("gloo")
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
engine, *_ = shardwise.initialize(model=torch.nn.Linear(2, 1), config=config)
for step in range(2):
    if step == 1 and torch.distributed.get_rank() == 1:
        raise ValueError("x")
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
"""


def test_a_rank_that_raises_in_a_process_group_of_the_script_is_named() -> None:
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", ADOPTED], env={**os.environ, **place, "RANK": str(rank)}, stderr=-1, text=True
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert re.search(r"PeerLostError: (.*\n)*.*rank 1: has ended with ValueError: x", said[0]), said[0]
