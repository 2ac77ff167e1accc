"""Engine: the object a training script talks to.

It has the names that scripts call, and passes each call on to the part whose business it is: the step, batches,
checkpoints, weights, faults, memory. `shardwise.engine.build` puts the parts together; what shards, moves or reduces
lives in `shardwise.zero`.
"""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise._version import __version__
from shardwise.absent import COMPILER, ENGINE
from shardwise.checkpoint.exporting import KEEP
from shardwise.checkpoint.report import LoadReport
from shardwise.compat import never_compiled, transforming
from shardwise.config.gradient_compression import sends_values
from shardwise.data import EngineDataLoader
from shardwise.device.ranges import named
from shardwise.engine.advice import explain_dtype
from shardwise.engine.attributes import Held, OfOptimizer
from shardwise.engine.exhausted import explained, explaining
from shardwise.engine.experts import release_experts
from shardwise.engine.getters import ConfigGetters
from shardwise.engine.recovery import Resumed
from shardwise.engine.scaling import cast_floats, scale_gradients_of
from shardwise.engine.states import check_device, give_methods, kinds_of, take_methods
from shardwise.engine.step import StepReport, TrainStep
from shardwise.errors import AbsentAttributeError, NotScalarError, UsageError
from shardwise.memory import is_out_of_memory
from shardwise.moe.exchange import ExpertParallelModule
from shardwise.precision.autocast import autocast, autocast_dtype, described
from shardwise.precision.dtypes import parse_dtype
from shardwise.precision.scaler import LossScaler
from shardwise.trees import tensors_in

if TYPE_CHECKING:
    from shardwise.checkpoint.background import SaveReport
    from shardwise.checkpoint.importing import LoadedWeights
    from shardwise.checkpoint.importing import Rename as RenameWeights
    from shardwise.checkpoint.peer_replicas import MemoryCopy
    from shardwise.checkpoint.selection import Patterns, Rename
    from shardwise.comm.communicator import Communicator
    from shardwise.comm.ledger import Ledger, Totals
    from shardwise.comm.stragglers import Stragglers
    from shardwise.config import Resolution
    from shardwise.engine.activations import Activations
    from shardwise.engine.anomalies import Anomaly
    from shardwise.engine.batch import Batches
    from shardwise.engine.budget import Budget
    from shardwise.engine.checkpointing import Checkpoints
    from shardwise.engine.faults import FaultTolerance
    from shardwise.engine.following import Following
    from shardwise.engine.interchange import CustomLoad, Interchange
    from shardwise.engine.memory import MemoryReporting
    from shardwise.engine.monitoring import StepEvents
    from shardwise.engine.plans import MemoryPlans
    from shardwise.engine.profiling import Profiling
    from shardwise.engine.sequence import OwnSequences, SharedSequences
    from shardwise.engine.tensors import SharedTensors
    from shardwise.engine.timelines import Timelines
    from shardwise.memory import MemoryReport
    from shardwise.moe import ExpertGroup
    from shardwise.monitor import Monitor
    from shardwise.monitor.runlog import RunLog
    from shardwise.profile import ModuleProfile
    from shardwise.zero.model import ShardedModel
    from shardwise.zero.units.presence import OffloadStateTypeEnum


_LIKE: dict[str, str] = {}
"""Name that no engine has -> the question whether another one was meant."""


