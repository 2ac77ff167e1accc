"""Batch sizes of an engine: reading and changing them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.errors import BatchSizeError

if TYPE_CHECKING:
    from shardwise.config import Config, Resolution


def accumulated(config: Config, steps: int) -> int:
    """Return how many micro-batches a plan of memory has to count with.

    Where the script counts them, gradients are always added up as if there were several.
    """
    return steps if config.managed_gradient_accumulation else max(2, steps)


class BatchSizes:
    """Mixin of `Engine`: the batch triple, which may be changed between windows.

    train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * data-parallel ranks, always.
    """

    _resolution: Resolution
    _batch: tuple[int, int]

    @property
    def dp_world_size(self) -> int:
        """Number of data-parallel ranks."""
        raise NotImplementedError

    def initial_batch(self) -> tuple[int, int]:
        """Return (micro-batch size, accumulation steps) of the configuration."""
        config = self._resolution.config
        assert config.train_micro_batch_size_per_gpu is not None and config.gradient_accumulation_steps is not None
        return int(config.train_micro_batch_size_per_gpu), int(config.gradient_accumulation_steps)

    def train_batch_size(self) -> int:
        """Return the number of samples of all ranks in one step."""
        micro, steps = self._batch
        return micro * steps * self.dp_world_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the number of samples of one rank in one forward pass."""
        return self._batch[0]

    def gradient_accumulation_steps(self) -> int:
        """Return the number of micro-batches in one step."""
        return self._batch[1]

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return (train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps)."""
        return self.train_batch_size(), *self._batch

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the global batch size by changing the number of accumulation steps.

        Raises:
            BatchSizeError: it is not a positive multiple of micro-batch size times ranks, or the script counts
                micro-batches, not the engine.
        """
        micro, _ = self._batch
        unit = micro * self.dp_world_size
        if not self._resolution.config.managed_gradient_accumulation and train_batch_size != unit:
            raise BatchSizeError(
                f"train_batch_size cannot be set to {train_batch_size}: with managed_gradient_accumulation false the "
                "script decides how many micro-batches make a step, by when it calls engine.step()"
            )
        if train_batch_size <= 0 or train_batch_size % unit:
            raise BatchSizeError(
                f"train_batch_size {train_batch_size} is not a positive multiple of {unit} "
                f"(micro-batch {micro} x {self.dp_world_size} ranks); "
                f"the nearest is {max(1, round(train_batch_size / unit)) * unit}"
            )
        self._batch = (micro, train_batch_size // unit)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the micro-batch size; the number of accumulation steps stays.

        Raises:
            BatchSizeError: it is not positive.
        """
        if micro_batch_size <= 0:
            raise BatchSizeError(f"train_micro_batch_size_per_gpu must be positive, got {micro_batch_size}")
        self._batch = (micro_batch_size, self._batch[1])
