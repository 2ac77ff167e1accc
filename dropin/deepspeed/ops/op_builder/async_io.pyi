from shardwise_deepspeed.operators import AsyncIOBuilder as AsyncIOBuilder

__all__ = ["AsyncIOBuilder"]
