"""Activations against the budget: measured in the first micro-batch, before the optimizer's state comes on top.

`initialize()` plans without a batch, so without activations. Between the first forward pass and its backward pass they
are all there, and what they take is what the process has got beyond what the engine knows of. It is measured once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from shardwise.engine.budget import Check, tightest
from shardwise.engine.exhausted import Circumstances, advice, searched
from shardwise.engine.plans import Planner
from shardwise.memory import Accountant, Category, Tier, like_cross_entropy, resident_bytes
from shardwise.memory.report import readable

SEARCH_S = 10.0
"""How long a setting that fits is looked for: training waits."""


@dataclass(frozen=True)
class Measured:
    """What activations of a micro-batch take on this rank; bytes.

    Attributes:
        near: where the device's tensors are.
        host: of those that have been moved to the host.
    """

    near: int
    host: int

    def of(self, tiers: Sequence[str]) -> int:
        """Return what counts on some tiers."""
        return self.near * (Tier.DEVICE.value in tiers) + self.host * (Tier.HOST.value in tiers)


class FirstActivations:
    """Measures activations in the first micro-batch, and tells whether there is room for them.

    Args:
        checks: what was planned without them, against limits.
        accountant: knows what the engine holds.
        device: the engine's.
        rank: this process's.
    """

    def __init__(self, checks: Sequence[Check], accountant: Accountant, device: torch.device, rank: int) -> None:
        self._accountant = accountant
        self._device = device
        self._checks = checks
        self._rank = rank
        self._before: int | None = None
        self._found: Measured | None = None

    def forward_begins(self) -> None:
        """The module is called for training."""
        if self._before is None:
            self._before = self._unknown()

    def backward_begins(self) -> None:
        """The loss is there, and so is all that autograd has saved."""
        if self._found is not None or self._before is None:
            return
        accountant = self._accountant
        near = accountant.live[Category.ACTIVATIONS] if accountant.tracked else self._unknown() - self._before
        if self._device.type == "cpu" and not accountant.tracked:
            # Where the processor stands for a device with a limit, the limit is for what the accountant counts.
            self._checks = [check for check in self._checks if check.tiers != (Tier.DEVICE.value,)]
        self._found = Measured(max(0, near), accountant.live_in(Tier.HOST)[Category.ACTIVATIONS])

    @property
    def known(self) -> bool:
        """Whether they have been measured."""
        return self._found is not None

    def told(self, circumstances: Callable[[], Circumstances]) -> str | None:
        """Return a warning if there is no room for planned memory and activations; None if there is, or others tell.

        Args:
            circumstances: asked if the two together, which need not be held at the same time, are more than there is.
        """
        found = self._found
        assert found is not None
        suspected = [
            check
            for check in self._checks
            if check.ranks[0] == self._rank
            and found.of(check.tiers)
            and check.needed + found.of(check.tiers) * len(check.ranks) > check.there
        ]
        return self._explained(suspected, found, circumstances()) if suspected else None

    def _explained(self, suspected: Sequence[Check], found: Measured, at: Circumstances) -> str | None:
        """Plan with the batch, and return what is said of those limits that are too small by that."""
        planner = Planner(at.subject, at.batch, like_cross_entropy)
        lines = []
        try:
            plan, why = planner.window(at.subject.setting)
        except Exception as error:  # an optimizer of the user's own, which runs in the dry run
            plan, why = None, f"{type(error).__name__}: {error}"
        for check in suspected:
            each = found.of(check.tiers)
            needed = check.needed + each * len(check.ranks)
            if plan is not None and not why:
                # Of those that are moved to the host the plan knows; what is saved may be more than it has been shown.
                unplanned = max(0, found.near - plan.peaks[Category.ACTIVATIONS])
                there = unplanned if Tier.DEVICE.value in check.tiers else 0
                needed = (check.room.taken(plan) + there) * len(check.ranks)
            if needed > check.there:
                where = " and ".join(check.tiers) + ("" if len(check.ranks) == 1 else f" for {len(check.ranks)} ranks")
                lines.append(
                    f"  {where}: {readable(needed)} with {readable(each * len(check.ranks))} of activations, and "
                    f"{readable(check.there)} are there ({check.limit})"
                )
        if not lines:
            return None
        first = (
            f"rank {self._rank}: memory will not last, now that the activations of a micro-batch are known (measured "
            "in the first one; initialize() plans without them)"
        )
        rooms = tightest([check.room for check in self._checks])
        try:
            plans, setting = searched(at, planner, rooms, SEARCH_S, "The first line is the setting that does not.")
            lines += [plans, advice(setting, at.subject, "fits")]
        except Exception as failure:  # see above
            lines.append(f"Other settings not planned ({type(failure).__name__}: {failure}).")
        if self._device.type != "cpu":
            lines.append(
                'Or have activations on the host ("activation_offload": {"enabled": true}), or recompute them '
                "(shardwise.checkpointing.checkpoint, torch.utils.checkpoint)."
            )
        return "\n".join([f"{first}:", *lines])

    def _unknown(self) -> int:
        """Return the bytes of this process that are not known to be the engine's."""
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device) - self._accountant.total
        held = resident_bytes() or 0
        return held - self._accountant.total - sum(self._accountant.live_in(Tier.HOST).values())
