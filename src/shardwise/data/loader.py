"""Data loader that the engine builds for `training_data`: torch's loader with rank shares and a position to save.

The position counts yielded batches, independent of the prefetching of workers. Invariant: after `load_state_dict` the
loader yields the batches that would have followed the saved one, in this and later epochs, for any number of workers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset

from shardwise.data.curriculum import CurriculumSampler, CurriculumSource
from shardwise.data.fetch import mixed_seed, outlive_signals
from shardwise.data.sources import Indexed, Position, SampleSource, Share, Streamed, own_sampler
from shardwise.data.token_batches import TokenBatches
from shardwise.data.unequal import Sizes, Unequal
from shardwise.errors import CheckpointError, ConfigError, UsageError

_log = logging.getLogger("shardwise")


class EngineDataLoader:
    """Batches of one rank, in an order that can be resumed exactly.

    - A map-style dataset is shuffled anew in each epoch and distributed over ranks (`ResumableDistributedSampler`).
    - With a `CurriculumSampler` or `TokenBatches` as `data_sampler`, ranks share the batches that it forms.
    - With another `data_sampler`, the sampler yields this rank's indices; a `BatchSampler` also forms the batches. It
      must repeat its order when an epoch restarts (by `set_epoch`, if available).
    - An iterable dataset is read in full by every rank, which keeps every world-th sample.
    - An iterable dataset with the attribute `shards_itself = True` is used unchanged.

    Each iteration is one epoch; epochs are numbered in order. `set_epoch` of the sampler or of the iterable dataset is
    called if available.

    Args:
        dataset: a map-style dataset (`__getitem__`, `__len__`) or a `torch.utils.data.IterableDataset`.
        batch_size: samples per batch of this rank.
        rank: this rank among the `world_size` ranks with different data.
        collate_fn: makes a batch from a list of samples; None: torch's default.
        data_sampler: yields this rank's indices, or lists of them (`BatchSampler`).
        shuffle: for a map-style dataset without `data_sampler`.
        seed: seed of the order, the same on all ranks.
        drop_last: True drops samples that do not fill a batch on every rank. False repeats samples until all ranks have
            equally many; the last batch may be smaller, equally on every rank.
        num_workers: prefetching processes; 0 fetches in this one.
        blocks: give each batch adjacent samples of the epoch's order, so that the batches of all ranks together do not
            depend on the number of ranks (map-style datasets without `data_sampler`).
        unequal: samples of each rank in a micro-batch, `batch_size` in the mean: all ranks together take the next
            samples of the epoch's order. Needs a map-style dataset without `data_sampler`, and `drop_last`.
        device: target device of batches. Memory is pinned for a CUDA device only.

    Raises:
        ConfigError: the settings contradict each other or the dataset, or yield no batch.

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
        blocks: bool = False,
        unequal: Sequence[int] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.collate_fn = collate_fn
        self._share = Share(rank, world_size, batch_size, drop_last, seed, blocks)
        self._unclaimed = self._samples = 0  # batches since `claim`, and their samples of dynamic batching
        self.loads = 0  # restored positions
        self.post_process: Callable[[Any, dict[str, Any]], Any] | None = None
        self._generator = torch.Generator("cpu")
        options: dict[str, Any] = {
            "collate_fn": collate_fn,
            "num_workers": num_workers,
            "pin_memory": device is not None and torch.device(device).type == "cuda",
            # Seed of the workers. Without it each epoch would draw a seed from the global RNG, and a resumed run would
            # differ from an uninterrupted one.
            "generator": self._generator,
            "worker_init_fn": outlive_signals if num_workers else None,
        }
        self._source: SampleSource
        if blocks and (isinstance(dataset, IterableDataset) or data_sampler is not None):
            raise ConfigError(
                "blocks (`sample_seed` of the configuration): the order of an iterable dataset or of a "
                "data_sampler is not the loader's; pass a map-style dataset, or remove the key"
            )
        if unequal is not None:
            self._share.unequal = self._checked(unequal, dataset, data_sampler)
        if isinstance(dataset, IterableDataset):
            if data_sampler is not None:
                raise ConfigError(
                    f"data_sampler: {type(dataset).__name__} is an iterable dataset, which decides its own order; "
                    "remove the sampler"
                )
            self._source = Streamed(dataset, self._share, options)
        elif isinstance(data_sampler, CurriculumSampler):
            self._source = CurriculumSource(dataset, data_sampler, self._share, options)
        else:
            sampler = own_sampler(dataset, self._share, shuffle) if data_sampler is None else data_sampler
            self._source = Indexed(dataset, sampler, self._share, options)
        self._next = (0, Position())
        self._current: _Epoch | None = None

    def _checked(self, sizes: Sequence[int], dataset: Any, data_sampler: Any) -> Unequal:
        share = self._share
        if isinstance(dataset, IterableDataset) or data_sampler is not None or share.blocks or not share.drop_last:
            raise ConfigError(
                "unequal micro-batches (`unequal_batches` of the configuration) need a map-style dataset, no "
                "data_sampler, no `sample_seed`, and `dataloader_drop_last` true, because a last batch that is not "
                "full cannot be divided in the same way"
            )
        if not share.fits(sizes):
            raise ConfigError(
                f"unequal micro-batches (`unequal_batches.samples`): {list(sizes)} are not the samples (1 or more) of "
                f"{share.world_size} data-parallel ranks, with a mean of {share.batch_size}"
            )
        return Unequal(sizes)

    @property
    def sampler(self) -> Any:
        """The sampler of indices; None for an iterable dataset."""
        return self._source.sampler

    @property
    def epoch(self) -> int:
        """The last started epoch; before the first, the next one."""
        return self._next[0] if self._current is None else self._current.number

    def __len__(self) -> int:
        """Return the number of batches of an epoch. Raises TypeError if dataset or sampler has no length."""
        return len(self._source)

    def __iter__(self) -> Iterator[Any]:
        number, start = self._next  # when the first batch is taken
        self._next = (number + 1, Position())
        if self._share.unequal is not None and not any(start):
            self._share.unequal.begin_epoch()
        self._generator.manual_seed(mixed_seed(self._share.seed, number, self._share.rank))
        current = self._current = _Epoch(number, start)
        loads = self.loads
        for batch in self._source.batches(number, start):
            current.handed_out += 1
            self._unclaimed += 1
            if isinstance(self.sampler, TokenBatches):
                self._samples += self.sampler.samples(number, start.local + current.handed_out - 1, start.offset, 1)
            if self.post_process is not None:
                state = self._source.order_state(self._source.after(current.start, current.handed_out))
                batch = self.post_process(batch, state["curriculum"])
            yield batch
            if self.loads != loads:
                raise UsageError(
                    "engine.training_dataloader: the position in the data was restored while this iteration ran; begin "
                    "a new iteration, which goes on from there"
                )
        current.ended = True

    @property
    def progress(self) -> str:
        """Progress for messages: `has given 3 batches of epoch 0`; empty before the first."""
        current = self._current
        if current is None:
            return ""
        done = "has ended after" if current.ended else "has given"
        return f"{done} {current.handed_out} batches of epoch {current.number}"

    def set_epoch(self, epoch: int) -> None:
        """Select the epoch of the next iteration, from its beginning. A position restored by `load_state_dict` is kept
        if it is in the same epoch.
        """
        number, start = self._next
        if epoch == number:
            return
        if any(start):
            _log.warning("set_epoch(%d) discards the restored position in epoch %d of the training data", epoch, number)
        self._next = (epoch, Position())

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last yielded batch, as JSON types. After an early end of a loop it stays inside
        that epoch, although another iteration in the same process starts the next one.
        """
        if self._current is None or self._current.ended:
            epoch, position = self._next
        else:
            epoch = self._current.number
            position = self._source.after(self._current.start, self._current.handed_out)
        return {
            "epoch": epoch,
            "position": position.local,
            "offset": position.offset,
            "kind": self._source.kind,
            "world_size": self._share.world_size,
            **self._source.order_state(position),
            **({} if self._share.unequal is None else {"unequal": self._parts_from(position)}),
        }

    def _parts_from(self, position: Position) -> list[list[object]]:
        unequal = self._share.unequal
        assert unequal is not None
        if not any(position):  # an epoch begins with the newest parts
            return [[0, list(unequal.newest)]]
        return unequal.state(position.local // self._share.batch_size)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved position and order (seed, shuffling): the next iteration yields the rest of its epoch.

        With the engine's sampler or stream, the number of ranks and the batch size may differ from the saved run:
        exactly the samples seen by any rank are skipped. Raises CheckpointError if the state is of another kind of data
        or dataset length, or of another number of ranks where the order cannot be redistributed.
        """
        for name, least in (("epoch", 0), ("position", 0), ("offset", 0), ("world_size", 1), ("seed", None)):
            value = state.get(name, 0 if name == "offset" else None)  # old checkpoints have no offset
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
        position = self._source.restore_order(state)
        parts = self._share.unequal
        same = parts is not None and self._same_parts(parts, state, position)
        # Blocks begin where the batches of all ranks have ended, also with another batch size.
        if state["world_size"] != self._share.world_size or self._share.blocks or (parts is not None and not same):
            position = self._source.divided_anew(position, state["world_size"])
        self._next = (state["epoch"], position)
        self._current = None
        self._unclaimed = self._samples = 0
        self.loads += 1

    def _same_parts(self, parts: Unequal, state: Mapping[str, Any], position: Position) -> bool:
        """Take over saved sizes of the same ranks and mean; return False if the rest of the epoch is divided anew."""
        share, saved = self._share, state.get("unequal")
        if not saved or not all(share.fits(sizes) for _, sizes in saved):
            return False
        for first, sizes in saved:
            parts.change(first, sizes)
        return position.local % share.batch_size == 0

    @property
    def parts(self) -> Sizes | None:
        """Samples of each rank in a micro-batch, as set last; None: equally many."""
        return None if self._share.unequal is None else self._share.unequal.newest

    def claim(self) -> int:
        """Return the number of samples of the batch that was yielded last. Raises UsageError if several were yielded
        since the last call, because it is then unknown which one is meant, or none at all.
        """
        count, self._unclaimed = self._unclaimed, 0
        if count > 1 or self._current is None or not self._current.handed_out:
            raise UsageError(
                f"unequal micro-batches: {count} batches were taken from engine.training_dataloader for one backward "
                "pass, and its weight is the number of samples of one. Take each batch when it is needed (worker "
                "processes may read ahead), or pass engine.backward(loss, weight=number of samples)"
            )
        assert self._share.unequal is not None
        return self._share.unequal.at(self._number(self._current) - 1)[self._share.rank]

    def claim_samples(self, steps: int) -> int:
        """Return the samples of all ranks in the `steps` micro-batches that each rank has had since the last call, of
        dynamic batching. Raises UsageError if there were more or fewer.
        """
        count, samples = self._unclaimed, self._samples
        self._unclaimed = self._samples = 0
        if count != steps:
            raise UsageError(
                f"dynamic batching: {count} batches were taken from engine.training_dataloader for a step of {steps} "
                "micro-batches, and the learning rate depends on their samples. Take each batch when it is needed"
            )
        return samples

    def divide(self, sizes: Sequence[int]) -> None:
        """Change the ranks' parts, from the first micro-batch on that no worker process may have begun (all ranks call
        between the same two batches).
        """
        assert self._share.unequal is not None
        ahead = 2 * self.num_workers  # batches that torch's loader asks its workers for
        current = self._current
        if current is None or current.ended:
            self._share.unequal.begin_epoch()
        self._share.unequal.change(0 if current is None or current.ended else self._number(current) + ahead, sizes)

    def _number(self, current: _Epoch) -> int:
        return current.start.local // self._share.batch_size + current.handed_out


class _Epoch:
    def __init__(self, number: int, start: Position) -> None:
        self.number = number
        self.start = start
        self.handed_out = 0
        self.ended = False
