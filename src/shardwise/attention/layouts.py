"""Layouts of block-sparse attention: which blocks of keys each block of queries attends to.

| Class | Pattern |
|---|---|
| `FixedSparsityConfig` | windows, of which some blocks are global (Child et al., Sparse Transformers, 1904.10509) |
| `VariableSparsityConfig` | windows of several sizes, global and random blocks |
| `BigBirdSparsityConfig` | sliding window, first blocks global, random blocks (Zaheer et al., 2007.14062) |
| `BSLongformerSparsityConfig` | sliding window and global blocks (Beltagy et al., 2004.05150) |
| `LocalSlidingWindowSparsityConfig` | sliding window |
| `DenseSparsityConfig` | all blocks |

A layout is an int64 tensor (heads, blocks, blocks) with 1 where queries of a row's block attend to keys of a column's
block. With `attention="unidirectional"` the layout has no block above the diagonal, and `SparseSelfAttention` hides
later tokens in the blocks of the diagonal too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from shardwise.config import resolve
from shardwise.config.schema.attention import SparseAttention
from shardwise.errors import ConfigError

ONE_WAY, BOTH_WAYS = "unidirectional", "bidirectional"


class SparsityConfig:
    """Base of the layouts. A subclass defines `make_layout`, or `fill`.

    Args:
        num_heads: attention heads of the layer.
        block: tokens of a block's side.
        different_layout_per_head: each head has a layout; False: all have that of the first head.
    """

    attention = BOTH_WAYS

    def __init__(self, num_heads: int, block: int = 16, different_layout_per_head: bool = False) -> None:
        for name, value in (("num_heads", num_heads), ("block", block)):
            _check(self, value >= 1, f"{name}={value}: must be at least 1")
        self.num_heads, self.block = num_heads, block
        self.different_layout_per_head = different_layout_per_head
        self.num_layout_heads = num_heads if different_layout_per_head else 1

    def setup_layout(self, seq_len: int) -> torch.Tensor:
        """Return a layout of zeros; a last block may be incomplete."""
        blocks = -(-seq_len // self.block)
        return torch.zeros(self.num_heads, blocks, blocks, dtype=torch.int64, device="cpu")

    def check_and_propagate_first_head_layout(self, layout: torch.Tensor) -> torch.Tensor:
        """Give all heads the first head's layout, unless `different_layout_per_head`; return the tensor."""
        if not self.different_layout_per_head:
            layout[1:] = layout[:1]
        return layout

    def make_layout(self, seq_len: int) -> torch.Tensor:
        """Return the layout of sequences of `seq_len` tokens: int64, (heads, blocks, blocks), on the CPU."""
        layout = self.setup_layout(seq_len)
        for head in range(self.num_layout_heads):
            self.fill(layout[head], head)
        if self.attention == ONE_WAY:
            layout.tril_()
        return self.check_and_propagate_first_head_layout(layout)

    def fill(self, layout: torch.Tensor, head: int) -> None:
        """Set a head's blocks to 1 in place, (blocks, blocks); those above the diagonal are cleared as needed."""
        raise NotImplementedError(f"{type(self).__name__} has neither make_layout nor fill")

    # -- parts of patterns ---------------------------------------------------------------------------------------------

    def _set_direction(self, attention: str, horizontal: bool = False) -> None:
        _check(self, attention in (ONE_WAY, BOTH_WAYS), f"attention={attention!r}: write {ONE_WAY!r} or {BOTH_WAYS!r}")
        _check(
            self,
            not horizontal or attention == BOTH_WAYS,
            f"horizontal_global_attention lets global blocks attend to later ones: write attention={BOTH_WAYS!r}",
        )
        self.attention = attention

    def _slide(self, layout: torch.Tensor, width: int) -> None:
        layout |= torch.ones_like(layout).tril_(width // 2).triu_(-(width // 2))

    def _scatter(self, layout: torch.Tensor, head: int, count: int, seed: int) -> None:
        blocks = len(layout)
        for row in range(blocks):
            among = row + 1 if self.attention == ONE_WAY else blocks
            # Text as a seed gives the same numbers in each process and version of Python.
            layout[row, random.Random(f"{seed} {head} {row}").sample(range(among), min(count, among))] = 1


def _check(config: SparsityConfig, holds: bool, problem: str) -> None:
    if not holds:
        raise ConfigError(f"{type(config).__name__}: {problem}")


class DenseSparsityConfig(SparsityConfig):
    """All blocks; arguments as `SparsityConfig`."""

    def fill(self, layout: torch.Tensor, head: int) -> None:
        """Set all blocks."""
        layout.fill_(1)


class FixedSparsityConfig(SparsityConfig):
    """Windows of blocks; some blocks of each window are global (Sparse Transformers).

    Args:
        num_heads: as `SparsityConfig`.
        block: as `SparsityConfig`.
        different_layout_per_head: as `SparsityConfig`.
        num_local_blocks: blocks of a window.
        num_global_blocks: consecutive blocks of a window that represent it: all rows attend to them. A divisor of
            `num_local_blocks`.
        attention: "unidirectional" or "bidirectional".
        horizontal_global_attention: global blocks also attend to all blocks.
        num_different_global_patterns: heads take turns in so many positions of the global blocks in a window, from the
            last blocks to earlier ones.
    """

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_local_blocks: int = 4,
        num_global_blocks: int = 1,
        attention: str = BOTH_WAYS,
        horizontal_global_attention: bool = False,
        num_different_global_patterns: int = 1,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        self._set_direction(attention, horizontal_global_attention)
        self.num_local_blocks, self.num_global_blocks = num_local_blocks, num_global_blocks
        self.horizontal_global_attention = horizontal_global_attention
        self.num_different_global_patterns = num_different_global_patterns
        whole = 1 <= num_global_blocks <= num_local_blocks and num_local_blocks % num_global_blocks == 0
        _check(self, whole, f"num_global_blocks={num_global_blocks} must divide num_local_blocks={num_local_blocks}")
        patterns, most = num_different_global_patterns, num_local_blocks // num_global_blocks
        _check(
            self,
            1 <= patterns <= most,
            f"num_different_global_patterns={patterns}: a window of {num_local_blocks} blocks has {most} positions "
            f"for {num_global_blocks} global blocks",
        )
        _check(
            self,
            patterns == 1 or different_layout_per_head,
            f"num_different_global_patterns={patterns} needs different_layout_per_head=True",
        )

    def fill(self, layout: torch.Tensor, head: int) -> None:
        """Set windows, and the head's global blocks; those of an incomplete window are its last ones."""
        blocks, size, count = len(layout), self.num_local_blocks, self.num_global_blocks
        position = size - (1 + head % self.num_different_global_patterns) * count
        for first in range(0, blocks, size):
            layout[first : first + size, first : first + size] = 1
            start = max(0, min(first + position, blocks - count))
            layout[:, start : start + count] = 1
            if self.horizontal_global_attention:
                layout[start : start + count] = 1


class _Indexed(SparsityConfig):
    global_block_indices: Sequence[int]
    global_block_end_indices: Sequence[int] | None

    def _set_globals(self, starts: Sequence[int] | None, ends: Sequence[int] | None) -> None:
        starts = [0] if starts is None else list(starts)
        self.global_block_indices, self.global_block_end_indices = starts, None if ends is None else list(ends)
        _check(
            self, ends is None or len(ends) == len(starts), f"global_block_end_indices={ends}: one for each of {starts}"
        )
        for first, end in self._ranges():
            _check(self, 0 <= first < end, f"global blocks from {first} to before {end}: the range is empty")

    def _ranges(self) -> Iterator[tuple[int, int]]:
        ends = self.global_block_end_indices
        yield from zip(
            self.global_block_indices, [i + 1 for i in self.global_block_indices] if ends is None else ends, strict=True
        )

    def _set_global_blocks(self, layout: torch.Tensor, horizontal: bool) -> None:
        for first, end in self._ranges():
            layout[:, first:end] = 1
            if horizontal:
                layout[first:end] = 1


class VariableSparsityConfig(_Indexed):
    """Windows of several sizes, global blocks by number, and random blocks.

    Args:
        num_heads: as `SparsityConfig`.
        block: as `SparsityConfig`.
        different_layout_per_head: as `SparsityConfig`.
        num_random_blocks: random blocks of each row, drawn with `seed`.
        local_window_blocks: blocks of the first windows; the last number is that of all further windows.
        global_block_indices: first blocks of global ranges. Blocks after the sequence are left out.
        global_block_end_indices: ends (exclusive) of global ranges; None: ranges of one block.
        attention: "unidirectional" or "bidirectional".
        horizontal_global_attention: global blocks also attend to all blocks.
        seed: of the random blocks, which are equal on all ranks.
    """

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 0,
        local_window_blocks: Sequence[int] = (4,),
        global_block_indices: Sequence[int] = (0,),
        global_block_end_indices: Sequence[int] | None = None,
        attention: str = BOTH_WAYS,
        horizontal_global_attention: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        self._set_direction(attention, horizontal_global_attention)
        self._set_globals(global_block_indices, global_block_end_indices)
        self.num_random_blocks, self.local_window_blocks, self.seed = num_random_blocks, list(local_window_blocks), seed
        self.horizontal_global_attention = horizontal_global_attention
        _check(self, num_random_blocks >= 0, f"num_random_blocks={num_random_blocks}: must be at least 0")
        sizes = self.local_window_blocks
        _check(self, min(sizes, default=0) >= 1, f"local_window_blocks={sizes}: one or more numbers of at least 1")

    def fill(self, layout: torch.Tensor, head: int) -> None:
        """Set random blocks, windows and global blocks."""
        self._scatter(layout, head, self.num_random_blocks, self.seed)
        first, number, sizes = 0, 0, self.local_window_blocks
        while first < len(layout):
            end = first + sizes[min(number, len(sizes) - 1)]
            layout[first:end, first:end] = 1
            first, number = end, number + 1
        self._set_global_blocks(layout, self.horizontal_global_attention)


class BigBirdSparsityConfig(SparsityConfig):
    """A sliding window, global first blocks, and random blocks (BigBird, internal transformer construction).

    Args:
        num_heads: as `SparsityConfig`.
        block: as `SparsityConfig`.
        different_layout_per_head: as `SparsityConfig`.
        num_random_blocks: random blocks of each row, drawn with `seed`.
        num_sliding_window_blocks: blocks of the window, half of them on each side of the row's own.
        num_global_blocks: first blocks that all rows attend to, and that attend to all.
        attention: "unidirectional" or "bidirectional".
        seed: of the random blocks, which are equal on all ranks.
    """

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 1,
        num_sliding_window_blocks: int = 3,
        num_global_blocks: int = 1,
        attention: str = BOTH_WAYS,
        seed: int = 0,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        self._set_direction(attention)
        self.num_random_blocks, self.seed = num_random_blocks, seed
        self.num_sliding_window_blocks, self.num_global_blocks = num_sliding_window_blocks, num_global_blocks
        counts = (("random", num_random_blocks, 0), ("global", num_global_blocks, 0))
        for name, value, least in (*counts, ("sliding_window", num_sliding_window_blocks, 1)):
            _check(self, value >= least, f"num_{name}_blocks={value}: must be at least {least}")

    def fill(self, layout: torch.Tensor, head: int) -> None:
        """Set random blocks, the window and the first blocks."""
        self._scatter(layout, head, self.num_random_blocks, self.seed)
        self._slide(layout, self.num_sliding_window_blocks)
        layout[:, : self.num_global_blocks] = 1
        layout[: self.num_global_blocks] = 1


class BSLongformerSparsityConfig(_Indexed):
    """A sliding window and global blocks by number (Longformer, in blocks).

    Args:
        num_heads: as `SparsityConfig`.
        block: as `SparsityConfig`.
        different_layout_per_head: as `SparsityConfig`.
        num_sliding_window_blocks: blocks of the window, half of them on each side of the row's own.
        global_block_indices: first blocks of global ranges, which all rows attend to, and which attend to all.
        global_block_end_indices: ends (exclusive) of global ranges; None: ranges of one block.
        attention: "unidirectional" or "bidirectional".
    """

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_sliding_window_blocks: int = 3,
        global_block_indices: Sequence[int] = (0,),
        global_block_end_indices: Sequence[int] | None = None,
        attention: str = BOTH_WAYS,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        self._set_direction(attention)
        self._set_globals(global_block_indices, global_block_end_indices)
        self.num_sliding_window_blocks = width = num_sliding_window_blocks
        _check(self, width >= 1, f"num_sliding_window_blocks={width}: must be at least 1")

    def fill(self, layout: torch.Tensor, head: int) -> None:
        """Set the window and the global blocks."""
        self._slide(layout, self.num_sliding_window_blocks)
        self._set_global_blocks(layout, horizontal=True)


class LocalSlidingWindowSparsityConfig(SparsityConfig):
    """A sliding window.

    Args:
        num_heads: as `SparsityConfig`.
        block: as `SparsityConfig`.
        num_sliding_window_blocks: blocks of the window, half of them on each side of the row's own.
        attention: "unidirectional" or "bidirectional".
    """

    def __init__(
        self, num_heads: int, block: int = 16, num_sliding_window_blocks: int = 3, attention: str = ONE_WAY
    ) -> None:
        super().__init__(num_heads, block)
        self._set_direction(attention)
        self.num_sliding_window_blocks = width = num_sliding_window_blocks
        _check(self, width >= 1, f"num_sliding_window_blocks={width}: must be at least 1")

    def fill(self, layout: torch.Tensor, head: int) -> None:
        """Set the window."""
        self._slide(layout, self.num_sliding_window_blocks)


MODES: dict[str, type[SparsityConfig]] = {
    "dense": DenseSparsityConfig,
    "fixed": FixedSparsityConfig,
    "variable": VariableSparsityConfig,
    "bigbird": BigBirdSparsityConfig,
    "bslongformer": BSLongformerSparsityConfig,
    "local_sliding_window": LocalSlidingWindowSparsityConfig,
}


def layout_of(section: SparseAttention | Mapping[str, Any], num_heads: int) -> SparsityConfig:
    """Return the layout of the section `sparse_attention` of a configuration, for a number of heads.

    Raises a ConfigError if a dictionary is no such section.

    >>> layout_of({"mode": "fixed", "block": 4}, num_heads=1).make_layout(24)[0]
    tensor([[1, 1, 1, 1, 0, 1],
            [1, 1, 1, 1, 0, 1],
            [1, 1, 1, 1, 0, 1],
            [1, 1, 1, 1, 0, 1],
            [0, 0, 0, 1, 1, 1],
            [0, 0, 0, 1, 1, 1]])
    """
    if isinstance(section, Mapping):
        given = resolve({"train_batch_size": 1, "sparse_attention": dict(section)}).config.sparse_attention
        section = SparseAttention() if given is None else given
    return MODES[section.mode](num_heads, **section.arguments())
