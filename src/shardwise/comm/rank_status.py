"""The position of a rank: the collective that the rank waits for, and its script's activity.

The ledger names the collective that each thread of the host waits for (`WAITING`). On a device the host goes on while
collectives wait: the ledger follows an event behind each of them, which is queried once the host has launched no
collective for a while. The stack of the script's thread names the engine's method, the data loader, the collective of
torch or the line that the script is in. If that thread waits for another one (autograd's of a device, `Thread.join`,
`Future.result`), that thread's stack is read, too.
"""

from __future__ import annotations

import dis
import functools
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm import desync
from shardwise.comm.desync import PAIR, TORCH, Launch, Place, Position, named, order_of
from shardwise.comm.ledger import WAITING, Ledger, Record, followed, user_line
from shardwise.comm.rendezvous import machine
from shardwise.compat import group_named, launched_of, local_of

_DEEP = 400  # frames of a stack that are examined


@dataclass(frozen=True)
class TorchLaunch:
    """A collective of torch that a rank has launched; keeps no tensor. `size`: bytes, if equal on all ranks; else 0.

    `turn` is the number of collectives that the rank has launched in the group, with this one; -1: unknown.
    """

    name: str
    given: Mapping[str, Any]
    size: int = 0
    turn: int = -1
    line: str = ""

    @classmethod
    def of(cls, name: str, given: Mapping[str, Any], line: str = "") -> TorchLaunch:
        """Return the collective that this thread has launched last, from its name and arguments."""
        tensor = given.get(_ALIKE.get(name, ""))
        size = tensor.nbytes if isinstance(tensor, torch.Tensor) else 0
        kept = {argument: given[argument] for argument in _SAYING_WHICH if argument in given}
        group = _group_of(given)
        return cls(name, kept, size, -1 if group is None else launched_of(group), line)


def quiet_for() -> float:
    """Return the seconds since the last launch of a followed collective; 0 if none is followed."""
    launched = followed()
    return time.perf_counter() - launched[-1][2] if launched else 0.0


def oldest_under_way(quiet: float = 0.0) -> tuple[Record | TorchLaunch, float] | None:
    """Return the first followed collective that the device has not completed, and the time of the last launch.

    The device is not queried for `quiet` seconds after the last launch. Because a query from another thread breaks the
    capture of a CUDA graph, only a suspected stall causes one.
    """
    launched = list(followed() or ())
    if not launched or time.perf_counter() - launched[-1][2] < quiet:
        return None
    return next(((record, launched[-1][2]) for record, mark, _ in launched if not mark.reached()), None)


