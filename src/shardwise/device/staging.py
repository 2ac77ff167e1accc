"""Double-buffered copies between a device and the host, through two buffers of pinned memory.

While the host works on one buffer (writes a file, reads the next bytes), a copy stream copies the other. Copies from
and to unpinned memory pass through a buffer of the driver, at a fraction of the speed, and block the host. On the CPU
copies run only where necessary. (Tests simulate the order of streams and buffers; it has not been run on CUDA.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta

import torch

from shardwise.compat import has_values
from shardwise.device.streams import Mark, Stream, Streams, streams_of

MOST = 64 << 20
"""Maximum bytes of a buffer: enough for full bus bandwidth and to hide the gaps between copies."""

_ALIGNMENT = 64  # alignment of buffer sizes in bytes, because buffers must hold whole elements of any dtype


_FOREVER = timedelta.max  # time limit of host waits for copies, which depend on no other rank


class Copied:
    """An event (`mark`) on a copy stream."""

    def __init__(self, streams: Streams, mark: Mark) -> None:
        self._streams = streams
        self._mark = mark

    @property
    def made(self) -> bool:
        """True if all copies before the event have finished, as seen by the host."""
        return self._mark.reached()

    def synchronize(self) -> None:
        """Block the host until all copies before the event finish."""
        self._streams.block(self._mark, _FOREVER)

    def wait(self) -> None:
        """Make the current stream wait for all copies before the event."""
        self._mark.wait()

    def hold_up(self, stream: Stream) -> None:
        """Make another stream wait for all copies before the event."""
        stream.wait(self._mark)


class CopyStream:
    """A stream for copies between a device and the host, concurrent with compute; on the CPU copies are synchronous."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams = streams_of(device)
        self._stream = self._streams.make("copies", urgent=False)
        self._in_use: list[tuple[Copied, torch.Tensor]] = []

    def host_bytes(self, size: int) -> torch.Tensor:
        """Return host memory for copies, pinned on CUDA, of undefined content."""
        if self.device.type != "cuda":
            with self._streams.on_host():
                return torch.empty(size, dtype=torch.uint8, device="cpu")
        # A new thread's current device is device 0, where this memory must not be pinned.
        with torch.cuda.device(self.device):
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def use(self) -> AbstractContextManager[None]:
        """Allocate and release device memory on the copy stream inside the block."""
        return self._stream.use()

    def follow(self) -> None:
        """Make later copies wait for all kernels launched so far on the current stream."""
        self._stream.wait(self._streams.mark())

    def come_behind(self, copied: Copied) -> None:
        """Make later copies wait for an event of another copy stream."""
        with self._stream.use():
            copied.wait()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy after all earlier ones, without blocking the host."""
        with self._stream.use():
            target.copy_(source, non_blocking=True)

    def keep(self, tensor: torch.Tensor) -> None:
        """Delay the reuse of released device memory until the copies so far finish."""
        if tensor.device.type == "cuda":
            with self._stream.use():
                tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def keep_host(self, tensor: torch.Tensor, until: Copied | None = None) -> None:
        """Keep host memory alive until an event (None: all kernels launched so far on the current stream)."""
        self._in_use = [(copied, kept) for copied, kept in self._in_use if not copied.made]
        self._in_use.append((until or self.mark_current(), tensor))

    def current(self) -> Stream:
        """Return the current stream of this thread."""
        return self._streams.current()

    def show(self, tensor: torch.Tensor) -> None:
        """Delay the reuse of released device memory until the current stream has finished (if another stream's)."""
        if tensor.device.type == "cuda" and has_values(tensor):
            tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def mark(self) -> Copied:
        """Record an event after the copies so far."""
        with self._stream.use():
            return self.mark_current()

    def mark_current(self) -> Copied:
        """Record an event on the current stream."""
        return Copied(self._streams, self._streams.mark())


def is_far(device: torch.device) -> bool:
    """Return True if the host must copy values from the device to read them; tests override this for the CPU."""
    return device.type != "cpu"


def copy_stream(device: torch.device) -> CopyStream:
    """Return a new copy stream of a device; tests override this."""
    return CopyStream(device)


class Staging:
    """Double buffer of at most `most` bytes each between a device and the host; `room` are all bytes to transfer.

    >>> staging = Staging(torch.device("cpu"), room=256, most=64)
    >>> [part.view(torch.float32).sum().item() for part in staging.to_host([torch.ones(10), torch.ones(10)])]
    [16.0, 4.0]
    """

    def __init__(self, device: torch.device, room: int, most: int = MOST) -> None:
        self._stream = copy_stream(device)
        self._size = max(_ALIGNMENT, min(most - most % _ALIGNMENT, room + -room % _ALIGNMENT))
        self._buffers = [self._stream.host_bytes(self._size) for _ in range(2)]
        self._sent: list[Copied | None] = [None, None]
        self._turn = 1

    def to_host(self, tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield the bytes of tensors, which must not change before the end, in order, as 1-D tensors on the host.

        A yielded tensor is valid until the next iteration; the next buffer is copied meanwhile.
        """
        pieces = self._cut(tensors)
        under_way = self._fetch(pieces, self._buffers[0])
        number = 0
        try:
            while under_way is not None:
                number += 1
                arrived, under_way = under_way, self._fetch(pieces, self._buffers[number % 2])
                arrived.mark.synchronize()
                yield arrived.bytes
        finally:
            if under_way is not None:  # its memory must not be released before the copy ends
                under_way.mark.synchronize()

    def _cut(self, tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        room = self._size
        for tensor in tensors:
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
            start = 0
            while start < flat.numel():
                piece = flat[start : start + room]
                yield piece
                start += piece.numel()
                room = room - piece.numel() or self._size

    def _fetch(self, pieces: Iterator[torch.Tensor], buffer: torch.Tensor) -> _Fetch | None:
        sources: list[torch.Tensor] = []
        filled = 0
        while filled < self._size and (piece := next(pieces, None)) is not None:
            sources.append(piece)
            filled += piece.numel()
        if not sources:
            return None
        self._stream.follow()  # also after the kernels that made them contiguous
        for place, source in zip(buffer[:filled].split([source.numel() for source in sources]), sources, strict=True):
            self._stream.copy(place, source)
        return _Fetch(buffer[:filled], sources, self._stream.mark())

    def to_device(self, out: torch.Tensor, fill: Callable[[torch.Tensor, int], None]) -> None:
        """Fill a 1-D, contiguous tensor on the device; all streams see its values on return.

        `fill` gets host memory in the dtype of `out` and its first element in `out`; earlier values are copied
        meanwhile.
        """
        step = self._size // out.dtype.itemsize
        try:
            for first in range(0, out.numel(), step):
                part = out[first : first + step]
                values = self.free().view(out.dtype)[: part.numel()]
                fill(values, first)
                self.send(part, values)
        finally:
            self.drain()

    def free(self) -> torch.Tensor:
        """Return the buffer with the older last copy, as bytes, for the host to fill."""
        self._turn = 1 - self._turn
        before, self._sent[self._turn] = self._sent[self._turn], None
        if before is not None:
            before.synchronize()
        self._stream.follow()
        return self._buffers[self._turn]

    def send(self, out: torch.Tensor, values: torch.Tensor) -> None:
        """Enqueue the copy to the device of the buffer that `free` returned last; both of one dtype."""
        self._stream.copy(out, values)
        self._sent[self._turn] = self._stream.mark()

    def drain(self) -> None:
        """Wait for all copies to the device."""
        for mark in self._sent:
            if mark is not None:
                mark.synchronize()
        self._sent = [None, None]


@dataclass(frozen=True)
class _Fetch:
    """A pending copy to the host. `sources` must stay allocated until `mark`, the event after the copy."""

    bytes: torch.Tensor
    sources: list[torch.Tensor]
    mark: Copied
