"""Check that ranks compute equal gradients of unsharded parameters, in the first backward pass.

A rank that uses such a parameter on its own heads, features or tokens has a partial gradient. If it is not declared,
each rank would step with its partial gradient.
"""

from __future__ import annotations

import itertools
import math
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise.errors import ConfigError
from shardwise.parallel.tensor import mappings
from shardwise.parallel.tensor.group import TensorGroup
from shardwise.parallel.tensor.layers import Parallel
from shardwise.registry import part_of

_RULES = "tensor_parallel.partition_config.layer_specs"
_NEAR, _NEAR_IN_HALF = 1e-3, 5e-2  # relative to the norm of a tensor
_OVERFLOWS = 32  # passes with numbers that are not finite, after which the check ends
_LOSS, _LOSS_IN_HALF = 1e-5, 5e-3  # relative to a loss, which all ranks compute from the same numbers


_summed = WeakTensorKeyDictionary()


def sum_gradient(parameter: nn.Parameter, layer: Parallel) -> None:
    """All-reduce a parameter's partial gradients over the tensor-parallel group from now on."""
    if parameter in _summed:
        return
    _summed[parameter] = True
    found = weakref.ref(layer)

    def whole(gradient: torch.Tensor) -> torch.Tensor:
        own = found()
        return gradient if own is None else mappings.total(gradient, own.group, "tensor_gradient")

    parameter.register_hook(whole)


