"""Which ranks of a job have what in common: a copy of the model, a sequence, or nothing but the training.

    8 ranks, tensor parallelism of 2, sequence parallelism of 2
    tensor     [0 1][2 3][4 5][6 7]    each has a part of every divided matrix
    sequence   [0 2][1 3][4 6][5 7]    each has a run of the same sequences' tokens
    data       [0 4][1 5][2 6][3 7]    each gets samples of its own

Ranks that exchange most are neighbours. State is divided over all ranks that have the same parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.parallel.sequence import across


@dataclass(frozen=True)
class RankGrid:
    """The lines of the grid, by the ranks' numbers in the job.

    Attributes:
        tensor: ranks that have one copy of the model among them.
        sequence: ranks that have the same sequences among them.
        data: ranks that get different samples.

    Example:
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
        """Return that of so many ranks.

        Args:
            world: a multiple of the sizes.
            tensor: ranks that have one copy of the model: how many, or, with whole sequences, which.
            sequence: ranks that share sequences: how many, or, with whole models, which.
        """
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
