"""Engine: the object a training script talks to.

It composes what `shardwise.engine.build` has built and holds the little state that belongs to nobody else: counters,
the accumulation boundary, and what the last step did. Everything that shards, moves or reduces lives in
`shardwise.zero`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.checkpoint.agree import exchange
from shardwise.comm.communicator import Communicator
from shardwise.compat import never_compiled
from shardwise.config import Resolution
from shardwise.engine.attributes import Attributes
from shardwise.engine.batch import BatchSizes
from shardwise.engine.checkpointing import Checkpointing
from shardwise.engine.exhausted import explained, explaining
from shardwise.engine.getters import ConfigGetters
from shardwise.engine.memory import MemoryReporting
from shardwise.engine.scaling import cast_floats, checks_overflow, computes_norm, scale_gradients_of
from shardwise.errors import SyncError, UsageError
from shardwise.memory import Accountant, Call, is_out_of_memory
from shardwise.precision.scaler import LossScaler

if TYPE_CHECKING:
    from shardwise.data import EngineDataLoader
    from shardwise.zero.model import ShardedModel


@dataclass(frozen=True)
class StepReport:
    """What the last `step()` at a boundary did.

    Attributes:
        applied: parameters were updated (False: skipped because of an overflow).
        grad_norm: global L2 norm of the gradients before clipping (0-D fp64 tensor), or None if not computed.
        clip_coefficient: factor by which clipping reduced the gradients (0-D tensor), or None without clipping.
        loss_scale: loss scale that these gradients had.
        lr: learning rate of each parameter group that was used.
    """

    applied: bool
    grad_norm: torch.Tensor | None
    clip_coefficient: torch.Tensor | None
    loss_scale: float
    lr: tuple[float, ...]


@dataclass(frozen=True)
class _Prepared:
    """A window whose gradients are ready for the optimizer: what is known of them, and the passes they come from."""

    norm: torch.Tensor | None
    coefficient: torch.Tensor | None
    overflow: bool
    passes: int


class Engine(Attributes, BatchSizes, Checkpointing, ConfigGetters, MemoryReporting, nn.Module):
    """A model, its optimizer and its schedule, sharded as the configuration says. Made by `shardwise.initialize`.

    Attributes:
        module: the user's model; unknown attributes of the engine are looked up there.
        optimizer: the optimizer instance (the client's own, if one was given), with what this rank owns in its groups.
        lr_scheduler: stepped after every applied update; may be set to None to take over.
        training_dataloader: made from `training_data`, or None.
        config: the dictionary that the user passed.
        global_steps: boundaries passed, skipped steps included.
        micro_steps: calls of `step()`.
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
        training_dataloader: EngineDataLoader | None,
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
        self.training_dataloader = training_dataloader
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
        self._batch = self.initial_batch()
        self._last_call: Call | None = None
        self._last_signature: tuple[Any, ...] | None = None
        sharded.gradient_factor = self._gradient_factor
        sharded.on_backward_end = self._backward_ended
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
            raise AttributeError(f"neither the engine nor its module has an attribute {name!r}") from None

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

        Raises:
            UsageError: the engine has been destroyed, or the model has other parameters than it had.
            OutOfMemoryError: memory has run out; it says which setting would have fitted. So in `backward` and `step`.
        """
        self.sharded.check_open("the engine's forward()")
        if torch.is_grad_enabled():
            self.sharded.places.check()
        if self.loss_scaler is not None and self._resolution.config.fp16.auto_cast:
            inputs, kwargs = cast_floats((inputs, kwargs), torch.float16)
        self._remember_call(inputs, kwargs)
        try:
            outputs = self.module(*inputs, **kwargs)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise explained(error, self._circumstances("the engine's forward()")) from error
        if self.loss_scaler is not None and torch.is_grad_enabled():
            outputs = scale_gradients_of(outputs, self._output_scale)
        return outputs

    def _output_scale(self) -> float:
        self._scale_entered = True
        return 1.0 if self._engine_backward else self.cur_scale

    def _backward_ended(self, brought: bool) -> None:
        """Remember whether the window has gradients without the loss scale; the step tells all ranks."""
        self._unscaled |= brought and not self._scale_entered and self.cur_scale != 1.0
        self._scale_entered = False

    # -- backward ----------------------------------------------------------------------------------------------------

    @never_compiled
    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Compute gradients of `loss`, reduce them as the plan says, and release the gathered parameters.

        The mean over accumulation steps and ranks is taken when stepping; with `scale_wrt_gas=False` the loss counts as
        if it had already been divided by the number of accumulation steps.

        Args:
            loss: scalar.
            retain_graph: as in `torch.Tensor.backward`.
            scale_wrt_gas: see above.

        Returns:
            The loss divided by the number of accumulation steps, detached from nothing, for logging.

        Raises:
            UsageError: the loss is not a scalar tensor that requires a gradient, or the engine has been destroyed.
        """
        self.sharded.check_open("engine.backward()")
        if not isinstance(loss, torch.Tensor):
            raise UsageError(f"engine.backward(loss) expects a scalar tensor, got {type(loss).__name__}")
        if loss.numel() != 1:
            raise UsageError(
                f"engine.backward(loss) expects a scalar tensor, got a tensor of shape {tuple(loss.shape)}; reduce it "
                "first (loss.mean())"
            )
        if not loss.requires_grad:
            raise UsageError(
                "engine.backward(loss): the loss does not require a gradient; was it computed under no_grad?"
            )
        self.sharded.hooks.settle()
        steps = self.gradient_accumulation_steps()
        factor = self.cur_scale * (1.0 if scale_wrt_gas else float(steps))
        reducer = self.sharded.reducer
        passes = reducer.passes if reducer is not None else 0
        self._engine_backward = self._scale_entered = True
        try:
            with explaining(lambda: self._circumstances("engine.backward()", graph=True)):
                (loss if factor == 1.0 else loss * factor).backward(retain_graph=retain_graph)
        finally:
            self._engine_backward = False
        if reducer is not None and reducer.passes == passes:
            reducer.pass_over()
        return loss / steps if scale_wrt_gas and steps > 1 else loss

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss to call `backward()` on by hand. The scale enters at the model's outputs,
        so it is unchanged.
        """
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
        """Whether the current micro-batch is the last one before an update."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Declare whether the current micro-batch is a boundary; holds until changed, None returns to counting."""
        self._boundary = is_boundary

    def reduces_now(self) -> bool:
        """Whether the backward pass that starts now ends an accumulation window."""
        return self.is_gradient_accumulation_boundary() and not self.inside_no_sync_ctxt

    # -- step --------------------------------------------------------------------------------------------------------

    @never_compiled
    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """At an accumulation boundary update the parameters, the loss scale and the schedule; elsewhere only count.

        Args:
            lr_kwargs: passed to the scheduler's `step`.

        Raises:
            UsageError: the engine has no optimizer, or has been destroyed.
            SyncError: inside `no_sync()`.
        """
        self.sharded.check_open("engine.step()")
        if self.inside_no_sync_ctxt:
            raise SyncError("engine.step() inside no_sync() would step gradients that no other rank has seen")
        if self.optimizer is None:
            raise UsageError(f"engine.step(): {self._no_optimizer()}")
        self._was_applied = False
        if self.is_gradient_accumulation_boundary():
            with explaining(lambda: self._circumstances("engine.step()", stepping=True)):
                self._take_step(lr_kwargs)
        self.micro_steps += 1

    def _no_optimizer(self) -> str:
        section = self._resolution.config.optimizer
        if self.client_optimizer is None and (section is None or section.type is None):
            return "there is no optimizer. Pass optimizer= to initialize(), or add an `optimizer` section"
        return (
            "there is no optimizer, because initialize() found nothing to train: no parameter of the model (or of "
            "model_parameters) required a gradient"
        )

    def _take_step(self, lr_kwargs: dict[str, Any] | None) -> None:
        sharded = self.sharded
        sharded.check_can_step()
        prepared = self._prepared = self._prepared or self._prepare()
        if sharded.reducer is not None and sharded.reducer.passes != prepared.passes:
            raise UsageError(
                "engine.step() has raised before, when the gradients were already scaled for the update, and another "
                "backward pass has come on top of them. Call engine.zero_grad() and compute the window's gradients anew"
            )
        scale = self.cur_scale
        used = tuple(float(lr) for lr in self.get_lr())
        if not prepared.overflow:
            sharded.step()
        self._prepared = None
        self._unscaled = False
        sharded.end_window(not prepared.overflow)
        if self.loss_scaler is not None:
            self.loss_scaler.update(prepared.overflow)
        self.last_step = StepReport(not prepared.overflow, prepared.norm, prepared.coefficient, scale, used)
        self._was_applied = not prepared.overflow
        self._tell_overflow(prepared.overflow)
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        if prepared.overflow:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        self._print_progress()

    def _tell_overflow(self, overflow: bool) -> None:
        """Keep on the optimizer whether its last step was skipped: frameworks ask it, not the engine."""
        if (
            self.optimizer is not None
            and self.loss_scaler is not None
            and not hasattr(type(self.optimizer), "overflow")
        ):
            self.optimizer.overflow = overflow  # type: ignore[attr-defined]

    def _prepare(self) -> _Prepared:
        """Make the window's gradients what the optimizer is to see: complete, with the norm known, scaled and clipped.

        Done once a window: if the optimizer then raises, the next `step()` goes on from here.
        """
        config, sharded = self._resolution.config, self.sharded
        reducer = sharded.reducer
        assert reducer is not None
        sharded.hooks.settle()
        reducer.complete_window()
        if config.strict_sync:
            sharded.check_branches()
        factor = self._gradient_factor()
        clip = float(config.gradient_clipping)
        checks = checks_overflow(config)
        unused = None if config.zero_optimization.ignore_unused_parameters else reducer.unused()
        norm, wrong = None, False
        if computes_norm(config):
            asked = unused is not None or self.loss_scaler is not None
            norm, wrong = sharded.gradient_norm(factor, bool(unused) or self._unscaled if asked else None)
        elif unused is not None:
            wrong = sharded.any_rank(bool(unused))
        if wrong:
            self._refuse(unused or [])
        overflow = checks and norm is not None and not bool(torch.isfinite(norm))
        coefficient = None
        if not overflow:
            multiplier: float | torch.Tensor = factor
            if clip and norm is not None:
                coefficient = sharded.clip_factor(norm, clip)
                multiplier = coefficient * factor
            sharded.scale_gradients(multiplier)
        return _Prepared(norm, coefficient, overflow, reducer.passes)

    def _refuse(self, unused: list[str]) -> None:
        """Raise on every rank what is wrong with the window's gradients on some rank; `unused`: names on this one."""
        everyone = exchange(self._comm, self.device, (self._unscaled, unused))
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

    def _gradient_factor(self) -> float:
        """Return what turns accumulated sums into the gradient:
        mean over ranks and micro-batches, loss scale divided out.
        """
        if self._prepared is not None and not self._prepared.overflow:
            return 1.0  # it has been applied
        ranks = self.world_size if self._resolution.config.gradient_allreduce_op == "mean" else 1
        prescale = self.sharded.reducer.prescale if self.sharded.reducer is not None else 1.0
        return 1.0 / (ranks * prescale * self.gradient_accumulation_steps() * self.cur_scale)

    def _print_progress(self) -> None:
        every = self._resolution.config.steps_per_print
        if every and self.global_steps % every == 0 and self.global_rank == 0:
            from shardwise.utils.logging import logger

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
            if made is not probe:
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

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop accumulated gradients: the window starts anew."""
        self.sharded.hooks.settle()
        super().zero_grad(set_to_none=set_to_none)
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Forget the gradients that the engine has accumulated."""
        self._prepared = None
        self._unscaled = False
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
        """
        if not self.sharded.closed and self.optimizer is not None and self.loss_scaler is not None:
            vars(self.optimizer).pop("overflow", None)
        self.sharded.close()
        self._comm.destroy()
