"""Where a rank is: which collective it waits for, and what its script does.

The host waits inside of `Waiting`. On a device the host goes on while collectives wait: an event behind each of them is
followed (`follow`), and queried once the host has launched none for a while. What the script does is read from the stack of its thread: which of the
engine's methods it is in, a data loader, a collective of torch, or just a line.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from types import FrameType
from typing import Any

from shardwise.comm.ledger import Ledger, Record, line_of
from shardwise.comm.rendezvous import machine
from shardwise.device.streams import Mark

_PAST = 256
"""Collectives of which a rank tells."""
_DEEP = 400
"""Frames of a stack that are looked at."""

_waits: dict[int, tuple[Record, float]] = {}
"""What each thread of this process waits for, and since when (`time.perf_counter()`)."""

_followed: deque[tuple[Record, Mark, float]] | None = None
"""The last collectives that a device has been given, the event behind each, and when (`time.perf_counter()`); None:
following is off. An entry must not refer to a buffer, nor to a `Work` of torch, which refers to its outputs."""
_MOST_FOLLOWED = 1024
"""Because a host that is so far ahead of its device waits for it."""


class Waiting:
    """Let it be known inside of the block that this thread waits for a collective, since a time of the host."""

    __slots__ = ("_record", "_since", "_thread")  # one is made for each collective

    def __init__(self, record: Record | None, since: float) -> None:
        self._record, self._since = record, since

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        if self._record is not None:
            _waits[self._thread] = self._record, self._since

    def __exit__(self, *_: object) -> None:
        _waits.pop(self._thread, None)


def follow(record: Record, mark: Mark) -> None:
    """Add a collective to those that are followed, if following is on.

    Args:
        record: of the collective.
        mark: event in the stream that waits for the collective, behind it.
    """
    if _followed is not None:
        _followed.append((record, mark, time.perf_counter()))


def is_following() -> bool:
    """Whether collectives of devices are followed."""
    return _followed is not None


def follow_devices(on: bool) -> None:
    """Switch following on or off; either forgets all collectives."""
    global _followed
    _followed = deque(maxlen=_MOST_FOLLOWED) if on else None


def oldest_under_way(quiet: float = 0.0) -> tuple[Record, float] | None:
    """Return the first followed collective that the device has not ended, and when the last one was launched.

    Args:
        quiet: seconds since the last launch before which the device is not queried. Because a query from another thread
            breaks the capture of a CUDA graph, it is left to stalls that are suspected.
    """
    followed = list(_followed or ())
    if not followed or time.perf_counter() - followed[-1][2] < quiet:
        return None
    return next(((record, followed[-1][2]) for record, mark, _ in followed if not mark.reached()), None)


@dataclass(frozen=True)
class Position:
    """Where a rank is.

    Attributes:
        what: the collective that it waits for, in words that are the same on all ranks; empty: it waits for none.
        size: its bytes; 0 where they may differ by rank.
        kind: with which collectives that is in one order.
        members: global ranks that take part in it; nothing: not known.
        line: `file:line` of the script that has led there, or where the script is.
        call: `file:line` where it has called the engine, if that is not `line`.
        doing: what the script is in ("engine.step()", "its data loader"); empty: not known.
        seconds: for which it has waited.
        number: of the wait on that rank.
        step: steps that it has taken; -1: not known.
        loader: what the engine's data loader has done; empty: not known.
        past: the last collectives that it has launched, the oldest first: name, kind, number in that order, line
            where the script has called the engine, bytes.
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
    step: int = -1
    loader: str = ""
    past: Sequence[Sequence[Any]] = ()

    @classmethod
    def read(cls, data: bytes) -> Position | None:
        """Return what has been written, if it is one: anybody who reaches the store may have written it."""
        try:
            found = cls(**json.loads(data))
            past = [
                (str(what), str(kind), int(turn), str(line), int(size)) for what, kind, turn, line, size in found.past
            ]
            found = replace(found, past=past, members=[int(rank) for rank in found.members])
        except (TypeError, ValueError, RecursionError):
            return None
        right = all(isinstance(getattr(found, name), kind) for name, kind in _KINDS.items())
        return found if right else None

    def written(self) -> str:
        """Return what `read` reads."""
        return json.dumps(asdict(self))

    @property
    def waits(self) -> bool:
        """Whether it is in a collective."""
        return bool(self.what)

    @property
    def place(self) -> tuple[str, str, int]:
        """What is the same on ranks that are in the same collective."""
        return self.what, self.kind, self.size

    def has_launched(self, other: Position) -> bool:
        """Whether this rank has launched what another one waits for, as far as it tells."""
        if self.place == other.place:
            return True
        launched = {turn: (what, kind, size) for what, kind, turn, _, size in self.past if kind == other.kind}
        turn = turn_of(other.what)
        if turn in launched:
            return launched[turn] == other.place
        return bool(launched) and turn < min(launched)  # so long ago that it does not tell of it

    def __str__(self) -> str:
        at = f" at {self.line}" if self.line else ""
        at += f", called at {self.call}" if self.call else ""
        inside = f", in {self.doing}" if self.doing else ""
        after = f", after {self.step} steps" if self.step >= 0 else ""
        if self.waits:
            apart = "" if self.doing == self.what else inside
            return f"waits in {self.what} for {self.seconds:.0f} s{apart}{at}{after}"
        where = f"is in {self.doing}" if self.doing else "is outside of collectives"
        return f"{where}{at}{after}"


