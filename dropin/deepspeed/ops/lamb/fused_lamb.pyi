from shardwise.optim import Lamb as FusedLamb

__all__ = ["FusedLamb"]
