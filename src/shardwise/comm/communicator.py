"""Collectives of an engine over one group of ranks: numbered, recorded in the ledger, and launched by a backend.

The backend is torch.distributed (`native`), or shared memory between processes of one machine (`intra_node_transport`).
All tensors lie on the communicator's device, because a backend serves one type of device.

Each kind of collective (`groups.PURPOSES`) is a sequence of its own, because ranks may interleave all-gathers,
reduce-scatters and small sums differently. `shardwise.zero.passes.unshard` and `reduce` guarantee that all ranks launch
one kind in the same order. Scripts and checkpoints share the order of the small sums.
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
from contextlib import AbstractContextManager
from datetime import timedelta
from itertools import accumulate
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardwise.comm import groups, intra_node_transport, native
from shardwise.comm.coded import ranks_in_words
from shardwise.comm.desync import FailureReports, Position, position_of
from shardwise.comm.groups import PURPOSES, GroupCache
from shardwise.comm.ledger import WAITING, Ledger, Record, user_line
from shardwise.comm.native import Pair, Swap
from shardwise.comm.rendezvous import node
from shardwise.comm.setup import timeout_from_environment
from shardwise.compat import backend_of, timeout_of
from shardwise.device.clock import now
from shardwise.device.streams import Streams, streams_of
from shardwise.errors import DesyncError, PeerLostError, UsageError

_COUNTED = ("gather", "reduce", "replicate", "small", "explicit")
"""Kinds of which ranks at one place of the program have launched equally many."""
_IN_PASSES = ("gather", "reduce", "replicate")
"""Kinds that all parts of a group launch equally often; the number of small ones depends on values."""

_DIGEST, _LENGTH, _INLINE = 16, 4, 44
"""Bytes of an exchanged value's digest, of its length, and of a value that fits into the first row."""
_BROADCAST_COST = 4096  # bytes that take about as long to send as a broadcast takes to start
_MOST_BYTES = 4 << 20  # bytes of the device buffer in which long values are gathered
_ERROR_TEXT = 2000  # characters of an exception that other ranks show

MOST_GATHERED = 4096
"""Bytes up to which `all_reduce` gathers from all ranks; larger tensors are reduced and then gathered."""

T = TypeVar("T")


def head_of(text: bytes) -> bytes:
    """Return the row of an exchanged value: digest, length, and the value if it is short."""
    return hashlib.sha256(text).digest()[:_DIGEST] + len(text).to_bytes(_LENGTH, "little") + text[:_INLINE]


class Handle:
    """A launched collective (`pending`; None: complete), whose record is closed by the first `wait()`.

    `failures` makes the errors. The device of `streams` waits for the collective (None: the host
    waits). `scratch` are buffers that the collective has allocated; `wait()` releases them.
    """

    __slots__ = ("__weakref__", "_failures", "_ledger", "_pending", "_streams", "record", "scratch")

    def __init__(
        self,
        pending: native.PendingCollective | None,
        record: Record,
        ledger: Ledger,
        failures: FailureReports,
        streams: Streams | None,
    ) -> None:
        self._pending, self.record, self._ledger, self._failures = pending, record, ledger, failures
        self._streams = streams
        self.scratch: Sequence[torch.Tensor] = () if pending is None else pending.scratch

    @property
    def completed(self) -> bool:
        """Whether the transport has ended, without waiting; `wait` follows."""
        return self._pending is None or self._pending.completed

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
            here = position_of(self.record, time.perf_counter() - start)
            raise self._failures.explain(error, here) from error.__cause__
        finally:
            WAITING.pop(thread, None)
        self._pending, self.scratch = None, ()
        self._ledger.close(self.record, time.perf_counter() - start, self._streams)


def members_of(group: dist.ProcessGroup | None) -> list[int]:
    """Return the global ranks of a group, in its order; None: of the default group, if initialised."""
    if not (dist.is_available() and dist.is_initialized()):
        return [0]
    return dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)


