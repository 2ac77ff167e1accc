"""A flat tensor that lies in pieces: gradients that are reduced from where autograd has put them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from shardwise.compat import copy_together


class Run(NamedTuple):
    """Elements of a range of a flat tensor that lie in one piece, or in none.

    Attributes:
        piece: number of the piece; None between pieces, where the flat tensor is zero.
        start, stop: where the run lies, counted from the start of the range.
        offset: where it begins in the piece.
    """

    piece: int | None
    start: int
    stop: int
    offset: int


class Places:
    """Where the pieces of a flat tensor lie.

    Args:
        numel: elements of the flat tensor.
        slots: first element and number of elements of each piece, in ascending order, none overlapping another.

    Example:
        >>> Places(8, [(0, 3), (4, 4)]).runs(2, 6)
        [Run(piece=0, start=0, stop=1, offset=2), Run(piece=None, start=1, stop=2, offset=0), \
Run(piece=1, start=2, stop=4, offset=0)]
    """

    def __init__(self, numel: int, slots: Sequence[tuple[int, int]]) -> None:
        self.numel = numel
        self.slots = list(slots)
        self._chunks: dict[tuple[int, int, int], list[list[Run]]] = {}
        ends = [0, *(first + count for first, count in self.slots)]
        self._end = ends[-1]
        # What one call can copy together: each piece has elements, and the next one begins where it ends.
        self._solid = all(count and end == first for (first, count), end in zip(self.slots, ends, strict=False))
        self._gaps = [first - end for (first, _), end in zip([*self.slots, (numel, 0)], ends, strict=True)]

    def runs(self, start: int, stop: int) -> list[Run]:
        """Return the runs of a range, which cover it without a gap."""
        found, done = [], start
        for number, (first, numel) in enumerate(self.slots):
            low, high = max(first, start), min(first + numel, stop)
            if low >= high:
                continue
            if done < low:
                found.append(Run(None, done - start, low - start, 0))
            found.append(Run(number, low - start, high - start, low - first))
            done = high
        if done < stop:
            found.append(Run(None, done - start, stop - start, 0))
        return found

    def chunks(self, start: int, stop: int, size: int) -> list[list[Run]]:
        """Return the runs of a range in chunks of at most `size` elements (worked out once)."""
        key = (start, stop, size)
        if key not in self._chunks:
            self._chunks[key] = [self.runs(first, min(first + size, stop)) for first in range(start, stop, size)]
        return self._chunks[key]

    def join(self, pieces: Sequence[torch.Tensor | None], flat: torch.Tensor) -> None:
        """Copy pieces into the flat tensor, and put zeros where there are none."""
        there = [piece for piece in pieces if piece is not None]
        alike = len(there) == len(pieces) and len({piece.dtype for piece in there}) == 1
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
        empty += [place for place, piece in zip(views[1::2], pieces, strict=False) if piece is None and place.numel()]
        if empty:
            torch._foreach_zero_(empty)
        if there:
            places = [place for place, piece in zip(views[1::2], pieces, strict=False) if piece is not None]
            torch._foreach_copy_(places, [piece.reshape(-1) for piece in there])


class Pieces:
    """The pieces of one flat tensor, as far as they are there; the others are zero.

    Args:
        places: where they lie.
        dtype: of all of them.
        joined: they are copied together before anybody reads them, and may lie as they like.

    Attributes:
        tensors: 1-D and contiguous, unless they are joined; or None.
        told: their bytes, as far as an accountant counts them by their number.
    """

    def __init__(self, places: Places, dtype: torch.dtype, *, joined: bool = False) -> None:
        self.places = places
        self.dtype = dtype
        self.joined = joined
        self.told = 0
        self.tensors: list[torch.Tensor | None] = [None] * len(places.slots)

    def numel(self) -> int:
        """Elements of the flat tensor."""
        return self.places.numel

    def element_size(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    def put(self, number: int, values: torch.Tensor) -> torch.Tensor:
        """Make values a piece, or add them to the one that is there; return the piece.

        They are kept as they are if they fill their memory in order; otherwise they are copied.
        """
        known = self.tensors[number]
        if self.joined and known is None and values.dim():
            self.tensors[number] = kept = values.detach() if values.requires_grad else values
            return kept
        flat = values.detach().reshape(-1)
        if known is not None:
            # Not in place: autograd may have given the same memory out twice.
            flat = known.reshape(-1).to(self.dtype) + flat
        elif flat.untyped_storage().nbytes() != flat.nbytes or not flat.is_contiguous():
            flat = flat.clone(memory_format=torch.contiguous_format)
        self.tensors[number] = flat
        return flat
