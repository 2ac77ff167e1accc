"""Writing a state dict in the format of `torch.save`, as a stream: only a piece of one tensor is in memory.

The format is an uncompressed zip archive (https://pytorch.org/docs/stable/notes/serialization.html): `data.pkl`
describes the objects, and a record `data/<n>` holds the bytes of each storage. `data.pkl` is written from dtypes and
shapes, then the records in turn. Only named tensors are pickled: `torch.load(weights_only=True)` reads the file, also
mapped.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import struct
import sys
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise.checkpoint.safetensors_reader import Spec
from shardwise.checkpoint.safetensors_writer import on_host
from shardwise.errors import CheckpointError

_ROOT = "archive"
_ALIGNMENT = 64
"""Alignment of storages, for computing with a mapped file."""

_DATE = (1980, 1, 1, 0, 0, 0)  # fixed, because the same tensors should make the same file
_PADDING = 0x4246
"""Kind of the zip extra field that aligns a record; readers skip unknown kinds."""


class StateFileWriter:
    """Writes one state dict of tensors with known dtypes and shapes.

    Args:
        path: file to create; it must not exist.
        specs: the tensors, in the order in which they will be written.
        aliases: further names of a tensor; they share its storage, as tied parameters do.

    >>> import os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "a.bin")
    >>> writer = StateFileWriter(path, {"x": Spec(torch.float32, (2, 2))}, {"x": ["y"]})
    >>> writer.write_part("x", 0, torch.arange(3.0))
    >>> writer.write_part("x", 3, torch.ones(1))
    >>> writer.close()
    >>> torch.load(path, weights_only=True)["y"]
    tensor([[0., 1.],
            [2., 1.]])
    """

    def __init__(
        self, path: str, specs: Mapping[str, Spec], aliases: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        self._specs = dict(specs)
        self._order = list(specs)
        content = _pickled(self._specs, aliases or {})
        self._file = open(path, "xb", buffering=1 << 20)  # noqa: SIM115  (closed by close() and abandon())
        self._archive = zipfile.ZipFile(self._file, "w", zipfile.ZIP_STORED)
        self._record: Any = self._archive
        self._current = -1
        self._written = 0
        try:
            for name, data in (("data.pkl", content), ("byteorder", sys.byteorder.encode()), ("version", b"3\n")):
                with self._open(name) as record:
                    record.write(data)
        except BaseException:
            self.abandon()
            raise

    def write_part(self, name: str, start: int, part: torch.Tensor) -> None:
        """Write elements of one tensor, from element `start` on: tensors and their pieces come in order."""
        while self._current < 0 or self._order[self._current] != name:
            self._next()
        spec = self._specs[name]
        if part.dtype != spec.dtype or start * spec.dtype.itemsize != self._written:
            raise CheckpointError(
                f"{name}: announced as {spec} with {self._written} bytes written, given {part.numel()} elements "
                f"{part.dtype} from element {start} on"
            )
        for data in on_host([part], part.device):
            self._record.write(data)
        self._written += part.nbytes

    def close(self) -> None:
        """Finish the file; its bytes are on disk at return."""
        try:
            while self._current < len(self._order):
                self._next()
            self._archive.close()
            self._file.flush()
            os.fsync(self._file.fileno())
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close without finishing; the file is incomplete."""
        for part in (self._record, self._archive, self._file):
            with contextlib.suppress(OSError, ValueError):  # of buffered bytes, which are dropped
                part.close()

    def _next(self) -> None:
        if self._current >= len(self._order):
            raise CheckpointError("a tensor is written that was not announced, or not in order")
        if self._current >= 0:
            name = self._order[self._current]
            if self._written != self._specs[name].nbytes:
                raise CheckpointError(f"{name}: {self._written} of {self._specs[name].nbytes} bytes were written")
            self._record.close()
        self._current += 1
        self._written = 0
        if self._current < len(self._order):
            self._record = self._open(f"data/{self._current}")

    def _open(self, name: str) -> Any:
        info = zipfile.ZipInfo(f"{_ROOT}/{name}", _DATE)
        # Local header: 30 bytes, the name, our field, and 20 bytes for sizes of 64 bits.
        end = self._file.tell() + 30 + len(info.filename) + 4 + 20
        info.extra = struct.pack("<HH", _PADDING, -end % _ALIGNMENT) + bytes(-end % _ALIGNMENT)
        return self._archive.open(info, "w", force_zip64=True)


class _Storage:
    """Pickled in place of a storage, with the attributes that torch's reader needs."""

    def __init__(self, identity: tuple[Any, ...]) -> None:
        self.identity = identity


class _Values:
    def __init__(self, key: str, spec: Spec) -> None:
        # torch's own reduction for this dtype; storage, shape and strides are replaced.
        function, arguments = torch.empty(0, dtype=spec.dtype, device="cpu").__reduce_ex__(2)
        strides = torch.empty(spec.shape, dtype=spec.dtype, device="meta").stride()
        if type(arguments[0]) is torch.UntypedStorage:
            identity = ("storage", torch.UntypedStorage, key, "cpu", spec.nbytes)
        else:
            kind = torch.empty(0, dtype=spec.dtype, device="cpu").type().removeprefix("torch.")
            count = spec.nbytes // spec.dtype.itemsize
            identity = ("storage", getattr(torch, kind.replace("Tensor", "Storage")), key, "cpu", count)
        self._reduced = (function, (_Storage(identity), 0, spec.shape, strides, *arguments[4:]))

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduced


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.identity if type(obj) is _Storage else None


def _pickled(specs: Mapping[str, Spec], aliases: Mapping[str, Sequence[str]]) -> bytes:
    values: dict[str, _Values] = {}
    for number, (name, spec) in enumerate(specs.items()):
        try:
            held = _Values(str(number), spec)
        except (AttributeError, TypeError, ValueError, NotImplementedError) as error:
            raise CheckpointError(f"{name}: torch does not save tensors of dtype {spec.dtype}: {error}") from error
        values.update(dict.fromkeys((name, *aliases.get(name, ())), held))
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(values)
    return buffer.getvalue()
