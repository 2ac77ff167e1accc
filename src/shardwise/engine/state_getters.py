"""Read-only values of a running engine: sizes, ranks, process groups, counters and reports."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from shardwise.checkpoint.match import LoadReport
from shardwise.config.gradient_compression import sends_values
from shardwise.data import EngineDataLoader
from shardwise.engine.faults import Resumed
from shardwise.engine.step import StepReport
from shardwise.errors import UsageError
from shardwise.moe.exchange import ExpertParallelModule
from shardwise.precision.autocast import autocast_dtype, described
from shardwise.precision.dtypes import parse_dtype
from shardwise.precision.scaler import LossScaler

if TYPE_CHECKING:
    from shardwise.checkpoint.async_save import SaveReport
    from shardwise.checkpoint.peer_replicas import MemoryCopy
    from shardwise.comm.communicator import Communicator
    from shardwise.comm.ledger import Ledger, Totals
    from shardwise.config import Resolution
    from shardwise.engine.anomalies import Anomaly
    from shardwise.engine.batch import Batches
    from shardwise.engine.faults import FaultTolerance
    from shardwise.engine.parallel import OwnSequences, SharedSequences, SharedTensors
    from shardwise.engine.preflight import Budget
    from shardwise.engine.step import TrainStep
    from shardwise.moe import ExpertGroup
    from shardwise.monitor.runlog import RunLog
    from shardwise.profile import ModuleProfile
    from shardwise.zero.model import ShardedModel


Value = TypeVar("Value")
Arguments = ParamSpec("Arguments")


def of_part(
    part: str, method: Callable[Concatenate[Any, Arguments], Value]
) -> Callable[Concatenate[Any, Arguments], Value]:
    """Return an engine method that calls a part's method, with its signature and documentation."""

    @functools.wraps(method)
    def call(engine: Any, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Value:
        return method(getattr(engine, part), *args, **kwargs)

    # Because tracebacks and reports of stalls name the method that a script has called by its frame.
    function: Any = call
    function.__code__ = function.__code__.replace(co_name=method.__name__)
    return call


class Held(Generic[Value]):
    """Attribute delegated to a part's attribute of the same name; scripts may set it."""

    def __init__(self, part: str) -> None:
        self._part = part

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, engine: Any, owner: type | None = None) -> Value:
        return cast(Value, self if engine is None else getattr(getattr(engine, self._part), self._name))

    def __set__(self, engine: Any, value: Value) -> None:
        setattr(getattr(engine, self._part), self._name, value)


