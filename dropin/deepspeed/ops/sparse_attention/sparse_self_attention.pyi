from shardwise.attention import SparseSelfAttention as SparseSelfAttention

__all__ = ["SparseSelfAttention"]
