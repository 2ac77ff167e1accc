"""Backward passes in two parts: gradients of a stage's inputs first, those of weights later (zero-bubble schedules).

Inside of `DeferredWeights.collecting` a function of activations and leaf parameters (`linear`, `addmm`, convolutions)
computes on leaves of its own. The backward pass that follows differentiates it with respect to the activations, and
keeps the small graph; `DeferredWeights.take` differentiates that graph with respect to the weights. Both call the
kernels of PyTorch's own backward pass, so gradients are the same, bit by bit. Gradients of all other operators come
with the first part. Gradients of weights go through the parameters' nodes of the graph, so hooks of parameters run.

Method: Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), section 2.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from shardwise.errors import PipelineError

_SPLIT = frozenset({F.linear, torch.addmm, torch.conv1d, torch.conv2d, torch.conv3d, F.conv1d, F.conv2d, F.conv3d})
"""Functions whose gradients of weights cost as much as those of activations, and whose arguments are flat."""


class _Part(NamedTuple):
    output: torch.Tensor
    """Output of the function, with a graph that ends at `weights`."""
    weights: Sequence[torch.Tensor]
    edges: Sequence[GradientEdge]
    """Of the parameters, in the order of `weights`."""
    gradient: torch.Tensor


class DeferredWeights:
    """Gradients of weights of one micro-batch in one stage that are still to be computed."""

    def __init__(self) -> None:
        self._parts: list[_Part] = []

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Split the functions that run in the block."""
        mode = _Mode(self._parts.append)
        try:
            with mode:
                yield
        finally:
            mode.ended = True

    def take(self) -> tuple[list[GradientEdge], list[torch.Tensor]]:
        """Compute the gradients of weights and free the graphs; return the parameters' edges and the gradients.

        A weight that is used several times gets one gradient, the sum in the order of the backward pass.
        """
        edges: dict[Any, GradientEdge] = {}
        sums: dict[Any, torch.Tensor] = {}
        parts, self._parts = self._parts, []
        while parts:
            part = parts.pop(0)
            found = torch.autograd.grad(part.output, part.weights, part.gradient)
            for edge, gradient in zip(part.edges, found, strict=True):
                edges[edge.node] = edge
                known = sums.get(edge.node)
                sums[edge.node] = gradient if known is None else known + gradient
            del part
        return list(edges.values()), list(sums.values())


class _Mode(TorchFunctionMode):
    def __init__(self, note: Callable[[_Part], None]) -> None:
        super().__init__()
        self._note = note
        self.ended = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function not in _SPLIT or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        given = [*args, *kwargs.values()]
        weights = [value for value in given if _is_weight(value)]
        if not weights or any(isinstance(value, torch.Tensor) and type(value) not in _KINDS for value in given):
            return function(*args, **kwargs)
        changed: dict[int, torch.Tensor] = {}
        inputs: list[torch.Tensor] = []
        with torch.enable_grad():
            for value in given:
                if isinstance(value, torch.Tensor) and id(value) not in changed:
                    leaf = changed[id(value)] = value.detach().requires_grad_(value.requires_grad)
                    if value.requires_grad and not _is_weight(value):
                        inputs.append(leaf)
            output = function(
                *(changed.get(id(value), value) for value in args),
                **{name: changed.get(id(value), value) for name, value in kwargs.items()},
            )
        sources = [value for value in given if isinstance(value, torch.Tensor) and not _is_weight(value)]
        leaves = [changed[id(weight)] for weight in dict.fromkeys(weights)]
        edges = [get_gradient_edge(weight) for weight in dict.fromkeys(weights)]

        def differentiated(gradient: torch.Tensor) -> list[torch.Tensor | None]:
            if not self.ended:
                raise PipelineError(
                    "a layer runs a backward pass inside of its forward pass, and this schedule computes gradients of "
                    'weights later. Use the schedule "1f1b" or "interleaved"'
                )
            found = torch.autograd.grad(output, inputs, gradient, retain_graph=True) if inputs else ()
            self._note(_Part(output, leaves, edges, gradient))
            given_back = dict(zip(map(id, inputs), found, strict=True))
            return [given_back.get(id(changed[id(source)])) for source in sources]

        # The first argument makes the result require a gradient where no activation does.
        anchor = torch.empty(0, device=output.device, requires_grad=True)
        result: torch.Tensor = _Node.apply(anchor, output.detach(), differentiated, edges, *sources)
        return result


_KINDS = (torch.Tensor, nn.Parameter)


def _is_weight(value: Any) -> bool:
    return isinstance(value, nn.Parameter) and value.requires_grad and value.is_leaf


class _Node(torch.autograd.Function):
    """The output of a split function, in the graph of its activations."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, output: torch.Tensor, differentiated: Any, edges: Any, *_: torch.Tensor
    ) -> Any:
        ctx.differentiated, ctx.weights = differentiated, edges
        return output.detach()  # no view, because views of custom functions cannot be changed in place

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, None, None, None, *ctx.differentiated(gradient)
