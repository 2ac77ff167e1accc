"""What differs between kinds of device."""

from shardwise.device.choice import choose_device

__all__ = ["choose_device"]
