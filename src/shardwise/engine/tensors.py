"""Tensor parallelism of an engine: sharded layers and tensor-parallel groups from the configuration."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwise.errors import ConfigError, DesyncError, ShardwiseError, UsageError
from shardwise.parallel.sequence import across
from shardwise.parallel.tensor.dropout import Regions, same_numbers
from shardwise.parallel.tensor.dtensors import DTensors
from shardwise.parallel.tensor.entry import divide_model, divided_over, let_go, take_over
from shardwise.parallel.tensor.group import NAME, TensorGroup, fingerprint
from shardwise.parallel.tensor.guard import GradientGuard
from shardwise.parallel.tensor.layers import Parallel
from shardwise.parallel.tensor.registry_marks import declare_marked
from shardwise.parallel.tensor.watch import begin_pass
from shardwise.trees import tensors_in
from shardwise.zero.passes.modulehook import ModuleHook, weakly

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator
    from shardwise.config import Config


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
        before = divided_over(model)
        if before is not None and before.columns != across(lines):
            raise UsageError(
                f"this model is divided over ranks {before.columns} by place, and should be over {across(lines)} "
                "now. Build it again"
            )
        self._part = job.part(lines, NAME, near=True)
        self.group = TensorGroup(self._part, across(lines), self._part.rank, data)
        self._dtensors = DTensors(model, self.group)
        self._former: list[tuple[Parallel, TensorGroup]] = []
        if client:
            _declare_client_s(model, self.group)
        elif not self._dtensors:
            self._former = divide_model(
                model, self.group, config.tensor_parallel, job, experts=not config.expert_parallel.enabled
            )
        self._client = client
        self._regions: Regions | None = None
        self._gradients: GradientGuard | None = None
        self._hooks: list[RemovableHandle] = []
        self._compared = False

    def exchange(self, optimizer: Any, parameters: Any) -> Any:
        """Replace the parameters of optimizer and client list by the model's current ones; return the list."""
        return self._dtensors.exchange(optimizer, parameters) if self._dtensors else parameters

    def watch(self, model: nn.Module) -> None:
        """Install the checks of the first passes (after sharding)."""
        take_over(self)
        self._dtensors.watch(ModuleHook)
        if not self._client:  # client layers manage their random numbers
            same_numbers(self.group)
            self._regions = Regions(model, self.group)
            self._regions.watch(model, ModuleHook)
        self._gradients = GradientGuard(model, self.group)
        self._hooks.append(model.register_forward_pre_hook(ModuleHook(weakly(self._begins)), with_kwargs=True))
        self._hooks.append(model.register_forward_hook(ModuleHook(self.group.end_pass)))

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
        let_go(self)
        self.group.close()
        for layer, group in self._former:
            layer.group = group


def _declare_client_s(model: nn.Module, group: TensorGroup) -> None:
    if not declare_marked(model, group):
        raise UsageError(
            f"initialize(mpu=...): {group.size} ranks have a copy of the model among them, and no parameter of "
            f"{type(model).__name__} says that it is a part: set parameter.tensor_model_parallel = True and "
            "parameter.partition_dim on those of divided layers, as Megatron does; or set tensor_parallel.autotp_size, "
            "and plain layers are divided over these ranks"
        )
