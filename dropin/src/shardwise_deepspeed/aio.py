"""Result of `AsyncIOBuilder().load()`: the I/O handle of scripts that swap and save tensors in files of their own."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from shardwise.device.staging import CopyStream
from shardwise.errors import OffloadError
from shardwise.offload.tmpfile import ALIGNMENT, move_all
from shardwise.offload.transfers import bytes_of


class aio_handle:
    """Reads and writes tensors from and to named files, in blocks that threads transfer concurrently.

    Asynchronous transfers end with `wait`. A buffer must not change before the end. Device tensors are copied through
    the host. I/O uses the page cache. A write extends a file if needed and never truncates it.

    Args:
        block_size: bytes of one request.
        queue_depth: requests in flight, of each of `intra_op_parallelism`.
        single_submit, overlap_events: accepted without effect; every request in flight has a thread of its own.
        intra_op_parallelism: factor on the requests in flight.

    Example:
        >>> import tempfile
        >>> handle, path = aio_handle(), tempfile.mkdtemp() + "/values"
        >>> handle.sync_pwrite(torch.arange(4), path)
        1
        >>> back = torch.empty(4, dtype=torch.int64)
        >>> handle.async_pread(back, path), handle.wait()
        (0, 1)
        >>> back
        tensor([0, 1, 2, 3])
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        self._settings = (block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism)
        self._threads = ThreadPoolExecutor(queue_depth * intra_op_parallelism, "shardwise-file")
        self._pending: list[_Transfer] = []
        self._pinned: dict[int, torch.Tensor] = {}

    def pread(self, buffer: torch.Tensor, filename: str, validate: bool, asynchronous: bool, offset: int = 0) -> int:
        """Fill a contiguous tensor with the bytes of a file from `offset` on; return 1, or 0 if asynchronous.

        `validate` has no effect: an unreadable or too short file always raises OffloadError, asynchronously by `wait`.
        """
        return self._begin(buffer, filename, offset, asynchronous, writes=False)

    def pwrite(self, buffer: torch.Tensor, filename: str, validate: bool, asynchronous: bool, offset: int = 0) -> int:
        """Write the bytes of a contiguous tensor into a file from `offset` on; arguments as of `pread`."""
        return self._begin(buffer, filename, offset, asynchronous, writes=True)

    def read(self, buffer: torch.Tensor, filename: str, validate: bool = True, offset: int = 0) -> int:
        """Read synchronously (`pread`)."""
        return self.pread(buffer, filename, validate, False, offset)

    def write(self, buffer: torch.Tensor, filename: str, validate: bool = True, offset: int = 0) -> int:
        """Write synchronously (`pwrite`)."""
        return self.pwrite(buffer, filename, validate, False, offset)

    def sync_pread(self, buffer: torch.Tensor, filename: str, offset: int = 0) -> int:
        """Read synchronously (`pread`)."""
        return self.pread(buffer, filename, True, False, offset)

    def sync_pwrite(self, buffer: torch.Tensor, filename: str, offset: int = 0) -> int:
        """Write synchronously (`pwrite`)."""
        return self.pwrite(buffer, filename, True, False, offset)

    def async_pread(self, buffer: torch.Tensor, filename: str, offset: int = 0) -> int:
        """Read asynchronously (`pread`); `wait` ends the transfer."""
        return self.pread(buffer, filename, True, True, offset)

    def async_pwrite(self, buffer: torch.Tensor, filename: str, offset: int = 0) -> int:
        """Write asynchronously (`pwrite`); `wait` ends the transfer."""
        return self.pwrite(buffer, filename, True, True, offset)

    def wait(self) -> int:
        """Wait for all asynchronous transfers, and return their number. Raises OffloadError if one has failed."""
        pending, self._pending = self._pending, []
        errors = [error for error in (transfer.end() for transfer in pending) if error is not None]
        if errors:
            raise errors[0]
        return len(pending)

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """Return host memory for `num_elem` elements of the example's dtype, page-locked if CUDA is in use.

        It stays allocated until `free_cpu_locked_tensor`.
        """
        cuda = torch.cuda.is_initialized()
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        size = num_elem * example_tensor.element_size()
        made = CopyStream(device).host_bytes(size).view(example_tensor.dtype)
        self._pinned[made.data_ptr()] = made
        return made

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Free a tensor of `new_cpu_locked_tensor`; return True if it was one."""
        return self._pinned.pop(tensor.data_ptr(), None) is not None

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Return True for page-locked memory, and for a tensor of `new_cpu_locked_tensor`."""
        return buffer.data_ptr() in self._pinned or buffer.is_pinned()

    def get_block_size(self) -> int:
        """Return the bytes of one request."""
        return self._settings[0]

    def get_queue_depth(self) -> int:
        """Return the requests in flight, of each of `get_intra_op_parallelism`."""
        return self._settings[1]

    def get_single_submit(self) -> bool:
        """Return `single_submit`."""
        return self._settings[2]

    def get_overlap_events(self) -> bool:
        """Return `overlap_events`."""
        return self._settings[3]

    def get_intra_op_parallelism(self) -> int:
        """Return the factor on the requests in flight."""
        return self._settings[4]

    def get_alignment(self) -> int:
        """Return the preferred alignment of offsets and sizes; any are accepted."""
        return ALIGNMENT

    def _begin(self, buffer: torch.Tensor, filename: str, offset: int, asynchronous: bool, *, writes: bool) -> int:
        self._pending.append(_Transfer(self._threads, self._settings[0], buffer, filename, offset, writes=writes))
        if asynchronous:
            return 0
        error = self._pending.pop().end()
        if error is not None:
            raise error
        return 1


class _Transfer:
    def __init__(
        self, pool: ThreadPoolExecutor, block: int, buffer: torch.Tensor, filename: str, offset: int, *, writes: bool
    ) -> None:
        if not buffer.is_contiguous():
            raise ValueError(f"expected a contiguous tensor, found strides {buffer.stride()} of {tuple(buffer.shape)}")
        self._read_into = None if writes else buffer.detach()
        self._host = buffer.detach().cpu()  # no copy if on the host
        self._what = f"{'writing' if writes else 'reading'} {self._host.nbytes} bytes at offset {offset} of {filename}"
        self._descriptor = -1
        memory = bytes_of(self._host.view(-1).view(torch.uint8))

        def move(start: int) -> None:
            part = memory[start : start + block]
            count = move_all(os.pwritev if writes else os.preadv, self._descriptor, part, offset + start)
            if count < part.size:
                raise OffloadError(f"{self._what}: the file ends after {offset + start + count} bytes")

        try:
            flags = os.O_WRONLY | os.O_CREAT if writes else os.O_RDONLY
            self._descriptor = os.open(filename, flags | os.O_CLOEXEC, 0o600)
            self._parts = [pool.submit(move, start) for start in range(0, memory.size, block)]
        except OSError as error:
            self._parts = [Future()]
            self._parts[0].set_exception(error)

    def end(self) -> OffloadError | None:
        errors = [error for error in (part.exception() for part in self._parts) if error is not None]
        if self._descriptor >= 0:
            os.close(self._descriptor)
        if errors:
            failure = errors[0]
            if not isinstance(failure, OffloadError):
                failure = OffloadError(f"{self._what}: {getattr(failure, 'strerror', None) or failure}")
                failure.__cause__ = errors[0]
            return failure
        if self._read_into is not None and self._host.data_ptr() != self._read_into.data_ptr():
            self._read_into.copy_(self._host)
        return None
