"""Reports of collectives that wait too long, while they wait: where each rank is, and who is waited for.

A thread of each process looks how long its collectives have waited. Where one has waited longer than a limit, its rank
asks all others where they are, through the store of the default group, not through the group that stands still. Every
process answers from its thread, whatever the script does, so that who does not answer is stopped or gone.

If all ranks wait, none for a collective that all of its ranks have come to, and still do so in the same ones a while
later, they wait for each other and would do so until the limit of the process group: the job is ended, on all ranks,
with a report. In all other cases somebody is only slow: the report says who, and the job goes on.

Where the host does not wait for collectives (NCCL), those that it has launched are looked at until they have ended, and
a rank that waits for one that has raised ends, too: its collectives would end only with torch's watchdog.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from shardwise.comm.ledger import Ledger
from shardwise.comm.positions import Here, Position, follow_devices, process_word, state_of
from shardwise.comm.rendezvous import answers
from shardwise.comm.whereabouts import FAILED, key_of
from shardwise.compat import default_store
from shardwise.errors import DesyncError, PeerLostError
from shardwise.utils.logging import logger

EXIT_CODE = 35
"""How processes end that wait for each other: the number of EDEADLK."""
_LOST_CODE = 1
"""How a process ends that waits for one that has raised."""

_LOOKS = 10
"""How often the thread looks within the limit."""
_SLOWEST_S = 2.0
"""Seconds between two looks at most."""
_ANSWERED_S = 3.0
"""Seconds in which a process answers that is alive: more than two looks."""
_MOST_ASKED = 64
"""Questions that are answered at once."""
_LATER = 0.25
"""Part of the limit after which it is looked again whether ranks are where they were."""
_MOURNED_S = 5.0
"""Seconds for which a rank may still wait after another has raised: where the host waits, it hears of it at once."""
_QUIET = 0.5
"""Part of the limit for which the host has launched no collective before its device is queried."""
_SILENT_S = 10.0
"""Seconds after which a store is taken to answer no more."""

Positions = Mapping[int, Position | None]
"""By rank; None: it has not answered."""


@dataclass(frozen=True)
class Report:
    """What is known of a collective that waits too long.

    Attributes:
        text: for people.
        stuck: the ranks wait for each other.
        absent: ranks that are waited for.
    """

    text: str
    stuck: bool
    absent: tuple[int, ...] = ()


def judge(before: Positions, now: Positions, own: int, silent: Mapping[int, str] | None = None) -> Report:
    """Return who is waited for, or that ranks wait for each other.

    Args:
        before: where the ranks were.
        now: where they are.
        own: this rank, which waits.
        silent: what has become of ranks that do not answer, as far as it is known.

    >>> gather, reduce = Position("all_gather 'a' #4", line="t.py:3", seconds=9.0), Position("all_gather 'b' #4")
    >>> judge({0: gather, 1: reduce}, {0: gather, 1: reduce}, 0).stuck
    True
    >>> print(judge({0: gather, 1: Position(line="t.py:7")}, {0: gather, 1: Position(line="t.py:7")}, 0).text)
    rank 0 waits in all_gather 'a' #4 for 9 s at t.py:3, for rank 1:
      rank 1: is outside of collectives at t.py:7
    """
    here = now[own]
    assert here is not None
    unknown = "does not answer: it is stopped, or gone"
    told = {rank: (silent or {}).get(rank, unknown) if place is None else str(place) for rank, place in now.items()}
    table = [f"  rank {rank}: {text}" for rank, text in told.items() if rank != own]
    there = {rank: place for rank, place in now.items() if place is not None and place.waits}
    still = len(there) == len(now) and _same_waits(before, there)
    if still and not any(_may_end(place, there) for place in there.values()):
        text = f"the ranks wait for each other in different collectives.\n  rank {own}: {here}"
        return Report("\n".join([text, *table, *_parting(there), *(_advice(there) or [_CHECK])]), True)
    absent = tuple(rank for rank in here.members or now if rank != own and rank not in there)
    if absent:
        whom = f", for rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}"
    elif _may_end(here, there):
        whom = "; all ranks are there, so the network between them is slow"
    else:
        whom = "; others wait, too"
    return Report("\n".join([f"rank {own} {here}{whom}:", *table]), False, absent)


def _same_waits(before: Positions, now: Mapping[int, Position]) -> bool:
    earlier = {rank: place.number for rank, place in before.items() if place is not None and place.waits}
    return earlier == {rank: place.number for rank, place in now.items()}


def _may_end(waited: Position, places: Mapping[int, Position]) -> bool:
    """Whether all ranks of a collective have come to it, so that it is on its way."""
    taking_part = [place for rank, place in places.items() if not waited.members or rank in waited.members]
    return all(place.has_launched(waited) for place in taking_part)


def _parting(places: Mapping[int, Position]) -> list[str]:
    """Say where the ranks have first launched different collectives, or from different lines, as far as they tell."""
    pasts = {
        rank: {(kind, turn): (what, line, size) for what, kind, turn, line, size in place.past}
        for rank, place in places.items()
    }
    first, *others = pasts.values()
    for turn, own in first.items():
        if all(turn in past for past in others) and any(past[turn] != own for past in others):
            sizes = len({past[turn][2] for past in pasts.values()}) > 1
            launched = {rank: past[turn] for rank, past in pasts.items()}
            return [
                "They part here:",
                *(
                    f"  rank {rank}: {what}{f' of {size} bytes' if sizes else ''} at {line}"
                    for rank, (what, line, size) in launched.items()
                ),
            ]
    return []


def _advice(places: Mapping[int, Position]) -> list[str]:
    """Say what is wrong by name, where it can be known."""
    found: list[str] = []
    doing: dict[str, list[int]] = {}
    sizes: dict[tuple[str, str], dict[int, int]] = {}
    for rank, place in places.items():
        doing.setdefault(place.doing, []).append(rank)
        sizes.setdefault((place.what, place.kind), {})[rank] = place.size
    for (what, _), by_rank in sizes.items():
        if len(set(by_rank.values())) > 1:
            shown = ", ".join(f"{size} bytes on rank {rank}" for rank, size in by_rank.items())
            found.append(f"Ranks pass tensors of different sizes to {what}: {shown}.")
    if len(doing) > 1:
        for method, ranks in doing.items():
            if method in _TOGETHER or method.startswith("torch."):
                lines = " and ".join(sorted({places[rank].call or places[rank].line for rank in ranks}))
                others = [rank for rank in places if rank not in ranks]
                found.append(
                    f"{method} has been called by {_ranks(ranks)} at {lines}, and not by {_ranks(others)}: every rank "
                    "of its group has to call it, at the same point. Take it out of `if rank == 0:`, or, if it comes "
                    "after a loop over data, see that all ranks get the same number of batches."
                )
    loaders = {rank: place.loader for rank, place in places.items() if place.loader}
    if len(set(loaders.values())) > 1:
        found.append("Loaders differ: " + ", ".join(f"that of rank {rank} {text}" for rank, text in loaders.items()))
    return found


_TOGETHER = tuple(
    f"engine.{name}()"
    for name in (
        "save_checkpoint",
        "load_checkpoint",
        "resume",
        "save_16bit_model",
        "module_state_dict",
        "load_module_state_dict",
        "export",
        "load_weights",
        "copy_to_memory",
        "memory_report",
        "gathered",
        "destroy",
    )
)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


class StallWatch:
    """The thread of one process; see the module docstring.

    Args:
        ranks: global ranks of the job; all have such a watch.
        rank: this process's own number among all.
        limit: seconds that a collective may wait.
        store: through which the ranks talk; None: the default group's.
        where: returns where this rank is; its argument is as in `shardwise.comm.positions.oldest_under_way`.
        end: ends the process with an exit code, from any thread.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        limit: float,
        *,
        store: dist.Store | None = None,
        where: Callable[[float], Position] | None = None,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._ranks, self._rank, self._limit = list(ranks), rank, limit
        self._every = min(_SLOWEST_S, limit / _LOOKS)
        self._where = where or Here()
        self._end = end
        self._shared = store if store is not None else default_store()
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self._answered = 0
        self._told: dict[int, float] = {}  # seconds at which a wait is reported next, by its number
        self._failed: float | None = None  # when it was first seen that a rank has raised
        self._asking: float | None = None  # since when the store has not answered

    def start(self) -> None:
        """Begin to look; without a store there is nobody to ask, and nothing happens."""
        if self._shared is None:
            return
        store = _connected_anew(self._shared)
        try:
            self._answered = store.add(self._key("asked"), 0)
            store.set(self._key("process", self._rank), json.dumps(process_word()))
        except RuntimeError:
            return  # a store that has nothing behind it, as torch's backend "fake" has
        for name, work in (("shardwise-stalls", lambda: self._watch(store)), ("shardwise-store", self._watch_store)):
            self._threads.append(threading.Thread(target=work, name=name, daemon=True))
            self._threads[-1].start()
        atexit.register(self.close)

    def close(self) -> None:
        """Look no more."""
        self._closed.set()
        for thread in self._threads:
            thread.join(_SILENT_S)  # a store that does not answer is not waited for
        if self._threads:
            self._threads = []
            atexit.unregister(self.close)

    @property
    def running(self) -> bool:
        """Whether the thread has been started and has not been told to end."""
        return bool(self._threads)

    def _place(self) -> Position:
        return self._where(self._limit * _QUIET if self._failed is None else _MOURNED_S)

    def _key(self, *parts: object) -> str:
        return key_of("stalls", *parts)

    def _watch(self, store: dist.Store) -> None:
        try:
            while not self._closed.wait(self._every):
                self._asking = time.monotonic()
                if not answers(store):
                    return  # its process has ended, and soon this one will
                self._look(store)
                self._asking = None
        except (RuntimeError, ValueError):
            return  # the same, in the middle of a question
        finally:
            self._asking = None
            if self in _watching:
                follow_devices(False)  # because nobody else looks at what is followed

    def _watch_store(self) -> None:
        """Say so if the store does not answer: a rank that serves it may be the one that is stopped."""
        said = False
        while not self._closed.wait(self._every):
            since = self._asking
            if since is None or time.monotonic() - since < _SILENT_S:
                said = said and since is not None
            elif not said and (here := self._place()).waits and here.seconds > self._limit:
                said = True
                logger.warning(
                    "rank %d %s. It cannot ask where the others are: the store in which the ranks have met does not "
                    "answer. The process that serves it (the launcher; without one, rank 0) is stopped or out of reach",
                    self._rank,
                    here,
                )

    def _look(self, store: dist.Store) -> None:
        self._answer(store)
        here = self._place()
        if not here.waits:
            return
        self._end_after_failure(store, here)
        if here.seconds < self._told.get(here.number, self._limit):
            return
        self._told = {here.number: 2 * here.seconds}  # waits that have ended count no more
        before = self._ask(store)
        now = before
        if all(place is not None and place.waits for place in before.values()):
            self._pause(store, self._limit * _LATER, lambda: False)
            if self._closed.is_set() or self._place().number != here.number:
                return
            now = self._ask(store)
        now[self._rank] = now[self._rank] or here
        report = judge(before, now, self._rank, self._silent(store, now))
        if report.stuck:
            store.set(self._key("stuck"), report.text)
        else:
            event = {"kind": "stall", "rank": self._rank, "what": here.what, "ranks": list(report.absent)}
            logger.warning("%s", report.text, extra={"event": event})

    def _answer(self, store: dist.Store) -> None:
        """Answer what has been asked since the last time; end with the others, if that has been decided."""
        self._asking = time.monotonic()
        asked = store.add(self._key("asked"), 0)
        if asked != self._answered:
            here = self._place().written()
            for number in range(max(self._answered, asked - _MOST_ASKED), asked):
                store.set(self._key(number + 1, self._rank), here)
            self._answered = asked
        if store.check([self._key("stuck")]):
            self._give_up(DesyncError, store.get(self._key("stuck")).decode(errors="replace"), EXIT_CODE)

    def _end_after_failure(self, store: dist.Store, here: Position) -> None:
        """End if this rank waits though another has raised, and the wait has not ended by itself."""
        if not store.check([key_of(FAILED)]):
            return
        now = time.monotonic()
        self._failed = self._failed or now
        if now - self._failed >= _MOURNED_S and here.seconds >= _MOURNED_S:
            text = store.get(key_of(FAILED)).decode(errors="replace")
            self._give_up(PeerLostError, f"it {here}, and {text}", _LOST_CODE)

    def _ask(self, store: dist.Store) -> dict[int, Position | None]:
        """Return where the ranks are."""
        number = store.add(self._key("asked"), 1)
        found: dict[int, Position | None] = dict.fromkeys(self._ranks)
        missing = set(self._ranks)

        def all_there() -> bool:
            for rank in sorted(missing):
                if store.check([self._key(number, rank)]):
                    missing.discard(rank)
                    found[rank] = Position.read(store.get(self._key(number, rank)))
            return not missing

        self._pause(store, max(_ANSWERED_S, 3 * self._every), all_there)
        return found

    def _silent(self, store: dist.Store, places: Positions) -> dict[int, str]:
        """Return what has become of the ranks that do not answer, as far as it is known."""
        found = {}
        for rank, place in places.items():
            if place is None and store.check([self._key("process", rank)]):
                word = _object(store.get(self._key("process", rank)))
                found[rank] = state_of(word)
        return found

    def _pause(self, store: dist.Store, seconds: float, enough: Callable[[], bool]) -> None:
        """Answer the others for some seconds, or until it is enough."""
        until = time.monotonic() + seconds
        while True:
            self._answer(store)
            if enough() or time.monotonic() >= until or self._closed.wait(self._every / 4):
                return

    def _give_up(self, kind: type[Exception], text: str, code: int) -> None:
        who = f"*** shardwise: rank {self._rank} of {len(self._ranks)} ends"
        os.write(2, f"{who}: {kind.__name__}: {text}\n".encode())
        self._closed.set()
        self._end(code)


