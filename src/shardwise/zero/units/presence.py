"""Record of state that `engine.offload_states()` has moved off the device."""

from __future__ import annotations

from enum import Enum

from shardwise.errors import UsageError


class OffloadStateTypeEnum(str, Enum):
    """Kinds of state that `engine.offload_states()` moves."""

    optim_states = "optim_states"
    """Optimizer state by element."""
    hp_params = "hp_params"
    """Master weights. None exist if the optimizer steps the parameters themselves."""
    lp_params = "lp_params"
    """Parameters: this rank's shards, or replicated parameters."""
    lp_grads = "lp_grads"
    """Reduced gradients, in the accumulator of this rank."""
    contiguous_grad_buffer = "contiguous_grad_buffer"
    """Gradients of an unfinished window that are not reduced yet."""


class Presence:
    """Records in `away` which kinds of state are on the host, and refuses their use."""

    def __init__(self) -> None:
        self.away: frozenset[OffloadStateTypeEnum] = frozenset()

    def require(self, what: str, *, values: bool = False) -> None:
        """Raise UsageError, with the operation `what`, if state (`values`: only parameters) is on the host."""
        missing = self.away & {OffloadStateTypeEnum.lp_params} if values else self.away
        if missing:
            names = ", ".join(kind.value for kind in OffloadStateTypeEnum if kind in missing)
            raise UsageError(
                f"{what}: {names} have been moved to the host by engine.offload_states(). Call engine.reload_states() "
                "on every rank first"
            )
