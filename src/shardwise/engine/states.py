"""Moving an engine's state off the device between steps: what a script may ask for."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from shardwise.errors import UsageError
from shardwise.memory import Tier
from shardwise.zero.units.presence import OffloadStateTypeEnum

if TYPE_CHECKING:
    from shardwise.zero.model import ShardedModel

_METHODS = ("offload_states", "reload_states")


class Moving(Protocol):
    """What is asked of an engine."""

    device: torch.device
    sharded: ShardedModel


def kinds_of(include: Iterable[OffloadStateTypeEnum | str] | None) -> list[OffloadStateTypeEnum]:
    """Return the kinds that are asked for; all, if nothing is said.

    Raises:
        UsageError: there is no such kind.
    """
    if include is None:
        return list(OffloadStateTypeEnum)
    try:
        return [OffloadStateTypeEnum(kind) for kind in ([include] if isinstance(include, str) else include)]
    except ValueError as error:
        names = ", ".join(kind.value for kind in OffloadStateTypeEnum)
        raise UsageError(f"engine.offload_states(include=...): {error}. There are {names}") from None


def check_device(device: Any) -> None:
    """Raise unless a device is the host.

    Raises:
        UsageError: it is another one.
    """
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
    """Move the engine's state to the host between steps, so that somebody else has the memory of the device.

    Everything comes back bit by bit with `reload_states`. Until then whatever needs what is away raises: forward
    passes, evaluation and `save_16bit_model` need the parameters; backward passes, steps and checkpoints need
    everything. Every rank calls it with the same arguments. What has been moved before stays there, and so does
    what lives on the host or on a disk by the configuration (`offload_optimizer`, `offload_param`).

    Whoever still refers to the memory of whole parameters (a `state_dict()`, a view) keeps it, with the values.
    Other memory is given back by force: tensors of `engine.optimizer` must not be read meanwhile. What lossy
    gradient reduction keeps, and buffers of modules, stay on the device.

    Args:
        include: kinds of state (`shardwise.zero.OffloadStateTypeEnum`), or their names: `optim_states`,
            `hp_params` (master weights; where the optimizer steps the parameters themselves these are they),
            `lp_params` (parameters), `lp_grads` and `contiguous_grad_buffer` (gradients of an unfinished window,
            reduced and still to be reduced). None: all.
        device: "cpu".
        pin_memory: page-lock the memory of the host, if the device is a CUDA device: copies are faster.
        non_blocking: return at once. The memory is free for what this process launches later; torch keeps it from
            other processes until `torch.cuda.empty_cache()`.

    Raises:
        UsageError: it is called inside of a pass, or of a block that gathers parameters; the optimizer is one of
            the 1-bit family, whose state is bound to the device; or an argument cannot be used.

    Example:
        >>> import shardwise
        >>> from shardwise.memory import Tier
        >>> engine, *_ = shardwise.initialize(
        ...     model=torch.nn.Linear(512, 512, bias=False),
        ...     config={"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}},
        ... )
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
    engine.sharded.offload_states(kinds_of(include), pinned=pin_memory, wait=not non_blocking)


def reload_states(engine: Moving, non_blocking: bool = False) -> None:
    """Bring back what `offload_states` has moved; nothing happens if there is nothing. Every rank calls it.

    Args:
        non_blocking: return at once; what is launched on the current stream comes behind the copies.

    Raises:
        UsageError: the engine has been destroyed.
    """
    engine.sharded.check_open("engine.reload_states()")
    engine.sharded.reload_states(wait=not non_blocking)


def give_methods(optimizer: torch.optim.Optimizer, engine: Any) -> None:
    """Let an optimizer have the engine's methods that move states: scripts call them on the one or the other."""
    there = weakref.ref(engine)

    def passed_on(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> None:
            getattr(there(), name)(*args, **kwargs)  # an engine that is gone has taken its methods back

        return call

    for name in _METHODS:
        vars(optimizer)[name] = passed_on(name)


def take_methods(optimizer: torch.optim.Optimizer) -> None:
    """Take off the optimizer what `give_methods` has given it."""
    for name in _METHODS:
        vars(optimizer).pop(name, None)


def get_state_devices(model: Moving, state: OffloadStateTypeEnum | str) -> set[torch.device]:
    """Return the devices on which an engine has state of a kind now; the processor stands for the memory of the host.

    Nothing is named for state that lives on a disk, or that there is none of.

    Args:
        model: the engine.
        state: a kind, or its name.

    Raises:
        UsageError: there is no such kind.
    """
    (kind,) = kinds_of([state])
    devices = {Tier.DEVICE: model.device, Tier.HOST: torch.device("cpu")}
    return {devices[tier] for tier in model.sharded.state_tiers(kind) if tier in devices}
