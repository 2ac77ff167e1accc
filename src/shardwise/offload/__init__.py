"""Offloading: places for state other than the device, which of them an engine's plan asks for, and activations."""

from shardwise.offload.activations import ActivationOffload, offload_activations
from shardwise.offload.disk import DiskPlace, Disks
from shardwise.offload.homes import PLACES, homes_of
from shardwise.offload.host import HostPlace

__all__ = [
    "PLACES",
    "ActivationOffload",
    "DiskPlace",
    "Disks",
    "HostPlace",
    "homes_of",
    "offload_activations",
]
