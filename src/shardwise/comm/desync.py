"""Positions of ranks, and the text of errors and warnings that compare positions.

A rank that waits in a collective has a `Position`. `judge` finds the ranks that are waited for, or that ranks wait for
each other in different collectives. Ranks with equal positions share a line: a report is about as long on 1,024 ranks
as on two.

The stall watchdog (`stall_watchdog`) requests positions while a collective waits too long. A rank in a failing
collective writes its position into the default group's store, and reads other ranks' positions (`FailureReports`). On
Gloo a wait that times out closes the connection: the peer's collective then fails at once, and the peer writes its
position, too.

Under `strict_sync` ranks compare the arguments of each collective of `shardwise.comm` (`check_call`). Because torch
does not, tensors of different shapes abort the process on Gloo, and wait or return wrong values on NCCL.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import json
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardwise.comm.coded import MOST_SHOWN, coded, decoded, ranks_in_words
from shardwise.comm.ledger import Ledger, Record, is_of_script, user_line
from shardwise.comm.rendezvous import answers, attempt, written
from shardwise.compat import all_gather_single, backend_of, default_store
from shardwise.errors import DesyncError, PeerLostError

T = TypeVar("T")

# -- positions ---------------------------------------------------------------------------------------------------------

TORCH, PAIR = "torch/", "torch/pair/"
"""Prefixes of the orders of torch's collectives and of its messages between two ranks."""

Place = tuple[str, str, int]
"""Equal on all ranks of a collective: name, order (`order_of`) and bytes."""


@dataclass(frozen=True)
class Position:
    """The place of a rank in its program.

    Attributes:
        what: the collective that the rank waits for, in words equal on all ranks; empty: none.
        size: bytes; 0 if they may differ by rank.
        kind: the order of collectives that `what` belongs to.
        members: global ranks of the collective; empty: unknown.
        line: `file:line` of the script; `call`: of the script's call of the engine, if another one.
        doing: the script's activity ("engine.step()", "its data loader"); empty: unknown.
        seconds: duration of the wait; `number`: of the wait on that rank.
        turn: of a collective of torch: the number of collectives launched in the group, with this one; -1: unknown.
        step, collectives: steps taken, and collectives of torch launched in the default group; -1: unknown.
        loader: progress of the engine's data loader; empty: unknown.
    """

    what: str = ""
    size: int = 0
    kind: str = ""
    members: Sequence[int] = ()
    line: str = ""
    call: str = ""
    doing: str = ""
    seconds: float = 0.0
    number: int = -1
    turn: int = -1
    step: int = -1
    collectives: int = -1
    loader: str = ""

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> Position | None:
        """Return the position from `written`, or None if the value is none."""
        try:
            members = found.get("members")
            return cls(**{**found, "members": decoded(members) if members else ()})
        except (TypeError, ValueError):
            return None

    def written(self) -> dict[str, Any]:
        """Return the position for JSON, in a few hundred bytes, without default values."""
        found = {one.name: value for one in fields(self) if (value := getattr(self, one.name)) != one.default}
        if self.members:
            found["members"] = coded(self.members)
        return found

    @property
    def waits(self) -> bool:
        """Whether the rank is in a collective."""
        return bool(self.what)

    @property
    def torch(self) -> bool:
        """Whether the rank is in a collective of torch."""
        return self.kind.startswith(TORCH)

    @property
    def place(self) -> Place:
        """The part of the position that is equal on ranks in the same collective."""
        return ("", self.kind, 0) if self.kind.startswith(PAIR) else (self.what, self.kind, self.size)

    def __str__(self) -> str:
        at = f" at {self.line}" if self.line else ""
        at += f", called at {self.call}" if self.call else ""
        inside = f", in {self.doing}" if self.doing else ""
        after = f", after {self.step} steps" if self.step >= 0 else ""
        if self.waits:
            return f"waits in {self.what} for {self.seconds:.0f} s{inside}{at}{after}"
        where = f"is in {self.doing}" if self.doing else "is outside of collectives"
        return f"{where}{at}{after}"


