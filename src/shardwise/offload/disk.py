"""Disk tier (NVMe offload): each tensor has an extent of the rank's swap file.

Tensors used on the host are read directly into their memory, and written from it. Tensors used on a device pass through
a pool of page-locked host memory, by a copy stream: their device memory is released in the order of that stream, and a
thread waits for the copy before it writes the memory, or reads into it again. Reads begin with `start` (or
`look_ahead`) and end with `finish`; a released dirty tensor of the host keeps its memory until the write ends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from typing_extensions import override

from shardwise.compat import has_values
from shardwise.device.hostmemory import HostMemory, HostPool
from shardwise.device.staging import Copied, CopyStream, copy_stream, is_far
from shardwise.memory import Accountant, Category, Tier
from shardwise.memory.places import StateHome, Stored

if TYPE_CHECKING:
    from shardwise.config import Config
    from shardwise.offload.files import DiskOptions, SwapFile
    from shardwise.offload.transfers import Transfer


class FakeSwapFile:
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

    def read(self, extent: Any, memory: torch.Tensor, ready: Callable[[], None] | None = None) -> FakeSwapFile:
        """Return a transfer that has ended."""
        return self

    def write(self, extent: Any, memory: torch.Tensor, ready: Callable[[], None] | None = None) -> FakeSwapFile:
        """Return a transfer that has ended."""
        return self

    def wait(self) -> None:
        """Return at once."""

    settle = close = wait


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
    dry run, which stores nothing. `accountant` counts host memory through which tensors of a device pass.
    """

    optimizer: Path | None = None
    parameters: Path | None = None
    options: DiskOptions | None = None
    label: str = "the swap file"
    imagined: bool = False
    accountant: Accountant | None = None

    def __post_init__(self) -> None:
        self.files: dict[Path, SwapFile | FakeSwapFile] = {}

    @classmethod
    def of(cls, config: Config, rank: int, *, imagined: bool = False, accountant: Accountant | None = None) -> Disks:
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
        return cls(optimizer, parameters, options, f"rank {rank}'s swap file", imagined, accountant)

    @property
    def sizes(self) -> dict[Path, int]:
        """Bytes of the files by directory."""
        return {directory: file.size for directory, file in self.files.items()}

    def place(self, directory: Path | None, device: torch.device, used_on: torch.device | None) -> DiskPlace:
        """Return the tier of a directory, creating its file. Raises OffloadError if that fails."""
        assert directory is not None
        if directory not in self.files and self.imagined:
            self.files[directory] = FakeSwapFile()
        elif directory not in self.files:
            # The import loads NumPy, which an engine without disks does not need.
            from shardwise.offload.files import DiskOptions, SwapFile

            self.files[directory] = SwapFile(directory, self.options or DiskOptions(), label=self.label)
        return DiskPlace(self.files[directory], device, used_on, self.accountant)


class DiskPlace(StateHome):
    """Disk tier; tensors are used on `used_on` (None: on the engine's device)."""

    needs_acquiring = True
    at_hand = False
    lags = True

    def __init__(
        self,
        file: SwapFile | FakeSwapFile,
        device: torch.device,
        used_on: torch.device | None,
        accountant: Accountant | None = None,
    ) -> None:
        super().__init__(Tier.DISK, used_on)
        self._file = file
        self._way: _Way | None = None
        if used_on is None and is_far(device):
            copies = copy_stream(device)
            hold = None
            if accountant is not None:
                hold = functools.partial(accountant.hold, Category.BUFFERS, tier=Tier.HOST)
            self._way = _Way(copies, HostPool(copies, hold=hold))

    def keep(self, tensor: torch.Tensor) -> _Kept:
        """Store a tensor's values on the disk. Raises OffloadError if it has too little space."""
        return _Kept(self._file, self._way, tensor)

    @override
    def close(self) -> None:
        self._file.close()
        if self._way is not None:
            self._way.pool.close()


class _Way(NamedTuple):
    """Between a device and the disk: a copy stream and host memory."""

    copies: CopyStream
    pool: HostPool


class _Pending(NamedTuple):
    """A transfer and its memory, which must stay allocated until the end; `block`: of the pool."""

    transfer: Transfer | FakeSwapFile
    memory: torch.Tensor
    block: HostMemory | None = None


