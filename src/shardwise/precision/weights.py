"""Losses with the weight 0: their gradient is zero, also where the loss is NaN (the mean over no tokens is 0/0)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from shardwise.compat import result_shapes


def ignore_nonfinite(loss: torch.Tensor, absent: torch.Tensor | None = None) -> list[Any]:
    """Replace by zero what is not finite among the gradients that a loss of weight 0 passes on.

    Because other ranks exchange gradients with this one in its backward pass, that pass has to run, and in its usual
    order. All that a loss multiplied by 0 contributes are zeros, and NaN where its arithmetic divides by a number of
    tokens. Such gradients are replaced before they reach a layer with parameters.

    Args:
        loss: a scalar that requires a gradient.
        absent: a tensor with one element; gradients are replaced where it is true, and only while they are scalars,
            which costs little in passes in which it is false. None: in any case.

    Returns:
        Handles of hooks, each with a method `remove`.
    """

    def replaced(gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
        return tuple(None if gradient is None else _finite(gradient, absent) for gradient in gradients)

    return [node.register_prehook(replaced) for node in _nodes_of_loss(loss, absent is not None)]


def _finite(gradient: torch.Tensor, absent: torch.Tensor | None) -> torch.Tensor:
    kept = torch.isfinite(gradient)
    if absent is not None:
        kept = kept | ~absent.reshape(()).to(gradient.device)
    return torch.where(kept, gradient, 0.0)


def _nodes_of_loss(loss: torch.Tensor, scalar: bool) -> Iterator[Any]:
    """Yield the nodes of a graph from the loss down to the first ones with parameters; or those with scalar results.

    Functions written in Python (`torch.autograd.Function`) are yielded, and not passed: they may exchange gradients.
    """
    waiting: list[Any] = [loss.grad_fn]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or not node.next_functions:
            continue
        seen.add(node)
        if scalar and any(math.prod(shape) != 1 for shape in result_shapes(node)):
            continue
        yield node
        following = [other for other, _ in node.next_functions if other is not None]
        if not isinstance(node, BackwardCFunction) and not any(map(_is_parameter, following)):
            waiting.extend(following)


def _is_parameter(node: Any) -> bool:
    """Return True for the node of a leaf, or of a view of one."""
    return all(following is None or not following.next_functions for following, _ in node.next_functions)