class Communicator:
    """Collectives of one engine over one data-parallel group.

    Args:
        group: the process group; None: the default group. It is initialised, unless the world is one process.
        ledger: records the collectives.
        device: of all tensors.
        name: of the group in records.
        call: the call of all ranks that creates the communicator; empty: `name`.
        ordered: exchange ranges and add them in rank order instead of the backend's reductions (configuration key
            `deterministic_reduce`). On Gloo sums are always in rank order.
        near: ranks of one machine may read each other's memory.
        nodes: the node of each rank, as from `nodes()`; None: found with a collective when needed.
        alone: a group of this rank only.
        whole: the communicator that this one is a part of; equal parts share process groups.
        members: global ranks of the part, in order.

    Attributes:
        timeout: limit for one collective: that of `group`.
        imagined: the other ranks are fake (torch's fake backend, and `shardwise.comm.fake`).
        destroyed: `destroy` has been called.

    Raises:
        UsageError: the group has no backend for tensors of this device.
    """

    members: Sequence[int]
    timeout: timedelta
    imagined = destroyed = False
    _given: dist.ProcessGroup | None = None
    _cache: GroupCache | None = None
    _peers: Sequence[int] = ()
    _on_host = _is_part = False

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
        self.ledger, self.device, self.name = ledger, device, name
        initialised = dist.is_available() and dist.is_initialized()
        rank = dist.get_rank() if initialised else 0
        self.members = list(members) or ([rank] if alone else members_of(group))
        self.world, self.rank = len(self.members), list(self.members).index(rank)
        self._failures = FailureReports(ledger, self.members, self.rank)
        self._given = group
        self._ordered = ordered
        self._parts: list[Communicator] = []
        self._count = dict.fromkeys(PURPOSES, 0)
        self._nodes = nodes
        self._is_part = whole is not None
        self._backend = native.Backend()
        limit = whole.timeout if whole is not None else timeout_of(group, device) if initialised and not alone else None
        self.timeout = limit or timeout_from_environment()
        if self.sends:
            backend = _backend(group if whole is None else whole._given, device)
            self.imagined = backend == "fake"
            self._peers = self.members
            if whole is None and not self.imagined and self.world == dist.get_world_size():
                groups.enter(call or name, self.timeout)
            self._cache = cache = (whole and whole._cache) or GroupCache(self.timeout, backend, device)
            on_host = self._on_host = backend == "gloo"
            # Without a reference to this object, because process groups must end with the last reference to it.
            known = cache.of(tuple(self.members))
            self._backend = torch_backend = native.TorchBackend(known, self.world, ordered=ordered or on_host)
            if not on_host:
                # Now, because reductions are launched by threads that must not begin another collective.
                torch_backend.per_node = max(Counter(self.nodes()).values())
            elif near:
                self._backend = intra_node_transport.connect(torch_backend, self._group("explicit"), name)

    def _group(self, kind: str) -> dist.ProcessGroup:
        assert self._cache is not None, "destroyed"
        return self._cache.get(tuple(self.members), kind)

    def connect(self, *kinds: str) -> list[dist.ProcessGroup]:
        """Create the process groups of some kinds (all ranks call), because passes must not wait for them."""
        return [self._group(kind) for kind in kinds if self.sends]

    def allocate_in(self, allocating: Callable[[], AbstractContextManager[Any]]) -> None:
        """Allocate buffers of reductions inside the context that a function returns."""
        if isinstance(self._backend, native.TorchBackend):
            self._backend.allocating = allocating

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Group of these ranks, for scripts (None: default). All ranks of a part call: the first use creates it."""
        if not self._is_part:
            return self._given
        return self._group("explicit") if self._cache is not None else None

    def communicators(self) -> list[tuple[tuple[int, ...], str]]:
        """Return ranks and purpose of each process group created by this communicator and its parts."""
        return [] if self._cache is None else self._cache.made()

    def part(self, parts: Sequence[Sequence[int]], name: str, *, near: bool = False) -> Communicator:
        """Return a communicator of this rank's list of disjoint `parts` (all ranks call); `near`: shared memory.

        Without it ranks exchange messages, because a rank that waits in one shared-memory transport does not serve
        another one.
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

    def all_gather(self, pairs: Sequence[Pair], label: str, kind: str = "gather") -> Handle:
        """Launch the all-gather of each 1-D `shard` of S elements into its 1-D `full` of world * S elements.

        `shard` may be the view of `full` at this rank's place, which saves a copy.
        """
        size = 0
        for full, _ in pairs:
            size += full.nbytes
        sent = size * (self.world - 1) // self.world
        return self._launch("all_gather", size, sent, label, kind, self._backend.all_gather, pairs)

    def reduce_scatter(
        self, pairs: Sequence[Pair], label: str, *, accumulate: bool = False, kind: str = "reduce"
    ) -> Handle:
        """Launch the reduce-scatter of each (`out`, `full`) of `pairs`, in rank order, into this rank's range `out`.

        out = (out if accumulate else 0) + sum over ranks of full[rank's range], in the dtype of `out`.
        """
        size = 0
        for _, full in pairs:
            size += full.nbytes
        sent = size * (self.world - 1) // self.world
        narrow = any(full.dtype.itemsize == 2 for _, full in pairs)
        launch = self._backend.reduce_scatter
        return self._launch("reduce_scatter", size, sent, label, kind, launch, pairs, accumulate, narrow=narrow)

    def all_reduce(self, tensor: torch.Tensor, label: str, kind: str = "small") -> Handle:
        """Sum a small tensor over ranks in place, in rank order: the same bits on every rank.

        Each rank gathers a few numbers from all; the received bytes of larger tensors do not grow with the ranks.
        """
        size = tensor.nbytes
        if size <= MOST_GATHERED or not self.sends:
            sent, launch = size * (self.world - 1), self._backend.all_reduce
            return self._launch("all_reduce", size, sent, label, kind, launch, tensor)
        if not (self._on_host or self._ordered):
            return self._sum_at_once(tensor, label)
        flat = tensor.detach().reshape(-1)
        padded = torch.nn.functional.pad(flat, (0, -flat.numel() % self.world))
        done = self.sum_large(padded, label)
        tensor.detach().copy_(padded[: flat.numel()].view(tensor.shape))
        return done

    def sum_large(self, flat: torch.Tensor, label: str, out: torch.Tensor | None = None) -> Handle:
        """Sum a 1-D tensor over ranks into `out` (None: in place): the same bits on every rank (blocking).

        The length is a multiple of the number of ranks. On Gloo and under `ordered` a reduce-scatter in rank order and
        an all-gather form the sum, as in a stage 0 reduction: twice the tensor is sent, and an in-place sum allocates
        this rank's range. Half precision is summed in fp32 and rounded once. Other backends run one all-reduce.
        """
        if not (self._on_host or self._ordered or not self.sends):
            if out is not None:
                out.copy_(flat)
            done = self._sum_at_once(flat if out is None else out, label)
        else:
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
        launch, narrow = self._backend.sum_in_place, flat.dtype.itemsize == 2
        return self._launch("all_reduce", flat.nbytes, sent, label, "explicit", launch, flat, narrow=narrow)

    def broadcast(self, tensor: torch.Tensor, src: int, label: str, kind: str = "explicit") -> Handle:
        """Launch the broadcast of a tensor from group rank `src` to all ranks, in place."""
        sent = tensor.nbytes if self.rank == src else 0
        return self._launch("broadcast", tensor.nbytes, sent, label, kind, self._backend.broadcast, tensor, src)

    def all_to_all(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        label: str,
        kind: str = "explicit",
    ) -> Handle:
        """Launch the all-to-all of ranges of 1-D tensors, in rank order; sizes (elements) may differ or be zero."""
        return self.all_to_alls([(output, given, output_sizes, input_sizes)], label, kind)

    def all_to_alls(self, swaps: Sequence[Swap], label: str, kind: str = "explicit") -> Handle:
        """Launch several all-to-alls as one collective, where the backend can join them; arguments of `all_to_all`."""
        size = sum(given.nbytes for _, given, *_ in swaps)
        kept = sum(sizes[self.rank] * given.element_size() for _, given, _, sizes in swaps)
        return self._launch("all_to_all", size, size - kept, label, kind, self._backend.all_to_all, swaps)

    def share_object(self, value: object, label: str, src: int = 0) -> object:
        """Return the JSON value of rank `src` on every rank (blocking, for set-up only)."""
        if self.sends and not self.imagined:
            own = json.dumps(value).encode() if self.rank == src else b""
            length = torch.tensor([len(own)], dtype=torch.int64, device=self.device)
            self.broadcast(length, src, label).wait()
            data = self._broadcast_bytes(own, src, int(length.item()), label)
            value = json.loads(own or data)
        return value

    def exchange(self, value: Any, label: str) -> list[Any]:
        """Return the JSON values of all ranks, in rank order (blocking). A tuple comes back as a list.

        Each rank first sends a row of fixed size. One rank sends each distinct long value. Equal values are one object.
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
        """Return long values by digest, each sent by one rank; the buffer on the device is bounded."""
        # The longest values are broadcast, the others gathered from all ranks; the split with the least cost is taken.
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
        everything = torch.zeros(self.world * width, dtype=torch.uint8, device=self.device)
        mine = everything[self.rank * width : (self.rank + 1) * width]
        if own:
            mine[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(self.device)
        size, pairs = everything.numel(), [(everything, mine)]
        self._launch("exchange", size, size - width, label, "explicit", self._backend.all_gather, pairs).wait()
        here = everything.cpu()
        return [ctypes.string_at(here.data_ptr() + rank * width, width) for rank in range(self.world)]

    def fingerprints(self, text: str, label: str) -> list[str]:
        """Return a digest of each rank's text, in rank order (one small collective)."""
        digest = hashlib.sha256(text.encode()).digest()[:_DIGEST]
        if not self.sends or self.imagined:
            return [digest.hex()] * self.world
        return [row.hex() for row in self._rows(digest, _DIGEST, label)]

    def together(self, what: str, work: Callable[[], T]) -> T:
        """Return the result of a function without collectives; if it raises on some ranks, others raise DesyncError."""
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
        """Return each rank's machine, in rank order (first call: a small collective). Fake ranks share one machine."""
        if self._nodes is None:
            self._nodes = self.exchange(node(), "nodes")
        return self._nodes

    def group_rank(self, rank: int) -> int:
        """Return the rank in this group of a global rank."""
        return 0 if self.world == 1 else list(self.members).index(rank)

    def barrier(self, label: str = "barrier") -> None:
        """Block until all ranks of the group have called."""
        sign = torch.zeros(1, dtype=torch.float32, device=self.device)
        self.all_reduce(sign, label).wait()
        sign.cpu()  # on CUDA only the stream has waited so far

    @functools.cached_property
    def waits_on_host(self) -> bool:
        """Whether `Handle.wait` blocks the host until the result is there; on NCCL the current stream waits."""
        return self._on_host or not self.sends

    @functools.cached_property
    def async_gathers(self) -> bool:
        """Whether all-gathers run on a CUDA stream of their own; on one rank they copy parameters from the host."""
        return not self.waits_on_host or (not self.sends and self.streams.beside)

    @functools.cached_property
    def sends(self) -> bool:
        """Whether there are other ranks; tests let a single rank send to itself."""
        return self.world > 1

    @functools.cached_property
    def streams(self) -> Streams:
        """The streams of the device."""
        return streams_of(self.device)

    @property
    def transport(self) -> str:
        """Transport of all-gathers and reduce-scatters: "memory", "messages", or "nccl"."""
        return self._backend.transport if self.waits_on_host else "nccl"

    def received(self, sent: int, *, accumulate: bool = False) -> int:
        """Return about how many bytes a reduction of `sent` bytes allocates for received values and their sums."""
        return self._backend.received(sent, accumulate=accumulate)

    def launched(self, kinds: Sequence[str] = _COUNTED) -> list[int]:
        """Return the launches of each kind, and in passes of parts: equal on ranks at one place of the program."""
        own = [self._count[kind] for kind in kinds]
        return own + [number for part in self._parts for number in part.launched(_IN_PASSES)]

    def destroy(self) -> None:
        """Destroy the process groups created by this communicator and its parts, but not the group given."""
        for part in self._parts:
            part.destroy()
        self._parts, self.destroyed = [], True
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
        narrow: bool = False,
    ) -> Handle:
        """Number a collective, open its record, and call `launch(*given, record)`; sizes in bytes."""
        ledger, turn = self.ledger, 0
        if self.sends:
            turn = self._count[kind]
            self._count[kind] = turn + 1
        else:
            kind = ""
        sent = sent if self.world > 1 else 0
        record = ledger.open(
            op,
            self.name,
            size,
            sent,
            label,
            ranks=self.world,
            members=self._peers,
            kind=kind,
            turn=turn,
            narrow=narrow,
        )
        streams = None if self.waits_on_host else self.streams
        if streams is not None and ledger.timed:
            record.begun = now(cuda=True)
        try:
            pending = launch(*given, record)
        except PeerLostError as error:
            raise self._failures.explain(error, position_of(record)) from error.__cause__
        if pending is None:
            ledger.close(record, 0.0)
        return Handle(pending, record, ledger, self._failures, streams)

    def explain(self, error: PeerLostError, what: str, waited: float) -> PeerLostError | DesyncError:
        """Add other ranks' places to an error of an exchange outside of this class, which took `waited` seconds."""
        return self._failures.explain(error, Position(what, line=user_line(), seconds=waited))


