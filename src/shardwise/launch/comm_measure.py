"""Measures the collectives of a group: speed, correctness of results, and speed of the links below them.

Each collective runs in turns as the engine runs it (`shardwise.comm.communicator`) and as torch's own. A trial begins
after a barrier and takes as long as its slowest rank. Upper bounds are copies in the memory of all ranks at once, and
streams of bytes between pairs of ranks through authenticated sockets (`shardwise.comm.p2p`). Results are compared with
closed forms of small whole numbers, which every dtype holds exactly.
"""

from __future__ import annotations

import selectors
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.communicator import Communicator
from shardwise.comm.logger import bandwidths
from shardwise.comm.p2p import STEP_S, P2PConnections, reaching, receive
from shardwise.comm.rendezvous import machine, own_address
from shardwise.compat import all_gather_single, reduce_scatter_single
from shardwise.launch.interfaces import interface_variable, interfaces, of_address

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "pt2pt")
SMALL = 64 << 10
"""Maximum bytes of the engine's small all-reduce, as for norms; larger messages are gradients of stage 0."""
COPIES = 4
"""Maximum number of tensors of a message's size that a measurement holds at once."""

_PERIOD = 16
_INNER = 20
_INNER_BYTES = 1 << 20
"""Bytes of the repeated calls in one trial of small messages, at most `_INNER` calls."""
_COPIED = 32 << 20
_STREAMED = 16 << 20
_PINGS = 100
_MOST_PAIRS = 16
_EXACT = 256
"""Whole numbers up to this are exact in bf16."""


@dataclass(frozen=True)
class Plan:
    """Collectives (of `OPS`) and dtypes to measure.

    Attributes:
        sizes: bytes of the entire message; rounded for equal parts of all ranks.
        trials, warmups: counted trials, and trials before them.
    """

    ops: tuple[str, ...] = OPS
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    sizes: tuple[int, ...] = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
    trials: int = 10
    warmups: int = 2


