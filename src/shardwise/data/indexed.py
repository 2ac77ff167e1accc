"""Rows of integers of different length in two files: `PATH.bin` has the values, `PATH.idx` the lengths and positions.

The form is that of Megatron's and DeepSpeed's memory-mapped datasets. The index has, without gaps and little-endian: 9
bytes `MMIDIDX`, NUL, NUL; the version 1 (u64); a code of the dtype (u8); the numbers of rows and of documents + 1
(u64); the length of each row (i32); its first byte in the values (i64); the first row of each document, and the end
(i64).
Reading maps the files and runs no code.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from shardwise.errors import ConfigError, UsageError

_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")
_CODES: dict[int, Any] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
# Writers differ in the codes from 6 on; the number of bytes of a value decides, as far as it can.
_OTHERS: dict[tuple[int, int], Any] = {(6, 2): np.uint16, (8, 2): np.uint16, (8, 8): np.uint64, (7, 4): np.uint32}

Array = np.ndarray[Any, np.dtype[Any]]  # without numpy.typing, which would be one more import


def data_file_path(prefix_path: str | os.PathLike[str]) -> str:
    """Return the path of the values."""
    return f"{os.fspath(prefix_path)}.bin"


def index_file_path(prefix_path: str | os.PathLike[str]) -> str:
    """Return the path of the index."""
    return f"{os.fspath(prefix_path)}.idx"


class MMapIndexedDataset(Dataset[Array]):
    """Rows of a pair of files, mapped into memory.

    Args:
        path: of the files, without `.bin` and `.idx`.
        integers: 4-byte values of code 7, which are floating-point numbers with some writers, are unsigned integers.

    Attributes:
        sizes: length of each row (int32).
        doc_idx: first row of each document, and the number of rows (int64).
        values: all values, one row after the other, if they are stored in this order.

    Raises:
        ConfigError: the files are missing, are no such files, or are not complete.
    """

    def __init__(self, path: str | os.PathLike[str], skip_warmup: bool = False, *, integers: bool = False) -> None:
        self.path, self._integers = os.fspath(path), integers
        index, values = index_file_path(path), data_file_path(path)
        try:
            head, length = np.memmap(index, mode="r", order="C"), os.path.getsize(values)
            magic, version, code, rows, documents = _HEAD.unpack_from(head[: _HEAD.size].tobytes())
        except (OSError, ValueError, struct.error) as error:
            raise ConfigError(f"{self.path}.idx, .bin: no indexed dataset can be read there: {error}") from error
        wanted = _HEAD.size + 12 * rows + 8 * documents
        if magic != _MAGIC or version != 1 or len(head) < wanted:
            raise ConfigError(
                f"{index}: expected an index of version 1 and {wanted} bytes, found {bytes(magic)!r}, version "
                f"{version}, {len(head)} bytes; give the path of an indexed dataset without .idx and .bin"
            )
        self.sizes: Array = np.frombuffer(head, "<i4", rows, _HEAD.size)
        self._starts: Array = np.frombuffer(head, "<i8", rows, _HEAD.size + 4 * rows)
        self.doc_idx: Array = np.frombuffer(head, "<i8", documents, _HEAD.size + 12 * rows)
        count = int(self.sizes.sum(dtype=np.int64))
        self._dtype = self._dtype_of(index, code, length, count)
        ends = self._starts + self.sizes.astype(np.int64) * self._dtype.itemsize
        if rows and (int(self.sizes.min()) < 0 or int(self._starts.min()) < 0 or int(ends.max()) > length):
            raise ConfigError(f"{index}: it has rows outside of the {length} bytes of {values}; one of them is damaged")
        self._in_order = bool(np.array_equal(self._starts[1:], ends[:-1])) and not (rows and self._starts[0])
        self._map: Array = np.memmap(values, self._dtype, "r") if length else np.empty(0, self._dtype)

    def _dtype_of(self, index: str, code: int, length: int, count: int) -> np.dtype[Any]:
        size = length // count if count and length % count == 0 else 0
        found = _OTHERS.get((code, size)) if code > 5 else _CODES.get(code)
        if found is None or (code == 7 and not self._integers):
            raise ConfigError(
                f"{index}: values of code {code} and {size} bytes are not known here; write the dataset anew with one "
                f"of {', '.join(np.dtype(dtype).name for dtype in _CODES.values())}"
            )
        return np.dtype(found).newbyteorder("<")

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the arrays: a worker process maps the files itself."""
        arrays = ("sizes", "_starts", "doc_idx", "_map")
        return {name: value for name, value in vars(self).items() if name not in arrays}

    def __setstate__(self, state: dict[str, Any]) -> None:
        MMapIndexedDataset.__init__(self, state["path"], integers=state["_integers"])
        vars(self).update(state)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Array:
        return self.get(index)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> Array:
        """Return a row, or `length` of its values from `offset` on."""
        size = int(self.sizes[idx])
        stop = size if length is None else offset + length
        if not 0 <= offset <= stop <= size:
            raise UsageError(f"{self.path}: row {idx} has {size} values; {offset} to {stop} are not in it")
        first = int(self._starts[idx]) // self._dtype.itemsize
        return self._map[first + offset : first + stop]

    @property
    def values(self) -> Array:
        """All values, one row after the other. Raises ConfigError if rows are stored in another order."""
        if not self._in_order:
            raise ConfigError(f"{self.path}.idx: rows are not stored in their order; write the dataset anew")
        return self._map[: int(self.sizes.sum(dtype=np.int64))]

    @staticmethod
    def exists(path: str | os.PathLike[str]) -> bool:
        """Return True if both files are there."""
        return os.path.exists(index_file_path(path)) and os.path.exists(data_file_path(path))


