"""Offloading: places for state other than the device, and which of them an engine's plan asks for."""

from shardwise.offload.disk import DiskPlace, Disks
from shardwise.offload.homes import PLACES, homes_of
from shardwise.offload.host import HostPlace

__all__ = ["PLACES", "DiskPlace", "Disks", "HostPlace", "homes_of"]
