"""All ranks enter the same call before its first collective: `initialize`, `zero.Init`, `tp_model_init`.

A rank that has entered another call, or has refused its arguments, is named at once. Without this its peers would wait
for the whole limit of a collective. Each rank makes three requests to the default group's store, and polls it while it
waits; the work of the store grows linearly with the number of ranks.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shardwise.comm import groups
from shardwise.comm.meeting import REFUSED
from shardwise.compat import default_store
from shardwise.errors import DesyncError

_TEXT = 2000
"""Characters of an error that the other ranks are told."""


class _Calls:
    """Numbers of the calls that this process has entered, since its default group was made."""

    def __init__(self) -> None:
        self._default: object = None
        self._count = 0

    def next(self) -> str:
        """Return the key of the next call: the same on all ranks that have made the same calls."""
        if self._default is not dist.group.WORLD:
            self._default, self._count = dist.group.WORLD, 0
        self._count += 1
        return f"entry/{self._count}"


_calls = _Calls()


def enter(what: str, timeout: timedelta) -> None:
    """Wait until all ranks of the default group have entered a call.

    Args:
        what: the call, such as "initialize()".
        timeout: limit for the wait.

    Raises:
        DesyncError: a rank has entered another call, or has refused its arguments.
        LaunchError: a rank has ended, or has not come within the limit.
    """
    store, name = default_store(), _calls.next()
    if store is None:
        return
    rank, world = dist.get_rank(), dist.get_world_size()
    own = groups.meeting_store(name, store)
    first, _, known = _text(own.compare_set("call", "", f"{rank}:{what}")).partition(":")
    if known != what:
        _publish(own, f"rank {rank} is in {what}, and rank {first} in {known}. All ranks make the same calls")
        raise DesyncError(f"{what}: {_text(own.get(REFUSED))}")  # not counted: the others wait until they read this
    groups.await_ranks(range(world), timeout, name, f"the meeting in {what}")


def refuse(what: str, error: BaseException) -> None:
    """Tell ranks that are waiting in `enter` that this rank has refused the call (it counts as entered here)."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    store, name = default_store(), _calls.next()
    if store is not None:
        text = f"{type(error).__name__}: {error}"[:_TEXT]
        _publish(groups.meeting_store(name, store), f"rank {dist.get_rank()} has refused its arguments with {text}")


def _publish(store: dist.Store, text: str) -> None:
    try:
        store.compare_set(REFUSED, "", text)
    except RuntimeError:
        return  # the store has gone, and with it the ranks that would read this


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
