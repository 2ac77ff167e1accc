"""All-gathers and reduce-scatters between processes of one machine through shared memory (process_vm_readv of Linux).

Messages through sockets copy everything twice and wake a thread at both ends for each piece. Here a rank sends its
peers the addresses of its tensors, through one local socket per pair. Each peer copies from the rank's memory into its
own. A reduction adds chunk by chunk, and needs no receive buffer. The kernel verifies number and user of each peer's
process.

An exchange has three events per peer: the peer's *offer* (launched: its data may be read), this rank's read, and the
peer's *receipt* (this rank's data has been read, and may change). It is complete after all reads and receipts.

Invariants:

- At every launch and in every wait a rank reads the offers for all of its exchanges. Ranks may therefore wait for
  exchanges in different orders, and a rank waits at most for the others' launches.
- An exchange that is launched everywhere completes without any `wait()`: a thread serves it every few milliseconds.
- Sums are formed in rank order and in the dtype of the result, with the same bits as in `shardwise.comm.native`.
- The tensors of an exchange stay alive until it is complete.
- A closed socket is a lost peer, unless nothing more is expected from the peer.
- Offers of ranks in different collectives do not match: no rank reads values of another collective.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import json
import logging
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
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm import native
from shardwise.comm.groups import Deadline
from shardwise.comm.ledger import Record
from shardwise.comm.native import Pair
from shardwise.compat import all_gather_single, share_memory, timeout_of
from shardwise.errors import PeerLostError, UsageError

VARIABLE = "SHARDWISE_TRANSPORT"
"""Environment variable: `messages` disables shared memory between ranks of one machine."""

CPU = torch.device("cpu")
CHUNK = 1 << 16
"""Elements that are read and added at a time, to stay in the cache."""

_CONNECTING = timedelta(seconds=30)
_BACKLOG = 128  # connections that wait at a listener
_LEAVING = timedelta(seconds=10)
_LISTENING = timedelta(seconds=1)  # longest sleep: messages that another thread could not send are then sent
_IDLE_S = 0.02  # longest wait of an offer on a rank that neither launches nor waits here, until a thread serves it
_CARD_BYTES = 512
_PROOF_BYTES = 32
_HEADER, _TIME, _CREDENTIALS = struct.Struct("<BQ"), struct.Struct("ll"), struct.Struct("3i")
_OFFER, _RECEIPT = 1, 2
_MESSAGE_BYTES = 1 << 16
_MOST_ADDRESSES = 4096  # tensors of one offer, which is one message

_open: weakref.WeakSet[IntraNodeTransport] = weakref.WeakSet()
_log = logging.getLogger("shardwise")


# -- reading another process's memory ----------------------------------------------------------------------------------

_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_DESCENDANTS_ONLY = 1
_PR_SET_PTRACER = 0x59616D61


class _Range(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@functools.cache
def _process_vm_readv() -> Any:
    try:
        function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (OSError, AttributeError, TypeError):  # of a system other than Linux
        return None
    ranges = ctypes.POINTER(_Range)
    function.argtypes = (ctypes.c_int, ranges, ctypes.c_ulong, ranges, ctypes.c_ulong, ctypes.c_ulong)
    function.restype = ctypes.c_ssize_t
    return function


def allow_siblings() -> None:
    """Let the descendants of this process's parent read this process's memory, where Yama's ptrace_scope is 1.

    Because this rule lets only ancestors read a process of the same user, unless the process names another one.
    """
    with contextlib.suppress(OSError, ValueError):
        if int(_YAMA.read_text()) == _DESCENDANTS_ONLY:
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)


def read_tensor(process: int, address: int, into: torch.Tensor) -> None:
    """Fill a contiguous CPU tensor from the memory of another process.

    Raises:
        OSError: the process has gone, does not permit it, or has no memory there.

    >>> source, target = torch.arange(4.0), torch.zeros(4)
    >>> if _process_vm_readv() is not None:
    ...     read_tensor(os.getpid(), source.data_ptr(), target)
    ... else:
    ...     _ = target.copy_(source)
    >>> target.tolist()
    [0.0, 1.0, 2.0, 3.0]
    """
    function, here, size = _process_vm_readv(), into.data_ptr(), into.nbytes
    done = 0
    while done < size:
        target, source = _Range(here + done, size - done), _Range(address + done, size - done)
        copied = function(process, ctypes.byref(target), 1, ctypes.byref(source), 1, 0)
        if copied <= 0:
            code = ctypes.get_errno()
            raise OSError(code, f"reading {size} bytes of process {process}: {os.strerror(code)}")
        done += copied


# -- exchanges ---------------------------------------------------------------------------------------------------------


class Exchange:
    """One launched collective; `unread`: peers to read from; `unreceipted`: peers that have to read this rank's data.

    `tag` is equal on all ranks in this collective, and on no others. `addresses` are of this rank's tensors. `scratch`
    has sums of chunks, and is kept for later exchanges. `failure` is a peer with unreadable memory, and the error.
    """

    def __init__(self, transport: IntraNodeTransport, pairs: Sequence[Pair], record: Record) -> None:
        self.record = record
        name = f"{record.group} {record.op} {record.label} {record.size} {record.kind} {record.turn}"
        self.tag = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
        self.rank, self.world = transport.rank, transport.world
        self.addresses: list[int] = []
        self.scratch: Sequence[torch.Tensor] = ()
        self.unread = {peer for peer in range(self.world) if peer != self.rank}
        self.unreceipted = set(self.unread)
        self.failure: tuple[int, Exception] | None = None
        self._transport = transport
        self._pairs = pairs  # kept alive for the others
        if len(pairs) > _MOST_ADDRESSES:
            raise UsageError(f"{record.op} {record.label!r}: {len(pairs)} tensors; at most {_MOST_ADDRESSES} fit")

    @property
    def completed(self) -> bool:
        """Whether every rank has read everything."""
        return not self.unread and not self.unreceipted

    def accept(self, peer: int, process: int, addresses: Sequence[int]) -> list[int]:
        """Read a peer's offer, now or when more have come; return the peers with data that is no longer needed."""
        raise NotImplementedError

    def wait(self) -> None:
        """Block until the result is there and this rank's tensors may be written; raises PeerLostError."""
        self._transport.wait_for(self)

    def parts(self, full: torch.Tensor, piece: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return each rank's range of 1-D `full`, as views; `piece` may overlap this rank's range only."""
        op, size = self.record.op, piece.numel()
        given = (full, piece)
        flat = all(one.is_contiguous() and one.device == CPU and one.dim() == 1 for one in given)
        if not flat or full.numel() != self.world * size:
            found = (f"shape {tuple(one.shape)}, strides {one.stride()} on {one.device}" for one in given)
            raise UsageError(
                f"{op}: expected contiguous 1-D tensors on the CPU, a full one of {self.world} ranks' elements and a "
                f"shard; found {' and '.join(found)}"
            )
        parts = full.view(self.world, size).unbind()
        start, end = full.data_ptr(), full.data_ptr() + full.nbytes
        if size and piece.data_ptr() < end and piece.data_ptr() + piece.nbytes > start:
            own = parts[self.rank]
            if piece.data_ptr() != own.data_ptr() or piece.dtype != own.dtype:
                raise UsageError(
                    f"{op}: the shard of rank {self.rank} overlaps the full tensor at byte {piece.data_ptr() - start}; "
                    f"it may only be the rank's own range, at byte {own.data_ptr() - start}"
                )
        return parts


class _Gather(Exchange):
    def __init__(self, transport: IntraNodeTransport, pairs: Sequence[Pair], record: Record) -> None:
        super().__init__(transport, pairs, record)
        self._places = []
        for full, shard in pairs:
            if full.dtype != shard.dtype:
                raise UsageError(f"all_gather: full is {full.dtype} and shard is {shard.dtype}; they must be the same")
            parts = self.parts(full, shard)
            if parts[self.rank].data_ptr() != shard.data_ptr():
                parts[self.rank].copy_(shard)
            self._places.append(parts)
        self.addresses = [shard.data_ptr() for _, shard in pairs]

    def accept(self, peer: int, process: int, addresses: Sequence[int]) -> list[int]:
        for parts, address in zip(self._places, addresses, strict=True):
            read_tensor(process, address, parts[peer])
        return [peer]


class _Reduction(Exchange):
    """Reduce-scatter: each peer's range for this rank is read and added, in rank order, after all offers."""

    def __init__(self, transport: IntraNodeTransport, pairs: Sequence[Pair], record: Record, accumulate: bool) -> None:
        super().__init__(transport, pairs, record)
        self._accumulate = accumulate
        self._own = [self.parts(full, out)[self.rank] for out, full in pairs]
        for out, full in pairs:
            if not (out.is_floating_point() and full.is_floating_point()):
                raise UsageError(f"reduce_scatter: needs floating dtypes; found out {out.dtype} and full {full.dtype}")
        self.addresses = [full.data_ptr() for _, full in pairs]
        self._offers: dict[int, tuple[int, Sequence[int]]] = {}
        self.scratch = transport.scratch(pairs, accumulate)

    def accept(self, peer: int, process: int, addresses: Sequence[int]) -> list[int]:
        self._offers[peer] = (process, addresses)
        if len(self._offers) < self.world - 1:
            return []
        for number, (out, full) in enumerate(self._pairs):
            self._add_up(number, out, full)
        return list(self._offers)

    def _add_up(self, number: int, out: torch.Tensor, full: torch.Tensor) -> None:
        """Form one sum, in `out` unless the sum is added to `out`, or `out` holds one of its terms."""
        separate = _sums_separately(out, full, self._accumulate)
        size = min(CHUNK, out.numel())
        read, sums = self.scratch[0].view(full.dtype)[:size], self.scratch[1].view(out.dtype)[: size * separate]
        for start in range(0, out.numel(), CHUNK):
            target, own = out[start : start + CHUNK], self._own[number][start : start + CHUNK]
            total = sums[: target.numel()] if separate else target
            first: torch.Tensor | None = None
            for rank in range(self.world):
                if rank == self.rank:
                    term = own
                else:
                    # The first term is read to where the sum will be, unless it has another dtype.
                    term = total if rank == 0 and total.dtype == full.dtype else read[: target.numel()]
                    process, addresses = self._offers[rank]
                    offset = (self.rank * out.numel() + start) * full.dtype.itemsize
                    read_tensor(process, addresses[number] + offset, term)
                if rank == 0:
                    first = term if total.dtype == full.dtype else total.copy_(term)
                elif first is not None:
                    torch.add(first, term, out=total)
                    first = None
                else:
                    total.add_(term)
            if self._accumulate:
                target.add_(total)
            elif separate:
                target.copy_(total)


def _sums_separately(out: torch.Tensor, full: torch.Tensor, accumulate: bool) -> bool:
    """Return True if a sum needs scratch memory: it is added to `out`, or `out` holds one of its terms."""
    return accumulate or share_memory(out, full)


class _Buffers(native.Backend):
    """Allocates the buffers of reductions of `world` ranks, without any exchange.

    They have chunks of terms and of sums, and are kept because repeated allocation would fragment the host's memory.
    """

    world: int
    _chunks: Sequence[torch.Tensor] = ()

    def scratch(self, pairs: Sequence[Pair], accumulate: bool) -> list[torch.Tensor]:
        device = pairs[0][0].device if pairs else CPU
        chunks = list(self._chunks) or [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2)]
        terms = [_bytes(out.numel(), full.dtype) for out, full in pairs]
        sums = [_bytes(out.numel(), out.dtype) for out, full in pairs if _sums_separately(out, full, accumulate)]
        for number, sizes in enumerate((terms, sums)):
            if chunks[number].numel() < (size := max(sizes, default=0)):
                chunks[number] = torch.empty(size, dtype=torch.uint8, device=device)
        self._chunks = chunks
        return chunks

    def received(self, sent: int, *, accumulate: bool = False) -> int:
        return min(sent // self.world, CHUNK * torch.float32.itemsize) * (1 + accumulate)

    def planned(self, world: int) -> native.Backend:
        return planned_buffers(world)


def planned_buffers(world: int) -> native.Backend:
    """Return a backend that allocates the buffers of a transport, for memory plans."""
    planned = _Buffers()
    planned.world = world
    return planned


def _bytes(numel: int, dtype: torch.dtype) -> int:
    size = min(CHUNK, numel) * dtype.itemsize
    return size + -size % torch.float64.itemsize


# -- the transport -----------------------------------------------------------------------------------------------------


class IntraNodeTransport(_Buffers, native.TorchBackend):
    """Shared-memory transport of a group, and its exchanges in flight; `backend` runs other collectives."""

    transport = "memory"

    def __init__(
        self,
        backend: native.TorchBackend,
        group: dist.ProcessGroup,
        processes: Sequence[int],
        sockets: dict[int, socket.socket],
    ) -> None:
        super().__init__(backend.groups, backend.world, ordered=True)
        self.rank = dist.get_rank(group)
        self._limit = timeout_of(group, CPU)
        self._processes = list(processes)
        self._sockets = sockets
        self._peer_of = {connection.fileno(): peer for peer, connection in sockets.items()}
        self._poll = select.poll()
        for connection in sockets.values():
            connection.setblocking(False)
            self._poll.register(connection.fileno(), select.POLLIN)
        self._changed = threading.Condition()
        self._polling = False
        self._under_way: dict[int, Exchange] = {}
        self._early: dict[int, dict[int, Sequence[int]]] = {}
        self._unsent: dict[int, deque[bytes]] = {peer: deque() for peer in sockets}
        self._gone: set[int] = set()
        self._failure: PeerLostError | None = None
        self._busy = threading.Event()
        weakref.finalize(self, self._busy.set)
        weakref.finalize(self, _hang_up, sockets).atexit = False  # peers may still be reading then
        self._thread = threading.Thread(
            target=_serve_idle, args=(weakref.ref(self), self._busy), name="shardwise-intra-node", daemon=True
        )
        self._thread.start()
        _open.add(self)
        atexit.unregister(_settle_all)
        atexit.register(_settle_all)

    def all_gather(self, pairs: Sequence[Pair], record: Record) -> Exchange:
        return self._launch(_Gather(self, pairs, record))

    def reduce_scatter(self, pairs: Sequence[Pair], accumulate: bool, record: Record) -> Exchange:
        return self._launch(_Reduction(self, pairs, record, accumulate))

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
        """Block until an exchange is complete, and serve all others meanwhile."""
        deadline = Deadline(self._limit)
        with self._changed:
            while not exchange.completed:
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
        """Return True if an exchange must still be waited for; raise if it cannot complete, or too late."""
        if exchange.completed:
            return False
        limit: timedelta | None = None
        missing = sorted((exchange.unread | exchange.unreceipted) & self._gone)
        if exchange.failure is not None:
            peer, cause = exchange.failure
        elif missing:
            peer, cause = missing[0], ConnectionResetError("the process has closed its local socket")
        elif deadline.over():
            # A rank that has not launched is nearer to the cause than one that has not read.
            peer, cause = min(exchange.unread or exchange.unreceipted), TimeoutError("the limit is over")
            limit = deadline.limit
        else:
            return True
        self._failure = PeerLostError(f"{exchange.record.op}: rank {peer} of the group has left or does not answer")
        self._failure.peer, self._failure.timed_out = peer, limit is not None
        self._failure.__cause__ = cause
        self._disconnect()  # the others then end their waits
        raise self._failure

    def _listen(self, deadline: Deadline) -> None:
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
        try:
            try:
                message = self._sockets[peer].recv(_MESSAGE_BYTES)
            except ConnectionResetError:  # raised once, before the messages that the peer had sent until then
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
            # Because autograd's modes are per thread, and an activation or an inference tensor may be summed.
            with torch.inference_mode():
                read = exchange.accept(peer, self._processes[peer], addresses)
        except Exception as error:  # such as of a process that has ended since its offer
            exchange.failure = (peer, error)  # `wait()` raises it, because this may be another thread
            return
        receipt = _HEADER.pack(_RECEIPT, exchange.tag)
        for reader in read:
            exchange.unread.discard(reader)
            self._send(reader, receipt)
        self._retire(exchange)

    def _retire(self, exchange: Exchange) -> None:
        if exchange.completed and self._under_way.get(exchange.tag) is exchange:
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
                waiting.clear()  # the peer has gone; its earlier messages can still be read
                break
            else:
                waiting.popleft()
        interest = select.POLLIN | (select.POLLOUT if waiting else 0)
        if peer not in self._gone and not self._polling:
            self._poll.modify(self._sockets[peer].fileno(), interest)

    def serve(self) -> bool:
        """Read offers, unless another thread does; return False when the transport is closed."""
        with self._changed:
            if not self._polling:
                self._read()
            if not self._under_way:
                self._busy.clear()
            return bool(self._sockets)

    def settle(self, limit: timedelta) -> None:
        """Let peers finish reading this rank's data, within a limit."""
        with self._changed:
            self._listen_while(lambda: any(e.unreceipted - self._gone for e in self._under_way.values()), limit)

    def _listen_while(self, waiting: Callable[[], bool], limit: timedelta) -> None:
        deadline = Deadline(limit)
        self._read()
        while waiting() and not deadline.over():
            self._listen(deadline)

    def _disconnect(self) -> None:
        for peer in list(self._sockets):
            self._lose(peer)
            self._sockets.pop(peer).close()

    def close(self) -> None:
        """Close the sockets: ranks that wait for this one from now on get an error."""
        with self._changed:
            # A peer without its receipts, which a full socket has not taken yet, would report this rank as lost.
            self._listen_while(lambda: any(self._unsent.values()), _LEAVING)
            self._disconnect()
            self._under_way, self._early, self._chunks = {}, {}, ()
        self._busy.set()  # wakes the thread
        self._thread.join()
        _open.discard(self)


def _hang_up(sockets: dict[int, socket.socket]) -> None:
    while sockets:
        sockets.popitem()[1].close()


def _serve_idle(reference: weakref.ref[IntraNodeTransport], busy: threading.Event) -> None:
    going_on = True
    while going_on:
        busy.wait()
        time.sleep(_IDLE_S)
        transport = reference()
        going_on = transport is not None and transport.serve()
        del transport


def connect(backend: native.TorchBackend, group: dist.ProcessGroup, name: str) -> native.TorchBackend:
    """Return the shared-memory transport of a Gloo group; `backend` if ranks cannot read each other (all ranks call).

    Raises:
        UsageError: SHARDWISE_TRANSPORT requires memory, which is not possible, or has an unknown value.
    """
    wish = os.environ.get(VARIABLE, "")
    found = _connect(backend, group, wanted=wish in ("", "memory"))
    if wish not in ("", "memory", "messages"):
        raise UsageError(f'{VARIABLE}={wish!r} is not known; use "memory", "messages", or leave it unset')
    if not isinstance(found, str):
        return found
    if wish == "memory":
        raise UsageError(f"{VARIABLE}=memory, but the ranks cannot read each other's memory: {found}")
    if dist.get_rank(group) == 0:
        _log.info("%s: ranks exchange data through sockets, not memory: %s", name, found)
    return backend


def _connect(backend: native.TorchBackend, group: dist.ProcessGroup, *, wanted: bool) -> IntraNodeTransport | str:
    """Return the transport, or the reason against it."""
    with contextlib.ExitStack() as until_connected:
        proof = torch.tensor(list(secrets.token_bytes(_PROOF_BYTES)), dtype=torch.uint8, device=CPU)
        listener = _listener() if wanted and _process_vm_readv() is not None else None
        card: dict[str, Any] = {}
        if listener is not None:
            until_connected.enter_context(listener)
            allow_siblings()
            card = {
                "machine": _machine(),
                "process": os.getpid(),
                "socket": listener.getsockname().decode("latin-1"),
                "address": proof.data_ptr(),
                "proof": bytes(proof.tolist()).hex(),
            }
        cards = _gathered(group, card)
        if not all(cards):
            return f"{VARIABLE}=messages, or the system has no process_vm_readv or no Unix sockets"
        if len({card["machine"] for card in cards}) > 1:
            return "they are on several machines or in several containers"
        if not all(_gathered(group, all(_readable(card) for card in cards))):
            return "the system does not allow it (ptrace restrictions or a seccomp filter)"
        assert listener is not None
        sockets = _call_all(dist.get_rank(group), cards, listener)
        if not all(_gathered(group, sockets is not None)):
            _hang_up(sockets or {})
            return "not all of them could connect to each other"
        assert sockets is not None
        return IntraNodeTransport(backend, group, [card["process"] for card in cards], sockets)


def _machine() -> str:
    """Return a text that differs between machines, and between containers with separate processes or sockets."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return " ".join([boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))])


def _listener() -> socket.socket | None:
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind("")  # an unused name of the abstract namespace
        listener.listen(_BACKLOG)
    except (OSError, AttributeError):
        return None
    return listener


def _gathered(group: dist.ProcessGroup, value: Any) -> list[Any]:
    """Return a small JSON value of each rank."""
    text = json.dumps(value).encode()
    assert len(text) <= _CARD_BYTES, text
    own = torch.tensor(list(text.ljust(_CARD_BYTES)), dtype=torch.uint8, device=CPU)
    rows = torch.zeros(dist.get_world_size(group), _CARD_BYTES, dtype=torch.uint8, device=CPU)
    all_gather_single(rows.view(-1), own, group=group)
    return [json.loads(bytes(row)) for row in rows.tolist()]


def _readable(card: dict[str, Any]) -> bool:
    seen = torch.zeros(_PROOF_BYTES, dtype=torch.uint8, device=CPU)
    try:
        read_tensor(card["process"], card["address"], seen)
    except OSError:
        return False
    return bytes(seen.tolist()).hex() == card["proof"]


def _call_all(rank: int, cards: Sequence[dict[str, Any]], listener: socket.socket) -> dict[int, socket.socket] | None:
    """Return a socket to each other rank, or None: it connects to lower ranks, and accepts higher ones.

    Any process of the machine may connect. The kernel identifies it; connections of other jobs are closed unread.
    """
    found: dict[int, socket.socket] = {}
    ranks = {card["process"]: peer for peer, card in enumerate(cards)}
    deadline = Deadline(_CONNECTING)
    try:
        for peer in range(rank):
            connection = found[peer] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            # The kernel waits until the listener has room. With a limit of Python's own it would refuse at once.
            limit = _TIME.pack(*divmod(int(_CONNECTING.total_seconds() * 1e6), 10**6))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            connection.connect(cards[peer]["socket"].encode("latin-1"))
            if _caller(connection) != cards[peer]["process"]:
                raise PermissionError(f"rank {peer} listens under another process number")
        while len(found) < len(cards) - 1:
            if deadline.over():
                raise TimeoutError("no rank has called")
            listener.settimeout((deadline.left() or _CONNECTING).total_seconds())
            connection, _ = listener.accept()
            caller = ranks.get(_caller(connection), -1)
            if caller <= rank or caller in found:
                connection.close()
            else:
                found[caller] = connection
    except OSError:
        _hang_up(found)
        return None
    return found


def _caller(connection: socket.socket) -> int:
    """Return the process of this user at the other end of a connection, from the kernel; -1: none."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(credentials)
    return int(process) if user == os.getuid() else -1


def _settle_all() -> None:
    # After an uncaught exception the process ends soon, because its peers must see it gone.
    failed = getattr(sys, "last_value", None) is not None
    for transport in list(_open):
        if not failed:
            transport.settle(_LEAVING)
        transport.close()  # because its thread, if inside of torch at the interpreter's end, would abort the process
