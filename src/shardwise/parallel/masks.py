"""Attention masks of whole sequences, of which each rank has a range of tokens.

A rank cannot build the mask of a whole sequence when a model of transformers requests it. The model gets a placeholder
of shape (rows, own tokens, number of the `Pattern`) instead, because shapes survive any processing of masks between
layers. The attention builds the mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.errors import UsageError
from shardwise.parallel.sequence import Layout


@dataclass(frozen=True)
class Pattern:
    """Mask pattern: the keys visible to a query, by position in the sequence."""

    causal: bool = True  # only earlier keys and the query's own
    window: int | None = None  # only keys at a distance below this; None: all
    padded: bool = False  # the model has a padding mask
    packed: bool = False  # samples separated by positions do not see each other

    def sees(self, query: Any, key: Any) -> Any:
        """Return where queries see keys, for broadcasting positions."""
        found = query >= key if self.causal else (query >= 0) & (key >= 0)
        if self.window is not None:
            found = found & (query - key < self.window)
            if not self.causal:
                found = found & (key - query < self.window)
        return found


_patterns: list[Pattern] = []  # by number minus one

# Supported components of mask functions of transformers; packing is detected from positions.
_LEAVES = {
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay",
    "sliding_window_bidirectional_overlay",
    "packed_sequence_mask_function",
    "remap_positions_for_packed_sequence",
    "and_masks",
}


def pattern_of(function: Callable[..., Any], padded: bool, packed: bool) -> Pattern:
    """Return the pattern of a mask function of transformers; raises a UsageError for an unsupported component."""
    causal, window = False, None
    for name, part in _parts(function):
        if name not in _LEAVES:
            raise UsageError(
                f"this model makes attention masks of its own kind ({name}), which cannot be made of a rank's tokens "
                "alone: set sequence_parallel_size to 1"
            )
        causal = causal or name in ("causal_mask_function", "sliding_window_overlay")
        if name.startswith("sliding_window"):
            (width,) = (cell.cell_contents for cell in part.__closure__ or ())
            window = int(width) + (
                name == "sliding_window_bidirectional_overlay"
            )  # its window includes the distance itself
    return Pattern(causal, window, padded, packed)


def _parts(function: Any) -> Iterator[tuple[str, Any]]:
    yield function.__qualname__.partition(".")[0], function
    for cell in getattr(function, "__closure__", None) or ():
        inner = cell.cell_contents
        for part in inner if isinstance(inner, tuple) else (inner,):
            if callable(part):
                yield from _parts(part)


def carried(
    pattern: Pattern, kept: torch.Tensor | None, positions: torch.Tensor | None, rows: int, own: int, device: Any
) -> torch.Tensor:
    """Return the placeholder of a mask.

    `kept` marks this rank's tokens that are no padding. A packed pattern has the `positions` of the tokens.
    """
    if pattern not in _patterns:
        _patterns.append(pattern)
    number = _patterns.index(pattern) + 1
    values = torch.ones(rows, 1, dtype=torch.bool, device=device) if kept is None else kept.bool()
    if pattern.packed and positions is not None:
        values = positions
    return values.expand(rows, own).unsqueeze(-1).expand(rows, own, number)


def is_placeholder(mask: Any) -> bool:
    """Return True for a placeholder from `carried`."""
    return isinstance(mask, torch.Tensor) and mask.dim() == 3 and 0 < mask.shape[2] <= len(_patterns)


def carried_pattern(mask: Any, rows: int, own: int) -> Pattern | None:
    """Return the pattern of a placeholder from `carried`; None for other tensors."""
    return _patterns[mask.shape[2] - 1] if is_placeholder(mask) and mask.shape[:2] == (rows, own) else None


def samples_of(positions: torch.Tensor) -> torch.Tensor:
    """Return the sample index of each token; a sample begins where positions are not consecutive."""
    return (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)


@dataclass
class WholeMask:
    """The mask of a whole sequence, with padding and samples of its layout."""

    layout: Layout
    pattern: Pattern
    rows: int

    def __post_init__(self) -> None:
        self.kept = self.layout.kept
        positions = self.layout.positions if self.pattern.packed else None
        self.samples = None if positions is None else samples_of(positions)
        tokens = sum(self.layout.lengths)
        window = self.pattern.window
        self.window = window if window is not None and window < tokens else None
        self.plain = self.kept is None and self.samples is None and self.window is None

    def sees(self, row: Any, _: Any, query: Any, key: Any) -> Any:
        """Return where queries see keys, in the signature of flex attention."""
        found = self.pattern.sees(query, key)
        if self.samples is not None:
            found = found & (self.samples[row, query] == self.samples[row, key])
        if self.kept is not None:
            found = found & self.kept[row, key]
        return found

    def dense(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return True where a query sees a key, both by position; (rows or 1, 1, queries, keys)."""
        rows = 1 if self.kept is None and self.samples is None else self.rows
        row = torch.arange(rows, device=queries.device).view(-1, 1, 1, 1)
        found: torch.Tensor = self.sees(row, None, queries.view(1, 1, -1, 1), keys.view(1, 1, 1, -1))
        return found.expand(rows, 1, len(queries), len(keys))

    def of_kind(self, kind: str, dtype: torch.dtype, device: torch.device) -> Any:
        """Return the mask in the format of a single-process attention; None if not needed."""
        if kind.startswith("flash") or kind == "block_sparse":
            return self.kept
        key = (kind, self.pattern, self.rows, dtype)
        if key not in self.layout.masks:
            self.layout.masks[key] = self._made(kind, dtype, device)
        return self.layout.masks[key]

    def _made(self, kind: str, dtype: torch.dtype, device: torch.device) -> Any:
        tokens = sum(self.layout.lengths)
        if kind == "flex_attention":
            from torch.nn.attention.flex_attention import create_block_mask

            per_row = self.rows if self.samples is not None or self.kept is not None else None

            def sees(
                row: Any, head: Any, query: Any, key: Any
            ) -> Any:  # a function, because torch counts the `self` of a method
                return self.sees(row, head, query, key)

            return create_block_mask(sees, per_row, None, tokens, tokens, device=str(device))
        if self.plain and (kind == "sdpa" or not self.pattern.causal):
            return None
        positions = torch.arange(tokens, device=device)
        mask = self.dense(positions, positions)
        if kind == "sdpa":
            return mask.expand(self.rows, -1, -1, -1)
        return torch.where(mask, torch.zeros((), dtype=dtype, device=device), torch.finfo(dtype).min)
