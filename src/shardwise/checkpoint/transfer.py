"""File transfer between ranks without a shared file system."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from shardwise.checkpoint.agree import collective_step
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
        sending: dict[int, FileTransfer] = {}
        receiving: dict[int, FileTransfer] = {}
        for transfer in left:
            if transfer.src not in sending and transfer.dst not in receiving:
                sending[transfer.src] = receiving[transfer.dst] = transfer
        taken = set(sending.values())
        found.append(list(sending.values()))
        left = [transfer for transfer in left if transfer not in taken]
    return found


def exchange_files(
    comm: Communicator, device: torch.device, transfers: Sequence[FileTransfer], folder: str, hold: Hold
) -> None:
    """Send files from this rank's `folder` to that of others, with the same `transfers` on all ranks. A collective.

    Files that exist are overwritten in place. A rank without memory for its buffers ends the exchange on all ranks. One
    that cannot read or write still takes part, because others would wait for it, and raises at the end. `device` is
    that of the backend's tensors. `hold` accounts buffers.
    """
    divided = rounds(transfers)
    with collective_step(comm, "memory to send files"):
        sending = [_piece(these) for these in divided if any(one.src == comm.rank for one in these)]
        receiving = [_piece(these) for these in divided if any(one.dst == comm.rank for one in these)]
        given, taken = (
            torch.empty(max(sizes, default=0), dtype=torch.uint8, device=device) for sizes in (sending, receiving)
        )
        for buffer in (given, taken):
            if buffer.numel():
                hold(buffer)
    failure: Exception | None = None
    for these in divided:
        sent = next((s for s in these if s.src == comm.rank), None)
        received = next((s for s in these if s.dst == comm.rank), None)
        piece = _piece(these)
        for begin in range(0, max(transfer.size for transfer in these), piece):
            out, into = [0] * comm.world, [0] * comm.world
            if sent is not None:
                out[sent.dst] = max(0, min(piece, sent.size - begin))
            if received is not None:
                into[received.src] = max(0, min(piece, received.size - begin))
            outgoing, arriving = given[: sum(out)], taken[: sum(into)]
            try:
                if sent is not None and failure is None:
                    _read(os.path.join(folder, sent.name), begin, outgoing)
            except Exception as error:
                failure = error
            comm.all_to_all(arriving, outgoing, into, out, _LABEL).wait()
            try:
                if received is not None and failure is None:
                    _write(os.path.join(folder, received.name), received.size, begin, arriving)
            except Exception as error:
                failure = error
    if failure is not None:
        raise failure


def _piece(transfers: Sequence[FileTransfer]) -> int:
    return min(_MOST, max(_LEAST, -(-max(transfer.size for transfer in transfers) // _SHARE)))


def _read(path: str, begin: int, into: torch.Tensor) -> None:
    host = into if into.device.type == "cpu" else torch.empty_like(into, device="cpu")
    with open(path, "rb") as file:
        file.seek(begin)
        if host.nbytes and file.readinto(bytes_of(host)) < host.nbytes:
            raise CheckpointError(f"{path}: ends before the {begin + host.nbytes} bytes that were announced")
    if host is not into:
        into.copy_(host)


def _write(path: str, size: int, begin: int, values: torch.Tensor) -> None:
    host = values.cpu()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    with open(descriptor, "wb") as file:
        file.truncate(size)
        file.seek(begin)
        file.write(bytes_of(host))
