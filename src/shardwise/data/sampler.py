"""Which samples a rank sees in an epoch, and in which order.

The order is that of `torch.utils.data.DistributedSampler`: a permutation of the whole dataset from seed +
epoch, dealt to the ranks in turn. Invariants: the permutation does not depend on the number of ranks, so
that the first S samples of an epoch are the same ones on any number; and every rank has equally many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler

from shardwise.errors import ConfigError


class ResumableDistributedSampler(Sampler[int]):
    """Indices of one rank's samples, from any place in any epoch.

    Args:
        dataset: anything with a length.
        rank: this rank, from 0.
        world_size: number of ranks that share the dataset.
        shuffle: permute the samples anew in each epoch; otherwise keep their order.
        seed: seed of the permutations, the same on all ranks.
        drop_last: what to do if the dataset does not divide by the number of ranks: true drops the tail,
            false repeats samples from the beginning of the epoch, so that each rank has equally many either
            way.

    Raises:
        ConfigError: the rank is not in the world.

    >>> sampler = ResumableDistributedSampler(range(5), rank=1, world_size=2, shuffle=False)
    >>> list(sampler)
    [1, 3, 0]
    >>> sampler.set_epoch(0, start=2)
    >>> list(sampler)
    [0]
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} is not in a world of {world_size} ranks (0 to {world_size - 1})")
        self.dataset = dataset
        self.rank = rank
        self.world_size = world_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self.start = 0

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose what the next iteration yields.

        Args:
            epoch: number of the epoch, from 0.
            start: samples of this rank to leave out at its beginning.
        """
        self.epoch = epoch
        self.start = start

    def order(self, epoch: int) -> torch.Tensor:
        """Return this rank's indices in an epoch (int64, `len(self)` elements)."""
        count = len(self.dataset)
        if self.shuffle:
            generator = torch.Generator("cpu").manual_seed(self.seed + epoch)
            indices = torch.randperm(count, generator=generator, device="cpu")
        else:
            indices = torch.arange(count, device="cpu")
        total = len(self) * self.world_size
        if total > count:
            # More than once through, if there are fewer samples than ranks.
            indices = indices.repeat(-(-total // count))
        return indices[self.rank : total : self.world_size]

    def __iter__(self) -> Iterator[int]:
        return iter(self.order(self.epoch)[self.start :].tolist())

    def __len__(self) -> int:
        """Return the number of samples of this rank in a whole epoch."""
        count = len(self.dataset)
        return count // self.world_size if self.drop_last else -(-count // self.world_size)
