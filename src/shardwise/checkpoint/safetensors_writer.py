"""Writing files of tensors as a stream; see `shardwise.checkpoint.safetensors_reader` for the format.

The safetensors library writes tensors that are in host memory all at once. Tensors here may be on a device or on a disk
and are fetched a few at a time, and their checksums are computed on the way.

Large files written past the page cache (O_DIRECT) do not wait for the dirty pages of other programs, and leave their
cached data in memory. A load on the same machine then reads from the disk.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from shardwise.checkpoint.checksums import FileFacts, crc32
from shardwise.checkpoint.protocols import Fetch, in_place
from shardwise.checkpoint.safetensors_reader import DTYPE_NAMES, Spec, bytes_of
from shardwise.device.staging import Staging, is_far
from shardwise.errors import CheckpointError

LARGE = 64 << 20
"""Bytes of the smallest file that is written past the page cache."""

_BUFFER = 8 << 20
"""Bytes of one direct write; a multiple of every file system's block size."""


LINE = 64
"""Bytes of a cache line: copies between tensors that begin at different places of one take a fifth longer."""


class FileWriter:
    """A file of `size` bytes, written in order, new unless `over` (in place). With `direct` it is written past the page
    cache if possible.
    """

    def __init__(self, path: str, size: int, *, direct: bool = False, over: bool = False) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (0 if over else os.O_EXCL)
        self._descriptor = os.open(path, flags, 0o666)
        self._size = size
        self._filled = 0
        # Set on the open file, because open() may fail and leave a file.
        self.direct = direct and size >= LARGE and not over and self._pass_by(True)
        self._buffer = mmap.mmap(-1, _BUFFER) if self.direct else None  # page-aligned, as O_DIRECT requires

    def write(self, data: memoryview) -> None:
        """Append bytes; they may change after the return."""
        if self._buffer is None:
            self._put(data)
            return
        start = 0
        while start < len(data):
            count = min(len(data) - start, _BUFFER - self._filled)
            self._buffer[self._filled : self._filled + count] = data[start : start + count]
            self._filled += count
            start += count
            if self._filled == _BUFFER:
                self._put(memoryview(self._buffer))
                self._filled = 0

    def seek(self, place: int) -> None:
        """Continue writing at another byte, if not `direct`."""
        os.lseek(self._descriptor, place, os.SEEK_SET)

    def finish(self) -> None:
        """Close the file; its bytes are on disk at return. Raises OSError if writing failed."""
        if self._buffer is not None and self._filled:
            self._pass_by(False)  # the last bytes are no multiple of the block size
            self._put(memoryview(self._buffer)[: self._filled])
        os.ftruncate(self._descriptor, self._size)
        os.fsync(self._descriptor)
        self.abandon()

    def abandon(self) -> None:
        """Close the file without finishing it."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _put(self, data: memoryview) -> None:
        done = 0
        while done < len(data):
            try:
                done += os.write(self._descriptor, data[done:])
            except OSError as error:
                # Some file systems refuse direct writes, or this block size, only now.
                if error.errno != errno.EINVAL or not self.direct:
                    raise
                self.direct = self._pass_by(False)

    def _pass_by(self, wanted: bool) -> bool:
        flag = getattr(os, "O_DIRECT", 0)
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | flag if wanted else flags & ~flag)
        except OSError:
            return False
        return wanted and flag != 0


def file_order(specs: Mapping[str, Spec]) -> list[str]:
    """Return the order of tensors in a file: wide dtypes first, which aligns every tensor."""
    return sorted(specs, key=lambda name: -specs[name].dtype.itemsize)


def on_host(tensors: Sequence[torch.Tensor], device: torch.device) -> Iterator[memoryview]:
    """Yield the bytes of tensors of one device, one after the other; each piece is valid until the next iteration."""
    if not is_far(device):
        for tensor in tensors:
            whole = tensor.detach().contiguous()
            yield bytes_of(whole)
    elif size := sum(tensor.nbytes for tensor in tensors):
        for part in Staging(device, size).to_host(tensors):
            yield bytes_of(part)


def layout_of(
    specs: Mapping[str, Spec], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int], int]:
    """Return the beginning of a file of some tensors, the first byte of each in `file_order`, and the file's size.
    Raises CheckpointError if a dtype has no name in the format.

    >>> beginning, places, size = layout_of({"x": Spec(torch.float32, (2, 3))})
    >>> places["x"] == len(beginning), size - places["x"]
    (True, 24)
    """
    offsets: dict[str, int] = {}
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in file_order(specs):
        spec = specs[name]
        if spec.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{name}: safetensors files have no dtype {spec.dtype}; convert the tensor")
        offsets[name] = end
        header[name] = {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [end, end + spec.nbytes],
        }
        end += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    # The largest tensor begins at a cache line, and those behind it, if their sizes are multiples of one.
    lead = max((specs[name].nbytes, offset) for name, offset in offsets.items())[1] // 8 * 8 if offsets else 0
    text += b" " * (-(8 + len(text) + lead) % LINE)
    data = 8 + len(text)
    places = {name: data + offset for name, offset in offsets.items()}
    return len(text).to_bytes(8, "little") + text, places, data + end


class TensorWriter:
    """Writes one file of tensors with known dtypes and shapes, piece by piece and in any order.

    `path` must not exist. `metadata` are strings for the header.
    """

    def __init__(self, path: str, specs: Mapping[str, Spec], metadata: Mapping[str, str] | None = None) -> None:
        beginning, self._offsets, size = layout_of(specs, metadata)
        self._specs = specs
        self._left = {name: spec.nbytes for name, spec in specs.items()}
        self._file = FileWriter(path, size)
        try:
            self._file.write(memoryview(beginning))
        except BaseException:
            self.abandon()
            raise

    def write_part(self, name: str, start: int, part: torch.Tensor) -> None:
        """Write elements of one tensor, from element `start` on (any device; each element once)."""
        spec = self._specs[name]
        first = start * spec.dtype.itemsize
        if part.dtype != spec.dtype or part.nbytes > self._left[name] or first + part.nbytes > spec.nbytes:
            raise CheckpointError(
                f"{name}: announced as {spec}, given {part.numel()} elements {part.dtype} from element {start} on"
            )
        self._file.seek(self._offsets[name] + first)
        for data in on_host([part], part.device):
            self._file.write(data)
        self._left[name] -= part.nbytes

    def close(self) -> None:
        """Finish the file, and flush it to disk."""
        left = sorted(name for name, count in self._left.items() if count)
        if left:
            self.abandon()
            raise CheckpointError(f"tensors announced but not written: {', '.join(left[:5])}")
        self._file.finish()

    def abandon(self) -> None:
        """Close without finishing; the file is incomplete."""
        self._file.abandon()


_STEP = 1 << 20
"""Bytes written and hashed at a time: few enough to stay in a cache between both."""


def write_tensors(
    path: str, tensors: Mapping[str, torch.Tensor], *, direct: bool = False, over: bool = False, fetch: Fetch = in_place
) -> FileFacts:
    """Write a file of tensors of any device, and flush it to disk; return its size and checksums. `path` must not exist
    unless it is overwritten in place (`over`), which reuses pages in memory. `direct` writes past the page cache if the
    file is large. `fetch` makes offloaded tensors readable.
    """
    specs = {name: Spec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    beginning, _, size = layout_of(specs)
    order, written = file_order(specs), list[str]()
    sums = dict.fromkeys(order, 0)
    file = FileWriter(path, size, direct=direct, over=over)

    def write(names: Sequence[str]) -> None:
        for device, run in itertools.groupby(names, key=lambda name: tensors[name].device):
            here = list(run)
            left = [(name, tensors[name].nbytes) for name in reversed(here) if tensors[name].nbytes]
            for data in on_host([tensors[name] for name in here], device):
                while data:
                    name, count = left.pop()
                    piece = data[: min(count, _STEP)]
                    file.write(piece)
                    sums[name] = crc32(piece, sums[name])
                    left += [(name, count - len(piece))] if count > len(piece) else []
                    data = data[len(piece) :]
            written.extend(here)

    try:
        file.write(memoryview(beginning))
        fetch([(name, tensors[name]) for name in order], write)
        if written != order:
            raise CheckpointError(f"{path}: expected {len(order)} tensors in order, and {len(written)} were fetched")
        file.finish()
    except BaseException:
        file.abandon()
        raise
    return FileFacts(size, tuple(f"{value:08x}" for value in (crc32(beginning), *sums.values())))
