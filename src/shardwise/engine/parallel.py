"""Sequence, tensor and expert parallelism of an engine: groups, divided layers, and checks of the first passes."""

from __future__ import annotations

import inspect
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwise.comm.communicator import Communicator
from shardwise.compat import has_values
from shardwise.errors import ConfigError, DesyncError, ShardwiseError, UsageError
from shardwise.moe import ExpertGroup, bind_experts
from shardwise.moe.exchange import ExpertParallelModule
from shardwise.moe.huggingface import convert
from shardwise.moe.layer import MoE
from shardwise.parallel import sequence
from shardwise.parallel.attention import DistributedAttention
from shardwise.parallel.proof import difference
from shardwise.parallel.ring import RingAttention
from shardwise.parallel.sequence import SequenceGroup, across, runs_of
from shardwise.parallel.tensor import entry
from shardwise.parallel.tensor.dropout import Regions, same_numbers
from shardwise.parallel.tensor.dtensors import DTensors
from shardwise.parallel.tensor.group import NAME, TensorGroup, fingerprint
from shardwise.parallel.tensor.guard import GradientGuard
from shardwise.parallel.tensor.layers import NormParallel, Parallel, RowParallel
from shardwise.parallel.tensor.registry_marks import declare_marked
from shardwise.parallel.tensor.watch import begin_pass
from shardwise.registry import part_of
from shardwise.trees import tensors_in
from shardwise.utils.logging import warn_once
from shardwise.zero.parameters.init import PartStore, whole_values
from shardwise.zero.passes.modulehook import ModuleHook, weakly
from shardwise.zero.units.released import disown, owner_of

if TYPE_CHECKING:
    from shardwise.config import Config
    from shardwise.engine.mesh import RankGrid

# -- sequence parallelism ----------------------------------------------------------------------------------------------


