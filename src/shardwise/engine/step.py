"""The training step: from the micro-batches of an accumulation window to an update of the parameters."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from shardwise.checkpoint.load import set_group
from shardwise.comm.ledger import user_line
from shardwise.compat import never_compiled
from shardwise.data.fetch import mixed_seed
from shardwise.device import Later
from shardwise.engine.anomalies import Anomalies, Anomaly, OverflowReport
from shardwise.engine.inputs import SameInputs
from shardwise.engine.nonfinite import NonFinite, StepGradients
from shardwise.engine.scaling import computes_norm
from shardwise.engine.spikes import Spike, SpikeWatch
from shardwise.engine.window import FACTS, LOSS_FACTS, Weight, Window, check_mixed, checked_weight, reference_for
from shardwise.errors import (
    AnomalyError,
    BatchSizeError,
    LossScaleError,
    NonFiniteError,
    ShardwiseError,
    SyncError,
    UsageError,
)
from shardwise.precision.norms import combine
from shardwise.precision.weights import ignore_nonfinite
from shardwise.utils.logging import logger, warn_once

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator
    from shardwise.config import Config
    from shardwise.engine.batch import Batches
    from shardwise.engine.signals import SignalWatch
    from shardwise.precision.scaler import LossScaler
    from shardwise.zero.model import ShardedModel

_AHEAD, _LOSS = FACTS + 2, FACTS + 3
"""Indices in the step's all-reduce: units needed far ahead of reductions, and the first number of the loss."""

_SCALES: list[float] = []
"""Loss scales of the running `passing` blocks of all engines of this process: a loss has the last one."""

_FEW, _MANY = 4, 64
"""Micro-batches without a step before a warning: with gradient accumulation, and without (scripts may add up losses).
`_FEW` is also the number of steps with a schedule stepped twice before a warning."""


@dataclass(frozen=True)
class StepReport:
    """Report of the last `step()` at a boundary. Tensors are 0-D; norms, weight and loss are fp64.

    Attributes:
        applied: parameters were updated (False: skipped because of an overflow or a spike).
        grad_norm: global L2 norm of the gradients before clipping, or None if not computed.
        clip_coefficient: factor by which clipping reduced the gradients, or None without clipping.
        lr: learning rate of each parameter group in this step.
        clipped_norm: grad_norm times clip_coefficient. None without a norm, or if the step was skipped.
        weight: sum of the weights of the window's micro-batches over all ranks, or None without.
        overflow: non-finite gradients for which the step was skipped, or None. The same on all ranks.
        spike: spike (`anomaly_watch`) known before the update, or None; the reason of a skip. The same on all ranks.
        samples: samples of all ranks in the step.
        loss: weighted mean of the losses of all ranks' `engine.backward()`. None if neither a monitor nor
            `anomaly_watch` needs it, or this rank has passed none.
    """

    applied: bool
    grad_norm: torch.Tensor | None
    clip_coefficient: torch.Tensor | None
    loss_scale: float
    lr: tuple[float, ...]
    clipped_norm: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    overflow: OverflowReport | None = None
    spike: Spike | None = None
    samples: int = 0
    loss: torch.Tensor | None = None


@dataclass(frozen=True)
class _Prepared:
    """A window with gradients ready for the optimizer, once multiplied by `factor`; `report` lacks learning rates.
    `dynamic`: samples, and factor of the learning rates, with dynamic batching. `counted`: backward passes of a rank.
    """

    report: StepReport
    passes: int
    factor: float | torch.Tensor
    counted: float
    dynamic: tuple[int, float] | None


@dataclass(frozen=True)
class _Reduced:
    """Result of the step's all-reduce; `refused`: a rank reported an error that ends the step; `passes`: the mean
    number of backward passes of a rank, or None if not read yet.
    """

    refused: bool = False
    finite: bool = True
    spike: Spike | None = None
    passes: float | None = None


