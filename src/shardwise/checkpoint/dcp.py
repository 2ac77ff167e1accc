"""Directories of torch.distributed.checkpoint (DCP), read and written.

A DCP directory is a file `.metadata` and files of chunks. `.metadata` is a pickle, and torch's reader lets its author
run code. The unpickler here makes inert records of the few classes that describe tensors, and refuses every other name.
A chunk is a file of `torch.save` within a file: its description is read with `weights_only=True`, and of the values
only the requested bytes. Writing goes through torch's public interface, with a planner that reads one tensor at a time.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import torch
from typing_extensions import override

from shardwise.boxes import misfit
from shardwise.checkpoint import directory
from shardwise.checkpoint.safetensors_reader import bytes_of
from shardwise.checkpoint.sharded_weights import Entry
from shardwise.checkpoint.source import PIECE, Source, SourceTensor
from shardwise.errors import CheckpointError, CheckpointPathError

METADATA = ".metadata"

_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_RECORDS = frozenset(
    {
        *((_MODULES[0], name) for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata")),
        *((_MODULES[0], name) for name in ("TensorProperties", "ChunkStorageMetadata", "MetadataIndex")),
        *((_MODULES[0], name) for name in ("StorageMeta", "_MEM_FORMAT_ENCODING")),
        (_MODULES[1], "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
    }
)
"""Classes in the description of a checkpoint. None of them is called: see `_Record`."""

_CONTAINERS: dict[tuple[str, str], type] = {
    ("collections", "OrderedDict"): dict,
    ("torch", "Size"): tuple,
    ("builtins", "set"): set,
    ("builtins", "list"): list,
}


class _Record:
    """Replaces an object of a known class: arguments and state, no behaviour."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        state = self.__dict__.get("state")
        return state.get(name) if isinstance(state, dict) else None


class _Unpickler(pickle._Unpickler):
    """The unpickler in Python, because a damaged number makes the C version allocate tens of gigabytes."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _RECORDS:
            return type(name, (_Record,), {})
        if (module, name) in _CONTAINERS:
            return _CONTAINERS[(module, name)]
        # Dtypes are pickled under the module of torch that had them first.
        found = getattr(torch, name, None) if module.split(".")[0] == "torch" else None
        if isinstance(found, (torch.dtype, torch.layout)):
            return found
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")


@dataclass(frozen=True)
class _Chunk:
    """A box of a tensor: its offset, its shape, and the place of its bytes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    first: int
    length: int


def recognises(path: str) -> bool:
    """Return True if a path is a directory written by torch.distributed.checkpoint."""
    return os.path.isfile(os.path.join(path, METADATA))