class SharedSequences:
    """The sequence-parallel group of an engine, while it is open; one of a process at a time."""

    def __init__(
        self,
        job: Communicator,
        lines: Sequence[Sequence[int]],
        data: Communicator,
        existing: SequenceGroup | None,
        *,
        divided: bool = False,
    ) -> None:
        self._part = job.part(lines, sequence.NAME)
        existing = existing or sequence.current()
        if existing is None or existing.members != self._part.members:
            existing = SequenceGroup(self._part, data)
        self.group = existing
        sequence.take_over(self.group, self)
        self.group.attach(self._part, data)
        self._hooks: list[Any] = []
        self._job = job
        self._compared: set[int] = set()
        self._divided = divided
        self._checked = self._evaluated = False
        self._before, self._open = 0, True

    def watch(self, model: nn.Module) -> None:
        """Install hooks at the model's forward passes, and check the first one."""
        # Weak references, because the model may outlive the engine.
        self._hooks.append(model.register_forward_pre_hook(ModuleHook(weakly(self._begins))))
        self._hooks.append(model.register_forward_hook(ModuleHook(weakly(self._ended)), with_kwargs=True))
        self._hooks.append(model.register_forward_hook(ModuleHook(weakly(self.group.end_pass)), always_call=True))

    def _begins(self, *_: Any) -> None:
        self.group.begin_pass(self._part)
        self._before = self.group.exchanges

    def _ended(self, model: nn.Module, args: Any, kwargs: Any, _: Any) -> None:
        known = self._checked, self._evaluated
        if self.group.comparing or known[not model.training] or not all(map(has_values, tensors_in((args, kwargs)))):
            return
        self._evaluated, trains = True, model.training
        self._checked |= trains
        if self.group.exchanges > self._before:
            return
        message = (
            f"sequence_parallel_size is {self.group.size}, but {type(model).__name__} has run without any exchange "
            "of heads between ranks: its attention sees a rank's own tokens only. Call "
            "shardwise.parallel.share_attention(model) (models of transformers), or wrap the attention in "
            "shardwise.parallel.DistributedAttention"
        )
        positions = {**dict(zip(inspect.signature(model.forward).parameters, args, strict=False)), **kwargs}.get(
            "position_ids"
        )
        if trains or (runs_of(positions) or [0])[0] > 0:  # as in a part of a sequence
            raise UsageError(message)
        if not known[0]:
            warn_once(f"{message}. In evaluation each rank may have whole sequences instead")

    def compare(self, model: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any, *, stage: int = -1) -> None:
        """Compare outputs before the first training pass with a run on unsharded sequences; raises on all ranks.

        `stage`: number of the pipeline stage that the model is. The comparison then decides if attention is shared.
        """
        if stage in self._compared or not model.training or not all(has_values(x) for x in tensors_in((args, kwargs))):
            return
        self._compared.add(stage)
        self._checked |= stage >= 0
        found = difference(run, model, self.group, self._job, args, kwargs, divided=self._divided, stage=stage >= 0)
        if found is not None:
            name = type(model).__name__ if stage < 0 else f"pipeline stage {stage}"
            raise UsageError(
                f"sequence parallelism over {self.group.size} ranks: {name} computes something else "
                f"than in one process; {found}. Attention, positions, masks, recurrences or "
                "convolutions are those of a rank's own tokens there: set sequence_parallel_size to 1, or pass the "
                "position_ids that the model takes"
            )

    def close(self) -> None:
        """Remove hooks and group, once; process groups belong to the job's communicator."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._open:
            self._open = False
            self.group.end_passes()
            self.group.detach(self._part)
            sequence.let_go(self.group, self)


class OwnSequences:
    """Group of one rank: dataloaders and layers find a group without sequence parallelism, too."""

    def __init__(self, job: Communicator, data: Communicator) -> None:
        self.group = SequenceGroup(Communicator(None, job.ledger, job.device, name=sequence.NAME, alone=True), data)
        sequence.stay_alone(self.group)

    def watch(self, model: nn.Module) -> None:
        """Do nothing: a single rank has no passes to agree on."""

    def compare(self, model: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any, *, stage: int = -1) -> None:
        """Do nothing: a single rank has unsharded sequences."""

    def close(self) -> None:
        """Remove the group."""
        sequence.let_go(self.group)


# -- tensor parallelism ------------------------------------------------------------------------------------------------


class SharedTensors:
    """The tensor-parallel group of an engine, while it is open (all ranks call). Shards the model's layers. `client`:
    the client has sharded the layers, which communicate by themselves; parameters are marked.
    """

    def __init__(
        self,
        job: Communicator,
        lines: Sequence[Sequence[int]],
        model: nn.Module,
        config: Config,
        *,
        data: Communicator | None = None,
        client: bool = False,
    ) -> None:
        before = entry.divided_over(model)
        if before is not None and before.columns != across(lines):
            raise UsageError(
                f"this model is divided over ranks {before.columns} by place, and should be over {across(lines)} "
                "now. Build it again"
            )
        self._part = job.part(lines, NAME, near=True)
        self.group = TensorGroup(self._part, across(lines), self._part.rank, data)
        self._dtensors = DTensors(model, self.group)
        self._layers: list[Parallel] = []
        if client:
            _declare_client_s(model, self.group)
        elif not self._dtensors:
            self._layers = entry.divide_model(
                model, self.group, config.tensor_parallel, job, experts=not config.expert_parallel.enabled
            )
        self._client = client
        self._regions: Regions | None = None
        self._gradients: GradientGuard | None = None
        self._hooks: list[RemovableHandle] = []
        self._compared = False

    @property
    def of_dtensors(self) -> bool:
        """Whether the model's DTensors are local tensors while this engine is open."""
        return bool(self._dtensors)

    def exchange(self, optimizer: Any, parameters: Any) -> Any:
        """Replace the parameters of optimizer and client list by the model's current ones; return the list."""
        return self._dtensors.exchange(optimizer, parameters) if self._dtensors else parameters

    def watch(self, model: nn.Module) -> None:
        """Install the checks of the first passes (after sharding)."""
        entry.take_over(self)
        self._dtensors.watch(ModuleHook)
        if not self._client:  # client layers manage their random numbers
            same_numbers(self.group)
            self._regions = Regions(model, self.group)
            self._regions.watch(model, lambda function: ModuleHook(weakly(function)))
        self._gradients = GradientGuard(model, self.group)
        self._hooks.append(model.register_forward_pre_hook(ModuleHook(weakly(self._begins)), with_kwargs=True))
        self._hooks.append(model.register_forward_hook(ModuleHook(weakly(self.group.end_pass)), always_call=True))

    def _begins(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        begin_pass(model)
        if self._gradients is not None:
            self._gradients.begin_pass()
        self.compare_inputs(model, args, kwargs)

    def compare_inputs(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Compare the inputs of the first training pass (all ranks of the group call); a DesyncError if they differ."""
        if self._compared or not model.training:
            return
        self._compared = True
        if not self._client:  # a script may have seeded ranks differently since
            same_numbers(self.group)
        own = [fingerprint(tensor) for tensor in tensors_in((args, kwargs))]
        told = self._part.exchange(own, "tensor_inputs")
        if any(other != told[0] for other in told):
            raise DesyncError(
                f"tensor parallelism: ranks {self._part.members} have one copy of the model and have to get the same "
                f"samples, but their inputs differ: {told}. Take samples by engine.get_data_parallel_rank() of "
                "engine.dp_world_size, or have the loader of shardwise.initialize(training_data=...)"
            )

    def compare_again(self) -> None:
        """Share random numbers and compare inputs in the next training pass, as in the first."""
        self._compared = False

    def check_gradients(self, loss: torch.Tensor | None = None) -> None:
        """Compare the loss and unsharded gradients once (all ranks of the group call); a ConfigError if one differs."""
        if self._gradients is not None:
            self._gradients.check(loss)

    def step_begins(self) -> None:
        """Compare gradients of backward passes that the script ran itself (all ranks of the group call)."""
        self.check_gradients()
        if self._regions is not None:
            self._regions.settle()

    def named(self, error: Exception, model: nn.Module) -> ConfigError | None:
        """Return an error that names the module with sharded layers that has failed in the first pass."""
        if isinstance(error, ShardwiseError) or self._client or self._gradients is None or self._gradients.ended:
            return None
        paths = {id(module): path for path, module in model.named_modules()}
        owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
        inside = [owner for owner in owners if id(owner) in paths and not isinstance(owner, Parallel)]
        module = inside[-1] if inside else None
        layers = [name for name, one in module.named_children() if isinstance(one, Parallel)] if module else []
        if not layers:
            return None
        path = paths[id(module)]
        said = str(error).split("\n")[0]
        name = f"{path}.{layers[0]}".lstrip(".")
        return ConfigError(
            f"tensor parallelism: {path or 'the model'} ({type(module).__name__}), whose layers {', '.join(layers)} "
            f"are divided over {self.group.size} ranks, has raised {type(error).__name__}: {said}. If it does not "
            "without tensor parallelism: a column layer gives this rank's features, unless gather_output is true, and "
            f"the weight of each is this rank's part. Leave {name} whole "
            '("partition_type": "skip" in tensor_parallel.partition_config.layer_specs)'
        )

    def close(self) -> None:
        """Remove hooks and group; process groups belong to the job's communicator."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._regions is not None:
            self._regions.close()
        if self._gradients is not None:
            self._gradients.close()
        self._dtensors.close()
        entry.let_go(self)
        self.group.close()
        entry.disconnect(self._layers, self.group)
        self._layers = []


def _declare_client_s(model: nn.Module, group: TensorGroup) -> None:
    if not declare_marked(model, group):
        raise UsageError(
            f"initialize(mpu=...): {group.size} ranks have a copy of the model among them, and no parameter of "
            f"{type(model).__name__} says that it is a part: set parameter.tensor_model_parallel = True and "
            "parameter.partition_dim on those of divided layers, as Megatron does; or set tensor_parallel.autotp_size, "
            "and plain layers are divided over these ranks"
        )


# -- expert parallelism ------------------------------------------------------------------------------------------------


def divide_experts(model: nn.Module, config: Config, comm: Communicator, lines: RankGrid) -> dict[int, ExpertGroup]:
    """Create the expert-parallel groups, by size, and declare each rank's experts (all ranks call). Ranks with the same
    index in their tensor-parallel groups share experts.
    """
    if config.expert_parallel.enabled:
        convert(model, config.expert_parallel)
    return bind_experts(
        model,
        comm,
        replicas=across(lines.tensor),
        data_first=config.use_data_before_expert_parallelism,
        prepare=None if comm.imagined else _make_whole,
    )


def release_experts(model: nn.Module, groups: Mapping[int, ExpertGroup]) -> None:
    """Remove closed expert-parallel groups from the layers that still refer to them."""
    for layer in model.modules():
        if isinstance(layer, ExpertParallelModule) and layer.group in groups.values():
            layer.group = None


def _make_whole(layer: ExpertParallelModule) -> None:
    """Unshard experts that were built under zero.Init, because ranks have different experts from here on."""
    if layer.ep_size == 1:
        return
    experts = layer.deepspeed_moe.experts if isinstance(layer, MoE) else layer
    for name, parameter in experts.named_parameters():
        if parameter.is_meta:
            raise UsageError(
                f"{name} of {type(layer).__name__} is on the meta device: experts that are divided over ranks need "
                "their values before shardwise.initialize(). Build the model on a CPU or device, or under zero.Init"
            )
        built = isinstance(owner_of(parameter), PartStore)
        if not built or not isinstance(layer, MoE) or layer.listed:
            continue
        values, _ = whole_values(parameter)
        disown(parameter)
        parameter.data = values.to(parameter.device)


# -- collectives of a pass ---------------------------------------------------------------------------------------------


def exchanges_in_backward(model: nn.Module, lines: RankGrid) -> bool:
    """Return True if other ranks wait for gradients from this rank's backward pass (after sharding)."""
    if len(lines.sequence[0]) > 1 or any(part_of(parameter).ranks is not None for parameter in model.parameters()):
        return True
    return any(
        isinstance(module, (nn.SyncBatchNorm, DistributedAttention, RingAttention)) for module in model.modules()
    )


def exchanges_of(model: nn.Module, lines: RankGrid) -> str:
    """Describe the collectives of a forward and backward pass besides ZeRO's; "" without other parallelism."""
    tensor, sequence = len(lines.tensor[0]), len(lines.sequence[0])
    modules = list(model.modules())
    divided = sum(isinstance(module, Parallel) for module in modules)
    rows = sum(isinstance(module, RowParallel) for module in modules)
    norms = sum(isinstance(module, NormParallel) for module in modules)
    said = []
    if divided:
        how = f"{rows} all-reduces of outputs"
        if norms:
            how = f"{norms} all-gathers behind norms and {rows} reduce-scatters of outputs"
        said.append(f"tensor-parallel size {tensor}: {how} forward, as many backward")
    if sequence > 1:
        said.append(f"sequence-parallel size {sequence}: 2 all-to-alls an attention forward, 2 backward")
    layers = Counter(module.ep_size for module in modules if isinstance(module, ExpertParallelModule))
    for size, count in sorted(layers.items()):
        if size > 1:
            said.append(f"expert-parallel size {size}: 2 all-to-alls in each of {count} layers forward, 2 backward")
    if not said:
        return ""
    return "; ".join([f"data-parallel size {len(lines.data[0])}", *said])
