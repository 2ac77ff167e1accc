"""`sparse_attention`: the layout of block-sparse attention."""

from __future__ import annotations

from typing import Any, Literal

from shardwise.errors import ConfigError, ConflictError

from .base import At, ConfigSection, Contradictions, Int, Ints, key

_HEADS = "block different_layout_per_head"
_RANGES = "global_block_indices global_block_end_indices"
_WINDOW = "num_sliding_window_blocks"
_ALL_WAYS = "attention horizontal_global_attention"
KEYS: dict[str, list[str]] = {
    "dense": _HEADS.split(),
    "fixed": f"{_HEADS} num_local_blocks num_global_blocks {_ALL_WAYS} num_different_global_patterns".split(),
    "variable": f"{_HEADS} num_random_blocks local_window_blocks {_RANGES} {_ALL_WAYS} seed".split(),
    "bigbird": f"{_HEADS} num_random_blocks {_WINDOW} num_global_blocks attention seed".split(),
    "bslongformer": f"{_HEADS} {_WINDOW} {_RANGES} attention".split(),
    "local_sliding_window": f"block {_WINDOW} attention".split(),
}
"""Keys of each mode, which are the arguments of its class in `shardwise.attention`."""


class SparseAttention(ConfigSection):
    """`sparse_attention`: blocks of tokens that attend to each other, in models of transformers
    (`shardwise.attention.sparsify`) and in `SparseSelfAttention` layers of a script.
    """

    mode: Literal["dense", "fixed", "variable", "bigbird", "bslongformer", "local_sliding_window"] = key(
        "fixed", "The layout; dense: ordinary attention."
    )
    block: Int = key(16, "Tokens of a block's side.", gt=0)
    different_layout_per_head: bool = key(False, "Each head has a layout; false: all have that of the first head.")
    num_local_blocks: Int = key(4, "Blocks of a window (fixed).", gt=0)
    num_global_blocks: Int = key(
        1, "Blocks of each window (fixed), or first blocks (bigbird), that all blocks attend to.", ge=0
    )
    attention: Literal["unidirectional", "bidirectional"] = key(
        "bidirectional", "unidirectional: tokens attend to themselves and earlier ones."
    )
    horizontal_global_attention: bool = key(False, "Global blocks attend to all blocks (fixed, variable).")
    num_different_global_patterns: Int = key(
        1, "Positions of the global blocks in a window, in which heads take turns (fixed).", gt=0
    )
    num_random_blocks: Int = key(0, "Random blocks of each row (variable, bigbird).", ge=0)
    local_window_blocks: Ints = key(
        [4], "Blocks of the first windows; the last number is that of all further ones (variable)."
    )
    global_block_indices: Ints = key([0], "First blocks of global ranges (variable, bslongformer).")
    global_block_end_indices: Ints | None = key(
        None, "Ends (exclusive) of global ranges; null: one block each (variable, bslongformer)."
    )
    num_sliding_window_blocks: Int = key(
        3, "Blocks of the sliding window (bigbird, bslongformer, local_sliding_window).", gt=0
    )
    seed: Int = key(0, "Seed of random blocks, which are equal on all ranks. Not a key of DeepSpeed.", ge=0)

    def arguments(self) -> dict[str, Any]:
        """Return the values of the mode's keys."""
        return {name: getattr(self, name) for name in KEYS[self.mode]}

    def contradictions(self, at: At) -> Contradictions:
        """Yield counts that do not fit each other."""
        keys, local, count = KEYS[self.mode], self.num_local_blocks, self.num_global_blocks
        if self.mode == "fixed":
            if count < 1 or local % count:
                yield (
                    "num_global_blocks",
                    f"is {count}; it must divide {at('num_local_blocks')} = {local}",
                    ConflictError,
                )
            elif self.num_different_global_patterns > local // count:
                yield (
                    "num_different_global_patterns",
                    f"is {self.num_different_global_patterns}; a window has {local // count} positions of them",
                    ConflictError,
                )
            elif self.num_different_global_patterns > 1 and not self.different_layout_per_head:
                yield "num_different_global_patterns", f"needs {at('different_layout_per_head')} true", ConflictError
        one_way = self.attention == "unidirectional"
        if one_way and self.horizontal_global_attention and "horizontal_global_attention" in keys:
            message = f"lets blocks attend to later ones; write {at('attention')} bidirectional"
            yield "horizontal_global_attention", message, ConflictError
        if self.mode == "variable" and min(self.local_window_blocks, default=0) < 1:
            yield "local_window_blocks", "needs one or more numbers of at least 1", ConfigError
        if "global_block_indices" in keys:
            starts, ends = self.global_block_indices, self.global_block_end_indices
            if min(starts, default=0) < 0:
                yield "global_block_indices", "has a number below 0", ConfigError
            if ends is not None and (
                len(ends) != len(starts) or any(end <= first for first, end in zip(starts, ends, strict=True))
            ):
                message = f"needs an end for each of {at('global_block_indices')} = {starts}, and greater"
                yield "global_block_end_indices", message, ConflictError