def pattern(rank: int, part: int, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a rank's values of one part of its message: whole numbers from 0 to 3 that differ by rank and part."""
    row = [(3 * place + 5 * rank + 7 * part + rank * part) % 4 for place in range(_PERIOD)]
    return torch.tensor(row, dtype=dtype, device=device).repeat(-(-count // _PERIOD))[:count]


class Exchange:
    """One collective of `OPS` with its own memory, for a message of about `size` bytes (attribute: exactly)."""

    def __init__(self, comm: Communicator, op: str, dtype: torch.dtype, size: int) -> None:
        self.comm, self.op, self.dtype = comm, op, dtype
        self.part = max(1, -(-size // (dtype.itemsize * comm.world)))
        self.size = self.part * comm.world * dtype.itemsize
        self._full = self._make(self.part * comm.world)
        # Sums of 16 bits are formed in fp32, as those of gradients.
        self._own = self._make(self.part, torch.float32 if op == "reduce_scatter" and dtype.itemsize < 4 else dtype)
        self._theirs = self._make(self.part) if self._own.dtype is not dtype else self._own
        self._other = self._make(self.part * comm.world if op == "all_to_all" else 0)

    def _make(self, count: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(count, dtype=dtype or self.dtype, device=self.comm.device)

    def _of(self, rank: int, part: int) -> torch.Tensor:
        return pattern(rank, part, self.part, self.dtype, self.comm.device)

    def fill(self) -> None:
        """Set every rank's values, and clear results."""
        comm = self.comm
        for part, place in enumerate(self._full.split(self.part)):
            place.copy_(self._of(comm.rank, part))
        for result in (self._own, self._theirs, self._other):
            result.fill_(-1)
        if self.op == "all_gather":
            self._own.copy_(self._of(comm.rank, comm.rank))
        if self.op in ("broadcast", "pt2pt") and comm.rank:
            self._full.fill_(-1)

    def wrong(self, torchs: bool = False) -> str:
        """Describe the error in this rank's result, of torch's collective with `torchs`; empty if it is right."""
        comm, ranks = self.comm, range(self.comm.world)
        if self.op == "reduce_scatter":
            result, parts = self._theirs if torchs else self._own, [self._sum(comm.rank)]
        elif self.op == "all_to_all":
            result, parts = self._other, [self._of(rank, comm.rank) for rank in ranks]
        else:
            if self.op == "pt2pt" and comm.rank > 1:
                return ""
            expected = {
                "all_gather": lambda part: self._of(part, part),
                "all_reduce": self._sum,
                "broadcast": lambda part: self._of(0, part),
                "pt2pt": lambda part: self._of(0, part),
            }[self.op]
            result, parts = self._full, [expected(part) for part in ranks]
        for number, (found, right) in enumerate(zip(result.split(self.part), parts, strict=True)):
            differs = (found.double() - right.double()).abs() > (0 if 3 * comm.world <= _EXACT else 0.02 * right.abs())
            if bool(differs.any()):
                place = int(differs.nonzero()[0])
                return (
                    f"element {number * self.part + place} is {found[place].item():g}, expected {right[place].item():g}"
                )
        return ""

    def _sum(self, part: int) -> torch.Tensor:
        total = self._of(0, part).float()
        for rank in range(1, self.comm.world):
            total += self._of(rank, part)
        return total

    def ours(self) -> None:
        """Run the engine's collective. (Point to point has none.)"""
        comm, label = self.comm, "bench"
        if self.op == "all_reduce" and self.size <= SMALL:
            comm.all_reduce(self._full, label).wait()
        elif self.op == "all_reduce":
            comm.sum_large(self._full, label)
        elif self.op == "all_gather":
            comm.all_gather([(self._full, self._own)], label).wait()
        elif self.op == "reduce_scatter":
            comm.reduce_scatter([(self._own, self._full)], label).wait()
        elif self.op == "all_to_all":
            parts = [self.part] * comm.world
            comm.all_to_all(self._other, self._full, parts, parts, label).wait()
        else:
            comm.broadcast(self._full, 0, label).wait()

    def torchs(self) -> None:
        """Run torch's collective."""
        group = self.comm.process_group
        if self.op == "all_reduce":
            dist.all_reduce(self._full, group=group)
        elif self.op == "all_gather":
            all_gather_single(self._full, self._own, group=group)
        elif self.op == "reduce_scatter":
            reduce_scatter_single(self._theirs, self._full, group=group)
        elif self.op == "all_to_all":
            dist.all_to_all_single(self._other, self._full, group=group)
        elif self.op == "broadcast":
            dist.broadcast(self._full, group_src=0, group=group)
        elif self.comm.rank == 0:
            dist.send(self._full, group_dst=1, group=group)
            dist.recv(self._full, group_src=1, group=group)
        elif self.comm.rank == 1:
            dist.recv(self._full, group_src=0, group=group)
            dist.send(self._full, group_dst=0, group=group)


def measure(comm: Communicator, plan: Plan) -> dict[str, Any]:
    """Measure with two ranks or more; return the same plain JSON values on all. A collective."""
    cases = [(op, dtype, size) for op in plan.ops for dtype in plan.dtypes for size in plan.sizes]
    return {"links": links_of(comm), "rows": [_row(Exchange(comm, *case), plan) for case in cases]}


def _row(exchange: Exchange, plan: Plan) -> dict[str, Any]:
    comm = exchange.comm
    ways: dict[str, Callable[[], None]] = {"torch": exchange.torchs}
    if exchange.op != "pt2pt":
        ways = {"ours": exchange.ours, **ways}
    wrong: dict[str, dict[str, str]] = {}
    missing = ""
    for name, run in list(ways.items()):
        exchange.fill()
        try:
            run()
        except (RuntimeError, ValueError) as error:
            # The backend may lack this dtype. The engine's collectives must not fail.
            if name != "torch" or exchange.op == "pt2pt" or not _refusal(error):
                raise
            missing = str(error).splitlines()[0]
            del ways[name]
            continue
        errors = comm.exchange(exchange.wrong(torchs=name == "torch"), "bench.right")
        if any(errors):
            wrong[name] = {str(rank): words for rank, words in enumerate(errors) if words}
    inner = max(1, min(_INNER, _INNER_BYTES // exchange.size))
    calls = 2 * inner if exchange.op == "pt2pt" else inner  # round trip
    own: dict[str, list[float]] = {name: [] for name in ways}
    for trial in range(-plan.warmups, plan.trials):
        for name in ways if trial % 2 else reversed(ways):
            comm.barrier("bench.barrier")
            start = time.perf_counter()
            for _ in range(inner):
                ways[name]()
            _arrive(comm.device)
            if trial >= 0:
                own[name].append((time.perf_counter() - start) / calls)
    row: dict[str, Any] = {
        "op": exchange.op,
        "dtype": str(exchange.dtype).removeprefix("torch."),
        "bytes": exchange.size,
        "wrong": wrong,
        "refused_by_torch": missing,
    }
    for name, times in own.items():
        ranks = comm.exchange(times, "bench.times")
        row[name] = _figures(exchange, ranks)
    row["times_torch"] = (
        row["torch"]["median_us"] / row["ours"]["median_us"] if {"ours", "torch"} <= row.keys() else None
    )
    return row


def _refusal(error: Exception) -> bool:
    text = str(error).lower()
    return any(word in text for word in ("not support", "unsupported", "invalid scalar type", "not implemented"))


def _figures(exchange: Exchange, ranks: Sequence[Sequence[float]]) -> dict[str, Any]:
    slowest = sorted(max(times) for times in zip(*ranks, strict=True))
    median = statistics.median(slowest)
    algorithm, bus = bandwidths(exchange.op, exchange.size, median, exchange.comm.world)
    return {
        "median_us": 1e6 * median,
        "min_us": 1e6 * slowest[0],
        "p95_us": 1e6 * slowest[min(len(slowest) - 1, int(0.95 * len(slowest)))],
        "algbw_gbps": algorithm,
        "busbw_gbps": bus,
        "rank_median_us": [1e6 * statistics.median(times) for times in ranks],
    }


def _arrive(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- links -------------------------------------------------------------------------------------------------------------


def links_of(comm: Communicator) -> dict[str, Any]:
    """Measure the links below the collectives. A collective.

    Returns:
        `copy`: bytes per second that each rank copies, all at once. `compute_ms`: each rank's time for the same matrix
            product. `streams`: for pairs of ranks, bytes per second each way and the round-trip time in microseconds.
            `machines`: number of each rank's machine. `interfaces`: interface of each rank's traffic. `transport`:
            "memory", "messages", or the backend of a device.
    """
    machines = comm.fingerprints(machine(), "bench.machines")
    copy, compute = _copying(comm), _computing(comm)
    return {
        "transport": comm.transport,
        "machines": [machines.index(one) for one in machines],
        "copy": comm.exchange(copy, "bench.copy"),
        "compute_ms": comm.exchange(compute, "bench.compute"),
        "streams": list(_streams(comm)),
        "interfaces": comm.exchange(_interface(comm, len(set(machines)) == 1), "bench.interfaces"),
    }


def _copying(comm: Communicator) -> float:
    source = torch.zeros(_COPIED, dtype=torch.uint8, device=comm.device)
    target = torch.ones_like(source)
    best = float("inf")
    for _ in range(6):
        comm.barrier("bench.barrier")
        _arrive(comm.device)
        start = time.perf_counter()
        target.copy_(source)
        _arrive(comm.device)
        best = min(best, time.perf_counter() - start)
    return _COPIED / best


def _computing(comm: Communicator) -> float:
    factor = torch.ones(256, 256, device=comm.device)
    times = []
    for _ in range(6):
        comm.barrier("bench.barrier")
        start = time.perf_counter()
        for _ in range(10):
            torch.mm(factor, factor)
        _arrive(comm.device)
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


@dataclass
class Pairs:
    """Connections of a rank to all others, by rank: on `asking` it sends (blocking), on `answering` it replies."""

    asking: dict[int, socket.socket] = field(default_factory=dict)
    answering: dict[int, socket.socket] = field(default_factory=dict)

    def close(self) -> None:
        """Close all connections."""
        for sockets in (self.asking, self.answering):
            while sockets:
                sockets.popitem()[1].close()


def connect(comm: Communicator) -> Pairs:
    """Connect each rank of a group with each other one, for measurements. A collective. Raises PeerLostError if a rank
    has exited, or has not arrived within the group's timeout for a collective.
    """
    pairs = Pairs()
    with selectors.DefaultSelector() as selector:
        links = P2PConnections(comm, selector, pairs.answering.__setitem__)
        deadline = time.monotonic() + comm.timeout.total_seconds()
        ended = threading.Event()

        def serve() -> None:
            while not ended.is_set():
                for key, _ in selector.select(STEP_S):
                    key.data()
                links.expire()

        thread = threading.Thread(target=serve, name="shardwise-meeting", daemon=True)
        thread.start()
        try:
            for step in range(1, comm.world):  # not all ranks begin with rank 0
                peer = (comm.rank + step) % comm.world
                with reaching(comm, peer, "the side channel", time.monotonic()):
                    pairs.asking[peer] = links.to(peer, deadline)
            comm.barrier("side_channel.connected")
        finally:
            ended.set()
            thread.join()
            links.leave()
    return pairs


def _streams(comm: Communicator) -> Iterator[dict[str, Any]]:
    links = connect(comm)
    limit = time.monotonic() + comm.timeout.total_seconds()
    try:
        for peer in range(1, min(comm.world, _MOST_PAIRS + 1)):
            there = _stream(comm, links, 0, peer, limit)
            back = _stream(comm, links, peer, 0, limit)
            trip = _ping(comm, links, peer, limit)
            seconds = comm.exchange([there, back, trip], "bench.stream")
            yield {
                "ranks": [0, peer],
                "there": _STREAMED / max(one[0] for one in seconds),
                "back": _STREAMED / max(one[1] for one in seconds),
                "trip_us": 1e6 * seconds[0][2],
            }
    finally:
        links.close()


def _stream(comm: Communicator, links: Pairs, source: int, target: int, limit: float) -> float:
    """Return the duration until the other rank has confirmed receipt."""
    memory = memoryview(bytearray(_STREAMED))
    comm.barrier("bench.barrier")
    start = time.perf_counter()
    if comm.rank == source:
        links.asking[target].sendall(memory)
        receive(links.asking[target], memory[:1], limit)
    elif comm.rank == target:
        answering = links.answering[source]
        receive(answering, memory, limit)
        answering.sendall(memory[:1])
    return time.perf_counter() - start


def _ping(comm: Communicator, links: Pairs, peer: int, limit: float) -> float:
    one = memoryview(bytearray(1))
    comm.barrier("bench.barrier")
    times = []
    for _ in range(_PINGS if comm.rank in (0, peer) else 0):
        connection = links.asking[peer] if comm.rank == 0 else links.answering[0]
        start = time.perf_counter()
        if comm.rank == 0:
            connection.sendall(one)
            receive(connection, one, limit)
        else:
            receive(connection, one, limit)
            connection.sendall(one)
        times.append(time.perf_counter() - start)
    return statistics.median(times) if times else 0.0


def _interface(comm: Communicator, one_machine: bool) -> dict[str, Any]:
    known = interfaces()
    named = interface_variable("gloo" if comm.waits_on_host else "nccl").partition(",")[0]
    used = named or of_address("localhost" if one_machine else own_address(), known)
    return {
        "host": socket.gethostname(),
        "named": named,
        "used": used,
        "up": {one.name: {"speed": one.speed, "loopback": one.loopback} for one in known if one.address},
    }
