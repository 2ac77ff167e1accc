"""Streams: the queues on which a device works, and what orders them.

What is launched on a stream runs there in order, beside what other streams do. The host launches and goes on. A mark is
a place in a stream (a CUDA event): whoever waits for it sees everything that was launched there before.

Memory belongs to the stream on which it was allocated: it may be given back while kernels that use it are still to run,
and is taken again by what is launched on that stream later. Memory that another stream has used must not be given back
before its owner waits for that stream, or the host has.

On the CPU whatever has been launched has run. There is nothing to order, and all of this does nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Protocol

import torch
from typing_extensions import override

_log = logging.getLogger("shardwise")

_POLL_S = 2e-5
"""How often the host looks whether a device has got to a mark: less than a kernel of any size takes."""


class Mark(Protocol):
    """A place in a stream."""

    def wait(self) -> None:
        """Let what is launched on the current stream from now on run behind it."""

    def reached(self) -> bool:
        """Whether the device has got there, as far as the host can see now."""


class Stream(Protocol):
    """A queue of one device."""

    def use(self) -> AbstractContextManager[Any]:
        """What is launched and allocated inside of the block belongs to this stream."""

    def wait(self, mark: Mark) -> None:
        """Let what is launched on this stream from now on run behind a mark."""


class Streams(Protocol):
    """The streams of one device.

    Attributes:
        beside: whether there are any: the host goes on while the device works.
    """

    beside: bool

    def make(self, name: str, *, urgent: bool = True) -> Stream:
        """Return a new stream.

        torch has a few streams of each priority, which it gives out in turn: what must not wait for anybody else's work
        has another priority than what is made again and again.

        Args:
            name: what it is for.
            urgent: what it does is short, and others wait for it.
        """

    def current(self) -> Stream:
        """Return the stream on which this thread launches."""

    def mark(self) -> Mark:
        """Return the place to which the current stream has got."""

    def block(self, mark: Mark, limit: timedelta) -> bool:
        """Let the host wait for a mark; return whether the device has got there within the limit."""

    def on_host(self) -> AbstractContextManager[Any]:
        """Allocate memory of the host inside of the block: it is of no stream."""

    def keep(self, tensor: torch.Tensor) -> None:
        """Have the memory of a tensor of another stream, when it is given back, wait for the current stream."""


class _There:
    """A mark on a device on which everything that has been launched has run."""

    def wait(self) -> None:
        """Nothing is to be waited for."""

    def reached(self) -> bool:
        """It has been reached."""
        return True


class _Host:
    """The one stream of a device without any."""

    def use(self) -> AbstractContextManager[Any]:
        """Change nothing."""
        return _NOTHING

    def wait(self, mark: Mark) -> None:
        """Nothing is to be waited for."""


_NOTHING, _THERE, _HOST = contextlib.nullcontext(), _There(), _Host()


class HostStreams:
    """Those of the CPU."""

    beside = False

    def make(self, name: str, *, urgent: bool = True) -> Stream:
        """Return the only one."""
        return _HOST

    def current(self) -> Stream:
        """Return the only one."""
        return _HOST

    def mark(self) -> Mark:
        """Return a mark that has been reached."""
        return _THERE

    def block(self, mark: Mark, limit: timedelta) -> bool:
        """Nothing is to be waited for."""
        return True

    def on_host(self) -> AbstractContextManager[Any]:
        """Change nothing."""
        return _NOTHING

    def keep(self, tensor: torch.Tensor) -> None:
        """Nothing is to be waited for."""


class _CudaMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(blocking=True)  # a host that waits leaves its core to others
        self._event.record(stream)
        self._device = stream.device
        self._followed = {stream.cuda_stream}

    def wait(self) -> None:
        self.hold_up(torch.cuda.current_stream(self._device))

    def hold_up(self, stream: torch.cuda.Stream) -> None:
        # A unit that is used many times is waited for at each use, and a stream needs to be told only once.
        if stream.cuda_stream not in self._followed:
            self._followed.add(stream.cuda_stream)
            stream.wait_event(self._event)

    def reached(self) -> bool:
        return self._event.query()

    def synchronize(self) -> None:
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
    """Those of a CUDA device.

    Args:
        device: which one.
    """

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
        """See `Streams.block`; the interpreter is free for other threads meanwhile."""
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
        """See `Streams.on_host`: torch gives it out again when copies that it knows of have been made."""
        return _NOTHING

    @override
    def keep(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream(self._device))


def warn_of_one_queue(env: Mapping[str, str] = os.environ) -> None:
    """Warn if all CUDA streams share one hardware queue: kernels then run in the order in which they were launched."""
    if env.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        _log.warning(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 gives all CUDA streams one hardware queue, as Megatron-LM asks for. "
            "All-gathers, reduce-scatters and copies then wait behind kernels instead of overlapping with them, and "
            "ranks that run different branches can hang. Unset it, or set it to 8 or more, before the process starts"
        )


_instead: dict[str, Streams] = {}


def streams_of(device: torch.device) -> Streams:
    """Return the streams of a device.

    Example:
        >>> streams = streams_of(torch.device("cpu"))
        >>> with streams.make("gather").use():
        ...     mark = streams.mark()
        >>> mark.reached()
        True
    """
    if device.type in _instead:
        return _instead[device.type]
    return CudaStreams(device) if device.type == "cuda" else HostStreams()


@contextlib.contextmanager
def standing_in(kind: str, streams: Streams) -> Iterator[None]:
    """Let devices of a type have other streams inside of the block (see `shardwise.device.recording`)."""
    _instead[kind] = streams
    try:
        yield
    finally:
        del _instead[kind]
