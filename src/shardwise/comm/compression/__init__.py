"""Lossy communication: methods that send fewer bytes than the values have, and what makes up for it."""

from shardwise.comm.compression.base import Compressor, Flat, Reduction
from shardwise.comm.compression.onebit import OnebitAllReduce, message_bytes, pack_signs, unpack_signs

__all__ = [
    "Compressor",
    "Flat",
    "OnebitAllReduce",
    "Reduction",
    "message_bytes",
    "pack_signs",
    "unpack_signs",
]