_KINDS = {
    field.name: {"str": str, "int": int, "float": int | float}[str(field.type)]
    for field in fields(Position)
    if field.type in ("str", "int", "float")
}


def named(record: Record) -> str:
    """Return the name of a collective, the same on all ranks."""
    return f"{record.op} {record.label!r} #{record.turn}"


def _size(record: Record) -> int:
    """Return its bytes if they are the same on all ranks."""
    return 0 if record.op == "all_to_all" else record.size


def turn_of(what: str) -> int:
    """Return the number of a collective in its order from its name; -1 if it has none."""
    number = what.rpartition("#")[2]
    return int(number) if number.isdigit() else -1


def order_of(record: Record) -> str:
    """Return with which collectives it is in one order: each group of ranks has orders of its own."""
    return f"{record.group}/{record.kind}"


class Here:
    """Tells where this process is.

    Args:
        ledger: what it has launched.
        thread: in which the script runs; None: the main thread.
        facts: returns `step` and `loader` of a position.
    """

    def __init__(
        self,
        ledger: Ledger | None = None,
        thread: int | None = None,
        facts: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        self._ledger = ledger
        self._thread = thread or threading.main_thread().ident
        self._facts = facts or dict
        self._since: tuple[int, float] = (-1, 0.0)  # of a wait that has been seen, not told

    def __call__(self, quiet: float = 0.0) -> Position:
        """Return the position of this process; `quiet` is as in `oldest_under_way`."""
        frame = None if self._thread is None else sys._current_frames().get(self._thread)
        script = _Script.of(frame)
        rest: dict[str, Any] = {"doing": script.doing, "line": script.line, **self._facts()}
        if self._ledger is not None:
            records = self._ledger.records(self._ledger.sequence - _PAST)
            rest["past"] = [
                (named(one), order_of(one), one.turn, one.call or one.line, _size(one)) for one in records if one.kind
            ]
        wait = self._wait(script.blocked, quiet)
        if wait is not None:
            record, seconds = wait
            rest |= {"line": record.line or script.line, "call": record.call}
            return Position(
                what=named(record),
                size=_size(record),
                kind=order_of(record),
                members=record.members,
                seconds=seconds,
                number=record.sequence,
                **rest,
            )
        if script.torch:
            return Position(
                what=script.doing, kind="torch", seconds=self._seen(script.call), number=script.call, **rest
            )
        return Position(**rest)

    def _wait(self, blocked: bool, quiet: float) -> tuple[Record, float] | None:
        """Return what the script waits for, and how long it has."""
        waits = dict(_waits)
        own = waits.get(self._thread or 0)
        if own is None and blocked and waits:  # in the hands of another thread
            own = min(waits.values(), key=lambda wait: wait[1])
        own = own or oldest_under_way(quiet)
        return None if own is None else (own[0], time.perf_counter() - own[1])

    def _seen(self, number: int) -> float:
        """Return for how long a wait has been seen that nobody has told of."""
        now = time.perf_counter()
        if self._since[0] != number:
            self._since = number, now
        return now - self._since[1]


@dataclass(frozen=True)
class _Script:
    """What a stack tells.

    Attributes:
        line: of the script.
        doing: see `Position`.
        torch: it is in a collective of torch, which the script has called.
        blocked: it may wait for another thread that works for it.
        call: identifies the call of torch's collective, as far as two looks can tell.
    """

    line: str = ""
    doing: str = ""
    torch: bool = False
    blocked: bool = False
    call: int = -1

    @classmethod
    def of(cls, frame: FrameType | None) -> _Script:
        if frame is None:
            return cls()
        blocked = frame.f_code.co_filename.endswith((_AUTOGRAD, _THREADING, _QUEUE))
        method = loader = collective = ""
        ours, call = False, -1
        inner: FrameType | None = frame
        for _ in range(_DEEP):
            if inner is None:
                break
            file, name = inner.f_code.co_filename, inner.f_code.co_name
            if file.endswith(_ENGINE) and not name.startswith("_"):
                method = name  # the outermost, which the script has called
            elif any(part in file for part in _LOADERS):
                loader = "its data loader"
            elif file.endswith(_C10D) and not name.startswith("_") and not ours and not name.startswith(_NO_WAITS):
                collective, call = f"torch.distributed.{name}()", hash((id(inner), inner.f_lasti))
            ours = ours or (_PACKAGE in file and not file.endswith(_API))
            inner = inner.f_back
        line = line_of(frame)
        if method:
            return cls(line, _METHODS.get(method, f"engine.{method}()"), blocked=blocked)
        if collective:
            return cls(line, collective, torch=True, call=call)
        return cls(line, loader, blocked=blocked)


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_ENGINE = os.path.join("shardwise", "engine", "engine.py")
_API = os.path.join("shardwise", "comm", "api.py")
_C10D = os.path.join("torch", "distributed", "distributed_c10d.py")
_AUTOGRAD = os.path.join("torch", "autograd", "graph.py")
_THREADING, _QUEUE = f"{os.sep}threading.py", f"{os.sep}queue.py"
_LOADERS = (os.path.join("torch", "utils", "data", ""), os.path.join(_PACKAGE, "data", ""))
_METHODS = {"forward": "a forward pass"}
_NO_WAITS = ("get_", "is_")


def process_word() -> dict[str, Any]:
    """Return what lets processes of the same machine look at this one."""
    return {"machine": _machine(), "pid": os.getpid(), "began": _status(os.getpid())[1]}


def state_of(word: Mapping[str, Any]) -> str:
    """Say what has become of a process that does not answer.

    Args:
        word: what its `process_word` was.
    """
    pid, began = word.get("pid"), word.get("began")
    if word.get("machine") != _machine() or not isinstance(pid, int):
        return "does not answer: it is stopped, or gone, or its machine cannot be reached"
    state, since = _status(pid)
    if not state or since != began or state in "ZX":
        return f"does not answer: its process ({pid}) has ended"
    if state in "Tt":
        how = f"`kill -CONT {pid}` lets it go on"
        return f"does not answer: its process ({pid}) is stopped (SIGSTOP, or a debugger); {how}"
    if state == "D":
        return f"does not answer: its process ({pid}) waits in the kernel, as a rule for a disk or a device"
    return (
        f"does not answer: its process ({pid}) runs, and lets no other thread run; it is in compiled code that holds "
        "Python's lock, or has no processor"
    )


def _machine() -> str:
    with suppress(OSError):
        return machine() + os.readlink("/proc/self/ns/pid")  # numbers of processes count in a container of their own
    return machine()


def _status(pid: int) -> tuple[str, str]:
    """Return the state of a process as one letter, and when it began; both empty if it cannot be known."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            parts = stat.read().rpartition(")")[2].split()
        return parts[0], parts[19]
    except (OSError, IndexError):
        return "", ""
