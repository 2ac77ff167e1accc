"""File transfer between ranks without a shared file system."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import BinaryIO, cast

import torch

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
        taken: list[FileTransfer] = []
        later: list[FileTransfer] = []
        for transfer in left:
            now = transfer.src not in sending and transfer.dst not in receiving
            if now:
                sending.add(transfer.src)
                receiving.add(transfer.dst)
            (taken if now else later).append(transfer)
        left = later
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
        given, taken = (torch.empty(piece if t else 0, dtype=torch.uint8, device=device) for t in (sent, received))
        for buffer in (given, taken):
            if buffer.numel():
                hold(buffer)
        with (
            _Side(None if sent is None else functools.partial(_open, source, sent)) as reader,
            _Side(None if received is None else functools.partial(_create, target, received, over)) as writer,
        ):
            for begin in range(0, largest, piece):
                out, into = [0] * comm.world, [0] * comm.world
                if sent is not None:
                    out[sent.dst] = max(0, min(piece, sent.size - begin))
                if received is not None:
                    into[received.src] = max(0, min(piece, received.size - begin))
                outgoing, arriving = given[: sum(out)], taken[: sum(into)]
                reader.run(functools.partial(_read, outgoing))
                comm.all_to_all(arriving, outgoing, into, out, _LABEL).wait()
                writer.run(functools.partial(_write, arriving))
        failure = failure or reader.failure or writer.failure
    if failure is not None:
        raise failure


def _open(source: Callable[[str], str], transfer: FileTransfer) -> BinaryIO:
    return cast(BinaryIO, open(source(transfer.name), "rb", buffering=0))


def _create(target: Callable[[str], str], transfer: FileTransfer, over: bool) -> BinaryIO:
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (0 if over else os.O_EXCL)
    descriptor = os.open(target(transfer.name), flags, 0o666)
    os.ftruncate(descriptor, transfer.size)
    return cast(BinaryIO, open(descriptor, "wb", buffering=0))


def _read(into: torch.Tensor, file: BinaryIO) -> None:
    host = into if into.device.type == "cpu" else torch.empty_like(into, device="cpu")
    view, done = bytes_of(host), 0
    while done < len(view):
        got = file.readinto(view[done:])  # type: ignore[attr-defined]
        if not got:
            raise CheckpointError(f"{file.name}: ends before the {len(view)} bytes that were announced")
        done += got
    if host is not into:
        into.copy_(host)


def _write(values: torch.Tensor, file: BinaryIO) -> None:
    view, done = bytes_of(values.cpu()), 0
    while done < len(view):
        done += file.write(view[done:])


class _Side:
    """This rank's file of a transfer, open in the context; `failure` is the first error."""

    def __init__(self, opened: Callable[[], BinaryIO] | None) -> None:
        self.failure: Exception | None = None
        self._opened = opened
        self._file: BinaryIO | None = None

    def run(self, work: Callable[[BinaryIO], None]) -> None:
        if self._file is not None and self.failure is None:
            try:
                work(self._file)
            except (OSError, CheckpointError) as error:
                self.failure = error

    def __enter__(self) -> _Side:
        try:
            self._file = None if self._opened is None else self._opened()
        except OSError as error:
            self.failure = error
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()
