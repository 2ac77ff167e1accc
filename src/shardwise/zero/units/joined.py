"""Gradients of a flat parameter that stay where autograd has put them until one call copies them together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.compat import copy_together


class GradientPlaces:
    """Where the gradients of a flat parameter belong in its flat gradient.

    Args:
        numel: elements of the flat gradient.
        slots: first element and number of elements of each gradient, in ascending order, none overlapping another.
    """

    def __init__(self, numel: int, slots: Sequence[tuple[int, int]]) -> None:
        self.numel = numel
        self.slots = list(slots)
        ends = [0, *(first + count for first, count in self.slots)]
        self._end = ends[-1]
        # What one call can copy together: each gradient has elements, and the next one begins where it ends.
        self._solid = all(count and end == first for (first, count), end in zip(self.slots, ends, strict=False))
        self._gaps = [first - end for (first, _), end in zip([*self.slots, (numel, 0)], ends, strict=True)]

    def join(self, gradients: Sequence[torch.Tensor | None], flat: torch.Tensor) -> None:
        """Copy gradients into the flat gradient, and put zeros where there are none."""
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


class GradientList:
    """The gradients of one flat parameter that have arrived; absent ones are zero.

    Args:
        places: where they belong.
        dtype: in which they are joined.

    Attributes:
        tensors: the gradients, by number; None: absent.
        counted: their bytes that an accountant has been given as a sum.
    """

    def __init__(self, places: GradientPlaces, dtype: torch.dtype) -> None:
        self.places = places
        self.dtype = dtype
        self.counted = 0
        self.tensors: list[torch.Tensor | None] = [None] * len(places.slots)

    def put(self, number: int, values: torch.Tensor) -> torch.Tensor:
        """Keep a gradient, or add it to the one that is there; return what is kept."""
        known = self.tensors[number]
        if known is None and values.dim():
            kept = values.detach() if values.requires_grad else values
        elif known is None:
            kept = values.detach().reshape(-1)
        else:
            # Not in place: autograd may have given the same memory out twice.
            kept = known.reshape(-1).to(self.dtype) + values.detach().reshape(-1)
        self.tensors[number] = kept
        return kept
