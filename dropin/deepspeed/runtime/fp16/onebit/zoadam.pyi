from shardwise.optim import ZeroOneAdam as ZeroOneAdam

__all__ = ["ZeroOneAdam"]
