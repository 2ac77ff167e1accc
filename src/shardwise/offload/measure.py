"""Measurement of disk bandwidth, with the engine's transfers and with a plain loop, and of host-device bandwidth."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from shardwise.device.staging import copy_stream
from shardwise.offload.files import DiskOptions
from shardwise.offload.tmpfile import move_all, open_tmpfile, padded, paged, take_space
from shardwise.offload.transfers import Threads, Values

TOLERANCE = 0.03
"""Relative slowdown at which a smaller setting is preferred to the fastest; measurements vary by as much."""

MEASURED = 64 << 20
"""Bytes of a measurement before training."""

_STEP = 16 << 20


class Speed(NamedTuple):
    """Bytes a second; None: not measured."""

    write: float | None
    read: float | None

    @property
    def time(self) -> float:
        """Seconds to transfer a byte in each measured direction."""
        return sum(1 / speed for speed in self if speed)


class Way(NamedTuple):
    """One way of transferring a file: bytes of a request, concurrent requests.

    `plain`: a loop of bare system calls in each of as many threads, instead of a `SwapFile`.
    """

    block: int
    in_flight: int
    plain: bool = False


def settings(blocks: Iterable[int], depths: Iterable[int], threads: Iterable[int]) -> list[DiskOptions]:
    """Return all combinations that differ for the disk.

    >>> [(one.queue_depth, one.threads) for one in settings([4096], [4, 8], [1, 2])]
    [(4, 1), (8, 1), (8, 2)]
    """
    found: dict[Way, DiskOptions] = {}
    for block, count, depth in product(blocks, sorted(threads), depths):
        one = DiskOptions(block, depth, count)
        found.setdefault(way(one), one)
    return list(found.values())


def way(options: DiskOptions) -> Way:
    """Return the transfer parameters of disk options."""
    return Way(padded(options.block_size), options.in_flight)


def smallest(speeds: dict[DiskOptions, Speed]) -> DiskOptions:
    """Return the setting with the fewest bytes in flight among those about as fast as the fastest.

    >>> slow, fast, faster = DiskOptions(queue_depth=1), DiskOptions(queue_depth=2), DiskOptions(queue_depth=4)
    >>> smallest({slow: Speed(1, 2), faster: Speed(2.02, 2), fast: Speed(2, 2)}) == fast
    True
    """
    most = min(speed.time for speed in speeds.values()) * (1 + TOLERANCE)
    good = [options for options, speed in speeds.items() if speed.time <= most]
    return min(good, key=lambda options: (options.block_size * options.in_flight, options.in_flight))


class MeasuredFile:
    """Temporary file of `size` bytes, transferred in several ways from and to the same memory.

    `block` is the largest request in bytes. Raises OffloadError if the file cannot be created.
    """

    def __init__(self, directory: Path, size: int, block: int) -> None:
        self._file = open_tmpfile(directory, padded(block))
        self.direct = self._file.direct
        try:
            take_space(self._file.descriptor, directory, 0, padded(size), f"a file in {directory}")
        except BaseException:
            self.close()
            raise
        self._directory = directory
        self._memory = paged(size)
        source = np.random.default_rng(0)
        for start in range(0, size, _STEP):  # random data, which no disk compresses
            self._memory[start : start + _STEP] = np.frombuffer(source.bytes(min(_STEP, size - start)), np.uint8)
        self._written: dict[int, Values] = {}  # by the size of blocks

    def close(self) -> None:
        """Release the space."""
        os.close(self._file.descriptor)

    def speeds(
        self,
        ways: Sequence[Way],
        rounds: int,
        *,
        write: bool = True,
        read: bool = True,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[Speed]:
        """Measure each way once a round (other load affects all alike); return the medians.

        `progress` receives the number of finished passes and of all passes. Raises OffloadError or OSError of the disk.
        """
        for block in {one.block for one in ways if not one.plain}:
            # The first pass over reserved space is slower than later ones; and reads need the checksums.
            if block not in self._written:
                self._move(Way(block, 8), True)
        kinds = [kind for kind, wanted in ((True, write), (False, read)) if wanted]
        passes = [(number, one, kind) for number, one in enumerate(ways) for kind in kinds] * rounds
        seconds: dict[tuple[int, bool], list[float]] = {}
        for done, (number, one, kind) in enumerate(passes):
            progress(done, len(passes))
            seconds.setdefault((number, kind), []).append((self._loop if one.plain else self._move)(one, kind))
        progress(len(passes), len(passes))

        def speed(number: int, kind: bool) -> float | None:
            measured = seconds.get((number, kind))
            return self._memory.size / statistics.median(measured) if measured else None

        return [Speed(speed(number, True), speed(number, False)) for number in range(len(ways))]

    def _move(self, one: Way, writes: bool) -> float:
        own = self._file._replace(descriptor=os.dup(self._file.descriptor))
        threads = Threads(own, one.block, one.in_flight, f"a file in {self._directory}")
        try:
            memory = torch.from_numpy(self._memory)
            threads.begin(Values(0), memory[:0], writes=True).wait()  # starts the threads
            begun = time.perf_counter()
            threads.begin(self._written.setdefault(one.block, Values(0)), memory, writes=writes).wait()
            return time.perf_counter() - begun
        finally:
            threads.close()

    def _loop(self, one: Way, writes: bool) -> float:
        call = os.pwritev if writes else os.preadv
        whole = self._memory[: self._memory.size - self._memory.size % one.block]
        ended = threading.Event()

        def work(number: int) -> None:
            for place in range(number * one.block, whole.size, one.in_flight * one.block):
                if ended.is_set():
                    return
                move_all(call, self._file.descriptor, whole[place : place + one.block], place)

        begun = time.perf_counter()
        with ThreadPoolExecutor(one.in_flight) as threads:
            try:
                for loop in [threads.submit(work, number) for number in range(one.in_flight)]:
                    loop.result()
            finally:  # also after Ctrl-C: no thread may write to the closed file
                ended.set()
        return (time.perf_counter() - begun) * self._memory.size / max(1, whole.size)


def disk_speed(directory: Path, options: DiskOptions, size: int) -> tuple[float, float]:
    """Return the bytes a second of reading and of writing a temporary file of `size` bytes.

    Ranks that share a disk must measure together. Raises OffloadError if the disk has no space, or the file cannot be
    created.

    Example:
        >>> import tempfile
        >>> min(disk_speed(Path(tempfile.gettempdir()), DiskOptions(), 1 << 16)) > 0
        True
    """
    file = MeasuredFile(directory, size, options.block_size)
    try:
        write, read = file.speeds([way(options)], 1)[0]
        assert read and write
        return read, write
    finally:
        file.close()


def copy_speed(device: torch.device, size: int) -> tuple[float, float]:
    """Return the bytes a second of copies of `size` bytes of page-locked host memory to a device, and back."""
    copies = copy_stream(device)
    host, far = copies.host_bytes(size), torch.empty(size, dtype=torch.uint8, device=device)

    def speed(target: torch.Tensor, source: torch.Tensor) -> float:
        begun = time.perf_counter()
        copies.copy(target, source)
        copies.mark().synchronize()
        return size / (time.perf_counter() - begun)

    copies.follow()
    speed(host, far)  # the first copy is slower
    return speed(far, host), speed(host, far)
