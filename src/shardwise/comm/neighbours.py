"""Collectives between processes of one machine, which read each other's memory.

Messages through sockets copy everything twice and wake a thread at both ends for each piece. Here the ranks tell each
other only where the data lies, through one local socket per pair; each then reads what it needs, directly from the
peer's tensors into its own (`shardwise.comm.peermemory`). A reduction adds what it reads chunk by chunk, so that there
is no receive buffer. Nothing is held twice, and what a rank copies is exactly what it would have received.

An exchange has three events per peer: the peer's *offer* (it has launched: its data may be read), this rank's reading,
and the peer's *receipt* (it has read this rank's data, which may change again). It is complete when every peer's offer
has been read and every peer's receipt has come.

Invariants:

- A rank reads at every launch and in every wait whatever has been offered for any of its exchanges, not only for the
  one it waits for. So ranks may wait for exchanges in different orders, and a rank that is ahead never waits for more
  than the others' launches.
- Once launched everywhere, an exchange is completed without any rank calling `wait()`: while something is under way, a
  thread looks after it every few milliseconds. A rank may be elsewhere, in a barrier of the script's own, while another
  evaluates alone.
- Sums are formed in rank order and in the dtype of the result, as in `shardwise.comm.gloo`: the same bits.
- The tensors of an exchange stay alive until it is complete, even if its caller has forgotten it.
- A closed socket is a lost peer, unless nothing more is expected from it.

What crosses the sockets is addresses, from processes whose number and user the kernel has vouched for.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import select
import socket
import struct
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm import gloo, peermemory, wire
from shardwise.comm.pieces import Pieces, Run
from shardwise.comm.wire import CPU, Deadline, copy_into, lost, split_by_rank
from shardwise.compat import share_memory
from shardwise.errors import PeerLostError, UsageError

Pair = tuple[torch.Tensor, torch.Tensor]
Term = tuple[int, int, torch.Tensor]
"""Part of a chunk, from one element to another, with its values."""

VARIABLE = "SHARDWISE_TRANSPORT"
"""Environment variable: `messages` keeps ranks of one machine from reading each other's memory."""

CHUNK = 1 << 16
"""Elements that are read and added at a time, so that they are still in the cache when they are added."""

MOST_ADDRESSES = 4096
"""Tensors that one offer can name: it must be one message."""

_MEETING = timedelta(seconds=30)
_BACKLOG = 128
"""Callers whom a listener has not seen yet."""
_AGAIN_S = 0.01
_MEETING_TAG = 1
_LEAVING = timedelta(seconds=10)
_LISTENING = timedelta(seconds=1)
"""Longest sleep: what another thread could not send at once is tried again."""
_IDLE_S = 0.02
"""How long an offer may wait for this rank to come by, before a thread takes it. A rank in training comes by at every
unit; only one that waits elsewhere, or computes for long, leaves anything to the thread."""
_CARD_BYTES = 512
_PROOF_BYTES = 32
_HEADER = struct.Struct("<BI")
_OFFER, _RECEIPT = 1, 2
_MESSAGE_BYTES = 1 << 16
_open: weakref.WeakSet[Neighbours] = weakref.WeakSet()


class Exchange:
    """One launched collective; what `Neighbours` returns.

    Attributes:
        op: its name, for messages.
        tag: tells it from others.
        rank, world: this rank's place.
        addresses: where this rank's data begins, one number for each tensor.
        scratch: what sums are formed in, chunk by chunk; it is kept for later exchanges.
        unread: peers whose data is still to be read.
        unreceipted: peers that have still to read this rank's data.
        failure: the peer whose memory could not be read, and why.
    """

    def __init__(self, neighbours: Neighbours, op: str, tag: int) -> None:
        self.op, self.tag = op, tag
        self.rank, self.world = neighbours.rank, neighbours.world
        self.addresses: list[int] = []
        self.scratch: Sequence[torch.Tensor] = ()
        self.unread = {peer for peer in range(self.world) if peer != self.rank}
        self.unreceipted = set(self.unread)
        self.failure: tuple[int, Exception] | None = None
        self._neighbours = neighbours

    @property
    def complete(self) -> bool:
        """Whether everything has been read by everybody."""
        return not self.unread and not self.unreceipted

    def accept(self, peer: int, process: int, addresses: Sequence[int]) -> list[int]:
        """Read what a peer offers, now or when more has come; return the peers whose data is no longer needed."""
        raise NotImplementedError

    def wait(self) -> None:
        """Block until the result is there and this rank's tensors are its own again; later calls do nothing.

        Raises:
            PeerLostError: a peer left, or did not answer within the group's limit.
        """
        self._neighbours.wait_for(self)


