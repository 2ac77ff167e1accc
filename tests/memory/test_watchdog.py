"""The watchdog: it ends a job with a table when memory runs out, and otherwise is not noticed."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from shardwise.memory.watchdog import EXIT_CODE, Watchdog, margin_of
from tests.harness import run_ranks
from tests.harness.jobs import run_job, script
from tests.harness.training import ADAMW, engine_of

GIB = 1 << 30


def watch(left: list[int], seconds: float = 5.0, total: int = 64 * GIB) -> tuple[list[int], int]:
    """Watch while so much is left at each look (the last for ever); return how it ended, and how many looks it took."""
    ended: list[int] = []
    looks = 0

    def look() -> tuple[str, int, int]:
        nonlocal looks
        looks += 1
        return "a test", total, left[min(looks, len(left)) - 1]

    watchdog = Watchdog(lambda checkpoint: f"A table. {checkpoint}", look, ended.append)
    deadline = time.monotonic() + seconds
    while not ended and time.monotonic() < deadline:
        time.sleep(0.01)
    watchdog.close()
    return ended, looks


def test_it_ends_the_process_when_too_little_is_left(capfd: pytest.CaptureFixture[str]) -> None:
    ended, looks = watch([GIB, GIB, margin_of(64 * GIB)])
    assert ended == [EXIT_CODE] and looks == 3
    assert capfd.readouterr().err == "*** shardwise: 256.00 MiB are left of a test (64.00 GiB). A table. None\n"


SCRIPT = """
import functools, sys, torch, shardwise
import shardwise.engine.build as build, shardwise.memory.watchdog as watchdog
from pathlib import Path

saved = Path(sys.argv[1])
group = saved.parent / "group"

def look():
    from shardwise.memory.limits import control_groups, lowest_free
    return lowest_free(list(control_groups(group / "membership", group)))

build.Watchdog = functools.partial(watchdog.Watchdog, look=look)
zero = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
adam = {"type": "AdamW", "params": {"lr": 1e-3}}
config = {"train_batch_size": 2, "optimizer": adam, "zero_optimization": zero, "memory_limits": {"host": "1GB"}}
engine, *_ = shardwise.initialize(model=torch.nn.Linear(64, 64), config=config)
while True:
    engine.backward(engine(torch.ones(2, 64)).square().mean())
    engine.step()
    if engine.global_steps == 2:
        engine.save_checkpoint(saved)
        (group / "memory.current").write_text("1990000000")
"""


def test_a_job_ends_with_a_table(tmp_path: Path) -> None:
    group = tmp_path / "group"
    group.mkdir()
    files = {"membership": "0::/\n", "memory.max": "2000000000", "memory.current": "1000000", "memory.stat": "anon 5\n"}
    for name, text in files.items():
        (group / name).write_text(text)
    done = run_job("--nproc", 2, script(tmp_path, SCRIPT), tmp_path / "saved")
    assert done.returncode == EXIT_CODE, done.stderr
    report = done.stderr.partition("shardwise run: rank 0 failed first")[2]
    assert "exit code 12" in report
    assert "*** shardwise: 9.54 MiB are left of control group / (1.86 GiB). The kernel would soon kill" in report
    rows = report.partition("rank  process")[2].splitlines()[1:3]
    assert [row.split()[0] for row in rows] == ["0", "1"] and all("MiB" in row and "KiB" in row for row in rows)
    assert "Rank 0 holds on host: " in report and "optimizer state 16.25 KiB." in report
    assert f"Go on from {tmp_path / 'saved' / 'global_step2'}." in report


@pytest.mark.parametrize(("asked", "watched"), [(None, True), (False, False)])
def test_who_is_watched(asked: bool | None, watched: bool) -> None:
    assert run_ranks(watching, 2, asked) == [[watched, False], [False, False]]


def watching(asked: bool | None) -> list[bool]:
    """Whether a thread watches while engines train (it ends no healthy one), and when they are gone."""
    found, zero = [], {"offload_optimizer": {"device": "cpu"}}
    with mock.patch("shardwise.memory.watchdog.EVERY_S", 0.01):
        for _ in range(3):
            engine = engine_of(nn.Linear(64, 64), 1, ADAMW, zero=zero, memory_limits={"watchdog": asked})
            for _ in range(10):
                engine.backward(engine(torch.ones(1, 64)).square().mean())
                engine.step()
                time.sleep(0.01)
            found.append(is_watched())
            engine.destroy()
    assert len(set(found)) == 1
    return [found[0], is_watched()]


def is_watched() -> bool:
    return any(thread.name == "shardwise-watchdog" for thread in threading.enumerate())
