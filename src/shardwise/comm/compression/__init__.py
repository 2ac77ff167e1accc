"""Lossy communication: methods that send fewer bytes than the values have, and what makes up for it."""

from shardwise.comm.compression.base import Compressor, Flat, Reduction, SectionSizes, is_active

__all__ = ["Compressor", "Flat", "Reduction", "SectionSizes", "is_active"]
