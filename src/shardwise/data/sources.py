"""Sample sources of the loader: the meaning of a position for each kind of data, and iteration from it."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from shardwise.data.fetch import Indices, RankStream, SeededDataset, mixed_seed, replaying
from shardwise.data.sampler import ResumableDistributedSampler
from shardwise.data.token_batches import TokenBatches
from shardwise.data.unequal import Unequal
from shardwise.errors import CheckpointError, ConfigError

_log = logging.getLogger("shardwise")

SHARDS_ITSELF = "shards_itself"
"""Attribute (True) of an iterable dataset that yields only this rank's and worker's samples."""


class Position(NamedTuple):
    """A position in an epoch.

    Attributes:
        local: on one rank: samples where the loader distributes their order, otherwise batches.
        offset: samples that all ranks together had seen when their number changed; `local` begins there.
    """

    local: int = 0
    offset: int = 0


@dataclass
class Share:
    """A rank's share: its place, batch size, handling of the tail, and seed. With `unequal` parts `batch_size` is their
    mean, so that positions mean the same.
    """

    rank: int
    world_size: int
    batch_size: int
    drop_last: bool
    seed: int
    blocks: bool = False
    unequal: Unequal | None = None

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"batch_size: expected an integer >= 1, found {self.batch_size!r}")
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank: expected 0 to {self.world_size - 1} (world_size - 1), found {self.rank!r}")

    def fits(self, sizes: Sequence[int]) -> bool:
        """Return True if `sizes` are parts of all ranks with the right mean."""
        return len(sizes) == self.world_size and min(sizes) > 0 and sum(sizes) == self.batch_size * self.world_size

    def batches_of(self, samples: int) -> int:
        """Return the number of batches from a number of one rank's samples."""
        return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)


class SampleSource(ABC):
    """Batches from any position of any epoch; `kind` identifies positions, `sampler` is None for streams."""

    kind: str
    sampler: Any = None

    def __init__(self, share: Share) -> None:
        self.share = share

    @abstractmethod
    def batches(self, epoch: int, start: Position) -> Iterator[Any]:
        """Start an iteration at a position of an epoch."""

    @abstractmethod
    def after(self, start: Position, handed_out: int) -> Position:
        """Return the position `handed_out` batches after `start`."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of batches of a whole epoch; TypeError if it is unknown."""

    def divided_anew(self, position: Position, world_size: int) -> Position:
        """Convert a position saved on another number of ranks."""
        raise CheckpointError(
            f"position in the training data: it was saved on {world_size} ranks, this run has {self.share.world_size}, "
            f"and the order is not ours to divide anew (data from a {self.kind}); resume on {world_size} ranks, or "
            "begin a new epoch with set_epoch"
        )

    def order_state(self, position: Position) -> dict[str, Any]:
        """Return the parameters of the order, as JSON types, at a position."""
        return {"seed": self.share.seed}

    def restore_order(self, state: Mapping[str, Any]) -> Position:
        """Restore a saved order; return the saved position."""
        if (seed := state.get("seed")) != self.share.seed:
            _log.info("the training data goes on in the saved order (seed %s, not %d)", seed, self.share.seed)
        self.share.seed = state["seed"]
        return Position(state["position"], state.get("offset", 0))


