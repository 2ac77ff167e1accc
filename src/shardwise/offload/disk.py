"""A disk as a place: the values of each tensor have an extent of the rank's file, in which nobody else writes.

What is used on the host is read straight into the memory that the tensor has while it is lent, and written from there.
What a device uses goes through page-locked memory of the host. Reading begins with `start` (or `look_ahead`) and ends
with `finish`; what was given back written has its memory until it has been stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from typing_extensions import override

from shardwise.device.staging import CopyStream, copy_stream, is_far
from shardwise.memory import Tier
from shardwise.memory.places import StateHome, Stored

if TYPE_CHECKING:
    from shardwise.config import Config
    from shardwise.offload.files import DiskOptions


class _Transfer(Protocol):
    def wait(self) -> None:
        """Block until it has ended."""

    def settle(self) -> None:
        """The same; it is no matter how it has ended."""


class Files(Protocol):
    """What is asked of the file of a rank (`shardwise.offload.files.SwapFile`)."""

    def reserve(self, size: int) -> Any:
        """Take space."""

    def read(self, extent: Any, memory: torch.Tensor) -> _Transfer:
        """Begin to read into memory of the host."""

    def write(self, extent: Any, memory: torch.Tensor) -> _Transfer:
        """Begin to write memory of the host."""

    def close(self) -> None:
        """Give everything back."""


class _Nothing:
    def read(self, extent: Any, memory: torch.Tensor) -> _Nothing:
        return self

    def write(self, extent: Any, memory: torch.Tensor) -> _Nothing:
        return self

    def wait(self) -> None:
        pass

    def settle(self) -> None:
        pass

    def close(self) -> None:
        pass


class Imagined(_Nothing):
    """The file of a rank that is not there.

    Attributes:
        size: bytes that it would have.
    """

    def __init__(self) -> None:
        self.size = 0
        self._taken = 0

    def reserve(self, size: int) -> _Imagined:
        """Take space."""
        from shardwise.offload.unnamed import padded

        return _Imagined(self, padded(size))

    def take(self, room: int) -> None:
        """Take note of space that is taken, or given back."""
        self._taken += room
        self.size = max(self.size, self._taken)


class _Imagined:
    def __init__(self, file: Imagined, room: int) -> None:
        self._file, self._room = file, room
        file.take(room)

    def free(self) -> None:
        self._file.take(-self._room)


@dataclass
class Disks:
    """Makes the places of one engine that are on disks; those of one directory share a file.

    Attributes:
        optimizer: directory of what belongs to the optimizer; None: it is on no disk.
        parameters: the same of the parameters.
        options: how disks are used; None: as they are by default.
        label: whose files they are, for errors.
        imagined: nothing is stored (dry runs).
    """

    optimizer: Path | None = None
    parameters: Path | None = None
    options: DiskOptions | None = None
    label: str = "the swap file"
    imagined: bool = False

    def __post_init__(self) -> None:
        self.files: dict[Path, Files] = {}

    def _file(self, directory: Path) -> Files:
        # It loads NumPy, which an engine without disks need not have.
        from shardwise.offload.files import DiskOptions, SwapFile

        return SwapFile(directory, self.options or DiskOptions(), label=self.label)

    @classmethod
    def of(cls, config: Config, rank: int, *, imagined: bool = False) -> Disks:
        """Return the disks that a configuration names, for one rank."""
        zero, aio = config.zero_optimization, config.aio
        optimizer, parameters = (
            Path(section.nvme_path).expanduser() if section is not None and section.nvme_path else None
            for section in (zero.offload_optimizer, zero.offload_param)
        )
        options = None
        if optimizer or parameters:
            from shardwise.offload.files import DiskOptions

            options = DiskOptions(int(aio.block_size), int(aio.queue_depth), int(aio.intra_op_parallelism))
        return cls(optimizer, parameters, options, f"rank {rank}'s swap file", imagined)

    @property
    def sizes(self) -> dict[Path, int]:
        """Bytes of the files, by directory, where they are imagined."""
        return {directory: file.size for directory, file in self.files.items() if isinstance(file, Imagined)}

    def place(self, directory: Path | None, device: torch.device, used_on: torch.device | None) -> DiskPlace:
        """Return a place in a directory; its file is made now.

        Raises:
            OffloadError: no file can be made there.
        """
        assert directory is not None
        if directory not in self.files:
            self.files[directory] = Imagined() if self.imagined else self._file(directory)
        return DiskPlace(self.files[directory], device, used_on)


class DiskPlace(StateHome):
    """See the module docstring and `shardwise.memory.places.StateHome`.

    Args:
        file: the rank's.
        device: the engine's.
        used_on: where what lives here is used; None: on the engine's device.
    """

    tier = Tier.DISK
    lends = True
    at_hand = False
    lags = True

    def __init__(self, file: Files, device: torch.device, used_on: torch.device | None) -> None:
        self.used_on = used_on
        self._file = file
        self._copies = copy_stream(device) if used_on is None and is_far(device) else None

    def keep(self, tensor: torch.Tensor) -> _Kept:
        """See `StateHome.keep`.

        Raises:
            OffloadError: the disk has too little space.
        """
        return _Kept(self._file, self._copies, tensor)

    @override
    def close(self) -> None:
        self._file.close()


class _Kept(Stored):
    """The values of one tensor on a disk (`shardwise.memory.places.Stored`)."""

    def __init__(self, file: Files, copies: CopyStream | None, tensor: torch.Tensor) -> None:
        self._file = file
        self._copies = copies
        self._storage = tensor.untyped_storage()
        self._size = self._storage.nbytes()
        self._bytes = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(self._storage)
        self.staged = self._size if copies is not None else 0
        self._reading: _Transfer | None = None
        self._writing: _Transfer | None = None
        self._leaving: torch.Tensor | None = None  # what is being written
        self._near: torch.Tensor | None = None
        self._extent: Any = None
        self._extent = file.reserve(self._size)

    def __del__(self) -> None:
        # Memory that threads still use must not go. When Python ends, modules may have gone before.
        for transfer in (self._reading, self._writing):
            if transfer is not None:
                transfer.settle()
        if self._extent is not None:  # there was space for it
            self._extent.free()

    @override
    def start(self, *, read: bool) -> None:
        if self._storage.nbytes() != self._size:  # nobody has left some for it
            self._storage.resize_(self._size)
        if read:
            self.look_ahead()
        else:
            self._forget_near()

    @override
    def look_ahead(self, target: torch.Tensor | None = None) -> None:
        if self._reading is None:
            if self._copies is not None:
                self._near = self._host_bytes()
            elif target is not None:
                self._near = target.view(-1).view(torch.uint8)
            else:
                self._near = self._bytes if self._storage.nbytes() == self._size else self._host_bytes()
            self._reading = self._file.read(self._extent, self._near)

    @override
    def finish(self) -> None:
        if self._reading is not None:
            near = self._arrived()
            if near is not self._bytes:
                self._copy(self._bytes, near)

    @override
    def give_back(self, *, written: bool) -> None:
        if not written:
            self._drop_near()
        else:
            self._forget_near()
            values = self._bytes
            if self._copies is not None:
                values = self._host_bytes()
                self._copies.follow()
                self._copies.copy(values, self._bytes)
                self._copies.mark().synchronize()
            self._writing, self._leaving = self._file.write(self._extent, values), values

    @override
    def settle(self, leave: Callable[[torch.UntypedStorage], None] | None = None) -> None:
        writing, self._writing = self._writing, None
        try:
            if writing is not None:
                writing.wait()
        finally:
            self._leaving = None
            if leave is not None:
                leave(self._storage)
            else:
                self._storage.resize_(0)

    def in_place(self) -> torch.Tensor:
        """Nothing can be worked on there."""
        raise NotImplementedError("what lives on a disk has to be lent")

    def shared(self) -> torch.Tensor:
        """Nor shared."""
        return self.in_place()

    @override
    def copy_to(self, target: torch.Tensor) -> None:
        flat = target.view(-1).view(torch.uint8)
        if self._reading is None and target.device.type == "cpu":
            self._file.read(self._extent, flat).wait()
        else:
            self.look_ahead()
            near = self._arrived()
            if near.untyped_storage()._cdata != flat.untyped_storage()._cdata:  # it was not read into the target
                self._copy(flat, near)

    def _copy(self, target: torch.Tensor, near: torch.Tensor) -> None:
        target.copy_(near, non_blocking=True)
        if self._copies is not None:
            self._copies.keep_host(near)

    def _arrived(self) -> torch.Tensor:
        """Return what was read, when it is there."""
        reading, near = self._reading, self._near
        self._reading = self._near = None
        assert reading is not None and near is not None
        reading.wait()
        return near

    def _forget_near(self) -> None:
        if self._reading is not None:
            self._arrived()

    def _drop_near(self) -> None:
        """Wait for what is being read, which nobody wants."""
        if self._reading is not None:
            self._reading.settle()
            self._reading = self._near = None

    def _host_bytes(self) -> torch.Tensor:
        if self._copies is not None:
            return self._copies.host_bytes(self._size)
        return torch.empty(self._size, dtype=torch.uint8, device="cpu")
