"""Streams that are played on the CPU: copies happen as late as they may, or at once."""

from __future__ import annotations

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
    """

    def __init__(self, late: bool) -> None:
        self.late = late
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
        mock.patch("shardwise.device.staging.is_far", lambda device: True),
        mock.patch("shardwise.checkpoint.tensorwriter.is_far", lambda device: True),
        mock.patch("shardwise.checkpoint.tensorfile.is_far", lambda device: True),
        mock.patch("shardwise.checkpoint.reader.is_far", lambda device: True),
    ):
        yield made