class OfOptimizer:
    """Attribute delegated to the optimizer, unless the module has one; no setter, because a script may set its own."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, engine: Any, owner: type | None = None) -> Any:
        if engine is None:
            return self
        holder = engine.module if hasattr(engine.module, self._name) else engine.optimizer
        return getattr(holder, self._name)  # an AttributeError falls back to `Engine.__getattr__`


def _at(path: str) -> Any:
    """Return a read-only property: the attribute of the engine at a dotted path."""
    return property(attrgetter(path))


class StateGetters(nn.Module):
    """Base class of `shardwise.engine.Engine`: properties and getters that read its parts."""

    job: Communicator
    data: Communicator
    sharded: ShardedModel
    optimizer: Any
    module: Any
    _step: TrainStep
    _batches: Batches
    _faults: FaultTolerance
    _resolution: Resolution
    _sequences: SharedSequences | OwnSequences
    _tensors: SharedTensors | None
    _expert_groups: Mapping[int, ExpertGroup]

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
    progressive_layer_drop: Any = _at("_curricula.current.layer_drop")
    """Schedule of `progressive_layer_drop` (`get_theta()`); None without."""

    curriculum_scheduler_legacy: Any = _at("_curricula.current.lengths")
    """Schedule of `curriculum_learning` (`get_current_difficulty()`); None without."""

    random_ltd_scheduler: Any = _at("_curricula.current.tokens")
    """Schedule of `random_ltd` (`get_current_seq()`); None without."""

    training_dataloader = Held[EngineDataLoader | None]("_batches")
    last_load = Held[LoadReport | None]("_checkpoints")
    resumed = Held[Resumed | None]("_faults")

    world_size: int = _at("job.world")
    """Number of ranks."""

    dp_world_size: int = _at("data.world")
    """Number of data-parallel ranks, which get different samples."""

    sequence_parallel_size: int = _at("_sequences.group.size")
    """Number of ranks of a sequence-parallel group."""

    @property
    def mp_world_size(self) -> int:
        """Number of ranks of a tensor-parallel group."""
        return self.get_tensor_parallel_world_size()

    seq_dp_world_size: int = _at("sharded.domain.world")
    """Number of ranks over which gradients are averaged."""

    @property
    def global_rank(self) -> int:
        """Rank of this process in the default process group."""
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    data_parallel_group: Any = _at("data.process_group")
    """Process group of the data-parallel ranks (None: the default group)."""

    seq_data_parallel_group: Any = _at("sharded.comm.process_group")
    """Process group over which gradients are averaged."""

    @property
    def has_moe_layers(self) -> bool:
        """Whether the model has mixture-of-experts layers (`shardwise.moe`)."""
        return bool(self.moe_layers)

    @property
    def moe_layers(self) -> list[ExpertParallelModule]:
        """Mixture-of-experts layers, in the model's order."""
        return [module for module in self.module.modules() if isinstance(module, ExpertParallelModule)]

    @property
    def num_experts(self) -> list[int]:
        """Number of experts of each layer of `moe_layers`."""
        return [layer.num_experts for layer in self.moe_layers]

    @property
    def expert_parallel_group(self) -> dict[str, Any]:
        """Expert-parallel process groups, by "ep_size_" and their number of ranks."""
        return {
            f"ep_size_{size}": group.comm.process_group
            for size, group in self._expert_groups.items()
            if group.comm is not None
        }

    @property
    def dist_backend(self) -> str | None:
        """Backend of torch.distributed, or None in a single process without one."""
        return dist.get_backend() if dist.is_available() and dist.is_initialized() else None

    def get_data_parallel_rank(self) -> int:
        """Return this process's rank in the data-parallel group."""
        return self.data.rank

    def get_sequence_parallel_group(self) -> Any:
        """Return this rank's sequence-parallel process group; None without sequence parallelism."""
        return self._sequences.group.group

    @property
    def tensor_parallel_group(self) -> Any:
        """This rank's tensor-parallel process group; None without tensor parallelism."""
        return None if self._tensors is None else self._tensors.group.comm.process_group

    def get_tensor_parallel_group(self) -> Any:
        """Return the tensor-parallel process group."""
        return self.tensor_parallel_group

    def get_tensor_parallel_rank(self) -> int:
        """Return this process's rank in the tensor-parallel group."""
        return 0 if self._tensors is None else self._tensors.group.place

    def get_tensor_parallel_world_size(self) -> int:
        """Return the number of ranks of the tensor-parallel group."""
        return 1 if self._tensors is None else self._tensors.group.size

    get_model_parallel_group = get_tensor_parallel_group

    get_model_parallel_rank = get_tensor_parallel_rank

    get_model_parallel_world_size = get_tensor_parallel_world_size

    ledger: Ledger = _at("job.ledger")
    """Flight recorder of this engine's collectives."""

    run_log: RunLog | None = _at("_following.log")
    """Log of this rank's steps, read by `shardwise report`; None if disabled."""

    config: Any = _at("_resolution.written")
    """The configuration as the user gave it."""

    @property
    def gradient_average(self) -> bool:
        """Whether gradients are averaged (rather than summed) over ranks."""
        return bool(self._resolution.config.gradient_allreduce_op == "mean")

    @property
    def communication_data_type(self) -> torch.dtype:
        """Dtype in which gradients are reduced; defaults to the model's. May be set between windows, on all ranks."""
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
        """Describe the dtypes of compute, of gradient reduction and accumulation, and of the optimizer step."""
        policy, sections = self.sharded.policy, [s for unit in self.sharded.units for s in unit.trainable]
        cast = autocast_dtype(self._resolution.config)
        compute = described(section.layout.dtype for section in sections)
        computed = compute if cast is None else f"{described([cast])} by autocast on {compute} parameters"
        sent = described(policy.wire_dtype or s.layout.wire_dtype or s.layout.dtype for s in sections)
        sums = described(section.accumulate_dtype for section in sections)
        masters = described(section.master_dtype for section in sections)
        return f"compute {computed}; gradients sent in {sent}, added up in {sums}; optimizer steps {masters} weights"

    gas_boundary_ctr: int = _at("_step.global_steps")
    """Accumulation boundaries passed so far."""

    @property
    def param_names(self) -> dict[torch.nn.Parameter, str]:
        """Name of each parameter object."""
        registry = self.sharded.registry
        return {p: t.name for p, t in zip(registry.parameters, registry, strict=True)}

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return [group["lr"] for group in self._groups]

    def get_type(self) -> list[Any]:
        """Return the `type` entry of each parameter group (None if absent)."""
        return [group.get("type") for group in self._groups]

    def get_mom(self) -> list[Any]:
        """Return momentum or betas of each parameter group."""
        return [group.get("betas", group.get("momentum")) for group in self._groups]

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    cur_scale: float = _at("_step.scale")
    """Current loss scale (1.0 without fp16)."""

    def train_batch_size(self) -> int:
        """Return the number of samples of all ranks in a step."""
        return self._batches.total

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the number of samples of one rank in a forward pass."""
        return self._batches.micro

    def gradient_accumulation_steps(self) -> int:
        """Return the number of micro-batches in a step."""
        return self._batches.steps

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return (train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps)."""
        return self._batches.total, self._batches.micro, self._batches.steps

    @property
    def anomalies(self) -> tuple[Anomaly, ...]:
        """Last anomalies (non-finite gradients, spikes, rewinds), oldest first; the same on all ranks. Spikes are
        detected with `anomaly_watch`. On a GPU a warning appears one step later.
        """
        return tuple(self._step.anomalies.noted)

    @property
    def loss_history(self) -> tuple[tuple[int, float], ...]:
        """(step, mean loss of all ranks) of the last steps, oldest first; empty without `anomaly_watch`."""
        return () if self._step.watch is None else tuple(self._step.watch.losses.values)

    @property
    def grad_norm_history(self) -> tuple[tuple[int, float], ...]:
        """(step, global gradient norm) of the last steps, oldest first; empty without `anomaly_watch`."""
        return () if self._step.watch is None else tuple(self._step.watch.norms.values)

    def was_step_applied(self) -> bool:
        """Whether the last `step()` updated the parameters."""
        return self._step.applied

    def get_global_grad_norm(self) -> float | None:
        """Return the global gradient norm of the last update before clipping, or None."""
        if self.last_step is None or self.last_step.grad_norm is None:
            return None
        return float(self.last_step.grad_norm)

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` has been called."""
        return self._compiled_call_impl is not None

    checkpoint_pending: bool = _at("_checkpoints.background.pending")
    """Whether this rank's asynchronous save is being written; on rank 0, whether it is unpublished. Does not block.
    Collective decisions must not depend on it, because ranks see the end of a save in different steps.
    """

    last_async_save: SaveReport | None = _at("_checkpoints.background.report")
    """Report of this rank's last asynchronous save so far; None without one."""

    @property
    def last_memory_copy(self) -> MemoryCopy | None:
        """Report of this rank's last in-memory checkpoint; None without one."""
        copies = self._faults.copies
        return None if copies is None else copies.last

    last_profile: ModuleProfile | None = _at("_profiling.profile")
    """Profile by module that rank 0 measured in the step of `flops_profiler`; None before and on other ranks."""

    memory_budget: Budget | None = _at("_memory.budget")
    """Planned and available memory, and offload traffic of a step, when the engine was built. None if all state is
    on the device and `memory_limits` sets no limit.
    """

    def communication(self, step: int | None = None) -> dict[str, dict[str, Totals]]:
        """Return totals of this rank's collectives in a step: by operation, then by unit or purpose.

        They are read from the ledger, which keeps the newest 4096 collectives; earlier ones are missing. An all-gather
        of updated parameters counts for the step that launches it. `step` counts from 0; None: the last step.

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
