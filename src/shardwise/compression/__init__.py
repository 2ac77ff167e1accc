"""Smaller models: quantization-aware training, pruning, layer reduction (section `compression_training`)."""

from shardwise.compression.clean import init_compression, redundancy_clean, student_initialization
from shardwise.compression.compress import Compression

__all__ = ["Compression", "init_compression", "redundancy_clean", "student_initialization"]
