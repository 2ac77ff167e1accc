"""The side channel: what ranks tell each other outside the order of collectives, when their data makes them differ.

A rank connects to another when it first asks it for something (`shardwise.comm.p2p`); ranks of a model that never
needs this open no connection. A small thread answers the peers. It needs nothing of the main thread, which is busy or
blocked elsewhere.

*fetch*: a rank needs a released unit once more than ever before in a pass (a shared layer met for the first time, a
router that picks a layer twice). The peers' threads answer with their shards, which do not change while any rank is
inside a pass, because no rank can step before all have finished their backward pass. Where the host does not wait for
collectives, the rank that asks may be a step ahead: a peer answers when its device has made that step. Until then the
thread answers other ranks: one of them may still be in the pass before, and the step waits for that rank. So the rank
that is behind all others is answered at once, whatever the number of micro-batches, and no ranks wait for each other. A
shard goes in chunks from where it lies to where it belongs; nothing is held twice.

*want*: a rank waits for a gather while reductions that come earlier in the agreed order are still to be launched here.
A peer that waits for such a reduction would never launch the gather: each would wait for the other. The message lets
its thread launch the gather on its behalf.

*end*, *where*: a rank is in `destroy()`, which gathers everything once more. All ranks meet there through the store,
where each compares itself with the first. A rank that waits for long tells the next few ranks that have not come, and
asks them which collectives they have launched: one that it has not launched itself will never be answered. The stall
watchdog runs until then, and names ranks that do not come.

On CUDA a shard is copied on a stream of its own, behind the mark that the shards are written: the stream of the pass
may wait for a gather that the rank which asks has still to launch.

What goes wrong in the thread is raised by the pass that it helps.
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

_ASK = struct.Struct("<BIqq")
"""Kind of a message, bytes of the text after it, and two numbers."""
_ANSWER = struct.Struct("<BQ")
"""Whether an answer is what was asked for, and its bytes."""
_FETCH, _WANT, _END, _WHERE = range(1, 5)
_REFUSED, _GIVEN = range(2)
_TEXT_BYTES = 4096
_SAID = 500
"""Characters of what a rank says of itself."""
_FIRST_POLL_S, _POLL_S = 0.001, 0.1
_DEVICE_S = 0.001
"""Seconds between two looks whether the device has written what a peer asks for."""
_GRACE_S = 0.2
"""How long a rank in `destroy()` waits for the others before it asks where they are."""
_MOST_ASKED = 8
"""How many of the ranks after its own a rank in `destroy()` asks."""
_PATIENCE_S = 2.0
"""How long a rank that an exception has stopped in a pass waits for ranks that may be on their way to `destroy()`."""
_LEAVING_S, _LEAVING_FAILED_S = 10.0, 0.5
_CHECK = "Did a rank get fewer batches, or skip a forward pass, backward() or step()?"

_open: weakref.WeakSet[SideChannel] = weakref.WeakSet()


class SideChannel(PeerShards):
    """Serves this rank's shards and wishes of others; see the module docstring.

    Args:
        comm: all ranks that step together.
        units: the sharded units.
    """

    def __init__(self, comm: Communicator, units: Sequence[Unit]) -> None:
        self.comm = comm
        self._on_want: Callable[[int, int], None] | None = None
        self._units = {unit.index: unit for unit in units}
        self._error: Exception | None = None
        self._asking = threading.Lock()
        self._changed = threading.Condition()
        self._ended: dict[int, dict[str, Any]] = {}
        self._own_end: dict[str, Any] | None = None
        self._told: set[int] = set()
        self._streams = streams_of(comm.device)
        self._stream = self._streams.current()
        self._copying = self._streams.make("answers")
        self._written: dict[int, Mark] = {}
        self._version = 0
        self._held: set[_Peer] = set()  # peers that have asked for values of a step still to be launched here
        self._awaited: set[_Peer] = set()  # peers that have asked for values of a step that the device still runs
        self.shards_written(self._streams.mark())
        self._selector = selectors.DefaultSelector()
        self._alarm, self._alarmed = socket.socketpair()
        self._selector.register(self._alarmed, selectors.EVENT_READ)
        self._links = p2p.P2PConnections(comm, self._selector, self._welcome)
        self._thread = threading.Thread(target=self._serve, name="shardwise-side-channel", daemon=True)
        self._thread.start()
        _open.add(self)
        atexit.unregister(_leave_all)
        atexit.register(_leave_all)

    # -- the pass --------------------------------------------------------------------------------------------------

    @override
    def on_want(self, handler: Callable[[int, int], None] | None) -> None:
        self._on_want = handler

    @override
    def raise_helper_error(self) -> None:
        """Note the stream of the calling thread, on which help is launched from now on.

        Raises:
            Exception: what has gone wrong in the thread that helps the peers.
        """
        self._stream = self._streams.current()
        if self._error is not None:
            raise self._error

    @override
    def shards_written(self, mark: Mark) -> None:
        """Note that the shards have new values, or will have when the device gets to a mark.

        All ranks call it as often: a fetch names the values that it means by their number.
        """
        for version in [version for version, earlier in self._written.items() if earlier.reached()]:
            del self._written[version]  # there is nothing to wait for any more
        self._written[self._version + 1] = mark
        with self._changed:
            self._version += 1
            if self._held:
                self._alarm.send(b"\1")

    @override
    def check_present(self) -> None:
        """Raise if a gather that is to be launched now would not be answered.

        Raises:
            DesyncError: a peer is in `destroy()`.
        """
        if self._ended and self._own_end is None:
            rank, end = min(self._ended.items())
            raise DesyncError(
                f"rank {self.comm.rank} of {self.comm.world} is about to gather parameters for another pass, and rank "
                f"{rank} {end['text']}. {_CHECK}"
            )

    @override
    def fetch(self, unit: Unit) -> None:
        """Fill the whole values of a unit (its memory is allocated) from all shards.

        Raises:
            PeerLostError: a peer has gone, or has not answered within the group's limit for a collective.
            DesyncError: the same, and it waits for this rank elsewhere.
        """
        begin = time.monotonic()
        deadline = begin + self.comm.timeout.total_seconds()
        ranks, here = unit.domain.ranks.members, self.comm.members
        holders = [(here.index(ranks[rank]), place) for rank, place in unit.domain.holders(unit.level)[1:]]
        with self._asking:
            for peer, _ in holders:
                with self._expecting(peer, f"fetch {unit.name!r}", begin):
                    self._ask(peer, _FETCH, unit.index, self._version, deadline=deadline)
            for section in unit.sections:
                section.bring_shard()
            for peer, place in holders:
                ranges = [section.layout.range_of(place, unit.level) for section in unit.sections]
                parts = [section.full[slice(*ends)] for section, ends in zip(unit.sections, ranges, strict=True)]
                with self._expecting(peer, f"fetch {unit.name!r}", begin):
                    self._receive_parts(peer, parts, deadline)

    @override
    def want(self, number: int, place: int) -> None:
        """Tell the peers that backward pass `number` waits for the gather at `place` of its order."""
        self._tell(_WANT, number, place)

    # -- the end ---------------------------------------------------------------------------------------------------

    @override
    def end_together(self, where: str, phase: str, *, cut_short: bool) -> str:
        """Wait until all ranks have called this; return what keeps them from going on together, or nothing.

        Args:
            where: what this rank is doing, for the others' errors.
            phase: in which phase of a pass it is.
            cut_short: an exception is on its way through this rank, which may have left a pass.

        Raises:
            PeerLostError: a peer has gone, or has not come within the group's limit for a collective.
        """
        if self.comm.device.type == "cuda" and not cut_short:
            torch.cuda.synchronize(self.comm.device)  # what has been launched here has been launched everywhere
        own = {"text": where[:_SAID], "launched": self.comm.launched, "phase": phase}
        with self._changed:
            self._own_end = own
        # Not in the ledger: nothing is exchanged. The stall watchdog shows it.
        now = time.perf_counter()
        record = Record(
            time.monotonic_ns(), "meeting", self.comm.name, 0, 0, "destroy()", user_line(), now, kind="end",
            members=self.comm.members,
        )  # fmt: skip
        with waiting(record, now):
            return self._meet(own, cut_short=cut_short)

    def _meet(self, own: dict[str, Any], *, cut_short: bool) -> str:
        begin = time.monotonic()
        ending = _Ending(f"{self._links.name}/end", self.comm.rank, self.comm.world)
        ending.come(own)
        ahead: dict[int, float] = {}
        pause = _FIRST_POLL_S
        while not ending.all_have_come():
            word = ending.apart()
            if word is not None:
                return self._parted(*word)
            waited = time.monotonic() - begin
            if waited > _GRACE_S:
                try:
                    if waited > self.comm.timeout.total_seconds():
                        raise PeerLostError(f"{ending.count()} of {self.comm.world} ranks have come to destroy()")
                    why = self._look_after(ending, own, ahead, begin, cut_short=cut_short)
                except PeerLostError as error:
                    ending.part(str(error), lost=True)
                    raise
                if why is not None:
                    ending.part(why, lost=False)
                    return why
            time.sleep(pause)
            pause = min(2 * pause, _POLL_S)
        word = ending.apart()
        return "" if word is None else self._parted(*word)

    def _parted(self, text: str, lost: bool) -> str:
        """Return what keeps the ranks from going on together, as one of them has written it."""
        if lost:
            raise PeerLostError(text)
        return text

    def _look_after(
        self, ending: _Ending, own: dict[str, Any], ahead: dict[int, float], begin: float, *, cut_short: bool
    ) -> str | None:
        """Ask the next few ranks that have not come where they are; return why one of them will not, or None."""
        launched = own["launched"]
        for rank in ending.missing():
            if rank not in self._told:
                self._told.add(rank)
                deadline = begin + self.comm.timeout.total_seconds()
                with self._asking, contextlib.suppress(OSError):  # whoever has gone will be missed by what comes next
                    self._ask(rank, _END, text=json.dumps(own), deadline=deadline)
            found = self._where(rank, begin)
            if found["ended"] or not _is_ahead(found["launched"], launched):
                ahead.pop(rank, None)
            elif time.monotonic() - ahead.setdefault(rank, time.monotonic()) >= (_PATIENCE_S if cut_short else 0.0):
                return f"rank {self.comm.rank} {own['text']}, and rank {rank} {found['text']}. {_CHECK}"
        return None

    @override
    def close(self) -> None:
        """Stop answering."""
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
        """Stop answering because this process ends, which waits for that at most so many seconds."""
        # A thread that is still inside of torch when the interpreter goes would take the process down.
        self._stop(limit)

    def _stop(self, limit: float = _LEAVING_S) -> None:
        with contextlib.suppress(OSError):
            self._alarm.shutdown(socket.SHUT_RDWR)
        if self._thread is not threading.current_thread():
            self._thread.join(limit)

    # -- asking ----------------------------------------------------------------------------------------------------

    def _ask(self, peer: int, kind: int, first: int = 0, second: int = 0, text: str = "", *, deadline: float) -> None:
        data = text.encode()[:_TEXT_BYTES]
        connection = self._links.to(peer, deadline)
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        connection.sendall(_ASK.pack(kind, len(data), first, second) + data)

    def _tell(self, kind: int, first: int = 0, second: int = 0, text: str = "") -> None:
        """Send a message that has no answer to all peers; whoever has gone will be missed by what comes next."""
        deadline = time.monotonic() + self.comm.timeout.total_seconds()
        with self._asking:
            for peer in (rank for rank in range(self.comm.world) if rank != self.comm.rank):
                with contextlib.suppress(OSError):
                    self._ask(peer, kind, first, second, text, deadline=deadline)

    @contextlib.contextmanager
    def _expecting(self, peer: int, what: str, begin: float) -> Iterator[None]:
        """Turn an error of a connection inside into one that says who has not answered what."""
        with p2p.reaching(self.comm, peer, what, begin):
            try:
                yield
            except OSError:
                self._links.drop(peer)
                raise

    def _answered(self, peer: int, most: int, deadline: float) -> int:
        """Read the head of an answer; return its bytes, at most so many."""
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
        """Receive what follows into tensors, one after the other."""
        expected = sum(part.nbytes for part in parts)
        size = self._answered(peer, expected, deadline)
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
        """Ask a peer which collectives it has launched; see `_place`."""
        deadline = begin + self.comm.timeout.total_seconds()
        with self._asking, self._expecting(peer, "destroy()", begin):
            if time.monotonic() >= deadline:
                raise TimeoutError("the limit is over")
            self._ask(peer, _WHERE, deadline=deadline)
            data = bytearray(self._answered(peer, _TEXT_BYTES, deadline))
            p2p.receive(self._links.to(peer, deadline), memoryview(data), deadline)
            found = json.loads(data)
            assert isinstance(found, dict)
            return found

    # -- answering -------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        if self.comm.device.type == "cuda":
            torch.cuda.set_device(self.comm.device)  # the current device is a thread's own
        while True:
            for key, _ in self._selector.select(_DEVICE_S if self._awaited else self._links.patience()):
                if key.data is None:
                    if not self._alarmed.recv(CHUNK):
                        return  # this rank leaves
                    for peer in list(self._held):
                        self._held.discard(peer)
                        self._attend_to(peer)
                elif isinstance(key.data, _Peer):
                    self._attend_to(key.data)
                else:
                    key.data()
            for peer in list(self._awaited):
                self._awaited.discard(peer)
                self._attend_to(peer)
            self._links.expire()

    def _welcome(self, rank: int, connection: socket.socket) -> None:
        """A peer has connected, to ask something."""
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ, _Peer(rank, connection))

    def _attend_to(self, peer: _Peer) -> None:
        """Send what can be sent to a peer, or take what it asks."""
        try:
            sent = peer.flush()
            if sent and not peer.asks():
                sent = peer.flush()
            while sent and not self._holds(peer) and (asked := peer.asked()) is not None:
                self._answer(peer, *asked)
                sent = peer.flush()
        except OSError:
            self._drop(peer)  # it has gone; a pass that needs it will notice
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

    def _holds(self, peer: _Peer) -> bool:
        """Return whether a peer asks for values that are still to be written here, by the host or by the device.

        The thread waits for neither. The device may be in a step that a third rank has still to launch, and that rank
        may ask here for values of the step before.
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
        """Do what a message asks for."""
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
                handler = self._on_want
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
        """Where this rank is."""
        with self._changed:
            if self._own_end is not None:
                return {**self._own_end, "ended": True}
        # What has been launched is read first: what is said of a rank must not be older than that.
        launched = self.comm.launched
        open_ones = [record for record in self.comm.ledger.records() if record.finished is None]
        text = "is outside of collectives"
        if open_ones:
            text = f"is in {named(open_ones[-1])}" + (f" at {open_ones[-1].line}" if open_ones[-1].line else "")
        return {"text": text[:_SAID], "launched": launched, "ended": False}

    def _chunks(self, unit: Unit, version: int) -> Iterator[memoryview]:
        """Yield a unit's shards in chunks; each is no longer needed when the next one is asked for."""
        for section in unit.sections:
            with self._copying.use():
                shard = section.shard_loans.read(section.shard)
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


