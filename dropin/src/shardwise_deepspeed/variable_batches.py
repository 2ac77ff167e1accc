"""Batches by tokens under DeepSpeed's name; `engine.dynamic_batching` makes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import Subset

from shardwise.data import EngineDataLoader
from shardwise.engine import Engine
from shardwise.errors import UsageError


def get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(
    dataset: Any,
    engine: Engine,
    dataset_seqlens: Sequence[int],
    dataset_filter_ids: Sequence[int] | None = None,
    dataloader_collate_fn: Callable[[list[Any]], Any] | None = None,
    sample_padding_fn: None = None,
) -> tuple[EngineDataLoader, Any, dict[str, Any]]:
    """Return the engine's new training dataloader with micro-batches by tokens, its schedule, and no further arguments.

    The engine multiplies the schedule's learning rate by the factor of each step, so the schedule stays as it is.

    Args:
        dataset: a map-style dataset.
        engine: built with `data_efficiency.data_sampling.dynamic_batching`.
        dataset_seqlens: tokens of each sample.
        dataset_filter_ids: samples that are used; None: all.
        dataloader_collate_fn: makes a batch from a list of samples, and pads them.

    Raises:
        UsageError: `sample_padding_fn` is given.
        ConfigError: the section is not enabled, or no step fits.
    """
    if sample_padding_fn is not None:
        raise UsageError(
            "sample_padding_fn: pad the samples of a batch in dataloader_collate_fn, which gets all of them"
        )
    if dataset_filter_ids is not None:
        dataset = Subset(dataset, dataset_filter_ids)
        dataset_seqlens = [dataset_seqlens[sample] for sample in dataset_filter_ids]
    return engine.dynamic_batching(dataset, dataset_seqlens, dataloader_collate_fn), engine.lr_scheduler, {}
