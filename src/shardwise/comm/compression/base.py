"""What a method of lossy gradient reduction is given, and what it has to do.

A unit is reduced once per reducing backward pass, in one order on all ranks; so a method may use any number of
collectives of the kind "reduce" for it. What a method keeps between reductions (what has not been sent yet) belongs to
this rank alone: it is saved with the rank's own state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class Flat:
    """The gradients of one section of a unit.

    Attributes:
        name: the same on all ranks and in every run; what is kept between reductions goes by it.
        full: this rank's gradients, 1-D, world * S elements, with zeros between parameters; free to be overwritten.
        own: where the sum over ranks of this rank's range goes: S elements, in the dtype of sums.
        whole: where the whole sum goes if every rank keeps it (`own` is a view of it); else None.
        shapes: first element and shape of each parameter in `full`.
    """

    name: str
    full: torch.Tensor
    own: torch.Tensor
    whole: torch.Tensor | None
    shapes: Sequence[tuple[int, torch.Size]]


class Reduction(Protocol):
    """A reduction under way."""

    @property
    def scratch(self) -> Sequence[torch.Tensor]:
        """Buffers that `wait()` gives back."""

    def wait(self) -> None:
        """Block until the sums are in place."""


class Compressor(Protocol):
    """One method of lossy reduction, with what it keeps."""

    @property
    def active(self) -> bool:
        """Whether the next reductions are compressed (the same on all ranks); otherwise they are exact."""

    def reduce(self, flats: Sequence[Flat], label: str, *, accumulate: bool, scale: float) -> Reduction:
        """Launch the reduction of one unit: `own` (and `whole`) = (itself if `accumulate` else 0) + sum over ranks.

        Args:
            flats: its sections.
            label: for records.
            accumulate: add to what is there.
            scale: what the gradients are multiplied by (the loss scale). What is kept from reductions at another scale
                has to be brought to this one.
        """

    def end_step(self, applied: bool) -> None:
        """A step has ended; `applied` is false if it was skipped because of an overflow."""

    def kept_bytes(self, numel: int, shapes: Sequence[torch.Size], world: int) -> int:
        """Return what is kept between reductions of a section of `numel` elements, for the memory plan."""

    def scratch_bytes(self, numel: int, shapes: Sequence[torch.Size], world: int) -> int:
        """Return the most that one reduction of such a section needs besides `full`, for the memory plan."""

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept, for this rank's part of a checkpoint: tensors and plain values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was kept, saved under the same layout."""