class _Gather(Exchange):
    """All-gather: each shard is read into its place."""

    def __init__(self, neighbours: Neighbours, pairs: Sequence[Pair], tag: int) -> None:
        super().__init__(neighbours, "all_gather", tag)
        self._shards = [shard for _, shard in pairs]  # kept alive for the others
        self._places = []
        for full, shard in pairs:
            if full.dtype != shard.dtype:
                raise UsageError(f"all_gather: full is {full.dtype} and shard is {shard.dtype}; they must be the same")
            parts = split_by_rank(full, shard, self)
            copy_into(parts[self.rank], shard)
            self._places.append(parts)
        self.addresses = [shard.data_ptr() for shard in self._shards]

    def accept(self, peer: int, process: int, addresses: Sequence[int]) -> list[int]:
        """See `Exchange.accept`."""
        for parts, address in zip(self._places, addresses, strict=True):
            peermemory.read_tensor(process, address, parts[peer])
        return [peer]


class _Reduction(Exchange):
    """Reduce-scatter: each peer's part for this rank is read and added, in rank order, once all have been offered."""

    def __init__(
        self,
        neighbours: Neighbours,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor | Pieces]],
        tag: int,
        accumulate: bool,
    ) -> None:
        super().__init__(neighbours, "reduce_scatter", tag)
        self._accumulate = accumulate
        self._terms = [_Terms(self, out, full, accumulate) for out, full in pairs]
        for terms in self._terms:
            terms.first_address = len(self.addresses)
            self.addresses += terms.addresses()
        self._offers: dict[int, tuple[int, Sequence[int]]] = {}
        self.scratch = neighbours.scratch(scratch_sizes(pairs, accumulate))

    def accept(self, peer: int, process: int, addresses: Sequence[int]) -> list[int]:
        """See `Exchange.accept`."""
        self._offers[peer] = (process, addresses)
        if len(self._offers) < self.world - 1:
            return []
        for terms in self._terms:
            self._add_up(terms)
        return list(self._offers)

    def _add_up(self, terms: _Terms) -> None:
        """Form one sum."""
        out = terms.out
        size = min(CHUNK, out.numel())
        piece, sums = self.scratch[0].view(terms.dtype)[:size], self.scratch[1].view(out.dtype)[:size]
        for number, start in enumerate(range(0, out.numel(), CHUNK)):
            target = out[start : start + CHUNK]
            total = sums[: target.numel()] if terms.aside else target
            self._sum_chunk(terms, number, total, piece[: target.numel()])
            if self._accumulate:
                target.add_(total)
            elif terms.aside:
                target.copy_(total)

    def _sum_chunk(self, terms: _Terms, number: int, total: torch.Tensor, piece: torch.Tensor) -> None:
        size, alike = total.numel(), total.dtype == piece.dtype
        first: list[Term] = []
        for rank in range(self.world):
            if rank == self.rank:
                term = terms.own(number, size)
            else:
                # The first term is read to where the sum will be, unless it has another dtype.
                values = total if rank == 0 and alike else piece
                terms.read(*self._offers[rank], number, values)
                term = [(0, size, values)]
            if rank == 0 and alike:
                first = term
            elif rank == 0:
                for start, stop, values in term:
                    total[start:stop].copy_(values)
            elif first:
                for start, stop, one, other in _matched(first, term):
                    torch.add(one, other, out=total[start:stop])
                first = []
            else:
                for start, stop, values in term:
                    total[start:stop].add_(values)


def _matched(first: list[Term], second: list[Term]) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
    """Match two terms of a chunk, of which at least one is whole."""
    if len(second) == 1:
        for start, stop, values in first:
            yield start, stop, values, second[0][2][start:stop]
    else:
        for start, stop, values in second:
            yield start, stop, first[0][2][start:stop], values


