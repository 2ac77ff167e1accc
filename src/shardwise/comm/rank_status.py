"""Where a rank is: which collective it waits for, and what its script does.

The host waits inside of `Waiting`. On a device the host goes on while collectives wait: an event behind each of them is
followed (`follow`), and queried once the host has launched none for a while. What the script does is read from the
stack of its thread: which of the engine's methods it is in, a data loader, a collective of torch, or just a line.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.desync import (
    PAIR,
    RECENT,
    TORCH,
    Launch,
    Place,
    Position,
    digest_of,
    launch_of,
    named,
    order_of,
    position_of,
    size_of,
)
from shardwise.comm.ledger import Ledger, Record, line_of
from shardwise.comm.rendezvous import machine
from shardwise.compat import launched_of
from shardwise.device.streams import Mark

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


class WaitingForWork:
    """Let it be known inside of the block that this thread waits for an asynchronous collective of torch.

    Args:
        name: of the collective.
        given: its arguments, as far as they say which it is.
    """

    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        self._name, self._given = name, given

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        _works[self._thread] = self._name, self._given, time.perf_counter()

    def __exit__(self, *_: object) -> None:
        _works.pop(self._thread, None)


_works: dict[int, tuple[str, Mapping[str, Any], float]] = {}
"""The asynchronous collective of torch that each thread of this process waits for, and since when."""


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


def quiet_for() -> float:
    """Return how long no collective of a device has been launched; 0 if none is followed."""
    followed = _followed
    return time.perf_counter() - followed[-1][2] if followed else 0.0


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


def turn_of(what: str) -> int:
    """Return the number of a collective in its order from its name; -1 if it has none."""
    number = what.rpartition("#")[2]
    return int(number) if number.isdigit() else -1


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
        self._since: tuple[int, float] = (-1, 0.0)  # of a collective of torch

    def __call__(self, quiet: float = 0.0) -> Position:
        """Return the position of this process; `quiet` is as in `oldest_under_way`."""
        frame = None if self._thread is None else sys._current_frames().get(self._thread)
        script = _Script.of(frame)
        rest: dict[str, Any] = {"doing": script.doing, "line": script.line, **self._facts()}
        wait = self._wait(script.blocked, quiet)
        if wait is not None:
            record, seconds = wait
            return position_of(record, seconds, **{**rest, "line": record.line or script.line})
        work = _works.get(self._thread or 0)
        call = script.torch if work is None else _TorchCall.of(*work)
        if call is not None:
            return Position(call.what, call.size, call.kind, call.members, seconds=self._seen(call.number),
                            number=call.number, **rest)  # fmt: skip
        return Position(**rest)

    def launched(self, waits: Sequence[Place]) -> list[bool]:
        """Return for each collective that some rank waits for whether this rank has launched it."""
        kept: dict[str, dict[int, Place]] = {kind: {} for _, kind, _ in waits}
        for record in self._records():
            if (kind := order_of(record)) in kept:
                kept[kind][record.turn] = named(record), kind, size_of(record)
        found = []
        for what, kind, size in waits:
            turns, turn = kept[kind], turn_of(what)
            # A turn before those of the ledger was launched long ago.
            found.append(turns[turn] == (what, kind, size) if turn in turns else bool(turns) and turn < min(turns))
        return found

    def recent(self, kinds: Sequence[str]) -> dict[str, tuple[int, str]]:
        """Return for each order the number of one of its last collectives, and digests of that and all later ones."""
        kept: dict[str, dict[int, Record]] = {}
        for record in self._records():
            if (kind := order_of(record)) in kinds:
                kept.setdefault(kind, {})[record.turn] = record
        found = {}
        for kind, launched in kept.items():
            turns = sorted(launched)[-RECENT:]
            found[kind] = turns[0], "".join(digest_of(launch_of(launched[turn])) for turn in turns)
        return found

    def launch(self, kind: str, turn: int) -> Launch | None:
        """Return one collective that this rank has launched."""
        found = (launch_of(one) for one in self._records() if one.turn == turn and order_of(one) == kind)
        return next(found, None)

    def _records(self) -> list[Record]:
        return [] if self._ledger is None else [record for record in self._ledger.records() if record.kind]

    def _wait(self, blocked: bool, quiet: float) -> tuple[Record, float] | None:
        """Return what the script waits for, and how long it has."""
        waits = dict(_waits)
        own = waits.get(self._thread or 0)
        if own is None and blocked and waits:  # in the hands of another thread
            own = min(waits.values(), key=lambda wait: wait[1])
        own = own or oldest_under_way(quiet)
        return None if own is None else (own[0], time.perf_counter() - own[1])

    def _seen(self, number: int) -> float:
        """Return for how long a call has been seen."""
        now = time.perf_counter()
        if self._since[0] != number:
            self._since = number, now
        return now - self._since[1]


@dataclass(frozen=True)
class _TorchCall:
    """A collective of torch that a thread is in.

    Attributes:
        what: see `Position`.
        size: see there.
        kind: see there.
        members: see there.
        number: identifies the call, as far as two looks can tell.
    """

    what: str
    size: int
    kind: str
    members: Sequence[int]
    number: int

    @classmethod
    def of(cls, name: str, given: Mapping[str, Any], place: object) -> _TorchCall:
        """Return a call from its name, its arguments, and something that tells it from others."""
        group = given.get("group")
        group = group if isinstance(group, dist.ProcessGroup) else dist.group.WORLD
        members: list[int] = []
        with suppress(RuntimeError, ValueError, KeyError):  # it has been destroyed
            members = dist.get_process_group_ranks(group)
        said = []
        if "op" in given and (op := str(given["op"]).rpartition(".")[2]) != "SUM":
            said.append(f"op={op}")
        peer = -1
        for root in ("src", "dst"):
            own = given.get(f"group_{root}")
            number = members[own] if isinstance(own, int) and own < len(members) else given.get(root)
            if isinstance(number, int):
                peer = number
                said.append(f"{root}={number}")
        if group is not dist.group.WORLD:
            said.append(f"group=ranks {', '.join(map(str, members[:8]))}{', ...' if len(members) > 8 else ''}")
        kind = f"{TORCH}{getattr(group, 'group_name', '')}"
        if name in _PAIRS:
            ends = (dist.get_rank(), peer) if name.endswith("send") else (peer, dist.get_rank())
            kind = f"{PAIR}{ends[0]}>{ends[1]}/{given.get('tag')}"
            members = sorted(end for end in ends if end >= 0)
        tensor = given.get(_ALIKE.get(name, ""))
        size = tensor.nbytes if isinstance(tensor, torch.Tensor) else 0
        call = hash((place, -1 if group is None else launched_of(group)))
        return cls(f"torch.distributed.{name}({', '.join(said)})", size, kind, members, call)


_PAIRS = ("send", "recv", "isend", "irecv")
_ALIKE = {
    "all_reduce": "tensor",
    "reduce": "tensor",
    "broadcast": "tensor",
    "all_gather": "tensor",
    "gather": "tensor",
    "all_gather_into_tensor": "input_tensor",
    "reduce_scatter": "output",
    "reduce_scatter_tensor": "output",
}
"""Arguments of torch's collectives that have the same size on all ranks."""


