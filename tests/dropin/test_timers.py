"""Timers that a script starts and stops."""

from __future__ import annotations

import time

import pytest
import torch

from shardwise.config.schema.observe import Throughput
from shardwise.errors import UsageError
from shardwise_deepspeed import timers as module
from shardwise_deepspeed.timers import NoopTimer, SynchronizedWallClockTimer, ThroughputTimer, trim_mean
from tests.harness.logs import logged


def test_intervals_by_name() -> None:
    timers = SynchronizedWallClockTimer()
    for _ in range(2):
        timers("load").start()
        time.sleep(0.02)
        timers("load").stop()
    timers("load").start()
    timers("load").stop(record=False)
    assert 40 <= timers("load").elapsed(reset=False) < 400 and 20 <= timers("load").mean() < 200
    with logged() as kept:
        timers.log(["load", "nothing"], normalizer=2.0)
    (line,) = kept.lines
    assert line.startswith("time (ms) | load: ") and 20 <= float(line.rpartition(" ")[2]) < 200
    assert timers("load").elapsed() == 0.0 and timers.get_mean(["load"]) == {"load": 0.0}
    assert timers.has_timer("load") and not timers.has_timer("nothing") and list(timers.get_timers()) == ["load"]


def test_an_open_interval_counts_and_goes_on() -> None:
    """Megatron's loops read "interval-time" and never stop it."""
    timers = SynchronizedWallClockTimer()
    timers("interval-time").start()
    for _ in range(2):
        time.sleep(0.02)
        assert 20 <= timers("interval-time").elapsed() < 400
    time.sleep(0.02)
    with logged() as kept:
        timers.log(["interval-time"])
    assert float(kept.lines[0].rpartition(" ")[2]) >= 20
    timers("interval-time").stop()
    assert not SynchronizedWallClockTimer.memory_usage() or torch.cuda.is_initialized()


def test_wrong_calls() -> None:
    timers = SynchronizedWallClockTimer()
    with pytest.raises(UsageError, match=r"timer 'load': stop\(\) without start"):
        timers("load").stop()
    timers("load").start()
    with pytest.raises(UsageError, match="twice"):
        timers("load").start()
    with pytest.raises(UsageError, match="normalizer=0"):
        timers.log(["load"], normalizer=0)
    with pytest.raises(UsageError, match="batch_size=0"):
        ThroughputTimer(Throughput(), 0)
    with pytest.raises(UsageError, match="from 0 to 1"):
        trim_mean([1.0], 2)


def test_nothing_is_timed() -> None:
    timers = NoopTimer()
    timers("load").start()
    timers("load").stop(record=False)
    timers.log(["load"])
    assert (
        timers("load").elapsed(reset=True) == timers("load").mean() == 0.0
        and timers.get_mean(["load"]) == timers.get_timers() == {}
    )


def test_throughput_of_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        now = 1.0

        def perf_counter(self) -> float:
            return self.now

    clock, told = Clock(), []
    monkeypatch.setattr(module, "time", clock)
    timer = ThroughputTimer(Throughput(), 8, steps_per_output=2, logging_fn=told.append)
    assert timer.avg_samples_per_sec() == float("-inf")
    for step in range(6):
        for micro in range(2):
            timer.start()
            clock.now += 1.0 if step < 4 else 2.0
            timer.stop(global_step=micro == 1)
            clock.now += 5  # what lies between is not counted
    assert [line.partition("samples/s=")[2] for line in told] == [
        "4, since the beginning 4",
        "2, since the beginning 2.667",
    ]
    off = ThroughputTimer(Throughput(enabled=False), 8, logging_fn=told.append)
    off.start()
    off.stop(global_step=True)
    assert off.global_step_count == 0 and len(told) == 2
