"""Facts about an engine that existing training scripts and frameworks read, and the loader it makes for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.config.compression import sends_values
from shardwise.data import EngineDataLoader
from shardwise.errors import UsageError
from shardwise.precision.autocast import autocast_dtype, described
from shardwise.precision.dtypes import parse_dtype

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator
    from shardwise.comm.ledger import Ledger
    from shardwise.config import Resolution
    from shardwise.zero.model import ShardedModel


ROUTES = ("train", "eval", "predict")


class _OfOptimizer:
    """An attribute that an engine has from its optimizer, unless its module has one of this name.

    Without a setter, so that a script may still put an attribute of its own there.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, engine: Any, owner: type | None = None) -> Any:
        if engine is None:
            return self
        holder = engine.module if hasattr(engine.module, self._name) else engine.optimizer
        return getattr(holder, self._name)  # an AttributeError leads to the engine's own message


class EngineAttributes:
    """Mixin of `Engine`: read-only facts, each derived from what the engine is made of.

    Attributes:
        param_groups: the optimizer's. With `defaults` and `state` an engine can stand where a framework steps an
            optimizer (Lightning Fabric asks for these before it calls `engine.step()`).
        defaults: the optimizer's.
        state: the optimizer's.
    """

    param_groups = _OfOptimizer()
    defaults = _OfOptimizer()
    state = _OfOptimizer()

    _comm: Communicator
    _resolution: Resolution
    sharded: ShardedModel
    optimizer: torch.optim.Optimizer | None
    global_steps: int
    device: torch.device

    sequence_parallel_size = 1
    mp_world_size = 1
    pipeline_parallelism = False
    has_moe_layers = False
    enable_backward_allreduce = True
    mesh_device: DeviceMesh | None = None
    num_experts: tuple[int, ...] = ()

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
        if route not in ROUTES:
            raise UsageError(f"deepspeed_io(route={route!r}): expected one of {', '.join(ROUTES)}")
        micro = self._resolution.config.train_micro_batch_size_per_gpu
        return EngineDataLoader(
            dataset,
            batch_size=int(micro or 1) if batch_size is None else batch_size,
            rank=self._comm.rank,
            world_size=self._comm.world,
            collate_fn=collate_fn,
            data_sampler=data_sampler,
            shuffle=route == "train",
            drop_last=self._resolution.config.dataloader_drop_last,
            num_workers=num_local_io_workers or 0,
            device=self.device if pin_memory else None,
        )

    @property
    def ledger(self) -> Ledger:
        """Every collective of this engine."""
        return self._comm.ledger

    @property
    def config(self) -> Any:
        """The configuration as the user gave it."""
        return self._resolution.raw

    @property
    def world_size(self) -> int:
        """Number of ranks that share the data."""
        return self._comm.world

    @property
    def dp_world_size(self) -> int:
        """Number of data-parallel ranks."""
        return self._comm.world

    @property
    def seq_dp_world_size(self) -> int:
        """Number of ranks over which gradients are averaged."""
        return self._comm.world

    @property
    def global_rank(self) -> int:
        """This process among all."""
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    @property
    def data_parallel_group(self) -> Any:
        """The process group of the data-parallel ranks (None: the default group)."""
        return self._comm.user_group

    @property
    def seq_data_parallel_group(self) -> Any:
        """The process group over which gradients are averaged."""
        return self._comm.user_group

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
        return self._comm.rank

    def get_tensor_parallel_rank(self) -> int:
        """Return this process's rank among tensor-parallel ranks."""
        return 0

    get_model_parallel_rank = get_tensor_parallel_rank

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