class Here:
    """Finds the position of this process; the script runs on `thread` (None: main), `facts` gives step and loader.

    `ledgers` returns those of all engines.
    """

    def __init__(
        self,
        ledgers: Callable[[], Iterable[Ledger]] = tuple,
        thread: int | None = None,
        facts: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        self._ledgers = ledgers
        self._thread = thread or threading.main_thread().ident
        self._facts = facts or dict
        self._since: tuple[int, float] = (-1, 0.0)  # of a collective of torch

    def __call__(self, quiet: float = 0.0) -> Position:
        """Return the position of this process; `quiet` as in `oldest_under_way`."""
        thread, script = _script_of(self._thread or 0)
        default = dist.group.WORLD
        rest: dict[str, Any] = {"doing": script.doing, "line": script.line, **self._facts()}
        rest["collectives"] = -1 if default is None else launched_of(default)
        call = script.torch or _work_position(script.inner)
        what, since = self._wait(thread, script.blocked, quiet)
        if isinstance(what, Record):
            rest["line"] = what.line or script.line
            return desync.position_of(what, time.perf_counter() - since, **rest)
        if what is not None:
            call = _torch_position(what, id(what))
            rest["line"] = what.line or script.line
        return Position(**rest) if call is None else replace(call, seconds=self._seen(call.number), **rest)

    def launched_in_torch(self, kind: str, turn: int, here: Position) -> bool:
        """Return True if this rank, at `here`, has launched and left the collective of torch of another rank."""
        group = group_named(kind.removeprefix(TORCH)) if turn >= 0 else None
        # Two ranks in the same turn each report their collective.
        return group is not None and launched_of(group) - (here.kind == kind) >= turn

    def launched(self, waits: Sequence[Place]) -> list[bool]:
        """Return, for each collective that a rank waits for, True if this rank has launched it."""
        launched = self._by_turn([kind for _, kind, _ in waits])
        found = []
        for what, kind, size in waits:
            turns, number = launched[kind], what.rpartition("#")[2]
            turn = int(number) if number.isdigit() else -1
            record = turns.get(turn)
            if record is not None:
                found.append((named(record), desync.size_of(record)) == (what, size))
            else:  # a turn before those of the ledger was launched long ago
                found.append(bool(turns) and turn < min(turns))
        return found

    def recent(self, kinds: Sequence[str]) -> dict[str, tuple[int, str]]:
        """Return, by order, the number of a recent collective, and digests of that one and all later ones."""
        found = {}
        for kind, launched in self._by_turn(kinds).items():
            if turns := sorted(launched)[-desync.RECENT :]:
                digests = (desync.digest_of(desync.launch_of(launched[turn])) for turn in turns)
                found[kind] = turns[0], "".join(digests)
        return found

    def launch(self, kind: str, turn: int) -> Launch | None:
        """Return one collective that this rank has launched."""
        record = self._by_turn([kind])[kind].get(turn)
        return None if record is None else desync.launch_of(record)

    def _by_turn(self, kinds: Sequence[str]) -> dict[str, dict[int, Record]]:
        found: dict[str, dict[int, Record]] = {kind: {} for kind in kinds}
        for record in (record for ledger in self._ledgers() for record in ledger.records()):
            if record.kind and (kind := order_of(record)) in found:
                found[kind][record.turn] = record
        return found

    def _wait(self, thread: int, blocked: bool, quiet: float) -> tuple[Record | TorchLaunch | None, float]:
        waits = dict(WAITING)
        found: tuple[Record | TorchLaunch, float] | None = waits.get(thread)
        if found is None and blocked:  # another thread waits for the collective
            of_engines = [wait for wait in waits.values() if isinstance(wait[0], Record)]
            found = min(of_engines, key=lambda wait: wait[1], default=None)
        return found or oldest_under_way(quiet) or (None, 0.0)

    def _seen(self, number: int) -> float:
        now = time.perf_counter()
        if self._since[0] != number:
            self._since = number, now
        return now - self._since[1]


def _torch_position(launch: TorchLaunch, place: object) -> Position:
    """Return the position of a thread in a collective of torch; `place` distinguishes the call from others."""
    name, given = launch.name, launch.given
    group = _group_of(given)
    members: list[int] = []
    with suppress(RuntimeError, ValueError, KeyError):  # the group has been destroyed
        members = dist.get_process_group_ranks(group)
    shown = []
    if "op" in given and (op := str(given["op"]).rpartition(".")[2]) != "SUM":
        shown.append(f"op={op}")
    peer = -1
    for root in ("src", "dst"):
        own = given.get(f"group_{root}")
        number = members[own] if isinstance(own, int) and own < len(members) else given.get(root)
        if isinstance(number, int):
            peer = number
            shown.append(f"{root}={number}")
    if group is not dist.group.WORLD:
        shown.append(f"group=ranks {', '.join(map(str, members[:8]))}{', ...' if len(members) > 8 else ''}")
    kind = f"{TORCH}{getattr(group, 'group_name', '')}"
    if name in _PAIRS:
        ends = (dist.get_rank(), peer) if name.endswith("send") else (peer, dist.get_rank())
        kind = f"{PAIR}{ends[0]}>{ends[1]}/{given.get('tag')}"
        members = sorted(end for end in ends if end >= 0)
    what = f"torch.distributed.{name}({', '.join(shown)})"
    turn = -1 if name in _UNCOUNTED else launch.turn
    return Position(what, launch.size, kind, members, number=hash((place, launch.turn)), turn=turn)


def _work_position(inner: tuple[CodeType, int, int] | None) -> Position | None:
    """Return the position of a thread in `Work.wait` of an unknown collective; None: not in one.

    The last collective of the default group is reported. Ranks that have also launched that one are known to take part.
    """
    default = dist.group.WORLD
    if inner is None or inner[0].co_filename.startswith(_PACKAGE) or not _calls_wait(*inner[:2]):
        return None
    if default is None or (turn := launched_of(default)) < 1:
        return None
    kind, members = f"{TORCH}{default.group_name}", dist.get_process_group_ranks(default)
    return Position("torch.distributed.Work.wait()", 0, kind, members, number=hash((inner[1:], turn)), turn=turn)


@functools.lru_cache(64)
def _calls_wait(code: CodeType, place: int) -> bool:
    """Return True if a function is in `something.wait()`, as of `torch.distributed.Work`.

    >>> code = compile("work.wait()", "train.py", "eval")
    >>> [_calls_wait(code, one.offset) for one in dis.get_instructions(code) if one.opname.startswith("CALL")]
    [True]
    """
    shown = [one for one in dis.get_instructions(code) if one.opname not in ("PRECALL", "CACHE", "PUSH_NULL")]
    return any(
        (call.offset, loaded.argval) == (place, "wait")
        and loaded.opname in ("LOAD_ATTR", "LOAD_METHOD")
        and call.opname.startswith("CALL")
        for loaded, call in itertools.pairwise(shown)
    )


def _group_of(given: Mapping[str, Any]) -> dist.ProcessGroup | None:
    group = given.get("group")
    return group if isinstance(group, dist.ProcessGroup) else dist.group.WORLD


_PAIRS = ("send", "recv", "isend", "irecv")
_UNCOUNTED = (*_PAIRS, "monitored_barrier", "wait_tensor")  # collectives of torch that do not count in their group
_SAYING_WHICH = ("op", "src", "dst", "group_src", "group_dst", "group", "tag")
_ALIKE = {
    **dict.fromkeys(("all_reduce", "reduce", "broadcast", "all_gather", "gather"), "tensor"),
    **dict.fromkeys(("reduce_scatter", "reduce_scatter_tensor"), "output"),
    "all_gather_into_tensor": "input_tensor",
    **dict.fromkeys(_PAIRS, "tensor"),
}
"""Arguments of torch's collectives that have the same size on all ranks."""


@dataclass(frozen=True)
class _Script:
    """Facts from a stack: line, activity (as in `Position`), the collective of torch, and the innermost call.

    `blocked`: the thread may wait for another one. `inner`: function, offset in the function, and identity of the call.
    """

    line: str = ""
    doing: str = ""
    torch: Position | None = None
    blocked: bool = False
    inner: tuple[CodeType, int, int] | None = None

    @classmethod
    def of(cls, frame: FrameType | None) -> _Script:
        if frame is None:
            return cls()
        blocked = frame.f_code.co_filename.endswith((_AUTOGRAD, _THREADING, _QUEUE))
        method = loader = ""
        ours = False
        called: FrameType | None = None
        for inner in _callers(frame, _DEEP):
            file, name = inner.f_code.co_filename, inner.f_code.co_name
            if file.endswith(_ENGINE) and not name.startswith("_"):
                method = name  # the outermost, which the script has called
            elif any(part in file for part in _LOADERS):
                loader = "its data loader"
            elif file.endswith(_COLLECTIVES) and not ours and not name.startswith(_NO_WAITS):
                called = inner
            ours = ours or (_PACKAGE in file and not file.endswith(_API))
        doing = "a forward pass" if method == "forward" else f"engine.{method}()" if method else loader
        call = None
        if called is not None:
            name = _WAITING.get(called.f_code.co_name, called.f_code.co_name)
            arguments = (*_SAYING_WHICH, _ALIKE.get(name, "group"))
            given = {one: value for one in arguments if (value := local_of(called, one)) is not None}
            call = _torch_position(TorchLaunch.of(name, given), (id(called), called.f_lasti))
        return cls(user_line(frame) if frame else "", doing, call, blocked, (frame.f_code, frame.f_lasti, id(frame)))


def _script_of(thread: int) -> tuple[int, _Script]:
    """Return the number of a thread, or of the thread that it waits for, and the facts of that thread's stack.

    Because a frame keeps local variables alive, frames are held for less than 5 ms (a time slice of the interpreter).
    """
    frames = sys._current_frames()
    own = threading.get_ident()
    del frames[own]  # its locals include this dictionary: a cycle, collected much later
    script = _Script.of(sys._getframe() if thread == own else frames.get(thread))
    if script.blocked and script.torch is None and (other := _waited_for(frames.get(thread), frames)):
        within = _Script.of(frames.get(other))
        return other, replace(script, torch=within.torch, line=within.line or script.line)
    return thread, script


def _waited_for(frame: FrameType | None, frames: Mapping[int, FrameType]) -> int:
    """Return the thread that the thread of a frame waits for with certainty, or 0.

    Because a thread of the script may wait for its own peers for long, no other thread counts: the rank is only slow.
    """
    for inner in _callers(frame, _WAITING_FRAMES):
        file, name = inner.f_code.co_filename, inner.f_code.co_name
        if file.endswith(_AUTOGRAD):
            return _of_autograd(frames)
        if file.endswith(_THREADING) and name == "join":
            return getattr(local_of(inner, "self"), "ident", None) or 0
        if file.endswith(_FUTURES[0]) and name == "result":
            return _working_on(local_of(inner, "self"), frames)
    return 0


def _callers(frame: FrameType | None, limit: int) -> Iterator[FrameType]:
    """Yield a frame and its callers, `limit` frames in all."""
    while frame is not None and limit:
        yield frame
        frame, limit = frame.f_back, limit - 1


_WAITING_FRAMES = 6


def _of_autograd(frames: Mapping[int, FrameType]) -> int:
    own = {thread.ident for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}
    strange = (thread for thread in frames if thread not in own)
    return next((thread for thread in strange if thread in WAITING or _Script.of(frames[thread]).torch is not None), 0)


def _working_on(future: object, frames: Mapping[int, FrameType]) -> int:
    for thread, inner in frames.items():
        for frame in _callers(inner, _DEEP):
            item = local_of(frame, "self") if frame.f_code.co_filename.endswith(_FUTURES[1]) else None
            if item is not None and getattr(item, "future", None) is future:
                return thread
    return 0


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_ENGINE = tuple(os.path.join("shardwise", "engine", file) for file in ("engine.py", "state_getters.py", "states.py"))
_API = os.path.join("shardwise", "comm", "api.py")
_COLLECTIVES = tuple(
    os.path.join("torch", "distributed", file) for file in ("distributed_c10d.py", "_functional_collectives.py")
)
_AUTOGRAD = os.path.join("torch", "autograd", "graph.py")
_THREADING, _QUEUE = f"{os.sep}threading.py", f"{os.sep}queue.py"
_FUTURES = tuple(os.path.join("concurrent", "futures", file) for file in ("_base.py", "thread.py"))
_LOADERS = (os.path.join("torch", "utils", "data", ""), os.path.join(_PACKAGE, "data", ""))
_NO_WAITS = ("_", "get_", "is_")
_WAITING = {"unwrap": "wait_tensor", "trigger_wait": "wait_tensor"}
"""Methods of torch that wait for a functional collective, and the public function."""


def process_word() -> dict[str, Any]:
    """Return the facts by which processes of the same machine identify this one."""
    return {"machine": _machine(), "pid": os.getpid(), "began": _status(os.getpid())[1]}


def state_of(word: Mapping[str, Any], waited: float) -> str:
    """Describe a process that has not answered for `waited` seconds, by its `process_word`."""
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
    try:
        with open(f"/proc/{pid}/stat") as stat:
            parts = stat.read().rpartition(")")[2].split()
        return parts[0], parts[19]
    except (OSError, IndexError):
        return "", ""
