"""Distributed sampler: the samples of a rank in an epoch, and their order.

As in `torch.utils.data.DistributedSampler`, the dataset is permuted with seed + epoch and distributed round-robin.
Invariants: every rank has equally many samples, and the permutation, hence the first S samples of an epoch, does not
depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler

from shardwise.errors import ConfigError


class ResumableDistributedSampler(Sampler[int]):
    """Indices of one rank's samples, from any position in any epoch.

    Args:
        dataset: any object with a length.
        rank: this rank, from 0, of the `world_size` ranks that share the dataset.
        shuffle: permute the samples anew in each epoch; False: keep their order.
        seed: seed of the permutations, the same on all ranks.
        drop_last: if the dataset does not divide by the number of ranks, True drops the tail, False repeats samples
            from the beginning of the epoch. Each rank has equally many in both cases.
        block: samples that a rank takes at a time, so that the blocks of an epoch do not depend on the number of ranks;
            samples that fill no block on every rank are distributed one by one.

    Raises ConfigError if the rank is outside the world.

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
        block: int = 1,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} is not in a world of {world_size} ranks (0 to {world_size - 1})")
        self.dataset = dataset
        self.rank = rank
        self.world_size = world_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.block = block
        self.epoch = 0
        self.start = 0
        self.offset = 0

    def set_epoch(self, epoch: int, start: int = 0, offset: int = 0) -> None:
        """Select the epoch (from 0) of the next iteration. Ranks share the samples from `offset` on, and `start` of
        this rank's share are skipped.
        """
        self.epoch = epoch
        self.start = start
        self.offset = offset

    def permutation(self, epoch: int) -> torch.Tensor:
        """Return the indices of all samples in the order of an epoch (int64)."""
        count = len(self.dataset)
        if not self.shuffle:
            return torch.arange(count, device="cpu")
        generator = torch.Generator("cpu").manual_seed(self.seed + epoch)
        return torch.randperm(count, generator=generator, device="cpu")

    def order(self, epoch: int, offset: int = 0) -> torch.Tensor:
        """Return this rank's indices in an epoch without its first `offset` samples (int64)."""
        count, indices = len(self.dataset), self.permutation(epoch)
        end = offset + self.share(offset) * self.world_size
        if end > count:
            # Repeat the samples more than once if they are fewer than the ranks.
            indices = indices.repeat(-(-end // count))
        indices = indices[offset:end]
        whole = len(indices) // (self.block * self.world_size) * self.block * self.world_size
        blocks = indices[:whole].view(-1, self.world_size, self.block)[:, self.rank].reshape(-1)
        return torch.cat([blocks, indices[whole + self.rank :: self.world_size]])

    def __iter__(self) -> Iterator[int]:
        return iter(self.order(self.epoch, self.offset)[self.start :].tolist())

    def __len__(self) -> int:
        """Return the number of samples of this rank in a whole epoch."""
        return self.share(0)

    def share(self, offset: int) -> int:
        """Return the number of samples of this rank in an epoch without its first `offset` samples."""
        count = max(0, len(self.dataset) - offset)
        return count // self.world_size if self.drop_last else -(-count // self.world_size)
