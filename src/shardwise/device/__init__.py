"""Device abstraction: device choice, CUDA streams and events, pinned host memory, staged copies, profiler ranges."""

from shardwise.device.choice import choose_device
from shardwise.device.streams import Later, numbers_on

__all__ = ["Later", "choose_device", "numbers_on"]
