"""Files of tensors: the safetensors format, written as a stream and read by range.

The format is a length, a JSON header that says where each tensor lies, and the raw bytes
(https://github.com/huggingface/safetensors). It can be read by the safetensors library and runs no code.
It is written and read here rather than through that library for three reasons: tensors are streamed from where
they are, with no second copy in memory; a checksum of every block is taken on the way; and a reader takes any
range of elements straight into its destination.
"""

from __future__ import annotations

import ctypes
import json
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType

import torch

from shardwise.checkpoint.blocks import BLOCK
from shardwise.checkpoint.blocks import FileFacts as FileFacts
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
"""Names of dtypes in the format."""


@dataclass(frozen=True)
class Spec:
    """Dtype and shape of a tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Number of bytes of the tensor."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, writable; valid as long as the tensor lives.

    Not by way of `numpy()`: that would forbid for ever to resize the storage, which is how parameters are released.
    """
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


class TensorFile:
    """A file of tensors opened for reading ranges of elements.

    Args:
        path: the file.

    Raises:
        CheckpointError: it cannot be opened, or is not what its header says.

    >>> import tempfile, os
    >>> from shardwise.checkpoint.tensorwriter import write_tensors
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
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115  (closed by close())
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from error
        try:
            self.specs, self._begins, self.data = self._parse()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _parse(self) -> tuple[dict[str, Spec], dict[str, int], int]:
        size = os.fstat(self._file.fileno()).st_size
        length = int.from_bytes(self._file.read(8), "little")
        if size < 8 or length > size - 8:
            raise CheckpointError(
                f"{self.path}: not a safetensors file, or truncated: its header should take {length} bytes, the file "
                f"has {size}"
            )
        specs: dict[str, Spec] = {}
        begins: dict[str, int] = {}
        end = 0
        try:
            header = json.loads(self._read(8, length))
            for name, entry in header.items():
                if name != "__metadata__":
                    specs[name] = spec = Spec(_NAMES[entry["dtype"]], tuple(int(n) for n in entry["shape"]))
                    begins[name], stop = (int(n) for n in entry["data_offsets"])
                    if begins[name] < 0 or stop - begins[name] != spec.nbytes:
                        raise ValueError(f"{name!r} has wrong offsets")
                    end = max(end, stop)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{self.path}: the header is damaged ({type(error).__name__}: {error})") from error
        if size != 8 + length + end:
            raise CheckpointError(
                f"{self.path}: expected {8 + length + end} bytes, found {size}: the file is truncated or was changed"
            )
        return specs, begins, 8 + length

    def span(self, name: str) -> tuple[int, int]:
        """Return the first byte and the end of a tensor's data in the file."""
        begin = self.data + self._begins[name]
        return begin, begin + self.specs[name].nbytes

    def read_into(self, name: str, start: int, out: torch.Tensor) -> None:
        """Read `out.numel()` elements of the flattened tensor, from element `start` on, into a 1-D tensor.

        Values are converted if `out` has another dtype.

        Raises:
            CheckpointError: the tensor or range does not exist, or the file cannot be read.
        """
        spec = self.specs.get(name)
        if spec is None:
            raise CheckpointError(f"{self.path}: there is no tensor {name!r}")
        first = start * spec.dtype.itemsize
        count = out.numel() * spec.dtype.itemsize
        if start < 0 or first + count > spec.nbytes:
            raise CheckpointError(f"{self.path}: {name!r} has no elements [{start}, {start + out.numel()})")
        direct = out.dtype == spec.dtype and out.device.type == "cpu" and out.is_contiguous()
        target = out.detach() if direct else torch.empty(out.numel(), dtype=spec.dtype, device="cpu")
        if count:
            self._fill(bytes_of(target), self.data + self._begins[name] + first)
        if not direct:
            out.detach().copy_(target)

    def read(self, name: str) -> torch.Tensor:
        """Return a whole tensor on the CPU."""
        if name not in self.specs:
            raise CheckpointError(f"{self.path}: there is no tensor {name!r}")
        spec = self.specs[name]
        values = torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
        self.read_into(name, 0, values.view(-1))
        return values

    def wrong_blocks(self, checksums: Iterable[str], blocks: Iterable[int]) -> list[int]:
        """Return those of some blocks whose bytes do not have the checksum that they should have."""
        expected = list(checksums)
        size = os.fstat(self._file.fileno()).st_size
        buffer = memoryview(bytearray(BLOCK))
        wrong = []
        for block in blocks:
            part = buffer[: min(BLOCK, size - block * BLOCK)]
            self._fill(part, block * BLOCK)
            if f"{zlib.crc32(part):08x}" != expected[block]:
                wrong.append(block)
        return wrong

    def _read(self, offset: int, count: int) -> bytes:
        data = bytearray(count)
        self._fill(memoryview(data), offset)
        return bytes(data)

    def _fill(self, out: memoryview, offset: int) -> None:
        try:
            self._file.seek(offset)
            done = 0
            while done < len(out):
                count = self._file.readinto(out[done:])
                if not count:
                    raise CheckpointError(
                        f"{self.path}: ends at byte {offset + done}; expected at least {offset + len(out)} bytes"
                    )
                done += count
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read at byte {offset}: {error.strerror}") from error
