"""Checks of pipeline stages at run time, for models whose results would differ from those of one process."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shardwise.errors import UsageError
from shardwise.pipeline.module import PipelineModule


def check_leaves(where: str, output: Any, inputs: Any, known: Collection[int]) -> None:
    """Raise a UsageError if a stage's output depends on a trained tensor that the engine does not step.

    `known`: ids of the parameters of this rank. A function that uses a module by a closure is an example: ranks without
    the module's layer have a copy of their own, whose gradients no rank would read.
    """
    own = [item for item in tree_leaves(inputs) if isinstance(item, torch.Tensor)]
    seen = {item.grad_fn for item in own}
    allowed = {*known, *map(id, own)}
    left = [item.grad_fn for item in tree_leaves(output) if isinstance(item, torch.Tensor)]
    while left:
        node: Any = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in allowed and leaf.numel():
            raise UsageError(
                f"{where}: the output depends on a trained tensor of shape {tuple(leaf.shape)} that is no parameter of "
                "this rank's layers, and would keep its values. A function or loss that uses a module of another layer "
                "has a copy of the module on each rank: write both layers as TiedLayerSpec with one key, the second "
                "with forward_fn"
            )
        left += [following for following, _ in node.next_functions]
        left += [edge.node for edge in getattr(node, "weights", ())]


class SharedBuffers:
    """Buffers of modules that several positions of a pipeline run; each position has a copy."""

    def __init__(self, model: PipelineModule, rank_of: Iterable[int]) -> None:
        places = list(rank_of)
        self._buffers: list[tuple[str, str, torch.Tensor, int]] = []
        for name, stages in model.shared_modules().items():
            if len({places[stage] for stage in stages}) > 1 and (module := _module(model, name)) is not None:
                where = f"{name} ({type(module).__name__}) is a layer of the stages {', '.join(map(str, stages))}"
                self._buffers += [(where, own, buffer, buffer._version) for own, buffer in module.named_buffers()]

    def check(self) -> None:
        """Raise a UsageError if a forward pass has changed a buffer: the copies would differ."""
        for where, name, buffer, version in self._buffers:
            if buffer._version != version:
                raise UsageError(
                    f"{where}, and its forward pass changes the buffer {name}, which each of these ranks would do for "
                    "its own calls only. Use a module for each layer, or put the layers on one rank (partition_method)"
                )


def _module(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:  # a layer of other ranks
        return None