class Engine(ConfigGetters, nn.Module):
    """A model, its optimizer and its schedule, sharded as the configuration says. Made by `shardwise.initialize`.

    Attributes:
        module: the user's model; unknown attributes of the engine are looked up there.
        optimizer: the optimizer instance (the client's own, if one was given), with what this rank owns in its groups.
        lr_scheduler: stepped after every applied update; may be set to None to take over.
        loss_scaler: of fp16; None without.
        training_dataloader: made from `training_data`, or None.
        config: the dictionary that the user passed.
        job: all ranks that step, agree and save together.
        data: the ranks that get different samples.
        global_steps: boundaries passed, skipped steps included.
        micro_steps: calls of `step()`, but for those that had nothing to do.
        skipped_steps: steps skipped because of an overflow or a spike.
        global_samples: samples of all ranks that have gone into steps.
        last_step: what the last `step()` at a boundary did (`StepReport`).
        last_load: what the last `load_checkpoint` has done, and what differed; None before.
        resumed: what `resume` has found; None before.
        accountant: bytes held, by category.
        ledger: every collective of this engine.
        monitor: writes to the services that the configuration switches on (`shardwise.monitor.Monitor`).
        run_log: what is written of this rank's steps (`shardwise.monitor.runlog.RunLog`); None: nothing is.
        param_groups: the optimizer's. With `defaults` and `state` an engine can stand where a framework steps an
            optimizer (Lightning Fabric asks for these before it calls `engine.step()`).
        defaults: the optimizer's.
        state: the optimizer's.
    """

    param_groups = OfOptimizer()
    defaults = OfOptimizer()
    state = OfOptimizer()

    global_steps = Held[int]("_step")
    micro_steps = Held[int]("_step")
    skipped_steps = Held[int]("_step")
    global_samples = Held[int]("_step")
    inside_no_sync_ctxt = Held[bool]("_step")
    last_step = Held[StepReport | None]("_step")
    lr_scheduler = Held[Any]("_step")
    loss_scaler = Held[LossScaler | None]("_step")
    training_dataloader = Held[EngineDataLoader | None]("_batches")
    last_load = Held[LoadReport | None]("_checkpoints")
    resumed = Held[Resumed | None]("_faults")

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
        faults: FaultTolerance,
        memory: MemoryReporting,
        activations: Activations,
        monitor: Monitor,
        events: StepEvents,
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
        self._faults = faults
        self._memory = memory
        self._activations = activations
        self.monitor = monitor
        self._events = events
        self._profiling = profiling
        self._timelines = timelines
        self._following = following
        self._resolution = resolution
        self._autocast_dtype = autocast_dtype(resolution.config)
        if self.optimizer is not None:
            give_methods(self.optimizer, self)

    # -- what clients read ---------------------------------------------------------------------------------------------

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
    def ledger(self) -> Ledger:
        """Every collective of this engine."""
        return self.job.ledger

    @property
    def run_log(self) -> RunLog | None:
        """What is written of this rank's steps, for `shardwise report`."""
        return self._following.log

    @property
    def config(self) -> Any:
        """The configuration as the user gave it."""
        return self._resolution.written

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.job.world

    @property
    def dp_world_size(self) -> int:
        """Number of ranks that get different samples."""
        return self.data.world

    @property
    def sequence_parallel_size(self) -> int:
        """Number of ranks that share a sequence."""
        return self._sequences.group.size

    @property
    def mp_world_size(self) -> int:
        """Number of ranks that have a copy of the model among them."""
        return self.get_tensor_parallel_world_size()

    @property
    def seq_dp_world_size(self) -> int:
        """Number of ranks over which gradients are averaged."""
        return self.sharded.domain.world

    @property
    def global_rank(self) -> int:
        """This process among all."""
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    @property
    def data_parallel_group(self) -> Any:
        """The process group of the data-parallel ranks (None: the default group)."""
        return self.data.process_group

    @property
    def seq_data_parallel_group(self) -> Any:
        """The process group over which gradients are averaged."""
        return self.sharded.comm.process_group

    @property
    def has_moe_layers(self) -> bool:
        """Whether the model has layers of experts (`shardwise.moe`)."""
        return bool(self.moe_layers)

    @property
    def moe_layers(self) -> list[ExpertParallelModule]:
        """Layers of experts, in the model's order."""
        return [module for module in self.module.modules() if isinstance(module, ExpertParallelModule)]

    @property
    def num_experts(self) -> list[int]:
        """Number of experts of each of them."""
        return [layer.num_experts for layer in self.moe_layers]

    @property
    def expert_parallel_group(self) -> dict[str, Any]:
        """The process groups of ranks among which tokens travel, by "ep_size_" and their size."""
        return {
            f"ep_size_{size}": group.comm.process_group
            for size, group in self._expert_groups.items()
            if group.comm is not None
        }

    @property
    def dist_backend(self) -> str | None:
        """Name of torch.distributed's backend, or None in a single process without one."""
        return dist.get_backend() if dist.is_available() and dist.is_initialized() else None

    @property
    def gradient_average(self) -> bool:
        """Whether gradients are averaged (rather than summed) over ranks."""
        return bool(self._resolution.config.gradient_allreduce_op == "mean")

    @property
    def communication_data_type(self) -> torch.dtype:
        """Type of gradients on the wire: the chosen one, else the model's. May be set between windows, on all ranks."""
        policy = self.sharded.policy
        return policy.wire_dtype or policy.compute_dtype or torch.float32

    @communication_data_type.setter
    def communication_data_type(self, dtype: torch.dtype | str) -> None:
        wire = parse_dtype(dtype, "communication_data_type")
        if wire is torch.float16 and sends_values(self._resolution.config):
            raise UsageError(
                f"engine.communication_data_type: fp16 cannot hold all that compression.type "
                f'"{self._resolution.config.compression.type}" keeps and sends later; use bf16 or fp32'
            )
        self.sharded.set_wire_dtype(wire)

    def precision_in_words(self) -> str:
        """Say in which number types parameters are computed with, and gradients sent, added up and stepped."""
        policy, sections = self.sharded.policy, [s for unit in self.sharded.units for s in unit.trainable]
        cast = autocast_dtype(self._resolution.config)
        compute = described(section.layout.dtype for section in sections)
        computed = compute if cast is None else f"{described([cast])} by autocast on {compute} parameters"
        sent = described(policy.wire_dtype or s.layout.wire_dtype or s.layout.dtype for s in sections)
        sums = described(section.accumulate_dtype for section in sections)
        masters = described(section.master_dtype for section in sections)
        return f"compute {computed}; gradients sent in {sent}, added up in {sums}; optimizer steps {masters} weights"

    @property
    def gas_boundary_ctr(self) -> int:
        """Accumulation boundaries passed so far."""
        return self.global_steps

    @property
    def param_names(self) -> dict[torch.nn.Parameter, str]:
        """Name of each parameter object."""
        registry = self.sharded.registry
        return {p: t.name for p, t in zip(registry.parameters, registry, strict=True)}

    def get_data_parallel_rank(self) -> int:
        """Return this process's rank in the data-parallel group."""
        return self.data.rank

    def get_sequence_parallel_group(self) -> Any:
        """Return the process group of the ranks that share this rank's sequences; None: it has them alone."""
        return self._sequences.group.group

    @property
    def tensor_parallel_group(self) -> Any:
        """The process group of the ranks that have this rank's copy of the model among them; None: it has it alone."""
        return None if self._tensors is None else self._tensors.group.comm.process_group

    def get_tensor_parallel_group(self) -> Any:
        """Return `tensor_parallel_group`."""
        return self.tensor_parallel_group

    def get_tensor_parallel_rank(self) -> int:
        """Return this process's place among the ranks that have its copy of the model."""
        return 0 if self._tensors is None else self._tensors.group.place

    def get_tensor_parallel_world_size(self) -> int:
        """Return the number of ranks that have a copy of the model among them."""
        return 1 if self._tensors is None else self._tensors.group.size

    get_model_parallel_group = get_tensor_parallel_group
    get_model_parallel_rank = get_tensor_parallel_rank
    get_model_parallel_world_size = get_tensor_parallel_world_size

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return [] if self.optimizer is None else [group["lr"] for group in self.optimizer.param_groups]

    def get_type(self) -> list[Any]:
        """Return the `type` entry of each parameter group (None where there is none)."""
        return [] if self.optimizer is None else [group.get("type") for group in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """Return momentum, or betas, of each parameter group."""
        if self.optimizer is None:
            return []
        return [group.get("betas", group.get("momentum")) for group in self.optimizer.param_groups]

    @property
    def cur_scale(self) -> float:
        """The loss scale in force (1.0 without fp16)."""
        return self._step.scale

    # -- batches -------------------------------------------------------------------------------------------------------

    def train_batch_size(self) -> int:
        """Return the number of samples of all ranks in one step."""
        return self._batches.total

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the number of samples of one rank in one forward pass."""
        return self._batches.micro

    def gradient_accumulation_steps(self) -> int:
        """Return the number of micro-batches in one step."""
        return self._batches.steps

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return (train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps)."""
        return self._batches.total, self._batches.micro, self._batches.steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the global batch size by changing the number of accumulation steps.

        Raises:
            BatchSizeError: it is not a positive multiple of micro-batch size times ranks, or the script counts
                micro-batches, not the engine; or an accumulation window has begun.
        """
        self._step.check_between_windows("engine.set_train_batch_size()")
        self._batches.set_total(train_batch_size)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the micro-batch size; the number of accumulation steps stays.

        Raises:
            BatchSizeError: it is not positive.
        """
        self._batches.set_micro(micro_batch_size)

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Iterable[Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> EngineDataLoader:
        """Return a loader of this rank's share of a data set, as `initialize(training_data=...)` makes one.

        Its position is not a part of checkpoints, other than that of `engine.training_dataloader`.

        Args:
            dataset: a map-style or iterable dataset.
            batch_size: samples in a batch of this rank; None: train_micro_batch_size_per_gpu.
            route: what it is for; "train" shuffles a map-style dataset without a sampler, "eval" and "predict" keep
                its order.
            pin_memory: pin batches for a CUDA device; there is nothing to pin for a CPU.
            data_sampler: gives this rank's indices.
            collate_fn: makes a batch from a list of samples.
            num_local_io_workers: processes that fetch ahead; None: none.

        Raises:
            UsageError: an unknown route.
            ConfigError: the settings contradict each other or the dataset, or no batch comes out.
        """
        return self._batches.loader(
            dataset, batch_size, route, pin_memory, data_sampler, collate_fn, num_local_io_workers
        )

    # -- forward and backward ------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module and return what it returns.

        With `torch_autocast` it runs under `torch.autocast`, unless the caller already is. What is computed from its
        outputs, such as the loss, and calls of `engine.module` are not.

        Raises:
            UsageError: the engine has been destroyed, or the model has other parameters than it had.
            OutOfMemoryError: memory has run out; it says which setting would have fitted. So in `backward` and `step`.
        """
        self.sharded.check_there("the engine's forward()", values=True)
        # A transform of torch.func differentiates by itself, and accumulates nothing.
        own = torch.is_grad_enabled() and not transforming()
        if own:
            self._step.forward_begins((inputs, kwargs))
            self.sharded.places.check()
        if self._resolution.config.fp16.enabled and self._resolution.config.fp16.auto_cast:
            inputs, kwargs = cast_floats((inputs, kwargs), torch.float16)
        if own:
            if self._tensors is not None:  # before ranks of a copy run the model in the comparison that follows
                self._tensors.compare_inputs(self.module, inputs, kwargs)
            self._sequences.compare(self.module, self._run_plainly, inputs, kwargs)
        self._memory.remember_call(inputs, kwargs)
        try:
            with (
                self.sharded.noting_disk_errors(),
                autocast(self.device, self._autocast_dtype),
                self.job.ledger.inside_call(),
                self._activations.around((inputs, kwargs)),
                self._profiling.forward(own, inputs, kwargs),
                self._following.forward(own, inputs, kwargs),
            ):
                if self._profiling.count is None:
                    outputs = self.module(*inputs, **kwargs)
                else:
                    outputs = self._profiling.counted(inputs, kwargs)
        except Exception as error:
            if isinstance(error, (RuntimeError, MemoryError)):
                if is_out_of_memory(error):
                    raise explained(error, self._memory.circumstances("the engine's forward()")) from error
                dtype = self.sharded.policy.compute_dtype
                hint = explain_dtype(error, tensors_in((inputs, kwargs)), dtype)
                if hint is not None:
                    raise UsageError(hint) from error
            named = None if self._tensors is None else self._tensors.named(error, self.module)
            if named is None:
                raise
            raise named from error
        if self._step.loss_scaler is not None and own:
            outputs = scale_gradients_of(outputs, self._step.output_scale)
        return outputs

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
                that would mean waiting for its device. A loss with the weight 0 contributes zeros to all gradients. It
                may be NaN, as the mean over no tokens is.

        Returns:
            The loss divided by the number of accumulation steps, detached from nothing, for logging. A weighted loss is
            returned as it is.

        Raises:
            NotScalarError: the loss is not a scalar.
            UsageError: it is no tensor that requires a gradient, `weight` cannot be a weight or is given where
                gradients are summed over ranks (`gradient_allreduce_op` "sum"), or the engine has been destroyed.
        """
        self.sharded.check_there("engine.backward()")
        if not isinstance(loss, torch.Tensor):
            raise UsageError(f"engine.backward(loss) expects a scalar tensor, got {type(loss).__name__}")
        _check_scalar(loss, "engine.backward(loss)")
        if not loss.requires_grad:
            raise UsageError(f"engine.backward(loss): the loss does not require a gradient; {self._no_gradient()}")
        explained_here = explaining(lambda: self._memory.circumstances("engine.backward()", graph=True))
        with (
            self._step.passing(loss, weight, scale_wrt_gas) as roots,
            explained_here,
            self.sharded.noting_disk_errors(),
            self._profiling.backward(),
            self._following.backward(),
        ):
            self.sharded.backward(roots, retain_graph=retain_graph)
        if self._tensors is not None:
            self._tensors.check_gradients(loss)
        steps = self._batches.steps
        return loss / steps if scale_wrt_gas and steps > 1 and weight is None else loss

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss to call `backward()` on by hand: unchanged, for the scale enters at the model's outputs.

        Raises:
            NotScalarError: it is not one number.
        """
        _check_scalar(loss, "engine.scale(loss)")
        return loss

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Add gradients up locally inside the block; the first backward pass outside reduces the sum.

        Raises:
            SyncError: the configuration shards gradients, so there is nowhere to add them up.
            UsageError: the engine has been destroyed.
        """
        self.sharded.check_open("engine.no_sync()")
        return self._step.no_sync()

    # -- steps ---------------------------------------------------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch is the last one before an update.

        Where the script counts micro-batches (`managed_gradient_accumulation` false) every `step()` is a boundary, and
        this is true unless it has been declared otherwise for the window.
        """
        return self._step.is_boundary()

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Declare whether the current micro-batch is a boundary; holds until changed, None returns to counting.

        Where the script counts micro-batches it says that the next backward pass is the last one before `step()`, so
        that gradients can be reduced during it (stages 0 and 1); it holds until that step.
        """
        self._step.set_boundary(is_boundary)

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
            NonFiniteError: a gradient is not finite, and `non_finite` is "stop", or "rewind" too often. Parameters,
                optimizer and schedule are as they were; the window's gradients are dropped.
            AnomalyError: so for what `anomaly_watch` says; also if there is no copy in memory to go back to.
            OffloadError: a disk with state has failed. The engine refuses to go on.
        """
        self.sharded.check_there("engine.step()")
        if self.optimizer is None:
            raise UsageError(f"engine.step(): {self._no_optimizer()}")
        if self._tensors is not None:
            self._tensors.step_begins()
        explained_here = explaining(lambda: self._memory.circumstances("engine.step()", stepping=True))
        noting = self.sharded.noting_disk_errors()
        with explained_here, self._profiling.step(), self._following.step(), noting, named("boundary"):
            ended = self._step.take(lr_kwargs)
        if ended:
            self._events.write()
            self._profiling.after_step()
            self._timelines.after_step()
            self._following.after_step()
            self._activations.tell(self.global_steps, self.job.rank)
            self._memory.check_limit()
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

    @property
    def anomalies(self) -> tuple[Anomaly, ...]:
        """The last things noticed that should not be (gradients that are not finite, spikes, rewinds), oldest first.

        The same on all ranks. Spikes are looked for with `anomaly_watch`. On a GPU a warning is known a step later.
        """
        return tuple(self._step.anomalies.noted)

    @property
    def loss_history(self) -> tuple[tuple[int, float], ...]:
        """(step, mean loss of all ranks) of the last steps, the oldest first; empty without `anomaly_watch`."""
        return () if self._step.watch is None else tuple(self._step.watch.losses.values)

    @property
    def grad_norm_history(self) -> tuple[tuple[int, float], ...]:
        """(step, global gradient norm) of the last steps, the oldest first; empty without `anomaly_watch`."""
        return () if self._step.watch is None else tuple(self._step.watch.norms.values)

    def was_step_applied(self) -> bool:
        """Whether the last `step()` updated the parameters."""
        return self._step.applied

    def get_global_grad_norm(self) -> float | None:
        """Return the global gradient norm of the last update before clipping, or None if there is none."""
        if self.last_step is None or self.last_step.grad_norm is None:
            return None
        return float(self.last_step.grad_norm)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop accumulated gradients: the window starts anew."""
        self.sharded.hooks.settle()
        super().zero_grad(set_to_none=set_to_none)
        self._step.warn_of_zero_grad()
        self._step.drop_gradients()

    # -- the module ----------------------------------------------------------------------------------------------------

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

    def gathered(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which all parameters are whole on every rank.

        Forward passes inside need no communication, so that ranks may make different numbers of them (generation,
        evaluation sets of unequal size). Every rank must enter and leave it. It needs memory for the whole model.

        Raises:
            UsageError: the engine has been destroyed.
        """
        self.sharded.check_there("engine.gathered()", values=True)
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

    def empty_partition_cache(self) -> None:
        """Release what is gathered on this rank: after a forward pass the unit that a backward pass needs first.

        If a backward pass does follow, the unit is fetched again, outside of the usual order.
        """
        self.sharded.hooks.settle()
        for unit in self.sharded.units:
            unit.release()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        asynchronous: bool | None = None,
    ) -> bool:
        """Save everything that is needed to go on exactly: `<save_dir>/<tag>/`.

        Parameters are saved as master weights. Besides them: optimizer state, buffers, schedule, loss scaler,
        counters, place in the training data, and every rank's random number generators. The directory appears whole
        or not at all, also where one of this name exists.

        Values that are infinite or NaN are said in the log, and the checkpoint is marked: `resume` prefers the last one
        without, which `checkpoint.keep_last` does not remove. With `non_finite` "skip", "stop" or "rewind" `latest`
        goes on naming the one before.

        In the middle of an accumulation window the gradients so far are not saved, which the log says: whoever goes on
        from the checkpoint begins the window anew, with the micro-batches that follow.

        An asynchronous save returns when the state has been copied, and another process writes it; see
        `wait_for_checkpoint`. If the one before is still being written, it is waited for first. On CUDA the device goes
        on copying: the next `step()` comes behind that. Until then master weights and optimizer state must not be
        changed but through this library (`safe_set_full_fp32_param` and the like); parameters may be.

        Args:
            save_dir: directory of the run's checkpoints; on a file system that all ranks share. Rank 0's counts.
            tag: name of this checkpoint; `global_step<N>` if None.
            client_state: state of the script: nested collections of numbers, strings, tensors, arrays, dates, paths,
                enumerations, dataclasses and objects of classes for which `shardwise.checkpoint.register_type` was
                called. Rank 0's is saved.
            save_latest: let the file `latest` name this checkpoint.
            exclude_frozen_parameters: leave out parameters that do not require a gradient.
            asynchronous: write while training goes on; None: as `checkpoint.async_save` says. The same on every rank.

        Returns:
            True.

        Raises:
            CheckpointPathError: `save_dir` or `tag` cannot be used (a ValueError).
            UsageError: ranks differ in `asynchronous`, or the engine does not span all processes.
            CheckpointError: something in `client_state` cannot be saved, or writing failed on some rank. Raised on all
                ranks; earlier checkpoints are unchanged, unless the message says that this one is complete and that
                only `latest` could not be written. Also if the asynchronous save before has failed, which the message
                names: this one has then not begun, and may be called again.

        Example:
            >>> import shardwise, tempfile
            >>> engine, *_ = shardwise.initialize(
            ...     model=torch.nn.Linear(4, 1),
            ...     config={"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}},
            ... )
            >>> directory = tempfile.mkdtemp()
            >>> engine.save_checkpoint(directory, client_state={"epoch": 3})
            True
            >>> path, client_state = engine.load_checkpoint(directory)
            >>> path.removeprefix(directory), client_state
            ('/global_step0', {'epoch': 3})
            >>> engine.destroy()
        """
        self._checkpoints.save(save_dir, tag, client_state, save_latest, exclude_frozen_parameters, asynchronous)
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: CustomLoad | None = None,
        *,
        include: Patterns | None = None,
        exclude: Patterns | None = None,
        rename: Rename | None = None,
        load_param_groups: bool = True,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Bring a checkpoint back, whatever stage and number of ranks it was saved with.

        With the layout it was saved with, training then goes on bit by bit as if it had not stopped. Bytes are checked
        before anything is changed. What was loaded and what differed is in `engine.last_load`
        (`shardwise.checkpoint.LoadReport`), and logged if anything differed. Checkpoints of DeepSpeed are loaded as
        well; what they have and this engine cannot take over is logged.

        Args:
            load_dir: directory of the run's checkpoints.
            tag: which one; None: the newest that is whole: the one that `latest` names, unless one was completed
                after that. What is skipped and why is logged.
            load_module_strict: names of parameters and buffers must be the same in model and checkpoint, and every
                pattern and rule must match one. Otherwise what both have is loaded. Shapes must fit in any case.
            load_optimizer_states: also load optimizer state, settings of parameter groups, and the loss scale.
            load_lr_scheduler_states: also load the schedule.
            load_module_only: load parameters and buffers and nothing else.
            custom_load_fn: called as `custom_load_fn(src=state_dict, dst=module)` with all parameters whole, in place
                of loading parameters by name.
            include: load only parameters and buffers (names in the model) that match one of these patterns, in which
                `*` is any text, `?` one character and `[ab]` one of some. Others keep their values.
            exclude: load none that match one of these.
            rename: names in the model for names in the checkpoint: a dictionary; a list of (regular expression,
                replacement), each applied to what those before it have left; or a function of the name.
            load_param_groups: with optimizer state, also load the settings of parameter groups (lr, weight_decay, ...),
                for which the groups must be as they were. False: this engine's settings are kept, and parameters may
                be in any groups.

        Returns:
            (path of the checkpoint, client_state), or (None, None) if `tag` is None and there is no checkpoint.

        Raises:
            CheckpointPathError: `load_dir` or `tag` cannot be used.
            CheckpointError: there is no such checkpoint, it is incomplete, damaged, of another format or another model.
                If names or shapes do not fit, its attribute `report` has all of them.
            UsageError: an argument is not what it should be, or differs between ranks.

        See `save_checkpoint` for an example.
        """
        return self._checkpoints.load(
            load_dir,
            tag,
            load_module_strict,
            load_optimizer_states,
            load_lr_scheduler_states,
            load_module_only,
            custom_load_fn,
            include,
            exclude,
            rename,
            load_param_groups,
        )

    @property
    def checkpoint_pending(self) -> bool:
        """Whether an asynchronous save is being written; asking takes no time.

        It speaks of this rank: ranks need not see the end in the same step, so nothing that all ranks do together
        should depend on it. On rank 0 it ends when the checkpoint has been published.
        """
        return self._checkpoints.background.pending

    @property
    def last_async_save(self) -> SaveReport | None:
        """What the last asynchronous save has cost this rank so far, or None if there was none."""
        return self._checkpoints.background.report

    def wait_for_checkpoint(self) -> str | None:
        """Wait until the asynchronous save in progress, if there is one, has been published; all ranks call this.

        Returns:
            Path of the checkpoint, or None if there was nothing to wait for.

        Raises:
            CheckpointError: it could not be written, or nothing has been written of it for most of the limit of a
                collective (a process that is stopped, a disk that does not answer), on all ranks alike; earlier
                checkpoints are unchanged, unless the message says that this one is complete. Each failure is raised
                once: here, by the next `save_checkpoint`, or by `destroy`, whichever comes first.
            UsageError: the engine has been destroyed.

        Example:
            >>> import shardwise, tempfile
            >>> engine, *_ = shardwise.initialize(
            ...     model=torch.nn.Linear(4, 1),
            ...     config={
            ...         "train_batch_size": 2,
            ...         "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            ...         "checkpoint": {"async_save": True},
            ...     },
            ... )
            >>> directory = tempfile.mkdtemp()
            >>> engine.save_checkpoint(directory)
            True
            >>> engine.wait_for_checkpoint().removeprefix(directory)
            '/global_step0'
            >>> engine.checkpoint_pending, engine.wait_for_checkpoint()
            (False, None)
            >>> engine.destroy()
        """
        return self._checkpoints.background.wait()

    # -- weights -------------------------------------------------------------------------------------------------------

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
        max_shard_size: int | str | None = None,
    ) -> bool:
        """Write whole weights to one file that plain PyTorch can load.

        Values have the dtype that the module computes with (so they are 16-bit where training is). Rank 0 writes
        while units are gathered one by one; no rank ever holds more than one whole unit. All names of tied parameters
        are in it. `export` writes master weights, and tied parameters as Hugging Face does.

        Args:
            save_dir: directory; created if needed.
            save_filename: ends in `.safetensors`, or in `.bin`, `.pt` or `.pth` for a state dict of tensors as
                `torch.save` writes it (`torch.load(weights_only=True)` reads it).
            exclude_frozen_parameters: leave out parameters that do not require a gradient.
            max_shard_size: write several files of at most this many bytes, or "5GB", with an index. None: one file.

        Returns:
            True.

        Raises:
            CheckpointPathError: the directory or the name cannot be used.
            CheckpointError: `max_shard_size` is not a size, or writing failed; raised on all ranks.

        Example:
            >>> engine.save_16bit_model("out")  # doctest: +SKIP
            True
            >>> model.load_state_dict(safetensors.torch.load_file("out/model.safetensors"))  # doctest: +SKIP
        """
        self._interchange.save_16bit(save_dir, save_filename, exclude_frozen_parameters, max_shard_size)
        return True

    save_fp16_model = save_16bit_model

    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Return the module's whole state dict, on the CPU, with real values on every rank.

        Args:
            destination: dictionary to add to; a new one if None.
            prefix: put before every name.
            keep_vars: only False: values are copies.
            exclude_frozen_parameters: leave out parameters that do not require a gradient.

        Raises:
            UsageError: `keep_vars` is set.
        """
        found = self._interchange.state_dict(exclude_frozen_parameters, keep_vars)
        destination = {} if destination is None else destination
        destination.update((prefix + name, value) for name, value in found.items())
        return destination

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: CustomLoad | None = None,
        fetch_z3_params: bool = False,
        allowed_missing_keys: Iterable[str] | None = None,
    ) -> None:
        """Take over a whole state dict of the module; the same values on every rank. Optimizer state stays.

        Args:
            checkpoint: state dict, or a dictionary that has it under the key "module".
            strict: names must be the same in module and state dict.
            custom_load_fn: called as `custom_load_fn(src=state_dict, dst=module)` with all parameters whole instead.
            fetch_z3_params: accepted for existing scripts; parameters are always reached.
            allowed_missing_keys: names that the state dict may lack although `strict` is set; they keep their values.

        Raises:
            CheckpointError: names or shapes do not fit; nothing is changed then.
        """
        self._interchange.load_state_dict(checkpoint, strict, custom_load_fn, allowed_missing_keys)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """Return the whole state dict on rank 0 and None elsewhere (called by trainers)."""
        return self._interchange.consolidated(exclude_frozen_parameters)

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict

    def export(
        self,
        directory: str | os.PathLike[str],
        format: str = "hf",
        dtype: str | torch.dtype = KEEP,
        max_shard_size: int | str | None = None,
        exclude_frozen_parameters: bool = False,
        all_names: bool = False,
        overwrite: bool = False,
    ) -> None:
        """Write whole weights for other programs, as `shardwise export` makes them from a checkpoint.

        What is written are the values that the optimizer steps: master weights, where there are any. Rank 0 writes;
        the others send it what they hold, in pieces of 8 MiB, so that no rank needs memory for the model. The files
        appear when all of them are complete. Beside the whole weights (`hf`) of a model of transformers its
        `config.json` and `generation_config.json` are written, so that `from_pretrained(directory)` makes it again.

        Args:
            directory: of the files, on rank 0; created if needed.
            format: `hf` (safetensors, as Hugging Face's `from_pretrained` loads them) or `pt` (a state dict of tensors,
                as `torch.save` writes it).
            dtype: of floating-point tensors: `float32`, `bfloat16`, `float16`, or `keep` for that of the values.
            max_shard_size: of one file, as "5GB" or a number of bytes; None: 5GB for `hf`, one file for `pt`.
            exclude_frozen_parameters: leave out parameters that do not require a gradient, and the configuration.
            all_names: `hf`: write a tied tensor under each of its names instead of once.
            overwrite: replace weights that are in `directory`. A configuration is replaced in any case.

        Raises:
            CheckpointPathError: the directory cannot be used, or holds weights already.
            CheckpointError: an argument is wrong, or writing failed; raised on all ranks.

        Example:
            >>> import os, shardwise, tempfile
            >>> engine, *_ = shardwise.initialize(model=torch.nn.Linear(4, 1), config={"train_batch_size": 2})
            >>> directory = tempfile.mkdtemp()
            >>> engine.export(directory, dtype="bfloat16")
            >>> os.listdir(directory)
            ['model.safetensors']
            >>> engine.destroy()
        """
        self._interchange.export(
            directory, format, dtype, max_shard_size, exclude_frozen_parameters, all_names, overwrite
        )

    def load_weights(
        self,
        path: str | os.PathLike[str],
        strict: bool = True,
        rename: RenameWeights | None = None,
        tag: str | int | None = None,
    ) -> LoadedWeights:
        """Read weights of another program into the shards: each rank reads what it holds, and nobody has all of them.

        Master weights take the values with all their digits. Optimizer state, schedule and counters stay; gradients of
        an unfinished accumulation window are dropped, as they are of other weights.

        Args:
            path: weights as Hugging Face keeps them (a directory, or a file .safetensors, .index.json, .bin, .pt), a
                directory of torch.distributed.checkpoint, or a checkpoint; the same on every rank.
            strict: every parameter and buffer must be in the files, and everything in the files have a place.
            rename: name in the files -> name in the model, as a mapping (names that it does not have stay) or a
                function; None for a name leaves the tensor out.
            tag: of a checkpoint in a directory of checkpoints.

        Returns:
            (missing, unexpected): names that only the model, and only the files have; both empty if `strict`.

        Raises:
            CheckpointPathError: there are no weights at `path`.
            CheckpointError: names (if `strict`) or shapes do not fit, or a file is damaged; nothing has been changed
                then.

        Example: a model of Hugging Face's, never whole on any rank.
            >>> config = AutoConfig.from_pretrained(folder)  # doctest: +SKIP
            >>> with shardwise.zero.Init():  # doctest: +SKIP
            ...     model = AutoModelForCausalLM.from_config(config)
            >>> engine, *_ = shardwise.initialize(model=model, config="config.json")  # doctest: +SKIP
            >>> engine.load_weights(folder)  # doctest: +SKIP
        """
        return self._interchange.load_weights(path, strict, rename, tag)

    # -- faults --------------------------------------------------------------------------------------------------------

    def resume(self, save_dir: str | os.PathLike[str]) -> dict[str, Any] | None:
        """Go on from the newest complete state there is: copies in memory, or a checkpoint on disk.

        A script that calls this before its loop can be started again after any failure, and goes on by itself; so it
        does under `shardwise run --max-restarts`. The state that was taken last is used, on disk the one that
        `load_checkpoint` without a tag takes; of the same state the copy in memory. Incomplete and damaged ones are
        passed over, and the log says why. Stage and number of ranks may have changed; learning rate and schedule go on
        as they were.

        Args:
            save_dir: the directory that is passed to `save_checkpoint`. It need not exist yet.

        Returns:
            The script's own state (`client_state`, or what `provide_client_state` has given), or None if there is
            nothing to go on from. `engine.resumed` says what was found where, and how long it took.

        Raises:
            CheckpointPathError: `save_dir` cannot be used, or ranks name different ones.
            CheckpointError: there is something, and it is of another model, or nothing of it is whole, or it cannot be
                told what there is.

        Example:
            >>> import shardwise, tempfile
            >>> engine, *_ = shardwise.initialize(
            ...     model=torch.nn.Linear(4, 1),
            ...     config={"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}},
            ... )
            >>> runs = tempfile.mkdtemp()
            >>> state = engine.resume(runs) or {"epoch": 0}  # nothing there yet
            >>> engine.save_checkpoint(runs, client_state={"epoch": 3})
            True
            >>> engine.resume(runs), engine.resumed.source
            ({'epoch': 3}, 'disk')
            >>> engine.destroy()
        """
        return self._faults.resume(save_dir)

    def provide_client_state(self, function: Callable[[], Mapping[str, Any]] | None) -> None:
        """Say what is saved as the script's own state where the engine itself saves: on signals and in memory.

        Args:
            function: called on every rank at the end of a `step()`, after which counters and the place in the data are
                already those of the next one; returns what `save_checkpoint` takes as `client_state`. None: nothing.
        """
        self._faults.provide_client_state(function)

    def checkpoint_on_signal(
        self,
        save_dir: str | os.PathLike[str],
        exit_on: Iterable[str] = ("SIGTERM",),
        save_on: Iterable[str] = ("SIGUSR1",),
    ) -> None:
        """Save a checkpoint when this process or that of any other rank is sent a signal.

        At the end of the step in which the signal comes (on a GPU: of that step or the next) all ranks save together:
        what they have been sent travels along with the all-reduce that every step makes. After `exit_on` every rank
        then ends by SystemExit with the code 128 + signal (143 for SIGTERM), which `shardwise run` does not take for a
        failure. The keys `checkpoint.on_signal` of the configuration do the same.

        Args:
            save_dir: as for `save_checkpoint`.
            exit_on: names of signals after which the job ends.
            save_on: names of signals after which it goes on, also if the save fails, which is then logged.

        Raises:
            CheckpointPathError: `save_dir` cannot be used.
            UsageError: a name is not that of a signal that can be handled, or is in both lists; ranks give different
                signals; or this is not the main thread.

        Example:
            >>> import os, signal, shardwise, tempfile
            >>> engine, *_ = shardwise.initialize(
            ...     model=torch.nn.Linear(4, 1),
            ...     config={"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}},
            ... )
            >>> runs = tempfile.mkdtemp()
            >>> engine.checkpoint_on_signal(runs)
            >>> os.kill(os.getpid(), signal.SIGUSR1)  # as a scheduler would
            >>> _ = engine.backward(engine(torch.ones(2, 4)).mean())
            >>> engine.step()
            >>> sorted(os.listdir(runs))
            ['global_step1', 'latest']
            >>> engine.destroy()
        """
        self._faults.checkpoint_on_signal(save_dir, exit_on, save_on)

    def check_signals(self) -> None:
        """Act on signals now, where no step does for a long time, as in an evaluation; a small collective.

        Raises:
            SystemExit: a rank has been sent a signal that ends the job.
        """
        self._faults.check_signals()

    def copy_to_memory(self) -> MemoryCopy:
        """Copy the training state into memory now, besides the regular times of `checkpoint.memory_copies`.

        Raises:
            UsageError: there is no such section in the configuration, or gradients of an unfinished window are held.
            CheckpointError: there is no room, on all ranks alike; the newest copy is still there.
        """
        return self._faults.copy_to_memory()

    @property
    def last_memory_copy(self) -> MemoryCopy | None:
        """What the last copy into memory has taken on this rank, or None."""
        copies = self._faults.copies
        return None if copies is None else copies.last

    # -- memory --------------------------------------------------------------------------------------------------------

    def memory_report(
        self, sample_batch: Any = None, *, loss: Callable[[Any], torch.Tensor] | None = None
    ) -> MemoryReport:
        """Return planned, measured and least possible memory of this rank, by category. Not a collective.

        The plan needs no step to have been taken. Activations are measured in steps taken under
        `shardwise.memory.track_activations(engine.accountant)`, and planned if a sample batch is given.

        Args:
            sample_batch: one micro-batch, for planning activations: a mapping is passed to the module as keyword
                arguments, a tuple or list as positional ones, anything else as the only argument.
            loss: makes a scalar of the module's output, as the training loop does; by default the output's `loss`, or
                the output itself, or the sum of what it contains.

        Example:
            >>> import shardwise
            >>> from shardwise.memory import Category
            >>> engine, *_ = shardwise.initialize(
            ...     model=torch.nn.Linear(512, 512, bias=False),
            ...     config={"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}},
            ... )
            >>> report = engine.memory_report(torch.ones(4, 512))
            >>> report.row(Category.PARAMETERS).planned == 512 * 512 * 4
            True
            >>> engine.destroy()
        """
        return self._memory.memory_report(sample_batch, loss=loss)

    def memory_plans(
        self,
        sample_batch: Any = None,
        *,
        loss: Callable[[Any], torch.Tensor] | None = None,
        stages: Sequence[int] = (0, 1, 2, 3),
        micro_batches: Sequence[int] | None = None,
        ranks: Sequence[int] | None = None,
    ) -> MemoryPlans:
        """Return what one rank would hold under other settings with the same global batch. Not a collective.

        Each is planned by the engine's own parts, built on fake tensors and imagined ranks beside the running engine.

        Args:
            sample_batch: a micro-batch of the size now in force, for planning activations; see `memory_report`. Tensors
                whose first dimension is that of its first tensor are cut for smaller micro-batches.
            loss: as in `memory_report`.
            stages: ZeRO stages to be planned.
            micro_batches: sizes to be planned; default: the one in force. Accumulation makes up for it.
            ranks: numbers of data-parallel ranks to be planned; default: that of the engine.

        Raises:
            UsageError: a micro-batch size times a number of ranks does not divide the global batch.

        Example:
            >>> import shardwise
            >>> engine, *_ = shardwise.initialize(
            ...     model=torch.nn.Linear(512, 512, bias=False),
            ...     config={"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}},
            ... )
            >>> plans = engine.memory_plans(torch.ones(8, 512), stages=[1, 3], ranks=[8])
            >>> [plan.peaks["gradients"] * 8 == 512 * 512 * 4 for plan in plans.plans]
            [True, True]
            >>> engine.destroy()
        """
        return self._memory.memory_plans(
            sample_batch, loss=loss, stages=stages, micro_batches=micro_batches, ranks=ranks
        )

    @property
    def last_profile(self) -> ModuleProfile | None:
        """What rank 0 has counted in the step that `flops_profiler` names, by module; None before, and elsewhere."""
        return self._profiling.profile

    def record_timeline(
        self, path: str | os.PathLike[str], *, ranks: Sequence[int] | None = None, max_events: int | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Record what happens inside of the block, as the section `timeline` does for some steps (all ranks call).

        Each rank writes `timeline-RRRRR.json` at the end of the block; `shardwise trace` joins the files. The block
        begins and ends outside of passes and steps. If it ends with an exception, other ranks are not asked for their
        clocks once more.

        Args:
            path: directory.
            ranks: those that record, by their number among all; None: all.
            max_events: ranges and collectives that are kept at most; None: as configured.

        Raises:
            UsageError: a timeline is being recorded already, or the engine has been destroyed.

        Example:
            >>> import shardwise, tempfile
            >>> engine, *_ = shardwise.initialize(
            ...     model=torch.nn.Linear(4, 1),
            ...     config={"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}},
            ... )
            >>> with tempfile.TemporaryDirectory() as directory:
            ...     with engine.record_timeline(directory):
            ...         _ = engine.backward(engine(torch.ones(2, 4)).mean())
            ...         engine.step()
            ...     os.listdir(directory)
            ['timeline-00000.json']
            >>> engine.destroy()
        """
        self.sharded.check_open("engine.record_timeline()")
        return self._timelines.record(os.fspath(path), ranks, max_events)

    def stragglers(self, since: int = 0) -> Stragglers:
        """Return which rank has waited for which in the engine's last collectives (all ranks call, between steps).

        It reads the ledger, which is always written: nothing has to be switched on. `print(found.table())` shows it;
        `found.as_dict()` is for JSON. On NCCL the host does not wait for collectives; record a timeline there.

        Args:
            since: sequence number (`engine.ledger.sequence` at some moment) of the first collective that counts; the
                ledger has the newest 4096.

        Raises:
            UsageError: the engine has been destroyed.
        """
        self.sharded.check_open("engine.stragglers()")
        return self._timelines.stragglers(since)

    @property
    def memory_budget(self) -> Budget | None:
        """What was planned against what there is when the engine was made, on each tier, and what a step moves.

        None where all state is on the device and `memory_limits` asks for nothing.
        """
        return self._memory.budget

    def communication(self, step: int | None = None) -> dict[str, dict[str, Totals]]:
        """Return what this rank's collectives of a step come to: by operation, then by unit or purpose.

        It is read from the ledger, which keeps the newest 4096 collectives; of a step that is older, or has more, it
        is what is left. A gather of updated parameters counts for the step in which it is launched.

        Args:
            step: its number, from 0; None: the last one that has been taken.

        Example:
            >>> import shardwise, torch
            >>> config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
            >>> engine, *_ = shardwise.initialize(model=torch.nn.Linear(4, 1), config=config)
            >>> _ = engine.backward(engine(torch.ones(2, 4)).mean())
            >>> engine.step()
            >>> engine.communication()["all_reduce"]["gradient_norm"].count
            1
            >>> engine.destroy()
        """
        return self.ledger.of_step(self.global_steps - 1 if step is None else step)

    def offload_states(
        self,
        include: Iterable[OffloadStateTypeEnum | str] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move the engine's state to the host between steps, so that somebody else has the memory of the device.

        Everything comes back bit by bit with `reload_states`. Until then whatever needs what is away raises: forward
        passes, evaluation and `save_16bit_model` need the parameters; backward passes, steps and checkpoints need
        everything. Every rank calls it with the same arguments. What has been moved before stays there, and so does
        what lives on the host or on a disk by the configuration (`offload_optimizer`, `offload_param`).

        Whoever still refers to the memory of whole parameters (a `state_dict()`, a view) keeps it, with the values.
        Other memory is given back by force: tensors of `engine.optimizer` must not be read meanwhile. What lossy
        gradient reduction keeps, and buffers of modules, stay on the device.

        Args:
            include: kinds of state (`shardwise.zero.OffloadStateTypeEnum`), or their names: `optim_states`,
                `hp_params` (master weights; where the optimizer steps the parameters themselves these are they),
                `lp_params` (parameters), `lp_grads` and `contiguous_grad_buffer` (gradients of an unfinished window,
                reduced and still to be reduced). None: all.
            device: "cpu".
            pin_memory: page-lock the memory of the host, if the device is a CUDA device: copies are faster.
            non_blocking: return at once. The memory is free for what this process launches later; torch keeps it from
                other processes until `torch.cuda.empty_cache()`.

        Raises:
            UsageError: it is called inside of a pass, or of a block that gathers parameters; the optimizer is one of
                the 1-bit family, whose state is bound to the device; or an argument cannot be used.

        Example:
            >>> import shardwise
            >>> from shardwise.memory import Tier
            >>> engine, *_ = shardwise.initialize(
            ...     model=torch.nn.Linear(512, 512, bias=False),
            ...     config={"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}},
            ... )
            >>> engine.offload_states()
            >>> sum(engine.accountant.live_in(Tier.DEVICE).values()) < 1000
            True
            >>> engine.reload_states()
            >>> engine(torch.ones(4, 512)).shape
            torch.Size([4, 512])
            >>> engine.destroy()
        """
        self.sharded.check_open("engine.offload_states()")
        check_device(device)
        self.sharded.offload_states(kinds_of(include), pinned=pin_memory, wait=not non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what `offload_states` has moved; nothing happens if there is nothing. Every rank calls it.

        Args:
            non_blocking: return at once; what is launched on the current stream comes behind the copies.

        Raises:
            UsageError: the engine has been destroyed.
        """
        self.sharded.check_open("engine.reload_states()")
        self.sharded.reload_states(wait=not non_blocking)

    # -- the end -------------------------------------------------------------------------------------------------------

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
        self._memory.close()
        self._timelines.close()
        failure = self._checkpoints.background.finish()
        if not self.sharded.closed:
            self._step.close()
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
            for shared in (self._sequences, self._tensors):
                if shared is not None:
                    shared.close()
            release_experts(self.module, self._expert_groups)
            self.job.ledger.step = None  # it asks the step, which has the ledger
            for ranks in dict.fromkeys((self.job, self.data)):
                ranks.destroy()  # whoever waits for this rank is told
        if failure is not None:
            raise failure


def _check_scalar(loss: torch.Tensor, call: str) -> None:
    if loss.numel() != 1:
        raise NotScalarError(
            f"{call} expects a scalar tensor, got a tensor of shape {tuple(loss.shape)}; reduce it first (loss.mean())"
        )