class DcpSource(Source):
    """The tensors of a DCP directory; those of `{"model": model.state_dict()}` have names that begin with `model.`."""

    what = "torch.distributed.checkpoint"

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._files: dict[str, BinaryIO] = {}
        self._places: dict[_Chunk, int] = {}
        self._loaded: tuple[_Chunk, torch.Tensor] | None = None
        self._tensors: dict[str, SourceTensor] = {}
        self._chunks: dict[str, list[_Chunk]] = {}
        metadata = _metadata(os.path.join(path, METADATA))
        try:
            self._parse(metadata)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{path}: {METADATA} is not as torch.distributed.checkpoint writes it ({type(error).__name__}: {error})"
            ) from error

    def _parse(self, metadata: _Record) -> None:
        stored: dict[tuple[str, tuple[int, ...] | None], Any] = {}
        for index, info in metadata.get("storage_data").items():
            offset = index.get("offset")
            stored[index.get("fqn"), None if offset is None else tuple(offset)] = info
        for name, entry in metadata.get("state_dict_metadata").items():
            if type(entry).__name__ != "TensorStorageMetadata":
                continue  # other values of a state dict: pickles, which are not read
            properties = entry.get("properties")
            # torch pickles them with a state of its own, a tuple that begins with the dtype.
            dtype = properties.get("dtype") or properties.state[0]
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"{name!r} has no dtype")
            shape = _sizes(entry.get("size"))
            chunks = []
            for part in entry.get("chunks"):
                offsets, sizes = _sizes(part.get("offsets")), _sizes(part.get("sizes"))
                info = stored.get((name, offsets)) or stored[name, None]
                if info.get("transform_descriptors"):
                    raise CheckpointError(
                        f"{self.path}: {name!r} was written through a transform, which cannot be read"
                    )
                if math.prod(sizes) * dtype.itemsize > info.get("length"):
                    raise ValueError(f"{name!r}: {sizes} elements do not fit into {info.get('length')} bytes")
                chunks.append(_Chunk(offsets, sizes, info.get("relative_path"), info.get("offset"), info.get("length")))
            _check_cover(name, shape, chunks)
            self._tensors[name] = SourceTensor(name, shape, dtype)
            self._chunks[name] = chunks

    @override
    def tensors(self) -> Mapping[str, SourceTensor]:
        return self._tensors

    @override
    def read_into(self, name: str, start: int, out: torch.Tensor) -> None:
        tensor = self._tensors[name]
        if start < 0 or start + out.numel() > tensor.numel:
            raise CheckpointError(f"{self.path}: {name!r} has no elements [{start}, {start + out.numel()})")
        shape = tensor.shape or (1,)
        row = max(1, math.prod(shape[1:]))
        step = max(row, PIECE // tensor.dtype.itemsize // row * row)
        # Rows of the first dimension are joined to pieces.
        place, stop = start, start + out.numel()
        while place < stop:
            low = place // row
            high = min(-(-stop // row), low + step // row)
            rows = self._rows(tensor, shape, low, high).view(-1)
            end = min(stop, high * row)
            out[place - start : end - start].detach().copy_(rows[place - low * row : end - low * row])
            place = end

    def _rows(self, tensor: SourceTensor, shape: tuple[int, ...], low: int, high: int) -> torch.Tensor:
        values = torch.empty((high - low, *shape[1:]), dtype=tensor.dtype, device="cpu")
        for chunk in self._chunks[tensor.name]:
            offsets, sizes = chunk.offsets or (0,), chunk.sizes or (1,)
            first, last = max(low, offsets[0]), min(high, offsets[0] + sizes[0])
            if first >= last or not math.prod(sizes):
                continue
            part = self._read_rows(tensor, chunk, sizes, first - offsets[0], last - offsets[0])
            box = (
                slice(first - low, last - low),
                *(slice(o, o + n) for o, n in zip(offsets[1:], sizes[1:], strict=True)),
            )
            values[box] = part
        return values

    def _read_rows(
        self, tensor: SourceTensor, chunk: _Chunk, sizes: tuple[int, ...], first: int, last: int
    ) -> torch.Tensor:
        if chunk not in self._places and (self._loaded is None or self._loaded[0] != chunk):
            self._locate(tensor, chunk)
        if chunk not in self._places:
            assert self._loaded is not None
            return self._loaded[1].view(sizes)[first:last]
        values = torch.empty((last - first, *sizes[1:]), dtype=tensor.dtype, device="cpu")
        row = math.prod(sizes[1:]) * tensor.dtype.itemsize
        self._fill(chunk.file, self._places[chunk] + first * row, bytes_of(values))
        return values

    def _locate(self, tensor: SourceTensor, chunk: _Chunk) -> None:
        """Find the bytes of a chunk; load it if they are not in the order of its elements."""
        file = self._file(chunk.file)
        view = _View(file, chunk.first, chunk.length)
        try:
            # On `meta` only the description is read.
            described = torch.load(cast(BinaryIO, view), map_location="meta", weights_only=True)
            if not isinstance(described, torch.Tensor):
                raise TypeError(f"expected a tensor, found {type(described).__name__}")
            if (tuple(described.shape), described.dtype) != (chunk.sizes, tensor.dtype):
                raise ValueError(
                    f"expected {tensor.dtype} of shape {chunk.sizes}, found {described.dtype} {tuple(described.shape)}"
                )
            if not described.is_contiguous():
                view.seek(0)
                loaded = torch.load(cast(BinaryIO, view), map_location="cpu", weights_only=True)
                self._loaded = (chunk, loaded.contiguous())
                return
            first = chunk.first + _first_storage(view) + int(described.storage_offset()) * tensor.dtype.itemsize
            self._places[chunk] = first
        except CheckpointError:
            raise
        except Exception as error:  # damage may raise anything in torch's reader
            reason = str(error).strip().splitlines()
            raise CheckpointError(
                f"{os.path.join(self.path, chunk.file)}: damaged: bytes [{chunk.first}, {chunk.first + chunk.length}) "
                f"should hold a part of {tensor.name!r}: {reason[0] if reason else type(error).__name__}"
            ) from error

    def _file(self, name: str) -> BinaryIO:
        if name not in self._files:
            # Names come from the metadata: only files of the checkpoint's own directory are opened.
            if not isinstance(name, str) or os.path.basename(name) != name or name in ("", ".", ".."):
                raise CheckpointError(
                    f"{self.path}: {METADATA} names the file {name!r}; expected one in the same directory"
                )
            try:
                self._files[name] = open(os.path.join(self.path, name), "rb")  # noqa: SIM115  (closed by close())
            except OSError as error:
                raise CheckpointError(f"{os.path.join(self.path, name)}: cannot be opened: {error.strerror}") from error
        return self._files[name]

    def _fill(self, name: str, first: int, out: memoryview) -> None:
        file = self._file(name)
        try:
            file.seek(first)
            done = file.readinto(out) if len(out) else 0  # type: ignore[attr-defined]
        except OSError as error:
            raise CheckpointError(f"{os.path.join(self.path, name)}: cannot be read: {error.strerror}") from error
        if done != len(out):
            raise CheckpointError(f"{os.path.join(self.path, name)}: ends at byte {first + done}; it is truncated")

    @override
    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}
        self._places = {}
        self._loaded = None


def _metadata(path: str) -> _Record:
    try:
        with open(path, "rb") as file:
            found = _Unpickler(file).load()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except Exception as error:  # a damaged pickle may raise anything
        raise CheckpointError(
            f"{path}: cannot be read as a description of tensors: {error}. Other objects are not made from a file, "
            "because making them may run code"
        ) from error
    if type(found).__name__ != "Metadata" or not isinstance(found, _Record):
        raise CheckpointError(
            f"{path}: expected the metadata of torch.distributed.checkpoint, found {type(found).__name__}"
        )
    return found


def _sizes(value: Any) -> tuple[int, ...]:
    sizes = tuple(value)
    if not all(isinstance(size, int) and size >= 0 for size in sizes):
        raise ValueError(f"not a shape: {sizes}")
    return sizes


def _check_cover(name: str, shape: tuple[int, ...], chunks: list[_Chunk]) -> None:
    parts = []
    for chunk in chunks:
        box = tuple((offset, offset + size) for offset, size in zip(chunk.offsets, chunk.sizes, strict=True))
        if len(box) != len(shape) or any(end > size for (_, end), size in zip(box, shape, strict=True)):
            raise ValueError(f"{name!r}: a part at {chunk.offsets} of shape {chunk.sizes} is not in {shape}")
        parts.append(box)
    wrong = misfit(shape, parts)
    if wrong is not None:
        raise ValueError(f"{name!r}: element {list(wrong[0])} of {list(shape)} is in {wrong[1]} parts")


class _View(io.RawIOBase):
    def __init__(self, file: BinaryIO, first: int, length: int) -> None:
        self._under, self._first, self._length = file, first, length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, out: Any) -> int:
        view = memoryview(out).cast("B")
        view = view[: max(0, min(len(view), self._length - self._position))]
        self._under.seek(self._first + self._position)
        count: int = self._under.readinto(view) if len(view) else 0  # type: ignore[attr-defined]
        self._position += count
        return count


def _first_storage(view: _View) -> int:
    with zipfile.ZipFile(view) as archive:
        records = [info for info in archive.infolist() if os.path.dirname(info.filename).endswith("/data")]
        if len(records) != 1 or records[0].compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"expected one storage, found {len(records)}")
        view.seek(records[0].header_offset)
        header = view.read(30)
        assert header is not None
        name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
        return records[0].header_offset + 30 + name + extra


