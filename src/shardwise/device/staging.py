"""Bytes on their way between a device and the host, through two buffers of pinned memory.

While the host does something with one buffer (writes it into a file, reads the next bytes into it), a stream that does
nothing else copies the other. Copying to and from memory that is not pinned goes by way of a buffer of the driver, at a
fraction of the speed, and the host stands meanwhile.

On the CPU nothing is copied that need not be, and there are no streams. (How streams and buffers follow one another is
tested with streams that are played; on CUDA it has not been run.)
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
"""Bytes of a buffer at most: enough for the speed of the bus, and for the time in between not to count."""

_ALIGNMENT = 64
"""Sizes of buffers are multiples of it, so that whole elements of any dtype go through."""


_FOREVER = timedelta.max
"""How long the host waits for copies: they need nobody else."""


class Copied:
    """A place in a stream of copies.

    Args:
        streams: of the device.
        mark: the place.
    """

    def __init__(self, streams: Streams, mark: Mark) -> None:
        self._streams = streams
        self._mark = mark

    @property
    def made(self) -> bool:
        """Whether all copies that come before it are made, as far as the host can see now."""
        return self._mark.reached()

    def synchronize(self) -> None:
        """Block the host until all copies that come before it are made."""
        self._streams.block(self._mark, _FOREVER)

    def wait(self) -> None:
        """Have the current stream go on only when all copies that come before it are made."""
        self._mark.wait()

    def hold_up(self, stream: Stream) -> None:
        """Have another stream do so."""
        stream.wait(self._mark)


class CopyStream:
    """A stream that copies between a device and the host, beside what the device computes.

    Args:
        device: where streams are; on the CPU a copy is made when `copy` returns.

    Attributes:
        device: see above.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams = streams_of(device)
        self._stream = self._streams.make("copies", urgent=False)
        self._in_use: list[tuple[Mark, torch.Tensor]] = []

    def host_bytes(self, size: int) -> torch.Tensor:
        """Return memory of the host for it, of undefined content."""
        if self.device.type != "cuda":
            with self._streams.on_host():
                return torch.empty(size, dtype=torch.uint8, device="cpu")
        # Threads begin with the first device, on which memory must not be pinned.
        with torch.cuda.device(self.device):
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def use(self) -> AbstractContextManager[None]:
        """Take and give back memory of the device for copies inside of the block."""
        return self._stream.use()

    def follow(self) -> None:
        """Have copies begin when what has been launched so far on the current stream is done."""
        self._stream.wait(self._streams.mark())

    def come_behind(self, copied: Copied) -> None:
        """Have copies begin when those of another stream are made that come before a place there."""
        with self._stream.use():
            copied.wait()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy behind what it has been given before; the host goes on."""
        with self._stream.use():
            target.copy_(source, non_blocking=True)

    def keep(self, tensor: torch.Tensor) -> None:
        """Have memory of the device that is given back used again only when the copies so far are made."""
        if tensor.device.type == "cuda":
            with self._stream.use():
                tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def keep_host(self, tensor: torch.Tensor) -> None:
        """Keep memory of the host until the current stream has done what it has been given so far."""
        self._in_use = [(mark, kept) for mark, kept in self._in_use if not mark.reached()]
        self._in_use.append((self._streams.mark(), tensor))

    def current(self) -> Stream:
        """Return the stream on which this thread launches."""
        return self._streams.current()

    def lend(self, tensor: torch.Tensor) -> None:
        """Have memory of the device that is given back used again only when the current stream has done with it.

        It costs nothing on the stream on which the memory was taken.
        """
        if tensor.device.type == "cuda" and has_values(tensor):
            tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def mark(self) -> Copied:
        """Return the place behind the copies so far."""
        with self._stream.use():
            return self.mark_current()

    def mark_current(self) -> Copied:
        """Return the place behind what the current stream has been given so far."""
        return Copied(self._streams, self._streams.mark())


def is_far(device: torch.device) -> bool:
    """Whether the host has to copy what lies there before it can read it; tests take the CPU for such a device."""
    return device.type != "cpu"


def copy_stream(device: torch.device) -> CopyStream:
    """Return a new stream for copies between a device and the host; tests play it."""
    return CopyStream(device)


class Staging:
    """Two buffers between a device and the host.

    Args:
        device: where tensors are, or go.
        room: bytes that will go through: buffers are no larger.
        most: bytes of a buffer at most.

    Example:
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
        """Yield the bytes of tensors, one after the other, as 1-D tensors on the host.

        What is yielded is valid until the next is asked for; those behind it are on their way meanwhile. The tensors
        must not change before the end.
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
            if under_way is not None:  # nobody wants it any more, but its memory must not be given back yet
                under_way.mark.synchronize()

    def _cut(self, tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield the bytes of tensors on the device, so that they fill one buffer after the other."""
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
        """Begin to copy as many pieces as fill a buffer; None: there are no more."""
        sources: list[torch.Tensor] = []
        filled = 0
        while filled < self._size and (piece := next(pieces, None)) is not None:
            sources.append(piece)
            filled += piece.numel()
        if not sources:
            return None
        self._stream.follow()  # what has made them contiguous, too
        for place, source in zip(buffer[:filled].split([source.numel() for source in sources]), sources, strict=True):
            self._stream.copy(place, source)
        return _Fetch(buffer[:filled], sources, self._stream.mark())

    def to_device(self, out: torch.Tensor, fill: Callable[[torch.Tensor, int], None]) -> None:
        """Fill a tensor on the device; its values are there for everybody when this returns.

        Args:
            out: 1-D, contiguous.
            fill: called with memory of the host, in the dtype of `out`, and the element of `out` from which on it puts
                values there; while it does, those before are on their way.
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
        """Return the buffer from which nothing has been sent for longer, as bytes, for the host to fill."""
        self._turn = 1 - self._turn
        before, self._sent[self._turn] = self._sent[self._turn], None
        if before is not None:
            before.synchronize()
        self._stream.follow()
        return self._buffers[self._turn]

    def send(self, out: torch.Tensor, values: torch.Tensor) -> None:
        """Begin to copy to the device what lies in the buffer that `free` has returned last; of one dtype."""
        self._stream.copy(out, values)
        self._sent[self._turn] = self._stream.mark()

    def drain(self) -> None:
        """Wait until everything that was sent has arrived."""
        for mark in self._sent:
            if mark is not None:
                mark.synchronize()
        self._sent = [None, None]


@dataclass(frozen=True)
class _Fetch:
    """A copy to the host that has begun.

    Attributes:
        bytes: where they arrive.
        sources: whose memory must stay until then.
        mark: behind the copy.
    """

    bytes: torch.Tensor
    sources: list[torch.Tensor]
    mark: Copied
