"""Smaller models: the section `compression_training` (quantization, pruning, layer reduction), and distillation."""

from shardwise.compression.clean import init_compression, redundancy_clean, student_initialization
from shardwise.compression.compress import Compression
from shardwise.compression.distillation import Distillation

__all__ = ["Compression", "Distillation", "init_compression", "redundancy_clean", "student_initialization"]
