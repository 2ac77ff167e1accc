"""Buffers that collect the gradients of one flat parameter during backward passes.

A `FlatGradient` copies each gradient into a flat tensor when it arrives. A `GradientList` keeps the tensors of autograd
until the last one has arrived, and copies all of them in one call, which costs a device fewer launches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from typing_extensions import override

from shardwise.compat import copy_together
from shardwise.memory import Accountant, Category


class GradientPlaces:
    """Positions of gradients in a flat gradient: (first element, number of elements), ascending, without overlap."""

    def __init__(self, numel: int, slots: Sequence[tuple[int, int]]) -> None:
        self.numel = numel
        self.slots = list(slots)
        ends = [0, *(first + count for first, count in self.slots)]
        self._end = ends[-1]
        # Every gradient has elements and begins at the end of the last one: one call can copy all.
        self._solid = all(count and end == first for (first, count), end in zip(self.slots, ends, strict=False))
        self._gaps = [first - end for (first, _), end in zip([*self.slots, (numel, 0)], ends, strict=True)]

    def join(self, gradients: Sequence[torch.Tensor | None], flat: torch.Tensor) -> None:
        """Copy gradients into the flat gradient, and zero the rest."""
        there = [gradient for gradient in gradients if gradient is not None]
        alike = len(there) == len(gradients) and len({gradient.dtype for gradient in there}) == 1
        if self._solid and alike:
            copy_together(flat if self._end == self.numel else flat[: self._end], there)
            if self._end < self.numel:
                flat[self._end :].zero_()
            return
        # Gaps and places in turn.
        sizes = [
            size for pair in zip(self._gaps, [*(count for _, count in self.slots), 0], strict=True) for size in pair
        ]
        views = flat.split_with_sizes(sizes)
        empty = [gap for gap in views[::2] if gap.numel()]
        empty += [place for place, one in zip(views[1::2], gradients, strict=False) if one is None and place.numel()]
        if empty:
            torch._foreach_zero_(empty)
        if there:
            places = [place for place, one in zip(views[1::2], gradients, strict=False) if one is not None]
            torch._foreach_copy_(places, [gradient.reshape(-1) for gradient in there])

    def zero_rest(self, flat: torch.Tensor, present: Sequence[bool]) -> None:
        """Zero the flat gradient except at gradients that are present."""
        # Zeroing the whole buffer beforehand would write every byte once more.
        end = 0
        for (first, count), there in zip(self.slots, present, strict=True):
            if there:
                if end < first:
                    flat[end:first].zero_()
                end = first + count
        if end < self.numel:
            flat[end:].zero_()


class GradientBuffer(ABC):
    """Collects the gradients of one flat parameter into `flat` (None: no memory yet); `present` has them by number."""

    flat: torch.Tensor | None = None

    def __init__(self, places: GradientPlaces) -> None:
        self.places = places
        self.present = [False] * len(places.slots)

    @abstractmethod
    def put(self, number: int, gradient: torch.Tensor) -> None:
        """Add a dense gradient, by its number in the flat parameter."""

    @abstractmethod
    def complete(self) -> torch.Tensor:
        """Return the flat gradient, with zeros for absent gradients. No gradient is added afterwards."""

    @abstractmethod
    def free(self) -> None:
        """Stop counting the bytes of gradients outside of `flat`."""


class FlatGradient(GradientBuffer):
    """Adds gradients to `flat`, whose other content is undefined before `complete`."""

    flat: torch.Tensor

    def __init__(self, places: GradientPlaces, flat: torch.Tensor) -> None:
        super().__init__(places)
        self.flat = flat
        self._completed = False

    @override
    def put(self, number: int, gradient: torch.Tensor) -> None:
        first, count = self.places.slots[number]
        place, values = self.flat[first : first + count], gradient.detach().reshape(-1)
        if self.present[number]:
            place.add_(values)
        else:
            place.copy_(values)
            self.present[number] = True

    @override
    def complete(self) -> torch.Tensor:
        if not self._completed:
            self.places.zero_rest(self.flat, self.present)
            self._completed = True
        return self.flat

    @override
    def free(self) -> None: ...


class GradientList(GradientBuffer):
    """Keeps autograd's tensors (sums have `dtype`), until one call copies them into the tensor that `make` returns.

    If the tensor is not counted yet, its bytes count as a communication buffer.
    """

    def __init__(
        self, places: GradientPlaces, dtype: torch.dtype, make: Callable[[], torch.Tensor], accountant: Accountant
    ) -> None:
        super().__init__(places)
        self._dtype = dtype
        self._make = make
        self._accountant = accountant
        self._counted = 0
        self._tensors: list[torch.Tensor | None] = [None] * len(places.slots)

    @override
    def put(self, number: int, gradient: torch.Tensor) -> None:
        known = self._tensors[number]
        if known is None and gradient.dim():
            kept = gradient.detach() if gradient.requires_grad else gradient
        elif known is None:
            kept = gradient.detach().reshape(-1)
        else:
            # Not in place, because autograd may have returned the same memory twice.
            kept = known.reshape(-1).to(self._dtype) + gradient.detach().reshape(-1)
        self._tensors[number] = kept
        self.present[number] = True
        if self._accountant.trackers:
            self._accountant.hold(Category.BUFFERS, kept)
        else:
            # Because the tensors are freed together, their bytes are counted as a sum, which costs less.
            size = kept.nbytes
            self._counted += size
            self._accountant.add(Category.BUFFERS, size)

    @override
    def complete(self) -> torch.Tensor:
        if self.flat is None:
            self.flat = self._make()
            self._accountant.hold(Category.BUFFERS, self.flat)
            self.places.join(self._tensors, self.flat)
            self._tensors = []
            self.free()
        return self.flat

    @override
    def free(self) -> None:
        size, self._counted = self._counted, 0
        if size:
            self._accountant.remove(Category.BUFFERS, size)
