"""Rank grid of a job: tensor-parallel, sequence-parallel and data-parallel groups.

    8 ranks, tensor parallelism of 2, sequence parallelism of 2
    tensor     [0 1][2 3][4 5][6 7]    each has a shard of every tensor-parallel matrix
    sequence   [0 2][1 3][4 6][5 7]    each has a range of the same sequences' tokens
    data       [0 4][1 5][2 6][3 7]    each gets different samples

Ranks that exchange most are consecutive. State is sharded over all ranks that have the same parameter.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.comm.environment import discover
from shardwise.errors import LaunchError
from shardwise.parallel.sequence import across


def local_ranks(world: int) -> int:
    """Return the number of ranks on this machine, from the launcher's variables; `world` if they do not have it."""
    try:
        place = discover(os.environ)
    except LaunchError:  # the script has created the process group
        return world
    return (place.local_world_size if place.world_size == world else None) or world


@dataclass(frozen=True)
class RankGrid:
    """Groups of each mesh dimension, by ranks in the job.

    >>> RankGrid.of(4, tensor=2).data
    [[0, 2], [1, 3]]
    """

    tensor: list[list[int]]
    sequence: list[list[int]]
    data: list[list[int]]

    @classmethod
    def of(
        cls, world: int, *, tensor: Sequence[Sequence[int]] | int = 1, sequence: Sequence[Sequence[int]] | int = 1
    ) -> RankGrid:
        """Return the grid of `world` ranks from the sizes, which divide it, or from one dimension's groups."""
        alone = [[rank] for rank in range(world)]
        if not isinstance(tensor, int):
            return cls([list(line) for line in tensor], alone, across(tensor))
        if not isinstance(sequence, int):
            return cls(alone, [list(line) for line in sequence], across(sequence))
        share = tensor * sequence
        starts = range(0, world, share)
        return cls(
            [list(range(first, first + tensor)) for first in range(0, world, tensor)],
            [list(range(start + place, start + share, tensor)) for start in starts for place in range(tensor)],
            [list(range(place, world, share)) for place in range(share)],
        )
