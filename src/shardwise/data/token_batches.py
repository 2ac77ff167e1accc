"""Micro-batches of a number of tokens, and the factor of the learning rate for their samples.

The micro-batches of an epoch are a list that all ranks compute alike, and of which each rank takes every so many.

Papers: Goyal et al., "Accurate, Large Minibatch SGD" (2017), linear scaling; Krizhevsky, "One weird trick for
parallelizing convolutional neural networks" (2014), square root.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from shardwise.data.fetch import mixed_seed
from shardwise.data.indexed import Array
from shardwise.errors import ConfigError

_log = logging.getLogger("shardwise")


def batch_by_tokens(
    lengths: Sequence[int] | Array, max_tokens: int, order: Array, least: int = 1, most: int | None = None
) -> list[Array]:
    """Return groups of samples whose lengths add up to at most `max_tokens`, filled in an order of samples.

    Groups have `least` to `most` samples; samples longer than `max_tokens`, and smaller groups, are left out.

    >>> [group.tolist() for group in batch_by_tokens([3, 3, 1, 9, 2], 6, np.arange(5))]
    [[0, 1], [2, 4]]
    """
    groups: list[Array] = []
    group: list[int] = []
    total = 0
    for sample in order.tolist():
        length = int(lengths[sample])
        if length > max_tokens:
            continue
        if group and (total + length > max_tokens or len(group) == most):
            groups.append(np.asarray(group))
            group, total = [], 0
        group.append(sample)
        total += length
    groups.append(np.asarray(group, np.int64))
    return [group for group in groups if len(group) >= least]


def scale_rate(samples: int, base: int, method: str) -> float:
    """Return the factor of the learning rate for a batch of `samples` samples, if the rate is that for `base`."""
    ratio = samples / base
    return {"linear": ratio, "sqrt": ratio**0.5, "none": 1.0}[method]


class TokenBatches(Sampler[list[int]]):
    """Yields the samples of this rank's micro-batches, from any position in any epoch.

    Args:
        lengths: tokens of each sample.
        max_tokens: most tokens of a micro-batch.
        rank, world_size: place among the ranks with different samples.
        steps: micro-batches of a rank in a step. Those at the end of an epoch that make no step are left out.
        least, most: bounds of the samples of a micro-batch.
        order: in which micro-batches are filled: "random", "seqlen" (short samples first) or "dataloader".
        seed: of the order "random", which is another one in each epoch.

    Raises:
        ConfigError: an epoch has no step.
    """

    def __init__(
        self,
        lengths: Sequence[int] | Array,
        max_tokens: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        steps: int = 1,
        least: int = 1,
        most: int | None = None,
        order: str = "dataloader",
        seed: int = 0,
    ) -> None:
        self.lengths = np.asarray(lengths)
        self.max_tokens, self.rank, self.world_size, self.steps = max_tokens, rank, world_size, steps
        self._bounds, self._order, self.seed = (least, most), order, seed
        self._epoch = self._start = self._offset = 0
        self._made: tuple[tuple[int, int], list[Array]] = ((-1, 0), [])
        if not len(self):
            raise ConfigError(
                f"dynamic_batching: {len(self._groups(0))} micro-batches of at most {max_tokens} tokens make no step "
                f"of {world_size} ranks and {steps} micro-batches; set a smaller max_tokens or min_batch_size"
            )
        too_long = int((self.lengths > max_tokens).sum())
        if too_long and rank == 0:
            _log.warning("%d samples have more than max_tokens = %d tokens, and are left out", too_long, max_tokens)

    @property
    def fingerprint(self) -> str:
        """Hash of all that decides the micro-batches, but for the seed."""
        own = repr((self.max_tokens, self._bounds, self._order)).encode()
        return hashlib.blake2b(self.lengths.astype("<i8").tobytes() + own, digest_size=16).hexdigest()

    def _groups(self, epoch: int) -> list[Array]:
        number = (epoch, self.seed) if self._order == "random" else (0, 0)
        if self._made[0] != number:
            if self._order == "random":
                generator = torch.Generator("cpu").manual_seed(mixed_seed(self.seed, epoch))
                order = torch.randperm(len(self.lengths), generator=generator, device="cpu").numpy()
            else:
                order = (
                    np.argsort(self.lengths, kind="stable") if self._order == "seqlen" else np.arange(len(self.lengths))
                )
            self._made = number, batch_by_tokens(self.lengths, self.max_tokens, order, *self._bounds)
        return self._made[1]

    def set_epoch(self, epoch: int, start: int = 0, offset: int = 0) -> None:
        """Select the epoch of the next iteration: ranks share the micro-batches from `offset` on, and `start` of this
        rank's are skipped.
        """
        self._epoch, self._start, self._offset = epoch, start, offset

    def __iter__(self) -> Iterator[list[int]]:
        groups = self._groups(self._epoch)[self._offset :]
        each = len(groups) // (self.world_size * self.steps) * self.steps
        for number in range(self._start, each):
            yield groups[number * self.world_size + self.rank].tolist()

    def __len__(self) -> int:
        """Return the number of this rank's micro-batches in a whole epoch."""
        return len(self._groups(self._epoch)) // (self.world_size * self.steps) * self.steps

    def samples(self, epoch: int, start: int, offset: int, count: int) -> int:
        """Return the samples of `count` micro-batches of each rank from a position on."""
        first = offset + start * self.world_size
        return sum(len(group) for group in self._groups(epoch)[first : first + count * self.world_size])

    def state(self) -> dict[str, Any]:
        """Return the parameters of the order as JSON types."""
        return {"batches_seed": self.seed, "batches": self.fingerprint}
