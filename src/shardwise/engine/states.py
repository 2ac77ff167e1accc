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
