"""Losses with weight 0: their gradient is zero even if the loss is NaN (the mean over no tokens is 0/0)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from shardwise.compat import result_shapes


def ignore_nonfinite(loss: torch.Tensor, absent: torch.Tensor | None = None) -> list[Any]:
    """Replace the non-finite gradients of a scalar loss with weight 0 by zero; return hook handles (`remove`).

    Because other ranks exchange gradients with this rank in its backward pass, the pass must run in its usual order. A
    loss multiplied by 0 contributes zeros, and NaN from divisions by a number of tokens. Hooks replace the NaN before
    they reach a layer with parameters. With the one-element tensor `absent`, gradients are replaced where it is true,
    and only while they are scalars, which is cheap if it is false. None: always.
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
    """Yield the graph's nodes from the loss down to the first ones with parameters; or only nodes with scalar results.

    Functions written in Python (`torch.autograd.Function`) end the walk, because they may exchange gradients.
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
    return all(following is None or not following.next_functions for following, _ in node.next_functions)
