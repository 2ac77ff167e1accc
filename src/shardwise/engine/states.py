"""Offload an engine's state to the host between steps, and reload it (`offload_states`, `reload_states`)."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from shardwise.errors import UsageError
from shardwise.memory import Tier
from shardwise.zero.units.presence import OffloadStateTypeEnum

if TYPE_CHECKING:
    from shardwise.engine.generation import Generation
    from shardwise.zero.model import ShardedModel

_METHODS = ("offload_states", "reload_states")

_WRITERS = ("eval", "train", "swap_swa_sgd")
"""Methods with which optimizers exchange parameters outside of `step`, such as schedule-free ones and SWA."""


class Moving(Protocol):
    """Protocol of an engine that can move its state."""

    device: torch.device
    sharded: ShardedModel
    _generation: Generation


def kinds_of(include: Iterable[OffloadStateTypeEnum | str] | None) -> list[OffloadStateTypeEnum]:
    """Return the selected kinds of state; None selects all. Raises a UsageError for an unknown kind."""
    if include is None:
        return list(OffloadStateTypeEnum)
    try:
        return [OffloadStateTypeEnum(kind) for kind in ([include] if isinstance(include, str) else include)]
    except ValueError as error:
        names = ", ".join(kind.value for kind in OffloadStateTypeEnum)
        raise UsageError(f"engine.offload_states(include=...): {error}. There are {names}") from None


def check_device(device: Any) -> None:
    """Raise a UsageError unless a device is the host ("cpu")."""
    named = getattr(device, "value", device)
    if str(named) != "cpu":
        raise UsageError(
            f'engine.offload_states(device={str(named)!r}): state is moved to the host; pass "cpu". State that is to '
            "live on a disk all the time is asked for by zero_optimization.offload_optimizer and offload_param"
        )


def offload_states(
    engine: Moving,
    include: Iterable[OffloadStateTypeEnum | str] | None = None,
    device: Any = "cpu",
    pin_memory: bool = True,
    non_blocking: bool = False,
) -> None:
    """Move the engine's state to the host between steps, to free device memory for other programs.

    `reload_states` restores every bit. Until then, calls that need offloaded state raise: forward passes, evaluation
    and `save_16bit_model` need the parameters; backward passes, steps and checkpoints need all state. Every rank calls
    with the same arguments. State that is on the host or a disk already stays there.

    References to the memory of unsharded parameters (a `state_dict()`, a view) keep memory and values. Other memory is
    freed by force: tensors of `engine.optimizer` must not be read meanwhile. Residuals of lossy gradient reduction and
    buffers of modules stay on the device.

    Args:
        include: kinds of state (`shardwise.zero.OffloadStateTypeEnum`), or their names: `optim_states`, `hp_params`
            (master weights; none where the optimizer steps the parameters directly), `lp_params` (parameters),
            `lp_grads` and `contiguous_grad_buffer` (reduced and unreduced gradients of an unfinished window). None:
            all.
        device: "cpu".
        pin_memory: use pinned host memory for a CUDA device, for faster copies.
        non_blocking: return at once. The memory is free for later launches of this process; torch reserves it from
            other processes until `torch.cuda.empty_cache()`.

    Raises:
        UsageError: inside a pass or a block that gathers parameters; the optimizer is of the 1-bit family, whose state
            cannot leave the device; or an argument is invalid.

    Example:
        >>> import shardwise
        >>> from shardwise.memory import Tier
        >>> config = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
        >>> engine, *_ = shardwise.initialize(model=torch.nn.Linear(512, 512, bias=False), config=config)
        >>> engine.offload_states()
        >>> sum(engine.accountant.live_in(Tier.DEVICE).values()) < 1000
        True
        >>> engine.reload_states()
        >>> engine(torch.ones(4, 512)).shape
        torch.Size([4, 512])
        >>> engine.destroy()
    """
    engine.sharded.check_open("engine.offload_states()")
    check_device(device)
    engine._generation.release()
    engine.sharded.moving.offload(kinds_of(include), pinned=pin_memory, wait=not non_blocking)


def reload_states(engine: Moving, non_blocking: bool = False) -> None:
    """Move the state offloaded by `offload_states` back, if any (all ranks call). A UsageError after `destroy()`.
    `non_blocking`: return at once; later work on the current stream is ordered after the copies.
    """
    engine.sharded.check_open("engine.reload_states()")
    engine.sharded.moving.reload(wait=not non_blocking)


def give_methods(optimizer: torch.optim.Optimizer, engine: Any) -> None:
    """Add `offload_states` and `reload_states` to the optimizer, because scripts call them on either object.

    The optimizer's own methods that write parameters become collectives, after which the model has the new values.
    """
    there = weakref.ref(engine)  # destroying the engine removes these methods

    def passed_on(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> None:
            getattr(there(), name)(*args, **kwargs)

        return call

    def publishing(name: str, original: Any) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            owner = there()
            assert owner is not None
            sharded: ShardedModel = owner.sharded
            sharded.check_there(f"optimizer.{name}()")
            # Schedule-free optimizers write nothing while the mode stays; trainers call train() for each micro-batch.
            modes = {group.get("train_mode") for group in optimizer.param_groups}
            if modes == {name == "train"} and name != "swap_swa_sgd":
                return original(*args, **kwargs)
            with sharded.state.writing_masters():
                return original(*args, **kwargs)

        return call

    for name in _METHODS:
        vars(optimizer)[name] = passed_on(name)
    for name in _WRITERS if engine.sharded.local is None else ():  # else replicas differ
        if callable(getattr(type(optimizer), name, None)):
            vars(optimizer)[name] = publishing(name, getattr(optimizer, name))


def take_methods(optimizer: torch.optim.Optimizer) -> None:
    """Remove the methods that `give_methods` has added."""
    for name in (*_METHODS, *_WRITERS):
        vars(optimizer).pop(name, None)


def get_state_devices(model: Moving, state: OffloadStateTypeEnum | str) -> set[torch.device]:
    """Return the devices that hold an engine's state of a kind (CPU: host memory; none: a disk, or no such state).
    Raises a UsageError for an unknown kind.
    """
    (kind,) = kinds_of([state])
    devices = {Tier.DEVICE: model.device, Tier.HOST: torch.device("cpu")}
    return {devices[tier] for tier in model.sharded.moving.tiers(kind) if tier in devices}
