"""Streams and events: the queues on which a device works, and their ordering.

Kernels of one stream run in order, concurrently with other streams. The host launches and goes on. A mark is a CUDA
event recorded on a stream: a stream or host that waits for it sees the results of all kernels launched there before.

Memory belongs to the stream on which it was allocated. It may be released while kernels that use it are pending,
because only later kernels of that stream reuse it. Memory that another stream uses must not be released before the
owner stream, or the host, has waited for that stream. On the CPU, which runs synchronously, all of this does nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Protocol

import torch
from typing_extensions import override

from shardwise.compat import has_values

_log = logging.getLogger("shardwise")

_POLL_S = 2e-5  # seconds between polls of an event by the host: less than the duration of a large kernel


class Mark(Protocol):
    """An event recorded on a stream."""

    def wait(self) -> None:
        """Make later work of the current stream wait for the event."""

    def reached(self) -> bool:
        """Return True if the device has reached the event, as seen by the host."""


class Stream(Protocol):
    """A queue of one device."""

    def use(self) -> AbstractContextManager[Any]:
        """Launch and allocate on this stream inside the block."""

    def wait(self, mark: Mark) -> None:
        """Make later work of this stream wait for an event."""


class Streams(Protocol):
    """The streams of one device; `beside` is True if the device runs asynchronously to the host."""

    beside: bool

    def make(self, name: str, *, urgent: bool = True) -> Stream:
        """Return a new stream; `urgent` for short work that other streams wait for.

        Because streams of one priority come from a small pool and may share a queue, copy streams have another one.
        """

    def current(self) -> Stream:
        """Return the current stream of this thread."""

    def mark(self) -> Mark:
        """Record an event on the current stream."""

    def block(self, mark: Mark, limit: timedelta) -> bool:
        """Block the host until an event; return True if the device reaches it within the limit."""

    def on_host(self) -> AbstractContextManager[Any]:
        """Allocate host memory inside the block, which belongs to no stream."""

    def keep(self, tensor: torch.Tensor) -> None:
        """Delay the reuse of a released tensor of another stream until the current stream has finished with it."""


class _Host:
    """The only stream of the CPU, and the only event, which has been reached."""

    def use(self) -> AbstractContextManager[Any]:
        return _NOTHING

    def wait(self, mark: Mark | None = None) -> None:
        pass

    def reached(self) -> bool:
        return True


_NOTHING, _HOST = contextlib.nullcontext(), _Host()


class HostStreams:
    """The streams of the CPU."""

    beside = False

    def make(self, name: str, *, urgent: bool = True) -> Stream:
        """Return the only stream."""
        return _HOST

    def current(self) -> Stream:
        """Return the only stream."""
        return _HOST

    def mark(self) -> Mark:
        """Return an event that has been reached."""
        return _HOST

    def block(self, mark: Mark, limit: timedelta) -> bool:
        """Return True without waiting."""
        return True

    def on_host(self) -> AbstractContextManager[Any]:
        """Return a null context."""
        return _NOTHING

    def keep(self, tensor: torch.Tensor) -> None:
        """Do nothing, because CPU operations are synchronous."""


class _CudaMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(blocking=True)  # a waiting host leaves its core to other threads
        self._event.record(stream)
        self._device = stream.device
        self._followed = {stream.cuda_stream}

    def wait(self) -> None:
        self.hold_up(torch.cuda.current_stream(self._device))

    def hold_up(self, stream: torch.cuda.Stream) -> None:
        # A unit used many times is waited for at each use; one wait of a stream suffices.
        if stream.cuda_stream not in self._followed:
            self._followed.add(stream.cuda_stream)
            stream.wait_event(self._event)

    def reached(self) -> bool:
        return self._event.query()

    def synchronize(self) -> None:
        # Threads that wait have device 0 as their current one, where the call may create a context.
        with torch.cuda.device(self._device):
            self._event.synchronize()


class _CudaStream:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def use(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    def wait(self, mark: Mark) -> None:
        assert isinstance(mark, _CudaMark)
        mark.hold_up(self._stream)


class CudaStreams(Streams):
    """The streams of a CUDA device."""

    beside = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @override
    def make(self, name: str, *, urgent: bool = True) -> Stream:
        return _CudaStream(torch.cuda.Stream(self._device, priority=-1 if urgent else 0))

    @override
    def current(self) -> Stream:
        return _CudaStream(torch.cuda.current_stream(self._device))

    @override
    def mark(self) -> Mark:
        return _CudaMark(torch.cuda.current_stream(self._device))

    def block(self, mark: Mark, limit: timedelta) -> bool:
        """Block the host, with the GIL released, until an event; return True if it is reached within the limit."""
        if limit == timedelta.max:
            assert isinstance(mark, _CudaMark)
            mark.synchronize()
            return True
        deadline = time.monotonic() + limit.total_seconds()
        while not mark.reached():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def on_host(self) -> AbstractContextManager[Any]:
        """Return a null context: torch's pinned allocator reuses memory after the copies that it tracks."""
        return _NOTHING

    @override
    def keep(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream(self._device))


def warn_of_one_queue(env: Mapping[str, str] = os.environ) -> None:
    """Warn if all CUDA streams share one hardware queue, which runs kernels in launch order."""
    if env.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        _log.warning(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 gives all CUDA streams one hardware queue, as Megatron-LM asks for. "
            "All-gathers, reduce-scatters and copies then wait behind kernels instead of overlapping with them, and "
            "ranks that run different branches can hang. Unset it, or set it to 8 or more, before the process starts"
        )


overrides: dict[str, Streams] = {}
"""Streams that tests give a device type."""


def streams_of(device: torch.device) -> Streams:
    """Return the streams of a device.

    >>> streams = streams_of(torch.device("cpu"))
    >>> with streams.make("gather").use():
    ...     mark = streams.mark()
    >>> mark.reached()
    True
    """
    default = CudaStreams(device) if device.type == "cuda" else HostStreams()
    return overrides.get(device.type, default)


# -- small values between host and device ------------------------------------------------------------------------------


def numbers_on(device: torch.device, values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
    """Return numbers as a tensor on a device, without blocking the host, unlike `torch.tensor(values, device=...)`.

    >>> numbers_on(torch.device("cpu"), [1, 2], torch.int64)
    tensor([1, 2])
    """
    # The source is not pinned, so CUDA has read it when the call returns.
    return torch.tensor(values, dtype=dtype, device="cpu").to(device, non_blocking=True)


class Later:
    """Asynchronous copy of a small 1-D tensor to the host; on a CUDA device on the current stream.

    >>> Later(torch.tensor([1.0, 2.0])).read()
    [1.0, 2.0]
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._streams = streams_of(values.device)
        self._arrived: Mark | None = None
        self._values = values
        if self._streams.beside and has_values(values):
            pinned = values.device.type == "cuda"
            with self._streams.on_host():
                self._values = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=pinned)
            self._values.copy_(values, non_blocking=True)
            self._arrived = self._streams.mark()

    def arrived(self) -> bool:
        """Return True if `read` does not block."""
        return self._arrived is None or self._arrived.reached()

    def read(self) -> list[float]:
        """Return the values, waiting for the copy; zeros in a dry run, which has no values."""
        if not has_values(self._values):
            return [0.0] * self._values.numel()
        if self._arrived is not None:
            self._streams.block(self._arrived, timedelta.max)
        return list(map(float, self._values.tolist()))
