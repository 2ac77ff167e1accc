"""Communicator: the one door through which an engine's collectives go.

It chooses the algorithms for the backend (own point-to-point ones on Gloo, the backend's own on NCCL, none on one
rank), numbers every collective, and writes it into the ledger before it is launched.

Different kinds of collective (gathers, reductions, small sums) may be launched in different interleavings on different
ranks: on Gloo each kind has its own tags, on NCCL each kind has its own communicator. Within one kind the order must be
    the
same on all ranks; that is what `shardwise.zero.gather` and `shardwise.zero.reduce` guarantee.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from shardwise.comm import native
from shardwise.comm.ledger import Ledger, Record

KINDS = ("gather", "reduce", "replicate", "small", "explicit")
"""Independent sequences:
parameter gathers, gradient reductions, gathers of reduced gradients, small sums, and the rest.
"""

_TAGS_PER_KIND = 1 << 20


class Pending(Protocol):
    """What an algorithm returns: a launched collective."""

    scratch: Sequence[torch.Tensor]
    """Buffers that it has made for itself; `wait()` gives them back."""

    def wait(self) -> None:
        """Block until the result is there."""

    def is_completed(self) -> bool:
        """Whether `wait()` would return at once."""


class Handle:
    """A launched collective whose record is closed by the first `wait()`."""

    def __init__(self, pending: Pending | None, record: Record | None, ledger: Ledger) -> None:
        self._pending = pending
        self._record = record
        self._ledger = ledger

    @property
    def scratch(self) -> Sequence[torch.Tensor]:
        """Buffers that the collective has made for itself, as long as it is under way."""
        return () if self._pending is None else self._pending.scratch

    def is_completed(self) -> bool:
        """Whether `wait()` would return at once."""
        return self._pending is None or self._pending.is_completed()

    def wait(self) -> None:
        """Block until the result is there; later calls do nothing."""
        if self._pending is None:
            return
        start = time.perf_counter()
        self._pending.wait()
        self._pending = None
        if self._record is not None:
            self._ledger.close(self._record, time.perf_counter() - start)
            self._record = None


class Communicator:
    """Collectives of one engine over one data-parallel group.

    Args:
        group: the ranks that share the work, or None for the default group; must be initialised unless the world is one
            process.
        ledger: where the collectives are recorded.
        name: name of the group in records.
        ordered: on backends with their own reductions, exchange pieces and add them in rank order instead
            (config key `deterministic_reduce`). On Gloo sums are always in rank order.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        ledger: Ledger,
        *,
        name: str = "data_parallel",
        ordered: bool = False,
    ) -> None:
        self.ledger = ledger
        self.name = name
        self.user_group = group
        initialised = dist.is_available() and dist.is_initialized()
        self.world = dist.get_world_size(group) if initialised else 1
        self.rank = dist.get_rank(group) if initialised else 0
        self._ordered = ordered
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._own_groups: list[dist.ProcessGroup] = []
        self._count = dict.fromkeys(KINDS, 0)
        self._gloo = False
        if self.world > 1:
            backend = dist.get_backend(group)
            self._gloo = "gloo" in backend
            ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
            # On Gloo tags keep kinds apart, so one extra group is enough to keep clear of the user's own traffic.
            for kind in KINDS[:1] if self._gloo else KINDS[:4]:
                # Ranks outside of the group are elsewhere: they must not be needed to create it.
                part = self.world < dist.get_world_size()
                self._own_groups.append(dist.new_group(ranks, backend=backend, use_local_synchronization=part))
                self._groups[kind] = self._own_groups[-1]
            for kind in KINDS:
                self._groups.setdefault(kind, self._own_groups[-1])

    def all_gather(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], label: str, kind: str = "gather"
    ) -> Handle:
        """Gather each 1-D `shard` of S elements into its 1-D `full` of world * S elements, without blocking.

        `shard` may be the view of `full` at this rank's place; then nothing is copied locally.
        """
        size = sum(full.numel() * full.element_size() for full, _ in pairs)
        record = self._open("all_gather", size, size * (self.world - 1) // self.world, label)
        if self.world == 1:
            for full, shard in pairs:
                if full.data_ptr() != shard.data_ptr():
                    full.copy_(shard)
            return self._handle(None, record)
        group, tag = self._next(kind)
        if self._gloo:
            from shardwise.comm import gloo

            return self._handle(gloo.all_gather(list(pairs), group, tag), record)
        return self._handle(native.all_gather(pairs, group), record)

    def reduce_scatter(
        self,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        label: str,
        *,
        scale: float = 1.0,
        accumulate: bool = False,
    ) -> Handle:
        """Reduce each `full` over ranks, in rank order, and keep this rank's range in `out`, without blocking.

        out = (out if accumulate else 0) + scale * sum over ranks of full[rank's range], added up in the dtype of `out`.
        """
        size = sum(full.numel() * full.element_size() for _, full in pairs)
        record = self._open("reduce_scatter", size, size * (self.world - 1) // self.world, label)
        if self.world == 1:
            for out, full in pairs:
                total = full.to(out.dtype)
                if scale != 1.0:
                    total = total * scale
                if accumulate:
                    out.add_(total)
                elif out.data_ptr() != total.data_ptr():
                    out.copy_(total)
            return self._handle(None, record)
        group, tag = self._next("reduce")
        if self._gloo:
            from shardwise.comm import gloo

            return self._handle(gloo.reduce_scatter(list(pairs), group, tag, scale, accumulate), record)
        pending = native.reduce_scatter(pairs, group, scale=scale, accumulate=accumulate, ordered=self._ordered)
        return self._handle(pending, record)

    def all_reduce(self, tensor: torch.Tensor, label: str) -> Handle:
        """Sum a small tensor over ranks in place, in rank order: the same bits on every rank."""
        size = tensor.numel() * tensor.element_size()
        record = self._open("all_reduce", size, size * (self.world - 1), label)
        if self.world == 1:
            return self._handle(None, record)
        group, tag = self._next("small")
        if self._gloo:
            from shardwise.comm import gloo

            return self._handle(gloo.all_reduce_ordered(tensor, group, tag), record)
        return self._handle(native.all_reduce(tensor, group), record)

    def broadcast(self, tensor: torch.Tensor, src: int, label: str) -> Handle:
        """Copy a tensor from group rank `src` to all ranks, in place."""
        size = tensor.numel() * tensor.element_size()
        record = self._open("broadcast", size, size if self.rank == src else 0, label)
        if self.world == 1 or not tensor.numel():
            return self._handle(None, record)
        group, tag = self._next("explicit")
        if self._gloo:
            from shardwise.comm import gloo

            return self._handle(gloo.broadcast(tensor, src, group, tag), record)
        return self._handle(native.broadcast(tensor, src, group), record)

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], label: str) -> Handle:
        """Send `inputs[r]` to rank r and receive `outputs[r]` from it; sizes may differ and may be zero."""
        size = sum(tensor.numel() * tensor.element_size() for tensor in inputs)
        own = inputs[self.rank].numel() * inputs[self.rank].element_size()
        record = self._open("all_to_all", size, size - own, label)
        if self.world == 1:
            outputs[0].copy_(inputs[0])
            return self._handle(None, record)
        group, tag = self._next("explicit")
        if self._gloo:
            from shardwise.comm import gloo

            return self._handle(gloo.all_to_all_v(list(outputs), list(inputs), group, tag), record)
        return self._handle(native.all_to_all(outputs, inputs, group), record)

    def share_object(self, value: object, label: str, src: int = 0) -> object:
        """Return rank `src`'s JSON-like `value` on every rank (set-up only: it blocks)."""
        import json

        record = self._open("share_object", 0, 0, label)
        if self.world > 1:
            data = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
            length = torch.tensor([data.numel()], dtype=torch.int64)
            self.broadcast(length, src, label).wait()
            if self.rank != src:
                data = torch.empty(int(length.item()), dtype=torch.uint8)
            self.broadcast(data, src, label).wait()
            value = json.loads(bytes(data.tolist()).decode())
        self._handle(None, record)
        return value

    def group_rank(self, rank: int) -> int:
        """Translate a global rank into this group's."""
        if self.world == 1:
            return 0
        return rank if self.user_group is None else dist.get_group_rank(self.user_group, rank)

    def barrier(self, label: str = "barrier") -> None:
        """Block until every rank of the group is here."""
        self.all_reduce(torch.zeros(1), label).wait()

    def destroy(self) -> None:
        """Give back the process groups made by this communicator (not the user's)."""
        for group in self._own_groups:
            dist.destroy_process_group(group)
        self._own_groups, self._groups = [], {}

    def _next(self, kind: str) -> tuple[dist.ProcessGroup, int]:
        count = self._count[kind]
        self._count[kind] += 1
        return self._groups[kind], KINDS.index(kind) * _TAGS_PER_KIND + count % _TAGS_PER_KIND

    def _open(self, op: str, size: int, sent: int, label: str) -> Record:
        return self.ledger.open(op, self.name, size, sent if self.world > 1 else 0, label)

    def _handle(self, pending: Pending | None, record: Record) -> Handle:
        if pending is None:
            self.ledger.close(record, 0.0)
            return Handle(None, None, self.ledger)
        return Handle(pending, record, self.ledger)
