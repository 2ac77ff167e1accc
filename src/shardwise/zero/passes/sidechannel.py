"""Side channel: point-to-point messages outside the order of collectives, for ranks that take different branches.

A rank connects to a peer at its first message (`shardwise.comm.p2p`); most models open no connection. A thread answers
peers, independently of the main thread. The pass of this rank raises the thread's errors.

*fetch*: a rank needs a resharded unit once more than in any pass before (a shared layer, a router that picks a layer
twice). Threads of the peers send their shards in chunks, without a second copy. Shards do not change while any rank is
in a pass, because no rank steps before all have ended backward. If the host does not wait for collectives, the fetching
rank may be a step ahead. A peer answers it when its device has made that step, and answers other ranks meanwhile: the
step may wait for a rank in the pass before. Ranks never wait for each other, for any number of micro-batches.

*want*: a rank waits for an all-gather before it has launched earlier reductions. A peer that waits for such a reduction
would never launch the all-gather; the peer's thread launches it.

*end*, *where*: a rank is in `destroy()`, which all-gathers all units. All ranks meet there through the store, and
compare themselves with the first. After a while a rank reports to the next few missing ranks, and requests the
collectives that they have launched: a collective that only they have launched will never end.

On CUDA, a separate stream copies shards, after the event of their last write, because the stream of the pass may wait
for an all-gather that the fetching rank launches later.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import selectors
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from typing_extensions import override

from shardwise.comm import p2p
from shardwise.comm.communicator import Communicator
from shardwise.comm.desync import named, publish_end
from shardwise.comm.ledger import Record, user_line, waiting
from shardwise.compat import default_store
from shardwise.device.streams import Mark, streams_of
from shardwise.errors import DesyncError, PeerLostError, UsageError
from shardwise.zero.passes.peer_shards import PeerShards
from shardwise.zero.units.unit import Unit

CHUNK = 1 << 20
"""Bytes of a shard that are copied and sent at a time."""

_REQUEST = struct.Struct("<BIqq")
"""Kind of a message, bytes of the text after it, and two numbers."""
_ANSWER = struct.Struct("<BQ")
"""Status of an answer, and its bytes."""
_FETCH, _WANT, _END, _WHERE = range(1, 5)
_REFUSED, _GIVEN = range(2)
_TEXT_BYTES = 4096
_TEXT_CHARACTERS = 500
"""Characters of a rank's description of itself."""
_FIRST_POLL_S, _POLL_S = 0.001, 0.1
_DEVICE_S = 0.001
"""Seconds between two queries of an event that an answer waits for."""
_GRACE_S = 0.2
"""Seconds that a rank in `destroy()` waits before it requests the state of missing ranks."""
_MOST_REQUESTED = 8
"""Number of following ranks whose state a rank in `destroy()` requests."""
_PATIENCE_S = 2.0
"""Seconds that a rank which an exception has stopped in a pass waits for ranks on their way to `destroy()`."""
_LEAVING_S, _LEAVING_FAILED_S = 10.0, 0.5
_CHECK = "Did a rank get fewer batches, or skip a forward pass, backward() or step()?"

_open: weakref.WeakSet[SideChannel] = weakref.WeakSet()


