"""Samples by difficulty: a batch is drawn from the samples whose metrics are at most as difficult as its step allows.

Samples that become eligible in the same step form a cluster. A batch takes from each cluster in proportion to its size,
in a random order that begins anew only when the whole cluster has been seen. Batches are those of all ranks together,
so they depend neither on the number of ranks nor on prefetching.

Paper: Li et al., "DeepSpeed Data Efficiency: Improving Deep Learning Model Quality and Training Efficiency via
Efficient Data Sampling and Routing" (2022).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler
from typing_extensions import override

from shardwise.config.curricula import AT, Metric, check_samples, metrics_of
from shardwise.config.schema.data import DataEfficiency
from shardwise.data.fetch import Indices, SeededDataset, mixed_seed
from shardwise.data.indexed import Array, MMapIndexedDataset
from shardwise.data.sources import Position, SampleSource, Share
from shardwise.errors import CheckpointError, ConfigError, UsageError
from shardwise.schedules.difficulty import CurriculumScheduler, Difficulty


class _Order:
    """Samples in the order of a metric, of which a difficulty selects the first."""

    def __init__(self, name: str, metric: Metric, samples: int) -> None:
        settings, at = metric.settings, AT.format(name)
        assert settings.index_to_sample_path is not None
        rows = MMapIndexedDataset(settings.index_to_sample_path, integers=True)
        self.samples = rows.values
        self._values: Array | None = None
        if len(self.samples) != samples:
            raise ConfigError(
                f"{at.format('index_to_sample_path')}: has {len(self.samples)} samples, and the dataset has {samples}; "
                "analyze this dataset"
            )
        if settings.difficulty_type == "value":
            assert settings.index_to_metric_path is not None
            self._values = MMapIndexedDataset(settings.index_to_metric_path, integers=True).values
            self._ends = np.cumsum(rows.sizes, dtype=np.int64)
            if len(self._values) != len(self._ends) or np.any(self._values[1:] < self._values[:-1]):
                raise ConfigError(
                    f"{at.format('index_to_metric_path')}: has {len(self._values)} values, expected ascending ones for "
                    f"the {len(self._ends)} rows of index_to_sample_path; take both files of one analysis"
                )

    def count(self, difficulty: Difficulty) -> int:
        """Return the number of samples up to a difficulty: a value, or a percentage."""
        if self._values is None:
            return min(len(self.samples), -int(-len(self.samples) * difficulty // 100))
        rows = int(np.searchsorted(self._values, difficulty, side="right"))
        return int(self._ends[rows - 1]) if rows else 0


class _Cluster:
    """Samples that became eligible together, and the position in their random order."""

    def __init__(
        self, samples: Array, seed: int, difficulties: list[Difficulty], lap: int = 0, position: int = 0
    ) -> None:
        self.samples, self.difficulties, self.lap, self.position = samples, difficulties, lap, position
        self._seed = seed
        self._shuffled: tuple[int, torch.Tensor] = (-1, torch.empty(0, device="cpu"))

    def take(self, count: int) -> Iterator[int]:
        """Yield the next samples of the order, which begins anew after the last one."""
        while count:
            if self._shuffled[0] != self.lap:
                generator = torch.Generator("cpu").manual_seed(mixed_seed(self._seed, self.lap))
                self._shuffled = self.lap, torch.randperm(len(self.samples), generator=generator, device="cpu")
            chosen = self._shuffled[1][self.position : self.position + count].numpy()
            yield from self.samples[chosen].tolist()
            count -= len(chosen)
            self.position += len(chosen)
            if self.position == len(self.samples):
                self.lap, self.position = self.lap + 1, 0

    def state(self) -> list[Any]:
        """Return difficulties and position as JSON types."""
        return [self.difficulties, self.lap, self.position]


class CurriculumSampler(Sampler[list[int]]):
    """Yields the indices of this rank's micro-batches, by `data_efficiency.data_sampling.curriculum_learning`.

    The engine makes one for `training_data`; a script may pass one as the `batch_sampler` of torch's loader, and save
    its state.

    Args:
        data_efficiency_config: the section `data_efficiency`.
        one_epoch_total_samples: samples of the dataset.
        micro_batch_size: samples of a micro-batch of a rank.
        data_parallel_rank, data_parallel_size: place among the ranks with different samples.
        gradient_accumulation_steps: micro-batches of a step.
        drop_last: has no effect: all batches are full.
        data_parallel_group, global_rank: have no effect: ranks compute the same without communication.

    Raises:
        ConfigError: a key is wrong; a metric's files are missing, damaged, or of another dataset.

    Attributes:
        schedules: schedule of each metric's difficulty, by name.
        batch: samples of all ranks in a step.
        step: number of the newest batch.
        number: micro-batches of this rank in the epoch so far.
    """

    def __init__(
        self,
        data_efficiency_config: DataEfficiency | Mapping[str, Any],
        one_epoch_total_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        data_parallel_group: Any = None,
        gradient_accumulation_steps: int = 1,
        global_rank: int = 0,
        drop_last: bool = True,
    ) -> None:
        config = check_samples(data_efficiency_config)
        self.seed, self._samples = config.seed, one_epoch_total_samples
        self._micro, self._rank, self._ranks = micro_batch_size, data_parallel_rank, data_parallel_size
        self.steps = gradient_accumulation_steps
        self.batch = micro_batch_size * data_parallel_size * gradient_accumulation_steps
        assert config.curriculum is not None
        self._metrics = metrics_of(config.curriculum)
        self.schedules = {
            name: CurriculumScheduler(
                {**metric.settings.model_dump(), "schedule_config": metric.schedule.model_dump(exclude_none=True)}
            )
            for name, metric in self._metrics.items()
        }
        self._orders = {
            name: _Order(name, metric, one_epoch_total_samples)
            for name, metric in self._metrics.items()
            if metric.settings.selects
        }
        self._length = config.data_sampling.num_epochs * one_epoch_total_samples // self.batch * self.steps
        self._clusters: list[_Cluster] = []
        self.step = self._taken = 0  # batches begun, and samples that all ranks have taken of the last one
        self.number = 0  # micro-batches of this rank in this epoch
        self._before: dict[int, dict[str, Any]] = {}  # state before the batch that a micro-batch begins
        self.kept = 3  # such states
        self._origin = self._state()  # before the first of them

    def __len__(self) -> int:
        """Return the number of micro-batches of an epoch, which is `num_epochs` passes over the dataset."""
        return self._length

    def begin_epoch(self) -> None:
        """Count micro-batches anew; difficulties and orders go on."""
        if self._taken and self._before:  # an iteration has ended within a batch
            self.load_state_dict(self.state_dict())
        self.number = 0
        self._origin, self._before = self._state(), {}

    def __iter__(self) -> Iterator[list[int]]:
        part = self._micro * self._ranks
        while self.number < self._length:
            again = self._taken > 0
            samples = self._drawn(again=again)
            for start in range(self._taken, self.batch, part):
                own = start + self._micro * self._rank
                self.number += 1
                self._taken = start + part
                yield samples[own : own + self._micro]
            self._taken = 0

    def _drawn(self, *, again: bool) -> list[int]:
        """Return the samples of the next batch of all ranks, or `again` those of a batch that has begun."""
        if not again:
            self.step += 1
            self._grow(self.step)
        first = self.number - self._taken // (self._micro * self._ranks)
        self._before[first] = {**self._state(), "taken": 0}
        for old in sorted(self._before)[: -self.kept]:
            del self._before[old]
        sizes = np.cumsum([len(cluster.samples) for cluster in self._clusters])
        draws = random.Random(mixed_seed(self.seed, self.step))
        places = [draws.random() * int(sizes[-1]) for _ in range(self.batch)]
        counts = np.bincount(np.searchsorted(sizes, places, side="right"), minlength=len(sizes))
        found = [
            sample for cluster, count in zip(self._clusters, counts, strict=True) for sample in cluster.take(int(count))
        ]
        draws.shuffle(found)
        return found

    def _grow(self, step: int) -> None:
        """Add the samples that become eligible in a step as a cluster."""
        now = [schedule.update_difficulty(step) for schedule in self.schedules.values()]
        if not self._clusters or now != self._clusters[-1].difficulties:
            self._add(now)
        if not self._clusters:
            text = ", ".join(f"{name} <= {value:g}" for name, value in zip(self.schedules, now, strict=True))
            raise UsageError(
                f"data_efficiency.data_sampling: no sample has {text}, the difficulty of step {step}; set a larger "
                "min_difficulty"
            )

    def _add(self, difficulties: list[Difficulty], lap: int = 0, position: int = 0) -> None:
        values = dict(zip(self.schedules, difficulties, strict=True))
        before = dict(zip(self.schedules, self._clusters[-1].difficulties, strict=True)) if self._clusters else {}
        falling = [name for name in self._orders if before and values[name] < before[name]]
        if falling:
            raise UsageError(
                f"the difficulty {falling[0]!r} falls from {before[falling[0]]:g} to {values[falling[0]]:g}; "
                "difficulties that select samples can only grow"
            )
        if len(self._orders) == 1:
            ((name, order),) = self._orders.items()
            new = order.samples[order.count(before[name]) if before else 0 : order.count(values[name])]
        else:
            new = np.flatnonzero(self._eligible(values) & ~(self._eligible(before) if before else np.False_))
        if len(new):
            self._clusters.append(
                _Cluster(new, mixed_seed(self.seed, len(self._clusters), 0), difficulties, lap, position)
            )
        elif self._clusters:
            self._clusters[-1].difficulties = difficulties

    def _eligible(self, difficulties: Mapping[str, Difficulty]) -> Array:
        found = np.ones(self._samples, np.bool_)
        for name, order in self._orders.items():
            own = np.zeros(self._samples, np.bool_)
            own[order.samples[: order.count(difficulties[name])]] = True
            found &= own
        return found

    def _state(self) -> dict[str, Any]:
        names = self.schedules
        return {
            "step": self.step,
            "seen": self.number * self._micro * self._ranks,
            "taken": self._taken,
            "batch": self.batch,
            "samples": self._samples,
            "seed": self.seed,
            "clusters": [cluster.state() for cluster in self._clusters],
            "sizes": [len(cluster.samples) for cluster in self._clusters],
            "metrics": list(names),
            "current_difficulties": {name: schedule.get_current_difficulty() for name, schedule in names.items()},
        }

    def state_dict(self, number: int | None = None) -> dict[str, Any]:
        """Return the state after a number of this rank's micro-batches of the epoch, as JSON types; default: after
        those yielded so far. `current_difficulties` has the difficulties of the newest batch, by metric.
        """
        number = self.number if number is None else number
        first = max((begun for begun in self._before if begun < number), default=None)
        part = self._micro * self._ranks
        if first is None:
            return {**self._origin, "seen": number * part}
        return {**self._before[first], "seen": number * part, "taken": (number - first) * part}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state, also on another number of ranks, whose micro-batches then go on with the next samples.

        The saved seed goes on. Raises CheckpointError if metrics, samples or clusters are others, or the rest of a
        batch cannot be divided.
        """
        if state["metrics"] != list(self.schedules):
            raise CheckpointError(
                f"position in the curriculum: it was saved with the metrics {state['metrics']}, and there are "
                f"{list(self.schedules)}; use the same, or begin a new epoch with set_epoch"
            )
        taken = int(state["taken"])
        part = self._micro * self._ranks
        if taken and taken < state["batch"] and (state["batch"] != self.batch or taken % part):
            raise CheckpointError(
                f"position in the curriculum: it was saved after {taken} of {state['batch']} samples of a step, whose "
                f"rest cannot be divided into micro-batches of {part} of all ranks; save after the engine.step() that "
                "ends a window, or use the same batch sizes"
            )
        own, seed = self._clusters, self.seed
        self._clusters, self.seed = [], state.get("seed", seed)  # earlier versions have saved no seed and sizes
        for saved in state["clusters"]:
            self._add(*saved)
        sizes = [len(cluster.samples) for cluster in self._clusters]
        if (
            state.get("samples", self._samples) != self._samples
            or state.get("sizes", sizes) != sizes
            or len(sizes) != len(state["clusters"])
            or any(not 0 <= cluster.position < size for cluster, size in zip(self._clusters, sizes, strict=True))
        ):
            self._clusters, self.seed = own, seed
            raise CheckpointError(
                f"position in the curriculum: it was saved with {state.get('samples', 'other')} samples in clusters of "
                f"{state.get('sizes', 'other sizes')}, and there are {self._samples} in clusters of {sizes}; use the "
                "same dataset and analysis, or begin a new epoch with set_epoch"
            )
        for name, value in state["current_difficulties"].items():
            self.schedules[name].set_current_difficulty(value)
        self.step, self._taken, self._before, self.number = state["step"], taken, {}, state["seen"] // part
        self._origin = {**self._state(), "batch": state["batch"]}
        if taken >= state["batch"]:  # the whole batch: draw it once more, to be after it
            whole, self.batch = self.batch, state["batch"]
            self._drawn(again=True)
            self.batch, self._taken, self._before = whole, 0, {}
            self._origin = self._state()


