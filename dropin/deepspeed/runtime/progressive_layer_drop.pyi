from shardwise.data import ProgressiveLayerDrop as ProgressiveLayerDrop

__all__ = ["ProgressiveLayerDrop"]
