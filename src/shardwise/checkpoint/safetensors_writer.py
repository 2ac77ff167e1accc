"""Writing files of tensors as a stream; see `shardwise.checkpoint.safetensors_reader` for the format.

The safetensors library writes tensors that are in host memory all at once. Tensors here may be on a device or on a disk
and are fetched a few at a time, and their checksums are computed on the way.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from shardwise.checkpoint.checksums import FileFacts
from shardwise.checkpoint.file_writer import FileWriter
from shardwise.checkpoint.protocols import Fetch, in_place
from shardwise.checkpoint.safetensors_reader import DTYPE_NAMES, Spec, bytes_of
from shardwise.device.staging import Staging, is_far
from shardwise.errors import CheckpointError


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
    text += b" " * (-len(text) % 8)
    data = 8 + len(text)
    places = {name: data + offset for name, offset in offsets.items()}
    return len(text).to_bytes(8, "little") + text, places, data + end


_STEP = 1 << 20
"""Bytes written and hashed at a time: few enough to stay in a cache between both."""


class TensorWriter:
    """Writes one file of tensors with known dtypes and shapes: in `file_order` with `checksums`, in any order without.

    `path` must not exist unless it is overwritten in place (`over`), which reuses pages in memory. `metadata` are
    strings for the header. `direct` writes past the page cache if the file is large and tensors have checksums.
    """

    def __init__(
        self,
        path: str,
        specs: Mapping[str, Spec],
        metadata: Mapping[str, str] | None = None,
        *,
        checksums: bool,
        direct: bool = False,
        over: bool = False,
    ) -> None:
        beginning, self._offsets, self._size = layout_of(specs, metadata)
        self._sums: dict[str, int] | None = None
        if checksums:
            self._sums = {"": zlib.crc32(beginning), **dict.fromkeys(file_order(specs), 0)}
        self._specs = specs
        self._left = {name: spec.nbytes for name, spec in specs.items()}
        self._file = FileWriter(path, self._size, direct=direct and checksums, over=over)
        try:
            self._file.write(memoryview(beginning))
        except BaseException:
            self.abandon()
            raise
        self._position = len(beginning)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write the values of one tensor (any device; dtype and number of elements as announced)."""
        self._check(name, tensor)
        self.write_part(name, 0, tensor)

    def write_all(self, tensors: Mapping[str, torch.Tensor], fetch: Fetch = in_place) -> None:
        """Write the values of all tensors as `write` does; `fetch` makes offloaded ones readable."""

        def write(names: Sequence[str]) -> None:
            for device, run in itertools.groupby(names, key=lambda name: tensors[name].device):
                here = list(run)
                for name in here:
                    self._check(name, tensors[name])
                for data in on_host([tensors[name] for name in here], device):
                    self._put_next(here, data)

        fetch([(name, tensors[name]) for name in file_order(self._specs)], write)

    def _put_next(self, names: list[str], data: memoryview) -> None:
        """Write bytes of the tensors `names`, one after the other, from the first that is not complete on."""
        done = 0
        while done < len(data):
            while not self._left[names[0]]:
                names.pop(0)
            count = min(self._left[names[0]], len(data) - done)
            self._put_bytes(names[0], data[done : done + count])
            done += count

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        spec = self._specs[name]
        if tensor.dtype != spec.dtype or tensor.nbytes != spec.nbytes:
            raise CheckpointError(f"{name}: announced as {spec}, given {tensor.dtype} of shape {tuple(tensor.shape)}")

    def write_part(self, name: str, start: int, part: torch.Tensor) -> None:
        """Write elements of one tensor, from element `start` on (any device; each element once)."""
        spec = self._specs[name]
        first = start * spec.dtype.itemsize
        if part.dtype != spec.dtype or part.nbytes > self._left[name] or first + part.nbytes > spec.nbytes:
            raise CheckpointError(
                f"{name}: announced as {spec}, given {part.numel()} elements {part.dtype} from element {start} on"
            )
        place = self._offsets[name] + first
        if place != self._position and part.nbytes:
            if self._sums is not None:
                raise CheckpointError(f"{name}: tensors of a file with checksums are written in file order")
            self._file.seek(place)
            self._position = place
        for data in on_host([part], part.device):
            self._put_bytes(name, data)

    def close(self) -> FileFacts | None:
        """Finish the file, and flush it to disk. Return its facts if checksums were computed."""
        left = sorted(name for name, count in self._left.items() if count)
        if left:
            self.abandon()
            raise CheckpointError(f"tensors announced but not written: {', '.join(left[:5])}")
        self._file.finish()
        if self._sums is None:
            return None
        return FileFacts(self._size, tuple(f"{value:08x}" for value in self._sums.values()))

    def abandon(self) -> None:
        """Close without finishing; the file is incomplete."""
        self._file.abandon()

    def _put_bytes(self, name: str, data: memoryview) -> None:
        for start in range(0, len(data), _STEP):
            piece = data[start : start + _STEP]
            self._file.write(piece)
            if self._sums is not None:
                self._sums[name] = zlib.crc32(piece, self._sums[name])
        self._left[name] -= len(data)
        self._position += len(data)


def write_tensors(
    path: str,
    tensors: Mapping[str, torch.Tensor],
    *,
    direct: bool = False,
    over: bool = False,
    fetch: Fetch = in_place,
) -> FileFacts:
    """Write a file of tensors with checksums, and flush it to disk. See `TensorWriter`."""
    specs = {name: Spec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    writer = TensorWriter(path, specs, checksums=True, direct=direct, over=over)
    try:
        writer.write_all(tensors, fetch)
    except BaseException:
        writer.abandon()
        raise
    facts = writer.close()
    assert facts is not None
    return facts