class TrainStep:
    """Steps one engine; driven by the model's passes (`shardwise.zero.passes.driver.Driver`).

    Attributes:
        rewinding: reason for a pending rewind to an in-memory copy, or None.
        window_began: `micro_steps` at the beginning of the accumulation window.
        new_micro_batch: the model has run a training pass since the last step.
        exchanges: other ranks wait for this rank's backward pass, so losses of weight 0 are differentiated, too.
        applied: the last call of `take` updated the parameters.
        rates_before: `last_rates()` after a load without the schedule, until the next update; None otherwise.
    """

    def __init__(
        self,
        sharded: ShardedModel,
        config: Config,
        job: Communicator,
        batches: Batches,
        optimizer: torch.optim.Optimizer | None,
        scheduler: Any,
        scaler: LossScaler | None,
        signals: SignalWatch,
        shows_loss: bool = False,
    ) -> None:
        self.lr_scheduler = scheduler
        self.loss_scaler = scaler
        self.global_steps = self.micro_steps = self.skipped_steps = self.global_samples = 0
        self.window_began = 0
        self.new_micro_batch = self.inside_no_sync_ctxt = self.applied = False
        self.exchanges = False
        self.rates_before: list[Any] | None = None
        self.last_step: StepReport | None = None
        self._sharded = sharded
        self._config = config
        self._job = job
        self._batches = batches
        self._optimizer = optimizer
        self._signals = signals
        self._shows_loss = shows_loss
        self._boundary: bool | None = None
        self._managed = bool(config.managed_gradient_accumulation)
        self._loss_is_scaled = self._scale_entered = self._unscaled = False
        self._in_batch = self._continues = self._broken = False
        self._single = True
        self._prepared: _Prepared | None = None
        watch = config.anomaly_watch
        self.anomalies = Anomalies(job.rank)
        self.watch: SpikeWatch | None = None
        if watch.enabled and sharded.reducer is not None:
            self.watch = SpikeWatch(watch, sharded.numbering.names)
        self.rewinding: str | None = None
        self._computes_norm = computes_norm(config)
        self._non_finite = NonFinite(sharded, job, config, self.anomalies)
        self._window = self._new_window()
        self._pass_weight: Weight | None = None
        self._forwards = self._backwards = 0  # since the last `take`
        self._scheduled: Any = object()  # `last_epoch` at the next step if the script also steps the schedule
        self._own_schedule_steps = 0
        places = {rank: place for place, rank in enumerate(job.members)}
        compared = [places[rank] for rank in batches.data.members if rank in places]
        self._inputs = SameInputs(job.rank, job.world, compared) if len(compared) > 1 else None
        self._reference_agreed = False
        self._pending: tuple[Later, StepGradients, bool] | None = None
        self.attach()

    def attach(self) -> None:
        """Drive the passes of the model, which has been built, or built again."""
        sharded = self._sharded
        sharded.driver = self
        self._non_finite.tracer.follow()
        if self.watch is not None:
            self.watch.follow(sharded.numbering.names)
        if sharded.reducer is not None:
            sharded.reducer.watching = self._non_finite.policy != "ignore"
        self._set_overflow(False)

    @property
    def forwards(self) -> int:
        """Training forward passes of the engine since the last `take`."""
        return self._forwards

    @property
    def open_passes(self) -> int:
        """Forward passes since the last `take` whose backward pass has not ended."""
        return self._forwards - self._backwards

    @property
    def scale(self) -> float:
        """Current loss scale (1.0 without scaling)."""
        return 1.0 if self.loss_scaler is None else self.loss_scaler.scale

    # -- passes ------------------------------------------------------------------------------------------------------

    @never_compiled  # the count changes in every call
    def forward_begins(self, inputs: Any) -> None:
        """Record a training forward pass of the engine."""
        self.new_micro_batch = True
        self._forwards += 1
        if self._sharded.plain is not None:
            self._sharded.plain.follow()
        seed = self._config.sample_seed
        # Two passes of a micro-batch draw different numbers.
        if seed is not None and (self._forwards if self._steps_each else self.open_passes) == 1:
            place = self.micro_steps - self.window_began + self._backwards
            number = place * self._batches.ranks + self._batches.data.rank
            torch.manual_seed(mixed_seed(seed, self.global_steps, number))
        if self._inputs is not None:
            self._inputs.note(inputs)

    @property
    def _steps_each(self) -> bool:
        """Whether the script is expected to call `step` after each micro-batch."""
        return self._managed and self._boundary is None

    def _warn_of_missing_step(self) -> None:
        self._backwards += 1
        steps = self._batches.steps
        most = _MANY if steps == 1 else max(_FEW, steps)
        counts = self._steps_each and not self._in_batch and self._job.rank == 0
        if counts and min(self._forwards, self._backwards) == most:
            warn_once(
                f"engine.backward() at {user_line()} has been called {most} times without engine.step(). Call step() "
                f"after each of them: it counts micro-batches, and updates after {steps} (gradient_accumulation_steps)"
            )

    @property
    def scales_outputs(self) -> bool:
        """Whether gradients may get the loss scale at the model's outputs; those of pipelines have it already."""
        return self.loss_scaler is not None and self._sharded.reducer is not None and not self._in_batch

    def output_scale(self, whole: bool) -> float:
        """Return the factor of gradients at the model's outputs; `whole`: see `scale_gradients_of`."""
        if _SCALES:  # the loss has the scale of the engine whose `backward` runs
            self._scale_entered |= _SCALES[-1] == self.scale
            return 1.0
        assert self._sharded.reducer is not None
        if not whole and not self._sharded.reducer.will_accumulate():
            return 1.0
        self._scale_entered = True
        return self.scale

    def input_scale(self, whole: bool) -> float:
        """Return the factor of gradients at the model's inputs, which undoes that at its outputs."""
        return 1.0 / self.output_scale(whole)

    @contextlib.contextmanager
    def passing(
        self, loss: torch.Tensor, weight: Any = None, scale_wrt_gas: bool = True
    ) -> Iterator[list[torch.Tensor]]:
        """Yield the scaled losses for a micro-batch's backward pass; arguments and errors as in `Engine.backward`."""
        own = self._batches.own_weight()
        weight = own if weight is None else weight
        counted = None if weight is None else self._weight_of(weight, scale_wrt_gas)
        self._sharded.hooks.settle()
        self._agree_on_reference(counted)
        steps = float(self._batches.steps)
        factor: Weight = self.scale * (1.0 if scale_wrt_gas else steps)
        if self._sharded.plain is not None:
            factor /= steps  # because no step divides it
        if counted is not None:
            factor = counted * (self.scale / self._reference)
        zero = counted is not None and not isinstance(counted, torch.Tensor) and counted == 0.0
        window = self._window
        if not zero and not (window.losses is None and window.shown is None):
            kept = loss.detach().clone()  # scripts may add up losses in place
            if window.losses is not None:
                window.losses.append(kept)
            if window.shown is not None:
                whole = kept if scale_wrt_gas else kept * self._batches.steps
                window.shown.append((whole, 1.0 if counted is None else counted))
        scaled = loss if isinstance(factor, float) and factor == 1.0 else loss * factor
        absent = counted == 0.0 if isinstance(counted, torch.Tensor) else None
        handles = ignore_nonfinite(scaled, absent) if zero or absent is not None else []
        self._loss_is_scaled = self._scale_entered = True
        self._pass_weight = counted
        _SCALES.append(self.scale)
        try:
            yield [] if zero and not self.exchanges else [scaled]
        finally:
            _SCALES.pop()
            for handle in handles:
                handle.remove()
            self._loss_is_scaled = False
            self._pass_weight = None

    def begin_batch(self, *, single: bool) -> None:
        """Begin a batch in which ranks run their backward passes one after the other: weights are in units of 1.

        `single`: the batch has one micro-batch.
        """
        self._reference_agreed = self._in_batch = True
        self._single = single

    @contextlib.contextmanager
    def passing_on(self) -> Iterator[None]:
        """Run a backward pass of scaled gradients that come from other ranks, which count the micro-batch."""
        self._sharded.hooks.settle()
        self._loss_is_scaled = self._scale_entered = self._continues = True
        _SCALES.append(self.scale)
        try:
            yield
        finally:
            _SCALES.pop()
            self._loss_is_scaled = self._continues = False

    def _weight_of(self, weight: Any, scale_wrt_gas: bool) -> Weight:
        if not scale_wrt_gas:
            raise UsageError(
                "engine.backward(loss, weight=..., scale_wrt_gas=False): a weighted loss is divided by the sum of the "
                "weights and by nothing else; leave scale_wrt_gas out"
            )
        if self._sharded.plain is not None:
            raise UsageError(
                "engine.backward(loss, weight=...): the engine has no optimizer, and engine.step() divides by the sum "
                "of the weights. Pass optimizer= to initialize(), or multiply the loss yourself"
            )
        if self._config.gradient_allreduce_op != "mean":
            raise UsageError(
                'engine.backward(loss, weight=...): `gradient_allreduce_op` is "sum", and weights make a mean over '
                'ranks and micro-batches. Set it to "mean", or leave the weight out and divide the loss yourself'
            )
        return checked_weight(weight)

    def backward_begins(self) -> None:
        """Agree on the unit of weights before a backward pass."""
        self._agree_on_reference(None)

    def backward_ended(self, brought: bool) -> None:
        """Record the weight of the pass, and whether its gradients lack the loss scale; `step` exchanges both."""
        if self._continues:
            self.new_micro_batch = True
            self._window.brought += brought
        elif brought or self._loss_is_scaled:  # not torch.autograd.grad, which accumulates nothing
            self.new_micro_batch = True
            if self._sharded.reducer is not None:  # else no step ends the window
                self._window.count(self._pass_weight, brought=brought)
                self._warn_of_missing_step()
        self._unscaled |= brought and not self._scale_entered and self.scale != 1.0
        self._scale_entered = False

    @property
    def _reference(self) -> float:
        """The unit of weights: a loss of this weight is unchanged."""
        return (self.loss_scaler.reference_weight if self.loss_scaler is not None else None) or 1.0

    def _agree_on_reference(self, weight: Weight | None) -> None:
        """Agree on the unit of weights under loss scaling: a collective, because all ranks take part in every pass."""
        if self.loss_scaler is None or self._reference_agreed:
            return
        self._reference_agreed = True
        if self.loss_scaler.reference_weight is not None:
            return  # it comes from a checkpoint
        facts = [0.0 if weight is None else weight, float(weight is not None)]
        assert self._sharded.sums is not None
        total, weighted = self._sharded.sums.of(facts, "reference_weight").tolist()
        if total:
            self.loss_scaler.reference_weight = reference_for(total / weighted)

    # -- the accumulation window -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally inside the block; the first backward pass outside reduces the sum.

        Raises:
            SyncError: the configuration shards gradients.
            UsageError: the engine has been destroyed.
        """
        self._sharded.check_open("engine.no_sync()")
        if self._sharded.plan.reduces_micro_batches:
            raise SyncError(
                "no_sync() needs whole gradients on every rank; zero_optimization.stage "
                f"{self._sharded.plan.stage} shards them. "
                "Use stage 0 or 1, or drop no_sync(): accumulation works without it."
            )
        before, self.inside_no_sync_ctxt = self.inside_no_sync_ctxt, True
        plain = self._sharded.plain
        if plain is not None:
            plain.paused = True
        try:
            yield
        finally:
            self.inside_no_sync_ctxt = before
            if plain is not None:
                plain.paused = before

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch is the last one before an update. With `managed_gradient_accumulation` false:
        True, unless declared otherwise for the window.
        """
        if self._boundary is not None:
            return self._boundary
        return not self._managed or self._place_in_window() + 1 == self._batches.steps

    def _place_in_window(self) -> int:
        """Count from the window's beginning, because its length may change and scripts may declare boundaries. If a
        script has set `micro_steps`, windows begin at multiples of their length.
        """
        place, steps = self.micro_steps - self.window_began, self._batches.steps
        return place if 0 <= place < steps else self.micro_steps % steps

    def check_between_windows(self, what: str) -> None:
        """Raise a BatchSizeError in the middle of an accumulation window."""
        had = max(self._window.passes, self.micro_steps - self.window_began if self._managed else 0)
        if had:
            raise BatchSizeError(
                f"{what}: the accumulation window has had {had} micro-batches, whose gradients would be divided by "
                "another number of them. Call it after the engine.step() that ends a window"
            )

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Declare whether the current micro-batch is a boundary; holds until changed. None returns to counting.

        With `managed_gradient_accumulation` false, True marks the next backward pass as the last one before `step()`,
        so it reduces gradients (stages 0 and 1). It holds until that step.
        """
        self._boundary = is_boundary

    def warn_of_zero_grad(self) -> None:
        """Warn once where a script drops gradients between the micro-batches of a window."""
        had = self.micro_steps - self.window_began
        warns = self._managed and self._window.passes and not self._broken and self._job.rank == 0
        if warns and 0 < had < self._batches.steps:
            warn_once(
                f"zero_grad() at {user_line()}: the gradients of the {had} micro-batches that the accumulation window "
                f"has had are dropped, and the mean is still over {self._batches.steps}. The engine drops gradients by "
                "itself after each update: remove the call if it follows each engine.step()"
            )

    def reduces_now(self) -> bool:
        """Whether the backward pass that starts now ends an accumulation window."""
        if self.inside_no_sync_ctxt:
            return False
        return self.is_gradient_accumulation_boundary() if self._managed else self._boundary is True

    def begins_window(self) -> bool:
        """Whether no rank has had a micro-batch of this window; False where the script counts micro-batches."""
        return self._single and self._managed and self.micro_steps == self.window_began

    def _new_window(self) -> Window:
        kept = self._sharded.reducer is not None  # else no step ends the window
        watched = kept and self._non_finite.policy != "ignore"
        window = Window(losses=[] if watched else None, shown=[] if kept and self._shows_loss else None)
        if self._non_finite.tracer.handles:
            self._non_finite.tracer.begin_window(window, self.global_steps)
        return window

    def begin_again(self) -> None:
        """Drop accumulated gradients, and count the micro-batches of the window again."""
        self.drop_gradients()
        self.micro_steps = self.window_began

    def drop_gradients(self) -> None:
        """Drop accumulated gradients, and count micro-batches again after a step that has raised."""
        if self._broken:
            self.micro_steps, self._broken = self.window_began, False
        self._prepared = None
        self._unscaled = False
        self._window = self._new_window()
        self._sharded.give_up_step()
        if self._sharded.reducer is not None:
            self._sharded.reducer.clear()

    # -- the step ----------------------------------------------------------------------------------------------------

    def take(self, lr_kwargs: dict[str, Any] | None = None) -> bool:
        """End a micro-batch; at a boundary update parameters, loss scale and schedule (all ranks call). Returns whether
        a window has ended; if no rank has run a backward pass, nothing changes.
        """
        if self.inside_no_sync_ctxt:
            raise SyncError("engine.step() inside no_sync() would step gradients that no other rank has seen")
        self.applied = False
        self._forwards = self._backwards = 0
        boundary = not self._managed or self.is_gradient_accumulation_boundary()
        # Only the all-reduce shows whether the window is empty on all ranks.
        if not self.new_micro_batch and not (boundary and self._window.passes == 0) and self._prepared is None:
            self._warn_idle("the model has not been run since the last step()")
            return False
        self._broken = True
        taken = boundary and self._update(lr_kwargs)
        self._broken = False
        self.new_micro_batch = False
        if boundary and not taken:
            self.micro_steps = self.window_began
            self._warn_idle("no rank has run a backward pass since the last update")
            return False
        self.micro_steps += 1
        if boundary:
            self.window_began = self.micro_steps
            if not self._managed:
                self._boundary = None
        return boundary

    def _warn_idle(self, why: str) -> None:
        if self._job.rank == 0:
            warn_once(
                f"engine.step() at {user_line()}: {why}, so there is nothing to step: parameters, optimizer state, "
                "schedule and counters stay as they are. Is step() called twice, or backward() left out?"
            )

    def _update(self, lr_kwargs: dict[str, Any] | None) -> bool:
        sharded = self._sharded
        sharded.check_can_step()
        prepared = self._prepared = self._prepared or self._prepare()
        if prepared is None:
            self.drop_gradients()
            return False
        if sharded.reducer is not None and sharded.reducer.passes != prepared.passes:
            raise UsageError(
                "engine.step() has raised before, when the gradients were already prepared for the update, and another "
                "backward pass has come on top of them. Call engine.zero_grad() and compute the window's gradients anew"
            )
        if self.rates_before is not None and self.last_rates() != self.rates_before:
            self.follow_schedule()  # the script has loaded it
        self.rates_before = None
        # Each micro-batch is assumed to have the same number of samples.
        samples = self._batches.total if self._managed else self._batches.samples(prepared.counted)
        scale = 1.0
        if prepared.dynamic is not None:
            samples, scale = prepared.dynamic
        report = replace(prepared.report, lr=tuple(scale * rate for rate in self._rates()), samples=samples)
        overflow = report.overflow
        arguments = self._schedule_arguments(lr_kwargs or {}, samples)
        self._decide(report)
        if report.applied:
            with self._scaled_rates(scale):
                sharded.step(prepared.factor)
        self._prepared = None
        self._unscaled = False
        self._window = self._new_window()
        sharded.end_window(report.applied)
        self.last_step, self.applied = report, report.applied
        self._set_overflow(not report.applied)
        searched = overflow is not None and self._searched(overflow)
        if self.loss_scaler is not None:
            try:
                self.loss_scaler.update(overflow is not None, overflow or "")
            except LossScaleError:
                self.begin_again()
                raise
        if overflow is not None:
            self._log_skipped(report, overflow, searched)
        self.global_steps += 1
        self.global_samples += samples
        if not report.applied:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self._step_schedule(arguments)
        self._exchange_replicas(self.global_steps)
        every = self._config.steps_per_print
        if every and self.global_steps % every == 0 and self._job.rank == 0:
            logger.info("step=%d skipped=%d lr=%s", self.global_steps, self.skipped_steps, self._rates())
        return True

    def _exchange_replicas(self, step: int | None) -> None:
        if not self._sharded.exchange_replicas(step):
            return
        assert self._sharded.sharding.replicas is not None
        job = self._sharded.sharding.replicas[0].job
        told = self._signals.facts(job.rank)
        if told:
            sums = torch.tensor(told, dtype=torch.float32, device=self._sharded.device)
            job.all_reduce(sums, "signals").wait()
            self._signals.hear(Later(sums).read())

    def synchronize_replicas(self) -> None:
        """Make the replicas of `local_sgd` exchange now, and their parameters equal (all ranks call).

        The outer optimizer steps on what replicas have done since their last exchange. Call it at the end of training,
        and before a checkpoint for another number of replicas. Without `local_sgd` it does nothing.

        Raises:
            UsageError: the engine has been destroyed, gradients of an unfinished accumulation window are held, or the
                script has changed parameters since the last step.
        """
        self._sharded.check_open("engine.synchronize_replicas()")
        if self._sharded.local is not None and self._sharded.local.diverged:
            if self._sharded.state.holds_gradients:
                raise UsageError(
                    "engine.synchronize_replicas(): gradients of an unfinished accumulation window are held, which are "
                    "of other parameters. Call it after the engine.step() that ends a window"
                )
            self._sharded.hooks.settle()
            self._sharded.share_changes()
            self._exchange_replicas(None)

    def _schedule_arguments(self, given: Mapping[str, Any], samples: int) -> Mapping[str, Any]:
        """Return the arguments of the schedule's `step`; a UsageError before the update if it cannot take them."""
        if self.lr_scheduler is None:
            return {}
        signature = inspect.signature(self.lr_scheduler.step)
        increment = signature.parameters.get("increment")
        if self._in_batch and increment is not None and increment.default is increment.empty:
            given = {**given, "increment": samples}  # Megatron's schedules count samples
        try:
            signature.bind(**given)
        except TypeError as error:
            raise UsageError(
                f"{type(self.lr_scheduler).__name__}.step(): {error}. Pass its arguments with "
                "engine.step(lr_kwargs={...}); with engine.train_batch(), set engine.lr_scheduler to None and step the "
                "schedule in the script"
            ) from error
        return given

    def _step_schedule(self, arguments: Mapping[str, Any]) -> None:
        last = getattr(self.lr_scheduler, "last_epoch", None)
        self._own_schedule_steps = self._own_schedule_steps + 1 if last == self._scheduled else 0
        if self._own_schedule_steps == _FEW and self._job.rank == 0:
            warn_once(
                f"lr_scheduler.step() of {type(self.lr_scheduler).__name__} is called by the script as well as by "
                "engine.step(), so the schedule advances twice a step. Remove the call, or set engine.lr_scheduler to "
                "None to step it yourself"
            )
        self.lr_scheduler.step(**arguments)
        epoch = getattr(self.lr_scheduler, "last_epoch", None)
        self._scheduled = epoch + 1 if isinstance(epoch, int) else object()

    def _decide(self, report: StepReport) -> None:
        """Mark a rewind, or raise an AnomalyError on all ranks, before the update; only the gradients are lost."""
        overflow, spike = report.overflow, report.spike
        key, action, cause = "", "warn", ""
        if spike is not None:
            key, action, cause = f"anomaly_watch.{spike.kind}", spike.action, str(spike)
        if overflow is not None and action not in ("stop", "rewind"):
            key, action, cause = "non_finite", self._non_finite.policy, f"gradients are not finite: {overflow}"
        if action not in ("stop", "rewind"):
            return
        most = self._config.anomaly_watch.max_rewinds
        if action == "rewind" and self.anomalies.rewinds < most:
            self.rewinding = f'`{key}` is "rewind": {cause}'
            return
        why = f'"{action}"' if action == "stop" else f'"rewind", which was done {most} times (`max_rewinds`) already'
        step, kind = self.global_steps, AnomalyError
        if overflow is not None:
            self.anomalies.note_quietly(Anomaly.of_overflow(step, overflow, "stop"))
            kind = NonFiniteError
        self.begin_again()
        raise kind(
            f"step {step}: {cause}. `{key}` is {why}. Parameters and optimizer state are as they were before this step"
        )

    def _log_skipped(self, report: StepReport, overflow: OverflowReport, searched: bool) -> None:
        before, now = report.loss_scale, self.scale
        change = f"stays at {now:g}" if before == now else f"goes from {before:g} to {now:g}"
        message = "step %d is skipped: overflow in %s%s"
        if searched:
            if self._job.rank == 0:
                logger.info(message, self.global_steps, overflow, f"; the loss scale {change}")
            if self.loss_scaler is not None and self.loss_scaler.exhausted:  # the search has ended
                self._non_finite.tracer.start(self.global_steps)
                self._non_finite.tracer.begin_window(self._window, self.global_steps)
            return
        scale = "" if self.loss_scaler is None else f"; the loss scale {change}"
        anomaly = Anomaly.of_overflow(self.global_steps, overflow, self._non_finite.policy)
        level = logging.WARNING if self.loss_scaler is None else logging.INFO
        self.anomalies.note(anomaly, message, self.global_steps, overflow, scale, level=level)

    def _searched(self, overflow: OverflowReport) -> bool:
        return self.loss_scaler is not None and overflow.phase != "forward" and not self.loss_scaler.exhausted

    def _rates(self) -> list[float]:
        return [] if self._optimizer is None else [float(group["lr"]) for group in self._optimizer.param_groups]

    def last_rates(self) -> list[Any] | None:
        """Return a copy of the schedule's last learning rates, or None."""
        try:
            return copy.deepcopy(self.lr_scheduler.get_last_lr())
        except (AttributeError, AssertionError):  # some schedules have none before their first step
            return None

    def follow_schedule(self) -> None:
        """Set the groups' learning rates to the schedule's last ones."""
        if self._optimizer is not None:
            for group, rate in zip(self._optimizer.param_groups, self.last_rates() or (), strict=False):
                set_group(group, {"lr": rate})

    @contextlib.contextmanager
    def _scaled_rates(self, scale: float) -> Iterator[None]:
        """Multiply the learning rates in the block; the schedule and checkpoints have them without the factor."""
        groups = [] if self._optimizer is None or scale == 1.0 else self._optimizer.param_groups
        before = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * scale
        try:
            yield
        finally:
            for group, rate in zip(groups, before, strict=True):
                group["lr"] = rate

    def _set_overflow(self, overflow: bool) -> None:
        """Set `optimizer.overflow`, because frameworks read there whether a step was skipped, for any reason."""
        optimizer = self._optimizer
        if optimizer is not None and not hasattr(type(optimizer), "overflow"):
            optimizer.overflow = overflow  # type: ignore[attr-defined]

    def close(self) -> ShardwiseError | None:
        """Remove the hooks from the model and `overflow` from the optimizer; return an error of the last step."""
        failure = None
        try:
            if sys.exc_info()[0] is None and not self._sharded.failed:  # else other ranks may not call destroy()
                self.read_pending()
        except ShardwiseError as error:
            failure = error
        finally:
            self._non_finite.tracer.remove()
            if self._optimizer is not None:
                vars(self._optimizer).pop("overflow", None)
        return failure

    def _prepare(self) -> _Prepared | None:
        """Complete the window's gradients, and compute norm and factor; None if no rank has run a backward pass. Runs
        once a window: if the optimizer then raises, the next `take` continues here.
        """
        config, sharded = self._config, self._sharded
        reducer = sharded.reducer
        assert reducer is not None and sharded.sums is not None
        sharded.hooks.settle()
        reducer.complete_window()
        formed = self._formed()
        if config.strict_sync:
            sharded.check_branches()
        clip = float(config.gradient_clipping)
        unused = None if config.zero_optimization.ignore_unused_parameters else reducer.unused()
        refused = float(bool(unused) or self._unscaled) + sharded.look_for_lost()
        probe = None if self._computes_norm else formed
        non_finite: float | torch.Tensor = 0.0 if probe is None else self._non_finite.flag(probe)
        losses = self._window.loss_facts() if self._shows_loss else []
        # Replicas that step on their own learn of signals when they exchange, at the same step.
        signals = self._signals.facts(self._job.rank) if sharded.local is None else []
        inputs, self._inputs = self._inputs, None
        compared = [] if inputs is None else inputs.facts()
        ahead = float(sharded.model_pass.unsharder.take_ahead())
        local = [*self._window.facts(), refused, non_finite, ahead, *losses, *signals, *compared]
        sums = norm = by_tensor = None
        if formed is not None and probe is None:
            # Norms of single tensors are summed over ranks only if watched.
            sums, reduced, by_tensor = sharded.sums.total(formed, local, tensors=self.watch is not None)
        else:
            reduced = sharded.sums.of(local, "step_facts")
        if inputs is not None:
            if self._job.rank == 0:
                inputs.compare(reduced[-len(compared) :])
            reduced = reduced[: -len(compared)]
        # A rank without passes waits for the counts of the others.
        others = reduced[1:3].tolist() if self._window.passes == 0 else [0.0, 0.0]
        if self._window.passes == 0 and not any(others):
            self._inputs = inputs
            self._read(reduced, None, None, now=True)
            return None
        # Pipeline stages that compute no loss learn from the others if losses have weights.
        weight = reduced[0].clone() if self._window.weighted or others[0] else None
        factor = self._factor(weight)
        if sums is not None:
            norm = combine(sums, factor)
        by_parameter = formed if by_tensor is None else by_tensor
        gradients = StepGradients(
            self.global_steps, self._window, factor, by_parameter, by_tensor is not None, probe is not None
        )
        decides = self._non_finite.checks or (self.watch is not None and self.watch.decides)
        now = decides or unused is not None or self.loss_scaler is not None or reduced.device.type == "cpu"
        found = self._read(reduced, gradients, norm, now=now)
        if found.refused:
            self._refuse(unused or [])
        overflow = spike = coefficient = None
        multiplier = factor
        if not found.finite and self._non_finite.checks:
            overflow = self._non_finite.report(gradients, loss_scale=self.scale)
            if not self._searched(overflow):
                overflow = self._non_finite.traced(overflow, gradients)
        if found.spike is not None and (overflow is None or found.spike.action in ("stop", "rewind")):
            spike = found.spike
        if overflow is None and clip and norm is not None:
            coefficient = sharded.clip_factor(norm, clip)
            multiplier = coefficient * factor
        if weight is not None and self.loss_scaler is not None and self.loss_scaler.reference_weight is None:
            # The first pass had no weight, or weight zero: weights are in units of 1.
            self.loss_scaler.reference_weight = reference_for(float(weight / reduced[1])) if float(weight) else None
        applied = overflow is None and (spike is None or spike.action == "warn")
        clipped = None if norm is None or not applied else norm if coefficient is None else norm * coefficient
        loss = reduced[_LOSS] / reduced[_LOSS + 1] if self._window.shown or self._in_batch else None
        report = StepReport(applied, norm, coefficient, self.scale, (), clipped, weight, overflow, spike, loss=loss)
        counted = self._window.passes if found.passes is None else found.passes
        return _Prepared(report, reducer.passes, multiplier, counted, self._batches.dynamic())

    def _formed(self) -> torch.Tensor | None:
        """Return this rank's squared norms, or a probe that is finite if its gradients are, or None if not needed."""
        sums, reducer = self._sharded.sums, self._sharded.reducer
        assert sums is not None and reducer is not None
        reducer.zero_absent()
        reducer.sum_copies()
        if self._computes_norm:
            return sums.own_squares()
        return sums.probe() if self._non_finite.policy == "warn" else None

    # -- result of the all-reduce ------------------------------------------------------------------------------------

    def _read(
        self, reduced: torch.Tensor, gradients: StepGradients | None, norm: torch.Tensor | None, *, now: bool
    ) -> _Reduced:
        """Read the step's all-reduce and the norm: now, or at the next step if no decision depends on them."""
        if self._pending is not None:
            self.read_pending()
        # One host wait for all values.
        values = Later(reduced if norm is None else torch.cat([reduced, norm.reshape(1)]))
        if gradients is not None and not now:
            self._pending = values, gradients, norm is not None
            return _Reduced()
        return self._evaluate(values.read(), gradients, norm is not None, late=False)

    def read_pending(self) -> None:
        """Read the previous step's all-reduce, if not read yet (all ranks call)."""
        pending, self._pending = self._pending, None
        if pending is not None and self._evaluate(pending[0].read(), pending[1], pending[2], late=True).refused:
            self._refuse([])

    def _evaluate(self, values: list[float], gradients: StepGradients | None, normed: bool, *, late: bool) -> _Reduced:
        reduced, norm = (values[:-1], values[-1]) if normed else (values, None)
        passes = sum(reduced[1:3]) / (self._sharded.sharding.norm_group or self._sharded.comm).world
        if late and gradients is not None and not self._managed:
            self.global_samples += self._batches.samples(passes - gradients.window.passes)
        signals = _LOSS + (LOSS_FACTS if self._shows_loss else 0)
        self._signals.hear(reduced[signals:])
        step = self.global_steps if gradients is None else gradients.step
        check_mixed(reduced[:FACTS], step, needed=self._config.unequal_batches.enabled)
        self._warn_of_no_gradients(reduced[:FACTS], gradients)
        if reduced[_AHEAD]:
            assert self._sharded.reducer is not None
            self._sharded.reducer.block_host()
        if reduced[FACTS]:
            return _Reduced(refused=True)  # the step is not taken, and the values may be incomplete
        if gradients is None or self._non_finite.policy == "ignore":
            finite = True
        else:
            finite = not reduced[FACTS + 1] if norm is None else math.isfinite(norm)
            if not finite or self._non_finite.found:
                self._non_finite.update(not finite, gradients, late=late)
        spike = None
        if self.watch is not None and gradients is not None:
            loss = reduced[_LOSS] / reduced[_LOSS + 1] if reduced[_LOSS + 1] else None
            spike = self._spike(gradients, loss, norm)
        return _Reduced(finite=finite, spike=spike, passes=passes)

    def _warn_of_no_gradients(self, counts: Sequence[float], gradients: StepGradients | None) -> None:
        weight, _, unweighted, brought = counts
        if self._job.rank == 0 and gradients is not None and not brought and (weight or unweighted):
            warn_once(
                "engine.step(): no backward pass of a step has brought a gradient to a parameter of the engine, on any "
                "rank, so that all gradients are zero. Compute losses from what engine(...) returns: were they those "
                "of another model, or of detached outputs?"
            )

    def _spike(self, gradients: StepGradients, loss: float | None, norm: float | None) -> Spike | None:
        assert self.watch is not None
        squares = gradients.by_parameter if norm is not None and gradients.summed else None
        step = gradients.step
        found = self.watch.judge(step, loss, norm, squares, gradients.factor)
        for spike in found:
            action = "" if spike.action == "warn" else f" (`anomaly_watch.{spike.kind}` is {spike.action})"
            anomaly = Anomaly.of_spike(step, spike)
            self.anomalies.note(anomaly, "step %d: %s%s; %s", step, spike, action, anomaly.advice)
        order = ("warn", "skip", "rewind", "stop")
        return max(found, key=lambda spike: order.index(spike.action), default=None)

    def _refuse(self, unused: list[str]) -> None:
        """Raise the same error on every rank; `unused`: names of parameters without a gradient on this rank."""
        gathered = self._job.exchange((self._unscaled, unused, self._sharded.take_lost()), "step")
        lost = sorted({name for *_, names in gathered for name in names})
        if lost:
            raise UsageError(
                f"parameters of {', '.join(lost)} have been changed through another tensor of the same memory (such as "
                "`parameter.data`), which the engine does not see: the values come from shards or master weights, so "
                "the changes would be lost. Change the parameters themselves: `with torch.no_grad(): "
                "parameter.copy_(values)`; at stage 3 outside of forward() in `with engine.gathered():`"
            )
        unscaled = [rank for rank, (found, *_) in enumerate(gathered) if found]
        if unscaled:
            raise UsageError(
                f"engine.step(): on ranks {unscaled} gradients of this window do not have the loss scale (now "
                f"{self.scale:g}): loss.backward() was called on a loss that was not computed from what the engine "
                "returned (from engine.module(...), or from a value kept inside of the model), or another engine's "
                "backward(loss) has applied its own scale. Call engine.zero_grad() after such a pass, or use "
                "engine.backward(loss) on such losses; engines that step on one loss need one fp16.loss_scale"
            )
        missing = "; ".join(
            f"on rank {rank} {', '.join(names)}" for rank, (_, names, _) in enumerate(gathered) if names
        )
        raise UsageError(
            "zero_optimization.ignore_unused_parameters is false and these parameters have received no gradient since "
            f"the last step: {missing}. Freeze them (requires_grad_(False)), use them, or leave the key out: they then "
            "get a zero gradient."
        )

    # -- gradient scales ---------------------------------------------------------------------------------------------

    def _factor(self, weight: torch.Tensor | None) -> float | torch.Tensor:
        if weight is not None:
            # If all weights are 0, sums and gradient are zero.
            return self._reference / (torch.where(weight > 0, weight, 1.0) * self._scale_of_sums())
        return 1.0 / self.reduction_scale()

    def _scale_of_sums(self) -> float:
        prescale = self._sharded.reducer.prescale if self._sharded.reducer is not None else 1.0
        return prescale * self.scale

    def reduction_scale(self) -> float:
        """Return the divisor of sums over ranks and micro-batches for their mean (or sum, as configured), without
        weights, because residuals of lossy reductions keep their own.
        """
        ranks = self._sharded.domain.world if self._config.gradient_allreduce_op == "mean" else 1
        return ranks * self._batches.steps * self._scale_of_sums()

    def gradient_factor(self) -> float | torch.Tensor:
        """Return the scale from the current sums to the gradient of the micro-batches so far (all ranks call)."""
        assert self._sharded.sums is not None and self._sharded.reducer is not None
        window, passes = self._window, self._sharded.reducer.passes
        if window.agreed is None or window.agreed[0] != passes:
            window.agreed = passes, self._sharded.sums.of(window.facts(), "weights")
        reduced = window.agreed[1]
        counts = reduced.tolist()
        check_mixed(counts, self.global_steps)
        return self._factor(reduced[0] if counts[1] else None)
