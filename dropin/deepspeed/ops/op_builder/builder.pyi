from shardwise_deepspeed.operators import OpBuilder as OpBuilder

__all__ = ["OpBuilder"]