def named(record: Record) -> str:
    """Return the name of a collective, equal on all ranks."""
    return f"{record.op} {record.label!r} #{record.turn}"


def size_of(record: Record) -> int:
    """Return the bytes of a collective if they are equal on all ranks; else 0."""
    return 0 if record.op == "all_to_all" else record.size


def order_of(record: Record) -> str:
    """Return the order that a collective belongs to: each engine's group of ranks has orders of its own."""
    members = record.members
    number = _number_of(members if isinstance(members, range | tuple) else tuple(members))
    return f"{record.engine}/{record.group}/{record.kind}/{number:x}"


@functools.lru_cache(256)  # because a ledger has thousands of records of a few groups
def _number_of(members: Sequence[int]) -> int:
    return zlib.crc32(repr(list(members)).encode())


_SLOW = 10e6
"""Bytes a second of a slow network."""

Launch = tuple[str, str, int, int]
"""Of a launched collective: name, line of the script's call of the engine, bytes, and sequence number."""


RECENT = 32
"""Collectives of each order of which a rank reports digests."""
DIGEST = 4
"""Letters of a digest."""


def launch_of(record: Record) -> Launch:
    """Return the `Launch` of a record."""
    return named(record), record.call or record.line, size_of(record), record.sequence


def digest_of(launch: Launch) -> str:
    """Return a few letters that differ where ranks have launched different collectives."""
    return hashlib.blake2b(repr(launch[:3]).encode(), digest_size=DIGEST // 2).hexdigest()


def position_of(record: Record, seconds: float = 0.0, **rest: Any) -> Position:
    """Return the position of a rank that waits for a collective."""
    return Position(
        what=named(record),
        size=size_of(record),
        kind=order_of(record),
        members=record.members,
        seconds=seconds,
        number=record.sequence,
        **{"line": record.line, "call": record.call, **rest},
    )


# -- reports -----------------------------------------------------------------------------------------------------------

Positions = Mapping[int, Position | None]
"""By rank; None: no answer."""


@dataclass(frozen=True)
class Confirmation:
    """The second answer of a rank that waits; another wait `number` means that the rank has moved on.

    `launched` are collectives that other ranks wait for and this one has launched. `recent` has, by order, the number
    of a collective, and digests of that one and the later ones.
    """

    number: int
    launched: frozenset[Place] = frozenset()
    recent: Mapping[str, tuple[int, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """Findings about a collective that waits too long: ranks wait for each other (`stuck`), or for `absent` ranks."""

    text: str
    stuck: bool
    absent: tuple[int, ...] = ()


def judge(
    places: Positions,
    own: int,
    confirmed: Mapping[int, Confirmation] | None = None,
    silent: Mapping[int, str] | None = None,
    parting: Sequence[str] = (),
) -> Report:
    """Find the ranks that are waited for, or that ranks wait for each other; `own` is this rank, which waits.

    `confirmed` has the second answers, `silent` the process state of ranks without an answer, and `parting` lines about
    the first collective that ranks have launched differently.

    >>> gather, reduce = Position("all_gather 'a' #4", line="t.py:3", seconds=9.0), Position("all_gather 'b' #4")
    >>> judge({0: gather, 1: reduce}, 0, dict.fromkeys((0, 1), Confirmation(-1))).stuck
    True
    >>> print(judge({0: gather, 1: Position(line="t.py:7")}, 0).text)
    rank 0 waits in all_gather 'a' #4 for 9 s at t.py:3, for rank 1:
      rank 1: is outside of collectives at t.py:7
    """
    here = places[own]
    assert here is not None
    there = _waiting(places)
    if is_stuck(places, confirmed):
        text = "the ranks wait for each other in different collectives."
        return Report("\n".join([text, *_table(places, {}), *parting, *(_advice(there) or [_CHECK])]), True)
    absent = tuple(rank for rank in here.members or places if rank != own and rank in places and rank not in there)
    if absent:
        whom = f", for {ranks_in_words(absent)}"
    elif _may_end(here, there, confirmed or {}):
        whom = f"; all ranks are there, so {_slow(there)}"
    else:
        whom = "; others wait, too"
    others = {rank: place for rank, place in places.items() if rank != own}
    return Report("\n".join([f"rank {own} {here}{whom}:", *_table(others, silent or {})]), False, absent)


def _slow(there: Mapping[int, Position]) -> str:
    counts = _by(there, lambda rank: there[rank].collectives)
    if len(counts) == 1 or -1 in counts:
        return "the network between them is slow"
    return (
        "the network between them is slow, or a device waits for a collective that the script has launched on some "
        f"ranks only (launched with torch.distributed in the default group: {_few(counts, '{} on {}')})"
    )


def is_stuck(places: Positions, confirmed: Mapping[int, Confirmation] | None) -> bool:
    """Return True if all ranks still wait in the same collectives, and each collective lacks some of its ranks."""
    there = _waiting(places)
    if confirmed is None or len(there) < len(places):
        return False
    still = all(rank in confirmed and confirmed[rank].number == place.number for rank, place in there.items())
    may_end = any(_may_end(place, there, confirmed) for place in waits_of(places))
    return still and not may_end and not any(_may_be_sent(rank, there) for rank in there)


def waits_of(places: Positions) -> list[Position]:
    """Return the different collectives that ranks wait for."""
    return list({place.place: place for place in _waiting(places).values()}.values())


def _waiting(places: Positions) -> dict[int, Position]:
    return {rank: place for rank, place in places.items() if place is not None and place.waits}


def _may_end(waited: Position, there: Mapping[int, Position], confirmed: Mapping[int, Confirmation]) -> bool:
    return all(
        there[rank].place == waited.place or (rank in confirmed and waited.place in confirmed[rank].launched)
        for rank in waited.members or there
        if rank in there
    )


def _may_be_sent(rank: int, there: Mapping[int, Position]) -> bool:
    """Return True if a rank waits for a message between two ranks that may be under way, because its other end may have
    called isend or irecv.

    If the other end waits for a message, too, that one decides. Ranks whose waits form a cycle wait for each other,
    unless a message is so long that it may be under way on a slow network.
    """
    seen: set[int] = set()
    while rank not in seen:
        place = there.get(rank)
        if place is None or not place.kind.startswith(PAIR):
            return bool(seen)
        seen.add(rank)
        ends = map(int, place.kind.removeprefix(PAIR).partition("/")[0].split(">"))
        rank = next((end for end in ends if end != rank), -1)
    return any(there[known].size > _SLOW * there[known].seconds for known in seen)


def first_difference(recent: Mapping[int, tuple[int, str]]) -> tuple[int, list[int]] | None:
    """Return the number of the first collective of an order that ranks have launched differently, or None.

    `recent` is each rank's `Confirmation.recent` of the order. The second item has one rank for each way of launching.

    >>> first_difference({0: (6, "aaaabbbbcccc"), 1: (7, "bbbbdddd"), 2: (7, "bbbbdddd")})
    (8, [0, 1])
    """
    begin = max(first for first, _ in recent.values())
    end = min(first + len(digests) // DIGEST for first, digests in recent.values())
    for turn in range(begin, end):
        ways: dict[str, int] = {}
        for rank, (first, digests) in recent.items():
            ways.setdefault(digests[(turn - first) * DIGEST :][:DIGEST], rank)
        if len(ways) > 1:
            return turn, list(ways.values())
    return None


def parting_in_words(launches: Mapping[int, Launch]) -> list[str]:
    """Describe how ranks of one group have launched the first differing collective."""
    sizes = len({size for _, _, size, _ in launches.values()}) > 1
    lines = (
        f"  rank {rank}: {what}{f' of {size} bytes' if sizes else ''} at {line}"
        for rank, (what, line, size, _) in launches.items()
    )
    return ["They part here:", *lines] if launches else []


def _table(places: Positions, silent: Mapping[int, str]) -> list[str]:
    def text_of(rank: int) -> str:
        place = places[rank]
        return silent.get(rank, "") if place is None else str(replace(place, seconds=0.0))

    alike, lines = list(_by(places, text_of).values()), []
    for ranks in alike[:MOST_SHOWN]:
        longest = max((place for rank in ranks if (place := places[rank])), key=lambda one: one.seconds, default=None)
        text = silent.get(ranks[0], "has not answered") if longest is None else str(longest)
        lines.append(f"  {ranks_in_words(ranks)}: {text}")
    rest = [rank for ranks in alike[MOST_SHOWN:] for rank in ranks]
    return [*lines, f"  {ranks_in_words(rest)}: elsewhere"] if rest else lines


def _advice(places: Mapping[int, Position]) -> list[str]:
    found: list[str] = []
    names = {rank: f"{p.what.partition('(')[0]}()" if p.torch else p.doing for rank, p in places.items()}
    for (what, _), ranks in _by(places, lambda rank: (places[rank].what, places[rank].kind)).items():
        sizes = _by(ranks, lambda rank: places[rank].size)
        if len(sizes) > 1:
            found.append(f"Ranks pass tensors of different sizes to {what}: {_few(sizes, '{} bytes on {}')}.")
    for name, ranks in _by((rank for rank in places if places[rank].torch), names.__getitem__).items():
        if len({places[rank].what for rank in ranks}) > 1:
            calls = _by(ranks, lambda rank: f"{places[rank].what} at {places[rank].line}")
            shown = _few(calls, "{} by {}")
            found.append(f"Ranks call {name} with different arguments: {shown}. Pass the same on every rank.")
    doing = _by(places, names.__getitem__)
    for method, ranks in doing.items() if len(doing) > 1 else ():
        if method.startswith(("engine.", "torch.")) and method not in _EACH_BATCH:
            lines = " and ".join(sorted({places[rank].call or places[rank].line for rank in ranks})[:4])
            others = [rank for rank in places if rank not in set(ranks)]
            found.append(
                f"{method} has been called by {ranks_in_words(ranks)} at {lines}, and not by "
                f"{ranks_in_words(others)}: every rank of its group has to call it, at the same point. Take it "
                "out of `if rank == 0:`, or, if it comes after a loop over data, see that all ranks get the same "
                "number of batches."
            )
    loaders = _by((rank for rank in places if places[rank].loader), lambda rank: places[rank].loader)
    if len(loaders) > 1:
        found.append(f"Loaders differ: {_few(loaders, 'that of {1} {0}')}")
    return found


def _by(ranks: Iterable[int], key: Callable[[int], T]) -> dict[T, list[int]]:
    found: dict[T, list[int]] = {}
    for rank in ranks:
        found.setdefault(key(rank), []).append(rank)
    return found


def _few(groups: Mapping[T, list[int]], form: str) -> str:
    return ", ".join(form.format(value, ranks_in_words(ranks)) for value, ranks in list(groups.items())[:4])


_EACH_BATCH = ("engine.backward()", "engine.step()")

_CHECK = (
    "Check that every rank gets the same number of batches; that no branch (`if rank == 0:`, a condition on data) "
    "leaves out or adds a forward pass, backward(), step() or evaluation on some ranks; and that all ranks call "
    "save_checkpoint() and other methods that use collectives. Loops of different length, such as "
    "generate(synced_gpus=False), belong inside of `with engine.gathered():`."
)


# -- values in the store -----------------------------------------------------------------------------------------------


def key_of(*parts: object) -> str:
    """Return a key of the store, which names the attempt: a restarted job may use the store of the attempt before."""
    first, *rest = parts
    return "/".join(map(str, ("shardwise", first, attempt(), *rest)))


def seal(text: str, secret: str, key: str) -> str:
    """Return a value that `unsealed` accepts under the same key, and with the same secret of the job, only."""
    return _code(text, secret, key) + text


def unsealed(data: bytes, secret: str, key: str) -> str | None:
    """Return the text of a value, or None if its writer does not know the secret.

    >>> unsealed(seal("here", "secret", "a").encode(), "secret", "a")
    'here'
    >>> unsealed(seal("here", "secret", "a").encode(), "secret", "b")
    """
    found = data.decode(errors="replace")
    code, text = found[:_LETTERS], found[_LETTERS:]
    return text if hmac.compare_digest(code.encode(), _code(text, secret, key).encode()) else None


_LETTERS = 32


def _code(text: str, secret: str, key: str) -> str:
    return hmac.digest(secret.encode(), f"{key}\n{text}".encode(), hashlib.sha256).hex()[:_LETTERS]


def read_all(store: dist.Store, keys: list[str]) -> dict[str, bytes]:
    """Return the values of the keys that are in a store."""
    there = written(store, keys)
    at_once = store.has_extended_api()  # type: ignore[attr-defined]
    values = store.multi_get(there) if at_once else map(store.get, there)
    return dict(zip(there, values, strict=True))


# -- collectives that fail ---------------------------------------------------------------------------------------------

PATIENCE_S = 1.0
"""Seconds for which a rank that fails waits for the others, which fail within milliseconds or not at all."""
FAILED = "failed"
"""Key of the traceback of the last rank that has ended with an exception."""

_TRACEBACK = 4000  # letters of a traceback that other ranks read
_POLL_S, _SLOWEST_POLL_S = 0.02, 0.25
_MOST_READ = 32
"""Ranks that a report reads besides the lost one, because reports on all ranks would grow with ranks squared."""
_DYING_S = 0.1  # seconds for which sockets of a killed process may outlive one another
_SILENT = "has not said where it is: it is gone, or busy outside of collectives (data, computing, waiting)"

_secret = ""


def sign_failures(secret: str) -> None:
    """Sign tracebacks of failures with a secret of the job."""
    global _secret
    _secret = secret


@dataclass(frozen=True)
class RankState:
    """The status of a rank in the store: "waits" in a collective (`place`), "ends" in `destroy()`, "ended", "failed".

    `text` describes a rank that does not wait. A rank that has "failed" ended with an exception.
    """

    state: str
    text: str = ""
    place: Position | None = None

    @classmethod
    def read(cls, data: bytes) -> RankState | None:
        """Return a status, or None if the value is none. Because any program may write into the store."""
        try:
            found = json.loads(data)
            place = Position.read({**found["place"], "members": ()}) if found["state"] == "waits" else None
            status = cls(found["state"], found["text"], place)
            known = place.waits if place else status.state in ("ends", "ended", "failed")
            return status if known and isinstance(status.text, str) and str(place) else None
        except (ValueError, KeyError, TypeError, RecursionError):
            return None

    def publish(self) -> None:
        """Write this rank's status, if the store can be reached."""
        place = None if self.place is None else replace(self.place, members=()).written()
        text = json.dumps({"state": self.state, "text": self.text, "place": place})
        _publish(_state_key(dist.get_rank()), text, _DYING_S if self.state == "waits" else 0.0)


def _publish(key: str, text: str, patience: float = 0.0) -> None:
    store = default_store()
    if store is not None and answers(store, patience):
        with contextlib.suppress(RuntimeError):  # it has gone meanwhile
            store.set(key, text)


def publish_end() -> None:
    """Write that this process ends, for ranks that wait for it; after an exception with the traceback. Does nothing
    where the script has destroyed the process groups.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    error = getattr(sys, "last_value", None)
    if error is None:
        RankState("ended", "has ended without an exception").publish()
        return
    text = f"has ended with {type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f" at {frame.filename}:{frame.lineno}" for frame in frames if is_of_script(frame.filename)]
    RankState("failed", text + "".join(lines[-1:])).publish()
    if _secret:
        trace = "".join(traceback.format_exception(error))[-_TRACEBACK:]
        report = f"rank {dist.get_rank()} {text}. Its traceback:\n{trace}"
        _publish(key_of(FAILED), seal(report, _secret, key_of(FAILED)))


def inside_of(method: str, failure: BaseException | None) -> str:
    """Return the status text of a rank in a method of the engine, perhaps after an exception."""
    line = user_line()
    reason = "" if failure is None else f", after {type(failure).__name__}: {str(failure)[:200]}"
    return f"is in {method}{f' at {line}' if line else ''}{reason}"


def read_states(ranks: Iterable[int], patience: float) -> dict[int, RankState]:
    """Return the statuses of ranks, waiting at most `patience` seconds for missing ones."""
    found: dict[int, RankState] = {}
    missing = {_state_key(rank): rank for rank in ranks}
    store = default_store()
    if store is None or not answers(store, _DYING_S):
        return found  # it has gone, with the rank that served it
    deadline, pause = time.monotonic() + patience, _POLL_S
    with contextlib.suppress(RuntimeError):  # it has gone meanwhile
        while missing:
            for key, data in read_all(store, list(missing)).items():
                rank, status = missing.pop(key), RankState.read(data)
                if status is not None:
                    found[rank] = status
            if time.monotonic() >= deadline:
                break
            time.sleep(pause if missing else 0)
            pause = min(2 * pause, _SLOWEST_POLL_S)
    return found


def _state_key(rank: int) -> str:
    return key_of("status", rank)


class FailureReports:
    """Creates the errors of a communicator: always the first one, because later failures follow from it."""

    def __init__(self, ledger: Ledger, ranks: Sequence[int], rank: int) -> None:
        self._ledger = ledger
        self._ranks = list(ranks)
        self._rank = rank
        self._first: DesyncError | PeerLostError | None = None
        self._lock = threading.Lock()

    def explain(self, error: PeerLostError, here: Position) -> DesyncError | PeerLostError:
        """Return the first failure of this communicator, with the statuses of other ranks; `here` is the collective."""
        with self._lock:
            if self._first is None:
                self._first = self._compare(error, here)
            return self._first

    def _compare(self, error: PeerLostError, here: Position) -> DesyncError | PeerLostError:
        own = self._ranks[self._rank]
        RankState("waits", place=here).publish()
        lost = [self._ranks[error.peer]] if error.peer >= 0 else []
        following = [*self._ranks[self._rank + 1 :], *self._ranks[: self._rank]][:_MOST_READ]
        others = list(dict.fromkeys([*lost, *following]))
        states = read_states(others, PATIENCE_S)
        peer = lost[0] if lost else _cause(others, states, here)
        places = {here.place} | {status.place.place for status in states.values() if status.place is not None}
        unread = len(self._ranks) - 1 - len(others)
        all_wait = not unread and len(states) == len(others) and all(status.place for status in states.values())
        apart = all_wait and len(places) > 1
        status = states.get(peer)
        done = [record for record in self._ledger.records() if record.finished is not None]
        last = max(done, key=lambda record: record.finished or 0.0, default=None)
        completed = f"last completed: {named(last) if last else 'nothing'}."
        where = f"rank {peer} in {here.what}{f' at {here.line}' if here.line else ''}"
        if error.timed_out:
            text = (
                f"has waited {here.seconds:.1f} s for {where}, and rank {peer} has not answered "
                f"(the limit for a collective: SHARDWISE_TIMEOUT, in minutes). Its connection is given up; {completed}"
            )
        else:
            text = f"has lost {where}, after {here.seconds:.1f} s; {completed}\nRank {peer}: {_loss(status)}"
        if apart:
            end = f"The ranks wait for each other in different collectives. {_CHECK}"
        elif not error.timed_out:
            end = f"The cause is on rank {peer}, or on a rank that it was waiting for: see their output."
        elif all_wait:
            end = "The ranks are in the same collective: the network between them is too slow, or broken."
        elif status is None or status.place is not None:
            end = f"If rank {peer} is only slow, raise the limit. {_CHECK}"
        else:
            end = f"Rank {peer}: {_loss(status)}"
        silent = {rank: states[rank].text if rank in states else _SILENT for rank in others}
        table = _table({rank: states[rank].place if rank in states else None for rank in others}, silent)
        if unread:
            table.append(f"  {unread} more ranks: not read")
        kind = DesyncError if apart or (status is not None and status.state == "ends") else PeerLostError
        report = kind("\n".join([f"rank {own} of {len(self._ranks)} {text}", *table, end]))
        if isinstance(report, PeerLostError):
            report.peer, report.timed_out = peer, error.timed_out
        report.__cause__ = error.__cause__
        return report


def _loss(status: RankState | None) -> str:
    if status is None:
        return "it has ended or lost its connection. If it ended without an error, did it get fewer batches?"
    if status.place is not None:
        return "it has given up waiting, and with that closed the connection."
    fewer = "" if status.state == "failed" else " Did it get fewer batches than the others?"
    return f"it {status.text}.{fewer}"


def _cause(ranks: Sequence[int], states: Mapping[int, RankState], here: Position) -> int:
    """Return the likely cause: a rank that has ended, else one without a status, else one in another collective."""

    def order(rank: int) -> int:
        status = states.get(rank)
        if status is None:
            return 1
        return 0 if status.place is None else 3 if status.place.place == here.place else 2

    return min(ranks, key=order)


# -- comparisons beforehand --------------------------------------------------------------------------------------------

_comparing = 0
"""Number of engines for which collectives are compared."""


def compare_calls(on: bool) -> None:
    """Begin or end, for one engine, the comparison of collectives of `shardwise.comm`: a small collective for each."""
    global _comparing
    _comparing += 1 if on else -1


def check_call(
    name: str, tensors: torch.Tensor | Sequence[torch.Tensor] | None, group: Any, rest: Mapping[str, Any]
) -> None:
    """Raise a DesyncError on all ranks of a group, unless all have called the same collective with equal arguments.

    Compared are shapes and dtypes of `tensors`, and `rest`, such as the operation of a reduction.
    """
    if not _comparing or dist.get_world_size(group) == 1 or dist.get_rank(group) < 0:
        return
    given = [] if tensors is None else [tensors] if isinstance(tensors, torch.Tensor) else tensors
    arguments = [f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)}" for one in given]
    arguments += [f"{argument}={str(value).rpartition('.')[2]}" for argument, value in rest.items()]
    call = f"{name}({', '.join(arguments)})"
    if len(set(_gathered(hashlib.sha256(call.encode()).digest(), group))) == 1:
        return
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    texts: list[Any] = [None] * len(ranks)
    dist.all_gather_object(texts, f"{call} at {user_line()}", group)
    calls = dict(zip(ranks, texts, strict=True))
    table = [f"  {ranks_in_words(alike)}: {text}" for text, alike in _by(calls, calls.__getitem__).items()]
    raise DesyncError(
        "\n".join(["strict_sync: the ranks have called different collectives:", *table])
        + "\nEvery rank of the group has to call the same, in the same order, with the same arguments and tensors of "
        "the same shape and dtype."
    )


def _gathered(own: bytes, group: Any) -> list[bytes]:
    cpu = torch.device("cpu")
    device = cpu if backend_of(group, cpu) else torch.device("cuda", torch.cuda.current_device())
    mine = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device)
    rows = torch.empty(dist.get_world_size(group) * len(own), dtype=torch.uint8, device=device)
    all_gather_single(rows, mine, group=group)
    return [bytes(row.tolist()) for row in rows.cpu().view(-1, len(own))]
