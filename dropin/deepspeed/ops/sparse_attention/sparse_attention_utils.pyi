from shardwise_deepspeed.sparse import SparseAttentionUtils as SparseAttentionUtils

__all__ = ["SparseAttentionUtils"]