@dataclass(frozen=True)
class _Script:
    """What a stack tells.

    Attributes:
        line: of the script.
        doing: see `Position`.
        torch: the collective of torch that it is in, whoever has called that.
        blocked: it may wait for another thread that works for it.
    """

    line: str = ""
    doing: str = ""
    torch: _TorchCall | None = None
    blocked: bool = False

    @classmethod
    def of(cls, frame: FrameType | None) -> _Script:
        if frame is None:
            return cls()
        blocked = frame.f_code.co_filename.endswith((_AUTOGRAD, _THREADING, _QUEUE))
        method = loader = ""
        ours = False
        called: FrameType | None = None
        inner: FrameType | None = frame
        for _ in range(_DEEP):
            if inner is None:
                break
            file, name = inner.f_code.co_filename, inner.f_code.co_name
            if file.endswith(_ENGINE) and not name.startswith("_"):
                method = name  # the outermost, which the script has called
            elif any(part in file for part in _LOADERS):
                loader = "its data loader"
            elif file.endswith(_COLLECTIVES) and not ours and not name.startswith(_NO_WAITS):
                called = inner
            ours = ours or (_PACKAGE in file and not file.endswith(_API))
            inner = inner.f_back
        doing = _METHODS.get(method, f"engine.{method}()") if method else loader
        call = None
        if called is not None:
            name = _WAITING.get(called.f_code.co_name, called.f_code.co_name)
            call = _TorchCall.of(name, called.f_locals, (id(called), called.f_lasti))
        return cls(line_of(frame), doing, call, blocked)


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_ENGINE = os.path.join("shardwise", "engine", "engine.py")
_API = os.path.join("shardwise", "comm", "api.py")
_COLLECTIVES = tuple(
    os.path.join("torch", "distributed", file) for file in ("distributed_c10d.py", "_functional_collectives.py")
)
_AUTOGRAD = os.path.join("torch", "autograd", "graph.py")
_THREADING, _QUEUE = f"{os.sep}threading.py", f"{os.sep}queue.py"
_LOADERS = (os.path.join("torch", "utils", "data", ""), os.path.join(_PACKAGE, "data", ""))
_METHODS = {"forward": "a forward pass"}
_NO_WAITS = ("_", "get_", "is_")
_WAITING = {"unwrap": "wait_tensor", "trigger_wait": "wait_tensor"}
"""Methods of torch in which a functional collective is waited for, and the function that does."""


def process_word() -> dict[str, Any]:
    """Return what lets processes of the same machine look at this one."""
    return {"machine": _machine(), "pid": os.getpid(), "began": _status(os.getpid())[1]}


def state_of(word: Mapping[str, Any], waited: float) -> str:
    """Say what is known of a process that does not answer.

    Args:
        word: what its `process_word` was.
        waited: seconds for which it has not answered.
    """
    pid, began = word.get("pid"), word.get("began")
    begin = f"has not answered for {waited:.0f} s"
    if word.get("machine") != _machine() or not isinstance(pid, int):
        return (
            f"{begin}: it is on another machine, where its process may have ended, may be stopped, or may be in "
            "compiled code that holds Python's lock; or the network between them is broken"
        )
    state, since = _status(pid)
    if not state or since != began or state in "ZX":
        return f"{begin}: its process ({pid}) has ended"
    if state in "Tt":
        how = f"`kill -CONT {pid}` lets it go on"
        return f"{begin}: its process ({pid}) is stopped (SIGSTOP, or a debugger); {how}"
    if state == "D":
        return f"{begin}: its process ({pid}) waits in the kernel, as a rule for a disk or a device"
    return (
        f"{begin}: its process ({pid}) runs, and lets no other thread run; it is in compiled code that holds "
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
