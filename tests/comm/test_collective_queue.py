"""Chains: collectives that go on by themselves, in order, and whose errors reach whoever waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import pytest
import torch

from shardwise.comm.collective_queue import CollectiveQueue, WorkChain
from shardwise.comm.ledger import Record, user_line
from shardwise.device.streams import streams_of
from shardwise.errors import PeerLostError

CPU = torch.device("cpu")


class Work:
    """A collective that ends when it is told to."""

    scratch: Sequence[torch.Tensor] = ()

    def __init__(self, done: threading.Event | None = None, error: Exception | None = None) -> None:
        self._done, self._error = done, error

    def wait(self) -> None:
        if self._done is not None:
            assert self._done.wait(10)
        if self._error is not None:
            raise self._error


@pytest.fixture
def runner() -> CollectiveQueue:
    return CollectiveQueue(streams_of(CPU), waits_on_host=True, name="test", limit=timedelta(seconds=10))


def launching(seen: list[str], name: str, link: Work) -> Callable[[], Work]:
    def launch() -> Work:
        seen.append(name)
        return link

    return launch


class Recorded(Work):
    """A collective that ends when it is told to, with a record that says so as a ledger does."""

    def __init__(self, done: threading.Event) -> None:
        super().__init__(done)
        self.record = Record(0, "all_gather", "dp", 8, 4, "a", "", time.perf_counter(), kind="gather", ranks=2)

    def wait(self) -> None:
        super().wait()
        self.record.finished = time.perf_counter()
        self.record.waited = self.record.finished - self.record.launched


def test_records_have_the_time_that_the_caller_was_blocked(runner: CollectiveQueue) -> None:
    done, links = [threading.Event(), threading.Event()], []

    def launch() -> Work:
        links.append(Recorded(done[len(links)]))
        return links[-1]

    chain = runner.start([launch, launch])
    time.sleep(0.05)
    done[0].set()
    deadline = time.monotonic() + 10
    while len(links) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    since = time.perf_counter()
    end = threading.Timer(0.1, done[1].set)
    end.start()
    chain.wait()
    until = time.perf_counter()
    first, second = (link.record for link in links)
    # The thread has waited for the first one, and nobody else.
    assert first.waited == 0.0 and first.finished is not None and first.finished <= since
    assert second.waited is not None and second.finished is not None
    assert 0.05 < second.waited <= until - since
    end.join()
    runner.close()


def test_what_follows_is_launched_without_the_caller(runner: CollectiveQueue) -> None:
    seen: list[str] = []
    first, second = threading.Event(), threading.Event()
    chain = runner.start([launching(seen, "a", Work(first)), launching(seen, "b", Work(second))])
    assert isinstance(chain, WorkChain) and seen == ["a"]
    first.set()
    chain.wait_first()
    deadline = time.monotonic() + 10
    while len(seen) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert seen == ["a", "b"]
    second.set()
    chain.wait()
    runner.close()


def test_collective_queues_go_on_in_the_order_in_which_they_were_begun(runner: CollectiveQueue) -> None:
    seen: list[str] = []
    first, later = threading.Event(), threading.Event()
    later.set()  # the second chain could go on before the first one
    one = runner.start([launching(seen, "a1", Work(first)), launching(seen, "a2", Work())])
    two = runner.start([launching(seen, "b1", Work(later)), launching(seen, "b2", Work())])
    time.sleep(0.05)
    assert seen == ["a1", "b1"]
    first.set()
    two.wait()
    one.wait()
    assert seen == ["a1", "b1", "a2", "b2"]
    runner.close()


def test_a_single_collective_needs_no_thread(runner: CollectiveQueue) -> None:
    link = Work()
    assert runner.start([lambda: link]) is link
    assert not any(thread.name == "test" for thread in threading.enumerate())


@pytest.mark.parametrize("where", [0, 1])
def test_an_error_is_raised_by_every_wait_and_ends_the_chain(runner: CollectiveQueue, where: int) -> None:
    seen: list[str] = []
    links = [Work(), Work(), Work()]
    links[where] = Work(error=PeerLostError("rank 3 has gone"))
    chain = runner.start([launching(seen, str(number), link) for number, link in enumerate(links)])
    for _ in range(2):
        with pytest.raises(PeerLostError, match="rank 3"):
            chain.wait()
    assert len(seen) == where + 1
    runner.start([launching(seen, "next", Work()), launching(seen, "last", Work())]).wait()
    assert seen[-1] == "last"  # the thread lives
    runner.close()


def test_records_name_the_line_that_has_begun_the_chain(runner: CollectiveQueue) -> None:
    lines: list[str] = []

    def launch() -> Work:
        lines.append(user_line())
        return Work()

    runner.start([launch, launch]).wait()
    assert all(
        "test_collective_queue.py" in line for line in lines
    )  # in a thread there is nothing of the script on the stack
    runner.close()


def test_closing_does_not_wait_for_ranks_that_do_not_come(runner: CollectiveQueue) -> None:
    never = threading.Event()
    runner.start([lambda: Work(never), lambda: Work()])
    begin = time.monotonic()
    runner.close()
    assert time.monotonic() - begin < 5
    never.set()


def test_without_a_host_that_waits_everything_is_launched_at_once() -> None:
    seen: list[str] = []
    runner = CollectiveQueue(streams_of(CPU), waits_on_host=False, name="test", limit=timedelta(seconds=10))
    chain = runner.start([launching(seen, "a", Work()), launching(seen, "b", Work())])
    assert seen == ["a", "b"]
    chain.wait()
