"""A service that fails, hangs or is too slow costs events at most, never time of whoever hands them over."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from shardwise.monitor import Event, Service, worker
from shardwise.monitor.pending import Pending
from shardwise.monitor.worker import Worker
from tests.harness.logs import logged


class Recording(Service):
    """Keeps what it is given.

    Args:
        failures: calls of `log` that raise before one succeeds.
        closed_doors: calls of `open` that raise.
    """

    def __init__(self, failures: int = 0, closed_doors: int = 0) -> None:
        self.failures, self.closed_doors = failures, closed_doors
        self.events: list[Event] = []
        self.calls: list[str] = []
        self.go_on = threading.Event()
        self.go_on.set()

    def open(self) -> None:
        self.calls.append("open")
        self.closed_doors -= 1
        if self.closed_doors >= 0:
            raise ConnectionError("no route to host")

    def log(self, events: Sequence[Event]) -> None:
        self.go_on.wait(60)
        self.failures -= 1
        if self.failures >= 0:
            raise OSError("service unavailable")
        if any(event.name == "poison" for event in events):
            raise ValueError("never")
        self.events += events

    def flush(self) -> None:
        self.calls.append("flush")

    def close(self) -> None:
        self.calls.append("close")

    @property
    def steps(self) -> list[int]:
        return [event.step for event in self.events]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "SHORTEST_PAUSE_S", 0.02)
    monkeypatch.setattr(worker, "PAUSE_S", 0.02)


@pytest.fixture
def told() -> Iterator[list[str]]:
    with logged() as kept:
        yield kept.lines


def one(step: int, name: str = "x") -> Pending:
    return Pending([(name, 1.0, step)])


def test_events_come_in_order_and_are_flushed() -> None:
    service = Recording()
    running = Worker("recording", service)
    for step in range(100):
        running.put(one(step))
    assert running.flush(10)
    assert service.steps == list(range(100))
    assert service.calls[-1] == "flush" and service.calls.count("open") == 1
    running.close()
    running.close()
    running.put(one(100))
    assert service.calls[-1] == "close" and service.steps[-1] == 99


@pytest.mark.parametrize("failing", [{"failures": 2}, {"closed_doors": 3}])
def test_an_outage_is_told_once_and_nothing_is_lost(failing: dict[str, int], told: list[str]) -> None:
    service = Recording(**failing)
    running = Worker("recording", service)
    for step in range(10):
        running.put(one(step))
        time.sleep(0.005)
    assert running.flush(10)
    running.close()
    assert service.steps == list(range(10))
    assert len(told) == 2
    assert told[0].startswith("monitor recording: ") and "set recording.enabled to false" in told[0]
    assert told[1] == "monitor recording: works again"


def test_what_a_service_never_takes_is_not_in_the_way(told: list[str]) -> None:
    service = Recording()
    running = Worker("recording", service)
    running.put(one(0, "poison"))
    assert running.flush(10)
    running.put(one(1))
    assert running.flush(10)
    assert service.steps == [1]
    assert told[-1] == "monitor recording: 1 events are lost since the beginning"
    running.close()


def test_a_full_queue_drops_the_oldest_and_counts_them(told: list[str]) -> None:
    service = Recording()
    service.go_on.clear()
    running = Worker("recording", service, room=10)
    running.put(one(0))
    time.sleep(0.1)  # it is in the service's hands, and counts
    begun = time.monotonic()
    for step in range(1, 101):
        running.put(one(step))
    assert time.monotonic() - begun < 1
    service.go_on.set()
    assert running.flush(10)
    running.close()
    assert service.steps == [0, *range(92, 101)]
    assert "more than 10 events wait for it, and the oldest are dropped" in told[0]
    assert told[1:] == ["monitor recording: 91 events are lost since the beginning"]


def test_the_end_waits_for_a_service_no_longer_than_it_may(told: list[str]) -> None:
    service = Recording()
    service.go_on.clear()
    running = Worker("recording", service)
    running.put(one(0))
    begun = time.monotonic()
    running.close(0.2)
    assert time.monotonic() - begun < 2
    assert told == ["monitor recording: has not ended in time, and is left; 1 events are not known to be written"]
    service.go_on.set()


ENDS_EARLY = """
import atexit, time
from shardwise.monitor.pending import Pending
from shardwise.monitor.worker import Worker

class Service:
    ended = False
    def open(self):
        time.sleep(1)
        atexit.register(self.end)  # as packages do
    def end(self):
        self.ended = True
    def log(self, events):
        print([event.step for event in events], self.ended)
    def flush(self):
        pass
    def close(self):
        print("closed", self.ended)

worker = Worker("slow", Service())
worker.put(Pending([("x", 1.0, 3)]))
raise ValueError("of the script")
"""


def test_a_program_that_ends_while_a_service_opens_loses_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS_EARLY], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "of the script" in done.stderr
    assert done.stdout == "[3] False\nclosed False\n"
