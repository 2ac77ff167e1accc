"""File transfer between ranks without a shared file system."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import BinaryIO, TypeVar, cast

import torch

from shardwise.checkpoint.file_writer import open_over
from shardwise.checkpoint.safetensors_reader import bytes_of
from shardwise.comm.communicator import Communicator
from shardwise.errors import CheckpointError

_LABEL = "copies"
_LEAST, _MOST = 4 << 10, 16 << 20
_SHARE = 8
"""Files are sent in pieces of 1/8 of the largest: smaller than the gradients, which are free between steps."""

Hold = Callable[[torch.Tensor], None]
"""Accounts the memory of a buffer while it lives."""


@dataclass(frozen=True)
class FileTransfer:
    """One file to send from rank `src` to another rank `dst`; its name is the same on both."""

    name: str
    size: int
    src: int
    dst: int


def rounds(transfers: Sequence[FileTransfer]) -> list[list[FileTransfer]]:
    """Divide transfers into rounds in which each rank sends at most one file and receives at most one.

    >>> files = [FileTransfer("a", 1, 0, 1), FileTransfer("b", 1, 1, 0), FileTransfer("c", 1, 0, 1)]
    >>> [len(some) for some in rounds(files)]
    [2, 1]
    """
    left, found = list(transfers), []
    while left:
        sending: set[int] = set()
        receiving: set[int] = set()
        taken = []
        for transfer in left:
            if transfer.src not in sending and transfer.dst not in receiving:
                sending.add(transfer.src)
                receiving.add(transfer.dst)
                taken.append(transfer)
        left = [transfer for transfer in left if transfer not in taken]
        found.append(taken)
    return found


def exchange_files(
    comm: Communicator,
    device: torch.device,
    transfers: Sequence[FileTransfer],
    source: Callable[[str], str],
    target: Callable[[str], str],
    hold: Hold,
    *,
    over: bool = False,
) -> None:
    """Send files, with the same `transfers` on all ranks. A collective.

    A rank that cannot read or write still takes part, because others would wait for it, and raises at the end. `device`
    is that of the backend's tensors. `source` and `target` return paths of sent and of received files, which must not
    exist unless they are overwritten in place (`over`). `hold` accounts buffers.
    """
    failure: Exception | None = None
    for these in rounds(transfers):
        sent = next((s for s in these if s.src == comm.rank), None)
        received = next((s for s in these if s.dst == comm.rank), None)
        largest = max(transfer.size for transfer in these)
        piece = min(_MOST, max(_LEAST, -(-largest // _SHARE)))
        with (
            _Reading(sent, source, piece, device, hold) as out,
            _Writing(received, target, piece, device, hold, over=over) as into,
        ):
            for begin in range(0, largest, piece):
                given, given_sizes = out.next(begin, comm.world)
                taken, taken_sizes = into.next(begin, comm.world)
                comm.all_to_all(taken, given, taken_sizes, given_sizes, _LABEL).wait()
                into.keep()
        failure = failure or out.failure or into.failure
    if failure is not None:
        raise failure


_EndT = TypeVar("_EndT", bound="_End")


class _End:
    """This rank's end of a transfer: its file, open in the context, and a buffer of one piece."""

    def __init__(
        self,
        transfer: FileTransfer | None,
        path: Callable[[str], str],
        piece: int,
        device: torch.device,
        hold: Hold,
    ) -> None:
        self.transfer = transfer
        self.failure: Exception | None = None
        self._path = path
        self._piece = piece
        self._file: BinaryIO | None = None
        self._host = torch.empty(piece if transfer else 0, dtype=torch.uint8, device="cpu")
        self._buffer = self._host if device.type == "cpu" else self._host.to(device)
        if transfer is not None:
            hold(self._buffer)

    def _open(self, path: str) -> BinaryIO:
        raise NotImplementedError

    def _count(self, begin: int) -> int:
        return 0 if self.transfer is None else max(0, min(self._piece, self.transfer.size - begin))

    def __enter__(self: _EndT) -> _EndT:
        if self.transfer is not None:
            try:
                self._file = self._open(self._path(self.transfer.name))
            except OSError as error:
                self.failure = error
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                self.failure = self.failure or error


class _Reading(_End):
    def _open(self, path: str) -> BinaryIO:
        return cast(BinaryIO, open(path, "rb", buffering=0))

    def next(self, begin: int, world: int) -> tuple[torch.Tensor, list[int]]:
        sizes, count = [0] * world, self._count(begin)
        if count:
            assert self.transfer is not None
            sizes[self.transfer.dst] = count
            self._read(count)
            if self._buffer is not self._host:
                self._buffer[:count].copy_(self._host[:count])
        return self._buffer[:count], sizes

    def _read(self, count: int) -> None:
        if self._file is None or self.failure is not None:
            return
        view, done = bytes_of(self._host)[:count], 0
        try:
            while done < count:
                got = self._file.readinto(view[done:])  # type: ignore[attr-defined]
                if not got:
                    raise CheckpointError(f"{self._file.name}: ends before the {count} bytes that were announced")
                done += got
        except (OSError, CheckpointError) as error:
            self.failure = error


class _Writing(_End):
    _taken = 0

    def __init__(
        self,
        transfer: FileTransfer | None,
        path: Callable[[str], str],
        piece: int,
        device: torch.device,
        hold: Hold,
        *,
        over: bool,
    ) -> None:
        super().__init__(transfer, path, piece, device, hold)
        self._over = over

    def _open(self, path: str) -> BinaryIO:
        if not self._over:
            return cast(BinaryIO, open(path, "xb", buffering=0))
        assert self.transfer is not None
        descriptor = open_over(path)
        os.ftruncate(descriptor, self.transfer.size)
        return cast(BinaryIO, open(descriptor, "wb", buffering=0))

    def next(self, begin: int, world: int) -> tuple[torch.Tensor, list[int]]:
        sizes, self._taken = [0] * world, self._count(begin)
        if self._taken:
            assert self.transfer is not None
            sizes[self.transfer.src] = self._taken
        return self._buffer[: self._taken], sizes

    def keep(self) -> None:
        if not self._taken or self._file is None or self.failure is not None:
            return
        if self._buffer is not self._host:
            self._host[: self._taken].copy_(self._buffer[: self._taken])
        view = bytes_of(self._host)[: self._taken]
        try:
            done = 0
            while done < len(view):
                done += self._file.write(view[done:])
        except OSError as error:
            self.failure = error
