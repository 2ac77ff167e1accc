"""Unequal micro-batches for ranks of unequal speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shardwise.errors import ConflictError

from .base import ConfigSection, Contradiction, Int, Ints, key


class UnequalBatches(ConfigSection):
    """`unequal_batches`: data-parallel ranks take parts of different size of a batch, which stays the same. Not a
    section of DeepSpeed.
    """

    enabled: bool = key(
        False,
        "Divide each micro-batch of all ranks by their speed, or as `samples` says. Losses count by their samples.",
    )
    samples: Ints | None = key(
        None,
        "Samples of each data-parallel rank in a micro-batch, with a mean of train_micro_batch_size_per_gpu; null: by "
        "measured speed.",
    )
    every: Int = key(100, "Steps between two measurements; with `local_sgd` at the next exchange.", gt=0)
    largest: float = key(
        2.0, "Most samples of a rank, in multiples of train_micro_batch_size_per_gpu: its memory must suffice.", ge=1
    )

    def contradictions(self, at: Callable[[str], str]) -> Iterator[Contradiction]:
        """Yield samples that are no parts."""
        if self.samples is not None and min(self.samples, default=0) < 1:
            yield "samples", f"is {self.samples}; each rank needs at least 1", ConflictError
