from shardwise.data import RandomLayerTokenDrop as RandomLayerTokenDrop

__all__ = ["RandomLayerTokenDrop"]