class GradientGuard:
    """Compares gradients of the first backward pass that has any, over a tensor-parallel group; then sets `ended`."""

    def __init__(self, model: nn.Module, group: TensorGroup) -> None:
        self._group = group
        self._names: list[str] = []
        self._parameters: list[nn.Parameter] = []
        self._halves: list[bool] = []
        self._found: dict[int, torch.Tensor] = {}
        self._handles: list[RemovableHandle] = []
        self._in_half = False
        self._overflows = 0
        self._divided: dict[int, str] = {}
        self.ended = group.comm.imagined
        if self.ended:
            return
        for path, module in model.named_modules():
            for name, one in module._parameters.items():
                if isinstance(module, Parallel) and one is not None and part_of(one).box is not None:
                    self._divided[id(one)] = f"{path}.{name}"
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and part_of(parameter).ranks is None:
                self._handles.append(parameter.register_hook(self._noting(len(self._names))))
                self._names.append(name)
                self._parameters.append(parameter)
                self._halves.append(parameter.dtype in (torch.float16, torch.bfloat16))

    def _noting(self, index: int) -> Callable[[torch.Tensor], None]:
        def note(gradient: torch.Tensor) -> None:
            made = numbers_of(gradient)
            before = self._found.get(index)
            self._found[index] = made if before is None else before + made

        return note

    def begin_pass(self) -> None:
        """Record if the forward pass computes in half precision by autocast."""
        self._in_half |= torch.is_autocast_enabled(self._group.comm.device.type)

    def check(self, loss: torch.Tensor | None = None) -> None:
        """Compare the gradients, and a known loss, of a backward pass (all ranks call); raises a ConfigError."""
        if self.ended:
            return
        rows = {}
        if self._found:
            values = torch.stack([made.to(self._group.comm.device) for made in self._found.values()]).tolist()
            rows = dict(zip(self._found, values, strict=True))
        own = [rows.get(index, [0.0, 0.0, 0.0]) for index in range(len(self._names))]
        number = None if loss is None else float(loss.detach())
        by_hand = None if loss is None else self._used_by_hand(loss)
        told = self._group.comm.exchange([number, by_hand, *own], "tensor_gradients")
        losses, every = [theirs[0] for theirs in told], [theirs[2:] for theirs in told]
        if self._names and not any(number for theirs in every for row in theirs for number in row):
            return  # a pass without gradients
        if self._overflows < _OVERFLOWS and not all(map(math.isfinite, itertools.chain(*itertools.chain(*every)))):
            self._overflows += 1
            self._found = {}
            return  # as behind an overflow in fp16; the next pass is compared
        parameters, half = self._parameters, self._in_half or any(self._halves)
        half |= loss is not None and loss.dtype in (torch.float16, torch.bfloat16)
        self.close()
        by_hand = next((theirs[1] for theirs in told if theirs[1] is not None), None)
        if by_hand is not None:
            raise ConfigError(
                f"tensor parallelism: the loss depends on {by_hand}, of which each rank has a part, in another way "
                "than by the outputs of divided layers, and each rank computes with its part. Leave the layer whole "
                f'({_RULES}: {{"patterns": ["^{re.escape(by_hand)}$"], "partition_type": "skip"}}), or leave that term '
                "out of the loss"
            )
        near = _LOSS_IN_HALF if half else _LOSS
        if number is not None and any(abs(one - losses[0]) > near * max(abs(one), abs(losses[0])) for one in losses):
            raise ConfigError(
                f"tensor parallelism: the loss differs between the ranks of a copy of the model: {losses}. Each has "
                "computed it from its part of something that is divided (an output of a column layer without "
                "gather_output, or the weight of a divided layer), or from other samples. Set gather_output in "
                "tensor_parallel.partition_config.layer_specs, or compute it by "
                "shardwise.parallel.tensor.loss.words_cross_entropy"
            )
        for index, name in enumerate(self._names):
            if parameters[index] in _summed:
                continue
            mine = [theirs[index] for theirs in every]
            if not all(same_numbers(row, mine[0], half=self._halves[index]) for row in mine):
                norms = ", ".join(f"{row[2]:.3g}" for row in mine)
                raise ConfigError(
                    f"tensor parallelism: the gradient of {name}, which all {self._group.size} ranks of a copy of the "
                    f"model have whole, differs between them: its norms are {norms}. Each rank has used the parameter "
                    "on its own part of something that is divided, or with random numbers of its own, drawn between a "
                    "column and a row layer. Leave the layers whole between which that is "
                    '("partition_type": "skip" in tensor_parallel.partition_config.layer_specs)'
                )

    def _used_by_hand(self, loss: torch.Tensor) -> str | None:
        """Return a sharded parameter on which a loss depends with no exchange of features on the way."""
        ahead: list[Any] = [loss.grad_fn]
        seen = set(ahead)
        while ahead:
            node = ahead.pop()
            name = self._divided.get(id(getattr(node, "variable", None)))
            if name is not None:
                return name
            # A function of Python may exchange, unless it is known.
            if node is None or (isinstance(node, BackwardCFunction) and not mappings.keeps_features(node)):
                continue
            new = {inner for inner, _ in node.next_functions} - seen
            seen |= new
            ahead += new
        return None

    def close(self) -> None:
        """Stop comparing."""
        self.ended = True
        for handle in self._handles:
            handle.remove()
        self._handles, self._found, self._parameters, self._divided = [], {}, [], {}


def numbers_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return three numbers that differ for different tensors: sum, sum of every second element, norm."""
    values = tensor.detach()
    if values.is_sparse:
        values = values.coalesce().values()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if not values.is_floating_point():
        values = values.to(torch.float32)
    wide = torch.float64 if values.device.type != "mps" else torch.float32
    if not values.numel():
        return torch.zeros(3, dtype=wide, device=values.device)
    some = values.reshape(-1)
    norm = torch.linalg.vector_norm(some, dtype=wide)
    return torch.stack([some.sum(dtype=wide), some[::2].sum(dtype=wide), norm])


def same_numbers(own: Sequence[Any], other: Sequence[Any], *, half: bool) -> bool:
    """Return True if results of `numbers_of` agree up to rounding."""
    near = (_NEAR_IN_HALF if half else _NEAR) * max(abs(own[2]), abs(other[2]))
    return not any(abs(a - b) > near for a, b in zip(own, other, strict=True))
