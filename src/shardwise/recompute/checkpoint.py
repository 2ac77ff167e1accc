"""Calling a function so that its activations are computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils import checkpoint as torch_checkpoint

from shardwise.errors import UsageError


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function and keep its inputs instead of its activations; the backward pass calls it again.

    It is torch's checkpointing without a second autograd graph (`use_reentrant=False`): inputs need no gradient,
    arguments and results may be nested, other tensors may be used from within, and `torch.autograd.grad` works. Random
    numbers are drawn again as they were (dropout), on the CPU and on the devices of the arguments, and autocast is as
    it was.

    Args:
        function: a module or any other callable; it does the same each time it is called with the same arguments.
        args: its arguments.
        kwargs: its keyword arguments, of any name.

    Returns:
        What the function returns.

    Raises:
        UsageError: `function` cannot be called.

    Example:
        >>> import torch
        >>> layer, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
        >>> torch.equal(checkpoint(layer, x), layer(x))
        True
    """
    if not callable(function):
        raise UsageError(
            f"checkpoint(function, ...): expected something that can be called, found {type(function).__name__}. Pass "
            "the function or module itself, and its arguments after it"
        )
    if not kwargs:
        return torch_checkpoint.checkpoint(function, *args, use_reentrant=False)
    # torch has keyword arguments of its own, and looks for devices, whose generators it saves, among the others only.
    names = tuple(kwargs)
    count = len(args)

    def call(*given: Any) -> Any:
        return function(*given[:count], **dict(zip(names, given[count:], strict=True)))

    return torch_checkpoint.checkpoint(call, *args, *kwargs.values(), use_reentrant=False)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`checkpoint`, which is non-reentrant in any case."""
    return checkpoint(function, *args, **kwargs)
