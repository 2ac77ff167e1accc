"""Streams that are played on the CPU: copies happen as late as they may, or at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from shardwise.device import staging


class Played:
    """A stream whose copies are made when somebody waits for them (`late`), or when they are asked for.

    Late ones show who reads before he has waited, early ones who gives memory to another copy that is still read.

    Attributes:
        log: what has been asked of it.
        done: copies that have been made.
        needed: the host that waits gets its answer only when this is set (or after some seconds).
        failure: what the host is told that waits.
    """

    def __init__(self, late: bool) -> None:
        self.late = late
        self.failure: RuntimeError | None = None
        self.needed = threading.Event()
        self.needed.set()
        self._guard = threading.Lock()
        self.log: list[str] = []
        self.kept: list[torch.Tensor] = []
        self._waiting: list[Callable[[], object]] = []
        self.done = 0

    def host_bytes(self, size: int) -> torch.Tensor:
        self.log.append(f"memory {size}")
        return torch.full((size,), 0xEE, dtype=torch.uint8, device="cpu")

    def follow(self) -> None:
        self.log.append("follow")

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert "follow" in self.log
        self.log.append(f"copy {source.nbytes}")
        self._waiting.append(lambda: target.copy_(source))
        if not self.late:
            self.run(self.done + len(self._waiting))

    def keep(self, tensor: torch.Tensor) -> None:
        self.kept.append(tensor)

    def run(self, end: int) -> None:
        """Make the copies up to a place."""
        with self._guard:
            while self.done < end:
                self._waiting.pop(0)()
                self.done += 1

    def mark(self) -> PlayedMark:
        return PlayedMark(self, self.done + len(self._waiting))


class PlayedMark:
    """A place in a played stream."""

    def __init__(self, stream: Played, place: int) -> None:
        self._stream, self._place = stream, place

    def synchronize(self) -> None:
        self._stream.log.append("host waits")
        if self._stream.done < self._place:
            self._stream.needed.wait(5.0)
            if self._stream.failure is not None:
                raise self._stream.failure
        self._stream.run(self._place)

    def wait(self) -> None:
        self._stream.log.append("stream waits")
        self._stream.run(self._place)


@contextmanager
def far(late: bool = True) -> Iterator[list[Played]]:
    """Have the CPU taken for a device; yields the streams that are made."""
    made: list[Played] = []

    def make(device: torch.device) -> Played:
        made.append(Played(late))
        return made[-1]

    with (
        mock.patch.object(staging, "copy_stream", make),
        mock.patch("shardwise.checkpoint.async_save.copy_stream", make),
        mock.patch("shardwise.checkpoint.async_save.is_far", lambda device: True),
        mock.patch("shardwise.device.staging.is_far", lambda device: True),
        mock.patch("shardwise.checkpoint.safetensors_writer.is_far", lambda device: True),
        mock.patch("shardwise.checkpoint.safetensors_reader.is_far", lambda device: True),
        mock.patch("shardwise.checkpoint.reader.is_far", lambda device: True),
    ):
        yield made