class Indexed(SampleSource):
    """A map-style dataset with the engine's sampler or the user's."""

    def __init__(self, dataset: Any, sampler: Any, share: Share, options: Mapping[str, Any]) -> None:
        super().__init__(share)
        self.sampler = sampler
        self._dataset = dataset
        self._ours = isinstance(sampler, ResumableDistributedSampler)
        self._by_tokens = isinstance(sampler, TokenBatches)
        self._in_batches = self._by_tokens or isinstance(sampler, BatchSampler)
        kinds = {"dataset": self._ours, "dynamic batching": self._by_tokens, "batch sampler": self._in_batches}
        self.kind = next((kind for kind, fits in kinds.items() if fits), "sampler")
        self._begin = (0, Position())
        fetched = SeededDataset(dataset) if options["num_workers"] else dataset
        self._loader: DataLoader[Any] = DataLoader(fetched, batch_sampler=self, **options)

    def batches(self, epoch: int, start: Position) -> Iterator[Any]:
        """Start an iteration at a position of an epoch."""
        self._begin = (epoch, start)
        return iter(self._loader)

    def __iter__(self) -> Iterator[Indices]:
        """Yield the batches of indices of the started iteration, for torch's loader."""
        epoch, start = self._begin
        if self.share.unequal is not None:
            return self._unequal(self.share.unequal, epoch, start)
        if self._ours or self._by_tokens:
            self.sampler.set_epoch(epoch, *start)
            indices = iter(self.sampler)
        else:
            _set_epoch(self.sampler, epoch)
            indices = islice(iter(self.sampler), start.local, None)
        return self._grouped(indices, epoch, start)

    def after(self, start: Position, handed_out: int) -> Position:
        """Return the position `handed_out` batches after `start`."""
        count, offset = start
        if self._in_batches:
            return Position(count + handed_out, offset)
        count += handed_out * self.share.batch_size
        if self._ours:
            return Position(min(count, self.sampler.share(offset)), offset)
        return Position(min(count, len(self.sampler)) if hasattr(self.sampler, "__len__") else count)

    def __len__(self) -> int:
        return len(self.sampler) if self._in_batches else self.share.batches_of(len(self.sampler))

    def divided_anew(self, position: Position, world_size: int) -> Position:
        """Convert a position saved on another number of ranks."""
        if self._by_tokens:
            return Position(0, _seen(position, world_size))
        if not self._ours:
            return super().divided_anew(position, world_size)
        rest = len(self._dataset) - position.offset
        ended = position.local >= (rest // world_size if self.share.drop_last else -(-rest // world_size))
        return Position(0, len(self._dataset) if ended else _seen(position, world_size))

    def order_state(self, position: Position) -> dict[str, Any]:
        """Return the parameters of the order, as JSON types, at a position."""
        state = super().order_state(position)
        if isinstance(self.sampler, TokenBatches):
            state |= self.sampler.state()
        if self._ours:
            state |= {"length": len(self._dataset), "shuffle": self.sampler.shuffle}
        return state

    def restore_order(self, state: Mapping[str, Any]) -> Position:
        """Restore a saved order; return the saved position."""
        if self._ours:
            if state.get("length") != len(self._dataset):
                raise CheckpointError(
                    f"position in the training data: it was saved in a dataset of {state.get('length')} samples, this "
                    f"one has {len(self._dataset)}, so the order cannot be continued; use the same dataset, or begin a "
                    f"new epoch with set_epoch({state['epoch'] + 1}) instead of restoring the position"
                )
            if (beyond := max(state["position"], state.get("offset", 0))) > len(self._dataset):
                raise CheckpointError(
                    f"position in the training data: {beyond} is beyond its {len(self._dataset)} samples"
                )
            self.sampler.seed = state["seed"]
            self.sampler.shuffle = state["shuffle"]
        elif isinstance(self.sampler, TokenBatches):
            if state.get("batches") != self.sampler.fingerprint:
                raise CheckpointError(
                    "position in the training data: it was saved with other lengths or settings of dynamic batching, "
                    "so the order cannot be continued; use the same, or begin a new epoch with "
                    f"set_epoch({state['epoch'] + 1}) instead of restoring the position"
                )
            self.sampler.seed = state.get("batches_seed", state["seed"])  # earlier versions have saved one seed
        elif state["position"] and not _repeats(self.sampler):
            _log.warning(
                "%s has no set_epoch: the position in the training data is exact only if it gives the same order each "
                "time it is iterated over",
                type(self.sampler).__name__,
            )
        return super().restore_order(state)

    def _unequal(self, unequal: Unequal, epoch: int, start: Position) -> Iterator[Indices]:
        share = self.share
        order, total = self.sampler.permutation(epoch)[start.offset :], share.batch_size * share.world_size
        for number in range(start.local // share.batch_size, len(order) // total):
            sizes = unequal.at(number)  # now, because they may have changed since the iteration began
            first = number * total + sum(sizes[: share.rank])
            batch = Indices(order[first : first + sizes[share.rank]].tolist())
            batch.seed = mixed_seed(share.seed, epoch, start.offset + first)
            yield batch

    def _grouped(self, indices: Iterator[Any], epoch: int, start: Position) -> Iterator[Indices]:
        position, moved = start.local, start[1:] if start.offset else ()
        while True:
            if self._in_batches:
                batch = Indices(next(indices, ()))
                step = 1
            else:
                batch = Indices(islice(indices, self.share.batch_size))
                step = self.share.batch_size
                if self.share.drop_last and len(batch) < step:
                    return
            if not batch:
                return
            if self.share.blocks:  # random numbers follow the samples
                first = start.offset + position * self.share.world_size + self.share.rank * self.share.batch_size
                batch.seed = mixed_seed(self.share.seed, epoch, first)
            else:
                batch.seed = mixed_seed(self.share.seed, epoch, self.share.rank, position, *moved)
            yield batch
            position += step


class Streamed(SampleSource):
    """An iterable dataset, which every rank reads in full, or which shards itself."""

    def __init__(self, dataset: Any, share: Share, options: Mapping[str, Any]) -> None:
        super().__init__(share)
        self._dataset = dataset
        self._stream: RankStream | None = None
        if getattr(dataset, SHARDS_ITSELF, False) is True:
            self.kind = "stream that shards itself"
        else:
            self.kind = "stream"
            if options["num_workers"] > 1:
                raise ConfigError(
                    f"num_workers: {options['num_workers']} worker processes would each read all of "
                    f"{type(dataset).__name__}; use 1 or 0, or let the dataset yield only the samples of its rank and "
                    f"worker and set its attribute {SHARDS_ITSELF} = True"
                )
            self._stream = RankStream(dataset, share.rank, share.world_size, share.drop_last)
        self._loader: DataLoader[Any] = DataLoader(
            dataset if self._stream is None else self._stream,
            batch_size=share.batch_size,
            drop_last=share.drop_last,
            **options,
        )

    def batches(self, epoch: int, start: Position) -> Iterator[Any]:
        """Start an iteration at a position of an epoch."""
        _set_epoch(self._dataset, epoch)
        if self._stream is not None:
            self._stream.start, self._stream.offset = start
            return iter(self._loader)
        iterator = iter(self._loader)
        with replaying():
            for _ in islice(iterator, start.local):
                pass
        return iterator

    def after(self, start: Position, handed_out: int) -> Position:
        """Return the position `handed_out` batches after `start`."""
        count = start.local + handed_out * (1 if self._stream is None else self.share.batch_size)
        return Position(count, start.offset)

    def __len__(self) -> int:
        samples = len(self._dataset)
        if self._stream is not None:
            ranks = self.share.world_size
            samples = samples // ranks if self.share.drop_last else -(-samples // ranks)
        return self.share.batches_of(samples)

    def divided_anew(self, position: Position, world_size: int) -> Position:
        """Convert a position saved on another number of ranks."""
        if self._stream is None:
            return super().divided_anew(position, world_size)
        return Position(0, _seen(position, world_size))


def own_sampler(dataset: Any, share: Share, shuffle: bool) -> ResumableDistributedSampler:
    """Build the sampler for a map-style dataset. Raises ConfigError if it is unsuitable, or yields no batch."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ConfigError(
            f"training data: {type(dataset).__name__} is neither a map-style dataset (__getitem__ and __len__) nor a "
            "torch.utils.data.IterableDataset; make it one of these, or pass a data_sampler if only __len__ is missing"
        )
    sampler = ResumableDistributedSampler(
        dataset,
        rank=share.rank,
        world_size=share.world_size,
        shuffle=shuffle,
        seed=share.seed,
        drop_last=share.drop_last,
        block=share.batch_size if share.blocks else 1,
    )
    if share.batches_of(len(sampler)) == 0:
        raise ConfigError(
            f"training data: {len(dataset)} samples on {share.world_size} ranks give no batch of {share.batch_size}"
            + ("; set dataloader_drop_last to false, or use smaller batches" if len(dataset) else "")
        )
    return sampler


def _seen(position: Position, world_size: int) -> int:
    """Return the samples that all ranks together have seen."""
    return position.offset + position.local * world_size


def _set_epoch(owner: Any, epoch: int) -> None:
    for candidate in (owner, getattr(owner, "sampler", None)):
        if (tell := getattr(candidate, "set_epoch", None)) is not None:
            tell(epoch)
            return


def _repeats(sampler: Iterable[Any]) -> bool:
    """Return True if a sampler is known to repeat its order when an epoch restarts."""
    candidates = (sampler, getattr(sampler, "sampler", None))
    return any(hasattr(entry, "set_epoch") or isinstance(entry, SequentialSampler) for entry in candidates)