class _Ending:
    """The meeting of all ranks in `destroy()`, through the store; each rank makes a few requests.

    Args:
        key: prefix of its keys, of this meeting only.
        rank, world: this rank's place.
    """

    def __init__(self, key: str, rank: int, world: int) -> None:
        self._key, self._rank, self._world = key, rank, world
        store = default_store()
        assert store is not None  # through which the ranks have met
        self._store = store

    def come(self, own: dict[str, Any]) -> None:
        """Say that this rank is here, and compare it with the first that has come."""
        told = json.dumps([self._rank, own["text"], own["launched"], own["phase"]])
        rank, text, launched, phase = json.loads(self._store.compare_set(f"{self._key}/first", "", told))
        if (launched, phase) != (own["launched"], own["phase"]):
            self.part(
                f"rank {self._rank} {own['text']}, rank {rank} {text}, and they have not taken part in the same passes "
                f"until there. {_CHECK}",
                lost=False,
            )
        self._store.set(f"{self._key}/{self._rank}", "")
        if self._store.add(f"{self._key}/count", 1) == self._world:
            self._store.set(f"{self._key}/all", "")

    def all_have_come(self) -> bool:
        """Whether all ranks are here."""
        return bool(self._store.check([f"{self._key}/all"]))

    def count(self) -> int:
        """Return how many ranks are here."""
        return int(self._store.add(f"{self._key}/count", 0))

    def missing(self) -> list[int]:
        """Return those of the next few ranks that are not here."""
        following = [(self._rank + step) % self._world for step in range(1, min(_MOST_ASKED, self._world - 1) + 1)]
        return [rank for rank in following if not self._store.check([f"{self._key}/{rank}"])]

    def part(self, text: str, *, lost: bool) -> None:
        """Write why the ranks do not go on together; the first word stays."""
        self._store.compare_set(f"{self._key}/apart", "", json.dumps([text, lost]))

    def apart(self) -> tuple[str, bool] | None:
        """Return what a rank has written: why the ranks do not go on together, and whether a rank has gone."""
        if not self._store.check([f"{self._key}/apart"]):
            return None
        text, lost = json.loads(self._store.get(f"{self._key}/apart"))
        return str(text), bool(lost)


