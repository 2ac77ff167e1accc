"""Reports of collectives that wait too long: who waits for whom, who is only slow, who does not answer."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from shardwise.comm.ledger import Ledger
from shardwise.comm.stalls import EXIT_CODE, Position, StallWatch, judge, waiting_for
from shardwise.utils.logging import logger
from tests.engine.test_idle_steps import Lines

GATHER = Position("all_gather 'layers.0' #7", "gather", "train.py:12", 9.0, 3)
REDUCE = Position("reduce_scatter 'layers.3' #2", "reduce", "train.py:20", 8.0, 5)
BUSY = Position(line="data.py:40")


def test_what_is_said_of_ranks() -> None:
    stuck = judge({0: GATHER, 1: REDUCE}, {0: GATHER, 1: REDUCE}, 0)
    assert stuck.stuck and "rank 1: waits in reduce_scatter 'layers.3' #2 for 8 s at train.py:20" in stuck.text
    for where in (BUSY, None):
        slow = judge({0: GATHER, 1: where}, {0: GATHER, 1: where}, 0)
        assert not slow.stuck and "for rank 1:" in slow.text
    assert "does not answer: it is stopped, or gone" in slow.text
    same = judge({0: GATHER, 1: GATHER}, {0: GATHER, 1: replace(GATHER, number=9)}, 0)
    assert not same.stuck and "the network between them is slow" in same.text
    moved = judge({0: GATHER, 1: REDUCE}, {0: GATHER, 1: replace(REDUCE, number=6)}, 0)
    assert not moved.stuck and "others wait, too" in moved.text
    ahead = {0: GATHER, 1: replace(GATHER, what="all_gather 'layers.0' #8")}
    assert judge(ahead, ahead, 0).stuck  # a turn more of the same collective is another one


def test_positions_of_this_process() -> None:
    record = Ledger().open("all_gather", "world", 8, 8, "layers.1")
    record.kind, record.turn = "gather", 4
    with waiting_for(record, time.perf_counter() - 2):
        here = Position.here()
    assert here.what == "all_gather 'layers.1' #4" and here.kind == "gather" and 2 <= here.seconds < 60
    assert not Position.here().waits and re.search(r"\.py:\d+$", Position.here().line)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"what": 1}', b'{"other": 1}', b"[" * 100_000])
def test_what_is_no_position(data: bytes) -> None:
    assert Position.read(data) is None


class Ranks:
    """Watches of several imagined ranks in this process."""

    def __init__(self, places: list[Callable[[], Position] | None], limit: float) -> None:
        store = dist.HashStore()
        self.ended: dict[int, int] = {}
        self.watches = [
            StallWatch(
                range(len(places)),
                rank,
                limit,
                store=store,
                where=where,
                end=lambda code, rank=rank: self._end(rank, code),  # type: ignore[misc]
            )
            for rank, where in enumerate(places)
            if where is not None
        ]

    def _end(self, rank: int, code: int) -> None:
        self.ended[rank] = code

    def __enter__(self) -> Ranks:
        for watch in self.watches:
            watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for watch in self.watches:
            watch.close()

    def wait(self, enough: Callable[[], bool], seconds: float = 30.0) -> bool:
        until = time.monotonic() + seconds
        while not enough() and time.monotonic() < until:
            time.sleep(0.02)
        return enough()


def growing(place: Position) -> Callable[[], Position]:
    begin = time.monotonic()
    return lambda: replace(place, seconds=time.monotonic() - begin)


def test_ranks_that_wait_for_each_other_end(capfd: pytest.CaptureFixture[str]) -> None:
    with Ranks([growing(GATHER), growing(REDUCE), growing(GATHER)], 0.4) as ranks:
        assert ranks.wait(lambda: len(ranks.ended) == 3)
    assert ranks.ended == dict.fromkeys(range(3), EXIT_CODE)
    said = capfd.readouterr().err
    assert said.count("DesyncError: the ranks wait for each other in different collectives") == 3
    assert "rank 1: waits in reduce_scatter 'layers.3' #2" in said and "at train.py:12" in said


@pytest.mark.parametrize("slow", [lambda: BUSY, None], ids=["busy", "stopped"])
def test_a_rank_that_is_slow_is_named_and_waited_for(slow: Callable[[], Position] | None) -> None:
    lines = Lines()
    logger.addHandler(lines)
    try:
        with Ranks([growing(GATHER), slow], 0.4) as ranks:
            assert ranks.wait(lambda: any("for rank 1" in line for line in lines.lines))
            time.sleep(0.3)
        assert not ranks.ended
    finally:
        logger.removeHandler(lines)
    said = "is outside of collectives at data.py:40" if slow else "does not answer"
    assert any(said in line for line in lines.lines)
    assert len(lines.lines) <= 3  # told again after twice the time


def test_waits_within_the_limit_ask_nobody() -> None:
    store = dist.HashStore()
    watches = [StallWatch(range(2), rank, 20.0, store=store, where=lambda: GATHER) for rank in range(2)]
    for watch in watches:
        watch.start()
    time.sleep(2.5)
    for watch in watches:
        watch.close()
    assert store.add("shardwise/stalls/0/asked", 0) == 0


SCRIPT = """
import json, os, signal, sys, time
import torch
import shardwise
fault = sys.argv[1]
shardwise.init_distributed()
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
config = {
    "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}, "stall_limit": 2.0,
}
engine, *_ = shardwise.initialize(model=model, config=config)
rank = torch.distributed.get_rank()
for step in range(4):
    if step == 2 and rank == 1:
        if fault == "extra":
            engine.eval(); engine(torch.ones(2, 16)); engine.train()
        elif fault == "save":
            engine.save_checkpoint(sys.argv[2])
        elif fault == "sleeps":
            time.sleep(4.5)
    engine.backward(engine(torch.ones(2, 16)).sum())
    engine.step()
print(f"rank {rank} is done", flush=True)
engine.destroy()
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("fault", ["extra", pytest.param("save", marks=pytest.mark.thorough), "sleeps"])
def test_jobs(tmp_path: Path, fault: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    begin = time.monotonic()
    job = subprocess.run(
        [sys.executable, "-m", "shardwise.launch", "run", "--nproc", "2", "train.py", fault, str(tmp_path / "saved")],
        cwd=tmp_path, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    print(job.stdout, job.stderr, time.monotonic() - begin)
    if fault == "sleeps":
        assert job.returncode == 0 and job.stdout.count("is done") == 2, job.stderr
        assert re.search(r"rank 0 waits in .*, for rank 1:\n.*outside of collectives at .*train\.py:22", job.stderr)
    else:
        assert job.returncode == EXIT_CODE, job.stderr
        assert "the ranks wait for each other in different collectives" in job.stderr
        assert re.search(r"rank 1: waits in .*train\.py:2\d", job.stderr)
        if fault == "extra":  # the line that only one rank has come to
            assert re.search(r"They part here:\n.*rank 0: .*train\.py:23\n.*rank 1: .*train\.py:18", job.stderr)