class SideChannel(PeerShards):
    """Serves shards and requests of peers; see the module docstring. `comm` has all ranks that step together."""

    def __init__(self, comm: Communicator, units: Sequence[Unit]) -> None:
        self.comm = comm
        # The thread keeps neither the units nor the pass of an engine that is dropped without `destroy()`.
        self._on_want: weakref.WeakMethod[Callable[[int, int], None]] | None = None
        self._units = weakref.WeakValueDictionary({unit.index: unit for unit in units})
        self._error: Exception | None = None
        self._requesting = threading.Lock()
        self._changed = threading.Condition()
        self._ended: dict[int, dict[str, Any]] = {}
        self._own_end: dict[str, Any] | None = None
        self._reported: set[int] = set()
        self._streams = streams_of(comm.device)
        self._stream = self._streams.current()
        self._copying = self._streams.make("answers")
        self._written: dict[int, Mark] = {}
        self._version = 0
        self._held: set[_Peer] = set()  # peers that fetch values of a step still to be launched here
        self._awaited: set[_Peer] = set()  # peers that fetch values of a step that the device still runs
        self.shards_written(self._streams.mark())
        self._selector = selectors.DefaultSelector()
        self._alarm, self._alarmed = socket.socketpair()
        self._selector.register(self._alarmed, selectors.EVENT_READ)
        self._links = p2p.P2PConnections(comm, self._selector, self._on_connected)
        self._thread = threading.Thread(target=self._serve, name="shardwise-side-channel", daemon=True)
        self._thread.start()
        weakref.finalize(units[-1], self.leave, 0.0).atexit = False
        _open.add(self)
        atexit.unregister(_leave_all)
        atexit.register(_leave_all)

    # -- the pass --------------------------------------------------------------------------------------------------

    @override
    def on_want(self, handler: Callable[[int, int], None] | None) -> None:
        self._on_want = None if handler is None else weakref.WeakMethod(handler)

    @override
    def raise_helper_error(self) -> None:
        """Record the stream for all-gathers of the helper thread, and raise the thread's error, if any."""
        self._stream = self._streams.current()
        if self._error is not None:
            raise self._error

    @override
    def shards_written(self, mark: Mark) -> None:
        """Record that the shards have new values when the device reaches an event.

        All ranks call it equally often: a fetch names the version of the values.
        """
        for version in [version for version, earlier in self._written.items() if earlier.reached()]:
            del self._written[version]  # written
        self._written[self._version + 1] = mark
        with self._changed:
            self._version += 1
            if self._held:
                self._alarm.send(b"\1")

    @override
    def check_present(self) -> None:
        """Raise DesyncError if a peer is in `destroy()` and would not take part in an all-gather."""
        if self._ended and self._own_end is None:
            rank, end = min(self._ended.items())
            raise DesyncError(
                f"rank {self.comm.rank} of {self.comm.world} is about to gather parameters for another pass, and rank "
                f"{rank} {end['text']}. {_CHECK}"
            )

    @override
    def fetch(self, unit: Unit) -> None:
        """Fill the unsharded values of a unit, whose memory is allocated, from the shards of all ranks.

        Raises PeerLostError if a peer is lost or silent for the group's timeout; DesyncError if it waits elsewhere.
        """
        begin = time.monotonic()
        deadline = begin + self.comm.timeout.total_seconds()
        ranks, here = unit.domain.ranks.members, self.comm.members
        holders = [(here.index(ranks[rank]), place) for rank, place in unit.domain.holders(unit.level)[1:]]
        with self._requesting:
            for peer, _ in holders:
                with self._naming_errors(peer, f"fetch {unit.name!r}", begin):
                    self._send(peer, _FETCH, unit.index, self._version, deadline=deadline)
            for section in unit.sections:
                section.bring_shard()
            for peer, place in holders:
                ranges = [section.layout.range_of(place, unit.level) for section in unit.sections]
                parts = [section.full[slice(*ends)] for section, ends in zip(unit.sections, ranges, strict=True)]
                with self._naming_errors(peer, f"fetch {unit.name!r}", begin):
                    self._receive_parts(peer, parts, deadline)

    @override
    def want(self, number: int, place: int) -> None:
        self._send_all(_WANT, number, place)

    # -- the end ---------------------------------------------------------------------------------------------------

    @override
    def end_together(self, where: str, phase: str, *, cut_short: bool) -> str:
        """Wait until all ranks call; return why the ranks cannot go on together ("" if they can).

        `where` is this rank's activity, for errors of other ranks; `phase` that of the pass. `cut_short`: an exception
        here may have interrupted a pass. Raises PeerLostError if a peer is lost or late by the group's timeout.
        """
        if self.comm.device.type == "cuda" and not cut_short:
            torch.cuda.synchronize(self.comm.device)  # all ranks have launched the same collectives
        own = {"text": where[:_TEXT_CHARACTERS], "launched": self.comm.launched(), "phase": phase}
        with self._changed:
            self._own_end = own
        # No data is exchanged, so the record is shown by the stall watchdog but is not in the ledger.
        now = time.perf_counter()
        record = Record(
            time.monotonic_ns(), "meeting", self.comm.name, 0, 0, "destroy()", user_line(), now, kind="end",
            members=self.comm.members,
        )  # fmt: skip
        with waiting(record, now):
            return self._rendezvous(own, cut_short=cut_short)

    def _rendezvous(self, own: dict[str, Any], *, cut_short: bool) -> str:
        begin = time.monotonic()
        ending = _Rendezvous(f"{self._links.name}/end", self.comm.rank, self.comm.world)
        ending.arrive(own)
        ahead: dict[int, float] = {}
        pause = _FIRST_POLL_S
        while not ending.all_have_come():
            published = ending.published_reason()
            if published is not None:
                return self._checked_reason(*published)
            waited = time.monotonic() - begin
            if waited > _GRACE_S:
                try:
                    if waited > self.comm.timeout.total_seconds():
                        raise PeerLostError(f"{ending.count()} of {self.comm.world} ranks have come to destroy()")
                    why = self._check_missing(ending, own, ahead, begin, cut_short=cut_short)
                except PeerLostError as error:
                    ending.publish(str(error), lost=True)
                    raise
                if why is not None:
                    ending.publish(why, lost=False)
                    return why
            time.sleep(pause)
            pause = min(2 * pause, _POLL_S)
        published = ending.published_reason()
        return "" if published is None else self._checked_reason(*published)

    def _checked_reason(self, text: str, lost: bool) -> str:
        if lost:
            raise PeerLostError(text)
        return text

    def _check_missing(
        self, ending: _Rendezvous, own: dict[str, Any], ahead: dict[int, float], begin: float, *, cut_short: bool
    ) -> str | None:
        """Request the state of the next few missing ranks; return why one of them will not come, or None."""
        launched = own["launched"]
        for rank in ending.missing():
            if rank not in self._reported:
                self._reported.add(rank)
                deadline = begin + self.comm.timeout.total_seconds()
                with self._requesting, contextlib.suppress(OSError):  # a lost peer is detected by the next request
                    self._send(rank, _END, text=json.dumps(own), deadline=deadline)
            found = self._where(rank, begin)
            if found["ended"] or not _is_ahead(found["launched"], launched):
                ahead.pop(rank, None)
            elif time.monotonic() - ahead.setdefault(rank, time.monotonic()) >= (_PATIENCE_S if cut_short else 0.0):
                return f"rank {self.comm.rank} {own['text']}, and rank {rank} {found['text']}. {_CHECK}"
        return None

    @override
    def close(self) -> None:
        _open.discard(self)
        self._stop()
        self._links.close()
        self._alarm.close()
        self._alarmed.close()
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()

    def leave(self, limit: float) -> None:
        """End the thread at the exit of the process, which waits at most `limit` seconds."""
        # A thread inside of torch at interpreter shutdown would crash the process.
        self._stop(limit)

    def _stop(self, limit: float = _LEAVING_S) -> None:
        with contextlib.suppress(OSError):
            self._alarm.shutdown(socket.SHUT_RDWR)
        if self._thread is not threading.current_thread():
            self._thread.join(limit)

    # -- requests --------------------------------------------------------------------------------------------------

    def _send(self, peer: int, kind: int, first: int = 0, second: int = 0, text: str = "", *, deadline: float) -> None:
        data = text.encode()[:_TEXT_BYTES]
        connection = self._links.to(peer, deadline)
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        connection.sendall(_REQUEST.pack(kind, len(data), first, second) + data)

    def _send_all(self, kind: int, first: int = 0, second: int = 0, text: str = "") -> None:
        """Send a message without an answer to all peers; later requests detect lost peers."""
        deadline = time.monotonic() + self.comm.timeout.total_seconds()
        with self._requesting:
            for peer in (rank for rank in range(self.comm.world) if rank != self.comm.rank):
                with contextlib.suppress(OSError):
                    self._send(peer, kind, first, second, text, deadline=deadline)

    @contextlib.contextmanager
    def _naming_errors(self, peer: int, what: str, begin: float) -> Iterator[None]:
        with p2p.reaching(self.comm, peer, what, begin):
            try:
                yield
            except OSError:
                self._links.drop(peer)
                raise

    def _read_header(self, peer: int, most: int, deadline: float) -> int:
        """Read the header of an answer; return its bytes, at most `most`."""
        connection, head = self._links.to(peer, deadline), bytearray(_ANSWER.size)
        p2p.receive(connection, memoryview(head), deadline)
        given, size = _ANSWER.unpack(head)
        if given == _REFUSED and size <= _TEXT_BYTES:
            reason = bytearray(size)
            p2p.receive(connection, memoryview(reason), deadline)
            raise ConnectionAbortedError(f"rank {peer} has answered rank {self.comm.rank}: {reason.decode()}")
        if given != _GIVEN or size > most:
            raise ConnectionAbortedError(f"rank {peer} has answered {size} bytes of kind {given}; at most {most} fit")
        return int(size)

    def _receive_parts(self, peer: int, parts: Sequence[torch.Tensor], deadline: float) -> None:
        expected = sum(part.nbytes for part in parts)
        size = self._read_header(peer, expected, deadline)
        if size != expected:
            raise ConnectionAbortedError(f"rank {peer} has answered {size} bytes; expected {expected}")
        connection = self._links.to(peer, deadline)
        for part in parts:
            if part.device.type == "cpu":
                p2p.receive(connection, _bytes_of(part), deadline)
                continue
            flat = part.view(torch.uint8)
            for start in range(0, flat.numel(), CHUNK):
                chunk = bytearray(min(CHUNK, flat.numel() - start))
                p2p.receive(connection, memoryview(chunk), deadline)
                flat[start : start + len(chunk)].copy_(torch.frombuffer(chunk, dtype=torch.uint8))

    def _where(self, peer: int, begin: float) -> dict[str, Any]:
        deadline = begin + self.comm.timeout.total_seconds()
        with self._requesting, self._naming_errors(peer, "destroy()", begin):
            if time.monotonic() >= deadline:
                raise TimeoutError("the limit is over")
            self._send(peer, _WHERE, deadline=deadline)
            data = bytearray(self._read_header(peer, _TEXT_BYTES, deadline))
            p2p.receive(self._links.to(peer, deadline), memoryview(data), deadline)
            found = json.loads(data)
            assert isinstance(found, dict)
            return found

    # -- answering -------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        if self.comm.device.type == "cuda":
            torch.cuda.set_device(self.comm.device)  # current devices belong to threads
        while True:
            for key, _ in self._selector.select(_DEVICE_S if self._awaited else self._links.patience()):
                if key.data is None:
                    if not self._alarmed.recv(CHUNK):
                        return  # this rank closes the channel
                    for peer in list(self._held):
                        self._held.discard(peer)
                        self._serve_peer(peer)
                elif isinstance(key.data, _Peer):
                    self._serve_peer(key.data)
                else:
                    key.data()
            for peer in list(self._awaited):
                self._awaited.discard(peer)
                self._serve_peer(peer)
            self._links.expire()

    def _on_connected(self, rank: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ, _Peer(rank, connection))

    def _serve_peer(self, peer: _Peer) -> None:
        try:
            sent = peer.flush()
            if sent and not peer.receive_bytes():
                sent = peer.flush()
            while sent and not self._postpones(peer) and (message := peer.next_message()) is not None:
                self._answer(peer, *message)
                sent = peer.flush()
        except OSError:
            self._drop(peer)  # a pass that needs the lost peer will detect it
            return
        except Exception as error:
            self._error = self._error or error
            self._drop(peer)
            return
        self._selector.modify(peer.connection, selectors.EVENT_READ if sent else selectors.EVENT_WRITE, peer)

    def _drop(self, peer: _Peer) -> None:
        self._held.discard(peer)
        self._awaited.discard(peer)
        self._selector.unregister(peer.connection)
        peer.connection.close()

    def _postpones(self, peer: _Peer) -> bool:
        """Return True if a peer fetches values that are still to be written here, by the host or by the device.

        The thread does not wait: the device may run a step that a third rank has to launch, which may fetch old values.
        """
        version = peer.version()
        with self._changed:
            if version > self._version:
                self._held.add(peer)  # `shards_written` wakes the thread
                return True
            written = self._written.get(version)
        if written is None or self._streams.block(written, timedelta(0)):
            return False
        self._awaited.add(peer)
        return True

    def _answer(self, peer: _Peer, kind: int, first: int, second: int, text: bytes) -> None:
        try:
            if kind == _FETCH:
                unit = self._units.get(first)
                if unit is None:
                    raise UsageError(
                        f"rank {peer.rank} has asked rank {self.comm.rank} for unit {first}; it has units "
                        f"{sorted(self._units)[:100]}"
                    )
                peer.give(sum(section.shard.nbytes for section in unit.sections), self._chunks(unit, second))
            elif kind == _WANT:
                handler = None if self._on_want is None else self._on_want()
                if handler is not None:
                    with self._stream.use():
                        handler(first, second)
            elif kind == _END:
                with self._changed:
                    self._ended[peer.rank] = json.loads(text)
                    self._changed.notify_all()
            elif kind == _WHERE:
                data = json.dumps(self._place()).encode()
                peer.give(len(data), iter([memoryview(data)]))
            else:
                raise UsageError(f"rank {peer.rank} has sent rank {self.comm.rank} a message of unknown kind {kind}")
        except Exception as error:
            self._error = self._error or error
            if kind in (_FETCH, _WHERE):
                peer.refuse(f"{type(error).__name__}: {error}")

    def _place(self) -> dict[str, Any]:
        with self._changed:
            if self._own_end is not None:
                return {**self._own_end, "ended": True}
        # Read first: the description of the rank must not be older.
        launched = self.comm.launched()
        open_ones = [record for record in self.comm.ledger.records() if record.finished is None]
        text = "is outside of collectives"
        if open_ones:
            text = f"is in {named(open_ones[-1])}" + (f" at {open_ones[-1].line}" if open_ones[-1].line else "")
        return {"text": text[:_TEXT_CHARACTERS], "launched": launched, "ended": False}

    def _chunks(self, unit: Unit, version: int) -> Iterator[memoryview]:
        """Yield a unit's shards in chunks; a chunk is valid until the next one is yielded."""
        for section in unit.sections:
            with self._copying.use():
                shard = section.tiered_shard.read(section.shard)
            if shard.device.type == "cpu":
                yield _bytes_of(shard)
                continue
            written = self._written.get(version)
            if written is not None:
                self._copying.wait(written)
            flat = shard.view(torch.uint8)
            chunk = torch.empty(min(CHUNK, flat.numel()), dtype=torch.uint8, device="cpu", pin_memory=True)
            for part in flat.split(CHUNK):
                with self._copying.use():
                    chunk[: part.numel()].copy_(part, non_blocking=True)
                    copied = self._streams.mark()
                if not self._streams.block(copied, self.comm.timeout):
                    raise TimeoutError(f"unit {unit.name!r} could not be copied within {self.comm.timeout}")
                yield _bytes_of(chunk[: part.numel()])


