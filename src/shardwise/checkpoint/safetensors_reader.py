"""Files of tensors in the safetensors format, read by range.

The format is a length, a JSON header with the offset of each tensor, and the raw bytes
(https://github.com/huggingface/safetensors). The safetensors library parses the header. It maps a file into memory,
where a damaged disk or a truncated file ends the process; here a range is read straight into its destination, and an
error has a message.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from safetensors import SafetensorError, safe_open

from shardwise.checkpoint.checksums import crc32, open_to_read
from shardwise.device.staging import Staging, is_far
from shardwise.errors import CheckpointError

_NAMES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in _NAMES.items()}
_LONGEST_HEADER = 100_000_000
"""Bytes; the limit of the safetensors library."""

_STAGE = 16 << 20
"""Bytes on the host at a time for conversion, or, twice, for copies to another device, per thread."""

STEP = 512 << 10
"""Bytes that are verified at a time: few enough to stay in a core's cache between reading and hashing."""

_AHEAD = 8 << 20
"""Bytes requested from the system before they are needed. Linux's own guesses reach a third of a disk's rate."""

MOST_DIMENSIONS = 64
MOST_ELEMENTS = 1 << 48
"""Largest number of elements that a file's shape may have."""


def check_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape from a file. Raises ValueError if no tensor has it."""
    count = math.prod(size or 1 for size in shape[: MOST_DIMENSIONS + 1])
    if len(shape) > MOST_DIMENSIONS or min(shape, default=0) < 0 or count > MOST_ELEMENTS:
        raise ValueError(f"{shape!r:.100} is not a shape, or is too large")
    return tuple(shape)


@dataclass(frozen=True)
class Spec:
    """Dtype and shape of a tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Number of bytes of the tensor."""
        return self.dtype.itemsize * math.prod(self.shape)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a contiguous CPU tensor's memory, writable; `numpy()` would forbid resizing the storage (resharding)."""
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


class TensorFile:
    """A file of tensors opened for reading ranges of elements.

    >>> import tempfile, os
    >>> from shardwise.checkpoint.safetensors_writer import write_tensors
    >>> path = os.path.join(tempfile.mkdtemp(), "a.safetensors")
    >>> _ = write_tensors(path, {"x": torch.arange(6.0)})
    >>> with TensorFile(path) as file:
    ...     out = torch.empty(2)
    ...     file.read_into("x", 3, out)
    >>> out
    tensor([3., 4.])
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._descriptor = open_to_read(path)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from error
        try:
            self.specs, self._begins, self.data = self._parse()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _parse(self) -> tuple[dict[str, Spec], dict[str, int], int]:
        """Return the tensors, the offset of each, and the first byte of data. The library refuses gaps and overlaps:
        reading all tensors never takes more memory than the file's size.
        """
        size = os.fstat(self._descriptor).st_size
        length = int.from_bytes(self._read(0, min(size, 8)), "little")
        specs: dict[str, Spec] = {}
        begins: dict[str, int] = {}
        end = 0
        try:
            # Read first, because the library maps the file, and a failing disk would end the process.
            self._read(0, min(size, 8 + length, _LONGEST_HEADER))
            with safe_open(f"/dev/fd/{self._descriptor}", "numpy") as file:  # not another file of this path
                for name in file.offset_keys():
                    found = file.get_slice(name)
                    specs[name] = Spec(_NAMES[found.get_dtype()], check_shape(found.get_shape()))
                    begins[name], end = end, end + specs[name].nbytes
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{self.path}: not a safetensors file, or truncated or damaged: the file has {size} bytes, its header "
                f"should take {length} ({type(error).__name__}: {error})"
            ) from error
        return specs, begins, 8 + length

    def span(self, name: str) -> tuple[int, int]:
        """Return the first byte and the end of a tensor in the file. Raises CheckpointError if it is not there."""
        spec = self._spec(name)
        begin = self.data + self._begins[name]
        return begin, begin + spec.nbytes

    def _spec(self, name: str) -> Spec:
        if name not in self.specs:
            raise CheckpointError(f"{self.path}: there is no tensor {name!r}")
        return self.specs[name]

    def read_into(self, name: str, start: int, out: torch.Tensor) -> None:
        """Read elements from `start` on into a 1-D tensor of any dtype. Raises CheckpointError if that fails."""
        spec = self._spec(name)
        size = spec.dtype.itemsize
        if start < 0 or (start + out.numel()) * size > spec.nbytes:
            raise CheckpointError(f"{self.path}: {name!r} has no elements [{start}, {start + out.numel()})")
        place, values = self.data + self._begins[name] + start * size, out.detach()
        if is_far(out.device) and out.is_contiguous():
            Staging(out.device, out.nbytes, _STAGE).to_device(
                values, lambda part, first: self._convert(spec.dtype, place + first * size, part)
            )
            return
        step = _STAGE // size
        for first in range(0, out.numel(), step):
            self._convert(spec.dtype, place + first * size, values[first : first + step])

    def _convert(self, dtype: torch.dtype, place: int, out: torch.Tensor) -> None:
        if out.dtype == dtype and not is_far(out.device) and out.is_contiguous():
            self._fill(bytes_of(out), place)
            return
        read = torch.empty(out.numel(), dtype=dtype, device="cpu")
        self._fill(bytes_of(read), place)
        out.copy_(read)

    def read(self, name: str) -> torch.Tensor:
        """Return an entire tensor on the CPU."""
        spec = self._spec(name)
        values = torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
        self.read_into(name, 0, values.view(-1))
        return values

    def checksum(self, begin: int, end: int, out: torch.Tensor | None = None) -> str:
        """Return the CRC-32 of bytes of the file, read into `out` (1-D, contiguous, on the CPU) if given."""
        stage = torch.empty(min(STEP, end - begin) if out is None else 0, dtype=torch.uint8, device="cpu")
        data, found = bytes_of(stage if out is None else out.detach()), 0
        for place in range(begin, end, STEP):
            if (place - begin) % _AHEAD == 0 and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._descriptor, place, min(2 * _AHEAD, end - place), os.POSIX_FADV_WILLNEED)
            first = 0 if out is None else place - begin
            piece = data[first : first + min(STEP, end - place)]
            self._fill(piece, place)
            found = crc32(piece, found)
        return f"{found:08x}"

    def _read(self, offset: int, count: int) -> bytes:
        data = bytearray(count)
        self._fill(memoryview(data), offset)
        return bytes(data)

    def _fill(self, out: memoryview, offset: int) -> None:
        # Positional reads, because several threads read at a time.
        try:
            done = 0
            while done < len(out):
                count = os.preadv(self._descriptor, [out[done:]], offset + done)
                if not count:
                    raise CheckpointError(
                        f"{self.path}: ends at byte {offset + done}; expected at least {offset + len(out)} bytes"
                    )
                done += count
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read at byte {offset}: {error.strerror}") from error
