"""Calling a function so that its activations are computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint

from shardwise.errors import UsageError
from shardwise.recompute.partitioned import dividing
from shardwise.recompute.rng_tracker import drawing_again, get_cuda_rng_tracker
from shardwise.recompute.settings import Settings, in_force, mover, sharing
from shardwise.recompute.timing import TIMER


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function and keep its inputs instead of its activations; the backward pass calls it again.

    It is torch's checkpointing without a second autograd graph (`use_reentrant=False`): inputs need no gradient,
    arguments and results may be nested, other tensors may be used from within, and `torch.autograd.grad` works. Random
    numbers are drawn again as they were (dropout), on the CPU and on the devices of the arguments, and autocast is as
    it was.

    `configure` and the section `activation_checkpointing` of an engine's configuration may have the inputs kept on the
    host, and the calls timed.

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
    settings = in_force()
    if not settings:
        return _checkpointed(function, args, kwargs)
    return _attended(settings, function, args, kwargs)


def _checkpointed(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    contexts: Any = (
        {} if not (states := get_cuda_rng_tracker().get_states()) else {"context_fn": lambda: _drawing(states)}
    )
    if not kwargs:
        return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, **contexts)
    # torch has keyword arguments of its own, and looks for devices, whose generators it saves, among the others only.
    names = tuple(kwargs)
    count = len(args)

    def call(*given: Any) -> Any:
        return function(*given[:count], **dict(zip(names, given[count:], strict=True)))

    return torch_checkpoint.checkpoint(call, *args, *kwargs.values(), use_reentrant=False, **contexts)


def _drawing(states: dict[str, torch.Tensor]) -> tuple[Any, Any]:
    """Return contexts of the call and of its repetition, which draws the same numbers from the tracker's states."""
    return nullcontext(), drawing_again(states)


def _attended(settings: Settings, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a checkpointed call with what the settings ask for around it."""
    waits = settings.synchronize and torch.cuda.is_available() and torch.cuda.is_initialized()
    moved: Any = nullcontext()
    if settings.checkpoint_in_cpu:
        offload = mover()
        if settings.contiguous_checkpointing:
            offload.keep_buffers()
        moved = offload.around()
    if waits:
        torch.cuda.synchronize()
    # Inside of the function torch's own hooks are in force, so that no more than the inputs is moved.
    with moved, dividing(sharing() if settings.partition_activations else None):
        if settings.profile:
            name = type(function).__name__ if isinstance(function, torch.nn.Module) else _name_of(function)
            outputs = TIMER.call(name, lambda timed: _checkpointed(timed, args, kwargs), function, (args, kwargs))
        else:
            outputs = _checkpointed(function, args, kwargs)
    if waits:
        torch.cuda.synchronize()
    return outputs


def _name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function, a method, or what `functools.partial` has made of one."""
    inner = getattr(function, "func", function)
    return str(getattr(inner, "__qualname__", type(inner).__name__))


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`checkpoint`, which is non-reentrant in any case."""
    return checkpoint(function, *args, **kwargs)