class _Peer:
    """The connection on which a peer is answered: what has come in and what is still to go out."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self.connection = connection
        self._inbox = b""
        self._outbox = memoryview(b"")
        self._more: Iterator[memoryview] = iter(())

    def asks(self) -> bool:
        """Take what has arrived; return whether that is anything.

        Raises:
            OSError: the peer has gone.
        """
        try:
            data = self.connection.recv(_ASK.size + _TEXT_BYTES)
        except BlockingIOError:
            return False
        if not data:
            raise ConnectionResetError("closed at the other end")
        self._inbox += data
        return True

    def version(self) -> int:
        """Return the number of the values that the next message asks for; 0 if it asks for none."""
        kind, _, _, second = _ASK.unpack_from(self._inbox) if len(self._inbox) >= _ASK.size else (0, 0, 0, 0)
        return int(second) if kind == _FETCH else 0

    def asked(self) -> tuple[int, int, int, bytes] | None:
        """Take the next message: its kind, two numbers and a text; None if it is not whole yet.

        Raises:
            UsageError: it is none.
        """
        if len(self._inbox) < _ASK.size:
            return None
        kind, size, first, second = _ASK.unpack_from(self._inbox)
        if size > _TEXT_BYTES:
            raise UsageError(f"rank {self.rank} has sent a message of {size} bytes; at most {_TEXT_BYTES} are allowed")
        if len(self._inbox) < _ASK.size + size:
            return None
        text = self._inbox[_ASK.size : _ASK.size + size]
        self._inbox = self._inbox[_ASK.size + size :]
        return kind, first, second, text

    def give(self, size: int, chunks: Iterator[memoryview]) -> None:
        """Answer with so many bytes."""
        self._outbox, self._more = memoryview(_ANSWER.pack(_GIVEN, size)), chunks

    def refuse(self, reason: str) -> None:
        """Answer that there is no answer."""
        data = reason.encode()[:_TEXT_BYTES]
        self._outbox, self._more = memoryview(_ANSWER.pack(_REFUSED, len(data)) + data), iter(())

    def flush(self) -> bool:
        """Send what the connection takes now; return whether that is everything."""
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
    """Return the memory of a contiguous CPU tensor, which must outlive it. (`Tensor.numpy` would fix its size.)"""
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _leave_all() -> None:
    # Leaving may take a while, in which peers may give up waiting for this rank.
    publish_end()
    # After an exception that nobody has caught the peers must see this process gone, and it does not linger.
    limit = _LEAVING_S if getattr(sys, "last_value", None) is None else _LEAVING_FAILED_S
    for channel in list(_open):
        channel.leave(limit)
