"""Compression of an engine's model: its schedule follows the steps and the checkpoints of the engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from torch import nn
from typing_extensions import override

from shardwise.compression.compress import SECTION, Compression, compression_for
from shardwise.compression.modules import scheduled
from shardwise.config.schema.compression_training import CompressionTraining
from shardwise.engine.observers import StepObserver
from shardwise.errors import ConflictError, UsageError
from shardwise.utils.logging import warn_once

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator
    from shardwise.config import Config
    from shardwise.engine.step import TrainStep

_COUNTER = "compression_steps"


def section_for(model: nn.Module, settings: Config, *, of_deepspeed: bool) -> CompressionTraining:
    """Return the methods for a model. DeepSpeed (`of_deepspeed`: the configuration is written for it) leaves those of
    `compression_training` to `init_compression`; a warning names the call if the model has none.
    """
    if not (of_deepspeed and settings.compression_training.enabled) or Compression.of(model) is not None:
        return settings.compression_methods
    warn_once(
        f"`{SECTION}`: the engine leaves this section to the script, and {type(model).__name__} is not compressed. To "
        "compress it, call deepspeed.compression.compress.init_compression(model, config) before initialize()"
    )
    return settings.model_copy(update={SECTION: CompressionTraining()}).compression_methods


def prepare(
    model: nn.Module, section: CompressionTraining, undo: ExitStack, *, pipeline: bool, local_sgd: bool
) -> Compression | None:
    """Return the compression of a model, which is installed now if `init_compression` was not called; `undo` then
    removes it. Raises as `compression_for` and `check_combinations`.
    """
    check_combinations(model, section, pipeline=pipeline, local_sgd=local_sgd)
    before = Compression.of(model)
    found = None if pipeline else compression_for(model, section)
    if found is not None and before is None:
        undo.callback(found.remove, model, inputs=True)
    return found


def check_combinations(model: nn.Module, section: CompressionTraining, *, pipeline: bool, local_sgd: bool) -> None:
    """Raise ConflictError if a pipeline, or a model under `local_sgd`, is compressed by a schedule."""
    prepared = scheduled(model)
    if (prepared or section.enabled) and (pipeline or local_sgd):
        other = "a pipeline, whose stages have other modules" if pipeline else "local_sgd, whose replicas differ"
        fix = f", or end that of {prepared[0]!r} with redundancy_clean() before initialize()" if prepared else ""
        raise ConflictError(f"{SECTION} cannot be combined with {other}. Switch one of them off{fix}")


def check_optimizer(compression: Compression, optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError if an optimizer was built without the scores that pruning has added to the model."""
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, scores in compression.scores():
        if scores.requires_grad and id(scores) not in stepped:
            raise UsageError(
                f'{SECTION}: the optimizer does not have {name!r}, the scores of the method "topk". Call '
                "init_compression() before you build it, and give it all of model.parameters()"
            )


class Compressing(StepObserver):
    """Advances the compression of a model; `compression` None: nothing to do.

    The schedules are ahead of the engine's steps if a compressed model was loaded without its counters.
    """

    def __init__(self, compression: Compression | None, step: TrainStep, job: Communicator, model: nn.Module) -> None:
        self._compression = compression
        self._step = step
        self._job = job
        self._ahead = 0
        self.active = compression is not None
        if compression is not None:
            self._prefix = compression.prefix(model)
            compression.share(job)
            compression.advance(step.global_steps, job)

    @override
    def after_step(self) -> None:
        """Go on to the next step."""
        assert self._compression is not None
        self._compression.advance(self._ahead + self._step.global_steps, self._job)

    def counters(self) -> dict[str, int]:
        """Return the counter of a checkpoint."""
        return {} if self._compression is None else {_COUNTER: self._compression.step}

    def loaded(self, names: Collection[str], counters: Mapping[str, int] | None = None, *, taken: bool = False) -> None:
        """Follow a load of parameters and buffers of some names; `counters` of the checkpoint, which the step has
        `taken`, or not.
        """
        if self._compression is None:
            return
        ahead = 0 if taken else self._ahead
        if counters is not None and _COUNTER in counters:
            ahead = max(ahead, counters[_COUNTER] - self._step.global_steps)
        self._ahead = ahead
        own = {name[len(self._prefix) :] for name in names if name.startswith(self._prefix)}
        self._compression.loaded(ahead + self._step.global_steps, own, self._job)
