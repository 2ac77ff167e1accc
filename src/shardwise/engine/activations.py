"""Activation offload and activation checkpointing of an engine's forward passes."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.compat import never_compiled
from shardwise.engine.observers import StepObserver
from shardwise.memory import Accountant
from shardwise.offload import ActivationOffload
from shardwise.recompute import times
from shardwise.recompute.settings import Settings, following, in_force
from shardwise.trees import tensors_in
from shardwise.utils.logging import logger

if TYPE_CHECKING:
    from shardwise.config import Config
    from shardwise.engine.step import TrainStep
    from shardwise.parallel.tensor.group import TensorGroup


class Activations(StepObserver):
    """Applies the sections `activation_offload` (not to buffers of `module`) and `activation_checkpointing`."""

    def __init__(
        self,
        config: Config,
        module: nn.Module,
        device: torch.device,
        accountant: Accountant,
        group: TensorGroup | None = None,
        step: TrainStep | None = None,
    ) -> None:
        self._step = step
        self.active = step is not None
        self._group = group
        self._settings = Settings.of(config.activation_checkpointing)
        self._moves = config.activation_offload.enabled
        every = config.steps_per_print
        self._every = int(every) if every and math.isfinite(every) else 1
        self._offload = ActivationOffload(
            min_bytes=config.activation_offload.min_bytes, device=device, accountant=accountant, stay=module.buffers()
        )

    @never_compiled
    def around(self, given: Any) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a forward pass; `given` are the arguments, which are not offloaded."""
        if not (self._moves or self._settings or in_force()):
            return contextlib.nullcontext()
        return self._around(given)

    @contextlib.contextmanager
    def _around(self, given: Any) -> Any:
        moved = self._offload.around(tensors_in(given)) if self._moves else contextlib.nullcontext()
        with following(self._settings, self._offload, self._group), moved:
            yield

    def after_step(self) -> None:
        """Log the times of checkpointed functions, if `profile` is set and a log line is due."""
        assert self._step is not None
        steps = self._step.global_steps
        if steps % self._every == 0 and (self._settings | in_force()).profile:
            for name, found in times(clear=True).items():
                logger.info("step=%d checkpointed %s: %s", steps, name, found)

    def close(self) -> None:
        """Free the host buffers that are kept between passes."""
        self._offload.close()
