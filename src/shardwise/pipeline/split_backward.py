"""Backward passes in two parts: gradients of a stage's inputs first, those of weights later (zero-bubble schedules).

Inside of `DeferredWeights.collecting` a function of activations and leaf parameters (`linear`, `embedding`,
convolutions) computes on leaves of its own. The backward pass that follows differentiates it with respect to the
activations, and keeps the small graph; `DeferredWeights.take` differentiates that graph with respect to the weights.
Both call the kernels of PyTorch's own backward pass, so gradients are the same, bit by bit. Gradients of all other
operators come with the first part. Gradients of weights go through the parameters' nodes of the graph, so hooks of
parameters run.

Method: Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), section 2.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from shardwise.compat import fake_tensor
from shardwise.errors import PipelineError

_CONVOLUTIONS = {torch.conv1d, torch.conv2d, torch.conv3d, F.conv1d, F.conv2d, F.conv3d}
_SPLIT = frozenset({F.linear, torch.addmm, F.embedding, *_CONVOLUTIONS})
"""Functions whose gradients of weights take much time or memory, and whose arguments are flat."""


class DeferredWeights:
    """Gradients of weights of one micro-batch in one stage that are still to be computed."""

    def __init__(self) -> None:
        self._roots: list[torch.Tensor] = []

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Split the functions that run in the block."""
        mode = _Mode(self._roots.append)
        try:
            with mode:
                yield
        finally:
            mode.ended = True

    def take(self) -> list[torch.Tensor]:
        """Return the roots whose backward pass computes the gradients, function by function, and frees the graphs."""
        roots, self._roots = self._roots, []
        return roots


class _Mode(TorchFunctionMode):
    def __init__(self, note: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._note = note
        # Not looked up in a call, where Dynamo would read the table of modules while threads import.
        self._kinds = torch.Tensor, nn.Parameter, fake_tensor()
        self.ended = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function not in _SPLIT or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        given = [*args, *kwargs.values()]
        weights = [value for value in given if _is_weight(value)]
        if not weights or any(isinstance(value, torch.Tensor) and type(value) not in self._kinds for value in given):
            return function(*args, **kwargs)
        changed: dict[int, torch.Tensor] = {}
        # The first argument makes results require a gradient where no other does.
        anchor = torch.empty(0, device=weights[0].device, requires_grad=True)
        with torch.enable_grad():
            for value in given:
                if not isinstance(value, torch.Tensor) or id(value) in changed:
                    continue
                if _is_weight(value):
                    changed[id(value)] = _Weight.apply(anchor, value.detach())
                else:
                    changed[id(value)] = value.detach().requires_grad_(value.requires_grad)
            output = function(
                *(changed.get(id(value), value) for value in args),
                **{name: changed.get(id(value), value) for name, value in kwargs.items()},
            )
        sources = [value for value in given if isinstance(value, torch.Tensor) and not _is_weight(value)]
        places = [id(changed[id(source)]) for source in sources]
        inputs = {id(leaf): leaf for source in sources if (leaf := changed[id(source)]).requires_grad}
        found = dict.fromkeys(weights)
        edge, part = get_gradient_edge(output), _Part([get_gradient_edge(changed[id(weight)]) for weight in found])
        root = _Later.apply(part, *found)
        note = self._note

        def differentiated(gradient: torch.Tensor) -> list[torch.Tensor | None]:
            if not self.ended or torch.is_grad_enabled():
                raise PipelineError(
                    "a layer runs a backward pass inside of its forward pass, or a gradient is differentiated again, "
                    'and this schedule computes gradients of weights later. Use the schedule "1f1b" or "interleaved"'
                )
            own = torch.autograd.grad([edge], list(inputs.values()), [gradient], retain_graph=True) if inputs else ()
            part.output, part.gradient = edge, gradient
            note(root)
            of = dict(zip(inputs, own, strict=True))
            return [of.get(place) for place in places]

        sequel = [get_gradient_edge(root)]
        result: torch.Tensor = _Node.apply(anchor, output.detach(), differentiated, sequel, *sources)
        return result


def _is_weight(value: Any) -> bool:
    return isinstance(value, nn.Parameter) and value.requires_grad and value.is_leaf


@dataclass
class _Part:
    """A split function. Edges keep no tensors: outputs and unsharded weights are freed."""

    weights: Sequence[GradientEdge]
    output: GradientEdge | None = None
    gradient: torch.Tensor | None = None


class _Later(torch.autograd.Function):
    """A root with an edge to each weight of a split function; its backward computes their gradients."""

    @staticmethod
    def forward(ctx: Any, part: _Part, *weights: torch.Tensor) -> torch.Tensor:
        ctx.part = part
        return weights[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        part, ctx.part = ctx.part, None
        return None, *torch.autograd.grad([part.output], part.weights, [part.gradient])


class _Weight(torch.autograd.Function):
    """A weight in the graph of a split function."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, weight: torch.Tensor) -> Any:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise AssertionError("its gradient is taken at its output")


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
