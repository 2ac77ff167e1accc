"""Lossy communication: methods that send fewer bytes than the values have, with error feedback."""

from shardwise.comm.compression.base import Compressor, Flat
from shardwise.comm.compression.onebit import OnebitAllReduce, message_bytes, pack_signs, unpack_signs
from shardwise.comm.compression.quantize import BlockCode
from shardwise.comm.compression.quantized import Feedback, Hops, QuantizedReduction

__all__ = [
    "BlockCode",
    "Compressor",
    "Feedback",
    "Flat",
    "Hops",
    "OnebitAllReduce",
    "QuantizedReduction",
    "message_bytes",
    "pack_signs",
    "unpack_signs",
]
