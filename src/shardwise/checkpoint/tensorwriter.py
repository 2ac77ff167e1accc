"""Writing files of tensors as a stream; see `shardwise.checkpoint.tensorfile` for the format."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.checkpoint.blocks import LARGE, BlockSums, FileFacts, Flusher
from shardwise.checkpoint.tensorfile import DTYPE_NAMES, Spec, bytes_of
from shardwise.errors import CheckpointError

_CHUNK = 16 << 20
"""Bytes copied to the host at a time where a tensor lies elsewhere."""


def file_order(specs: Mapping[str, Spec]) -> list[str]:
    """Return the order in which tensors lie in a file: wide dtypes first, so that every tensor is aligned."""
    return sorted(specs, key=lambda name: -specs[name].dtype.itemsize)


@dataclass(frozen=True)
class Layout:
    """Where things lie in a file.

    Attributes:
        header: its first bytes: length and header.
        begins: first byte of each tensor, in `file_order`.
        size: bytes of the whole file.
    """

    header: bytes
    begins: dict[str, int]
    size: int


def layout_of(specs: Mapping[str, Spec], metadata: Mapping[str, str] | None = None) -> Layout:
    """Return the layout of a file of some tensors.

    Raises:
        CheckpointError: a dtype has no name in the format.

    >>> layout = layout_of({"x": Spec(torch.float32, (2, 3))})
    >>> layout.begins["x"] == len(layout.header), layout.size - layout.begins["x"]
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
    begins = {name: data + offset for name, offset in offsets.items()}
    return Layout(len(text).to_bytes(8, "little") + text, begins, data + end)


class TensorWriter:
    """Writes one file whose tensors are known beforehand by dtype and shape.

    Args:
        path: file to create; it must not exist.
        specs: the tensors. They are written in `file_order` when checksums are wanted, and in any order otherwise.
        metadata: strings for the header.
        checksums: take checksums.

    Raises:
        CheckpointError: a dtype has no name in the format.
        OSError: the file cannot be created or written.
    """

    def __init__(
        self, path: str, specs: Mapping[str, Spec], metadata: Mapping[str, str] | None = None, *, checksums: bool
    ) -> None:
        self._sums = BlockSums() if checksums else None
        layout = layout_of(specs, metadata)
        self._offsets = layout.begins
        self._specs = specs
        self._left = set(specs)
        self._file = open(path, "xb", buffering=1 << 20)  # noqa: SIM115  (closed by close() and abandon())
        self._position = 0
        self._flusher = Flusher(self._file.fileno()) if layout.size >= LARGE else None
        if self._flusher is not None:
            self._flusher.start()
        try:
            self._put(memoryview(layout.header))
        except BaseException:
            self.abandon()
            raise

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write the values of one tensor (any device; dtype and number of elements as announced)."""
        spec = self._specs[name]
        if tensor.dtype != spec.dtype or tensor.nbytes != spec.nbytes:
            raise CheckpointError(f"{name}: announced as {spec}, given {tensor.dtype} of shape {tuple(tensor.shape)}")
        place = self._offsets[name]
        if place != self._position and spec.nbytes:
            if self._sums is not None:
                raise CheckpointError(f"{name}: tensors of a file with checksums are written in file order")
            self._file.seek(place)
            self._position = place
        self._left.discard(name)
        whole = tensor.detach().contiguous()
        if whole.device.type == "cpu":
            self._put(bytes_of(whole))
            return
        flat = whole.view(-1).view(torch.uint8)
        for start in range(0, flat.numel(), _CHUNK):
            part = flat[start : start + _CHUNK].cpu()
            self._put(bytes_of(part))

    def close(self) -> FileFacts | None:
        """Finish the file: it is on disk when this returns. Returns its facts if checksums were taken."""
        if self._left:
            self.abandon()
            raise CheckpointError(f"tensors announced but not written: {', '.join(sorted(self._left)[:5])}")
        try:
            self._file.flush()
            if self._flusher is not None:
                self._flusher.end()
                if self._flusher.error is not None:
                    raise self._flusher.error
            os.fsync(self._file.fileno())
        finally:
            self.abandon()
        return self._sums.facts() if self._sums is not None else None

    def abandon(self) -> None:
        """Close without finishing; the file is incomplete."""
        if self._flusher is not None:
            self._flusher.end()
        with contextlib.suppress(OSError):  # of bytes still buffered, which nobody wants any more
            self._file.close()

    def _put(self, data: memoryview) -> None:
        self._file.write(data)
        self._position += len(data)
        if self._sums is not None:
            self._sums.feed(data)


def write_tensors(path: str, tensors: Mapping[str, torch.Tensor]) -> FileFacts:
    """Write a file of tensors with checksums; it is on disk when this returns."""
    specs = {name: Spec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    writer = TensorWriter(path, specs, checksums=True)
    try:
        for name in file_order(specs):
            writer.write(name, tensors[name])
    except BaseException:
        writer.abandon()
        raise
    facts = writer.close()
    assert facts is not None
    return facts
