"""Batch sizes of an engine, and dataloaders of each rank's samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shardwise.data import EngineDataLoader
from shardwise.errors import BatchSizeError, UsageError

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator
    from shardwise.config import Config

ROUTES = ("train", "eval", "predict")


def accumulated(config: Config, steps: int) -> int:
    """Return the number of micro-batches for a memory plan; at least two if each backward pass accumulates."""
    return steps if config.managed_gradient_accumulation else max(2, steps)


class Batches:
    """Batch sizes, which may change between windows, and the training dataloader. train_batch_size =
    train_micro_batch_size_per_gpu * gradient_accumulation_steps * data-parallel ranks, always.
    """

    def __init__(self, config: Config, data: Communicator, device: torch.device) -> None:
        assert config.train_micro_batch_size_per_gpu is not None and config.gradient_accumulation_steps is not None
        self.micro, self.steps = int(config.train_micro_batch_size_per_gpu), int(config.gradient_accumulation_steps)
        self.training_dataloader: EngineDataLoader | None = None
        self._config = config
        self.data = data
        self.claimed = 0  # samples of this rank, where micro-batches are unequal
        self._device = device

    @property
    def ranks(self) -> int:
        """Number of data-parallel ranks."""
        return self.data.world

    @property
    def total(self) -> int:
        """Samples of all ranks in a step."""
        return self.micro * self.steps * self.data.world

    def samples(self, passes: int) -> int:
        """Return the samples of all ranks in `passes` micro-batches of each."""
        return self.micro * passes * self.data.world

    def own_weight(self) -> int | None:
        """Return the number of samples of the newest batch, by which its loss counts; None: micro-batches are equal."""
        loader = self.training_dataloader
        if loader is None or loader.parts is None:
            return None
        samples = loader.claim()
        self.claimed += samples
        return samples

    def set_total(self, train_batch_size: int) -> None:
        """Change the number of accumulation steps to reach a global batch size."""
        unit = self.micro * self.data.world
        if not self._config.managed_gradient_accumulation and train_batch_size != unit:
            raise BatchSizeError(
                f"train_batch_size cannot be set to {train_batch_size}: with managed_gradient_accumulation false the "
                "script decides how many micro-batches make a step, by when it calls engine.step()"
            )
        if train_batch_size <= 0 or train_batch_size % unit:
            raise BatchSizeError(
                f"train_batch_size {train_batch_size} is not a positive multiple of {unit} "
                f"(micro-batch {self.micro} x {self.data.world} ranks); "
                f"the nearest is {max(1, round(train_batch_size / unit)) * unit}"
            )
        self.steps = train_batch_size // unit

    def set_micro(self, micro_batch_size: int) -> None:
        """Change the micro-batch size."""
        if micro_batch_size <= 0:
            raise BatchSizeError(f"train_micro_batch_size_per_gpu must be positive, got {micro_batch_size}")
        self.micro = micro_batch_size

    def loader(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Iterable[Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
        unequal: Sequence[int] | None = None,
    ) -> EngineDataLoader:
        """Return a dataloader of this rank's samples, as `initialize(training_data=...)` makes one.

        Checkpoints save only the position of `engine.training_dataloader`.

        Args:
            dataset: a map-style or iterable dataset.
            batch_size: samples in a batch of this rank; None: train_micro_batch_size_per_gpu.
            route: "train" shuffles a map-style dataset without a sampler; "eval" and "predict" keep its order.
            pin_memory: pin batches for a CUDA device; no effect for a CPU.
            data_sampler: yields this rank's indices.
            collate_fn: makes a batch from a list of samples.
            num_local_io_workers: prefetching processes; None: none.
            unequal: samples of each rank in a micro-batch.

        Raises:
            UsageError: an unknown route.
            ConfigError: the settings contradict each other or the dataset, or yield no batch.
        """
        if route not in ROUTES:
            raise UsageError(f"deepspeed_io(route={route!r}): expected one of {', '.join(ROUTES)}")
        micro = self._config.train_micro_batch_size_per_gpu
        return EngineDataLoader(
            dataset,
            batch_size=int(micro or 1) if batch_size is None else batch_size,
            rank=self.data.rank,
            world_size=self.data.world,
            collate_fn=collate_fn,
            data_sampler=data_sampler,
            shuffle=route == "train",
            drop_last=self._config.dataloader_drop_last,
            num_workers=num_local_io_workers or 0,
            blocks=route == "train" and self._config.sample_seed is not None,
            unequal=unequal,
            device=self._device if pin_memory else None,
        )
