"""Stores in which ranks meet outside of collectives, such as before they have a process group.

torch's `TCPStore` has no password and, left alone, listens on every interface. Here a store whose address is
a loopback one listens on that address only: the listening socket is made first and handed over. That also
turns a taken port into an error at once instead of a wait.

Invariant: every process group gets keys of its own. Gloo writes its addresses into the store; after a
restart by an elastic agent that keeps its store, ranks would otherwise read the addresses of their dead
predecessors and hang.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import select
import socket
import time
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

from shardwise.comm.environment import RankPlace, discover, is_loopback
from shardwise.compat import store_host
from shardwise.errors import LaunchError

NOTICE_S = 10.0
"""After so many seconds a process that waits for others says so; then after twice as many, and so on."""
_groups_opened = itertools.count()
_log = logging.getLogger("shardwise")


def serve(host: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """Listen for the ranks of a job.

    Args:
        host: address that the ranks will use. A loopback address is the only one listened on; any other name
            makes the store reachable on all interfaces.
        port: TCP port; 0 takes any free one (read it from the result's `port`).
        timeout: how long a rank's read may wait for a key.

    Raises:
        LaunchError: the port is taken or may not be used.
    """
    loopback = is_loopback(host)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bind_to = ("127.0.0.1" if host == "localhost" else host) if loopback else ""
    try:
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


def join(place: RankPlace, port: int, timeout: timedelta, env: Mapping[str, str] = os.environ) -> dist.Store:
    """The store of this process's job, with a prefix that no other process group of the job uses.

    Under an elastic agent that serves the store (torchrun, `shardwise run`) every rank connects to it;
    otherwise rank 0 serves it. A job of one process needs no port.

    Args:
        place: where this process stands.
        port: port to meet on.
        timeout: how long to wait for rank 0, and for a key.
        env: variables of the elastic agent.
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
    return private_keys(store, env)


def _await_server(host: str, port: int, timeout: timedelta) -> None:
    """Wait until the store is served: torch, if it has to wait, prints frames of its C++ code."""
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
                f"nobody serves the meeting of the ranks at {host}:{port} ({reason}), after {waited:.0f} s. Rank 0 "
                "does (under torchrun, its agent): it has not been started, has ended, or has another MASTER_ADDR or "
                "MASTER_PORT."
            )
        if waited >= notice:
            notice = 2 * waited
            _log.warning("nobody serves the meeting of the ranks at %s:%d yet, after %.0f s", host, port, waited)
        time.sleep(0.1)


def private_keys(store: dist.Store, env: Mapping[str, str] = os.environ) -> dist.Store:
    """`store` under a prefix for this attempt of the job and this process group of the attempt.

    All ranks must call it the same number of times, as they must anyway for process groups.
    """
    attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"shardwise/attempt{attempt}/group{next(_groups_opened)}", store)


def answers(store: dist.Store, patience: float = 0.0) -> bool:
    """Whether the process that serves a store is still there; asked of a dead one, torch prints frames of C++.

    Args:
        store: any store.
        patience: seconds to watch it. The kernel closes the sockets of a process that has just been killed one after
            the other, so that the store's may still be open.
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return True
    try:
        with socket.create_connection((store.host, store.port), timeout=1.0) as probe:
            # A store says nothing as long as it is asked nothing; a lost connection ends.
            return not patience or not select.select([probe], [], [], patience)[0]
    except OSError:
        return False


def machine() -> str:
    """Return a text that is the same in two processes if, and only if, they reach each other over loopback.

    Containers on one machine have loopback interfaces of their own, so that its name alone does not tell.
    """
    facts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # Linux only
        with open("/proc/sys/kernel/random/boot_id") as boot:
            facts.append(boot.read())
        facts.append(os.readlink("/proc/self/ns/net"))
    return "\n".join(facts)


def node() -> str:
    """Return a text that is the same in the processes of one node, and there only.

    A launcher that says how many processes it has started on each machine is right; otherwise processes share a node
    if they reach each other over loopback.
    """
    try:
        place = discover(os.environ)
    except LaunchError:
        return machine()
    if place.local_world_size is None or place.world_size == 1:  # the job has more ranks than the environment knows of
        return machine()
    return f"{place.local_world_size} {place.rank - place.local_rank}"


def own_address() -> str:
    """Return the address of this machine under which ranks on other machines reach it.

    It is the near end of the way to the machine on which the default group has met, which all ranks reach; without
    such a machine it is the name of this one.
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
    return meeting  # this is that machine, and its own name leads it to loopback
