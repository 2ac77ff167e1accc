"""Snapshots: copies of a rank's tensors in host memory, which a thread writes.

Every save reuses the memory, which costs one copy of the state into present pages. It holds one snapshot; a save that
finds it in use waits.

A separate stream copies state from a device, and training continues at once. The device's next operations wait for the
copies of state that may change at any time, the next optimizer step for all (`copied`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from shardwise.checkpoint.protocols import Fetch, in_place
from shardwise.checkpoint.safetensors_reader import Spec
from shardwise.checkpoint.safetensors_writer import file_order
from shardwise.device.hostmemory import HostMemory
from shardwise.device.staging import Copied, CopyStream, copy_stream, is_far
from shardwise.errors import CheckpointError
from shardwise.memory import memory_limit
from shardwise.units import format_size
from shardwise.utils.logging import logger

_STEP = 1 << 16
"""Sizes are multiples of this, because small differences between saves should not move the memory."""


class Snapshot:
    """Memory of one rank for one snapshot at a time; pinned for a CUDA device if the system allows it.

    `device` has the state. `local_ranks` of this machine share its memory. `resized` is called with the change of the
    memory in bytes (`size`). `copied` is the event after the copies of the last `take`; None: they were made at once.
    """

    def __init__(
        self, device: torch.device, local_ranks: int = 1, resized: Callable[[int], None] | None = None
    ) -> None:
        self._device = device
        self._local_ranks = local_ranks
        self._resized = resized or (lambda change: None)
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._memory: HostMemory | None = None
        self.copied: Copied | None = None
        self._stream: CopyStream | None = None

    @property
    def size(self) -> int:
        """Bytes of the memory."""
        return self._bytes.nbytes

    def take(
        self, tensors: Mapping[str, torch.Tensor], later: Collection[str] = (), fetch: Fetch = in_place
    ) -> dict[str, torch.Tensor]:
        """Copy tensors of any device and layout; return the copies, which the next call overwrites.

        `later` names tensors that do not change before a wait for `copied`; all others may change after the return.
        `fetch` makes offloaded tensors readable.
        """
        self.settle()
        if is_far(self._device):
            self._stream = self._stream or copy_stream(self._device)
        order = file_order({name: Spec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()})
        self._reserve(sum(tensor.nbytes for tensor in tensors.values()))
        copies: dict[str, torch.Tensor] = {}
        end = 0
        for name in order:
            source, begin, end = tensors[name], end, end + tensors[name].nbytes
            copies[name] = self._bytes[begin:end].view(source.dtype).view(source.shape)

        def copy(names: Sequence[str]) -> None:
            if self._stream is not None:
                self._stream.follow()  # fetched values have just been written
            for name in names:
                source = tensors[name].detach()
                if self._stream is None or not is_far(source.device):
                    copies[name].copy_(source)
                else:
                    self._stream.copy(copies[name], source)
                    self._stream.keep(source)

        with torch.no_grad():
            for after in (False, True):
                names = [name for name in order if tensors[name].nbytes and (name in later) is after]
                fetch([(name, tensors[name]) for name in names], copy)
                if self._stream is not None:
                    self.copied = self._stream.mark()
                    if self._memory is not None:
                        self._memory.used(self.copied)
                    if not after:
                        self.copied.wait()
        return copies

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
        self.close()
        try:
            self._bytes = self._allocated(size)
        except (RuntimeError, OSError) as error:
            raise CheckpointError(
                f"the snapshot of an asynchronous save needs {format_size(size)} of host memory, which the system "
                f"refuses: {error}. Set checkpoint.async_save to false, or free memory"
            ) from error
        self._resized(size)

    def _allocated(self, size: int) -> torch.Tensor:
        if self._stream is None or self._device.type != "cuda":
            return torch.empty(size, dtype=torch.uint8, device="cpu")
        try:
            self._memory = HostMemory(self._stream, size)
        except RuntimeError as error:
            logger.warning(
                "the snapshot of asynchronous saves (%s) cannot be pinned; copying to it is slower (is the limit of "
                "locked memory, ulimit -l, that low?): %s",
                format_size(size),
                error,
            )
            self._memory = HostMemory(self._stream, size, locked=False)
        return self._memory.bytes

    def _check_room(self, more: int) -> None:
        limit = memory_limit(torch.device("cpu"), self._local_ranks)
        if limit is None:
            return
        room = limit.share - limit.own
        if more > room:
            raise CheckpointError(
                f"the snapshot of an asynchronous save needs {format_size(more)} more host memory on this rank, and "
                f"{format_size(room)} are free for it ({limit.name}, shared by {limit.sharers} ranks). Set "
                "checkpoint.async_save to false, shard the state over more ranks, or give the job more memory"
            )

    def close(self) -> None:
        """Free the memory."""
        self.settle()
        if self.size:
            self._resized(-self.size)
        self._bytes, self._memory = torch.empty(0, dtype=torch.uint8, device="cpu"), None
