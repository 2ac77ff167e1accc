"""Signals to the launcher."""

from __future__ import annotations

import os
import signal
import time

import pytest

from shardwise.launch.interrupts import Interrupts


class Stop(Exception):
    """What the first signal raises here."""


def _interrupts(hurried: list[bool] | None = None) -> Interrupts:
    seen = [] if hurried is None else hurried
    return Interrupts(lambda sig: Stop(sig.name), lambda: seen.append(True), lambda sig: None)


def test_the_first_signal_raises_and_the_next_hurries() -> None:
    hurried: list[bool] = []
    before = signal.getsignal(signal.SIGTERM)
    with _interrupts(hurried):
        with pytest.raises(Stop, match="SIGTERM"):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        assert hurried == [True]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_waits_for_the_end_of_a_section() -> None:
    steps = []
    with _interrupts() as interrupts, pytest.raises(Stop, match="SIGINT"), interrupts.uninterrupted():
        with interrupts.uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
            steps.append("inner")
        steps.append("outer")
    assert steps == ["inner", "outer"]


def test_signals_that_do_not_end_a_job_are_passed_on() -> None:
    passed: list[str] = []
    with Interrupts(lambda sig: Stop(sig.name), lambda: None, lambda sig: passed.append(sig.name)) as interrupts:
        for sig in (signal.SIGUSR2, signal.SIGUSR2):
            os.kill(os.getpid(), sig)
            time.sleep(0.01)
        assert passed == ["SIGUSR2", "SIGUSR2"] and interrupts.received is None


def test_signals_that_are_switched_off_stay_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with _interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.01)
            assert interrupts.received is None
    finally:
        signal.signal(signal.SIGHUP, before)
