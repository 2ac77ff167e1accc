"""What a training may cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shardwise.errors import ConfigError

from .base import ConfigSection, Contradiction, Int, key


class CostBudget(ConfigSection):
    """`cost_budget`: a plan of time has to say that the training costs no more, else nothing begins. Not a section of
    DeepSpeed.
    """

    amount: float | None = key(None, "Most that the training may cost, in any currency; null: any.", gt=0)
    rank_hour: float = key(1.0, "Price of a rank for an hour.", gt=0)
    steps: Int | None = key(None, "Steps of the training.", gt=0)
    rates: str | None = key(
        None,
        'File of `shardwise bench machine`. With it, what is left to "auto" is the fastest that fits, also without '
        "an amount; without it the cheapest in memory tiers and bytes sent.",
    )

    def contradictions(self, at: Callable[[str], str]) -> Iterator[Contradiction]:
        """Yield an amount that nothing can be compared with."""
        for name in ("steps", "rates"):
            if self.amount is not None and getattr(self, name) is None:
                yield "amount", f"needs {at(name)}: a price is steps x time of a step x ranks", ConfigError
