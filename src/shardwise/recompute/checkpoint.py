"""Activation checkpointing of a function call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint

from shardwise.errors import UsageError
from shardwise.recompute.partitioned import dividing
from shardwise.recompute.rng_tracker import drawing_again, get_cuda_rng_tracker
from shardwise.recompute.selective import Selective, selective_contexts
from shardwise.recompute.settings import Settings, count_call, in_force, mover, sharing
from shardwise.recompute.timing import TIMER


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function and keep its inputs instead of its activations; the backward pass calls it again.

    This is torch's non-reentrant checkpointing (`use_reentrant=False`): inputs need no gradient, arguments and results
    may be nested, closures may use other tensors, and `torch.autograd.grad` works. Recomputation restores the RNG state
    (dropout), on the CPU and on the devices of the arguments, and autocast. The function must be deterministic for
    equal arguments. `configure` and an engine's section `activation_checkpointing` can offload the inputs to the host,
    time the calls, and keep outputs of some operators.

    Raises:
        UsageError: `function` is not callable.

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
        return _checkpointed(function, args, kwargs, None)
    count_call()
    return _attended(settings, function, args, kwargs)


def _checkpointed(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], selective: Selective | None
) -> Any:
    states = get_cuda_rng_tracker().get_states()
    contexts: Any = {"context_fn": lambda: _contexts(selective, states)} if states or selective else {}
    if not kwargs:
        return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, **contexts)
    # torch's checkpoint has keyword arguments of its own. It saves the RNG state only for devices of positional
    # arguments.
    names = tuple(kwargs)
    count = len(args)

    def call(*given: Any) -> Any:
        return function(*given[:count], **dict(zip(names, given[count:], strict=True)))

    return torch_checkpoint.checkpoint(call, *args, *kwargs.values(), use_reentrant=False, **contexts)


def _contexts(
    selective: Selective | None, states: dict[str, torch.Tensor]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    forward, again = (nullcontext(), nullcontext()) if selective is None else selective_contexts(selective)
    return forward, _Drawing(states, again) if states else again


class _Drawing:
    """Context of a recomputation that repeats random numbers; entered again if the graph was retained."""

    def __init__(self, states: dict[str, torch.Tensor], inner: AbstractContextManager[Any]) -> None:
        self._states, self._inner = states, inner

    def __enter__(self) -> None:
        self._stack = ExitStack()
        self._stack.enter_context(drawing_again(self._states))
        self._stack.enter_context(self._inner)

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)


def _attended(settings: Settings, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    waits = settings.synchronize and torch.cuda.is_available() and torch.cuda.is_initialized()
    moved: Any = nullcontext()
    if settings.checkpoint_in_cpu:
        offload = mover()
        if settings.contiguous_checkpointing:
            offload.keep_buffers()
        moved = offload.around()
    if waits:
        torch.cuda.synchronize()
    # Inside the function torch's own saved-tensor hooks apply, so only the inputs are offloaded.
    with moved, dividing(sharing() if settings.partition_activations else None):
        if settings.profile:
            name = type(function).__name__ if isinstance(function, torch.nn.Module) else _name_of(function)
            outputs = TIMER.call(
                name, lambda timed: _checkpointed(timed, args, kwargs, settings.selective), function, (args, kwargs)
            )
        else:
            outputs = _checkpointed(function, args, kwargs, settings.selective)
    if waits:
        torch.cuda.synchronize()
    return outputs


def _name_of(function: Callable[..., Any]) -> str:
    inner = getattr(function, "func", function)
    return str(getattr(inner, "__qualname__", type(inner).__name__))
