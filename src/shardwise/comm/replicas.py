"""Replicas of a model that train on their own between exchanges (local SGD)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwise.comm.communicator import Communicator
from shardwise.comm.domain import REPLICATE, Arrangement


@dataclass(frozen=True)
class Replicas:
    """The replicas of a job: lines of its grid without the dimension `replicate`.

    Attributes:
        job: all ranks.
        grid: the arrangement of all ranks.
        own: ranks of this rank's replica, over which the model is sharded.
        across: the ranks at this rank's place in all replicas, by number of the replica.
    """

    job: Communicator
    grid: Arrangement
    own: Communicator
    across: Communicator

    @classmethod
    def of(cls, job: Communicator, grid: Arrangement) -> Replicas:
        """Return the replicas of a grid (all ranks call)."""
        count = grid.sizes[-1] if grid.names[-1] == REPLICATE else 1
        lines = grid.lines(len(grid.sizes) - 1) if count > 1 else [[rank] for rank in range(job.world)]
        # The dimension `replicate` is the outermost, so the number of the replica changes first along the order.
        replicas = [sorted(grid.order[number::count]) for number in range(count)]
        return cls(job, grid, job.part(replicas, "replica"), job.part(lines, REPLICATE))

    @property
    def number(self) -> int:
        """Number of this rank's replica."""
        return self.across.rank

    @property
    def count(self) -> int:
        """Number of replicas."""
        return self.across.world

    def spread(self, values: torch.Tensor, src: int, label: str) -> None:
        """Broadcast values that are equal within each replica from the replica of global rank `src` to all."""
        place = self.job.members.index(src) if src in self.job.members else 0
        number = self.grid.order.index(place) % self.count
        self.across.broadcast(values, number, label).wait()
