"""Process groups of our own, each checked when it is made.

Ranks of Gloo tell each other with a small number who they are, and no proof. A stranger who finds a port in the moment
in which a group is made, and says such a number first, takes a rank's place, and both ranks would wait for the whole
limit of a collective. So a new group carries a message between each pair of its ranks before it is used; if one is
missing, all ranks make another. What ranks tell each other about that goes through the default group's store.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from shardwise import compat
from shardwise.comm.ledger import Record, user_line
from shardwise.comm.meeting import meet
from shardwise.comm.positions import Waiting
from shardwise.comm.wire import CPU, Deadline, Message
from shardwise.errors import PeerLostError

T = TypeVar("T")

_ATTEMPTS = 5
_LIMIT = timedelta(seconds=10)
"""How long the first messages of a group may take: its ranks have just come from making it."""
_TAG = 1
_POLL_S, _SLOWEST_POLL_S = 0.001, 0.1

_log = logging.getLogger("shardwise")


def made_well(
    make: Callable[[int], T],
    discard: Callable[[T], None],
    own: Callable[[T], dist.ProcessGroup],
    store: dist.Store | None,
    ranks: int,
    name: str,
) -> T:
    """Make a group, again if its connections are not those of its ranks (all ranks call).

    Args:
        make: makes it, given the number of the attempt.
        discard: gives it back.
        own: the one that this rank is in, of what has been made.
        store: through which the ranks agree; nothing is checked without.
        ranks: how many call this.
        name: the same on all of them, and of no other call.

    Raises:
        PeerLostError: that has not helped.
    """
    for attempt in range(_ATTEMPTS):
        made = make(attempt)
        group = own(made)
        if ranks == 1 or store is None or compat.backend_of(group, CPU) != "gloo":
            return made
        key = f"shardwise/made/{name}/{attempt}"
        missing = _missing(group, key)
        if _all_agree(store, key, ranks, missing is None):
            return made
        discard(made)
        if missing is not None:
            _log.warning(
                "rank %d: rank %d of a new process group cannot be heard; it may be a stranger who called a port of "
                "the job and was taken for it. The group is made again",
                dist.get_rank() if dist.is_initialized() else -1,
                missing,
            )
    raise PeerLostError(
        f"a process group of {ranks} ranks was made {_ATTEMPTS} times, and each time some of its ranks could not hear "
        "each other. Somebody calls the ports of the job, or a network or a firewall keeps the ranks apart: see the "
        "warnings of all ranks"
    )


def _missing(group: dist.ProcessGroup, key: str) -> int | None:
    """Exchange one message with each other rank of a group; return one whose message has not come, or None."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    said = [list(hashlib.sha256(f"{key}/{member}".encode()).digest()) for member in range(world)]
    cards = torch.tensor(said, dtype=torch.uint8, device=CPU)
    heard = torch.zeros_like(cards)
    limit = compat.timeout_of(group, CPU)
    deadline = Deadline(_LIMIT if limit is None else min(limit, _LIMIT))
    peer = rank
    try:
        messages = []
        for step in range(1, world):
            peer = (rank + step) % world
            for call, tensor in ((compat.receive, heard[peer]), (compat.send, cards[rank])):
                work = call(tensor, group, peer, _TAG)
                assert work is not None  # None is for ranks outside the group
                messages.append(Message(peer, work))
        for message in messages:
            peer = message.peer
            message.wait(deadline.left())
    except RuntimeError:
        return peer
    heard[rank] = cards[rank]
    wrong = (heard != cards).any(dim=1).nonzero()
    return int(wrong[0]) if len(wrong) else None


def _all_agree(store: dist.Store, key: str, ranks: int, here: bool) -> bool:
    """Whether all ranks find the same group good."""
    if not here:
        store.set(f"{key}/bad", "")
    if store.add(key, 1) == ranks:
        store.set(f"{key}/all", "bad" if store.check([f"{key}/bad"]) else "good")
    pause, began = _POLL_S, time.monotonic()
    while not store.check([f"{key}/all"]):
        if time.monotonic() - began > 2 * _LIMIT.total_seconds():
            return False
        time.sleep(pause)
        pause = min(2 * pause, _SLOWEST_POLL_S)
    return bool(store.get(f"{key}/all") == b"good")


