"""Snapshots: the bytes of a rank's file in host memory shared with a writer process.

The memory is a mapped anonymous file: it has no name, counts against no limit of /dev/shm, and is freed when the last
of both processes exits. Every save reuses it, which costs one copy of the state into present pages. It holds one
snapshot; a save that finds it in use waits.

A separate stream copies state from a device, and training continues at once. The device's next operations wait for the
copies of state that may change at any time, the next optimizer step for all (`copied`). On CUDA this has not been run;
tests simulate the stream.
"""

from __future__ import annotations

import itertools
import mmap
import os
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from shardwise.checkpoint.protocols import Fetch, in_place
from shardwise.checkpoint.safetensors_reader import Spec
from shardwise.checkpoint.safetensors_writer import layout_of
from shardwise.device.hostmemory import pin, unpin
from shardwise.device.staging import Copied, CopyStream, copy_stream, is_far
from shardwise.errors import CheckpointError
from shardwise.memory import memory_limit
from shardwise.utils.logging import logger

_STEP = 1 << 16
"""Sizes are multiples of this, because small differences between saves should not move the memory."""


class Snapshot:
    """Memory of one rank for one snapshot at a time; pinned for a CUDA device if the system allows it.

    `device` has the state. `local_ranks` of this machine share its memory. `resized` is called with the change of the
    memory in bytes (`size`). `descriptor` is that of the mapped file, for the writer process. `copied` is the event
    after the copies of the last `take`; None: they were made at once.
    """

    def __init__(
        self, device: torch.device, local_ranks: int = 1, resized: Callable[[int], None] | None = None
    ) -> None:
        self._device = device
        self._local_ranks = local_ranks
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
        fetch: Fetch = in_place,
        room: int = 0,
    ) -> int:
        """Copy tensors of any device and layout; return the end of the memory's content, a safetensors file.

        `later` names tensors that do not change before a wait for `copied`; all others may change after the return.
        `fetch` makes offloaded tensors readable. `room` bytes are kept for `add`.
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
                self._stream.follow()  # fetched values have just been written
            for name in names:
                source, begin = tensors[name].detach(), layout.begins[name]
                self._copy(self._bytes[begin : begin + source.nbytes].view(source.dtype).view(source.shape), source)

        with torch.no_grad():
            for after in (False, True):
                names = [name for name in layout.begins if tensors[name].nbytes and (name in later) is after]
                fetch([(name, tensors[name]) for name in names], copy)
                if self._stream is not None:
                    self.copied = self._stream.mark()
                    if not after:
                        self.copied.wait()
        return layout.size

    def add(self, end: int, texts: Sequence[bytes]) -> list[int]:
        """Append texts after `end`; return that end and theirs. Raises CheckpointError if memory is too small."""
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
        """Wait for the copies."""
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
        limit = memory_limit(torch.device("cpu"), self._local_ranks)
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
        # Only the tensor keeps the mapping.
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._map = None

    def close(self) -> None:
        """Free the memory (a writer process keeps it while it writes)."""
        self._unmap()
        self._resized(-self.size)
        self.size = 0
        if self.descriptor >= 0:
            self._release()
            self.descriptor = -1
