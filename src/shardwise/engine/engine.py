"""The engine: the object that a training script calls. Its methods delegate to parts (`shardwise.engine.build`)."""

from __future__ import annotations

import contextlib
import difflib
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.desync import compare_calls
from shardwise.compat import never_compiled, transforming
from shardwise.device.ranges import named
from shardwise.engine.advice import explain_dtype
from shardwise.engine.batch import Batches
from shardwise.engine.checkpointing import Checkpoints
from shardwise.engine.curricula import Curricula
from shardwise.engine.faults import FaultTolerance
from shardwise.engine.generation import Generation
from shardwise.engine.interchange import Interchange
from shardwise.engine.memory import MemoryReporting
from shardwise.engine.modules import convert_buffers
from shardwise.engine.parallel import OwnSequences, SharedSequences, SharedTensors, release_experts
from shardwise.engine.refresh import Refreshed, refresh
from shardwise.engine.scaling import cast_floats, scale_gradients_of
from shardwise.engine.state_getters import StateGetters, of_part
from shardwise.engine.states import give_methods, offload_states, reload_states, take_methods
from shardwise.engine.step import TrainStep
from shardwise.engine.timelines import Timelines
from shardwise.errors import NotScalarError, ShardwiseError, UsageError
from shardwise.memory import is_out_of_memory
from shardwise.precision.autocast import autocast, autocast_dtype
from shardwise.trees import tensors_in

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator
    from shardwise.config import Resolution
    from shardwise.engine.observers import Activations, Observers
    from shardwise.engine.profiling import Profiling
    from shardwise.engine.step_log import Following
    from shardwise.moe import ExpertGroup
    from shardwise.monitor import Monitor
    from shardwise.zero.model import ShardedModel


_LIKE: dict[str, str] = {}
"""Suggestion ("; did you mean ...?", or "") by missing attribute name."""


