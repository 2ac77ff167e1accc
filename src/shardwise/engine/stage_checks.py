"""Checks of pipeline stages at run time, for models whose results would differ from those of one process."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_unflatten

from shardwise.errors import UsageError
from shardwise.pipeline.layers import PipelineStage
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


def check_loss(where: str, found: Any, *, trains: bool) -> None:
    """Raise a UsageError unless a loss is one number that can be differentiated, or a pair of it and a weight."""
    loss = found[0] if isinstance(found, tuple) and len(found) == 2 else found
    if not isinstance(loss, torch.Tensor):
        shown = f"a {type(loss).__name__}"
    elif loss.numel() != 1:
        shown = f"a tensor of shape {tuple(loss.shape)}"
    elif trains and not loss.requires_grad:
        shown = "a tensor that depends on no trained parameter"
    else:
        return
    raise UsageError(
        f"{where}: the loss is {shown}; expected a tensor of one number that depends on trained parameters, or a pair "
        "(loss, weight). Correct loss_fn, or the last layer if there is none"
    )


def layer_of(error: BaseException) -> str:
    """Return the layer in which a forward pass has failed, and its input, in words; "" if unknown."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        values = frame.f_locals
        if isinstance(values.get("self"), PipelineStage) and "value" in values and values.get("name"):
            given = ", ".join(str(tuple(t.shape)) for t in tree_leaves(values["value"]) if isinstance(t, torch.Tensor))
            return f"{values['name']} ({type(values.get('module')).__name__}) was called with tensors of shape {given}"
    return ""


class StageCall(nn.Module):
    """A stage as a module whose arguments are the tensors of a nested value, under their innermost names.

    `tensors` are those of the value; `value` makes a nested value of others.
    """

    def __init__(self, stage: nn.Module, value: Any) -> None:
        super().__init__()
        self.stage = stage
        paths, form = tree_flatten_with_path(value)
        leaves = [leaf for _, leaf in paths]
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.tensors = tuple(leaves[i] for i in places)
        found = [str(getattr(paths[i][0][-1], "key", "")) if paths[i][0] else "" for i in places]
        # Names must differ and be valid; only those of inputs of models have a meaning.
        names = [name if name in ("position_ids", "attention_mask") else f"value_{i}" for i, name in enumerate(found)]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(name, kind) for name in dict.fromkeys(names)]
        self.train(stage.training)

        def nested(tensors: Sequence[Any]) -> Any:
            filled = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                filled[place] = tensor
            return tree_unflatten(filled, form)

        def forward(*tensors: Any) -> Any:
            return stage(nested(tensors))

        forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        # Without a reference to the module: a cycle would keep activations until the garbage collector runs.
        self.value, self.forward = nested, forward


class SharedBuffers:
    """Buffers of modules that several positions of a pipeline run; each position has a copy."""

    def __init__(self, model: PipelineModule, rank_of: Iterable[int]) -> None:
        places = list(rank_of)
        self._modules: list[tuple[str, nn.Module]] = []
        self._buffers: list[tuple[str, str, torch.Tensor, int]] = []
        for name, stages in model.shared_modules().items():
            if len({places[stage] for stage in stages}) > 1 and (module := _module(model, name)) is not None:
                where = f"{name} ({type(module).__name__}) is a layer of the stages {', '.join(map(str, stages))}"
                self._modules.append((where, module))

    def begin(self) -> None:
        """Note the buffers at the beginning of a batch."""
        self._buffers = [
            (where, name, buffer, buffer._version)
            for where, module in self._modules
            for name, buffer in module.named_buffers()
        ]

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
