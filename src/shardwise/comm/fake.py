"""Fake ranks, for memory plans and dry runs: all buffers of a collective are allocated, and nothing is exchanged."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm import native
from shardwise.comm.communicator import MOST_GATHERED, Communicator, Handle
from shardwise.comm.desync import FailureReports
from shardwise.comm.groups import PURPOSES, purposes_of
from shardwise.comm.intra_node_transport import planned_buffers
from shardwise.comm.ledger import Ledger, Record
from shardwise.comm.native import Pair, Works
from shardwise.comm.setup import timeout_from_environment
from shardwise.device.streams import HostStreams


class _FakeBackend(native.Backend):
    def __init__(self, like: native.Backend, world: int) -> None:
        self._like, self._world = like, world

    def reduce_scatter(self, pairs: Sequence[Pair], accumulate: bool, record: Record) -> Works:
        scratch = self._like.scratch(pairs, accumulate) if self._world > 1 else ()
        return Works((), [functools.partial(_keep, pairs)], scratch)

    def all_reduce(self, tensor: torch.Tensor, record: Record) -> Works:
        few = self._world > 1 and tensor.nbytes <= MOST_GATHERED
        return Works((), scratch=[tensor.new_empty(self._world * tensor.numel())] if few else ())

    def _exchange_nothing(self, *tensors: Any, **_: Any) -> Works:
        return Works((), [functools.partial(_keep, *tensors)])

    all_gather = sum_in_place = broadcast = all_to_all = _exchange_nothing

    def received(self, sent: int, *, accumulate: bool = False) -> int:
        return self._like.received(sent, accumulate=accumulate)

    def planned(self, world: int) -> native.Backend:
        return self._like.planned(world)


def _keep(*tensors: Any) -> None:
    """Keep tensors until the end of a collective, as a transport keeps them."""


class FakeCommunicator(Communicator):
    """A communicator of one rank with fake peers; exchanges as `like`, or else as ranks on several machines, or as CPU
    ranks that are `near`: on one machine.
    """

    def __init__(
        self,
        world: int,
        device: torch.device,
        *,
        rank: int = 0,
        like: Communicator | None = None,
        near: bool = False,
        name: str = "data_parallel",
        ledger: Ledger | None = None,
    ) -> None:
        self.ledger, self.device, self.name = Ledger() if ledger is None else ledger, device, name
        self.world, self.rank = world, rank
        self.imagined = True
        self.members = self._peers = list(range(world))
        self._failures = FailureReports(self.ledger, self.members, rank)
        self.timeout = timeout_from_environment()
        self._ordered = like is not None and like._ordered
        # Plans of other world sizes or device types have no communicator to compare with.
        self._on_host = device.type == "cpu" if like is None else like._on_host
        self._count = dict.fromkeys(PURPOSES, 0)
        self._parts: list[Communicator] = []
        self._nodes = ["fake"] * world
        self.waits_on_host = device.type == "cpu" or world == 1 if like is None else like.waits_on_host
        self.async_gathers = device.type != "cpu" if like is None else like.async_gathers
        self.streams = HostStreams()  # without exchanges no order is needed
        self._connected: dict[tuple[tuple[int, ...], str], None] = {}
        self._torch = native.TorchBackend({}, world, ordered=self._ordered or self._on_host)
        buffers = self._torch if like is None else like._backend.planned(world)
        if near and device.type == "cpu" and world > 1:
            buffers = planned_buffers(world)
        self._backend = _FakeBackend(buffers, world)

    def part(self, parts: Sequence[Sequence[int]], name: str, *, near: bool = False) -> Communicator:
        """Return a communicator of some ranks, as `Communicator.part`."""
        members = list(next((members for members in parts if self.rank in members), parts[0]))
        rank = members.index(self.rank) if self.rank in members else 0
        part = FakeCommunicator(len(members), self.device, rank=rank, like=self, name=name, ledger=self.ledger)
        part.members = part._peers = [self.members[place] for place in members]
        part._connected = self._connected
        if not near:
            part._backend = _FakeBackend(part._torch, part.world)
        return part

    def connect(self, *kinds: str) -> list[dist.ProcessGroup]:
        """Count the process groups that real ranks would create for some kinds; return none."""
        for kind in kinds if self.world > 1 else ():
            self._connected[tuple(self.members), purposes_of(self._on_host)[kind]] = None
        return []

    def communicators(self) -> list[tuple[tuple[int, ...], str]]:
        """Return ranks and purpose of each process group that real ranks would have created."""
        return list(self._connected)

    def _launch(
        self, op: str, size: int, sent: int, label: str, kind: str, *launch: Any, narrow: bool = False
    ) -> Handle:
        self.connect(kind)
        return super()._launch(op, size, sent, label, kind, *launch, narrow=narrow)