class _Rendezvous:
    """Rendezvous of all ranks in `destroy()`, through keys of the store with the unique prefix `key`."""

    def __init__(self, key: str, rank: int, world: int) -> None:
        self._key, self._rank, self._world = key, rank, world
        store = default_store()
        assert store is not None
        self._store = store

    def arrive(self, own: dict[str, Any]) -> None:
        """Report that this rank is here, and compare it with the first rank."""
        described = json.dumps([self._rank, own["text"], own["launched"], own["phase"]])
        rank, text, launched, phase = json.loads(self._store.compare_set(f"{self._key}/first", "", described))
        if (launched, phase) != (own["launched"], own["phase"]):
            self.publish(
                f"rank {self._rank} {own['text']}, rank {rank} {text}, and they have not taken part in the same passes "
                f"until there. {_CHECK}",
                lost=False,
            )
        self._store.set(f"{self._key}/{self._rank}", "")
        if self._store.add(f"{self._key}/count", 1) == self._world:
            self._store.set(f"{self._key}/all", "")

    def all_have_come(self) -> bool:
        return bool(self._store.check([f"{self._key}/all"]))

    def count(self) -> int:
        return int(self._store.add(f"{self._key}/count", 0))

    def missing(self) -> list[int]:
        following = [(self._rank + step) % self._world for step in range(1, min(_MOST_REQUESTED, self._world - 1) + 1)]
        return [rank for rank in following if not self._store.check([f"{self._key}/{rank}"])]

    def publish(self, text: str, *, lost: bool) -> None:
        """Publish the reason why the ranks cannot go on together; the first one is kept."""
        self._store.compare_set(f"{self._key}/apart", "", json.dumps([text, lost]))

    def published_reason(self) -> tuple[str, bool] | None:
        """Return the published reason, and whether a rank is lost; None: there is no reason."""
        if not self._store.check([f"{self._key}/apart"]):
            return None
        text, lost = json.loads(self._store.get(f"{self._key}/apart"))
        return str(text), bool(lost)


