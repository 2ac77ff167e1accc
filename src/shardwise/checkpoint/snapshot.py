"""Snapshots: the bytes of a rank's file in host memory, from where another process writes them.

The memory is a mapped anonymous file: pages that both processes see, that have no name, count against no limit of
/dev/shm, and go back to the system when the last of the two has gone, however it ends. It is reused from save to save,
so that a save costs one copy of the state into pages that are there. It holds one snapshot, not two: a save that finds
it in use waits.

What lies on a device is copied by a stream of its own. Training goes on at once: the device's next operations wait for
the copies of what may change at any time, and the next writing of the rest, which only the optimizer writes, for all of
them (`copied`). On CUDA this has not been run; tests play the stream.
"""

from __future__ import annotations

import itertools
import mmap
import os
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from shardwise.checkpoint.protocols import Bring, at_hand
from shardwise.checkpoint.safetensors_reader import Spec
from shardwise.checkpoint.safetensors_writer import layout_of
from shardwise.device.pinned import pin, unpin
from shardwise.device.staging import Copied, CopyStream, copy_stream, is_far
from shardwise.errors import CheckpointError
from shardwise.memory import memory_limit
from shardwise.utils.logging import logger

_STEP = 1 << 16
"""Sizes are multiples of this: what differs by a digit of a counter from save to save does not move the memory."""


class Snapshot:
    """Memory of one rank for one snapshot at a time.

    Args:
        device: where the state lives; memory is pinned for a CUDA device where the system allows it.
        neighbours: ranks on this machine, which share its memory.
        resized: called with the bytes by which the memory grows or shrinks.

    Attributes:
        descriptor: of the mapped file, to be sent to the process that writes.
        size: bytes of memory held.
        copied: behind the copies of the last `take`; None: they were made at once.
    """

    def __init__(self, device: torch.device, neighbours: int = 1, resized: Callable[[int], None] | None = None) -> None:
        self._device = device
        self._neighbours = neighbours
        self._resized = resized or (lambda change: None)
        self._map: mmap.mmap | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._pinned = 0
        self._release: Callable[[], object] = lambda: None
        self.descriptor = -1
        self.size = 0
        self.copied: Copied | None = None
        self._stream: CopyStream | None = None

    def take(
        self,
        tensors: Mapping[str, torch.Tensor],
        later: Collection[str] = (),
        bring: Bring = at_hand,
        room: int = 0,
    ) -> int:
        """Copy tensors; the values may change as soon as this returns, but for those that say otherwise.

        Args:
            tensors: of any device and layout, by name.
            later: names of tensors that stay as they are until `copied` has been waited for.
            bring: has those brought that live elsewhere.
            room: bytes that are kept for `add`.

        Returns:
            The end of what the memory now holds, a safetensors file.

        Raises:
            CheckpointError: there is not so much memory.
        """
        layout = layout_of({name: Spec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()})
        self.settle()
        self._reserve(layout.size + room)
        assert self._map is not None
        if is_far(self._device):
            self._stream = self._stream or copy_stream(self._device)
        self._map[: len(layout.header)] = layout.header

        def copy(names: Sequence[str]) -> None:
            if self._stream is not None:
                self._stream.follow()  # what has been brought has just been written
            for name in names:
                source, begin = tensors[name].detach(), layout.begins[name]
                self._copy(self._bytes[begin : begin + source.nbytes].view(source.dtype).view(source.shape), source)

        with torch.no_grad():
            for after in (False, True):
                names = [name for name in layout.begins if tensors[name].nbytes and (name in later) is after]
                bring([(name, tensors[name]) for name in names], copy)
                if self._stream is not None:
                    self.copied = self._stream.mark()
                    if not after:
                        self.copied.wait()
        return layout.size

    def add(self, end: int, texts: Sequence[bytes]) -> list[int]:
        """Lay texts down behind what ends there.

        Returns:
            That end, and those of the texts.

        Raises:
            CheckpointError: there is not so much memory.
        """
        ends = list(itertools.accumulate(map(len, texts), initial=end))
        self._reserve(ends[-1])
        assert self._map is not None
        for begin, text in zip(ends, texts, strict=False):
            self._map[begin : begin + len(text)] = text
        return ends

    def _copy(self, place: torch.Tensor, source: torch.Tensor) -> None:
        if self._stream is None or not is_far(source.device):
            place.copy_(source)
            return
        self._stream.copy(place, source)
        self._stream.keep(source)

    def settle(self) -> None:
        """Wait until everything has been copied."""
        copied, self.copied = self.copied, None
        if copied is not None:
            copied.synchronize()

    def _reserve(self, needed: int) -> None:
        if needed <= self.size:
            return
        size = -(-needed // _STEP) * _STEP
        self._check_room(size - self.size)
        if self.descriptor < 0:
            if not hasattr(os, "memfd_create"):
                raise CheckpointError(
                    "asynchronous saves need memory that two processes share (memfd_create of Linux), which this "
                    "system does not have; set checkpoint.async_save to false"
                )
            self.descriptor = os.memfd_create("shardwise-snapshot", os.MFD_CLOEXEC)
            self._release = weakref.finalize(self, os.close, self.descriptor)
        self._unmap()
        try:
            os.ftruncate(self.descriptor, size)
            self._map = mmap.mmap(self.descriptor, size)
        except OSError as error:
            raise CheckpointError(
                f"the snapshot of an asynchronous save needs {size / 1e6:.1f} MB of host memory, which the system "
                f"refuses: {error.strerror} (errno {error.errno}). Set checkpoint.async_save to false, or free memory"
            ) from error
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._resized(size - self.size)
        self.size = size
        if self._device.type == "cuda":
            self._pinned = self._bytes.data_ptr() if pin(self._bytes.data_ptr(), size) else 0
            if not self._pinned:
                logger.warning(
                    "the snapshot of asynchronous saves (%.1f MB) cannot be pinned; copying to it is slower (is the "
                    "limit of locked memory, ulimit -l, that low?)",
                    size / 1e6,
                )

    def _check_room(self, more: int) -> None:
        limit = memory_limit(torch.device("cpu"), self._neighbours)
        if limit is None:
            return
        room = limit.share - limit.own
        if more > room:
            raise CheckpointError(
                f"the snapshot of an asynchronous save needs {more / 1e6:.1f} MB more host memory on this rank, and "
                f"{room / 1e6:.1f} MB are free for it ({limit.name}, shared by {limit.sharers} ranks). Set "
                "checkpoint.async_save to false, shard the state over more ranks, or give the job more memory"
            )

    def _unmap(self) -> None:
        self.settle()
        if self._pinned:
            unpin(self._pinned)
            self._pinned = 0
        # The tensor is what keeps the mapping; there are no others of it.
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._map = None

    def close(self) -> None:
        """Give the memory back (a process that still writes from it keeps it until it is done)."""
        self._unmap()
        self._resized(-self.size)
        self.size = 0
        if self.descriptor >= 0:
            self._release()
            self.descriptor = -1
