"""Observers of an engine's passes and steps: base class, list, monitor events, activation checkpointing."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from typing_extensions import override

from shardwise.compat import never_compiled
from shardwise.memory import Accountant
from shardwise.monitor import Monitor
from shardwise.offload import ActivationOffload
from shardwise.profile.breakdown import BACKWARD, FORWARD, INNER, REDUCE, STEP
from shardwise.recompute import times
from shardwise.recompute.settings import Settings, calls, following, in_force
from shardwise.trees import tensors_in
from shardwise.utils.logging import logger, warn_once

if TYPE_CHECKING:
    from shardwise.config import Config
    from shardwise.engine.step import TrainStep
    from shardwise.parallel.tensor.group import TensorGroup

Phase = Literal["forward", "backward", "step"]

NOTHING: AbstractContextManager[Any] = contextlib.nullcontext()


class StepObserver:
    """Observes the passes and steps of one engine; `active` False: disabled, the engine calls no method."""

    active = True

    def during(self, phase: Phase, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AbstractContextManager[Any]:
        """Return a context for a phase of training; the arguments are those of a forward pass."""
        return NOTHING

    def after_step(self) -> None:
        """Observe the end of an accumulation window."""


class Observers:
    """Calls the active observers in order."""

    def __init__(self, observers: Iterable[StepObserver]) -> None:
        self._observers = tuple(observer for observer in observers if observer.active)
        # Because most observers observe only the ends of windows.
        self._of_phases = [one for one in self._observers if type(one).during is not StepObserver.during]

    @never_compiled
    def during(
        self, phase: Phase, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> AbstractContextManager[Any]:
        """Return a context of all observers for a phase."""
        if not self._of_phases:
            return NOTHING
        contexts = [observer.during(phase, args, kwargs or {}) for observer in self._of_phases]
        contexts = [context for context in contexts if context is not NOTHING]
        if len(contexts) < 2:
            return contexts[0] if contexts else NOTHING
        return _all_of(contexts)

    def after_step(self) -> None:
        """Call the observers at the end of an accumulation window."""
        for observer in self._observers:
            observer.after_step()


@contextlib.contextmanager
def _all_of(contexts: list[AbstractContextManager[Any]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


# -- monitor events ----------------------------------------------------------------------------------------------------

PREFIX = "Train/Samples/"
_TIMES = {
    FORWARD: "forward",
    BACKWARD: "backward",
    INNER: "backward_inner",
    REDUCE: "backward_allreduce",
    STEP: "step",
}
"""Phase of a step -> suffix of its event after `elapsed_time_ms_`."""


class StepEvents(StepObserver):
    """Writes loss, learning rates, loss scale, gradient norm, speed and anomalies, by global samples. The host never
    waits: device values are read once they have arrived. Times include the script's own work.
    """

    def __init__(self, monitor: Monitor, step: TrainStep) -> None:
        self._monitor = monitor
        self._step = step
        self._ended: float | None = None
        self.active = monitor.writes

    @override
    def after_step(self) -> None:
        """Write the values of the last step report."""
        report = self._step.last_step
        noticed = self._step.anomalies.take_new()
        if report is None:
            return
        events = {"train_loss": report.loss, "grad_norm": report.grad_norm}
        # The first group has the name that scripts expect.
        rates = {f"lr_{group}" if group else "lr": rate for group, rate in enumerate(report.lr)}
        scale = {} if self._step.loss_scaler is None else {"loss_scale": report.loss_scale}
        now = perf_counter()
        speed = {}
        if self._ended is not None:
            seconds = now - self._ended
            speed = {"step_time_ms": 1e3 * seconds, "samples_per_second": report.samples / max(seconds, 1e-9)}
        self._ended = now
        found = {name: value for name, value in events.items() if value is not None} | rates | scale | speed
        at = self._step.global_samples
        # Anomalies without a value are written as 1.
        found |= {one.kind: 1.0 if one.value is None else one.value for one in noticed}
        self._monitor.write_events([(PREFIX + name, value, at) for name, value in found.items()])

    def write_times(self, means: Mapping[str, float]) -> None:
        """Write the mean times of a step's phases, in milliseconds."""
        at = self._step.global_samples
        self._monitor.write_events(
            [(f"{PREFIX}elapsed_time_ms_{_TIMES[part]}", mean, at) for part, mean in means.items()]
        )


# -- activations -------------------------------------------------------------------------------------------------------


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
        self._keys = [name for name, value in config.activation_checkpointing.model_dump().items() if value]
        self._called = False
        self._moves = config.activation_offload.enabled
        every = config.steps_per_print
        self._every = int(every) if every and math.isfinite(every) else 1
        self._offload = ActivationOffload(
            min_bytes=config.activation_offload.min_bytes, device=device, accountant=accountant, stay=module.buffers()
        )

    @never_compiled
    def around(self, given: Any) -> AbstractContextManager[Any]:
        """Return the context of a forward pass; `given` are the arguments, which are not offloaded."""
        if not (self._moves or self._settings or in_force()):
            return NOTHING
        return self._around(given)

    @contextlib.contextmanager
    def _around(self, given: Any) -> Iterator[None]:
        moved = self._offload.around(tensors_in(given)) if self._moves else NOTHING
        before = calls()
        with following(self._settings, self._offload, self._group), moved:
            yield
        self._called = self._called or calls() > before

    @override
    def after_step(self) -> None:
        """Log the times of checkpointed functions, if `profile` is set and a log line is due. Warn of a section without
        a call that reads it.
        """
        assert self._step is not None
        if self._settings and not self._called:
            warn_once(
                f"activation_checkpointing: {', '.join(self._keys)} had no effect, because only "
                "shardwise.checkpointing.checkpoint reads the section. Call it in the model instead of "
                "torch.utils.checkpoint and gradient_checkpointing_enable(), or remove the section"
            )
        steps = self._step.global_steps
        if steps % self._every == 0 and (self._settings | in_force()).profile:
            for name, found in times(clear=True).items():
                logger.info("step=%d checkpointed %s: %s", steps, name, found)

    def close(self) -> None:
        """Free the host buffers that are kept between passes."""
        self._offload.close()