_watching: list[StallWatch] = []


def watch(
    ranks: Sequence[int], rank: int, limit: float, ledger: Ledger, facts: Callable[[], Mapping[str, Any]] | None = None
) -> StallWatch:
    """Start the watch of this process in place of the one that an earlier engine has started; see `StallWatch`.

    Called from the thread in which the script runs.

    Args:
        ranks: of the job.
        rank: of this process.
        limit: seconds.
        ledger: of the job's collectives.
        facts: see `shardwise.comm.positions.Here`.
    """
    while _watching:
        _watching.pop().close()
    started = StallWatch(ranks, rank, limit, where=Here(ledger, threading.get_ident(), facts))
    _watching.append(started)
    follow_devices(True)
    started.start()
    if not started.running:
        follow_devices(False)
    return started


def stop_watching(watch: StallWatch) -> None:
    """End a watch that `watch` has started."""
    watch.close()
    if watch in _watching:
        _watching.remove(watch)
        follow_devices(False)


_CHECK = (
    "Look for a branch (`if rank == 0:`, a condition on data) that leaves out or adds a forward pass, backward(), "
    "step(), evaluation or save_checkpoint() on some ranks, and for loaders that give ranks different numbers of "
    "batches."
)


def _object(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
        return found if isinstance(found, dict) else {}
    except (ValueError, RecursionError):
        return {}


def _connected_anew(store: dist.Store) -> Any:
    """Return the store with a connection of its own: the script may block on the other one."""
    try:
        return store.clone()  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError, NotImplementedError):
        return store