class _Kept(Stored):
    def __init__(self, file: SwapFile | FakeSwapFile, way: _Way | None, tensor: torch.Tensor) -> None:
        self._file = file
        self._copies = None if way is None else way.copies
        self._pool = None if way is None else way.pool
        self._storage = tensor.untyped_storage()
        self._size = self._storage.nbytes()
        self._bytes = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(self._storage)
        self.staged = way is not None
        self._moved: Copied | None = None  # the copy stream's last event of an acquisition
        self._read: _Pending | None = None
        self._write: _Pending | None = None
        self._extent: Any = None
        self._extent = file.reserve(self._size)

    def __del__(self) -> None:
        # Memory in use by threads must not be freed. At interpreter exit, modules may be gone already.
        for pending in (self._read, self._write):
            if pending is not None:
                pending.transfer.settle()
                self._let_go(pending)
        if self._extent is not None:  # space was reserved
            self._extent.free()

    @override
    def start(self, *, read: bool) -> None:
        if self._copies is not None:
            with self._copies.use():
                self._storage.resize_(self._size)
            self._moved = self._copies.mark()
        elif self._storage.nbytes() != self._size:  # no memory was handed over
            self._storage.resize_(self._size)
        if read:
            self.look_ahead()
        else:
            self._drop_read()

    @override
    def look_ahead(self, target: torch.Tensor | None = None) -> None:
        if self._read is not None:
            return
        if self._copies is not None:
            block, memory = self._take()
            self._read = _Pending(self._file.read(self._extent, memory, block.wait), memory, block)
            return
        if target is not None:
            memory = target.view(-1).view(torch.uint8)
        elif self._storage.nbytes() == self._size:
            memory = self._bytes
        else:
            memory = torch.empty(self._size, dtype=torch.uint8, device="cpu")
        self._read = _Pending(self._file.read(self._extent, memory), memory)

    @override
    def finish(self) -> None:
        if self._copies is None:
            if self._read is not None:
                self._arrive(self._bytes)
            return
        if self._read is not None:
            with self._copies.use():
                self._arrive(self._bytes)
            self._moved = self._copies.mark()
        if self._moved is not None:
            self._moved.wait()

    @override
    def give_back(self, *, written: bool) -> None:
        self._drop_read()
        if self._copies is None:
            if written:
                self._write = _Pending(self._file.write(self._extent, self._bytes), self._bytes)
            return
        self._copies.follow()
        if written:
            block, values = self._take()
            block.precede(self._copies)
            self._copies.copy(values, self._bytes)
            # Memory on its first release belongs to another stream, which must not reuse it before the copy.
            self._copies.keep(self._bytes)
        with self._copies.use():
            self._storage.resize_(0)
        if written:
            copied = self._copies.mark()
            block.used(copied)
            self._write = _Pending(self._file.write(self._extent, values, copied.synchronize), values, block)

    @override
    def follow(self) -> None:
        if self._copies is not None:
            self._copies.follow()

    @override
    def settle(self, leave: Callable[[torch.UntypedStorage], None] | None = None) -> None:
        write, self._write = self._write, None
        try:
            if write is not None:
                write.transfer.wait()
        finally:
            if write is not None:
                self._let_go(write)
            write = None
            if leave is not None:
                leave(self._storage)
            elif self._copies is None:
                self._storage.resize_(0)

    def in_place(self) -> torch.Tensor:
        raise NotImplementedError("values on a disk must be fetched")

    shared = in_place

    @override
    def copy_to(self, target: torch.Tensor) -> None:
        flat = target.view(-1).view(torch.uint8)
        if self._read is None and target.device.type == "cpu":
            self._file.read(self._extent, flat).wait()
        else:
            self.look_ahead()
            self._arrive(flat)

    def _arrive(self, target: torch.Tensor) -> None:
        """End the pending read and copy its values into `target`, unless it has read them there."""
        assert self._read is not None
        read, self._read = self._read, None
        try:
            read.transfer.wait()
            if read.memory.untyped_storage()._cdata != target.untyped_storage()._cdata:
                target.copy_(read.memory, non_blocking=True)
                if self._copies is not None and read.block is not None:
                    read.block.used(self._copies.mark_current())
        finally:
            self._let_go(read)

    def _drop_read(self) -> None:
        """Wait for the end of the pending read, whose values are not needed."""
        if self._read is not None:
            read, self._read = self._read, None
            read.transfer.settle()
            self._let_go(read)

    def _take(self) -> tuple[HostMemory, torch.Tensor]:
        """Return a block of the pool, which earlier copies may still use, and as many bytes of it as the tensor has."""
        assert self._pool is not None
        block = self._pool.take(self._size, real=has_values(self._bytes))
        return block, block.bytes[: self._size]

    def _let_go(self, ended: _Pending) -> None:
        if self._pool is not None and ended.block is not None:
            self._pool.give_back(ended.block)
