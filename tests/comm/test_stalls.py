"""Reports of collectives that wait too long: who waits for whom, who is only slow, who does not answer."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.comm import stall_watchdog
from shardwise.comm.desync import (
    Confirmation,
    Position,
    Positions,
    Report,
    judge,
    launch_of,
    named,
    order_of,
    position_of,
    seal,
)
from shardwise.comm.ledger import Ledger, follow, follow_devices, followed
from shardwise.comm.rank_status import (
    Here,
    process_word,
    state_of,
)
from shardwise.comm.stall_watchdog import EXIT_CODE, StallWatch
from tests.harness import on_ranks, thorough
from tests.harness.logs import logged
from tests.harness.training import SGD, engine_of

GATHER = Position("all_gather 'layers.0' #7", kind="gather", line="train.py:12", seconds=9.0, number=3)
REDUCE = Position("reduce_scatter 'layers.3' #2", kind="reduce", line="train.py:20", seconds=8.0, number=5)
BUSY = Position(line="data.py:40")
SECRET = "secret"


def still(places: Positions, **launched: Position) -> dict[int, Confirmation]:
    """What ranks say that have not moved; `launched` are collectives that ranks ("r1") have launched as well."""
    return {
        rank: Confirmation(place.number, frozenset([launched[f"r{rank}"].place] if f"r{rank}" in launched else []))
        for rank, place in places.items()
        if place is not None
    }


def judged(places: Positions, **launched: Position) -> Report:
    return judge(places, 0, still(places, **launched))


def test_what_is_said_of_ranks() -> None:
    stuck = judged({0: GATHER, 1: REDUCE})
    assert stuck.stuck and "rank 1: waits in reduce_scatter 'layers.3' #2 for 8 s at train.py:20" in stuck.text
    for where in (BUSY, None):
        slow = judged({0: GATHER, 1: where})
        assert not slow.stuck and "for rank 1:" in slow.text
    assert "rank 1: has not answered" in slow.text
    same = judge({0: GATHER, 1: GATHER}, 0)
    assert not same.stuck and "the network between them is slow" in same.text
    counts = {rank: replace(GATHER, collectives=3 + (rank == 2)) for rank in range(3)}
    odd = judge(counts, 0)
    assert not odd.stuck and "on some ranks only (launched with torch.distributed in the default group: " in odd.text
    assert "3 on ranks 0, 1, 4 on rank 2):" in odd.text
    assert "on some ranks" not in judge({**counts, 2: GATHER}, 0).text
    moved = judge({0: GATHER, 1: REDUCE}, 0, {0: Confirmation(3), 1: Confirmation(6)})
    assert not moved.stuck and "others wait, too" in moved.text
    assert judged({0: GATHER, 1: replace(GATHER, what="all_gather 'layers.0' #8")}).stuck  # a turn more is another one


def test_a_collective_that_all_its_ranks_have_come_to_is_slow_and_nobody_stuck() -> None:
    """Two pairs of ranks: one moves much data, and the others already wait for it in the next collective."""
    moving = replace(GATHER, kind="shard/gather", members=(0, 1))
    after = replace(REDUCE, kind="replicate/reduce", members=(0, 2))
    assert not judged({0: moving, 1: moving, 2: after, 3: replace(after, kind="other", members=(1, 3))}).stuck
    # One that has been launched, too, and is not waited for yet.
    assert not judged({0: GATHER, 1: REDUCE}, r1=GATHER).stuck
    # The same turn of another collective, or of another size, is not the same.
    for other in (replace(GATHER, what="all_gather 'layers.1' #7"), replace(GATHER, size=8)):
        assert judged({0: GATHER, 1: REDUCE}, r1=other).stuck


def test_what_is_wrong_is_said_by_name() -> None:
    saving = replace(REDUCE, doing="engine.save_checkpoint()", line="train.py:30")
    text = judged({0: GATHER, 1: saving}).text
    assert "engine.save_checkpoint() has been called by rank 1 at train.py:30, and not by rank 0" in text
    text = judged({0: GATHER, 1: replace(GATHER, size=64)}).text
    assert "different sizes to all_gather 'layers.0' #7: 0 bytes on rank 0, 64 bytes on rank 1" in text
    ended = replace(saving, loader="has ended after 3 batches of epoch 0")
    going = replace(GATHER, loader="has given 4 batches of epoch 0")
    text = judged({0: going, 1: ended}).text
    assert "Loaders differ: that of rank 0 has given 4 batches of epoch 0, that of rank 1 has ended after 3" in text
    own = Position("torch.distributed.barrier()", kind="torch/0", number=5, line="t.py:9")
    text = judged({0: GATHER, 1: own}).text
    assert "torch.distributed.barrier() has been called by rank 1 at t.py:9, and not by rank 0" in text
    assert not judged({0: own, 1: own}).stuck
    roots = {rank: replace(own, what=f"torch.distributed.broadcast(src={rank})") for rank in range(2)}
    assert judged(roots).stuck and "torch.distributed.broadcast() with different arguments" in judged(roots).text


def test_a_message_between_two_ranks_may_be_under_way() -> None:
    reduces = Position("torch.distributed.all_reduce()", kind="torch/0", number=4, turn=3)
    receives = Position("torch.distributed.recv(src=0)", kind="torch/pair/0>1/0", members=(0, 1), number=6)
    slow = judged({0: reduces, 1: receives})
    assert not slow.stuck and "others wait, too" in slow.text  # rank 0 may have called isend
    assert judged({0: replace(receives, kind="torch/pair/1>0/5"), 1: receives}).stuck
    ring = {rank: replace(receives, kind=f"torch/pair/{(rank - 1) % 3}>{rank}/0", members=()) for rank in range(3)}
    long = {rank: replace(place, size=1 << 30, seconds=40.0) for rank, place in ring.items()}
    assert not judged(long).stuck  # each may have called isend, and the network may be slow
    assert judged({rank: replace(place, seconds=400.0) for rank, place in long.items()}).stuck
    assert judged(ring).stuck
    assert not judged({**ring, 0: reduces}).stuck


def test_ranks_in_the_same_place_share_a_line() -> None:
    places = {rank: replace(REDUCE if rank in (300, 301) else GATHER, seconds=rank / 10) for rank in range(1024)}
    text = judged(places).text
    assert "  ranks 0-299, 302-1023: waits in all_gather 'layers.0' #7 for 102 s at train.py:12\n" in text
    assert "  ranks 300, 301: waits in reduce_scatter 'layers.3' #2 for 30 s" in text
    assert len(text) < 1000


class Event:
    """A CUDA event of which the test says when the device gets there."""

    def __init__(self) -> None:
        self.there, self.queries = False, 0

    def mark(self) -> Event:
        return self

    def wait(self) -> None: ...

    def reached(self) -> bool:
        self.queries += 1
        return self.there


def test_collectives_of_a_device_are_followed_until_they_end() -> None:
    ledger = Ledger()
    records = [ledger.open("all_gather", "world", 8, 8, name, ranks=2, members=(0, 1)) for name in "abc"]
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
    assert followed() is None and not here().waits


def test_what_has_become_of_a_process() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"], stdout=-1)
    try:
        assert child.stdout is not None and child.stdout.read(1)
        stat = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        word = {**process_word(), "pid": child.pid, "began": stat[19]}
        assert "lets no other thread run" in state_of(word, 9.0)
        child.send_signal(signal.SIGSTOP)
        while "T" not in Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0]:
            time.sleep(0.01)
        assert f"({child.pid}) is stopped" in state_of(word, 9.0) and f"kill -CONT {child.pid}" in state_of(word, 9.0)
        assert "has ended" in state_of({**word, "began": "1"}, 9.0)  # the number has gone to another process
        assert "on another machine" in state_of({**word, "machine": "elsewhere"}, 9.0)
    finally:
        child.kill()
        child.wait()
    assert "has ended" in state_of(word, 9.0) and "on another machine" in state_of({}, 9.0)


class Place(Here):
    """Where an imagined rank is."""

    def __init__(self, place: Callable[[], Position], ledger: Ledger | None = None) -> None:
        super().__init__(lambda: [] if ledger is None else [ledger])
        self._place = place

    def __call__(self, quiet: float = 0.0) -> Position:
        return self._place()


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    with logged() as kept:
        yield kept.lines


# -- many ranks, by one clock ------------------------------------------------------------------------------------------


class Store:
    """A store that counts what is requested of it."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.requests: Counter[str] = Counter()
        self.written: Counter[str] = Counter()
        self.longest = 0

    def add(self, key: str, amount: int) -> int:
        self.requests["add"] += 1
        self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
        return int(self.values[key])

    def set(self, key: str, value: str) -> None:
        self.requests["set"] += 1
        self.written[key] += 1
        self.longest = max(self.longest, len(value))
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        self.requests["get"] += 1
        return self.values[key]  # torch's waits

    def check(self, keys: list[str]) -> bool:
        self.requests["check"] += 1
        return all(key in self.values for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.requests["compare_set"] += 1
        if self.values.get(key, b"") == expected.encode():
            self.values[key] = desired.encode()
        return self.values.get(key, expected.encode())

    def has_extended_api(self) -> bool:
        return True

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.requests["multi_get"] += 1
        return [self.values[key] for key in keys]


class Job:
    """Watches of imagined ranks that look in turn, by a clock that the test moves."""

    def __init__(self, places: list[Callable[[float], Position]], limit: float = 30.0) -> None:
        self.now = 0.0
        self.store = Store()
        self.ended: dict[int, tuple[int, float]] = {}
        self.gone: set[int] = set()
        most, last = (history(rank, len(places)) for rank in (0, len(places) - 1))
        self.watches = [
            StallWatch(
                range(len(places)),
                rank,
                limit,
                SECRET,
                here=Place(lambda place=place: place(self.now), last if place is places[-1] else most),  # type: ignore[misc]
                end=lambda code, rank=rank: self.ended.setdefault(rank, (code, self.now)),  # type: ignore[misc]
                clock=lambda: self.now,
            )
            for rank, place in enumerate(places)
        ]
        store: Any = self.store
        for one in self.watches:
            one.join(store)

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            for rank, one in enumerate(self.watches):
                if rank not in self.ended and rank not in self.gone:
                    one.look()
            self.now += self.watches[0].every


def history(rank: int, ranks: int) -> Ledger:
    """All but the last rank have launched another collective as the 280th."""
    ledger, members = Ledger(record_lines=False), range(ranks)
    for turn in range(300):
        label = "layers.9" if turn == 280 and rank == ranks - 1 else f"layers.{turn % 4}"
        record = ledger.open("all_gather", "world", 1 << 20, 1 << 20, label, ranks=ranks, members=members)
        record.line, record.kind, record.turn = f"train.py:{turn % 4}", "gather", turn
    return ledger


def waiting(place: Position, since: float = 0.0, until: float = 1e9) -> Callable[[float], Position]:
    return lambda now: replace(place, seconds=now - since) if since <= now < until else BUSY


SIZES = [8, 256, *(thorough(ranks) for ranks in (1024, 4096))]


@pytest.mark.parametrize("ranks", SIZES)
def test_a_desync_of_many_ranks_costs_each_of_them_two_short_messages(
    ranks: int, capfd: pytest.CaptureFixture[str]
) -> None:
    kind = order_of(next(history(0, ranks).records()))
    places = [replace(GATHER, kind=kind, members=range(ranks), what=f"all_gather 'layers.{n}' #299") for n in (1, 2)]
    job = Job([waiting(places[rank == ranks - 1]) for rank in range(ranks)])
    begun = sum(job.store.requests.values())
    job.run(60.0)
    assert set(job.ended.values()) <= {(EXIT_CODE, end) for _, end in job.ended.values()} and len(job.ended) == ranks
    said = capfd.readouterr().err
    first = said.partition("*** shardwise")[2].partition("*** shardwise")[0]
    assert f"ranks 0-{ranks - 2}: waits in all_gather 'layers.1' #299" in first and len(first) < 2000
    assert f"They part here:\n  rank 0: all_gather 'layers.0' #280 at train.py:0\n  rank {ranks - 1}: " in first
    answers = {key: count for key, count in job.store.written.items() if "/answer/" in key}
    assert sum(count == 3 for count in answers.values()) <= 2 and max(answers.values()) <= 3  # those that part
    assert job.store.longest < 2000
    assert sum(map(len, job.store.values.values())) < 2500 * ranks
    assert sum(job.store.requests.values()) - begun < 100 * ranks


@pytest.mark.parametrize("ranks", SIZES)
def test_a_slow_rank_is_named_by_one_of_many_and_nothing_grows(ranks: int, warnings: list[str]) -> None:
    saves = replace(BUSY, doing="engine.save_checkpoint()")
    job = Job([lambda _: saves, *(waiting(GATHER) for _ in range(ranks - 1))])
    job.run(45.0)
    assert len(warnings) == 1 and re.search(r"rank \d+ waits in .* for 3\d s at train.py:12, for rank 0:", warnings[0])
    assert "rank 0: is in engine.save_checkpoint()" in warnings[0]
    assert f"ranks {'2' if warnings[0].startswith('rank 1 ') else '1'}-" in warnings[0] and len(warnings[0]) < 500
    held = job.store.values.keys() | set()
    size = sum(map(len, job.store.values.values()))
    job.run(405.0)
    assert len(warnings) == 4  # after about 30, 60, 120 and 240 s
    assert not any("has not answered" in line for line in warnings) and not job.ended
    assert job.store.values.keys() == held
    assert sum(map(len, job.store.values.values())) < size + 20 * ranks
    assert max(count for key, count in job.store.written.items() if "/answer/" in key) <= 4


@pytest.mark.parametrize("ranks", SIZES)
def test_ranks_that_do_not_wait_read_a_number_now_and_then(ranks: int) -> None:
    job = Job([waiting(GATHER, 50.0, 55.0) for _ in range(ranks)])
    begun = job.store.requests.copy()
    job.run(100.0)
    requests = job.store.requests - begun
    assert set(requests) == {"add"} and requests["add"] <= 0.2 * 100 * ranks + ranks


def test_a_store_that_does_not_answer_once_is_asked_again(warnings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([False])
    monkeypatch.setattr(stall_watchdog, "answers", lambda store: next(answers, True))
    job = Job([waiting(GATHER), lambda _: BUSY])
    job.run(45.0)
    assert len(warnings) == 1 and next(answers, True)
    monkeypatch.setattr(stall_watchdog, "answers", lambda store: False)
    monkeypatch.setattr(stall_watchdog, "_SILENT_S", 0.0)
    with pytest.raises(RuntimeError, match="the store has gone"):
        job.run(45.0)


def test_a_rank_that_has_ended_is_named(warnings: list[str]) -> None:
    job = Job([waiting(GATHER) for _ in range(16)])
    job.gone.add(5)
    job.run(55.0)
    assert len(warnings) == 1 and ", for rank 5:" in warnings[0] and "rank 5: has not answered for 14 s" in warnings[0]


def test_a_rank_that_waits_on_a_device_ends_when_another_has_raised(capfd: pytest.CaptureFixture[str]) -> None:
    job, key = Job([waiting(GATHER)]), "shardwise/failed/0"
    job.store.values[key] = b"a stranger's text"
    job.run(25.0)
    assert not job.ended
    job.store.values[key] = seal(
        "rank 1 has ended with ValueError: seeded. Its traceback:\nTraceback", SECRET, key
    ).encode()
    job.run(25.0)
    assert job.ended[0][0] == 1
    assert "PeerLostError: it waits in all_gather 'layers.0' #7 for" in (said := capfd.readouterr().err)
    assert "ValueError: seeded. Its traceback:" in said


def test_values_of_strangers_are_ignored() -> None:
    job = Job([waiting(GATHER, until=40.0) for _ in range(2)])
    store = job.store
    decided = {"stage": "stuck", "name": "", "by": 1, "text": "a stranger's text"}
    store.set("shardwise/stalls/0/request", json.dumps(decided))
    store.add("shardwise/stalls/0/requests", 1)
    job.run(20.0)
    # What another rank has written under another key is not taken, either.
    store.values["shardwise/stalls/0/request"] = store.values["shardwise/stalls/0/process/1"]
    store.add("shardwise/stalls/0/requests", 10**9)
    job.run(40.0)
    assert not job.ended


@on_ranks(2)
def test_with_an_engine_ends_its_watchdog_and_an_earlier_one_runs_again() -> None:
    engines = [engine_of(torch.nn.Linear(2, 1), 1, SGD) for _ in range(3)]
    watchdogs = [engine._faults._stalls for engine in engines]
    for ended, running in ((0, [2]), (2, [1]), (1, [])):
        engines[ended].destroy()
        assert [place for place, watchdog in enumerate(watchdogs) if watchdog.running] == running
        assert (followed() is not None) == bool(running)


def test_collectives_of_two_engines_are_not_confused() -> None:
    former, newer = (Ledger(record_lines=False, engine=name) for name in ("1", "2"))
    for ledger, turns in ((former, range(6)), (newer, range(4))):
        for turn in turns:
            record = ledger.open("all_gather", "world", 8, 8, "w", ranks=2, members=range(2), kind="gather", turn=turn)
    last = [*former.records()][-1]
    here = Here(lambda: [former, newer])
    assert here.launched([position_of(last).place, (named(last), order_of(record), 8)]) == [True, False]
    assert here.launch(order_of(last), 5) == launch_of(last)