class _Terms:
    """What is added up to one tensor.

    Args:
        exchange: the reduction.
        out: the result.
        full: this rank's values for all ranks.
        accumulate: the sum is added to what is there.

    Attributes:
        dtype: of the values.
        aside: whether the sum has to be formed in a place of its own.
        first_address: which of the addresses of an offer is the first of these.

    Raises:
        UsageError: sizes or dtypes do not fit.
    """

    def __init__(self, exchange: Exchange, out: torch.Tensor, full: torch.Tensor | Pieces, accumulate: bool) -> None:
        self.out, self.dtype = out, full.dtype
        self.aside = _is_aside(out, full, accumulate)
        self.first_address = 0
        self._full = full  # kept alive for the others
        self._begin = exchange.rank * out.numel()
        self._own: Sequence[torch.Tensor] = ()
        self._runs: list[list[Run]] = []
        if isinstance(full, Pieces):
            assert full.numel() == exchange.world * out.numel(), (full.numel(), exchange.world, out.numel())
            self._runs = full.places.chunks(self._begin, self._begin + out.numel(), CHUNK)
        else:
            own = split_by_rank(full, out, exchange)[exchange.rank]
            self._own = own.split(CHUNK)
        if not (out.is_floating_point() and self.dtype.is_floating_point):
            raise UsageError(f"reduce_scatter: needs floating dtypes; found out {out.dtype} and full {self.dtype}")

    def addresses(self) -> list[int]:
        """Where this rank's values are; 0 for what is zero."""
        if isinstance(self._full, Pieces):
            return [0 if tensor is None else tensor.data_ptr() for tensor in self._full.tensors]
        return [self._full.data_ptr()]

    def own(self, number: int, size: int) -> list[Term]:
        """Return this rank's values for a chunk of `out`."""
        if not isinstance(self._full, Pieces):
            return [(0, size, self._own[number])]
        terms = []
        for run in self._runs[number]:
            tensor = None if run.piece is None else self._full.tensors[run.piece]
            length = run.stop - run.start
            values = _zeros(self.dtype, length) if tensor is None else tensor[run.offset : run.offset + length]
            terms.append((run.start, run.stop, values))
        return terms

    def read(self, process: int, addresses: Sequence[int], number: int, into: torch.Tensor) -> None:
        """Read a peer's values for a chunk of `out`."""
        size, here = into.element_size(), into.data_ptr()
        if not isinstance(self._full, Pieces):
            offset = (self._begin + number * CHUNK) * size
            peermemory.read_tensor(process, addresses[self.first_address] + offset, into)
            return
        ranges = []
        for run in self._runs[number]:
            address = 0 if run.piece is None else addresses[self.first_address + run.piece]
            if address:
                ranges.append((address + run.offset * size, here + run.start * size, (run.stop - run.start) * size))
            else:
                into[run.start : run.stop].zero_()
        peermemory.read_ranges(process, ranges)


def _zeros(dtype: torch.dtype, length: int) -> torch.Tensor:
    return torch.zeros(1, dtype=dtype, device=CPU).expand(length)


def _chunk(numel: int, dtype: torch.dtype) -> int:
    """Return the bytes of a chunk of a tensor, a multiple of the largest element."""
    size = min(CHUNK, numel) * dtype.itemsize
    return size + -size % torch.float64.itemsize


def _is_aside(out: torch.Tensor, full: torch.Tensor | Pieces, accumulate: bool) -> bool:
    """Whether a sum is formed beside `out`: it is added to something, or replaces one of its terms."""
    return accumulate or (isinstance(full, torch.Tensor) and share_memory(out, full))


def scratch_sizes(pairs: Sequence[tuple[torch.Tensor, torch.Tensor | Pieces]], accumulate: bool) -> tuple[int, int]:
    """Return the bytes in which one reduction reads chunks of its terms, and forms sums that are formed aside."""
    return (
        max((_chunk(out.numel(), full.dtype) for out, full in pairs), default=0),
        max((_chunk(out.numel(), out.dtype) for out, full in pairs if _is_aside(out, full, accumulate)), default=0),
    )


