"""Process groups of engines, checked at creation, and calls that all ranks enter together.

A rank of Gloo identifies itself by a small number, without proof. Another program that connects to its port first takes
the rank's place, and both ranks would wait for the whole limit of a collective. Therefore each pair of ranks of a new
group exchanges a message. If a message is missing, all ranks create another group, agreed through the default group's
store.

All ranks enter a call (`initialize`, `zero.Init`, `tp_model_init`) before its first collective. A rank that has entered
another call, or has refused its arguments, is named at once. Each rank makes three requests to the store, and polls the
store while it waits.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import threading
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from shardwise import compat
from shardwise.comm.ledger import Record, user_line, waiting
from shardwise.comm.rendezvous import REFUSED, meet
from shardwise.errors import DesyncError, PeerLostError

CPU = torch.device("cpu")
_ROUNDING_S = 0.005  # because Gloo counts in whole milliseconds, a wait may end this much before its limit

_ATTEMPTS = 5
_LIMIT = timedelta(seconds=10)  # limit for the first messages of a group, whose ranks have just created it
_TAG = 1

_log = logging.getLogger("shardwise")


class Deadline:
    """End of several waits that share one limit; None: no limit."""

    def __init__(self, limit: timedelta | None) -> None:
        self.limit = limit
        self._end = None if limit is None else time.monotonic() + limit.total_seconds()

    def left(self) -> timedelta | None:
        """Return the remaining time, at least a millisecond (Gloo takes 0 for no limit); None without a limit."""
        return None if self._end is None else timedelta(seconds=max(self._end - time.monotonic(), 0.001))

    def over(self) -> bool:
        """Return True if a wait that fails now has reached the limit."""
        return self._end is not None and time.monotonic() > self._end - _ROUNDING_S


def made_well(
    make: Callable[[int], dist.ProcessGroup],
    store: dist.Store | None,
    ranks: Sequence[int],
    name: str,
) -> dist.ProcessGroup:
    """Create a process group, again if another program has taken a connection (all ranks call), or raise PeerLostError.

    `make` gets the number of the attempt. The ranks agree through `store`; None: connections are not checked. `name` is
    the same on all ranks, and of no other call.
    """
    for attempt in range(_ATTEMPTS):
        group = make(attempt)
        if len(ranks) == 1 or store is None or compat.backend_of(group, CPU) != "gloo":
            return group
        key = f"shardwise/made/{name}/{attempt}"
        missing, own = _missing(group, key), dist.PrefixStore(key, store)
        if missing is not None:
            own.set("bad", "")
        meet(own, dist.get_rank(), ranks, 2 * _LIMIT, f"the check of a process group of {len(ranks)} ranks")
        if not own.check(["bad"]):
            return group
        if missing is not None:
            _log.warning(
                "rank %d: rank %d of a new process group does not answer; another program may have connected to a port "
                "of the job in its place. The group is made again",
                dist.get_rank(),
                missing,
            )
        dist.destroy_process_group(group)
    raise PeerLostError(
        f"a process group of {len(ranks)} ranks was made {_ATTEMPTS} times, and each time some of its ranks could not "
        "hear each other. Another program may call the ports of the job, or a firewall keeps the ranks apart: see the "
        "warnings of all ranks"
    )


def _missing(group: dist.ProcessGroup, key: str) -> int | None:
    """Exchange one message with each other rank of a group; return the rank of a missing message, or None."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    sent = [list(hashlib.sha256(f"{key}/{member}".encode()).digest()) for member in range(world)]
    cards = torch.tensor(sent, dtype=torch.uint8, device=CPU)
    received = torch.zeros_like(cards)
    limit = compat.timeout_of(group, CPU)
    deadline = Deadline(_LIMIT if limit is None else min(limit, _LIMIT))
    peer = rank
    try:
        messages: list[tuple[int, dist.Work]] = []
        for step in range(1, world):
            peer = (rank + step) % world
            for call, tensor in ((compat.receive, received[peer]), (compat.send, cards[rank])):
                work = call(tensor, group, peer, _TAG)
                assert work is not None  # None is for ranks outside the group
                messages.append((peer, work))
        for peer, work in messages:  # noqa: B007 (`peer` is returned)
            left = deadline.left()
            assert left is not None
            work.wait(left)
    except RuntimeError:
        return peer
    received[rank] = cards[rank]
    wrong = (received != cards).any(dim=1).nonzero()
    return int(wrong[0]) if len(wrong) else None


