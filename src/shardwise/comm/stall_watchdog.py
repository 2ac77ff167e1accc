"""Stall watchdog: reports the position of each rank while a collective waits too long.

A thread of each process measures the waits of its collectives. A rank with a wait beyond the limit requests the
positions of all ranks, through the store of the default group. The watchdog thread of every process answers.

One rank requests at a time: the one with its claim in the store. Each rank overwrites one short answer. If all ranks
wait, they answer again a while later. Ranks that still wait in the same collectives, each without some of its ranks,
wait for each other: the job ends, on all ranks, with a report. Otherwise a rank is only slow: the requesting rank logs
a report, and the job continues. A rank that does not wait reads one number of the store every few seconds.

Where the host does not wait for collectives (NCCL), the device is queried after the host has launched none for a while.
A rank that waits for a rank that has raised ends, too, earlier than with torch's watchdog. Because any program can
reach the store, answers are authenticated with a secret shared in a collective.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from shardwise.comm import desync
from shardwise.comm.desync import FAILED, Confirmation, Launch, Position
from shardwise.comm.ledger import Ledger, follow_devices
from shardwise.comm.rank_status import Here, process_word, quiet_for, state_of
from shardwise.comm.rendezvous import answers
from shardwise.compat import default_store
from shardwise.errors import DesyncError, PeerLostError
from shardwise.utils.logging import logger

EXIT_CODE = 35
"""Exit code of processes that wait for each other: EDEADLK."""
_LOST_CODE = 1  # exit code of a process that waits for one that has raised

_LOOKS = 10  # looks of the thread within the limit
_SLOWEST_S = 2.0
"""Most seconds between two looks, and between reads of the store by a rank that has waited for `_SUSPECTED`."""
_IDLE_LOOKS, _IDLE_S = 6, 5.0
"""Reads of the store within the limit by a rank that does not wait, and the most seconds in between."""
_SUSPECTED = 0.25  # part of the limit after which a wait may be a stall
_ANSWERED_S = 3.0  # seconds that a process has to answer after it reads the store
_LATER = 0.25  # part of the limit between the two requests
_AFTER_FAILURE_S = 5.0
"""Seconds for which a rank may wait after another has raised; where the host waits, the connection breaks at once."""
_QUIET = 0.5  # part of the limit without a launch before the device is queried
_SILENT_S = 10.0  # seconds after which a store counts as unreachable
_SHOWN = 4  # ranks shown with their launches of the first differing collective


@dataclass
class _Request:
    """The request of this rank.

    Attributes:
        claim: value in the store while no other rank requests.
        wait: number of this rank's wait.
        since: time of the request, by the watchdog's clock.
        stage: "where", "pause", "confirm" or "parting".
        missing: ranks that have not answered; `answers`: of the other ranks.
        places, confirmed: answers to the first and to the second request.
        candidates: by order, the first differing collective, and a rank for each way of launching it.
    """

    claim: str
    wait: int
    since: float = 0.0
    stage: str = ""
    missing: set[int] = field(default_factory=set)
    answers: dict[int, Any] = field(default_factory=dict)
    places: dict[int, Position | None] = field(default_factory=dict)
    confirmed: dict[int, Confirmation] = field(default_factory=dict)
    candidates: Mapping[str, tuple[int, list[int]]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.claim} {self.stage}"


class StallWatch:
    """The watchdog of one process.

    Args:
        ranks: global ranks of the job, each with a watchdog.
        rank: of this process.
        limit: seconds that a collective may wait.
        secret: shared by all ranks, unknown to other programs.
        store: None: the default group's.
        here: finds the position of this rank.
        end: ends the process with an exit code, from any thread.
        clock: returns seconds.

    Attributes:
        world: returns the default group of its time, or None if that has been destroyed.
        ledger: of the engine.
    """

    ledger: Ledger | None = None

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        limit: float,
        secret: str,
        *,
        store: dist.Store | None = None,
        here: Here | None = None,
        end: Callable[[int], object] = os._exit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ranks, self._rank, self._limit = list(ranks), rank, limit
        self._secret = secret
        self.every = min(_SLOWEST_S, limit / _LOOKS)
        self._idle = min(_IDLE_S, limit / _IDLE_LOOKS)
        self._here = here or Here()
        self._end = end
        self._clock = clock
        self._shared = store if store is not None else default_store()
        group = dist.group.WORLD if dist.is_initialized() else None
        self.world: Callable[[], Any] = (lambda: None) if group is None else weakref.ref(group)
        self._store: Any = None
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self._read_at = clock()  # time of the last read of the store
        self._last_request = 0  # number of the last request
        self._claim = ""  # last known claim in the store
        self._request: _Request | None = None
        self._ends: tuple[str, float] | None = None  # reason and time of this rank's end
        self._due: dict[int, float] = {}  # seconds at which a wait causes the next request, by its number
        self._failed: float | None = None  # time of the first sign that a rank has raised
        self._requested: float | None = None  # time since which the store has not answered

    def start(self) -> None:
        """Start the threads, if there is a store; after `close`, start them again."""
        if self._threads or self._shared is None or not self.join(_connected_anew(self._shared)):
            return
        self._closed.clear()
        self._request, self._failed, self._due = None, None, {}
        for name, work in (("shardwise-stalls", self._watch), ("shardwise-store", self._watch_store)):
            self._threads.append(threading.Thread(target=work, name=name, daemon=True))
            self._threads[-1].start()
        atexit.register(self._close_at_exit)

    def run(self) -> None:
        """Start the threads, sign failures, and follow device collectives."""
        desync.sign_failures(self._secret)
        follow_devices(True)
        self.start()
        if not self.running:
            follow_devices(False)

    def join(self, store: dist.Store) -> bool:
        """Write the facts of this process; return True if the store keeps values."""
        self._store = store
        try:
            self._last_request = store.add(self._key("requests"), 0)
            self._write("process", self._rank, process_word())
        except RuntimeError:
            return False  # as with torch's backend "fake"
        return True

    def close(self) -> None:
        """End the threads."""
        self._closed.set()
        for thread in self._threads:
            thread.join(_SILENT_S)  # a store that does not answer is not waited for while the process goes on
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if not self._threads:
            self._store = None  # its connection is closed
            atexit.unregister(self._close_at_exit)

    def _close_at_exit(self) -> None:
        """End the threads, because a thread that returns from the store at exit aborts the process."""
        self.close()
        if self._threads and getattr(sys, "last_value", None) is None:
            logger.warning(
                "rank %d has ended and waits for the store in which the ranks have met: the process that serves it "
                "(the launcher; without one, rank 0) is stopped or out of reach",
                self._rank,
            )
            for thread in self._threads:
                thread.join()

    @property
    def running(self) -> bool:
        """Whether the threads run."""
        return bool(self._threads)

    # -- the thread --------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            while not self._closed.wait(self.every):
                self.look()
        except (RuntimeError, ValueError):
            return  # the store's process has ended, and soon this one will
        finally:
            self._requested = None
            if _living()[-1:] == [self]:
                follow_devices(False)  # because only this thread reads followed collectives

    def _watch_store(self) -> None:
        """Warn if the store does not answer, because the rank that serves it may be stopped."""
        warned = False
        while not self._closed.wait(self.every):
            since = self._requested
            if since is None or time.monotonic() - since < _SILENT_S:
                warned = warned and since is not None
            elif not warned and (here := self._place()).waits and here.seconds > self._limit:
                warned = True
                logger.warning(
                    "rank %d %s. It cannot ask where the others are: the store in which the ranks have met does not "
                    "answer. The process that serves it (the launcher; without one, rank 0) is stopped or out of reach",
                    self._rank,
                    here,
                )

    def look(self) -> None:
        """Answer the last request, and make one if due; RuntimeError: the store has gone."""
        if self._ends is not None:
            if self._clock() >= self._ends[1]:
                self._give_up(DesyncError, self._ends[0], EXIT_CODE)
            return
        here = self._place()
        waited = here.seconds if here.waits else 0.0
        suspected = self._request is not None or self._failed is not None or waited >= self._limit * _SUSPECTED
        if not suspected and self._clock() - self._read_at < self._idle:
            return
        self._requested = self._requested or time.monotonic()
        if not answers(self._store):
            if time.monotonic() - self._requested >= _SILENT_S:
                raise RuntimeError("the store has gone")
            return  # this connection may only be slow
        self._read_at = self._clock()
        self._answer(here)
        if suspected or quiet_for() >= _AFTER_FAILURE_S:
            self._end_after_failure()
        if self._request is not None:
            self._collect(self._request, here)
        elif here.waits and waited >= self._due.get(here.number, self._limit):
            self._ask(here)
        self._requested = None

    def _place(self) -> Position:
        return self._here(self._limit * _QUIET if self._failed is None else _AFTER_FAILURE_S)

    # -- answering ---------------------------------------------------------------------------------------------------

    def _answer(self, here: Position) -> None:
        requests = self._store.add(self._key("requests"), 0)
        if requests == self._last_request:
            return
        self._last_request = requests
        request = self._read("request")
        if request is None or request["by"] == self._rank or self._closed.is_set():
            return
        stage, name = request["stage"], request["name"]
        if stage == "stuck":
            self._give_up(DesyncError, request["text"], EXIT_CODE)
            return
        if request["of"] and self._rank not in request["of"]:
            return
        own = request if stage == "where" else self._read("request", self._rank)
        if own is None or own["name"] != name:
            return
        self._write("answer", self._rank, {"to": name, **self._reply(stage, own, here)})
        if stage == "where" and here.waits:  # the report of the requesting rank is about this wait, too
            self._due = {here.number: max(2 * here.seconds, self._limit)}

    def _reply(self, stage: str, own: Mapping[str, Any], here: Position) -> dict[str, Any]:
        if stage == "where":
            return {"place": here.written()}
        if stage == "parting":
            return {"launches": {kind: self._here.launch(kind, turn) for kind, turn in own["launches"].items()}}
        places = [(what, kind, size) for what, kind, size, _ in own["waits"]]
        launched = [
            place
            for place, yes, wait in zip(places, self._here.launched(places), own["waits"], strict=True)
            if yes or self._here.launched_in_torch(place[1], wait[3], here)
        ]
        kinds = [here.kind, *(kind for _, kind, _ in places)]
        return {"wait": here.number, "launched": launched, "recent": self._here.recent(kinds)}

    def _end_after_failure(self) -> None:
        if not self._store.check([desync.key_of(FAILED)]):
            return
        text = desync.unsealed(self._store.get(desync.key_of(FAILED)), self._secret, desync.key_of(FAILED))
        if text is None:
            return
        now = self._clock()
        self._failed = now if self._failed is None else self._failed
        here = self._place()
        if now - self._failed >= _AFTER_FAILURE_S and here.waits and here.seconds >= _AFTER_FAILURE_S:
            self._give_up(PeerLostError, f"it {here}, and {text}", _LOST_CODE)

    # -- requesting --------------------------------------------------------------------------------------------------

    def _ask(self, here: Position) -> None:
        self._due = {here.number: 2 * here.seconds}  # drops waits that have ended
        claim = f"{self._rank} {self._last_request + 1}"
        held = self._claim = self._store.compare_set(self._key("claim"), self._claim, claim).decode()
        if held != claim and int(held.split()[1]) <= self._last_request:  # that request is over
            held = self._claim = self._store.compare_set(self._key("claim"), held, claim).decode()
        if held != claim:
            self._due = {here.number: here.seconds + self._patience}  # that rank's request comes, or it has ended
            return
        self._request = _Request(claim, here.number)
        self._put(self._request, "where", {rank: {} for rank in self._ranks}, here)

    @property
    def _patience(self) -> float:
        """Seconds within which a process that runs answers."""
        return self._idle + 3 * self.every + _ANSWERED_S

    def _put(self, request: _Request, stage: str, each: dict[int, dict[str, Any]], here: Position) -> None:
        """Start a stage, with a value for each rank that shall answer."""
        request.stage, request.since, request.answers = stage, self._clock(), {}
        if (own := each.pop(self._rank, None)) is not None:
            request.answers[self._rank] = self._reply(stage, own, here)
        request.missing = set(each)
        for rank, value in each.items():
            if value:
                self._write("request", rank, {"name": request.name, **value})
        chosen = sorted(each) if len(each) + 1 < len(self._ranks) else []
        self._write("request", {"stage": stage, "name": request.name, "by": self._rank, "of": chosen})
        self._last_request = self._store.add(self._key("requests"), 1)

    def _collect(self, request: _Request, here: Position) -> None:
        if here.number != request.wait or not here.waits:
            self._request = None  # the wait has ended
            return
        waited = self._clock() - request.since
        if request.stage == "pause":
            if waited >= self._limit * _LATER:
                waits = desync.waits_of(request.places)
                of_rank = {rank: [one for one in waits if rank in (one.members or [rank])] for rank in self._ranks}
                each = {rank: {"waits": [(*one.place, one.turn) for one in own]} for rank, own in of_rank.items()}
                self._put(request, "confirm", each, here)
            return
        request.answers |= self._answers_to(request.missing, request.name)
        request.missing -= request.answers.keys()
        if request.missing and waited < self._patience:
            return
        if request.stage == "where":
            found = {rank: Position.read(answer["place"]) for rank, answer in request.answers.items()}
            request.places = {rank: found.get(rank) for rank in self._ranks}
            if all(place is not None and place.waits for place in request.places.values()):
                request.stage, request.since = "pause", self._clock()
                return
        elif request.stage == "confirm":
            request.confirmed = {
                rank: Confirmation(answer["wait"], frozenset(map(tuple, answer["launched"])), answer["recent"])
                for rank, answer in request.answers.items()
            }
            if desync.is_stuck(request.places, request.confirmed):
                request.candidates = _first_differences(request.confirmed)
            if request.candidates:
                requests: dict[int, dict[str, Any]] = {}
                for kind, (turn, ranks) in request.candidates.items():
                    for rank in ranks:
                        requests.setdefault(rank, {"launches": {}})["launches"][kind] = turn
                self._put(request, "parting", requests, here)
                return
        self._report(request)

    def _report(self, request: _Request) -> None:
        self._request = None
        if self._store.compare_set(self._key("claim"), request.claim, request.claim).decode() != request.claim:
            return  # another rank requests, and has got the answers
        parting = _first_parting(request.candidates, request.answers)
        silent = {
            rank: state_of(self._read("process", rank) or {}, self._patience)
            for rank, place in request.places.items()
            if place is None
        }
        report = desync.judge(request.places, self._rank, request.confirmed or None, silent, parting)
        if report.stuck:
            self._write("request", {"stage": "stuck", "name": "", "by": self._rank, "text": report.text})
            self._last_request = self._store.add(self._key("requests"), 1)
            self._ends = report.text, self._clock() + 1.5 * self.every  # the others have then read the text
        else:
            what = request.places[self._rank]
            event = {"kind": "stall", "rank": self._rank, "what": what and what.what, "ranks": list(report.absent)}
            logger.warning("%s", report.text, extra={"event": event})

    def _give_up(self, kind: type[Exception], text: str, code: int) -> None:
        who = f"*** shardwise: rank {self._rank} of {len(self._ranks)} ends"
        os.write(2, f"{who}: {kind.__name__}: {text}\n".encode())
        self._closed.set()
        self._end(code)

    # -- the store ---------------------------------------------------------------------------------------------------

    def _key(self, *parts: object) -> str:
        return desync.key_of("stalls", *parts)

    def _write(self, *parts: Any) -> None:
        """Write a value, the last argument, under a key that the next write overwrites."""
        *place, value = parts
        key = self._key(*place)
        self._store.set(key, desync.seal(json.dumps(value, separators=(",", ":")), self._secret, key))

    def _read(self, *place: object) -> Any:
        key = self._key(*place)
        return self._checked(key, self._store.get(key)) if self._store.check([key]) else None

    def _checked(self, key: str, data: bytes) -> Any:
        text = desync.unsealed(data, self._secret, key)
        return None if text is None else json.loads(text)

    def _answers_to(self, ranks: Iterable[int], name: str) -> dict[int, Any]:
        values = desync.read_all(self._store, [self._key("answer", rank) for rank in sorted(ranks)])
        found = {int(key.rpartition("/")[2]): self._checked(key, data) for key, data in values.items()}
        return {rank: answer for rank, answer in found.items() if answer is not None and answer.get("to") == name}


def _first_differences(confirmed: Mapping[int, Confirmation]) -> dict[str, tuple[int, list[int]]]:
    """Return, by order, the first collective that ranks have launched differently, and a rank for each way."""
    by_kind: dict[str, dict[int, tuple[int, str]]] = {}
    for rank, answer in sorted(confirmed.items()):
        for kind, recent in answer.recent.items():
            by_kind.setdefault(kind, {})[rank] = recent
    found = {kind: desync.first_difference(recents) for kind, recents in by_kind.items()}
    return {kind: (first[0], first[1][:_SHOWN]) for kind, first in found.items() if first is not None}


def _first_parting(candidates: Mapping[str, tuple[int, list[int]]], answers: Mapping[int, Any]) -> list[str]:
    partings: list[dict[int, Launch]] = []
    for kind, (_, ranks) in candidates.items():
        found = {rank: answers.get(rank, {}).get("launches", {}).get(kind) for rank in ranks}
        partings.append({rank: tuple(launch) for rank, launch in found.items() if launch})
    known = (launches for launches in partings if len(launches) > 1)
    return desync.parting_in_words(min(known, key=lambda one: min(launch[3] for launch in one.values()), default={}))


_watching: list[weakref.ref[StallWatch]] = []
"""Watchdogs of engines, of which the newest runs. Weak references, because scripts may drop engines without destroy().
"""


def _living() -> list[StallWatch]:
    return [watch for known in _watching if (watch := known()) is not None]


def _ledgers() -> list[Ledger]:
    return [watch.ledger for watch in _living() if watch.ledger is not None]


def watch(
    ranks: Sequence[int],
    rank: int,
    limit: float,
    secret: str,
    ledger: Ledger,
    facts: Callable[[], Mapping[str, Any]] | None = None,
) -> StallWatch:
    """Start the watchdog of this process, in place of an earlier engine's. Called from the script's thread.

    `limit` is in seconds; `secret` is shared by all ranks, unknown to other programs; `facts` as in `rank_status.Here`.
    """
    earlier = _living()
    started = StallWatch(ranks, rank, limit, secret, here=Here(_ledgers, threading.get_ident(), facts))
    started.ledger = ledger
    _watching.append(weakref.ref(started))
    for other in earlier:
        other.close()
    started.run()
    return started


def stop_watching(watch: StallWatch) -> None:
    """End a watchdog from `watch`; that of the newest earlier engine runs again."""
    watch.close()
    ran = _living()[-1:] == [watch]
    _watching[:] = [known for known in _watching if known() not in (watch, None)]
    if ran:
        follow_devices(False)
        for other in [one for one in _living() if one.world() is dist.group.WORLD][-1:]:
            other.run()


def _connected_anew(store: dist.Store) -> Any:
    """Return the store with a connection of its own, because the script may block on the other one."""
    try:
        return store.clone()  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError, NotImplementedError):
        return store