class _Shelf:
    """Groups that some ranks of the job have made by themselves, to be used again by later engines.

    torch names such a group by its ranks and by how many groups there are. After one has been destroyed, another may
    get its name, and meets addresses that nobody listens at any more. So they are kept as long as the default group.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Let go of all groups."""
        self._default: object = None
        self._made: dict[dist.ProcessGroup, tuple[object, ...]] = {}
        self._free: dict[tuple[object, ...], list[dist.ProcessGroup]] = {}
        self._count: Counter[str] = Counter()

    def _settle(self) -> None:
        if self._default is not dist.group.WORLD:
            self.clear()
            self._default = dist.group.WORLD

    def name(self, ranks: str) -> str:
        """Return a name for the next group of some ranks; the same on all of them, if all have done the same."""
        self._settle()
        self._count[ranks] += 1
        return f"{ranks}/{self._count[ranks]}"

    def take(
        self, ranks: Sequence[int], timeout: timedelta, backend: str, device: torch.device | None
    ) -> dist.ProcessGroup:
        """Return a group of these ranks that nobody uses (the same on all of them, if all have done the same)."""
        self._settle()
        kind = (*ranks, timeout, backend, device)
        if self._free.get(kind):
            return self._free[kind].pop(0)
        name = self.name(hashlib.sha256(repr(list(ranks)).encode()).hexdigest())
        _await(ranks, timeout, name)
        group = made_well(
            lambda _: _connected_alone(ranks, timeout, backend, device),
            lambda _: None,  # kept, for the same reason
            lambda made: made,
            compat.default_store(),
            len(ranks),
            name,
        )
        self._made[group] = kind
        return group

    def put(self, group: dist.ProcessGroup) -> bool:
        """Take a group back; return whether it came from here."""
        kind = self._made.get(group)
        if kind is not None:
            self._free.setdefault(kind, []).append(group)
        return kind is not None


_shelf = _Shelf()


def _connected_alone(
    ranks: Sequence[int], timeout: timedelta, backend: str, device: torch.device | None
) -> dist.ProcessGroup:
    """Make a group of some ranks, without the others."""
    with compat.connecting_alone():
        return dist.new_group(
            list(ranks),
            timeout,
            backend,
            compat.urgent_options(backend, timeout),
            use_local_synchronization=True,
            device_id=device,
        )


def new_group(
    partition: Sequence[Sequence[int]], timeout: timedelta, backend: str, device: torch.device | None = None
) -> dist.ProcessGroup:
    """Return the one of several groups that this rank is in, for its caller alone.

    All ranks make all groups if the job has no others. Otherwise each list makes its own: ranks that are in none are
    elsewhere, and must not be needed.

    Args:
        partition: the ranks of each group.
        timeout: limit for one collective.
        backend: see `torch.distributed.new_group`.
        device: on NCCL, this rank's: the group connects now, and not inside of its first collective, for which ranks
            would wait that are elsewhere.
    """
    rank = dist.get_rank()
    device = device if backend == "nccl" else None
    if sum(map(len, partition)) < dist.get_world_size():
        return _shelf.take(next(ranks for ranks in partition if rank in ranks), timeout, backend, device)
    place = next(place for place, ranks in enumerate(partition) if rank in ranks)

    def discard(made: list[dist.ProcessGroup]) -> None:
        dist.destroy_process_group(made[place])

    name = _shelf.name("job")
    _await(range(dist.get_world_size()), timeout, name)
    return made_well(
        lambda _: [
            dist.new_group(
                list(ranks),
                timeout,
                backend,
                compat.urgent_options(backend, timeout),
                device_id=device if rank in ranks else None,
            )
            for ranks in partition
        ],
        discard,
        lambda made: made[place],
        compat.default_store(),
        dist.get_world_size(),
        name,
    )[place]


def _await(ranks: Sequence[int], timeout: timedelta, name: str) -> None:
    """Wait until all ranks of a group come to make it: torch would wait without a word, and name a key of its store."""
    store = compat.default_store()
    if store is None or dist.get_backend() == "fake":
        return
    record = Record(0, "new_group", "", 0, 0, f"of {len(ranks)} ranks", user_line(), time.perf_counter())
    record.kind, record.members = name, list(ranks)
    with Waiting(record, record.launched):
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        what = f"the making of a process group of {len(ranks)} ranks"
        meet(dist.PrefixStore(f"shardwise/made/{name}", store), dist.get_rank(), ranks, timeout, attempt, what)


def give_back(group: dist.ProcessGroup) -> None:
    """Take a group back from the caller of `new_group`."""
    if not _shelf.put(group):
        dist.destroy_process_group(group)


def forget() -> None:
    """Let go of all groups, so that none outlives its destruction: none is made or given back any more."""
    _shelf.clear()
    compat.forget_groups()
