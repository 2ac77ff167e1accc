"""Signals to the launcher."""

from __future__ import annotations

import os
import signal
import time

from shardwise.launch.interrupts import Interrupts


def test_the_first_signal_stops_the_next_hurries_and_others_are_passed_on() -> None:
    noted: list[str] = []
    before = signal.getsignal(signal.SIGTERM)
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts(
            lambda sig: noted.append(f"stop {sig.name}"),
            lambda: noted.append("hurry"),
            lambda sig: noted.append(f"forward {sig.name}"),
        ):
            # One that the parent has switched off stays so.
            for sig in (signal.SIGHUP, signal.SIGUSR2, signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
                os.kill(os.getpid(), sig)
                time.sleep(0.01)
    finally:
        signal.signal(signal.SIGHUP, ignored)
    assert noted == ["forward SIGUSR2", "stop SIGTERM", "forward SIGUSR2", "hurry"]
    assert signal.getsignal(signal.SIGTERM) is before
