"""The communicator numbers every collective of an engine, and writes it into the ledger before it is launched.

A backend launches it: torch.distributed (`shardwise.comm.native`), or on one machine a transport between processes that
read each other's memory (`shardwise.comm.intra_node_transport`).

Different kinds of collective (gathers, reductions, small sums) may be launched in different interleavings on different
ranks: each has a process group. Those of scripts and checkpoints ("explicit") share that of the small sums and are
launched in one order with them. Within one kind the order must be the same on all ranks; that is what
`shardwise.zero.passes.gather` and `shardwise.zero.passes.reduce` guarantee.

A backend serves one type of device: NCCL refuses tensors of the CPU. Every tensor handed in therefore lies on the
communicator's device, and what is made here is made there.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardwise.comm import groups, intra_node_transport, native
from shardwise.comm.desync import FailureReports, Position, position_of, ranks_in_words
from shardwise.comm.groups import PURPOSES, GroupCache
from shardwise.comm.ledger import WAITING, Ledger, Record, user_line
from shardwise.comm.rendezvous import node
from shardwise.comm.setup import timeout_from_environment
from shardwise.compat import backend_of, timeout_of
from shardwise.device.clock import now
from shardwise.device.streams import Streams, streams_of
from shardwise.errors import DesyncError, PeerLostError, UsageError

_UNCOUNTED = ("gather_on", "reduce_on")
"""Kinds of which ranks in one place may have launched different numbers, because threads launch them."""
_IN_PASSES = ("gather", "reduce", "replicate")
"""Kinds of which all parts of a group launch the same numbers; small ones of `exchange` depend on values."""

_DIGEST, _LENGTH, _INLINE = 16, 4, 44
"""Bytes of an exchanged value's digest, of its length, and of a value that needs no further collective."""
_BROADCAST_COST = 4096
"""Bytes that take about as long as the start of a broadcast."""
_MOST_BYTES = 4 << 20
"""Size of the buffer on the device in which long values are gathered."""
_ERROR_TEXT = 2000
"""Characters of an exception that other ranks show."""

MOST_GATHERED = 4096
"""Bytes of what `all_reduce` gathers from all ranks; larger tensors are reduced and then gathered."""

T = TypeVar("T")


def head_of(text: bytes) -> bytes:
    """Return the row of an exchanged value: digest, length, and the value if it is short."""
    return hashlib.sha256(text).digest()[:_DIGEST] + len(text).to_bytes(_LENGTH, "little") + text[:_INLINE]


class Handle:
    """A launched collective, whose record is closed by the first `wait()`.

    Args:
        pending: the collective; None: complete.
        record: of the ledger.
        ledger: which `record` is in.
        failures: makes the errors; None: there are no peers.
        streams: of a device that waits for the collective; None: the host does.

    Attributes:
        record: of the ledger.
        scratch: buffers that the collective has allocated; `wait()` gives them back.
    """

    __slots__ = ("__weakref__", "_failures", "_ledger", "_pending", "_streams", "record", "scratch")

    def __init__(
        self,
        pending: native.PendingCollective | None,
        record: Record,
        ledger: Ledger,
        failures: FailureReports | None = None,
        streams: Streams | None = None,
    ) -> None:
        self._pending, self.record, self._ledger, self._failures = pending, record, ledger, failures
        self._streams = streams
        self.scratch: Sequence[torch.Tensor] = () if pending is None else pending.scratch

    def wait(self) -> None:
        """Block until the result is there; later calls do nothing.

        Raises:
            PeerLostError: a rank has gone, or has not answered within the group's limit.
            DesyncError: the same, and the ranks wait for each other in different collectives.
        """
        pending = self._pending
        if pending is None:
            return
        start, thread = time.perf_counter(), threading.get_ident()
        WAITING[thread] = self.record, start
        try:
            pending.wait()
        except PeerLostError as error:
            if self._failures is None:
                raise
            here = position_of(self.record, time.perf_counter() - start)
            raise self._failures.explain(error, here) from error.__cause__
        finally:
            WAITING.pop(thread, None)
        self._pending, self.scratch = None, ()
        self._ledger.close(self.record, time.perf_counter() - start, self._streams)


