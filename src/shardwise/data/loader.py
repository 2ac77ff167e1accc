"""The loader that the engine builds for `training_data`.

It is torch's loader with two additions: each rank gets its share, and the position can be saved and
restored. The position counts batches that were handed out, so it does not depend on how far worker
processes have read ahead.

Invariant: the batches after `load_state_dict` are those that would have followed the saved one, in this epoch
and in later ones, whatever the number of workers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import IterableDataset

from shardwise.data.fetch import mixed_seed
from shardwise.data.sources import Indexed, SampleSource, Share, Streamed, own_sampler
from shardwise.errors import CheckpointError, ConfigError

_log = logging.getLogger("shardwise")


class EngineDataLoader:
    """Batches of one rank, in an order that can be continued exactly.

    Four kinds of data are served:

    - A map-style dataset: shuffled anew in each epoch and dealt to the ranks (`ResumableDistributedSampler`).
    - A map-style dataset with a `data_sampler`: this rank's indices come from it; a `BatchSampler` also decides
      the batches. It must give the same order whenever an epoch is begun again (by `set_epoch`, if it has one).
    - An iterable dataset: every rank reads the whole stream and keeps every world-th sample.
    - An iterable dataset with the attribute `shards_itself = True`: taken as it is.

    Each iteration over the loader is one epoch; the next one has the next number. `set_epoch` of the
    sampler or of the iterable dataset is called if there is one.

    Args:
        dataset: a map-style dataset (`__getitem__`, `__len__`) or a `torch.utils.data.IterableDataset`.
        batch_size: samples per batch of this rank.
        rank: this rank among those that get different data.
        world_size: their number.
        collate_fn: makes a batch from a list of samples; torch's default if None.
        data_sampler: yields this rank's indices, or lists of them (`BatchSampler`).
        shuffle: for a map-style dataset without `data_sampler`.
        seed: of the order, the same on all ranks.
        drop_last: true drops what does not fill a batch on every rank. False repeats samples so that all
            ranks have equally many, and the last batch may be smaller (but is as small on every rank).
        num_workers: processes that fetch ahead; 0 fetches in this one.
        device: where batches will go. Memory is pinned for a CUDA device only.

    Raises:
        ConfigError: the settings contradict each other or the dataset, or no batch comes out.

    >>> loader = EngineDataLoader(range(6), 2, shuffle=False)
    >>> batches = iter(loader)
    >>> next(batches)
    tensor([0, 1])
    >>> again = EngineDataLoader(range(6), 2, shuffle=False)
    >>> again.load_state_dict(loader.state_dict())
    >>> [batch.tolist() for batch in again]
    [[2, 3], [4, 5]]
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        data_sampler: Iterable[Any] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        num_workers: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.collate_fn = collate_fn
        self._share = Share(rank, world_size, batch_size, drop_last, seed)
        self._generator = torch.Generator("cpu")
        options: dict[str, Any] = {
            "collate_fn": collate_fn,
            "num_workers": num_workers,
            "pin_memory": device is not None and torch.device(device).type == "cuda",
            # The seed of the workers comes from here; without it each epoch would draw one from the global
            # state, and a resumed run would go on with other random numbers than an uninterrupted one.
            "generator": self._generator,
        }
        self._source: SampleSource
        if isinstance(dataset, IterableDataset):
            if data_sampler is not None:
                raise ConfigError(
                    f"data_sampler: {type(dataset).__name__} is an iterable dataset, which decides its own order; "
                    "remove the sampler"
                )
            self._source = Streamed(dataset, self._share, options)
        else:
            sampler = own_sampler(dataset, self._share, shuffle) if data_sampler is None else data_sampler
            self._source = Indexed(dataset, sampler, self._share, options)
        self._next = (0, 0)
        self._current: _Epoch | None = None

    @property
    def sampler(self) -> Any:
        """What gives the indices; None for an iterable dataset."""
        return self._source.sampler

    @property
    def epoch(self) -> int:
        """The epoch that was begun last; before the first, the one that will be begun."""
        return self._next[0] if self._current is None else self._current.number

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch.

        Raises:
            TypeError: the iterable dataset or the sampler has no length.
        """
        return len(self._source)

    def __iter__(self) -> Iterator[Any]:
        number, start = self._next
        self._next = (number + 1, 0)
        self._generator.manual_seed(mixed_seed(self._share.seed, number, self._share.rank))
        current = self._current = _Epoch(number, start)
        return self._hand_out(self._source.batches(number, start), current)

    @property
    def progress(self) -> str:
        """How far it has come, for messages: `has given 3 batches of epoch 0`; empty before the first."""
        current = self._current
        if current is None:
            return ""
        done = "has ended after" if current.ended else "has given"
        return f"{done} {current.handed_out} batches of epoch {current.number}"

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration goes through, from its beginning.

        If that is the epoch to which `load_state_dict` has moved, the restored position is kept.
        """
        number, start = self._next
        if epoch == number:
            return
        if start:
            _log.warning("set_epoch(%d) discards the restored position in epoch %d of the training data", epoch, number)
        self._next = (epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the batch that was handed out last, as JSON types.

        After a loop over the loader was left early, the position is still the one inside that epoch.
        (Iterating again in the same process begins the next epoch.)
        """
        if self._current is None or self._current.ended:
            epoch, position = self._next
        else:
            epoch = self._current.number
            position = self._source.after(self._current.start, self._current.handed_out)
        return {
            "epoch": epoch,
            "position": position,
            "kind": self._source.kind,
            "world_size": self._share.world_size,
            **self._source.order_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to a saved position: the next iteration goes through the rest of that epoch.

        The order (seed, shuffling) becomes the saved one. The number of ranks and the batch size may differ
        from the saved run if the sampler or the stream is ours: the samples that all ranks together have
        seen are left out.

        Raises:
            CheckpointError: the state is of another kind of data, of a dataset of another length, or was
                saved on another number of ranks where the order cannot be divided anew.
        """
        for name, least in (("epoch", 0), ("position", 0), ("world_size", 1), ("seed", None)):
            value = state.get(name)
            if not isinstance(value, int) or (least is not None and value < least):
                raise CheckpointError(
                    f"position in the training data, {name!r}: expected an integer"
                    + ("" if least is None else f" >= {least}")
                    + f", found {value!r}"
                )
        if state.get("kind") != self._source.kind:
            raise CheckpointError(
                f"position in the training data: it was saved for a {state.get('kind')}, this is a "
                f"{self._source.kind}; use the same kind of data and sampler as the saved run, or begin a new epoch "
                f"with set_epoch({state['epoch'] + 1}) instead of restoring the position"
            )
        self._source.restore_order(state)
        position = state["position"]
        if state["world_size"] != self._share.world_size:
            position = self._source.divided_anew(position, state["world_size"])
        self._next = (state["epoch"], position)
        self._current = None

    def _hand_out(self, batches: Iterator[Any], current: _Epoch) -> Iterator[Any]:
        for batch in batches:
            current.handed_out += 1
            yield batch
        current.ended = True


class _Epoch:
    """One iteration: its number, where it began, how far it has come."""

    def __init__(self, number: int, start: int) -> None:
        self.number = number
        self.start = start
        self.handed_out = 0
        self.ended = False