MESSAGES = ("activations_up", "activations_down", "gradients_up", "gradients_down")
"""Kinds of messages between two ranks."""

PURPOSES = {
    "gather": "gather",
    "reduce": "reduce",
    "replicate": "reduce",
    "small": "small",
    "explicit": "small",
    "gather_on": "gather_on",
    "reduce_on": "reduce_on",
    **{name: name for name in MESSAGES},
}
"""By kind of collective, the purpose of the process group that carries the kind.

Kinds: parameter all-gathers, reduce-scatters, all-gathers of reduced gradients, small sums, collectives of scripts and
checkpoints, later collectives of a chain (`collective_queue`), and messages between two ranks (`links`), up from the
lower rank to the higher, and down. All ranks launch the collectives of one group in one
order, on one stream. A chain's later collectives have own groups only where the host waits: a thread launches them.
"""


def purposes_of(on_host: bool) -> dict[str, str]:
    """Return `PURPOSES`; where the host does not wait for collectives, a chain has one group."""
    return PURPOSES if on_host else {kind: purpose.removesuffix("_on") for kind, purpose in PURPOSES.items()}


class Groups(dict[str, dist.ProcessGroup]):
    """Process groups of some global ranks by kind of collective; `make` returns one at its first use."""

    def __init__(self, make: Callable[[str], dist.ProcessGroup]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, kind: str) -> dist.ProcessGroup:
        self[kind] = group = self._make(kind)
        return group


class GroupCache:
    """Process groups of one engine, keyed by ranks and purpose. The first use of a group by its ranks creates it.

    Invariant: all ranks of a group use it first at the same point of their program. `timeout` is the limit for one
    collective. On NCCL a group gets its communicator on `device` when it is created. From NCCL 2.22 on its ranks
    connect inside the first collective, where the host waits for all of them.
    """

    def __init__(self, timeout: timedelta, backend: str, device: torch.device) -> None:
        self._timeout, self._backend, self._device = timeout, backend, device
        self._purposes = purposes_of(backend == "gloo")
        self._made: dict[tuple[tuple[int, ...], str], dist.ProcessGroup] = {}
        self._handed_out: weakref.WeakValueDictionary[tuple[int, ...], Groups] = weakref.WeakValueDictionary()
        self._closed = False
        _caches.add(self)

    def of(self, ranks: tuple[int, ...]) -> Groups:
        """Return the groups of some global ranks, with this one, by kind of collective."""
        groups = self._handed_out.get(ranks)
        if groups is None:
            groups = self._handed_out[ranks] = Groups(functools.partial(self.get, ranks))
        return groups

    def get(self, ranks: tuple[int, ...], kind: str) -> dist.ProcessGroup:
        """Return the group of some global ranks, with this one, for a kind of collective; may raise PeerLostError."""
        assert not self._closed, "destroyed"
        key = (ranks, self._purposes[kind])
        if key not in self._made:
            self._made[key] = new_group(ranks, self._timeout, self._backend, self._device, key[1])
        return self._made[key]

    def made(self) -> list[tuple[tuple[int, ...], str]]:
        """Return ranks and purpose of each group that has been created."""
        return list(self._made)

    def close(self) -> None:
        """Destroy all groups; `get` raises from now on.

        The last references are released by threads, because Gloo waits some milliseconds for each group's own thread.
        """
        self._closed = True
        self._drop_handed_out()
        holders = [[self._made.popitem()[1]] for _ in list(self._made)]
        for holder in holders:
            give_back(holder[0])
        threads = [threading.Thread(target=holder.clear) for holder in holders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def forget(self) -> None:
        """Release the references to groups, which torch destroys."""
        self._made.clear()
        self._drop_handed_out()

    def _drop_handed_out(self) -> None:
        for groups in self._handed_out.values():
            groups.clear()


_caches: weakref.WeakSet[GroupCache] = weakref.WeakSet()


_names: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()


def _next_name(name: str) -> str:
    """Return a numbered name, counted since the default group was created: equal on all ranks, and never used before.

    Because torch's own names depend on the groups of this process, which may differ between ranks, and a used name
    leads to addresses in the store at which no rank listens any more.
    """
    assert dist.group.WORLD is not None
    count = _names.setdefault(dist.group.WORLD, Counter())
    count[name] += 1
    return f"{name}/{count[name]}"


def name_of_engine(ranks: Sequence[int]) -> str:
    """Return a short name for an engine of some ranks, equal on all of them (all call), and of no other engine."""
    return _next_name(f"e{zlib.crc32(repr(list(ranks)).encode()):x}")


def new_group(
    ranks: Sequence[int], timeout: timedelta, backend: str, device: torch.device, purpose: str
) -> dist.ProcessGroup:
    """Create a group of some ranks (no other rank calls), or raise PeerLostError; arguments as of `GroupCache`."""
    digest = hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:16]
    name = _next_name(f"shardwise/{purpose}/{digest}")
    whole = len(ranks) == dist.get_world_size()
    bound = device if backend == "nccl" else None

    def make(attempt: int) -> dist.ProcessGroup:
        # torch splits the communicator of a default group that has a device, for which it needs all of its ranks.
        with contextlib.nullcontext() if whole else compat.connecting_alone():
            options = compat.options_of(backend, timeout, urgent=purpose not in MESSAGES)
            return compat.make_group(ranks, f"{name}/{attempt}", timeout, backend, options, bound)

    await_ranks(ranks, timeout, name, f"the making of a process group of {len(ranks)} ranks")
    return made_well(make, compat.default_store(), ranks, name)