class Engine(StateGetters):
    """A model, its optimizer and its schedule, sharded by the configuration; built by `shardwise.initialize`.

    Attributes:
        module: the user's model; also looked up for unknown attributes of the engine.
        optimizer: the client's instance, if one was given; its groups have this rank's shards.
        lr_scheduler: stepped after each applied update; set it to None to step it in the script.
        loss_scaler: fp16 loss scaler; None without fp16.
        training_dataloader: made from `training_data`, or None.
        config: the dictionary that the user passed.
        device: of this rank.
        job: all ranks that step, agree and save together.
        data: data-parallel ranks, which get different samples.
        global_steps: accumulation boundaries passed, skipped steps included.
        micro_steps: calls of `step()`, without calls that had nothing to do.
        skipped_steps: steps skipped because of an overflow or a spike.
        global_samples: samples of all ranks used in steps.
        last_step: `StepReport` of the last `step()` at a boundary.
        last_load: report of the last `load_checkpoint`; None before.
        resumed: report of the last `resume`; None before.
        accountant: bytes held, by category.
        ledger: flight recorder of this engine's collectives.
        monitor: writes to the configured services (`shardwise.monitor.Monitor`).
        run_log: log of this rank's steps (`shardwise.monitor.runlog.RunLog`); None if disabled.
        param_groups: the optimizer's, as `defaults` and `state`. Frameworks step the engine as an optimizer (Lightning
            Fabric).
    """

    pipeline_parallelism = False
    enable_backward_allreduce = True

    def __init__(
        self,
        *,
        sharded: ShardedModel,
        step: TrainStep,
        batches: Batches,
        checkpoints: Checkpoints,
        interchange: Interchange,
        generation: Generation,
        faults: FaultTolerance,
        memory: MemoryReporting,
        activations: Activations,
        curricula: Curricula,
        monitor: Monitor,
        observers: Observers,
        profiling: Profiling,
        timelines: Timelines,
        following: Following,
        resolution: Resolution,
        job: Communicator,
        data: Communicator,
        sequences: SharedSequences | OwnSequences,
        tensors: SharedTensors | None,
        expert_groups: Mapping[int, ExpertGroup],
        local_rank: int,
        client_optimizer: Any = None,
        client_lr_scheduler: Any = None,
        mpu: Any = None,
        mesh_device: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        self.module = sharded.module
        self.sharded = sharded
        self.optimizer = sharded.optimizer
        self.basic_optimizer = sharded.optimizer
        self.client_optimizer = client_optimizer
        self.client_lr_scheduler = client_lr_scheduler
        self.accountant = sharded.accountant
        self.device = sharded.device
        self.job = job
        self.data = data
        self._sequences = sequences
        self._tensors = tensors
        self._expert_groups = expert_groups
        self.local_rank = local_rank
        self.mpu = mpu
        self.mesh_device = mesh_device
        self._step = step
        self._batches = batches
        self._checkpoints = checkpoints
        self._interchange = interchange
        self._generation = generation
        self._faults = faults
        self._memory = memory
        self._activations = activations
        self._curricula = curricula
        self.monitor = monitor
        self._observers = observers
        self._profiling = profiling
        self._timelines = timelines
        self._following = following
        self._resolution = resolution
        self._autocast_dtype = autocast_dtype(resolution.config)
        sharded.engine = weakref.ref(self)
        if resolution.config.strict_sync:
            compare_calls(True)
        if self.optimizer is not None:
            give_methods(self.optimizer, self)

    # -- attribute lookup ----------------------------------------------------------------------------------------------

    if not TYPE_CHECKING:  # For type checkers an unknown name is one of `nn.Module`.

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
                raise AttributeError(
                    f"neither the engine nor its module has an attribute {name!r}{self._like(name)}"
                ) from None

    def _like(self, name: str) -> str:
        """Cached, because scripts probe with `hasattr` repeatedly."""
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

    # -- batches -------------------------------------------------------------------------------------------------------

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the global batch size by changing the number of accumulation steps.

        Raises:
            BatchSizeError: the size is not a positive multiple of micro-batch size times ranks; the script counts
                micro-batches itself; or an accumulation window has begun.
        """
        self._step.check_between_windows("engine.set_train_batch_size()")
        self._batches.set_total(train_batch_size)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the micro-batch size and keep the number of accumulation steps; a BatchSizeError unless positive."""
        self._batches.set_micro(micro_batch_size)

    deepspeed_io = of_part("_batches", Batches.loader)

    ending_together = of_part("_batches", Batches.ending_together)

    dynamic_batching = of_part("_batches", Batches.dynamic_batching)

    set_data_post_process_func = of_part("_batches", Batches.set_data_post_process_func)

    set_custom_curriculum_learning_schedule = of_part("_curricula", Curricula.set_custom_curriculum_learning_schedule)

    # -- forward and backward ------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass and return its output.

        With `torch_autocast` the module runs under `torch.autocast`, unless the caller already uses it. The loss and
        calls of `engine.module` run outside.

        Raises:
            UsageError: the engine has been destroyed, or the model's parameters have changed.
            OutOfMemoryError: the message names a setting that would fit. `backward` and `step` raise it, too.
        """
        self.sharded.check_there("the engine's forward()", values=True)
        # Transforms of torch.func differentiate by themselves and accumulate no gradients.
        own = torch.is_grad_enabled() and not transforming()
        trains = own and self.module.training
        if trains and self._curricula.active:
            inputs, kwargs = self._curricula.given(inputs, kwargs)
        if own:
            self._generation.release()
            self._step.forward_begins((inputs, kwargs))
            self.sharded.places.check()
        scaled = own and self._step.scales_outputs
        if scaled:
            inputs, kwargs = scale_gradients_of((inputs, kwargs), self._step.input_scale)
        if self._resolution.config.fp16.enabled and self._resolution.config.fp16.auto_cast:
            inputs, kwargs = cast_floats((inputs, kwargs), torch.float16)
        if own:
            if self._tensors is not None:  # before the comparison below runs the model
                self._tensors.compare_inputs(self.module, inputs, kwargs)
            self._compare_sequences(inputs, kwargs)
        self._memory.remember_call(inputs, kwargs)
        try:
            with (
                self.sharded.noting_disk_errors(),
                autocast(self.device, self._autocast_dtype),
                self.job.ledger.inside_call(),
                self._activations.around((inputs, kwargs)),
                self._curricula.within(training=trains),
                self._observers.during("forward", inputs, kwargs) if own else contextlib.nullcontext(),
            ):
                if self._profiling.count is None:
                    outputs = self.module(*inputs, **kwargs)
                else:
                    outputs = self._profiling.counted(inputs, kwargs)
        except Exception as error:
            if isinstance(error, (RuntimeError, MemoryError)):
                if is_out_of_memory(error):
                    raise self._memory.oom_error(error, "the engine's forward()") from error
                dtype = self.sharded.policy.compute_dtype
                hint = explain_dtype(error, tensors_in((inputs, kwargs)), dtype, self.module)
                if hint is not None:
                    raise UsageError(hint) from error
            named = None if self._tensors is None else self._tensors.named(error, self.module)
            if named is None:
                raise
            raise named from error
        if scaled:
            outputs = scale_gradients_of(outputs, self._step.output_scale)
        return outputs

    def _compare_sequences(self, inputs: Any, kwargs: Any) -> None:
        self._sequences.compare(self.module, self._run_plainly, inputs, kwargs)

    def _run_plainly(self, *inputs: Any, **kwargs: Any) -> Any:
        with self.sharded.noting_disk_errors(), autocast(self.device, self._autocast_dtype):
            return self.module(*inputs, **kwargs)

    @never_compiled
    def backward(
        self,
        loss: torch.Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        weight: float | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the gradients of `loss`, reduce them by the ZeRO plan, and reshard parameters.

        `step()` averages gradients over accumulation steps and ranks. With `scale_wrt_gas=False` the loss counts as
        already divided by the number of accumulation steps.

        With weights the step's gradient is sum_i w_i grad_i / sum_i w_i (zero if the sum is), over all backward passes
        of the window on all ranks. If each loss is the mean over w_i tokens, this is the gradient of the mean over all
        tokens. Weights may differ between ranks and micro-batches; their sum is `engine.last_step.weight`.

        Args:
            loss: scalar tensor.
            retain_graph: as in `torch.Tensor.backward`.
            scale_wrt_gas: see above; ignored for weighted losses.
            weight: finite number >= 0, or a tensor with one element, unchecked where reading it would wait for the
                device. A loss with weight 0 adds zeros to all gradients, and may be NaN (the mean over no tokens).

        Returns:
            The loss, divided by the number of accumulation steps unless weighted, with its graph, for logging.

        Raises:
            NotScalarError: the loss is not a scalar.
            UsageError: the loss is no tensor that requires a gradient; `weight` is invalid, or given where gradients
                are summed over ranks (`gradient_allreduce_op` "sum"); or the engine has been destroyed.
        """
        self.sharded.check_there("engine.backward()")
        if not isinstance(loss, torch.Tensor):
            raise UsageError(f"engine.backward(loss) expects a scalar tensor, got {type(loss).__name__}")
        _check_scalar(loss, "engine.backward(loss)")
        if not loss.requires_grad:
            raise UsageError(f"engine.backward(loss): the loss does not require a gradient; {self._no_gradient()}")
        with (
            self._step.passing(loss, weight, scale_wrt_gas) as roots,
            self._memory.reporting_oom("engine.backward()", graph=True),
            self.sharded.noting_disk_errors(),
            self._observers.during("backward"),
        ):
            self.sharded.backward(roots, retain_graph=retain_graph)
        if self._tensors is not None:
            self._tensors.check_gradients(loss)
        steps = self._batches.steps
        return loss / steps if scale_wrt_gas and steps > 1 and weight is None else loss

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return `loss` unchanged, because model outputs apply the loss scale; a NotScalarError for no scalar."""
        _check_scalar(loss, "engine.scale(loss)")
        return loss

    no_sync = of_part("_step", TrainStep.no_sync)

    # -- steps ---------------------------------------------------------------------------------------------------------

    is_gradient_accumulation_boundary = of_part("_step", TrainStep.is_gradient_accumulation_boundary)

    synchronize_replicas = of_part("_step", TrainStep.synchronize_replicas)

    set_gradient_accumulation_boundary = of_part("_step", TrainStep.set_gradient_accumulation_boundary)

    @never_compiled
    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Update parameters, loss scale and schedule at an accumulation boundary; otherwise only count the micro-batch.

        With `managed_gradient_accumulation` false every call is a boundary.

        A call without work changes nothing and is logged once: the second of two calls without a pass between them, and
        the end of a window in which no rank ran a backward pass. A micro-batch without its backward pass counts.

        Args:
            lr_kwargs: arguments of the scheduler's `step`.

        Raises:
            UsageError: the engine has no optimizer, or has been destroyed, or `lr_kwargs` is a closure.
            SyncError: inside `no_sync()`.
            NonFiniteError: a gradient is not finite, and `non_finite` is "stop", or "rewind" too often. Only the
                window's gradients are dropped.
            AnomalyError: the same for actions of `anomaly_watch`; also if no in-memory copy exists for a rewind.
            OffloadError: a disk with state has failed. The engine refuses to go on.
        """
        self.sharded.check_there("engine.step()")
        if self.optimizer is None:
            raise UsageError(f"engine.step(): {self._no_optimizer()}")
        if lr_kwargs is not None and not isinstance(lr_kwargs, Mapping):
            raise UsageError(
                f"engine.step() takes arguments of the scheduler as a dictionary and has got {lr_kwargs!r}. Instead of "
                "passing a closure, run the forward pass and engine.backward() before engine.step()"
            )
        if self._tensors is not None:
            self._tensors.step_begins()
        reporting_oom = self._memory.reporting_oom("engine.step()", stepping=True)
        noting = self.sharded.noting_disk_errors()
        with reporting_oom, self._observers.during("step"), noting, named("boundary"):
            ended = self._step.take(lr_kwargs)
        if ended:
            self._observers.after_step()
            if self._step.rewinding is not None:
                self._faults.rewind()
            else:
                self._faults.after_boundary()

    def _no_gradient(self) -> str:
        if not any(tensor.trainable for tensor in self.sharded.registry):
            return "no parameter of the model was trained when the engine was built. Unfreeze before initialize()"
        if not torch.is_grad_enabled():
            return "gradients are switched off here. Call engine(...) and engine.backward() outside of torch.no_grad()"
        return (
            "was it computed under no_grad, or from values without a graph (detach(), item(), torch.tensor())? Compute "
            "it from what engine(...) returns"
        )

    def _no_optimizer(self) -> str:
        section = self._resolution.config.optimizer
        if self.client_optimizer is None and (section is None or section.type is None):
            return "there is no optimizer. Pass optimizer= to initialize(), or add an `optimizer` section"
        return (
            "there is no optimizer, because initialize() found nothing to train: no parameter of the model (or of "
            "model_parameters) required a gradient"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop accumulated gradients; the accumulation window starts again."""
        self.sharded.hooks.settle()
        super().zero_grad(set_to_none=set_to_none)
        self._step.warn_of_zero_grad()
        self._step.drop_gradients()

    # -- the module ----------------------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Engine:
        if self.sharded.closed:
            super()._apply(fn, recurse)
        else:
            convert_buffers(self.module, self.sharded.registry.parameters, fn)
        return self

    def to_empty(self, *, device: Any, recurse: bool = True) -> Engine:
        """Allocate parameters and buffers without values; a UsageError before `destroy()`."""
        if not self.sharded.closed:
            raise UsageError(
                "engine.to_empty(): the engine's parameters and buffers have values, which would be lost. Call it on "
                "the model, before initialize() or after engine.destroy()"
            )
        super().to_empty(device=device, recurse=recurse)
        return self

    def gathered(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which all parameters are unsharded on every rank; it needs memory for the whole model.

        Forward passes inside need no communication, so ranks may run different numbers of them (generation,
        evaluation). Every rank must enter and leave the context. Raises a UsageError after `destroy()`.
        """
        self.sharded.check_there("engine.gathered()", values=True)
        return self.sharded.owner.whole()

    generate = of_part("_generation", Generation.generate)

    def train(self, mode: bool = True) -> Engine:
        """Set training mode (False: evaluation), and reshard what `generate` has gathered before training goes on."""
        if mode:
            self._generation.release()
        super().train(mode)
        return self

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
        **options: Any,
    ) -> None:
        """Compile the engine's forward in place with `torch.compile`; a second call does nothing.

        `backend`, `compile_kwargs` and `options` are those of `torch.compile`. Raises a UsageError for `schedule`
        (compiler passes by step) and `compiled_autograd_enabled`, which are not supported.
        """
        if schedule:
            raise UsageError("engine.compile(schedule=...): compiler passes are not built yet; leave it out")
        if compiled_autograd_enabled:
            raise UsageError("engine.compile(compiled_autograd_enabled=True): it is not built yet; leave it out")
        if not self.is_compiled:
            super().compile(backend=backend, **{**(compile_kwargs or {}), **options})

    def empty_partition_cache(self) -> None:
        """Reshard units that are still unsharded; a backward pass unshards them again, outside the prefetch order."""
        self.sharded.hooks.settle()
        for unit in self.sharded.units:
            unit.reshard()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    save_checkpoint = of_part("_checkpoints", Checkpoints.save_checkpoint)

    load_checkpoint = of_part("_checkpoints", Checkpoints.load_checkpoint)

    wait_for_checkpoint = of_part("_checkpoints", Checkpoints.wait_for_checkpoint)

    # -- weights -------------------------------------------------------------------------------------------------------

    save_16bit_model = of_part("_interchange", Interchange.save_16bit_model)

    save_fp16_model = save_16bit_model

    module_state_dict = of_part("_interchange", Interchange.module_state_dict)

    load_module_state_dict = of_part("_interchange", Interchange.load_module_state_dict)

    _consolidated_16bit_state_dict = of_part("_interchange", Interchange._consolidated_16bit_state_dict)

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict

    export = of_part("_interchange", Interchange.export)

    load_weights = of_part("_interchange", Interchange.load_weights)

    # -- faults --------------------------------------------------------------------------------------------------------

    resume = of_part("_faults", FaultTolerance.resume)

    provide_client_state = of_part("_faults", FaultTolerance.provide_client_state)

    checkpoint_on_signal = of_part("_faults", FaultTolerance.checkpoint_on_signal)

    check_signals = of_part("_faults", FaultTolerance.check_signals)

    copy_to_memory = of_part("_faults", FaultTolerance.copy_to_memory)

    # -- memory --------------------------------------------------------------------------------------------------------

    memory_report = of_part("_memory", MemoryReporting.memory_report)

    memory_plans = of_part("_memory", MemoryReporting.memory_plans)

    record_timeline = of_part("_timelines", Timelines.record_timeline)

    stragglers = of_part("_timelines", Timelines.stragglers)

    offload_states = offload_states

    reload_states = reload_states

    # -- the end -------------------------------------------------------------------------------------------------------

    def refresh(
        self,
        param_groups: Sequence[Mapping[str, Any]] = (),
        directory: str | os.PathLike[str] | None = None,
    ) -> Refreshed:
        """Take over changes of the model: adapters, resized embeddings, frozen or unfrozen parameters (all ranks call).

        The units are built again from the model as it is now, and all state continues: master weights, optimizer state,
        schedule, loss scale, counters. Parameters that are new, or have been unfrozen, start with fresh optimizer
        state. Call it between steps.

        Args:
            param_groups: groups for new or unfrozen parameters, as for `torch.optim.Optimizer.add_param_group`. Without
                them, such parameters join the only group. A parameter in place of another of the same name joins the
                group of the other.
            directory: directory in which the state is kept meanwhile, on a file system of each machine; default:
                `/dev/shm`.

        Returns:
            Names of the parameters that have been added, removed, unfrozen and frozen.

        Raises:
            UsageError: gradients of an unfinished window are held; ranks differ; a parameter has no group; state cannot
                be kept (1-bit optimizers, gradient compression); or new layers cannot be divided as the others are.
            CheckpointError: the directory has too little room; nothing has changed.

        Example:
            >>> import shardwise, torch
            >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
            >>> _ = model[0].requires_grad_(False)
            >>> config = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
            >>> engine, *_ = shardwise.initialize(model=model, config=config)
            >>> _ = model[0].requires_grad_(True)
            >>> engine.refresh().trained
            ('0.weight', '0.bias')
            >>> engine.destroy()
        """
        ways = {
            "sequence parallelism": self._resolution.config.sequence_parallel_size > 1,
            "tensor parallelism": self._tensors is not None,
            "expert parallelism": bool(self._expert_groups),
        }
        self._generation.release()
        found = refresh(
            self.sharded,
            self._resolution,
            self.job,
            self._step,
            self._checkpoints,
            param_groups,
            directory,
            [way for way, used in ways.items() if used],
        )
        if any(found):
            self._generation.close()
            self._faults.update_copy()  # because earlier copies are of another model
        return found

    def destroy(self) -> None:
        """Remove hooks from model and optimizer and free the engine's memory (all ranks call).

        Parameters become plain, unsharded and up to date, in the module's compute dtype. The optimizer keeps them in
        its groups without state; save a checkpoint first if needed. Later calls that compute or save raise. A second
        call does nothing.

        Raises:
            CheckpointError: the pending asynchronous save has failed. The engine is destroyed nevertheless.
            UsageError: some losses of the last step had weights, and others none. The engine is destroyed nevertheless.
            DesyncError: other ranks are still training (stage 3); parameters stay sharded. During the handling of an
                exception, this is a warning.
        """
        self._generation.close()
        self._memory.close()
        self._timelines.close()
        failure: ShardwiseError | None = self._checkpoints.background.finish()
        if not self.sharded.closed:
            failure = self._step.close() or failure
            if self.optimizer is not None:
                take_methods(self.optimizer)
        self._faults.end()
        self.monitor.close()
        self._following.close()
        try:
            self.sharded.close()
        finally:
            self._faults.end_watch()
            self._profiling.close()
            self._activations.close()
            self._curricula.close()
            for shared in (self._sequences, self._tensors):
                if shared is not None:
                    shared.close()
            release_experts(self.module, self._expert_groups)
            if self._resolution.config.strict_sync and not self.job.destroyed:
                compare_calls(False)
            for ranks in dict.fromkeys((self.job, self.data)):
                ranks.destroy()  # notifies ranks that wait for this one
        if failure is not None:
            raise failure


def _check_scalar(loss: torch.Tensor, call: str) -> None:
    if loss.numel() != 1:
        raise NotScalarError(
            f"{call} expects a scalar tensor, got a tensor of shape {tuple(loss.shape)}; reduce it first (loss.mean())"
        )