class MMapIndexedDatasetBuilder:
    """Writes an indexed dataset; the files appear when `finalize` has written them completely.

    Args:
        out_file: path of the values (`.bin`).
        dtype: of the values: uint8, int8, int16, int32, int64 or uint16.
    """

    def __init__(self, out_file: str | os.PathLike[str], dtype: Any = np.int64) -> None:
        self._path, self._dtype = os.fspath(out_file), np.dtype(dtype)
        self._code = next((code for code, known in _CODES.items() if np.dtype(known) == self._dtype), None)
        if self._code is None:
            names = ", ".join(np.dtype(known).name for known in _CODES.values())
            raise UsageError(f"{self._path}: {self._dtype.name} values cannot be indexed; use one of {names}")
        self._file = open(f"{self._path}.tmp", "wb")  # noqa: SIM115
        self._sizes: list[Array] = []
        self._documents = [0]
        self._rows = 0

    def add_item(self, tensor: Any) -> None:
        """Add a row. Raises UsageError for values that the dtype does not hold."""
        row = tensor.numpy(force=True) if isinstance(tensor, torch.Tensor) else np.asarray(tensor)
        self.add_rows(row.reshape(-1), [row.size])

    def add_rows(self, values: Array, sizes: Sequence[int] | Array) -> None:
        """Add rows, whose values follow each other, by their lengths."""
        written = values.astype(self._dtype.newbyteorder("<"))
        if not np.array_equal(written, values):
            raise UsageError(f"{self._path}: {self._dtype.name} does not hold all values; use a larger dtype")
        written.tofile(self._file)
        self._sizes.append(np.asarray(sizes, "<i4"))
        self._rows += len(sizes)

    def end_document(self) -> None:
        """End a document with the newest row."""
        self._documents.append(self._rows)

    def finalize(self, index_file: str | os.PathLike[str]) -> None:
        """Write the index, and give both files their names."""
        sizes = np.concatenate([np.empty(0, "<i4"), *self._sizes])
        ends = np.cumsum(sizes, dtype="<i8") * self._dtype.itemsize
        documents = np.asarray(self._documents, "<i8")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        temporary = f"{os.fspath(index_file)}.tmp"
        with open(temporary, "wb") as file:
            file.write(_HEAD.pack(_MAGIC, 1, self._code, len(sizes), len(documents)))
            for part in (sizes, ends - sizes.astype("<i8") * self._dtype.itemsize, documents):
                file.write(part.tobytes())
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{self._path}.tmp", self._path)
        os.replace(temporary, index_file)


def smallest_dtype(values: Array) -> np.dtype[Any]:
    """Return the smallest dtype that holds integers and can be indexed. Raises UsageError for other numbers."""
    whole = values.astype(np.int64)
    if not np.array_equal(whole, values):
        raise UsageError("an indexed dataset holds integers; scale and round the values")
    least, most = (int(whole.min()), int(whole.max())) if len(whole) else (0, 0)
    order = (np.uint8, np.int8, np.uint16, np.int16, np.int32, np.int64)
    return next(np.dtype(one) for one in order if np.iinfo(one).min <= least and most <= np.iinfo(one).max)


def write_rows(path: str, values: Array, sizes: Sequence[int] | Array, dtype: Any = None) -> None:
    """Write a whole indexed dataset; its dtype is the smallest that holds the values unless given."""
    builder = MMapIndexedDatasetBuilder(data_file_path(path), smallest_dtype(values) if dtype is None else dtype)
    builder.add_rows(values, sizes)
    builder.end_document()
    builder.finalize(index_file_path(path))
