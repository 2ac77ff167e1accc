from shardwise.optim import OnebitAdam as OnebitAdam

__all__ = ["OnebitAdam"]