_MOST_VERSIONS = 4  # different versions that are compared
_MOST_DIFFERENCES = 5  # differences that the error lists


SAME_ARGUMENTS = "Every rank has to build the same model and read the same configuration; only data may differ."


def check_agreement(
    comm: Communicator,
    facts: Mapping[str, str],
    what: str = "initialize()",
    advice: str = SAME_ARGUMENTS,
) -> None:
    """Compare the arguments of all ranks, by name in one order (all ranks call).

    One small collective, and more if they differ: every rank then raises a DesyncError with the first differences.
    """
    if comm.world == 1:
        return
    given = comm.fingerprints(json.dumps(list(facts.items())), "agreement")
    if len(set(given)) > 1:
        raise difference(comm, facts, given, what, advice)


def difference(
    comm: Communicator,
    facts: Mapping[str, str],
    given: Sequence[str],
    what: str = "initialize()",
    advice: str = SAME_ARGUMENTS,
) -> DesyncError:
    """Return an error that names the differences (all ranks call); one rank sends each of the first versions."""
    versions: dict[int, dict[str, str]] = {}
    for rank in sorted(map(given.index, set(given)))[:_MOST_VERSIONS]:
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
        f"{what}: {who} not given the same as rank 0:\n"
        + "\n".join(lines[:_MOST_DIFFERENCES] or ["  the same in another order"])
        + more
        + f"\n{advice}"
    )


def _backend(group: dist.ProcessGroup | None, device: torch.device) -> str:
    backend = backend_of(group, device)
    if backend is None or (backend == "gloo" and device.type != "cpu"):
        raise UsageError(
            f"the process group ({dist.get_backend_config(group)}) has no backend for the engine's tensors on "
            f"{device}{', where Gloo is not supported' if backend else ''}. Start it with "
            'shardwise.init_distributed(), or with init_process_group("cpu:gloo,cuda:nccl") or "nccl".'
        )
    return backend
