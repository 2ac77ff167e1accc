"""Parts of a batch by the speed of ranks: measured at intervals, and changed if the slowest rank gains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from shardwise.data.unequal import divided_by_speed
from shardwise.device import Later
from shardwise.engine.observers import NOTHING, Phase, StepObserver
from shardwise.errors import ConfigError
from shardwise.profile.breakdown import INNER, Breakdown
from shardwise.utils.logging import logger

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator
    from shardwise.comm.replicas import Replicas
    from shardwise.config import Config
    from shardwise.engine.batch import Batches
    from shardwise.engine.step import TrainStep

_MEASURED = 20
"""Steps whose passes are timed before the parts are divided anew."""
_WORTH = 0.05
"""Least part of the slowest rank's time that a change must gain."""


class _Computing(Breakdown):
    """Times passes without waits for other ranks."""

    ranges = frozenset({"wait for gather", "reduce", "wait for reduction"})


class UnequalBatches(StepObserver):
    """Divides the batches of the training dataloader by the time that ranks compute per sample (all ranks alike)."""

    def __init__(
        self, config: Config, batches: Batches, step: TrainStep, job: Communicator, device: torch.device
    ) -> None:
        settings, local = config.unequal_batches, config.local_sgd
        self._batches, self._step, self._job, self._device = batches, step, job, device
        self._largest = settings.largest
        # Replicas that step on their own meet only where they exchange.
        unit = local.sync_every if local.enabled else 1
        self._every = -(-settings.every // unit) * unit
        self._times = _Computing(device.type == "cuda")
        self._claimed: int | None = None  # samples before the steps that are timed
        self.active = settings.enabled and settings.samples is None and batches.ranks > 1

    @override
    def during(self, phase: Phase, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AbstractContextManager[Any]:
        if phase == "step" or self._step.global_steps % self._every < self._every - _MEASURED:
            return NOTHING
        if self._claimed is None:
            self._claimed = self._batches.claimed
        return self._times.backward()

    @override
    def after_step(self) -> None:
        """Measure and divide anew where an interval ends."""
        if self._step.global_steps % self._every:
            return
        seconds, begun, self._claimed = self._times.read().get(INNER, 0.0), self._claimed, None
        samples = 0 if begun is None else self._batches.claimed - begun
        self._divide(seconds / samples if samples else 0.0)

    def _divide(self, own: float) -> None:
        """Divide by the seconds per sample of all ranks; 0: not measured."""
        loader, data = self._batches.training_dataloader, self._batches.data
        assert loader is not None and loader.parts is not None
        # Ranks that share their samples each bring a part of the mean.
        costs = torch.zeros(data.world, dtype=torch.float64, device=self._device)
        costs[data.rank] = own * data.world / self._job.world
        self._job.all_reduce(costs, "unequal batches").wait()
        cost = Later(costs).read()
        if not all(cost):  # a rank has measured nothing: its passes are not those of the engine
            return
        old, mean = loader.parts, sum(loader.parts) // data.world
        new = divided_by_speed(sum(old), [1.0 / each for each in cost], int(self._largest * mean))
        before, after = (max(size * each for size, each in zip(sizes, cost, strict=True)) for sizes in (old, new))
        if after > (1 - _WORTH) * before:
            return
        loader.divide(new)
        if self._job.rank == 0:
            logger.info(
                "step=%d unequal batches: samples of the ranks in a micro-batch are now %s (before: %s); the slowest "
                "rank computes %.3g ms, before %.3g ms",
                self._step.global_steps,
                _short(new),
                _short(old),
                1e3 * after,
                1e3 * before,
            )


def _short(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes)) if len(sizes) <= 16 else f"{min(sizes)} to {max(sizes)}"


def first_sizes(config: Config, batches: Batches) -> list[int] | None:
    """Return the samples of each rank at the beginning; None: micro-batches are equal. Raises ConfigError if they
    cannot become others.
    """
    settings = config.unequal_batches
    if not settings.enabled:
        return None
    if settings.samples is None and batches.micro < 2:
        raise ConfigError(
            "unequal_batches: a micro-batch of 1 sample cannot be divided otherwise. Set "
            "train_micro_batch_size_per_gpu to 4 or more, and gradient_accumulation_steps lower"
        )
    return list(settings.samples or [batches.micro] * batches.ranks)


def part_of_replica(batches: Batches, replicas: Replicas) -> float:
    """Return the part of the samples that this rank's replica has, in multiples of the mean over replicas."""
    loader = batches.training_dataloader
    if loader is None or loader.parts is None:
        return 1.0
    members = replicas.job.members
    own = sum(loader.parts[members.index(rank)] for rank in replicas.own.members)
    return own * replicas.count / sum(loader.parts)


def check_divisible(config: Config, data: object, trained: bool) -> None:
    """Raise ConfigError without training data or if no losses are weighed (`trained`: an optimizer and no pipeline)."""
    if config.unequal_batches.enabled and not (trained and data is not None):
        raise ConfigError(
            "unequal_batches: needs an optimizer, a model that is no pipeline, and initialize(training_data=...), "
            "whose loader divides the batches. With a loader of your own give each rank the samples that it is to "
            "have, and call engine.backward(loss, weight=number of samples)"
        )