class CurriculumSource(SampleSource):
    """A map-style dataset with a `CurriculumSampler`; positions count micro-batches of this rank."""

    kind = "curriculum"

    def __init__(self, dataset: Any, sampler: CurriculumSampler, share: Share, options: Mapping[str, Any]) -> None:
        super().__init__(share)
        self.sampler = sampler
        sampler.kept = 3 + 2 * options["num_workers"]  # torch's loader is so many micro-batches ahead
        fetched = SeededDataset(dataset) if options["num_workers"] else dataset
        self._loader: DataLoader[Any] = DataLoader(fetched, batch_sampler=self, **options)
        self._epoch = self._begun = 0

    @override
    def batches(self, epoch: int, start: Position) -> Iterator[Any]:
        if not any(start):
            self.sampler.begin_epoch()
        self._epoch, self._begun = epoch, self.sampler.number
        return self._whole_epoch(iter(self._loader))

    def _whole_epoch(self, batches: Iterator[Any]) -> Iterator[Any]:
        yield from batches
        self.sampler.begin_epoch()  # a state saved from now on is of the next epoch's beginning

    def __iter__(self) -> Iterator[Indices]:
        """Yield the batches of indices of the started iteration, for torch's loader."""
        for number, batch in enumerate(self.sampler):
            indices = Indices(batch)
            indices.seed = mixed_seed(self.share.seed, self._epoch, self.share.rank, self._begun + number)
            yield indices

    @override
    def after(self, start: Position, handed_out: int) -> Position:
        return Position(self._begun + handed_out)

    def __len__(self) -> int:
        return len(self.sampler)

    @override
    def divided_anew(self, position: Position, world_size: int) -> Position:
        return position  # the sampler has divided its samples

    @override
    def order_state(self, position: Position) -> dict[str, Any]:
        return {**super().order_state(position), "curriculum": self.sampler.state_dict(position.local)}

    @override
    def restore_order(self, state: Mapping[str, Any]) -> Position:
        super().restore_order(state)
        self.sampler.load_state_dict(state["curriculum"])
        return Position(self.sampler.number)
