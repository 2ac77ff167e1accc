"""Reports of collectives that wait too long, while they wait: where each rank is, and who is waited for.

A thread of each process looks how long its collectives have waited. Where one has waited longer than a limit, its rank
asks all others where they are, through the store of the default group, not through the group that stands still. Every
process answers from its thread, whatever the script does, so that who does not answer is stopped or gone.

If all ranks wait, in different collectives, and still do so in the same ones a while later, they wait for each other
and would do so until the limit of the process group: the job is ended, on all ranks, with a report. In all other cases
somebody is only slow: the report says who, and the job goes on.

Waits of the host are seen. On CUDA the host hardly waits for collectives; those of its own that it does are seen.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch.distributed as dist

from shardwise.comm.ledger import Ledger, Record, line_of
from shardwise.comm.rendezvous import answers
from shardwise.compat import default_store
from shardwise.errors import DesyncError
from shardwise.utils.logging import logger

EXIT_CODE = 35
"""How processes end that wait for each other: the number of EDEADLK."""

_LOOKS = 10
"""How often the thread looks within the limit."""
_SLOWEST_S = 2.0
"""Seconds between two looks at most."""
_ANSWERED_S = 3.0
"""Seconds in which a process answers that is alive: more than two looks."""
_PAST = 256
"""Collectives of which a rank tells."""
_MOST_ASKED = 64
"""Questions that are answered at once."""
_LATER = 0.25
"""Part of the limit after which it is looked again whether ranks are where they were."""

_waits: dict[int, tuple[Record, float]] = {}
"""What each thread of this process waits for, and since when (`time.perf_counter()`)."""


@contextmanager
def waiting_for(record: Record | None, since: float) -> Iterator[None]:
    """Let it be known inside of the block that this thread waits for a collective."""
    if record is None:
        yield
        return
    thread = threading.get_ident()
    _waits[thread] = record, since
    try:
        yield
    finally:
        _waits.pop(thread, None)


@dataclass(frozen=True)
class Position:
    """Where a rank is.

    Attributes:
        what: the collective that it waits for, in words that are the same on all ranks; empty: it waits for none.
        kind: with which collectives that is in one order.
        line: `file:line` of the script that has led there, or where the script is.
        seconds: for which it has waited.
        number: of the wait on that rank.
        past: the last collectives that it has launched, the oldest first: name, kind, number in that order, line.
    """

    what: str = ""
    kind: str = ""
    line: str = ""
    seconds: float = 0.0
    number: int = -1
    past: Sequence[Sequence[Any]] = ()

    @classmethod
    def here(cls, ledger: Ledger | None = None) -> Position:
        """Return where this process is; what it has launched before is in the ledger."""
        records = [] if ledger is None else list(ledger.records(ledger.sequence - _PAST))
        past = [(_named(record), record.kind, record.turn, record.line) for record in records if record.kind]
        waits = sorted(list(_waits.values()), key=lambda wait: wait[1])
        if waits:
            record, since = waits[0]
            waited = time.perf_counter() - since
            return cls(_named(record), record.kind, record.line, waited, record.sequence, past)
        main = threading.main_thread().ident
        frame = None if main is None else sys._current_frames().get(main)
        return cls(line=line_of(frame), past=past)

    @classmethod
    def read(cls, data: bytes) -> Position | None:
        """Return what has been written, if it is one: anybody who reaches the store may have written it."""
        try:
            found = cls(**json.loads(data))
            kinds = {"what": str, "kind": str, "line": str, "seconds": int | float, "number": int}
            if not all(isinstance(getattr(found, name), kind) for name, kind in kinds.items()):
                return None
            past = [(str(what), str(kind), int(turn), str(line)) for what, kind, turn, line in found.past]
            return replace(found, past=past)
        except (TypeError, ValueError, RecursionError):
            return None

    @property
    def waits(self) -> bool:
        """Whether it is in a collective."""
        return bool(self.what)

    def __str__(self) -> str:
        at = f" at {self.line}" if self.line else ""
        if self.waits:
            return f"waits in {self.what} for {self.seconds:.0f} s{at}"
        return f"is outside of collectives{at}"


def _named(record: Record) -> str:
    return f"{record.op} {record.label!r} #{record.turn}"


Positions = dict[int, Position | None]
"""By rank; None: it has not answered."""


@dataclass(frozen=True)
class Report:
    """What is known of a collective that waits too long.

    Attributes:
        text: for people.
        stuck: the ranks wait for each other.
    """

    text: str
    stuck: bool


def judge(before: Positions, now: Positions, own: int) -> Report:
    """Return who is waited for, or that ranks wait for each other.

    Args:
        before: where the ranks were.
        now: where they are.
        own: this rank, which waits.

    >>> gather, reduce = Position("all_gather 'a' #4", "gather", "t.py:3", 9.0), Position("all_gather 'b' #4", "gather")
    >>> judge({0: gather, 1: reduce}, {0: gather, 1: reduce}, 0).stuck
    True
    >>> print(judge({0: gather, 1: Position(line="t.py:7")}, {0: gather, 1: Position(line="t.py:7")}, 0).text)
    rank 0 waits in all_gather 'a' #4 for 9 s at t.py:3, for rank 1:
      rank 1: is outside of collectives at t.py:7
    """
    here = now[own]
    assert here is not None
    table = [
        f"  rank {rank}: {'does not answer: it is stopped, or gone' if place is None else place}"
        for rank, place in now.items()
        if rank != own
    ]
    still = all(
        place is not None and place.waits and earlier is not None and earlier.number == place.number
        for place, earlier in ((place, before.get(rank)) for rank, place in now.items())
    )
    if still and len({(place.what, place.kind) for place in now.values() if place is not None}) > 1:
        text = f"the ranks wait for each other in different collectives.\n  rank {own}: {here}"
        return Report("\n".join([text, *table, *_parting(now)]), True)
    others = [rank for rank, place in now.items() if place is None or not place.waits]
    if others:
        whom = f", for rank{'s' * (len(others) > 1)} {', '.join(map(str, others))}"
    else:
        same = len({(place.what, place.kind) for place in now.values() if place is not None}) == 1
        whom = "; all ranks are there, so the network between them is slow" if same else "; others wait, too"
    return Report("\n".join([f"rank {own} {here}{whom}:", *table]), False)


def _parting(places: Positions) -> list[str]:
    """Say where the ranks have first launched different collectives, or from different lines, as far as they tell."""
    pasts: dict[int, dict[tuple[str, int], tuple[str, str]]] = {
        rank: {(kind, turn): (what, line) for what, kind, turn, line in place.past}
        for rank, place in places.items()
        if place is not None
    }
    first, *others = pasts.values()
    for turn, own in first.items():
        if all(turn in past for past in others) and any(past[turn] != own for past in others):
            what = [f"  rank {rank}: {past[turn][0]} at {past[turn][1]}" for rank, past in pasts.items()]
            return ["They part here:", *what]
    return []


class StallWatch:
    """The thread of one process; see the module docstring.

    Args:
        ranks: global ranks of the job; all have such a watch.
        rank: this process's own number among all.
        limit: seconds that a collective may wait.
        ledger: of the job's collectives.
        store: through which the ranks talk; None: the default group's.
        where: returns where this rank is.
        end: ends the process with an exit code, from any thread.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        limit: float,
        ledger: Ledger | None = None,
        *,
        store: dist.Store | None = None,
        where: Callable[[], Position] | None = None,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._ranks, self._rank, self._limit = list(ranks), rank, limit
        self._every = min(_SLOWEST_S, limit / _LOOKS)
        self._where = where or (lambda: Position.here(ledger))
        self._end = end
        self._shared = store if store is not None else default_store()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._answered = 0
        self._told: dict[int, float] = {}  # seconds at which a wait is reported next, by its number

    def start(self) -> None:
        """Begin to look; without a store there is nobody to ask, and nothing happens."""
        if self._shared is None:
            return
        store = _connected_anew(self._shared)
        try:
            self._answered = store.add(self._key("asked"), 0)
        except RuntimeError:
            return  # a store that has nothing behind it, as torch's backend "fake" has
        self._thread = threading.Thread(target=self._watch, args=(store,), name="shardwise-stalls", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Look no more."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            atexit.unregister(self.close)

    def _key(self, *parts: object) -> str:
        # A restarted job may meet in the store of the attempt before.
        return "/".join(map(str, ("shardwise/stalls", os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), *parts)))

    def _watch(self, store: dist.Store) -> None:
        try:
            while not self._closed.wait(self._every):
                if not answers(store):
                    return  # its process has ended, and soon this one will
                self._look(store)
        except (RuntimeError, ValueError):
            return  # the same, in the middle of a question

    def _look(self, store: dist.Store) -> None:
        self._answer(store)
        here = self._where()
        if not here.waits or here.seconds < self._told.get(here.number, self._limit):
            return
        self._told = {here.number: 2 * here.seconds}  # waits that have ended count no more
        before = self._ask(store)
        self._pause(store, self._limit * _LATER, lambda: False)
        if self._closed.is_set() or self._where().number != here.number:
            return
        report = judge(before, self._ask(store), self._rank)
        if report.stuck:
            store.set(self._key("stuck"), report.text)
        else:
            logger.warning("%s", report.text)

    def _answer(self, store: dist.Store) -> None:
        """Answer what has been asked since the last time; end with the others, if that has been decided."""
        asked = store.add(self._key("asked"), 0)
        if asked != self._answered:
            here = json.dumps(asdict(self._where()))
            for number in range(max(self._answered, asked - _MOST_ASKED), asked):
                store.set(self._key(number + 1, self._rank), here)
            self._answered = asked
        if store.check([self._key("stuck")]):
            self._give_up(store.get(self._key("stuck")).decode(errors="replace"))

    def _ask(self, store: dist.Store) -> Positions:
        """Return where the ranks are."""
        number = store.add(self._key("asked"), 1)
        found: Positions = dict.fromkeys(self._ranks)
        missing = set(self._ranks)

        def all_there() -> bool:
            for rank in sorted(missing):
                if store.check([self._key(number, rank)]):
                    missing.discard(rank)
                    found[rank] = Position.read(store.get(self._key(number, rank)))
            return not missing

        self._pause(store, max(_ANSWERED_S, 3 * self._every), all_there)
        return found

    def _pause(self, store: dist.Store, seconds: float, enough: Callable[[], bool]) -> None:
        """Answer the others for some seconds, or until it is enough."""
        until = time.monotonic() + seconds
        while True:
            self._answer(store)
            if enough() or time.monotonic() >= until or self._closed.wait(self._every / 4):
                return

    def _give_up(self, text: str) -> None:
        who = f"*** shardwise: rank {self._rank} of {len(self._ranks)} ends"
        os.write(2, f"{who}: {DesyncError.__name__}: {text}\n{_CHECK}\n".encode())
        self._closed.set()
        self._end(EXIT_CODE)


_watching: list[StallWatch] = []


def watch(ranks: Sequence[int], rank: int, limit: float, ledger: Ledger) -> StallWatch:
    """Start the watch of this process in place of the one that an earlier engine has started; see `StallWatch`."""
    while _watching:
        _watching.pop().close()
    started = StallWatch(ranks, rank, limit, ledger)
    started.start()
    _watching.append(started)
    return started


_CHECK = (
    "Look for a branch (`if rank == 0:`, a condition on data) that leaves out or adds a forward pass, backward(), "
    "step(), evaluation or save_checkpoint() on some ranks, and for loaders that give ranks different numbers of "
    "batches."
)


def _connected_anew(store: dist.Store) -> Any:
    """Return the store with a connection of its own: the script may block on the other one."""
    try:
        return store.clone()  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError, NotImplementedError):
        return store
