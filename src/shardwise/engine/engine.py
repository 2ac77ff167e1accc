"""Engine: the object a training script talks to.

It composes what `shardwise.engine.build` has built and holds the little state that belongs to nobody else: counters,
the accumulation boundary, and what the last step did. Everything that shards, moves or reduces lives in
`shardwise.zero`.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise._version import __version__
from shardwise.absent import COMPILER, ENGINE
from shardwise.comm.communicator import Communicator
from shardwise.comm.ledger import user_line
from shardwise.compat import never_compiled, transforming
from shardwise.config import Resolution
from shardwise.device import Later
from shardwise.engine.attributes import EngineAttributes
from shardwise.engine.batch import BatchSizes
from shardwise.engine.exhausted import explained, explaining
from shardwise.engine.faults import FaultTolerance
from shardwise.engine.getters import ConfigGetters
from shardwise.engine.interchange import Interchange
from shardwise.engine.memory import MemoryReporting
from shardwise.engine.nonfinite import Evidence, NonFinite
from shardwise.engine.overflows import explain_overflow
from shardwise.engine.scaling import (
    cast_floats,
    checks_overflow,
    computes_norm,
    on_non_finite,
    scale_gradients_of,
)
from shardwise.engine.window import FACTS, Weight, Window, check_mixed, checked_weight, reference_for
from shardwise.errors import AbsentAttributeError, NonFiniteError, NotScalarError, SyncError, UsageError
from shardwise.memory import Accountant, Call, is_out_of_memory
from shardwise.precision.autocast import autocast, autocast_dtype
from shardwise.precision.norms import combine
from shardwise.precision.overflow import OverflowReport
from shardwise.precision.scaler import LossScaler
from shardwise.utils.logging import logger, warn_once

if TYPE_CHECKING:
    from shardwise.data import EngineDataLoader
    from shardwise.zero.model import ShardedModel


_LIKE: dict[str, str] = {}
"""Name that no engine has -> the question whether another one was meant."""


@dataclass(frozen=True)
class StepReport:
    """What the last `step()` at a boundary did.

    Attributes:
        applied: parameters were updated (False: skipped because of an overflow).
        grad_norm: global L2 norm of the gradients before clipping (0-D fp64 tensor), or None if not computed.
        clip_coefficient: factor by which clipping reduced the gradients (0-D tensor), or None without clipping.
        loss_scale: loss scale that these gradients had.
        lr: learning rate of each parameter group that was used.
        clipped_norm: norm after clipping: grad_norm times clip_coefficient. None if the norm was not computed, or the
            step was skipped.
        weight: sum of the weights of the window's micro-batches over all ranks (0-D fp64 tensor), or None without.
        overflow: why the step was skipped, or None if it was not; the same on all ranks.
    """

    applied: bool
    grad_norm: torch.Tensor | None
    clip_coefficient: torch.Tensor | None
    loss_scale: float
    lr: tuple[float, ...]
    clipped_norm: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    overflow: OverflowReport | None = None


@dataclass(frozen=True)
class _Prepared:
    """A window whose gradients are ready for the optimizer: what is known of them, and the passes they come from.

    Attributes:
        norm: see `StepReport.grad_norm`.
        coefficient: see `StepReport.clip_coefficient`.
        weight: see `StepReport.weight`.
        overflow: what is not finite; None if all is.
        passes: number of backward passes so far.
        factor: what they have to be multiplied by.
        applied: they have been.
    """

    norm: torch.Tensor | None
    coefficient: torch.Tensor | None
    weight: torch.Tensor | None
    overflow: OverflowReport | None
    passes: int
    factor: float | torch.Tensor
    applied: bool = False


class Engine(EngineAttributes, BatchSizes, ConfigGetters, Interchange, FaultTolerance, MemoryReporting, nn.Module):
    """A model, its optimizer and its schedule, sharded as the configuration says. Made by `shardwise.initialize`.

    Attributes:
        module: the user's model; unknown attributes of the engine are looked up there.
        optimizer: the optimizer instance (the client's own, if one was given), with what this rank owns in its groups.
        lr_scheduler: stepped after every applied update; may be set to None to take over.
        training_dataloader: made from `training_data`, or None.
        config: the dictionary that the user passed.
        global_steps: boundaries passed, skipped steps included.
        micro_steps: calls of `step()`, but for those that had nothing to do.
        skipped_steps: steps skipped because of an overflow.
        global_samples: samples of all ranks that have gone into steps.
        accountant: bytes held, by category.
        ledger: every collective of this engine.
    """

    def __init__(
        self,
        *,
        module: nn.Module,
        sharded: ShardedModel,
        optimizer: torch.optim.Optimizer | None,
        lr_scheduler: Any,
        resolution: Resolution,
        comm: Communicator,
        device: torch.device,
        local_rank: int,
        scaler: LossScaler | None,
        accountant: Accountant,
        client_optimizer: Any = None,
        client_lr_scheduler: Any = None,
        mpu: Any = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.optimizer = optimizer
        self.basic_optimizer = optimizer
        self.client_optimizer = client_optimizer
        self.client_lr_scheduler = client_lr_scheduler
        self.lr_scheduler = lr_scheduler
        self.training_dataloader: EngineDataLoader | None = None
        self.accountant = accountant
        self.device = device
        self.local_rank = local_rank
        self.mpu = mpu
        self.loss_scaler = scaler
        self.global_steps = 0
        self.global_samples = 0
        self.micro_steps = 0
        self.skipped_steps = 0
        self.inside_no_sync_ctxt = False
        self.last_step: StepReport | None = None
        # Kept out of nn.Module's bookkeeping: none of these is a submodule.
        self.__dict__["sharded"] = sharded
        self._resolution = resolution
        self._comm = comm
        self._boundary: bool | None = None
        self._engine_backward = False
        self._scale_entered = self._unscaled = False
        self._was_applied = False
        self._prepared: _Prepared | None = None
        self._autocast_dtype = autocast_dtype(resolution.config)
        self._non_finite = NonFinite(sharded, on_non_finite(resolution.config))
        self._window = self._new_window()
        self._pass_weight: Weight | None = None
        self._reference_asked = False
        self._told: tuple[Later, Evidence] | None = None
        # What a step() is for: whether the model has been run for training since the last one, and where the
        # accumulation window has begun.
        self._new_micro_batch = False
        self._window_began = 0
        self._batch = self.initial_batch()
        self._last_call: Call | None = None
        self._last_signature: tuple[Any, ...] | None = None
        self._prepare_for_faults(comm.rank)
        sharded.driver = self
        if sharded.reducer is not None:
            sharded.reducer.watching = on_non_finite(resolution.config) != "ignore"
        self._tell_overflow(False)

    # -- what clients read -------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is not None and name != "module":
                try:
                    return getattr(module, name)
                except AttributeError:
                    pass
            reason = ENGINE.get(name)
            if reason is not None:
                raise AbsentAttributeError(f"engine.{name} is not in shardwise {__version__}: {reason}") from None
            raise AttributeError(
                f"neither the engine nor its module has an attribute {name!r}{self._like(name)}"
            ) from None

    def _like(self, name: str) -> str:
        """Return the question whether another member was meant, or nothing. Scripts ask for what is not there again
        and again (`hasattr`), so what was found is kept."""
        if name not in _LIKE:
            known = {*dir(type(self)), *self.__dict__, *self.__dict__.get("_modules", {})}
            near = difflib.get_close_matches(name, [n for n in known if not n.startswith("_")], n=1, cutoff=0.75)
            _LIKE[name] = f"; did you mean {near[0]}?" if near and not name.startswith("_") else ""
        return _LIKE[name]

    def __getstate__(self) -> Any:
        raise UsageError(
            "an engine cannot be copied or pickled: it is a part of a running job. Save it with "
            "engine.save_checkpoint(); for the weights alone take engine.module_state_dict() or "
            "engine.save_16bit_model()"
        )

    @property
    def cur_scale(self) -> float:
        """The loss scale in force (1.0 without fp16)."""
        return 1.0 if self.loss_scaler is None else self.loss_scaler.scale

    # -- forward -----------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module and return what it returns.

        With `torch_autocast` it runs under `torch.autocast`, unless the caller already is. What is computed from its
        outputs, such as the loss, and calls of `engine.module` are not.

        Raises:
            UsageError: the engine has been destroyed, or the model has other parameters than it had.
            OutOfMemoryError: memory has run out; it says which setting would have fitted. So in `backward` and `step`.
        """
        self.sharded.check_open("the engine's forward()")
        # A transform of torch.func differentiates by itself, and accumulates nothing.
        own = torch.is_grad_enabled() and not transforming()
        if own:
            self._new_micro_batch = True
            self.sharded.places.check()
        if self._resolution.config.fp16.enabled and self._resolution.config.fp16.auto_cast:
            inputs, kwargs = cast_floats((inputs, kwargs), torch.float16)
        self._remember_call(inputs, kwargs)
        try:
            with autocast(self.device, self._autocast_dtype):
                outputs = self.module(*inputs, **kwargs)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise explained(error, self._circumstances("the engine's forward()")) from error
        if self.loss_scaler is not None and own:
            outputs = scale_gradients_of(outputs, self._output_scale)
        return outputs

    def _output_scale(self) -> float:
        self._scale_entered = True
        return 1.0 if self._engine_backward else self.cur_scale

    def backward_begins(self) -> None:
        """See `shardwise.zero.passes.driver.Driver`."""
        self._agree_on_reference(None)

    def backward_ended(self, brought: bool) -> None:
        """Remember how the pass was weighted, and whether it has brought gradients without the loss scale; the step
        tells all ranks.
        """
        if brought or self._engine_backward:  # not torch.autograd.grad, which accumulates nothing
            self._new_micro_batch = True
            self._window.count(self._pass_weight)
        self._unscaled |= brought and not self._scale_entered and self.cur_scale != 1.0
        self._scale_entered = False

    # -- backward ----------------------------------------------------------------------------------------------------

    @never_compiled
    def backward(
        self,
        loss: torch.Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        weight: float | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute gradients of `loss`, reduce them as the plan says, and release the gathered parameters.

        The mean over accumulation steps and ranks is taken when stepping; with `scale_wrt_gas=False` the loss counts as
        if it had already been divided by the number of accumulation steps.

        With weights the step's gradient is sum_i w_i grad_i / sum_i w_i over all backward passes of the window on all
        ranks: if each loss is the mean over w_i tokens, that is the gradient of the mean over all tokens. Weights may
        differ between ranks and micro-batches; the sum of all is `engine.last_step.weight`. If it is zero, so is the
        gradient.

        Args:
            loss: scalar.
            retain_graph: as in `torch.Tensor.backward`.
            scale_wrt_gas: see above; has no meaning for weighted losses.
            weight: see above: a finite number >= 0, or a tensor with one element, whose value is not looked at where
                that would mean waiting for its device. A loss with the weight 0 (on the host) is not differentiated, so
                it may be NaN, as the mean over no tokens is.

        Returns:
            The loss divided by the number of accumulation steps, detached from nothing, for logging. A weighted loss is
            returned as it is.

        Raises:
            NotScalarError: the loss is not a scalar.
            UsageError: it is no tensor that requires a gradient, `weight` cannot be a weight or is given where
                gradients are summed over ranks (`gradient_allreduce_op` "sum"), or the engine has been destroyed.
        """
        self.sharded.check_open("engine.backward()")
        if not isinstance(loss, torch.Tensor):
            raise UsageError(f"engine.backward(loss) expects a scalar tensor, got {type(loss).__name__}")
        _check_scalar(loss, "engine.backward(loss)")
        if not loss.requires_grad:
            raise UsageError(
                "engine.backward(loss): the loss does not require a gradient; was it computed under no_grad?"
            )
        counted = None if weight is None else self._weight_of(weight, scale_wrt_gas)
        self.sharded.hooks.settle()
        steps = self.gradient_accumulation_steps()
        self._agree_on_reference(counted)
        factor: Weight = self.cur_scale * (1.0 if scale_wrt_gas else float(steps))
        if counted is not None:
            factor = counted * (self.cur_scale / self._reference)
        zero = counted is not None and not isinstance(counted, torch.Tensor) and counted == 0.0
        if self._window.losses is not None and not zero:
            self._window.losses.append(loss.detach())
        scaled = loss if isinstance(factor, float) and factor == 1.0 else loss * factor
        self._engine_backward = self._scale_entered = True
        self._pass_weight = counted
        try:
            with explaining(lambda: self._circumstances("engine.backward()", graph=True)):
                self.sharded.backward([] if zero else [scaled], retain_graph=retain_graph)
        finally:
            self._engine_backward = False
            self._pass_weight = None
        return loss / steps if scale_wrt_gas and steps > 1 and counted is None else loss

    def _weight_of(self, weight: Any, scale_wrt_gas: bool) -> Weight:
        if not scale_wrt_gas:
            raise UsageError(
                "engine.backward(loss, weight=..., scale_wrt_gas=False): a weighted loss is divided by the sum of the "
                "weights and by nothing else; leave scale_wrt_gas out"
            )
        if not self.gradient_average:
            raise UsageError(
                'engine.backward(loss, weight=...): `gradient_allreduce_op` is "sum", and weights make a mean over '
                'ranks and micro-batches. Set it to "mean", or leave the weight out and divide the loss yourself'
            )
        return checked_weight(weight)

    @property
    def _reference(self) -> float:
        """The weight that leaves a loss as it is."""
        return (self.loss_scaler.reference_weight if self.loss_scaler is not None else None) or 1.0

    def _agree_on_reference(self, weight: Weight | None) -> None:
        """Under loss scaling, before the first backward pass: agree on the unit in which weights are counted.

        All ranks take part in every backward pass, so they all come here, whether or not theirs has a weight.
        """
        if self.loss_scaler is None or self._reference_asked:
            return
        self._reference_asked = True
        if self.loss_scaler.reference_weight is not None:
            return  # it comes from a checkpoint
        facts = [0.0 if weight is None else weight, float(weight is not None)]
        assert self.sharded.sums is not None
        total, weighted = self.sharded.sums.of(facts, "reference_weight").tolist()
        if total:
            self.loss_scaler.reference_weight = reference_for(total / weighted)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss to call `backward()` on by hand: unchanged, for the scale enters at the model's outputs.

        Raises:
            NotScalarError: it is not one number.
        """
        _check_scalar(loss, "engine.scale(loss)")
        return loss

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add gradients up locally inside the block; the first backward pass outside reduces the sum.

        Raises:
            SyncError: the configuration shards gradients, so there is nowhere to add them up.
            UsageError: the engine has been destroyed.
        """
        self.sharded.check_open("engine.no_sync()")
        if self.sharded.plan.reduces_micro_batches:
            raise SyncError(
                "no_sync() needs whole gradients on every rank; zero_optimization.stage "
                f"{self.sharded.plan.stage} shards them. "
                "Use stage 0 or 1, or drop no_sync(): accumulation works without it."
            )
        before, self.inside_no_sync_ctxt = self.inside_no_sync_ctxt, True
        try:
            yield
        finally:
            self.inside_no_sync_ctxt = before

    # -- boundaries --------------------------------------------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch is the last one before an update.

        Where the script counts micro-batches (`managed_gradient_accumulation` false) every `step()` is a boundary, and
        this is true unless it has been declared otherwise for the window.
        """
        if self._boundary is not None:
            return self._boundary
        return not self._managed or (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Declare whether the current micro-batch is a boundary; holds until changed, None returns to counting.

        Where the script counts micro-batches it says that the next backward pass is the last one before `step()`, so
        that gradients can be reduced during it (stages 0 and 1); it holds until that step.
        """
        self._boundary = is_boundary

    @property
    def _managed(self) -> bool:
        """Whether the engine counts micro-batches."""
        return bool(self._resolution.config.managed_gradient_accumulation)

    def reduces_now(self) -> bool:
        """Whether the backward pass that starts now ends an accumulation window."""
        if self.inside_no_sync_ctxt:
            return False
        return self.is_gradient_accumulation_boundary() if self._managed else self._boundary is True

    def begins_window(self) -> bool:
        """Whether no rank has had a micro-batch of this accumulation window before.

        A rank may have left out its backward pass. Where the script counts micro-batches this is not known, and False.
        """
        return self._managed and self.micro_steps == self._window_began

    # -- step --------------------------------------------------------------------------------------------------------

    @never_compiled
    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """At an accumulation boundary update the parameters, the loss scale and the schedule; elsewhere only count.

        Where the script counts micro-batches (`managed_gradient_accumulation` false) every call is a boundary.

        A call that has nothing to do changes nothing, neither parameters nor counters nor the schedule, and the log
        says so once: the second of two calls without a forward or backward pass between them, and one that ends a
        window in which no rank has run a backward pass. A micro-batch whose backward pass was left out counts.

        Args:
            lr_kwargs: passed to the scheduler's `step`.

        Raises:
            UsageError: the engine has no optimizer, or has been destroyed.
            SyncError: inside `no_sync()`.
            NonFiniteError: a gradient is not finite, and `non_finite` is "stop". Parameters, optimizer and schedule are
                as they were; the window's gradients are dropped.
        """
        self.sharded.check_open("engine.step()")
        if self.inside_no_sync_ctxt:
            raise SyncError("engine.step() inside no_sync() would step gradients that no other rank has seen")
        if self.optimizer is None:
            raise UsageError(f"engine.step(): {self._no_optimizer()}")
        self._was_applied = False
        boundary = not self._managed or self.is_gradient_accumulation_boundary()
        # Whether a whole window is empty is known to all ranks after their all-reduce, and not before.
        if not self._new_micro_batch and not (boundary and self._window.passes == 0) and self._prepared is None:
            self._say_idle("the model has not been run since the last step()")
            return
        if boundary:
            with explaining(lambda: self._circumstances("engine.step()", stepping=True)):
                taken = self._take_step(lr_kwargs)
            self._new_micro_batch = False
            if not taken:
                self.micro_steps = self._window_began
                self._say_idle("no rank has run a backward pass since the last update")
                return
            if not self._managed:
                self._boundary = None
        self._new_micro_batch = False
        self.micro_steps += 1
        if boundary:
            self._window_began = self.micro_steps
            self._after_boundary()

    def _say_idle(self, why: str) -> None:
        if self.global_rank == 0:
            warn_once(
                f"engine.step() at {user_line()}: {why}, so there is nothing to step: parameters, optimizer state, "
                "schedule and counters stay as they are. Is step() called twice, or backward() left out?"
            )

    def _no_optimizer(self) -> str:
        section = self._resolution.config.optimizer
        if self.client_optimizer is None and (section is None or section.type is None):
            return "there is no optimizer. Pass optimizer= to initialize(), or add an `optimizer` section"
        return (
            "there is no optimizer, because initialize() found nothing to train: no parameter of the model (or of "
            "model_parameters) required a gradient"
        )

    def _take_step(self, lr_kwargs: dict[str, Any] | None) -> bool:
        """Take the step that ends a window; return False, and change nothing, if no rank has run a backward pass."""
        sharded = self.sharded
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
        samples = self._samples()
        scale, overflow = self.cur_scale, prepared.overflow
        if overflow is not None and self._non_finite.policy == "stop":
            self.drop_gradients()
            self.micro_steps = self._window_began
            raise NonFiniteError(
                f'step {self.global_steps}: gradients are not finite, and `non_finite` is "stop": {overflow}. '
                "Parameters and optimizer state are as they were before this step"
            )
        used = tuple(float(lr) for lr in self.get_lr())
        if overflow is None:
            if not prepared.applied and not sharded.takes_factor():
                sharded.scale_gradients(prepared.factor)
                prepared = self._prepared = replace(prepared, applied=True)
            sharded.step(1.0 if prepared.applied else prepared.factor)
        self._prepared = None
        self._unscaled = False
        self._window = self._new_window()
        sharded.end_window(overflow is None)
        norm, coefficient = prepared.norm, prepared.coefficient
        clipped = None if norm is None or overflow is not None else norm if coefficient is None else norm * coefficient
        self.last_step = StepReport(
            overflow is None, norm, coefficient, scale, used, clipped, prepared.weight, overflow
        )
        self._was_applied = overflow is None
        self._tell_overflow(overflow is not None)
        if self.loss_scaler is not None:
            self.loss_scaler.update(overflow is not None, overflow or "")
        if overflow is not None and self.global_rank == 0:
            change = f"stays at {scale:g}" if scale == self.cur_scale else f"goes from {scale:g} to {self.cur_scale:g}"
            told = "" if self.loss_scaler is None else f"; the loss scale {change}"
            level = logging.WARNING if self.loss_scaler is None else logging.INFO  # scales are searched in this way
            logger.log(level, "step %d is skipped: overflow in %s%s", self.global_steps, overflow, told)
        self.global_steps += 1
        self.global_samples += samples
        if overflow is not None:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        self._print_progress()
        return True

    def _samples(self) -> int:
        """Return the samples of all ranks in the window that ends now; they are taken to be as many on each rank."""
        if self._managed:
            return self.train_batch_size()
        return self.train_micro_batch_size_per_gpu() * self.world_size * self._window.passes

    def _new_window(self) -> Window:
        return Window(losses=None if self._non_finite.policy == "ignore" else [])

    def _tell_overflow(self, overflow: bool) -> None:
        """Keep on the optimizer whether its last step was skipped: frameworks ask it, not the engine."""
        if (
            self.optimizer is not None
            and self.loss_scaler is not None
            and not hasattr(type(self.optimizer), "overflow")
        ):
            self.optimizer.overflow = overflow  # type: ignore[attr-defined]

    def _prepare(self) -> _Prepared | None:
        """Find out what the optimizer needs to know of the window's gradients: complete them, compute norm and factor.

        Done once a window: if the optimizer then raises, the next `step()` goes on from here. None if there are no
        gradients: no rank has run a backward pass in the window.
        """
        config, sharded = self._resolution.config, self.sharded
        reducer = sharded.reducer
        assert reducer is not None and sharded.sums is not None
        sharded.hooks.settle()
        reducer.complete_window()
        if config.strict_sync:
            sharded.check_branches()
        clip = float(config.gradient_clipping)
        unused = None if config.zero_optimization.ignore_unused_parameters else reducer.unused()
        asked = unused is not None or self.loss_scaler is not None
        reported = float(bool(unused) or self._unscaled)
        probe = None
        wrong: float | torch.Tensor = 0.0
        if self._non_finite.policy == "warn" and not computes_norm(config):
            probe = sharded.sums.probe()
            wrong = self._non_finite.flag(probe)
        facts = [*self._window.facts(), reported, wrong, *self._signals.facts(self._comm.rank)]
        sums = norm = None
        if computes_norm(config):
            sums, told = sharded.sums.squares(facts)
        else:
            told = sharded.sums.of(facts, "step_facts")
        # The others' passes are looked at, and waited for, where there are none on this rank.
        if self._window.passes == 0 and not any(told[1:FACTS].tolist()):
            self._listen(told, None, now=True)
            return None
        weight = told[0].clone() if self._window.weighted else None
        factor = self._gradient_factor(weight)
        if sums is not None:
            norm = combine(sums, factor)
            if self._non_finite.policy == "warn":
                told[FACTS + 1] = self._non_finite.flag(norm)
        evidence = Evidence(self.global_steps, self._window, factor, sums if probe is None else probe, probe is None)
        checked = norm if checks_overflow(config) else None
        now = asked or checked is not None or told.device.type == "cpu"
        complained, finite = self._listen(told, evidence, now=now, checked=checked)
        if complained:
            self._refuse(unused or [])
        overflow = coefficient = None
        multiplier = factor
        if sums is not None and not finite:
            overflow = explain_overflow(sharded, sums, abs(float(factor)), self.cur_scale, self._window.lost())
        elif clip and norm is not None:
            coefficient = sharded.clip_factor(norm, clip)
            multiplier = coefficient * factor
        if weight is not None and self.loss_scaler is not None and self.loss_scaler.reference_weight is None:
            # The first pass had no weight, or one of zero; the window was counted in units of 1.
            self.loss_scaler.reference_weight = reference_for(float(weight / told[1])) if float(weight) else None
        return _Prepared(norm, coefficient, weight, overflow, reducer.passes, multiplier)

    def _listen(
        self, told: torch.Tensor, evidence: Evidence | None, *, now: bool, checked: torch.Tensor | None = None
    ) -> tuple[bool, bool]:
        """Learn what the ranks have said: now, or at the next step where nothing but weights, signals and a warning
        depends on it and it would mean waiting now.

        Args:
            told: by the ranks.
            evidence: what is known of the gradients.
            now: wait for it.
            checked: a number that comes along if it is waited for.

        Returns:
            Whether any rank has reported something, and whether `checked` is finite.
        """
        self._hear_before()
        if evidence is not None and not now:
            self._told = Later(told), evidence
            return False, True
        # The host waits once for both.
        values = Later(told if checked is None else torch.cat([told, checked.reshape(1)])).read()
        finite = checked is None or math.isfinite(values[-1])
        return self._hear(values[: told.numel()], evidence, late=False), finite

    def _hear_before(self) -> None:
        """Learn what the ranks have said at the last step, if that has not been heard yet (all ranks call)."""
        before, self._told = self._told, None
        if before is not None:
            self._hear(before[0].read(), before[1], late=True)

    def _hear(self, told: list[float], evidence: Evidence | None, *, late: bool) -> bool:
        self._signals.hear(told[FACTS + 2 :])
        check_mixed(told[:FACTS])
        if evidence is not None and self._non_finite.policy == "warn":
            self._non_finite.hear(bool(told[FACTS + 1]), evidence, late=late)
        return bool(told[FACTS])

    def _refuse(self, unused: list[str]) -> None:
        """Raise on every rank what is wrong with the window's gradients on some rank; `unused`: names on this one."""
        everyone = self._comm.exchange((self._unscaled, unused), "step")
        unscaled = [rank for rank, (found, _) in enumerate(everyone) if found]
        if unscaled:
            raise UsageError(
                f"engine.step(): on ranks {unscaled} gradients of this window do not have the loss scale (now "
                f"{self.cur_scale:g}), so they would be that many times too small: loss.backward() was called on a "
                "loss that was not computed from what the engine returned (from engine.module(...), or from a value "
                "kept inside of the model). Call engine.zero_grad(), and use engine.backward(loss) on such losses"
            )
        told = "; ".join(f"on rank {rank} {', '.join(names)}" for rank, (_, names) in enumerate(everyone) if names)
        raise UsageError(
            "zero_optimization.ignore_unused_parameters is false and these parameters have received no gradient since "
            f"the last step: {told}. Freeze them (requires_grad_(False)), use them, or leave the key out: they then "
            "get a zero gradient."
        )

    def _gradient_factor(self, weight: torch.Tensor | None) -> float | torch.Tensor:
        """Return what turns accumulated sums into the gradient: the mean over ranks and micro-batches, or the division
        by the sum of their weights, with the loss scale divided out.
        """
        if weight is not None:
            # Without any weight the sums are zero, and so is the gradient.
            return self._reference / (torch.where(weight > 0, weight, 1.0) * self._scale_of_sums())
        return 1.0 / self.reduction_scale()

    def _scale_of_sums(self) -> float:
        prescale = self.sharded.reducer.prescale if self.sharded.reducer is not None else 1.0
        return prescale * self.cur_scale

    def reduction_scale(self) -> float:
        """Return what divides sums over ranks and micro-batches to give their mean (or sum, as configured).

        Weights of micro-batches are not in it: what a lossy reduction keeps for later counts by its own.
        """
        ranks = self.world_size if self.gradient_average else 1
        return ranks * self.gradient_accumulation_steps() * self._scale_of_sums()

    def gradient_factor(self) -> float | torch.Tensor:
        """Return what turns the sums held now into the gradient of the micro-batches so far (all ranks call)."""
        if self._prepared is not None and self._prepared.applied:
            return 1.0
        assert self.sharded.sums is not None and self.sharded.reducer is not None
        window, passes = self._window, self.sharded.reducer.passes
        if window.agreed is None or window.agreed[0] != passes:
            window.agreed = passes, self.sharded.sums.of(window.facts(), "weights")
        told = window.agreed[1]
        facts = told.tolist()
        check_mixed(facts)
        return self._gradient_factor(told[0] if facts[1] else None)

    def _print_progress(self) -> None:
        every = self._resolution.config.steps_per_print
        if every and self.global_steps % every == 0 and self.global_rank == 0:
            logger.info("step=%d skipped=%d lr=%s", self.global_steps, self.skipped_steps, self.get_lr())

    def was_step_applied(self) -> bool:
        """Whether the last `step()` updated the parameters."""
        return self._was_applied

    def get_global_grad_norm(self) -> float | None:
        """Return the global gradient norm of the last update before clipping, or None if there is none."""
        if self.last_step is None or self.last_step.grad_norm is None:
            return None
        return float(self.last_step.grad_norm)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Engine:
        """Serve `to`, `half`, `cuda` and the like: parameters stay what they are, buffers follow.

        Raises:
            UsageError: parameters would change their dtype or device, and leave the engine's memory.
        """
        if self.sharded.closed:
            super()._apply(fn, recurse)
            return self
        for dtype, device in sorted({(p.dtype, p.device) for p in self.sharded.registry.parameters}, key=str):
            probe = torch.empty(0, dtype=dtype, device=device)
            made = fn(probe)
            if (made.dtype, made.device) != (dtype, device):
                raise UsageError(
                    f"the engine's parameters cannot be converted (here from {dtype} on {device} to {made.dtype} on "
                    f"{made.device}): they live in memory that the engine moves and steps. Choose the dtype in the "
                    "configuration (bf16, fp16) and the device by LOCAL_RANK, or convert the "
                    "model before initialize() or after engine.destroy()"
                )
        moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for module in self.module.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = moved.setdefault(id(buffer), (buffer, fn(buffer)))[1]
        return self

    def to_empty(self, *, device: Any, recurse: bool = True) -> Engine:
        """Give parameters and buffers new memory without values: not those of an engine.

        Raises:
            UsageError: the engine has not been destroyed.
        """
        if not self.sharded.closed:
            raise UsageError(
                "engine.to_empty(): the engine's parameters and buffers have values, which would be lost. Call it on "
                "the model, before initialize() or after engine.destroy()"
            )
        super().to_empty(device=device, recurse=recurse)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop accumulated gradients: the window starts anew."""
        self.sharded.hooks.settle()
        super().zero_grad(set_to_none=set_to_none)
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Forget the gradients that the engine has accumulated."""
        self._prepared = None
        self._unscaled = False
        self._window = self._new_window()
        if self.sharded.reducer is not None:
            self.sharded.reducer.clear()

    def gathered(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which all parameters are whole on every rank.

        Forward passes inside need no communication, so that ranks may make different numbers of them (generation,
        evaluation sets of unequal size). Every rank must enter and leave it. It needs memory for the whole model.

        Raises:
            UsageError: the engine has been destroyed.
        """
        self.sharded.check_open("engine.gathered()")
        return self.sharded.whole()

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` has been called."""
        return self._compiled_call_impl is not None

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
        **options: Any,
    ) -> None:
        """Compile the engine's forward in place with `torch.compile`; a second call does nothing.

        Args:
            backend: of torch.compile.
            compile_kwargs: further arguments of torch.compile.
            schedule: compiler passes by step; not built yet.
            compiled_autograd_enabled: not built yet.
            options: further arguments of torch.compile, too.

        Raises:
            UsageError: a schedule of passes, or compiled autograd, is asked for.
        """
        if schedule:
            raise UsageError(f"engine.compile(schedule=...): {COMPILER}; leave it out")
        if compiled_autograd_enabled:
            raise UsageError("engine.compile(compiled_autograd_enabled=True): it is not built yet; leave it out")
        if not self.is_compiled:
            super().compile(backend=backend, **{**(compile_kwargs or {}), **options})

    # -- life cycle --------------------------------------------------------------------------------------------------

    def empty_partition_cache(self) -> None:
        """Release what is gathered on this rank: after a forward pass the unit that a backward pass needs first.

        If a backward pass does follow, the unit is fetched again, outside of the usual order.
        """
        self.sharded.hooks.settle()
        for unit in self.sharded.units:
            unit.release()

    def destroy(self) -> None:
        """Take everything off the model and the optimizer again, and give the engine's memory back (all ranks call).

        The parameters are plain, whole and up to date afterwards, in the dtype that the module computes with. The
        optimizer has them in its groups, and no state; save a checkpoint before if it is needed. What computes or saves
        raises from then on. Destroying an engine twice does nothing.

        Raises:
            CheckpointError: an asynchronous save, which is waited for, has failed; the engine is destroyed all the
                same.
            DesyncError: other ranks have gone on with training (stage 3); the parameters stay sharded. While an
                exception is being handled it is a warning instead.
        """
        failure = self._finish_save()
        if not self.sharded.closed and self.optimizer is not None and self.loss_scaler is not None:
            vars(self.optimizer).pop("overflow", None)
        self._end_guard()
        try:
            self.sharded.close()
        finally:
            self._comm.destroy()  # whoever waits for this rank is told
        if failure is not None:
            raise failure


def _check_scalar(loss: torch.Tensor, call: str) -> None:
    if loss.numel() != 1:
        raise NotScalarError(
            f"{call} expects a scalar tensor, got a tensor of shape {tuple(loss.shape)}; reduce it first (loss.mean())"
        )
