"""Measurement of disk and host-device bandwidth before training."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import torch

from shardwise.device.staging import copy_stream
from shardwise.offload.files import DiskOptions, SwapFile
from shardwise.offload.tmpfile import aligned_bytes

MEASURED = 64 << 20
"""Bytes of a measurement."""


class Speed(NamedTuple):
    """Bytes a second of one rank: `read` to the device or host, `write` to the tier."""

    read: float
    write: float


def disk_speed(directory: Path, options: DiskOptions, size: int = MEASURED) -> Speed:
    """Measure writing and reading a temporary file of `size` bytes. Ranks that share a disk must measure together.

    Raises OffloadError if the disk has no space, or the file cannot be created.

    Example:
        >>> import tempfile
        >>> min(disk_speed(Path(tempfile.gettempdir()), DiskOptions(), 1 << 16)) > 0
        True
    """
    file = SwapFile(directory, options, label="a file to measure the disk with")
    try:
        memory = aligned_bytes(size)
        memory.fill_(1)
        extent = file.reserve(size)
        file.write(extent, memory[:1]).wait()  # starts the threads
        began = time.perf_counter()
        file.write(extent, memory).wait()
        written = time.perf_counter()
        file.read(extent, memory).wait()
        return Speed(size / (time.perf_counter() - written), size / (written - began))
    finally:
        file.close()


def copy_speed(device: torch.device, size: int = MEASURED) -> Speed:
    """Measure copying `size` bytes of page-locked host memory to a device and back."""
    copies = copy_stream(device)
    near, far = copies.host_bytes(size), torch.empty(size, dtype=torch.uint8, device=device)
    copies.follow()
    copies.copy(near, far)
    copies.mark().synchronize()
    began = time.perf_counter()
    copies.copy(far, near)
    copies.mark().synchronize()
    there = time.perf_counter()
    copies.copy(near, far)
    copies.mark().synchronize()
    return Speed(size / (there - began), size / (time.perf_counter() - there))
