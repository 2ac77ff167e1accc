"""What a method of lossy gradient reduction is given, and what it has to do.

A unit is reduced once per reducing backward pass, in one order on all ranks; so a method may use any number of
collectives of the kind "reduce" for it. What a method keeps between reductions (what has not been sent yet) belongs to
this rank alone: it is saved with the rank's own state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
        """Block until the sums are in place; collectives that need the results of earlier ones are launched here."""


class Kept:
    """Tensors that a method keeps between reductions, by name, each at the scale of the last reduction.

    Args:
        device: where they live.
        hold: counts each of them.

    Example:
        >>> kept = Kept(torch.device("cpu"), lambda tensor: None)
        >>> kept.at("error", 2, torch.float32, scale=1.0).fill_(3.0)
        tensor([3., 3.])
        >>> kept.at("error", 2, torch.float32, scale=2.0)
        tensor([6., 6.])
    """

    def __init__(self, device: torch.device, hold: Callable[[torch.Tensor], None]) -> None:
        self._device = device
        self._hold = hold
        self._tensors: dict[str, torch.Tensor] = {}
        self._scales: dict[str, float] = {}

    def at(self, name: str, numel: int, dtype: torch.dtype, scale: float) -> torch.Tensor:
        """Return a 1-D tensor, brought to a scale; zeros if there is none of this name."""
        tensor = self._tensors.get(name)
        if tensor is None:
            tensor = self.put(name, torch.zeros(numel, dtype=dtype, device=self._device))
        elif self._scales.get(name, scale) != scale:
            tensor.mul_(scale / self._scales[name])
        self._scales[name] = scale
        return tensor

    def get(self, name: str) -> torch.Tensor | None:
        """Return a tensor as it is, or None if there is none of this name."""
        return self._tensors.get(name)

    def put(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Keep a tensor that has no scale; returns it."""
        self._hold(tensor)
        self._tensors[name] = tensor
        return tensor

    def clean(self) -> None:
        """Replace what is not finite by zero."""
        for tensor in self._tensors.values():
            torch.nan_to_num_(tensor, 0.0, 0.0, 0.0)

    def drop(self, chosen: Callable[[str], bool]) -> None:
        """Forget the tensors of some names."""
        self._tensors = {name: tensor for name, tensor in self._tensors.items() if not chosen(name)}
        self._scales = {name: scale for name, scale in self._scales.items() if not chosen(name)}

    def clear(self) -> None:
        """Forget everything."""
        self._tensors, self._scales = {}, {}

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors themselves (not copies) and their scales."""
        return {"tensors": dict(self._tensors), "scales": dict(self._scales)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over copies of saved tensors."""
        self.clear()
        for name, tensor in state["tensors"].items():
            self.put(name, tensor.to(self._device, copy=True))
        self._scales = dict(state["scales"])


class Compressor:
    """Base of the methods of lossy reduction: counts steps, and keeps what has not been sent.

    Args:
        start: steps at the beginning that are reduced exactly.
        device: where gradients live.
        hold: counts a buffer until it is given back.

    Attributes:
        steps: steps that have ended, skipped ones included.
    """

    def __init__(self, start: int, device: torch.device, hold: Callable[[torch.Tensor], None]) -> None:
        self.start = start
        self.steps = 0
        self.hold = hold
        self.kept = Kept(device, hold)

    def reduce(
        self, flats: Sequence[Flat], label: str, *, accumulate: bool, scale: float, wire_dtype: torch.dtype | None
    ) -> Reduction:
        """Launch the reduction of one unit: `own` (and `whole`) = (itself if `accumulate` else 0) + sum over ranks.

        A value that is not finite on some rank must make one of some rank's sums infinite or NaN: ranks then agree on
        skipping the step.

        Args:
            flats: its sections.
            label: for records.
            accumulate: add to what is there; the first reduction in a step does not.
            scale: what divides a sum over ranks to give the gradient that is stepped: loss scale, micro-batches and
                ranks are in it. What is kept from reductions at another scale has to be brought to this one.
            wire_dtype: type in which the configuration wants values to travel, for methods that send any; None: the
                method chooses.
        """
        raise NotImplementedError

    def end_step(self, applied: bool) -> None:
        """Count a step; what is kept is finite again if the step was skipped because of an overflow (not `applied`)."""
        self.steps += 1
        if not applied:
            self.kept.clean()

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept, for this rank's part of a checkpoint: tensors and plain values."""
        return self.kept.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was kept, saved under the same layout and by the same method."""
        self.kept.load_state_dict(state)

    def clear(self) -> None:
        """Forget what is kept."""
        self.kept.clear()


def is_active(compressor: Compressor | None) -> bool:
    """Whether the next reductions are compressed (the same on all ranks)."""
    return compressor is not None and compressor.steps >= compressor.start


class Running:
    """A reduction under way: launched collectives, and what is to be done when they are complete.

    Args:
        pending: the collectives.
        finish: what is to be done then.
        scratch: buffers that are held until then.
    """

    def __init__(
        self, pending: Sequence[Reduction], finish: Callable[[], None], scratch: Sequence[torch.Tensor] = ()
    ) -> None:
        self.scratch = [*scratch, *(buffer for handle in pending for buffer in handle.scratch)]
        self._pending = list(pending)
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        """Block until the sums are in place; later calls do nothing."""
        for handle in self._pending:
            handle.wait()
        if self._finish is not None:
            self._finish()
        self._pending, self._finish, self.scratch = [], None, []


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which gradients of a type are kept and compressed: fp32, or fp64 for fp64."""
    return torch.float64 if dtype is torch.float64 else torch.float32
