"""What differs between kinds of device."""

from shardwise.device.choice import choose_device
from shardwise.device.later import Later, numbers_on

__all__ = ["Later", "choose_device", "numbers_on"]
