"""Collectives among ranks that do not exist, for plans of memory: nothing is exchanged, and all buffers are made.

What an exchange holds for itself is made by the functions that make it in an exchange that takes place
(`receive_buffers` of `shardwise.comm.gloo`, `buffers_for` of `shardwise.comm.native`, `scratch_sizes` of
`shardwise.comm.neighbours`), and given back when it is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.comm import gloo, native, neighbours, wire
from shardwise.comm.communicator import KINDS, MOST_GATHERED, PURPOSES, Communicator, Handle
from shardwise.comm.ledger import Ledger
from shardwise.comm.pieces import Pieces
from shardwise.comm.setup import timeout_from_environment
from shardwise.device.streams import HostStreams, Streams


class FakeCommunicator(Communicator):
    """One of several ranks of which no other exists; see the module docstring.

    Args:
        world: number of ranks.
        device: where tensors are taken to lie.
        rank: which of them this is.
        like: they exchange data as those of this one do; None: as ranks on several machines.
        name: name of the group in records.
    """

    def __init__(
        self,
        world: int,
        device: torch.device,
        *,
        rank: int = 0,
        like: Communicator | None = None,
        name: str = "data_parallel",
    ) -> None:
        self.ledger, self.device, self.name = Ledger(), device, name
        self.world, self.rank = world, rank
        self.imagined = True
        self._given = self._cache = None
        self._is_part = False
        self.members = list(range(world))
        self.timeout = timeout_from_environment()
        self._reads = like is not None and like.reads_peers
        self._ordered = like is not None and like._ordered
        self._gloo = device.type == "cpu" if like is None else like._gloo
        self._count = dict.fromkeys(KINDS, 0)
        self._parts: list[Communicator] = []
        self._neighbours = self._whereabouts = None
        self._peers = ()
        self._nodes = ["imagined"] * world
        self._per_node = world if like is None else like._per_node
        # Plans of other world sizes or device types have no communicator to compare with.
        self._waits = device.type == "cpu" or world == 1 if like is None else like.waits_on_host
        self._async_gathers = device.type != "cpu" if like is None else like.async_gathers
        self._connected: dict[tuple[tuple[int, ...], str], None] = {}
        self._chunks = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2)]

    def part(self, parts: Sequence[Sequence[int]], name: str, *, near: bool = False) -> Communicator:
        """See `Communicator.part`."""
        members = list(next((members for members in parts if self.rank in members), parts[0]))
        rank = members.index(self.rank) if self.rank in members else 0
        part = FakeCommunicator(len(members), self.device, rank=rank, name=name)
        part.members = [self.members[place] for place in members]
        part._connected = self._connected
        part._gloo, part._ordered = self._gloo, self._ordered
        part._waits, part._async_gathers = self._waits, self._async_gathers
        part._reads = near and self._reads
        return part

    def connect(self, *kinds: str) -> None:
        """Count the process groups that real ranks would make for some kinds."""
        for kind in kinds if self.world > 1 else ():
            self._connected[tuple(self.members), "all" if self._gloo else PURPOSES[kind]] = None

    def communicators(self) -> list[tuple[tuple[int, ...], str]]:
        """Return ranks and purpose of each process group that real ranks would have made."""
        return list(self._connected)

    def all_gather(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], label: str, kind: str = "gather"
    ) -> Handle:
        """See `Communicator.all_gather`."""
        return self._over("all_gather", sum(full.nbytes for full, _ in pairs), label, kind)

    def reduce_scatter(
        self,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor | Pieces]],
        label: str,
        *,
        accumulate: bool = False,
        kind: str = "reduce",
    ) -> Handle:
        """See `Communicator.reduce_scatter`."""
        size = sum(full.numel() * full.element_size() for _, full in pairs)
        if self.world == 1:
            return self._over("reduce_scatter", size, label, kind)
        if self._reads:
            sizes = neighbours.scratch_sizes(pairs, accumulate)
            self._chunks = neighbours.enlarged(self._chunks, sizes, self.device)
            return self._over("reduce_scatter", size, label, kind, self._chunks)
        flat = [(out, full) for out, full in pairs if isinstance(full, torch.Tensor)]
        assert len(flat) == len(pairs), "nobody can read pieces here"
        if not self._gloo:
            flat = [pair for pair in flat if pair[1].numel()]
            buffers = native.buffers_for(
                flat, self.world, accumulate=accumulate, ordered=self._ordered, per_node=self._per_node
            )
            made = [buffer for several in buffers for buffer in several if buffer is not None]
            return self._over("reduce_scatter", size, label, kind, made)
        received = gloo.receive_buffers(flat, self.world)

        def add_up() -> None:
            for (out, full), pieces in zip(flat, received, strict=True):
                # Chunk by chunk in the same memory: one says how much.
                chunk = min(wire.SUM_CHUNK, out.numel())
                other = pieces[0, :chunk]
                spare = other if other.dtype == out.dtype else None
                wire.sum_in_order(out[:chunk], [other, full[:chunk]], accumulate, spare)

        return self._over("reduce_scatter", size, label, kind, received, add_up)

    def all_reduce(self, tensor: torch.Tensor, label: str, kind: str = "small") -> Handle:
        """See `Communicator.all_reduce`."""
        few = self.world > 1 and tensor.nbytes <= MOST_GATHERED
        gathered = tensor.new_empty(self.world * tensor.numel()) if few else tensor
        return self._over("all_reduce", tensor.nbytes, label, kind, [gathered])

    def _sum_at_once(self, flat: torch.Tensor, label: str) -> Handle:
        return self._over("all_reduce", flat.nbytes, label, "explicit")

    def all_to_all(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        label: str,
        kind: str = "explicit",
    ) -> Handle:
        """See `Communicator.all_to_all`."""
        return self._over("all_to_all", given.nbytes, label, kind)

    def broadcast(self, tensor: torch.Tensor, src: int, label: str, kind: str = "explicit") -> Handle:
        """See `Communicator.broadcast`."""
        return self._over("broadcast", tensor.nbytes, label, kind)

    @property
    def waits_on_host(self) -> bool:
        """See `Communicator.waits_on_host`."""
        return self._waits

    @property
    def async_gathers(self) -> bool:
        """See `Communicator.async_gathers`."""
        return self._async_gathers

    @property
    def streams(self) -> Streams:
        """See `Communicator.streams`: where nothing is exchanged, nothing is to be ordered."""
        return HostStreams()

    @property
    def reads_peers(self) -> bool:
        """See `Communicator.reads_peers`."""
        return self._reads

    def _over(
        self,
        op: str,
        size: int,
        label: str,
        kind: str,
        scratch: Sequence[torch.Tensor] = (),
        finish: Callable[[], Any] | None = None,
    ) -> Handle:
        """Return a collective that ends when it is waited for."""
        self.connect(kind)
        return self._handle(native.Works((), finish, scratch), self._open(op, size, size, label))
