from shardwise_deepspeed.sparse import BertSparseSelfAttention as BertSparseSelfAttention

__all__ = ["BertSparseSelfAttention"]