def enlarged(chunks: Sequence[torch.Tensor], sizes: Sequence[int], device: torch.device = CPU) -> list[torch.Tensor]:
    """Return memory for chunks, of at least so many bytes each: what there is, where it suffices."""
    return [
        chunk if chunk.numel() >= size else torch.empty(size, dtype=torch.uint8, device=device)
        for chunk, size in zip(chunks, sizes, strict=True)
    ]


class Neighbours:
    """The other ranks of a group whose memory this process can read, and the exchanges that are under way with them.

    Args:
        group: the ranks; its limit holds for each exchange.
        processes: number of each rank's process.
        sockets: one to each other rank.
    """

    def __init__(self, group: dist.ProcessGroup, processes: Sequence[int], sockets: dict[int, socket.socket]) -> None:
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self._group = group
        self._processes = list(processes)
        self._sockets = sockets
        self._peer_of = {connection.fileno(): peer for peer, connection in sockets.items()}
        self._poll = select.poll()
        for descriptor, connection in ((c.fileno(), c) for c in sockets.values()):
            connection.setblocking(False)
            self._poll.register(descriptor, select.POLLIN)
        self._changed = threading.Condition()
        self._polling = False
        self._under_way: dict[int, Exchange] = {}
        self._early: dict[int, dict[int, Sequence[int]]] = {}
        self._unsent: dict[int, deque[bytes]] = {peer: deque() for peer in sockets}
        self._gone: set[int] = set()
        self._failure: PeerLostError | None = None
        self._scratch = [torch.empty(0, dtype=torch.uint8, device=CPU) for _ in range(2)]
        self._busy = threading.Event()
        weakref.finalize(self, self._busy.set)
        weakref.finalize(self, _hang_up, sockets).atexit = False  # peers may still be reading then
        self._thread = threading.Thread(
            target=_serve_idle, args=(weakref.ref(self), self._busy), name="shardwise-neighbours", daemon=True
        )
        self._thread.start()
        _open.add(self)
        atexit.unregister(_settle_all)
        atexit.register(_settle_all)

    def all_gather(self, pairs: Sequence[Pair], tag: int) -> Exchange:
        """As `shardwise.comm.gloo.all_gather`."""
        return self._launch(_Gather(self, pairs, tag))

    def reduce_scatter(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor | Pieces]], tag: int, accumulate: bool = False
    ) -> Exchange:
        """As `shardwise.comm.gloo.reduce_scatter`; what is reduced may also lie in pieces, the same on all ranks."""
        return self._launch(_Reduction(self, pairs, tag, accumulate))

    def scratch(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return memory for chunks that are read and added up, of at least so many bytes.

        It is kept: made anew each time, it would break up the space of units that have been freed.
        """
        self._scratch = enlarged(self._scratch, sizes)
        return self._scratch

    def _launch(self, exchange: Exchange) -> Exchange:
        if self._failure is not None:
            raise self._failure
        with self._changed:
            self._under_way[exchange.tag] = exchange
            self._busy.set()
            offer = _HEADER.pack(_OFFER, exchange.tag)
            offer += struct.pack(f"<{len(exchange.addresses)}Q", *exchange.addresses)
            # Not all ranks begin with rank 0.
            for step in range(1, self.world):
                self._send((self.rank + step) % self.world, offer)
            for peer, addresses in self._early.pop(exchange.tag, {}).items():
                self._accept(exchange, peer, addresses)
            if not self._polling:  # else another thread is about to read
                self._read()
        return exchange

    def wait_for(self, exchange: Exchange) -> None:
        """Block until an exchange is complete, and read meanwhile whatever else is offered."""
        deadline = wire.deadline_of(self._group)
        with self._changed:
            while not exchange.complete:
                if self._failure is not None:
                    raise self._failure
                if not self._polling:
                    self._read()
                if self._still_possible(exchange, deadline):
                    if self._polling:  # one thread listens for all
                        self._changed.wait(_LISTENING.total_seconds())
                    else:
                        self._listen(deadline)

    def _still_possible(self, exchange: Exchange, deadline: Deadline) -> bool:
        """Return whether an exchange has still to be waited for; raise if that is no use, or too late."""
        if exchange.complete:
            return False
        limit: timedelta | None = None
        missing = sorted((exchange.unread | exchange.unreceipted) & self._gone)
        if exchange.failure is not None:
            peer, cause = exchange.failure
        elif missing:
            peer, cause = missing[0], ConnectionResetError("the process has closed its local socket")
        elif deadline.over():
            # Who has not launched is nearer to the cause than who has not read.
            peer, cause = min(exchange.unread or exchange.unreceipted), TimeoutError("the limit is over")
            limit = deadline.limit
        else:
            return True
        self._failure = lost(exchange.op, exchange.tag, self.rank, self.world, peer, limit)
        self._failure.__cause__ = cause
        self._disconnect()  # so that the others do not wait for what will not come
        raise self._failure

    def _listen(self, deadline: Deadline) -> None:
        """Block until something arrives, with the lock given back meanwhile."""
        limit = min(deadline.left() or _LISTENING, _LISTENING)
        self._polling = True
        self._changed.release()
        try:
            self._poll.poll(limit.total_seconds() * 1e3)
        finally:
            self._changed.acquire()
            self._polling = False
            self._changed.notify_all()
        self._read()

    def _read(self) -> None:
        """Take all messages that have arrived, and send what could not be sent before."""
        if any(self._unsent.values()):
            for peer in list(self._unsent):
                self._flush(peer)
        for descriptor, _ in self._poll.poll(0):
            peer = self._peer_of[descriptor]
            while (message := self._message(peer)) is not None:
                kind, tag = _HEADER.unpack_from(message)
                exchange = self._under_way.get(tag)
                if kind == _RECEIPT:
                    if exchange is not None:
                        exchange.unreceipted.discard(peer)
                        self._retire(exchange)
                    continue
                addresses = struct.unpack_from(f"<{(len(message) - _HEADER.size) // 8}Q", message, _HEADER.size)
                if exchange is None:
                    self._early.setdefault(tag, {})[peer] = addresses
                else:
                    self._accept(exchange, peer, addresses)

    def _message(self, peer: int) -> bytes | None:
        """Return the next message of a peer, or None if there is none (any more)."""
        try:
            try:
                message = self._sockets[peer].recv(_MESSAGE_BYTES)
            except ConnectionResetError:  # told once, before what the peer had sent until then
                message = self._sockets[peer].recv(_MESSAGE_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            message = b""
        if not message:
            self._lose(peer)
            return None
        return message

    def _lose(self, peer: int) -> None:
        if peer not in self._gone:
            self._gone.add(peer)
            self._poll.unregister(self._sockets[peer].fileno())
            self._unsent[peer].clear()

    def _accept(self, exchange: Exchange, peer: int, addresses: Sequence[int]) -> None:
        try:
            # Whether gradients are recorded is each thread's own, and what is summed may be an activation.
            with torch.no_grad():
                read = exchange.accept(peer, self._processes[peer], addresses)
        except Exception as error:  # its process has ended since its offer, say; another thread may be here, so whoever
            exchange.failure = (peer, error)  # waits for the exchange is told
            return
        receipt = _HEADER.pack(_RECEIPT, exchange.tag)
        for reader in read:
            exchange.unread.discard(reader)
            self._send(reader, receipt)
        self._retire(exchange)

    def _retire(self, exchange: Exchange) -> None:
        if exchange.complete and self._under_way.get(exchange.tag) is exchange:
            del self._under_way[exchange.tag]

    def _send(self, peer: int, message: bytes) -> None:
        if peer not in self._gone:
            self._unsent[peer].append(message)
            self._flush(peer)

    def _flush(self, peer: int) -> None:
        waiting = self._unsent[peer]
        while waiting:
            try:
                self._sockets[peer].send(waiting[0])
            except BlockingIOError:
                break
            except OSError:
                waiting.clear()  # it has gone; what it had sent before can still be read
                break
            else:
                waiting.popleft()
        interest = select.POLLIN | (select.POLLOUT if waiting else 0)
        if peer not in self._gone and not self._polling:
            self._poll.modify(self._sockets[peer].fileno(), interest)

    def serve(self) -> bool:
        """Read what has been offered, unless another thread does; return whether this has to be done again."""
        if not self._changed.acquire(blocking=False):
            return True
        try:
            if not self._polling:
                self._read()
            if not self._under_way:
                self._busy.clear()
            return bool(self._sockets)
        finally:
            self._changed.release()

    def settle(self, limit: timedelta) -> None:
        """Let the others finish reading what this rank has launched, as far as they do so within a limit."""
        deadline = Deadline(limit)
        with self._changed:
            while any(e.unreceipted - self._gone for e in self._under_way.values()) and not deadline.over():
                self._read()
                if any(e.unreceipted - self._gone for e in self._under_way.values()):
                    self._listen(deadline)

    def _disconnect(self) -> None:
        for peer in list(self._sockets):
            self._lose(peer)
            self._sockets.pop(peer).close()

    def close(self) -> None:
        """Leave: whoever waits for this rank from now on is told that it has gone."""
        deadline = Deadline(_LEAVING)
        with self._changed:
            # Receipts that a full socket has not taken yet: a peer that never gets them would take this rank for lost.
            while self._sockets and any(self._unsent.values()) and not deadline.over():
                self._read()
                if any(self._unsent.values()):
                    self._listen(deadline)
            self._disconnect()
            self._under_way, self._early = {}, {}
        self._busy.set()  # so that the thread sees it
        self._thread.join()
        _open.discard(self)


def _hang_up(sockets: dict[int, socket.socket]) -> None:
    """Close what is open of the sockets of an owner that has been forgotten without `close`."""
    while sockets:
        sockets.popitem()[1].close()


def _serve_idle(reference: weakref.ref[Neighbours], busy: threading.Event) -> None:
    """Serve the peers of a rank that is elsewhere, now and then as long as something is under way."""
    going_on = True
    while going_on:
        busy.wait()
        time.sleep(_IDLE_S)
        neighbours = reference()
        going_on = neighbours is not None and neighbours.serve()
        del neighbours


def meet(group: dist.ProcessGroup) -> tuple[Neighbours | None, str]:
    """Connect the ranks of a Gloo group if all are on one machine and may read each other (all ranks call).

    Returns:
        The connections, or None and the reason.

    Raises:
        UsageError: SHARDWISE_TRANSPORT asks for memory, which is not possible, or for something unknown.
    """
    wish = os.environ.get(VARIABLE, "")
    found, reason = _meet(group, wanted=wish in ("", "memory"))
    if wish not in ("", "memory", "messages"):
        raise UsageError(f'{VARIABLE}={wish!r} is not known; use "memory", "messages", or leave it unset')
    if found is None and wish == "memory":
        raise UsageError(f"{VARIABLE}=memory, but the ranks cannot read each other's memory: {reason}")
    return found, reason


def _meet(group: dist.ProcessGroup, *, wanted: bool) -> tuple[Neighbours | None, str]:
    with contextlib.ExitStack() as until_met:
        proof = torch.tensor(list(secrets.token_bytes(_PROOF_BYTES)), dtype=torch.uint8, device=CPU)
        listener = _listener() if wanted and peermemory.supported() else None
        card: dict[str, Any] = {}
        if listener is not None:
            until_met.enter_context(listener)
            peermemory.allow_siblings()
            card = {
                "machine": _machine(),
                "process": os.getpid(),
                "socket": listener.getsockname().decode("latin-1"),
                "address": proof.data_ptr(),
                "proof": bytes(proof.tolist()).hex(),
            }
        cards = _exchange_cards(group, card)
        if not all(cards):
            return None, f"{VARIABLE}=messages, or the system has no process_vm_readv or no Unix sockets"
        if len({card["machine"] for card in cards}) > 1:
            return None, "they are on several machines or in several containers"
        if not _all_agree(group, all(_readable(card) for card in cards)):
            return None, "the system does not allow it (ptrace restrictions or a seccomp filter)"
        assert listener is not None
        sockets = _connect(dist.get_rank(group), cards, listener)
        if not _all_agree(group, sockets is not None):
            for connection in (sockets or {}).values():
                connection.close()
            return None, "not all of them could connect to each other"
        assert sockets is not None
        return Neighbours(group, [card["process"] for card in cards], sockets), ""


def _machine() -> str:
    """Return what tells machines apart, and containers whose processes or sockets cannot see each other."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return " ".join([boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))])


def _listener() -> socket.socket | None:
    """Return a socket for the others under a name that the kernel makes up and forgets with it."""
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind("")  # an unused name of the abstract namespace
        listener.listen(_BACKLOG)
    except (OSError, AttributeError):
        return None
    return listener


def _exchange_cards(group: dist.ProcessGroup, card: dict[str, Any]) -> list[dict[str, Any]]:
    text = json.dumps(card).encode()
    assert len(text) <= _CARD_BYTES, text
    own = torch.zeros(_CARD_BYTES, dtype=torch.uint8, device=CPU)
    own[: len(text)] = torch.tensor(list(text), dtype=torch.uint8, device=CPU)
    world = dist.get_world_size(group)
    rows = torch.zeros(world * _CARD_BYTES, dtype=torch.uint8, device=CPU)
    gloo.all_gather([(rows, own)], group, _MEETING_TAG).wait()
    return [json.loads(bytes(row.tolist()).rstrip(b"\0")) for row in rows.view(world, -1)]


def _all_agree(group: dist.ProcessGroup, here: bool) -> bool:
    count = torch.tensor([int(here)], dtype=torch.int64, device=CPU)
    gloo.all_reduce_ordered(count, group, _MEETING_TAG).wait()
    return int(count.item()) == dist.get_world_size(group)


def _readable(card: dict[str, Any]) -> bool:
    """Whether the memory at the place that a rank has named holds what it should."""
    seen = torch.zeros(_PROOF_BYTES, dtype=torch.uint8, device=CPU)
    try:
        peermemory.read_tensor(card["process"], card["address"], seen)
    except OSError:
        return False
    return bytes(seen.tolist()).hex() == card["proof"]


def _connect(rank: int, cards: Sequence[dict[str, Any]], listener: socket.socket) -> dict[int, socket.socket] | None:
    """Return a socket to each other rank, or None: it connects to those below and is called by those above.

    Anybody on the machine may call. The kernel tells who it is; strangers are sent away before they can say anything.
    """
    found: dict[int, socket.socket] = {}
    ranks = {card["process"]: peer for peer, card in enumerate(cards)}
    deadline = Deadline(_MEETING)
    try:
        for peer in range(rank):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            found[peer] = connection
            _call(connection, cards[peer]["socket"].encode("latin-1"), deadline)
            if _caller(connection) != cards[peer]["process"]:
                raise PermissionError(f"rank {peer} does not listen where it said")
        while len(found) < len(cards) - 1:
            if deadline.over():
                raise TimeoutError("only strangers have called")
            listener.settimeout((deadline.left() or _MEETING).total_seconds())
            connection, _ = listener.accept()
            caller = ranks.get(_caller(connection), -1)
            if caller <= rank or caller in found:
                connection.close()
            else:
                found[caller] = connection
    except OSError:
        for connection in found.values():
            connection.close()
        return None
    return found


def _call(connection: socket.socket, name: bytes, deadline: Deadline) -> None:
    """Connect to a listener; one that has many callers, who may be strangers, has room again when it has seen them."""
    while True:
        connection.settimeout((deadline.left() or _MEETING).total_seconds())
        try:
            connection.connect(name)
            return
        except BlockingIOError:
            if deadline.over():
                raise
            time.sleep(_AGAIN_S)


def _caller(connection: socket.socket) -> int:
    """Ask the kernel which process of this user is at the other end of a connection; -1: none."""
    credentials = struct.Struct("3i")
    process, user, _ = credentials.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    )
    return int(process) if user == os.getuid() else -1


def _settle_all() -> None:
    # After an exception that nobody has caught the peers must see this process gone, and it does not linger.
    failed = getattr(sys, "last_value", None) is not None
    for neighbours in list(_open):
        if not failed:
            neighbours.settle(_LEAVING)
        neighbours.close()  # its thread, still inside of torch when the interpreter goes, would take the process down
