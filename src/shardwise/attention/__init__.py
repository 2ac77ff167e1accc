"""Block-sparse attention: layouts, a module, and models of transformers."""

from shardwise.attention.huggingface import is_sparse, sparsify
from shardwise.attention.layouts import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
    layout_of,
)
from shardwise.attention.positions import extend_positions
from shardwise.attention.sparse import SparseSelfAttention

__all__ = [
    "BSLongformerSparsityConfig",
    "BigBirdSparsityConfig",
    "DenseSparsityConfig",
    "FixedSparsityConfig",
    "LocalSlidingWindowSparsityConfig",
    "SparseSelfAttention",
    "SparsityConfig",
    "VariableSparsityConfig",
    "extend_positions",
    "is_sparse",
    "layout_of",
    "sparsify",
]
