"""Reports of collectives that wait too long: who waits for whom, who is only slow, who does not answer."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwise.comm.ledger import Ledger
from shardwise.comm.positions import (
    Here,
    Position,
    Waiting,
    follow,
    follow_devices,
    is_following,
    process_word,
    state_of,
)
from shardwise.comm.stalls import EXIT_CODE, StallWatch, judge, stop_watching, watch
from shardwise.utils.logging import logger
from tests.engine.test_idle_steps import Lines

GATHER = Position("all_gather 'layers.0' #7", kind="gather", line="train.py:12", seconds=9.0, number=3)
REDUCE = Position("reduce_scatter 'layers.3' #2", kind="reduce", line="train.py:20", seconds=8.0, number=5)
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


def test_a_collective_that_all_its_ranks_have_come_to_is_slow_and_nobody_stuck() -> None:
    """Two pairs of ranks: one moves much data, and the others already wait for it in the next collective."""
    moving = replace(GATHER, kind="shard/gather", members=(0, 1))
    after = replace(REDUCE, kind="replicate/reduce", members=(0, 2))
    places = {0: moving, 1: moving, 2: after, 3: replace(after, members=(1, 3))}
    assert not judge(places, places, 0).stuck and not judge(places, places, 2).stuck
    # One that has been launched, too, and is not waited for yet.
    launched = [("all_gather 'layers.0' #7", "gather", 7, "train.py:12", 0)]
    places = {0: GATHER, 1: replace(REDUCE, past=launched)}
    assert not judge(places, places, 0).stuck
    # The same turn of another collective, or of another size, is not the same.
    for other in (("all_gather 'layers.1' #7", "gather", 7, "train.py:12", 0), (*launched[0][:4], 8)):
        places = {0: GATHER, 1: replace(REDUCE, past=[other])}
        assert judge(places, places, 0).stuck


def test_what_is_wrong_is_said_by_name() -> None:
    saving = replace(REDUCE, doing="engine.save_checkpoint()", line="train.py:30")
    text = judge({0: GATHER, 1: saving}, {0: GATHER, 1: saving}, 0).text
    assert "engine.save_checkpoint() has been called by rank 1 at train.py:30, and not by rank 0" in text
    longer = replace(GATHER, size=64)
    text = judge({0: GATHER, 1: longer}, {0: GATHER, 1: longer}, 0).text
    assert "different sizes to all_gather 'layers.0' #7: 0 bytes on rank 0, 64 bytes on rank 1" in text
    ended = replace(saving, loader="has ended after 3 batches of epoch 0")
    going = replace(GATHER, loader="has given 4 batches of epoch 0")
    text = judge({0: going, 1: ended}, {0: going, 1: ended}, 0).text
    assert "Loaders differ: that of rank 0 has given 4 batches of epoch 0, that of rank 1 has ended after 3" in text
    own = Position("torch.distributed.barrier()", kind="torch", doing="torch.distributed.barrier()", number=5)
    text = judge({0: GATHER, 1: own}, {0: GATHER, 1: own}, 0).text
    assert "torch.distributed.barrier() has been called by rank 1" in text
    assert not judge({0: own, 1: own}, {0: own, 1: own}, 0).stuck


def test_positions_of_this_process() -> None:
    record = Ledger().open("all_gather", "world", 8, 8, "layers.1", 2, (0, 1))
    record.kind, record.turn = "gather", 4
    here = Here(facts=lambda: {"step": 7, "loader": "has given 8 batches of epoch 0"})
    with Waiting(record, time.perf_counter() - 2):
        found = here()
    assert found.what == "all_gather 'layers.1' #4" and found.kind == "world/gather" and 2 <= found.seconds < 60
    assert found.members == (0, 1) and found.size == 8 and found.step == 7
    again = Position.read(found.written().encode())
    assert again == replace(found, members=[0, 1], past=[])
    assert not here().waits and re.search(r"\.py:\d+$", here().line)


def test_a_rank_in_its_data_loader_or_in_a_collective_of_torch_says_so() -> None:
    class Slow(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> int:
            seen.append(here())
            return index

    seen: list[Position] = []
    here = Here(thread=threading.get_ident())
    list(torch.utils.data.DataLoader(Slow()))
    assert seen[0].doing == "its data loader" and not seen[0].waits and "test_stalls.py" in seen[0].line


class Event:
    """A CUDA event of which the test says when the device gets there."""

    def __init__(self) -> None:
        self.there, self.queries = False, 0

    def wait(self) -> None: ...

    def reached(self) -> bool:
        self.queries += 1
        return self.there


def test_collectives_of_a_device_are_followed_until_they_end() -> None:
    ledger = Ledger()
    records = [ledger.open("all_gather", "world", 8, 8, name, 2, (0, 1)) for name in "abc"]
    events = [Event() for _ in records]
    follow_devices(True)
    try:
        for record, event in zip(records, events, strict=True):
            record.kind = "gather"
            follow(record, event)
        here = Here()
        assert not here(quiet=60.0).waits  # a graph may be captured, which a query would break
        assert not any(event.queries for event in events)
        events[0].there = events[2].there = True
        assert here().what == "all_gather 'b' #0"
        time.sleep(0.05)
        assert here(quiet=0.05).seconds >= 0.05  # since the last launch
        events[1].there = True
        assert not here().waits
    finally:
        follow_devices(False)
    follow(records[0], Event())
    assert not is_following() and not here().waits


def test_devices_are_followed_only_while_a_thread_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    for store in (None, FakeStore()):
        monkeypatch.setattr("shardwise.comm.stalls.default_store", lambda store=store: store)
        started = watch(range(2), 0, 30.0, Ledger())
        assert not is_following()
        stop_watching(started)
    monkeypatch.setattr("shardwise.comm.stalls.default_store", dist.HashStore)
    started = watch(range(2), 0, 30.0, Ledger())
    assert is_following()
    stop_watching(started)
    assert not is_following()


def test_what_has_become_of_a_process() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"], stdout=-1)
    try:
        assert child.stdout is not None and child.stdout.read(1)
        stat = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        word = {**process_word(), "pid": child.pid, "began": stat[19]}
        assert "lets no other thread run" in state_of(word)
        child.send_signal(signal.SIGSTOP)
        while "T" not in Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0]:
            time.sleep(0.01)
        assert f"({child.pid}) is stopped" in state_of(word) and f"kill -CONT {child.pid}" in state_of(word)
        assert "has ended" in state_of({**word, "began": "1"})  # the number has gone to another process
        assert "machine cannot be reached" in state_of({**word, "machine": "elsewhere"})
    finally:
        child.kill()
        child.wait()
    assert "has ended" in state_of(word) and "cannot be reached" in state_of({})


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b'{"what": 1}', b'{"other": 1}', b"[" * 100_000, b'{"past": [[1]]}', b'{"members": 3}']
)
def test_what_is_no_position(data: bytes) -> None:
    assert Position.read(data) is None


class Ranks:
    """Watches of several imagined ranks in this process."""

    def __init__(self, places: list[Callable[[], Position] | None], limit: float) -> None:
        self.store = store = dist.HashStore()
        self.ended: dict[int, int] = {}
        self.watches = [
            StallWatch(
                range(len(places)),
                rank,
                limit,
                store=store,
                where=where and (lambda _, where=where: where()),
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


def test_a_rank_that_waits_on_a_device_ends_when_another_has_raised(capfd: pytest.CaptureFixture[str]) -> None:
    with Ranks([growing(replace(GATHER, seconds=9.0))], 60.0) as ranks:
        ranks.store.set("shardwise/failed/0", "rank 1 has ended with ValueError: seeded. Its traceback:\nTraceback ...")
        assert ranks.wait(lambda: bool(ranks.ended))
    assert ranks.ended == {0: 1}
    assert "PeerLostError: it waits in all_gather 'layers.0' #7 for" in (said := capfd.readouterr().err)
    assert "ValueError: seeded. Its traceback:" in said


def test_a_store_that_does_not_answer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.comm.stalls._SILENT_S", 0.5)
    released = threading.Event()

    class Silent:
        def __init__(self) -> None:
            self.asked = 0

        def add(self, *_: object) -> int:
            self.asked += 1
            if self.asked > 1:
                released.wait(60)
            return 0

        def set(self, *_: object) -> None: ...

        def check(self, *_: object) -> bool:
            return False

    lines = Lines()
    logger.addHandler(lines)
    watch = StallWatch(range(2), 0, 0.2, store=Silent(), where=lambda _, place=growing(GATHER): place())  # type: ignore[arg-type]
    try:
        watch.start()
        until = time.monotonic() + 30
        while not lines.lines and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(0.5)
        assert len(lines.lines) == 1 and "rank 0 waits in all_gather" in lines.lines[0]
        assert "does not answer. The process that serves it" in lines.lines[0]
    finally:
        released.set()
        watch.close()
        logger.removeHandler(lines)


def test_waits_within_the_limit_ask_nobody() -> None:
    store = dist.HashStore()
    watches = [StallWatch(range(2), rank, 20.0, store=store, where=lambda _: GATHER) for rank in range(2)]
    for watch in watches:
        watch.start()
    time.sleep(2.5)
    for watch in watches:
        watch.close()
    assert store.add("shardwise/stalls/0/asked", 0) == 0