class _Peer:
    """Connection to a peer that sends requests, with received and unsent bytes."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self.connection = connection
        self._inbox = b""
        self._outbox = memoryview(b"")
        self._more: Iterator[memoryview] = iter(())

    def receive_bytes(self) -> bool:
        """Receive bytes; return False if none have arrived. Raises OSError if the peer is lost."""
        try:
            data = self.connection.recv(_REQUEST.size + _TEXT_BYTES)
        except BlockingIOError:
            return False
        if not data:
            raise ConnectionResetError("closed at the other end")
        self._inbox += data
        return True

    def version(self) -> int:
        """Return the version of the values that the next message fetches; 0 for other messages."""
        kind, _, _, second = _REQUEST.unpack_from(self._inbox) if len(self._inbox) >= _REQUEST.size else (0, 0, 0, 0)
        return int(second) if kind == _FETCH else 0

    def next_message(self) -> tuple[int, int, int, bytes] | None:
        """Return kind, two numbers and text of the next message; None: it is incomplete. UsageError: it is too long."""
        if len(self._inbox) < _REQUEST.size:
            return None
        kind, size, first, second = _REQUEST.unpack_from(self._inbox)
        if size > _TEXT_BYTES:
            raise UsageError(f"rank {self.rank} has sent a message of {size} bytes; at most {_TEXT_BYTES} are allowed")
        if len(self._inbox) < _REQUEST.size + size:
            return None
        text = self._inbox[_REQUEST.size : _REQUEST.size + size]
        self._inbox = self._inbox[_REQUEST.size + size :]
        return kind, first, second, text

    def give(self, size: int, chunks: Iterator[memoryview]) -> None:
        self._outbox, self._more = memoryview(_ANSWER.pack(_GIVEN, size)), chunks

    def refuse(self, reason: str) -> None:
        data = reason.encode()[:_TEXT_BYTES]
        self._outbox, self._more = memoryview(_ANSWER.pack(_REFUSED, len(data)) + data), iter(())

    def flush(self) -> bool:
        """Send bytes while the connection takes them; return True if all have been sent."""
        while True:
            if not self._outbox.nbytes:
                following = next(self._more, None)
                if following is None:
                    return True
                self._outbox = following
            try:
                sent = self.connection.send(self._outbox[:CHUNK])
            except BlockingIOError:
                return False
            self._outbox = self._outbox[sent:]


def _is_ahead(theirs: Sequence[int], own: Sequence[int]) -> bool:
    return any(there > here for there, here in zip(theirs, own, strict=True))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, which must outlive it. (`Tensor.numpy` would forbid resizing.)"""
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _leave_all() -> None:
    # Joining the thread may take a while, in which peers may time out waiting for this rank.
    publish_end()
    # After an uncaught exception the process exits soon: peers detect the loss.
    limit = _LEAVING_S if getattr(sys, "last_value", None) is None else _LEAVING_FAILED_S
    for channel in list(_open):
        channel.leave(limit)
