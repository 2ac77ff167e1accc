"""Disk tier (NVMe offload): each tensor has an extent of the rank's swap file.

Tensors used on the host are read directly into their memory, and written from it. Tensors used on a device pass through
page-locked host memory. Reads begin with `start` (or `look_ahead`) and end with `finish`; a released dirty tensor keeps
its memory until the write ends.
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
        pass

    def settle(self) -> None:
        pass


class Files(Protocol):
    """Interface of a rank's swap file (`shardwise.offload.files.SwapFile`)."""

    def reserve(self, size: int) -> Any:
        """Reserve space."""

    def read(self, extent: Any, memory: torch.Tensor) -> _Transfer:
        """Start a read into host memory."""

    def write(self, extent: Any, memory: torch.Tensor) -> _Transfer:
        """Start a write from host memory."""

    def close(self) -> None:
        """Release all space."""


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


class FakeSwapFile(_Nothing):
    """Fake swap file of a dry run, which stores nothing; `size` is that of the real file."""

    def __init__(self) -> None:
        self.size = 0
        self._taken = 0

    def reserve(self, size: int) -> _FakeExtent:
        """Reserve space."""
        from shardwise.offload.tmpfile import padded

        return _FakeExtent(self, padded(size))

    def take(self, room: int) -> None:
        """Count reserved space, or released space if negative."""
        self._taken += room
        self.size = max(self.size, self._taken)


class _FakeExtent:
    def __init__(self, file: FakeSwapFile, room: int) -> None:
        self._file, self._room = file, room
        file.take(room)

    def free(self) -> None:
        self._file.take(-self._room)


@dataclass
class Disks:
    """The disk tiers of one engine; tiers in one directory share a file.

    `optimizer` and `parameters` are directories (None: not on disk). `label` names the files in errors. `imagined`: a
    dry run, which stores nothing.
    """

    optimizer: Path | None = None
    parameters: Path | None = None
    options: DiskOptions | None = None
    label: str = "the swap file"
    imagined: bool = False

    def __post_init__(self) -> None:
        self.files: dict[Path, Files] = {}

    def _file(self, directory: Path) -> Files:
        # The import loads NumPy, which an engine without disks does not need.
        from shardwise.offload.files import DiskOptions, SwapFile

        return SwapFile(directory, self.options or DiskOptions(), label=self.label)

    @classmethod
    def of(cls, config: Config, rank: int, *, imagined: bool = False) -> Disks:
        """Return the disks of a configuration, for one rank."""
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
        """Bytes of the files by directory, in a dry run."""
        return {directory: file.size for directory, file in self.files.items() if isinstance(file, FakeSwapFile)}

    def place(self, directory: Path | None, device: torch.device, used_on: torch.device | None) -> DiskPlace:
        """Return the tier of a directory, creating its file. Raises OffloadError if that fails."""
        assert directory is not None
        if directory not in self.files:
            self.files[directory] = FakeSwapFile() if self.imagined else self._file(directory)
        return DiskPlace(self.files[directory], device, used_on)


class DiskPlace(StateHome):
    """Disk tier; tensors are used on `used_on` (None: on the engine's device)."""

    lends = True
    at_hand = False
    lags = True

    def __init__(self, file: Files, device: torch.device, used_on: torch.device | None) -> None:
        super().__init__(Tier.DISK, used_on)
        self._file = file
        self._copies = copy_stream(device) if used_on is None and is_far(device) else None

    def keep(self, tensor: torch.Tensor) -> _Kept:
        """Store a tensor's values on the disk. Raises OffloadError if it has too little space."""
        return _Kept(self._file, self._copies, tensor)

    @override
    def close(self) -> None:
        self._file.close()


class _Kept(Stored):
    def __init__(self, file: Files, copies: CopyStream | None, tensor: torch.Tensor) -> None:
        self._file = file
        self._copies = copies
        self._storage = tensor.untyped_storage()
        self._size = self._storage.nbytes()
        self._bytes = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(self._storage)
        self.staged = self._size if copies is not None else 0
        self._reading: _Transfer | None = None
        self._writing: _Transfer | None = None
        self._leaving: torch.Tensor | None = None  # memory of the pending write
        self._near: torch.Tensor | None = None
        self._extent: Any = None
        self._extent = file.reserve(self._size)

    def __del__(self) -> None:
        # Memory in use by threads must not be freed. At interpreter exit, modules may be gone already.
        for transfer in (self._reading, self._writing):
            if transfer is not None:
                transfer.settle()
        if self._extent is not None:  # space was reserved
            self._extent.free()

    @override
    def start(self, *, read: bool) -> None:
        if self._storage.nbytes() != self._size:  # no memory was handed over
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
        raise NotImplementedError("values on a disk must be fetched")

    def shared(self) -> torch.Tensor:
        return self.in_place()

    @override
    def copy_to(self, target: torch.Tensor) -> None:
        flat = target.view(-1).view(torch.uint8)
        if self._reading is None and target.device.type == "cpu":
            self._file.read(self._extent, flat).wait()
        else:
            self.look_ahead()
            near = self._arrived()
            if near.untyped_storage()._cdata != flat.untyped_storage()._cdata:  # not read into the target directly
                self._copy(flat, near)

    def _copy(self, target: torch.Tensor, near: torch.Tensor) -> None:
        target.copy_(near, non_blocking=True)
        if self._copies is not None:
            self._copies.keep_host(near)

    def _arrived(self) -> torch.Tensor:
        reading, near = self._reading, self._near
        self._reading = self._near = None
        assert reading is not None and near is not None
        reading.wait()
        return near

    def _forget_near(self) -> None:
        if self._reading is not None:
            self._arrived()

    def _drop_near(self) -> None:
        if self._reading is not None:
            self._reading.settle()
            self._reading = self._near = None

    def _host_bytes(self) -> torch.Tensor:
        if self._copies is not None:
            return self._copies.host_bytes(self._size)
        return torch.empty(self._size, dtype=torch.uint8, device="cpu")