def members_of(group: dist.ProcessGroup | None) -> list[int]:
    """Return the global numbers of the ranks of a group, in their order; None: the default group, if there is one."""
    if not (dist.is_available() and dist.is_initialized()):
        return [0]
    return dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)


class Communicator:
    """Collectives of one engine over one data-parallel group.

    Process groups are made at their first use (`shardwise.comm.groups.GroupCache`); a communicator and its parts share
    a cache, so that parts of the same ranks share groups.

    Args:
        group: the ranks that share the work, or None for the default group; must be initialised unless the world is one
            process.
        ledger: where the collectives are recorded.
        device: where the tensors of the collectives lie.
        name: name of the group in records.
        call: the call that makes it, in which all ranks have to be; empty: `name`.
        ordered: exchange pieces and add them in rank order instead of using the backend's reductions (config key
            `deterministic_reduce`). On Gloo sums are always in rank order.
        near: ranks of one machine may read each other's memory.
        nodes: names the node of each rank, as `nodes()` does; None: the ranks ask each other when it is needed.
        alone: of this rank only; needs no group.
        whole: the communicator of which this is a part.
        members: global numbers of the part's ranks.

    Attributes:
        timeout: limit for one collective: that of `group`.
        imagined: there are no other ranks (torch's fake backend, and `shardwise.comm.fake`).
        members: the global numbers of its ranks, in their order.

    Raises:
        UsageError: the group has no backend that can be used with tensors of this device.
    """

    members: Sequence[int]

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        ledger: Ledger,
        device: torch.device,
        *,
        name: str = "data_parallel",
        ordered: bool = False,
        near: bool = True,
        nodes: Sequence[str] | None = None,
        alone: bool = False,
        call: str = "",
        whole: Communicator | None = None,
        members: Sequence[int] = (),
    ) -> None:
        self.ledger = ledger
        self.device = device
        self.name = name
        initialised = not alone and dist.is_available() and dist.is_initialized()
        own = [dist.get_rank()] if dist.is_available() and dist.is_initialized() else [0]
        self.members = list(members) or (members_of(group) if initialised else own)
        self.world = len(self.members)
        self.rank = list(self.members).index(own[0])
        self._given = group
        self._ordered = ordered
        self._parts: list[Communicator] = []
        self._count = dict.fromkeys(PURPOSES, 0)
        self._nodes = nodes
        self._on_host = False
        self._peers: Sequence[int] = ()
        self._cache: GroupCache | None = None
        self._is_part = whole is not None
        self.imagined = False
        self._failures: FailureReports | None = None
        self._backend = native.Backend()
        limit = whole.timeout if whole is not None else timeout_of(group, device) if initialised else None
        self.timeout: timedelta = limit or timeout_from_environment()
        if self.sends:
            backend = _backend(group if whole is None else whole._given, device)
            self.imagined = backend == "fake"
            self._peers = self.members
            self._failures = FailureReports(ledger, self.members, self.rank)
            inherited = None if whole is None else whole._cache
            if whole is None and not self.imagined and self.world == dist.get_world_size():
                groups.enter(call or name, self.timeout)
            self._cache = cache = inherited or groups.GroupCache(self.timeout, backend, device)
            on_host = self._on_host = backend == "gloo"
            # Without a reference to this object, so that process groups are destroyed as soon as nothing refers to it.
            group_of = functools.partial(cache.get, tuple(self.members))
            self._backend = torch_backend = native.TorchBackend(group_of, self.world, ordered=ordered or on_host)
            if not on_host:
                # Now, because reductions are launched by threads that must not begin another collective.
                torch_backend.per_node = max(Counter(self.nodes()).values())
            elif near:
                self._backend = intra_node_transport.connect(torch_backend, self._group("explicit"), name)

    def _group(self, kind: str) -> dist.ProcessGroup:
        """Return the process group that carries a kind; the first time its ranks make it."""
        assert self._cache is not None, "destroyed"
        return self._cache.get(tuple(self.members), kind)

    def connect(self, *kinds: str) -> None:
        """Make the process groups that carry some kinds (all ranks call), so that no pass waits for that."""
        for kind in kinds if self.sends else ():
            self._group(kind)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The process group of these ranks, for collectives of a script; None: the default group.

        All its ranks call for that of a part: the first time they make it.
        """
        if not self._is_part:
            return self._given
        return self._group("explicit") if self._cache is not None else None

    def communicators(self) -> list[tuple[tuple[int, ...], str]]:
        """Return ranks and purpose of each process group that this communicator and its parts have made."""
        return [] if self._cache is None else self._cache.made()

    def run_of(self, size: int, name: str) -> Communicator:
        """Return a communicator of this rank and those next to it: runs of `size` ranks, one after the other.

        All ranks call; `destroy()` destroys it. Its ranks exchange messages, because a rank that waits in one transport
        through memory does not read offers of another.

        Args:
            size: divides the number of ranks.
            name: name of the group in records.
        """
        return self.part([range(first, first + size) for first in range(0, self.world, size)], name)

    def across_runs(self, size: int, name: str) -> Communicator:
        """Return a communicator of the ranks at this rank's place in all runs of `size` ranks; see `run_of`."""
        return self.part([range(place, self.world, size) for place in range(size)], name)

    def part(self, parts: Sequence[Sequence[int]], name: str, *, near: bool = False) -> Communicator:
        """Return a communicator of the ranks of that list which this rank is in; see `run_of`.

        Args:
            parts: ranks of this communicator; each is in one list.
            name: name of the group in records.
            near: ranks of one machine read each other's memory: worth its connections where much is waited for.
        """
        own = next(list(places) for places in parts if self.rank in places)
        part = Communicator(
            None,
            self.ledger,
            self.device,
            name=name,
            ordered=self._ordered,
            near=near,
            nodes=None if self._nodes is None else [self._nodes[place] for place in own],
            whole=self,
            members=[self.members[place] for place in own],
        )
        self._parts.append(part)
        return part

    def all_gather(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], label: str, kind: str = "gather"
    ) -> Handle:
        """Gather each 1-D `shard` of S elements into its 1-D `full` of world * S elements, without blocking.

        `shard` may be the view of `full` at this rank's place; then nothing is copied locally.
        """
        size = 0
        for full, _ in pairs:
            size += full.nbytes
        sent = size * (self.world - 1) // self.world
        return self._launch("all_gather", size, sent, label, kind, self._backend.all_gather, pairs)

    def reduce_scatter(
        self,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        label: str,
        *,
        accumulate: bool = False,
        kind: str = "reduce",
    ) -> Handle:
        """Reduce each `full` over ranks, in rank order, and keep this rank's range in `out`, without blocking.

        out = (out if accumulate else 0) + sum over ranks of full[rank's range], added up in the dtype of `out`.

        Args:
            pairs: `out` and `full` of each reduction.
            label: for the record.
            accumulate: add to `out` instead of replacing it.
            kind: with which collectives it is in one order.
        """
        size = 0
        for _, full in pairs:
            size += full.nbytes
        sent = size * (self.world - 1) // self.world
        return self._launch("reduce_scatter", size, sent, label, kind, self._backend.reduce_scatter, pairs, accumulate)

    def all_reduce(self, tensor: torch.Tensor, label: str, kind: str = "small") -> Handle:
        """Sum a small tensor over ranks in place, in rank order: the same bits on every rank.

        Of a few numbers every rank receives those of all. More numbers are summed as `sum_large` does it, so that what
        a rank receives does not grow with the number of ranks.
        """
        size = tensor.numel() * tensor.element_size()
        if size > MOST_GATHERED and self.sends:
            return self._all_reduce_large(tensor, label)
        return self._launch("all_reduce", size, size * (self.world - 1), label, kind, self._backend.all_reduce, tensor)

    def _all_reduce_large(self, tensor: torch.Tensor, label: str) -> Handle:
        if not (self._on_host or self._ordered):
            return self._sum_at_once(tensor, label)
        flat = tensor.detach().reshape(-1)
        padded = torch.nn.functional.pad(flat, (0, -flat.numel() % self.world))
        done = self.sum_large(padded, label)
        tensor.detach().copy_(padded[: flat.numel()].view(tensor.shape))
        return done

    def sum_large(self, flat: torch.Tensor, label: str, out: torch.Tensor | None = None) -> Handle:
        """Sum a 1-D tensor over ranks: the same bits on every rank (it blocks).

        On Gloo and under `ordered` each rank adds up a range in rank order and sends the result to the others, as a
        stage 0 reduction does: twice the tensor is sent and, in place, its range is held once more, on any number of
        ranks; half precision is summed in fp32 and rounded once. Other backends have one all-reduce of their own.

        Args:
            flat: its length is a multiple of the number of ranks.
            label: for the record.
            out: receives the sum, and `flat` stays what it is; None: `flat` does.
        """
        if not (self._on_host or self._ordered or not self.sends):
            if out is not None:
                out.copy_(flat)
            done = self._sum_at_once(flat if out is None else out, label)
            done.wait()
            return done
        length = flat.numel() // self.world
        half = flat.dtype in (torch.bfloat16, torch.float16)
        if out is None or half:
            own = torch.empty(length, dtype=torch.float32 if half else flat.dtype, device=flat.device)
        else:
            own = out[self.rank * length : (self.rank + 1) * length]
        self.reduce_scatter([(own, flat)], label, kind="explicit").wait()
        done = self.all_gather([(flat if out is None else out, own.to(flat.dtype))], label, kind="explicit")
        done.wait()
        return done

    def _sum_at_once(self, flat: torch.Tensor, label: str) -> Handle:
        sent = 2 * flat.nbytes * (self.world - 1) // self.world
        return self._launch("all_reduce", flat.nbytes, sent, label, "explicit", self._backend.sum_in_place, flat)

    def broadcast(self, tensor: torch.Tensor, src: int, label: str, kind: str = "explicit") -> Handle:
        """Copy a tensor from group rank `src` to all ranks, in place."""
        size = tensor.numel() * tensor.element_size()
        sent, launch = size if self.rank == src else 0, self._backend.broadcast if size else _nothing
        return self._launch("broadcast", size, sent, label, kind, launch, tensor, src)

    def all_to_all(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        label: str,
        kind: str = "explicit",
    ) -> Handle:
        """Send the r-th part of 1-D `given` to rank r and receive the r-th part of 1-D `output` from it.

        Args:
            output: receives; its parts lie in rank order, as those of `given`.
            given: is sent.
            output_sizes: elements of each part of `output`; they may differ and may be zero.
            input_sizes: elements of each part of `given`.
            label: for the record.
            kind: with which collectives it is in one order.
        """
        size = given.numel() * given.element_size()
        sent, launch = size - input_sizes[self.rank] * given.element_size(), self._backend.all_to_all
        return self._launch("all_to_all", size, sent, label, kind, launch, output, given, output_sizes, input_sizes)

    def share_object(self, value: object, label: str, src: int = 0) -> object:
        """Return rank `src`'s JSON-like `value` on every rank (set-up only: it blocks)."""
        if self.sends and not self.imagined:
            own = json.dumps(value).encode() if self.rank == src else b""
            length = torch.tensor([len(own)], dtype=torch.int64, device=self.device)
            self.broadcast(length, src, label).wait()
            data = self._broadcast_bytes(own, src, int(length.item()), label)
            value = json.loads(own or data)
        return value

    def exchange(self, value: Any, label: str) -> list[Any]:
        """Return the JSON values that all ranks have passed, in rank order (it blocks).

        A value comes back as JSON has it: a tuple as a list. Ranks first send a row of fixed size: digest, length, and
        the value if it is short. Of longer values one rank sends each that differs from the others, and one long value
        does not make the others long. Equal values are parsed once and are one object.
        """
        if not self.sends or self.imagined:
            return [value] * self.world
        own = json.dumps(value).encode()
        rows = self._rows(head_of(own), _DIGEST + _LENGTH + _INLINE, label)
        texts: dict[bytes, bytes] = {}
        long: dict[bytes, tuple[int, int]] = {}
        for rank, row in enumerate(rows):
            size = int.from_bytes(row[_DIGEST : _DIGEST + _LENGTH], "little")
            if size > _INLINE:
                long.setdefault(row[:_DIGEST], (rank, size))
            else:
                texts.setdefault(row[:_DIGEST], row[_DIGEST + _LENGTH :][:size])
        texts.update(self._long_texts(own, long, label))
        values = {digest: json.loads(text) for digest, text in texts.items()}
        return [values[row[:_DIGEST]] for row in rows]

    def _long_texts(self, own: bytes, senders: dict[bytes, tuple[int, int]], label: str) -> dict[bytes, bytes]:
        """Return long values by digest, each of which one rank sends; the buffer on the device is bounded.

        Args:
            own: this rank's value.
            senders: rank and size of each, by digest.
            label: for records.
        """
        # Of the longest values each is broadcast, and the others are gathered from all ranks: what takes the least.
        ordered = sorted(senders, key=lambda digest: (-senders[digest][1], senders[digest][0]))
        sizes = [senders[digest][1] for digest in ordered]
        broadcast = [0, *accumulate(size + _BROADCAST_COST for size in sizes)]
        cost = [one + self.world * size for one, size in zip(broadcast, [*sizes, 0], strict=True)]
        count = cost.index(min(cost))
        found = {digest: self._broadcast_bytes(own, *senders[digest], label) for digest in ordered[:count]}
        longest = sizes[count] if count < len(sizes) else 0
        width = min(longest, max(_INLINE, _MOST_BYTES // self.world))
        parts = [self._rows(own[at : at + width], width, label) for at in range(0, longest, width or 1)]
        for digest in ordered[count:]:
            rank, size = senders[digest]
            found[digest] = b"".join(part[rank] for part in parts)[:size]
        return found

    def _broadcast_bytes(self, own: bytes, src: int, size: int, label: str) -> bytes:
        data = torch.zeros(size, dtype=torch.uint8, device=self.device)
        if self.rank == src:
            data.copy_(torch.frombuffer(bytearray(own), dtype=torch.uint8))
        self.broadcast(data, src, label).wait()
        here = data.cpu()
        return ctypes.string_at(here.data_ptr(), size)

    def _rows(self, own: bytes, width: int, label: str) -> list[bytes]:
        """Return the bytes of all ranks, each filled up to the same length."""
        everything = torch.zeros(self.world * width, dtype=torch.uint8, device=self.device)
        mine = everything[self.rank * width : (self.rank + 1) * width]
        if own:
            mine[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(self.device)
        size, pairs = everything.numel(), [(everything, mine)]
        self._launch("exchange", size, size - width, label, "explicit", self._backend.all_gather, pairs).wait()
        here = everything.cpu()
        return [ctypes.string_at(here.data_ptr() + rank * width, width) for rank in range(self.world)]

    def fingerprints(self, text: str, label: str) -> list[str]:
        """Return a digest of each rank's text, in rank order, equal where texts are (one small collective)."""
        digest = hashlib.sha256(text.encode()).digest()[:_DIGEST]
        if not self.sends or self.imagined:
            return [digest.hex()] * self.world
        return [row.hex() for row in self._rows(digest, _DIGEST, label)]

    def together(self, what: str, work: Callable[[], T]) -> T:
        """Return what a function without collectives returns; if it raises on some ranks, all ranks raise.

        Args:
            what: is done, for the other ranks' error.
            work: the function.

        Raises:
            DesyncError: another rank has raised an exception.
            Exception: that of this rank.
        """
        error: Exception | None = None
        try:
            found = work()
        except Exception as raised:
            error = raised
        text = "" if error is None else f"{type(error).__name__}: {error}"[:_ERROR_TEXT]
        texts = self.exchange(text, "outcomes")
        if error is not None:
            raise error
        failed = [rank for rank, other in enumerate(texts) if other]
        if failed:
            raise DesyncError(
                f"{what}: {ranks_in_words(failed)} of {self.world} raised {texts[failed[0]]} This rank did not raise: "
                "ranks have to be given the same"
            )
        return found

    def nodes(self) -> Sequence[str]:
        """Return a name of each rank's node, in rank order (all ranks call; the first time it is a small collective).

        See `shardwise.comm.rendezvous.node`; of imagined ranks all share one.
        """
        if self._nodes is None:
            self._nodes = self.fingerprints(node(), "nodes")
        return self._nodes

    def group_rank(self, rank: int) -> int:
        """Translate a global rank into this group's."""
        return 0 if self.world == 1 else list(self.members).index(rank)

    def groups_of_ranks(self) -> dict[str, list[int]]:
        """Return the global numbers of the ranks of this communicator and its parts, by the name in records."""
        found = {self.name: list(self.members)}
        for part in self._parts:
            found.update(part.groups_of_ranks())
        return found

    def barrier(self, label: str = "barrier") -> None:
        """Block until every rank of the group is here."""
        sign = torch.zeros(1, device=self.device)
        self.all_reduce(sign, label).wait()
        sign.cpu()  # on CUDA only the stream has waited so far

    @functools.cached_property
    def waits_on_host(self) -> bool:
        """Whether `Handle.wait` returns when the result is there; NCCL's only makes the current stream wait."""
        return self._on_host or not self.sends

    @functools.cached_property
    def async_gathers(self) -> bool:
        """Whether all-gathers run on a CUDA stream of their own.

        On one rank an all-gather is a copy of parameters from the host: it too overlaps with computation.
        """
        return not self.waits_on_host or (not self.sends and self.streams.beside)

    @functools.cached_property
    def sends(self) -> bool:
        """Whether there are other ranks; tests have a single rank send to itself."""
        return self.world > 1

    @functools.cached_property
    def streams(self) -> Streams:
        """The streams of the device."""
        return streams_of(self.device)

    @property
    def transport(self) -> str:
        """How gathers and reductions reach other ranks: "memory", "messages", or "nccl"."""
        return self._backend.transport if self.waits_on_host else "nccl"

    def received(self, sent: int) -> int:
        """Return about how many bytes a reduction of `sent` bytes holds for what arrives from other ranks."""
        return self._backend.received(sent)

    @property
    def launched(self) -> list[int]:
        """How many collectives of each kind this rank has launched; two ranks in one place have the same numbers.

        Those of passes in its parts are among them.
        """
        return self._launched([kind for kind in PURPOSES if kind not in _UNCOUNTED])

    def _launched(self, kinds: Sequence[str]) -> list[int]:
        own = [self._count[kind] for kind in kinds]
        return own + [number for part in self._parts for number in part._launched(_IN_PASSES)]

    def destroy(self) -> None:
        """Destroy the process groups made by this communicator and its parts (not the group that it was given)."""
        for part in self._parts:
            part.destroy()
        self._parts = []
        self._backend.close()
        if self._cache is not None and not self._is_part:
            self._cache.close()
        self._cache = None

    def _launch(
        self,
        op: str,
        size: int,
        sent: int,
        label: str,
        kind: str,
        launch: Callable[..., native.PendingCollective | None],
        *given: Any,
    ) -> Handle:
        """Number a collective, open its record, and launch it; the handle closes the record.

        Args:
            op: name of the operation.
            size: bytes of the whole message.
            sent: bytes that this rank sends, if there are peers.
            label: for the record.
            kind: sequence of collectives that this one belongs to.
            launch: of the backend; gets `given` and the record.
            given: arguments of `launch`.
        """
        ledger, turn = self.ledger, 0
        if self.sends:
            turn = self._count[kind]
            self._count[kind] = turn + 1
        else:
            kind = ""
        sent = sent if self.world > 1 else 0
        record = ledger.open(op, self.name, size, sent, label, self.world, self._peers, kind, turn)
        streams = None if self.waits_on_host else self.streams
        if streams is not None and ledger.timed:
            record.begun = now(cuda=True)
        try:
            pending = launch(*given, record)
        except PeerLostError as error:
            assert self._failures is not None  # there are peers
            raise self._failures.explain(error, position_of(record)) from error.__cause__
        if pending is None:
            ledger.close(record, 0.0)
        return Handle(pending, record, ledger, self._failures, streams)

    def explain(self, error: PeerLostError, what: str, waited: float) -> PeerLostError | DesyncError:
        """Return an error that also says where the other ranks are, for exchanges outside of this class.

        Args:
            error: names the rank of the group that did not answer.
            what: what it was waited for in, in words that are the same on all ranks.
            waited: seconds.
        """
        if self._failures is None:
            return error
        return self._failures.explain(error, Position(what, line=user_line(), seconds=waited))


_MOST_VERSIONS = 4
"""Of what differs, so many are compared."""
_MOST_DIFFERENCES = 5
"""Differences that the error lists."""


def check_agreement(comm: Communicator, facts: Mapping[str, str]) -> None:
    """Compare what ranks were given; one small all-reduce, and more only if they differ (all ranks call).

    Args:
        comm: the ranks that have to agree.
        facts: what this rank was given: name of a fact to what it is, in the same order on all ranks.

    Raises:
        DesyncError: on every rank, if any rank's facts differ from rank 0's; the first differences are listed.
    """
    if comm.world == 1:
        return
    given = comm.fingerprints(json.dumps(list(facts.items())), "agreement")
    if len(set(given)) > 1:
        raise difference(comm, facts, given)


def difference(comm: Communicator, facts: Mapping[str, str], given: Sequence[str]) -> DesyncError:
    """Return an error that names what differs (all ranks call); one rank sends each of the first few versions.

    Args:
        comm: the ranks that have to agree.
        facts: see `check_agreement`.
        given: of each rank, what is equal where facts are.
    """
    senders: dict[str, int] = {}
    for rank, version in enumerate(given):
        senders.setdefault(version, rank)
    versions: dict[int, dict[str, str]] = {}
    for rank in list(senders.values())[:_MOST_VERSIONS]:
        versions[rank] = dict(comm.share_object(list(facts.items()), "agreement.facts", src=rank))  # type: ignore[call-overload]
    lines = [
        f"  {name}: "
        + ", ".join(f"{version.get(name, 'nothing')} on rank {rank}" for rank, version in versions.items())
        for name in dict.fromkeys(name for version in versions.values() for name in version)
        if len({version.get(name) for version in versions.values()}) > 1
    ]
    more = f"\n  and {len(lines) - _MOST_DIFFERENCES} more" if len(lines) > _MOST_DIFFERENCES else ""
    others = [rank for rank, version in enumerate(given) if version != given[0]]
    who = f"{ranks_in_words(others)} {'was' if len(others) == 1 else 'were'}"
    return DesyncError(
        f"initialize(): {who} not given the same as rank 0:\n"
        + "\n".join(lines[:_MOST_DIFFERENCES] or ["  the same in another order"])
        + more
        + "\nEvery rank has to build the same model and read the same configuration; only data may differ."
    )


def _nothing(*_: object) -> None:
    """Launch no collective."""


def _backend(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """Return the backend for the tensors of a device, or say what is wrong with the group."""
    backend = backend_of(group, device)
    if backend is None or (backend == "gloo" and device.type != "cpu"):
        raise UsageError(
            f"the process group ({dist.get_backend_config(group)}) has no backend for the engine's tensors on "
            f"{device}{', where Gloo is not supported' if backend else ''}. Start it with "
            'shardwise.init_distributed(), or with init_process_group("cpu:gloo,cuda:nccl") or "nccl".'
        )
    return backend
