"""Whether an engine's state is where it is used, or has been moved off the device for a while."""

from __future__ import annotations

from enum import Enum

from shardwise.errors import UsageError


class OffloadStateTypeEnum(str, Enum):
    """Kinds of state that `engine.offload_states()` moves."""

    optim_states = "optim_states"
    """What the optimizer keeps for each element."""
    hp_params = "hp_params"
    """Master weights. Where the optimizer steps the parameters themselves there are none."""
    lp_params = "lp_params"
    """The parameters: this rank's shards, or whole ones where they are not sharded."""
    lp_grads = "lp_grads"
    """Gradients that have been reduced, in the accumulator of this rank."""
    contiguous_grad_buffer = "contiguous_grad_buffer"
    """Gradients of an unfinished window that are still to be reduced."""


class Presence:
    """Knows which kinds of state have been moved, so that nobody uses them meanwhile.

    Attributes:
        away: these kinds.
    """

    def __init__(self) -> None:
        self.away: frozenset[OffloadStateTypeEnum] = frozenset()

    def require(self, what: str, *, values: bool = False) -> None:
        """Raise if something is not there.

        Args:
            what: cannot be done without it; the subject of the message.
            values: it needs the parameters only.

        Raises:
            UsageError: see above.
        """
        missing = self.away & {OffloadStateTypeEnum.lp_params} if values else self.away
        if missing:
            names = ", ".join(kind.value for kind in OffloadStateTypeEnum if kind in missing)
            raise UsageError(
                f"{what}: {names} have been moved to the host by engine.offload_states(). Call engine.reload_states() "
                "on every rank first"
            )
