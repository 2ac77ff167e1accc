"""Offloading of parameters, gradients and optimizer state to host and disk, and of activations to the host."""

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
