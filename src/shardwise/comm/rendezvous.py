"""Rendezvous of ranks in a store, before they have a process group.

torch's `TCPStore` has no password and, by default, listens on every interface. Here it listens on the address that the
ranks use only, if that is one of this machine: the listening socket is created first and handed over. A taken port is
therefore an error at once.

Because torch waits without a message for the whole limit of a collective, ranks meet before they form a process group.
Each rank writes its arrival. After seconds the first rank logs the missing ones; an error names them, too. A launcher
writes the end of a rank into the same store, and the others give up at once. Only the first rank looks for the others,
and writes its findings: requests of all ranks for all ranks would grow with ranks squared.

Invariant: every process group has keys of its own. Gloo writes addresses into the store; after a restart by an elastic
agent that keeps the store, ranks would otherwise read the addresses of dead ranks and hang.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import logging
import os
import secrets
import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist

from shardwise.comm.coded import ranks_in_words
from shardwise.comm.environment import MACHINE, RankPlace, is_loopback
from shardwise.compat import store_host
from shardwise.errors import DesyncError, LaunchError, ShardwiseError

NOTICE_S = 10.0
"""Seconds after which a waiting process logs a notice; then after twice as many, and so on."""
_POLL_S, _SLOWEST_POLL_S = 0.002, 0.25
_LATER_S = 2.0  # seconds after the limit when other ranks look themselves, because the first may have ended
_ALL, _APART = "meeting/all", "meeting/apart"  # keys: all ranks have come; the reason why they do not meet
_groups_opened = itertools.count()
_attempt = ""  # the name that rank 0 has given
_log = logging.getLogger("shardwise")


def serve(host: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """Listen for the ranks of a job.

    Args:
        host: address for the ranks, and the only one listened on. A name that this machine resolves to loopback, and an
            address that only other machines see (of a translating router), open all interfaces.
        port: TCP port; 0: any free one (the result's `port`).
        timeout: longest wait of a read for a key.

    Raises:
        LaunchError: the port is taken or not permitted.
    """
    try:
        family, bind_to = _own_end(host)
        listener = socket.create_server((bind_to, port), family=family, backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            why = f"Port {port} on {host} is taken by another program or job."
        else:
            why = f"Cannot listen on port {port} of {host}: {error.strerror or error}."
        raise LaunchError(
            f"{why} Choose another with --master_port (MASTER_PORT without a launcher); `shardwise run` "
            "without --master_port finds a free one itself."
        ) from error
    # The store owns and closes the file descriptor from here on.
    return dist.TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _own_end(host: str) -> tuple[socket.AddressFamily, str]:
    """Return family and address to listen on for ranks that connect to a host; "" opens all interfaces."""
    default = socket.AF_INET6 if ":" in host else socket.AF_INET
    if is_loopback(host):
        return default, "127.0.0.1" if host == "localhost" else host
    try:
        family, _, _, _, own = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((own[0], 0))
    except OSError:
        return default, ""
    return (default, "") if is_loopback(str(own[0])) else (family, str(own[0]))


def join(place: RankPlace, port: int, timeout: timedelta, env: Mapping[str, str] = os.environ) -> dist.Store:
    """Return the store of this process's job, with a prefix that no other process group of the job uses.

    Under an elastic agent that serves the store (torchrun, `shardwise run`; variables in `env`) every rank connects;
    otherwise rank 0 serves. `timeout` limits waits for rank 0 and a key. A job of one process needs no port.
    """
    if place.world_size == 1:
        return dist.HashStore()
    agent_serves = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store: dist.Store
    if place.rank == 0 and not agent_serves:
        store = serve(place.master_addr, port, timeout)
    else:
        _await_server(place.master_addr, port, timeout)
        store = dist.TCPStore(place.master_addr, port, is_master=False, timeout=timeout)
    # The variable is one of our launcher, which counts attempts of the job.
    if int(env.get("GROUP_WORLD_SIZE") or 1) > 1 and "CROSS_RANK" not in env:
        return _named_attempt(store, place, timeout)
    return private_keys(store, env)


def _named_attempt(store: dist.Store, place: RankPlace, timeout: timedelta) -> dist.Store:
    """Return `store` under a prefix of this attempt, which rank 0 chooses, when all ranks have come.

    Because each agent of torchrun counts its own restarts, ranks know no number in common. A store that goes on has
    keys of earlier attempts: each rank therefore draws a new number, under which rank 0 answers.
    """
    global _attempt
    drawn = dist.PrefixStore("shardwise/drawn", store)
    name = secrets.token_hex(8)

    def answer() -> None:
        answered, last = drawn.add("answered", 0), drawn.add("last", 0)
        for number in range(answered + 1, last + 1):
            drawn.set(str(number), name)
            drawn.add("answered", 1)

    if place.rank > 0:
        with _lost_store_explained(place.rank, MEETING):
            name = _name_of_rank_0(drawn, timeout)
    found = dist.PrefixStore(f"shardwise/attempt{name}", store)
    ranks = range(place.world_size)
    meet(dist.PrefixStore("named", found), place.rank, ranks, timeout, each=answer if place.rank == 0 else None)
    _attempt = name
    return found


def _name_of_rank_0(drawn: dist.Store, timeout: timedelta) -> str:
    own, began = str(drawn.add("last", 1)), time.monotonic()
    notice, pause = NOTICE_S, _POLL_S
    while not drawn.check([own]):
        waited = time.monotonic() - began
        if waited >= timeout.total_seconds():
            raise LaunchError(f"rank 0 has not come to {MEETING} within {waited:.0f} s. {_SLOW}")
        if waited >= notice:
            notice = 2 * waited
            _log.warning("rank 0 has not come to %s after %.0f s; the others wait", MEETING, waited)
        time.sleep(pause)
        pause = min(2 * pause, _SLOWEST_POLL_S)
    return drawn.get(own).decode()


def _await_server(host: str, port: int, timeout: timedelta) -> None:
    """Wait until the store is served. Because torch, if it has to wait, prints frames of its C++ code."""
    began = time.monotonic()
    notice = NOTICE_S
    while True:
        try:
            socket.create_connection((host, port), timeout=5.0).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
        waited = time.monotonic() - began
        if waited >= timeout.total_seconds():
            raise LaunchError(
                f"no process serves the rendezvous at {host}:{port} ({reason}), after {waited:.0f} s. Rank 0 "
                "does (under torchrun, its agent): it has not been started, has ended, or has another MASTER_ADDR or "
                "MASTER_PORT."
            )
        if waited >= notice:
            notice = 2 * waited
            _log.warning("no process serves the rendezvous at %s:%d yet, after %.0f s", host, port, waited)
        time.sleep(0.1)


def attempt(env: Mapping[str, str] = os.environ) -> str:
    """Return the name of this attempt, equal on all ranks and different after a restart, as far as it is known."""
    return _attempt or env.get("TORCHELASTIC_RESTART_COUNT", "0")


def private_keys(store: dist.Store, env: Mapping[str, str] = os.environ) -> dist.Store:
    """Return `store` under a prefix for this attempt and process group; all ranks call it equally often.

    The attempt's sizes are in the prefix because torchrun does not count a restart after which machines have come.
    """
    attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    if "GROUP_WORLD_SIZE" in env:
        attempt += f"of{env.get('WORLD_SIZE')}on{env['GROUP_WORLD_SIZE']}"
    return dist.PrefixStore(f"shardwise/attempt{attempt}/group{next(_groups_opened)}", store)


def answers(store: dist.Store, patience: float = 0.0) -> bool:
    """Return True if the process of a store still runs. Because torch prints frames of C++ if that process has ended.

    The connection is watched for `patience` seconds: the kernel closes the sockets of a killed process one by one.
    """
    store = _root(store)
    if not isinstance(store, dist.TCPStore):
        return True
    try:
        with socket.create_connection((store.host, store.port), timeout=1.0) as probe:
            # A store sends nothing without a request; a lost connection becomes readable.
            return not patience or not select.select([probe], [], [], patience)[0]
    except OSError:
        return False


def _root(store: dist.Store) -> dist.Store:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def machine() -> str:
    """Return a text that is equal in two processes if, and only if, they reach each other over loopback.

    Because containers on one machine have loopback interfaces of their own, the name of the machine does not suffice.
    """
    facts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # Linux only
        with open("/proc/sys/kernel/random/boot_id") as boot:
            facts.append(boot.read())
        facts.append(os.readlink("/proc/self/ns/net"))
    return "\n".join(facts)


def node() -> str:
    """Return a short text that is equal in the processes of one machine, and there only: its name and a digest.

    The variable `MACHINE` overrides it. The launcher's variables do not count: their ranks may be dealt to machines in
    turn.
    """
    given = os.environ.get(MACHINE, "")
    if given:
        return given
    return f"{socket.gethostname()} {hashlib.sha256(machine().encode()).hexdigest()[:6]}"


def own_address() -> str:
    """Return the address of this machine for ranks on other machines.

    Near end of the route to the default group's store, which all ranks reach; else the machine's name.
    """
    meeting = store_host()
    if meeting is None or is_loopback(meeting):
        return socket.gethostname()
    with contextlib.suppress(OSError):
        family, kind, _, _, far = socket.getaddrinfo(meeting, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(far)  # sends nothing
            near = str(probe.getsockname()[0])
        if not is_loopback(near):
            return near
    return meeting  # this is that machine, and its own name is a loopback address


def ended_key(attempt: str, rank: int) -> str:
    """Return the key under which a launcher writes how a rank has ended while others go on."""
    return f"shardwise/ended/attempt{attempt}/{rank}"


REFUSED = "meeting/refused"
"""Key of the reason why a rank does not come."""

MEETING = "the meeting of the ranks (shardwise.initialize or init_distributed)"

_SLOW = "If ranks are only slow, raise the limit (SHARDWISE_TIMEOUT, in minutes)."


def meet(
    store: dist.Store,
    rank: int,
    ranks: Sequence[int],
    timeout: timedelta,
    what: str = MEETING,
    each: Callable[[], None] | None = None,
) -> None:
    """Wait until all of `ranks` have come to `what`; `store` has a prefix of this rendezvous only, and `each` is called
    now and then meanwhile.

    Raises:
        LaunchError: a rank has ended, or has not come in time, or the process that serves the store has gone.
        DesyncError: a rank has written `REFUSED` into the store.
    """
    if len(ranks) == 1:
        return
    with _lost_store_explained(rank, what):
        _meet(store, rank, ranks, timeout, what, each)


@contextlib.contextmanager
def _lost_store_explained(rank: int, what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, ShardwiseError):
            raise
        # torch's own text has the frames of its C++ code.
        reason = str(error).partition("\n")[0].partition("Exception raised from")[0].strip()
        raise LaunchError(
            f"rank {rank} has lost the store in which the ranks meet, before all had come to {what}: the process that "
            f"serves it (the launcher, or rank 0 without one) has ended. See its output. ({reason})"
        ) from None


def _meet(
    store: dist.Store,
    rank: int,
    ranks: Sequence[int],
    timeout: timedelta,
    what: str,
    each: Callable[[], None] | None,
) -> None:
    began = time.monotonic()
    store.set(_came(rank), "")
    place = store.add("meeting/number", 1)
    if place == len(ranks):
        store.set(_ALL, "")
    limit = timeout.total_seconds() + (0.0 if place == 1 else _LATER_S)
    notice, pause = NOTICE_S, _POLL_S
    # Because torch prints warnings while it waits for a key, the key is polled.
    while not store.check([_ALL]):
        if each is not None:
            each()
        if store.check([REFUSED]):
            raise DesyncError(f"{what}: {store.get(REFUSED).decode()}")
        if store.check([_APART]):
            raise LaunchError(store.get(_APART).decode())
        time.sleep(pause)
        pause = min(2 * pause, _SLOWEST_POLL_S)
        waited = time.monotonic() - began
        if waited < limit and (place > 1 or pause < _SLOWEST_POLL_S):
            continue
        here = set(written(store, [_came(one) for one in ranks]))
        missing = [one for one in ranks if _came(one) not in here]
        why = _why_apart(store, ranks, missing, what, waited if waited >= limit else None)
        if why is not None:
            store.compare_set(_APART, "", why)
            raise LaunchError(why)
        if waited >= notice and missing:
            notice = 2 * waited
            _log.warning("%s not come to %s after %.0f s; the others wait", _who(missing), what, waited)


def written(store: dist.Store, keys: list[str]) -> list[str]:
    """Return the keys that are in a store. Because reading another key would block."""
    if not keys or store.check(keys):
        return keys
    half = len(keys) // 2
    return written(store, keys[:half]) + written(store, keys[half:]) if half else []


def _why_apart(
    store: dist.Store, ranks: Sequence[int], missing: Sequence[int], what: str, limit: float | None
) -> str | None:
    """Return why ranks do not meet, or None: one has ended, or the limit is over (`limit` None: not yet)."""
    job, attempt = _root(store), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    for other in missing:
        if job.check([ended_key(attempt, other)]):
            how = job.get(ended_key(attempt, other)).decode()
            return f"rank {other} has not come to {what}: it has ended with {how}. Every rank has to call it."
    if limit is None or not missing:
        return None
    return (
        f"{_who(missing)} not come to {what} within {limit:.0f} s; {len(ranks) - len(missing)} of {len(ranks)} ranks "
        "have. Look at what they do: they stand still, load something for long, or take another way through the "
        f"script. {_SLOW}"
    )


def _came(rank: int) -> str:
    return f"meeting/{rank}"


def _who(ranks: Sequence[int]) -> str:
    return f"{ranks_in_words(ranks)} {'has' if len(ranks) == 1 else 'have'}"
