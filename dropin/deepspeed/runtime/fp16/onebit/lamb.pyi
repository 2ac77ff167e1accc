from shardwise.optim import OnebitLamb as OnebitLamb

__all__ = ["OnebitLamb"]