def await_ranks(ranks: Sequence[int], timeout: timedelta, name: str, what: str) -> None:
    """Wait until all global ranks have come. Because torch waits without a message, and then names a key of its store.

    `name` is the same on all ranks, and used once; `what` is the call or group, in words. Raises as `rendezvous.meet`.
    """
    store = compat.default_store()
    if store is None or dist.get_backend() == "fake":
        return
    record = Record(0, "new_group", "", 0, 0, f"of {len(ranks)} ranks", user_line(), time.perf_counter())
    record.kind, record.members = name, list(ranks)
    with waiting(record, record.launched):
        meet(meeting_store(name, store), dist.get_rank(), ranks, timeout, what)


def meeting_store(name: str, store: dist.Store) -> dist.Store:
    """Return the part of a store that a rendezvous uses."""
    return dist.PrefixStore(f"shardwise/made/{name}", store)


# -- calls that all ranks make -----------------------------------------------------------------------------------------

_TEXT = 2000  # characters of an error that other ranks show


def enter(what: str, timeout: timedelta) -> None:
    """Wait until all ranks of the default group have entered the call `what`, such as "initialize()".

    Raises:
        DesyncError: a rank has entered another call, or has refused its arguments.
        LaunchError: a rank has ended, or has not come within the limit.
    """
    store, name = compat.default_store(), _next_name("entry")
    if store is None:
        return
    rank, world = dist.get_rank(), dist.get_world_size()
    own = meeting_store(name, store)
    first, _, known = own.compare_set("call", "", f"{rank}:{what}").decode().partition(":")
    if known != what:
        _publish(own, f"rank {rank} is in {what}, and rank {first} in {known}. All ranks make the same calls")
        # This rank does not count as here, because the others wait until they read the text.
        raise DesyncError(f"{what}: {own.get(REFUSED).decode()}")
    await_ranks(range(world), timeout, name, f"the meeting in {what}")


def refuse(what: str, error: BaseException) -> None:
    """Report to ranks that wait in `enter` that this rank has refused the call, which counts as entered here."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    store, name = compat.default_store(), _next_name("entry")
    if store is not None:
        text = f"{type(error).__name__}: {error}"[:_TEXT]
        _publish(meeting_store(name, store), f"rank {dist.get_rank()} has refused its arguments with {text}")


def _publish(store: dist.Store, text: str) -> None:
    with contextlib.suppress(RuntimeError):  # the store has gone, with the ranks that would read this
        store.compare_set(REFUSED, "", text)


def give_back(group: dist.ProcessGroup) -> None:
    """Destroy a group of `new_group`, unless the script has destroyed all groups."""
    with contextlib.suppress(ValueError):
        dist.destroy_process_group(group)


def forget() -> None:
    """Release all references to groups: none then outlives its destruction."""
    for cache in list(_caches):
        cache.forget()
    compat.forget_groups()
