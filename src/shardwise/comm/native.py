"""Collectives through torch.distributed, and the interface of backends.

A reduce-scatter forms sums in the dtype of the output (as a rule fp32), in one of two ways:

* exchange: an all-to-all brings each range to its owner in the dtype of the wire. The owner adds in rank order, with
  the same bits for any number of ranks.
* reduction: the backend's reduce-scatter, for which a narrower wire is widened first.

Gloo and `ordered` always exchange; other backends where dtypes differ and fewer bytes leave a node (`exchanges`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shardwise.comm.ledger import Record
from shardwise.compat import all_gather_single, launch_together, reduce_scatter_single, storage_users
from shardwise.errors import PeerLostError

Pair = tuple[torch.Tensor, torch.Tensor]
Swap = tuple[torch.Tensor, torch.Tensor, Sequence[int], Sequence[int]]
"""Of an all-to-all: output, input, and the numbers of elements that come from and go to each rank."""


class PendingCollective(Protocol):
    """A launched collective."""

    @property
    def scratch(self) -> Sequence[torch.Tensor]:
        """Buffers made for the collective; `wait()` releases them."""

    @property
    def completed(self) -> bool:
        """Whether the transport has ended, without waiting."""

    def wait(self) -> None:
        """Block until the result is there (on CUDA: make the current stream wait)."""


class Works:
    """Waits for `torch.distributed.Work` (None: on the current stream), then calls the functions of `finish`."""

    def __init__(
        self,
        works: Sequence[dist.Work | None],
        finish: Sequence[Callable[[], object]] = (),
        scratch: Sequence[torch.Tensor] = (),
    ) -> None:
        self._works, self._finish, self.scratch = works, finish, scratch

    @property
    def completed(self) -> bool:
        """Whether torch's collectives have ended; on a device this queries events."""
        return all(work is None or work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Wait (on CUDA: the current stream waits) and do the local rest; collectives' errors become PeerLostError."""
        for work in self._works:
            try:
                if work is not None:
                    work.wait()
            except RuntimeError as error:
                if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
                    raise  # an earlier error of the device, which this call is the first to report
                text = str(error).partition("\n")[0].partition(" This is typically")[0]
                lost = PeerLostError(f"a collective of torch.distributed has failed: {text}")
                lost.timed_out = "timed out" in text.lower()
                raise lost from error
        for function in self._finish:
            function()
        self._works = self._finish = self.scratch = ()


Users = Sequence[tuple[torch.Tensor, int]]
"""Tensors of a collective, and the number of references to the memory of each at the launch."""

_RELEASE_S = 0.25
"""Longest wait of the host for the references of a transport: its thread may have no core for a while."""


def users_of(*tensors: torch.Tensor) -> Users:
    """Return the users of CPU tensors; other devices, and torch without reference counts, have none."""
    return [(tensor, users) for tensor in tensors if tensor.is_cpu and (users := storage_users(tensor)) is not None]


def await_release(users: Users) -> None:
    """Wait until a collective that has ended no longer refers to its tensors.

    Because a thread of Gloo releases its references a little later, memory would otherwise outlive the collective.
    """
    end = time.monotonic() + _RELEASE_S
    for tensor, before in users:
        while (storage_users(tensor) or 0) > before and time.monotonic() < end:
            time.sleep(0)


class _Thread(threading.local):
    in_order = False


thread = _Thread()
"""`in_order`: collectives of this thread run on the current stream, because the caller waits for each at once."""


class Backend:
    """Interface of all backends, and the collectives of one rank without peers. Arguments are those of `Communicator`.

    A method returns a launched collective, or None if the collective is complete.
    """

    transport = "messages"

    def all_gather(self, pairs: Sequence[Pair], record: Record) -> PendingCollective | None:
        """Gather each 1-D shard into its 1-D tensor of all ranks, rank-major."""
        for full, shard in pairs:
            if full.data_ptr() != shard.data_ptr():
                full.copy_(shard)
        return None

    def reduce_scatter(self, pairs: Sequence[Pair], accumulate: bool, record: Record) -> PendingCollective | None:
        """Set (or add to) each `out` the sum over ranks of this rank's range of `full`."""
        for out, full in pairs:
            if accumulate:
                out.add_(full.to(out.dtype))
            elif out.data_ptr() != full.data_ptr():
                out.copy_(full)
        return None

    def all_reduce(self, tensor: torch.Tensor, record: Record) -> PendingCollective | None:
        """Sum a small tensor over ranks, in place: the same bits on every rank."""
        return None

    def sum_in_place(self, tensor: torch.Tensor, record: Record) -> PendingCollective | None:
        """Sum a tensor over ranks by one all-reduce of the backend: the same bits on every rank."""
        return None

    def broadcast(self, tensor: torch.Tensor, src: int, record: Record) -> PendingCollective | None:
        """Copy a tensor from group rank `src` to all ranks."""
        return None

    def all_to_all(self, swaps: Sequence[Swap], record: Record) -> PendingCollective | None:
        """Of each of `swaps`, send range r of the input to rank r and receive range r of the output from it."""
        for output, given, *_ in swaps:
            output.copy_(given)
        return None

    def scratch(self, pairs: Sequence[Pair], accumulate: bool) -> list[torch.Tensor]:
        """Return buffers as `reduce_scatter` allocates them, for memory plans."""
        return []

    def received(self, sent: int, *, accumulate: bool = False) -> int:
        """Return about how many bytes a reduction of `sent` bytes allocates for received values and their sums."""
        return 0

    def planned(self, world: int) -> Backend:
        """Return a backend that allocates the same buffers for a number of ranks without peers."""
        return Backend()

    def close(self) -> None:
        """Release resources other than process groups."""


class TorchBackend(Backend):
    """Collectives of torch.distributed; `ordered`: always in rank order; `per_node`: ranks on a node (None: all)."""

    def __init__(
        self, groups: Mapping[str, dist.ProcessGroup], world: int, *, ordered: bool, per_node: int | None = None
    ) -> None:
        self.groups, self.world, self._ordered = groups, world, ordered
        self.per_node = per_node or world
        self.allocating: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext

    def all_gather(self, pairs: Sequence[Pair], record: Record) -> PendingCollective:
        pairs = [(sendable(full), sendable(shard)) for full, shard in pairs if full.numel()]
        return Works(launch_together(all_gather_single, pairs, self.groups[record.kind], async_op=not thread.in_order))

    def reduce_scatter(self, pairs: Sequence[Pair], accumulate: bool, record: Record) -> PendingCollective:
        reductions: list[Pair] = []
        exchanged: list[Pair] = []
        sums: list[Callable[[], object]] = []
        scratch: list[torch.Tensor] = []
        for out, full in pairs:
            if not full.numel():
                continue
            rows, given, total = buffers = self._buffers(out, full, accumulate)
            for buffer in buffers:
                if buffer is not None:
                    scratch.append(buffer)
            if rows is not None:
                exchanged.append((rows, full))
                sum_up = sum_rows if self._ordered else sum_rows_at_once
                sums.append(functools.partial(sum_up, out, rows.view(self.world, -1), accumulate=accumulate))
                continue
            if total is not None:
                sums.append(functools.partial(out.add_, total))
            reductions.append((out if total is None else total, full if given is None else given))
        group, works = self.groups[record.kind], list[Any]()
        if reductions:
            works += launch_together(reduce_scatter_single, reductions, group, async_op=not thread.in_order)
        if exchanged:
            works += launch_together(dist.all_to_all_single, exchanged, group, async_op=not thread.in_order)
        return Works(works, sums, scratch)

    def _buffers(self, out: torch.Tensor, full: torch.Tensor, accumulate: bool) -> Buffers:
        with self.allocating():
            if self._ordered or exchanges(full.dtype, out.dtype, self.world, self.per_node):
                return torch.empty_like(full), None, None
            given = None if full.dtype is out.dtype else full.to(out.dtype)
            return None, given, torch.empty_like(out) if accumulate else None

    def all_reduce(self, tensor: torch.Tensor, record: Record) -> PendingCollective:
        gathered = torch.empty(self.world * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        works = launch_together(
            all_gather_single, [(gathered, tensor.reshape(-1))], self.groups[record.kind], async_op=not thread.in_order
        )

        def add_up() -> None:
            # One kernel for any number of ranks, whose order of summation depends on the shape only.
            tensor.copy_(gathered.view(self.world, -1).sum(0, dtype=tensor.dtype).view_as(tensor))

        return Works(works, [add_up])

    def sum_in_place(self, tensor: torch.Tensor, record: Record) -> PendingCollective:
        group = self.groups[record.kind]
        return Works(
            launch_together(
                lambda out, _, **how: dist.all_reduce(out, **how),
                [(tensor, tensor)],
                group,
                async_op=not thread.in_order,
            )
        )

    def broadcast(self, tensor: torch.Tensor, src: int, record: Record) -> PendingCollective:
        flat, group = tensor.contiguous(), self.groups[record.kind]
        pairs = [(sendable(flat), sendable(flat))] if flat.numel() else []
        works = launch_together(
            lambda out, _, **how: dist.broadcast(out, group_src=src, **how), pairs, group, async_op=not thread.in_order
        )
        return Works(works, [] if flat is tensor else [functools.partial(tensor.copy_, flat)])

    def all_to_all(self, swaps: Sequence[Swap], record: Record) -> PendingCollective:
        pairs = [(sendable(output), sendable(given)) for output, given, *_ in swaps]
        widths = [given.itemsize // sent.itemsize for (_, given, *_), (_, sent) in zip(swaps, pairs, strict=True)]
        sizes = iter(
            [
                ([width * size for size in received], [width * size for size in sent])
                for width, (_, _, received, sent) in zip(widths, swaps, strict=True)
            ]
        )

        def exchange(output: torch.Tensor, given: torch.Tensor, **how: Any) -> Any:
            return dist.all_to_all_single(output, given, *next(sizes), **how)

        return Works(launch_together(exchange, pairs, self.groups[record.kind], async_op=not thread.in_order))

    def scratch(self, pairs: Sequence[Pair], accumulate: bool) -> list[torch.Tensor]:
        made = [self._buffers(out, full, accumulate) for out, full in pairs if full.numel()]
        return [buffer for buffers in made for buffer in buffers if buffer is not None]

    def received(self, sent: int, *, accumulate: bool = False) -> int:
        return sent

    def planned(self, world: int) -> Backend:
        return TorchBackend(self.groups, world, ordered=self._ordered, per_node=self.per_node)


Buffers = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Of one reduction (None: not needed): rows received from all ranks; input in the dtype of the sum; sum to be added."""


_OF_BACKENDS = {
    torch.float32, torch.bfloat16, torch.float16, torch.float64,
    torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64,
}  # fmt: skip
"""Dtypes that Gloo and every version of NCCL send."""


def sendable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor, or its bytes if backends do not send its dtype."""
    return tensor if tensor.dtype in _OF_BACKENDS else tensor.detach().view(-1).view(torch.uint8)


CHUNK = 1 << 18
"""Elements that a CPU adds at a time: smaller chunks cost calls, larger ones leave the cache."""


def sum_rows(out: torch.Tensor, rows: torch.Tensor, *, accumulate: bool) -> None:
    """Sum 2-D `rows` from first to last into (or add to) 1-D `out`, in its dtype; may overwrite the first row.

    A device gets one kernel for each row, because the sum in rank order is promised to users: Gloo forms the same.
    """
    size = CHUNK if out.device.type == "cpu" else max(1, out.numel())
    for start in range(0, out.numel(), size):
        target = out[start : start + size]
        first, *others = rows[:, start : start + size].unbind()
        if not accumulate and others and first.dtype == out.dtype:
            total = torch.add(first, others.pop(0), out=target)
        elif not accumulate:
            total = target.copy_(first)
        else:
            total = first.to(out.dtype)
        for part in others:
            total.add_(part)
        if accumulate:
            target.add_(total)


def sum_rows_at_once(out: torch.Tensor, rows: torch.Tensor, *, accumulate: bool) -> None:
    """Sum rows as `sum_rows` by one kernel for any number of rows, whose order depends on the shape."""
    if accumulate:
        out.add_(rows.sum(0, dtype=out.dtype))
    elif len(rows) == 1:
        out.copy_(rows[0])
    else:
        torch.sum(rows, 0, dtype=out.dtype, out=out)


def exchanges(wire: torch.dtype, total: torch.dtype, world: int, per_node: int) -> bool:
    """Return True if ranges are exchanged, by the bytes that leave a node; False: widened and reduced by the backend.

    With M elements, W ranks and G of them on each node, an exchange sends G * M * (W - G) / W elements of the `wire`
    dtype from each node, the backend about M of the sum's dtype (`total`). For bf16, fp32 and 8 ranks a node the
    exchange sends twice as much between 2 nodes, and nearly four times between many. With up to 2 ranks a node, and
    within one node, it never sends more.
    """
    if wire is total:
        return False
    # The backend would round values of a wider dtype than its sum before the addition.
    fewer = per_node * (world - per_node) * wire.itemsize <= world * total.itemsize
    return fewer or wire.itemsize >= total.itemsize
