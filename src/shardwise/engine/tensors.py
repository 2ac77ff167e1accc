"""Tensors that ranks share: from what the configuration asks for to divided layers and the groups of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwise.errors import DesyncError, UsageError
from shardwise.parallel.sequence import across
from shardwise.parallel.tensor.group import NAME, TensorGroup
from shardwise.parallel.tensor.layers import Parallel, divide
from shardwise.parallel.tensor.plan import cuts_of
from shardwise.registry import part_of
from shardwise.trees import tensors_in
from shardwise.zero.passes.modulehook import ModuleHook
from shardwise.zero.units import released

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator
    from shardwise.config import Config


class SharedTensors:
    """The group of an engine whose ranks share tensors, as long as it is open (all ranks call).

    Args:
        job: all ranks.
        lines: those of each copy of the model, by their numbers in the job.
        model: its layers are divided, unless they have been before.
        config: validated; says how.

    Attributes:
        group: the ranks of this rank's copy of the model.

    Raises:
        UsageError: nothing in the model can be divided, or the model is divided over other ranks.
        ConfigError: the configuration names what the model has not.
    """

    def __init__(self, job: Communicator, lines: Sequence[Sequence[int]], model: nn.Module, config: Config) -> None:
        before = next((module.group for module in model.modules() if isinstance(module, Parallel)), None)
        if before is not None and before.columns != across(lines):
            raise UsageError(
                f"this model is divided over ranks {before.columns} by place, and should be over {across(lines)} "
                "now. Build it again"
            )
        self._part = job.part(lines, NAME)
        self.group = TensorGroup(self._part, across(lines), self._part.rank)
        divide_model(model, self.group, config, job)
        self._hooks: list[RemovableHandle] = []
        self._compared = False

    def watch(self, model: nn.Module) -> None:
        """Compare what the ranks of a copy of the model give it in the first forward pass."""
        self._hooks.append(model.register_forward_pre_hook(ModuleHook(self._begins), with_kwargs=True))

    def _begins(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if self._compared or not model.training:
            return
        self._compared = True
        own = [fingerprint(tensor) for tensor in tensors_in((args, kwargs))]
        told = self._part.exchange(own, "tensor_inputs")
        if any(other != told[0] for other in told):
            raise DesyncError(
                f"tensor parallelism: ranks {self._part.members} have one copy of the model and have to get the same "
                f"samples, but their inputs differ: {told}. Take samples by engine.get_data_parallel_rank() of "
                "engine.dp_world_size, or have the loader of shardwise.initialize(training_data=...)"
            )

    def close(self) -> None:
        """End it; process groups belong to the job's communicator."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.group.close()


def divide_model(model: nn.Module, group: TensorGroup, config: Config, job: Communicator) -> None:
    """Divide a model's layers, of which each rank keeps its part; those that are divided stay as they are.

    All ranks begin with the values of the first: what they keep has to be of one model.

    Args:
        model: is changed.
        group: the ranks of a copy of the model.
        config: validated.
        job: all ranks.
    """
    divided = [module for module in model.modules() if isinstance(module, Parallel)]
    for module in divided:
        module.group = group
    if divided:
        return
    for path, cut in cuts_of(model, group.size, config.tensor_parallel).items():
        layer = model.get_submodule(path)
        for parameter in layer.parameters(recurse=False):
            if part_of(parameter).ranks is None and not job.imagined and _plain(parameter):
                job.broadcast(parameter.data, 0, path).wait()
        divide(layer, cut, group, path)


def _plain(parameter: nn.Parameter) -> bool:
    return not parameter.is_meta and released.owner_of(parameter) is None


def fingerprint(tensor: torch.Tensor) -> list[Any]:
    """Return a few numbers that differ where tensors do."""
    if not tensor.numel():
        return [list(tensor.shape)]
    flat = tensor.detach().reshape(-1).double()
    weights = torch.linspace(1, 2, flat.numel(), dtype=torch.float64, device=flat.device)
    return [list(tensor.shape), float(flat.nan_to_num() @ weights)]