def write(path: str, entries: Iterable[Entry], read: Callable[[Entry], torch.Tensor]) -> None:
    """Write a directory for `torch.distributed.checkpoint.load`, new or empty, which appears atomically. `read` returns
    the unsharded values of an entry on the CPU, one at a time. A tied tensor is written under each of its names.
    """
    import torch.distributed.checkpoint as dcp

    path = os.path.abspath(path)
    if os.path.lexists(path) and not (os.path.isdir(path) and not os.listdir(path)):
        raise CheckpointPathError(f"{path}: exists; a directory for torch.distributed.checkpoint must be new or empty")
    held = {name: entry for entry in entries for name in (entry.name, *entry.aliases)}

    class Planner(dcp.DefaultSavePlanner):
        def lookup_object(self, index: Any) -> Any:
            return read(held[index.fqn])

    described = {name: torch.empty(e.spec.shape, dtype=e.spec.dtype, device="meta") for name, e in held.items()}
    draft = directory.StagingDirectory(os.path.dirname(path), os.path.basename(path), tidy=False)
    try:
        # A file for each tensor, because torch's writer holds all tensors of a file until it is complete.
        writer = dcp.FileSystemWriter(draft.path, single_file_per_rank=False, thread_count=1, per_thread_copy_ahead=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the absent process group
            dcp.save(described, storage_writer=writer, planner=Planner(), no_dist=True)
        if os.path.isdir(path):
            os.rmdir(path)
        draft.publish()
    finally:
        draft.discard()
