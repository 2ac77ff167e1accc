"""Requests to the job's store: those of all ranks grow with their number, not with its square."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from shardwise.comm import desync
from shardwise.comm.ledger import Ledger
from shardwise.comm.rendezvous import ended_key, meet
from shardwise.errors import DesyncError, LaunchError, PeerLostError
from tests.harness import thorough

LATE_S = 1.5


class Store:
    """A store for threads that counts requests.

    Attributes:
        requests: by what is requested.
        keys: the number of keys in all requests.
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self.requests: Counter[str] = Counter()
        self.keys = 0

    def _count(self, what: str, keys: int = 1) -> None:
        self.requests[what] += 1
        self.keys += keys

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            self._count("add")
            self._values[key] = str(int(self._values.get(key, b"0")) + amount).encode()
            return int(self._values[key])

    def set(self, key: str, value: str) -> None:
        with self._lock:
            self._count("set")
            self._values[key] = value.encode()

    def get(self, key: str) -> bytes:
        with self._lock:
            self._count("get")
            return self._values[key]

    def check(self, keys: list[str]) -> bool:
        with self._lock:
            self._count("check", len(keys))
            return all(key in self._values for key in keys)

    def has_extended_api(self) -> bool:
        return False

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self._lock:
            self._count("compare_set")
            if self._values.get(key, b"") == expected.encode():
                self._values[key] = desired.encode()
            return self._values.get(key, expected.encode())


def meeting(ranks: int, last: Callable[[Store], Any], limit: float = 60.0) -> tuple[Store, list[str], list[float]]:
    """Have ranks meet, the last of which does something else; return their errors and when each has ended."""
    store, errors, ends = Store(), [""] * ranks, [0.0] * ranks

    def come(rank: int) -> None:
        try:
            given: Any = store
            meet(given, rank, range(ranks), timedelta(seconds=limit))
        except LaunchError as error:
            errors[rank] = str(error)
        ends[rank] = time.monotonic()

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(ranks - 1)]
    for thread in threads:
        thread.start()
    last(store)
    if limit > LATE_S and not errors[0]:
        come(ranks - 1)
    for thread in threads:
        thread.join()
    return store, errors, ends


@pytest.mark.parametrize("ranks", [thorough(8), 256])
def test_ranks_that_wait_for_one_make_a_few_requests_each(ranks: int) -> None:
    """While a rank is late, the first looks for those that are missing, and the others poll three keys."""
    store, errors, _ = meeting(ranks, lambda store: time.sleep(LATE_S))
    assert errors == [""] * ranks
    polls = 20 + 4 * LATE_S
    assert sum(store.requests.values()) < 3 * polls * ranks
    assert store.keys < (3 * polls + 4 * polls) * ranks


@pytest.mark.parametrize("ranks", [8, 256])
def test_all_ranks_are_told_of_one_that_has_ended(ranks: int) -> None:
    def ended(store: Store) -> None:
        store.set(ended_key("0", ranks - 1), "exit code 1")
        until = time.monotonic() + 30
        while store.requests["compare_set"] == 0 and time.monotonic() < until:
            time.sleep(0.01)

    store, errors, _ = meeting(ranks, ended)
    assert set(errors[:-1]) == {errors[0]} and f"rank {ranks - 1} has not come to" in errors[0]
    assert "it has ended with exit code 1. Every rank has to call it." in errors[0]
    assert store.requests["compare_set"] == 1


def test_all_ranks_are_told_of_one_that_does_not_come() -> None:
    store, errors, _ = meeting(64, lambda store: None, limit=LATE_S)
    assert set(errors[:-1]) == {errors[0]} and "rank 63 has not come to" in errors[0]
    assert "63 of 64 ranks have" in errors[0] and store.requests["compare_set"] == 1


def failing(ranks: int, words: dict[int, str], monkeypatch: pytest.MonkeyPatch) -> tuple[Store, Exception]:
    """Rank 0 of many has lost rank 1; return the store, in which some ranks have written where they are, and its error.

    Args:
        ranks: of the job.
        words: the collectives in which others wait.
        monkeypatch: puts the store in place.
    """
    store = Store()
    monkeypatch.setattr(desync, "default_store", lambda: store)
    monkeypatch.setattr(desync, "answers", lambda store, patience: True)
    monkeypatch.setattr(desync.RankState, "publish", lambda word: None)
    for rank, what in words.items():
        place = desync.Position(what, kind="gather").written()
        store.set(desync._state_key(rank), json.dumps({"state": "waits", "text": "", "place": place}))
    lost = PeerLostError("lost")
    lost.peer, lost.timed_out = 1, True
    here = desync.Position("all_gather 'a' #1", kind="gather", seconds=30.0)
    return store, desync.FailureReports(Ledger(), range(ranks), 0).explain(lost, here)


@pytest.mark.parametrize("ranks", [8, 256, 1024, 4096])
def test_a_rank_that_has_lost_another_reads_a_few_ranks(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that wait in different collectives are told from a lost one where all could be read."""
    words = {rank: f"reduce_scatter 'b' #{rank % 2}" for rank in range(1, ranks)}
    store, error = failing(ranks, words, monkeypatch)
    assert type(error) is (DesyncError if ranks == 8 else PeerLostError)
    assert "rank 1, 3, 5, 7" in str(error) or "ranks 1, 3, 5, 7" in str(error)
    assert store.requests["check"] < 300 and len(str(error)) < 6000
    assert (f"{ranks - 33} more ranks: not read" in str(error)) is (ranks > 40)
