"""Directories of torch.distributed.checkpoint (DCP), read and written with it.

A DCP directory is a file `.metadata` and files of chunks. `.metadata` is a pickle, and torch's reader lets its author
run code. The unpickler here makes only the few classes that describe tensors, and refuses every other name. torch reads
the chunks with `weights_only=True`, one tensor at a time.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pathlib
import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from typing_extensions import override

from shardwise.boxes import misfit
from shardwise.checkpoint import directory
from shardwise.checkpoint.formats.weight_files import Entry, Pieces
from shardwise.checkpoint.manifest import Slice, StoredTensor
from shardwise.checkpoint.weights_reader import ReadRange, WeightsReader, copy_range, in_one_file
from shardwise.errors import CheckpointError, CheckpointPathError

METADATA = ".metadata"

_ALLOWED = {
    "torch.distributed.checkpoint.metadata": "Metadata TensorStorageMetadata BytesStorageMetadata TensorProperties "
    "ChunkStorageMetadata MetadataIndex StorageMeta _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.serialization": "_get_layout",
    "collections": "OrderedDict",
    "torch": "Size",
    "builtins": "set list",
}
"""Names in the description of a checkpoint. Calling them, and setting their state, runs no code of a file."""


_PythonUnpickler: Any = pickle._Unpickler


class _Unpickler(_PythonUnpickler):
    """The unpickler in Python, because a damaged number makes the C version allocate tens of gigabytes."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, "").split():
            return getattr(importlib.import_module(module), name)
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "WindowsPath"):
            return pathlib.PurePosixPath
        # Dtypes are pickled under the module of torch that had them first.
        found = getattr(torch, name, None) if module.split(".")[0] == "torch" else None
        if isinstance(found, (torch.dtype, torch.layout)):
            return found
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")

    def load_build(self) -> None:
        if callable(self.stack[-2]):  # the class itself, whose attributes a file must not change
            raise pickle.UnpicklingError(f"it changes {self.stack[-2]!r:.100}")
        super().load_build()

    dispatch: ClassVar[dict[int, Any]] = {**_PythonUnpickler.dispatch, pickle.BUILD[0]: load_build}


def recognises(path: str) -> bool:
    """Return True if a path is a directory written by torch.distributed.checkpoint."""
    return os.path.isfile(os.path.join(path, METADATA))


class DcpReader(WeightsReader):
    """The tensors of a DCP directory; those of `{"model": model.state_dict()}` have names that begin with `model.`.
    A read loads the entire tensor, and the last one is kept.
    """

    what = "torch.distributed.checkpoint"

    def __init__(self, path: str) -> None:
        self.path = path
        self._last: tuple[str, torch.Tensor] | None = None
        self._metadata = _metadata(os.path.join(path, METADATA))
        try:
            self._tensors = {name: self._described(name, entry) for name, entry in self._entries().items()}
        except Exception as error:  # a damaged description may raise anything
            raise CheckpointError(
                f"{path}: {METADATA} is not as torch.distributed.checkpoint writes it ({type(error).__name__}: {error})"
            ) from error

    def _entries(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        # Other values of a state dict are pickles, which are not read.
        held = self._metadata.state_dict_metadata.items()
        return {name: entry for name, entry in held if isinstance(entry, TensorStorageMetadata)}

    def _described(self, name: str, entry: Any) -> StoredTensor:
        shape = tuple(entry.size)
        parts = [tuple((o, o + n) for o, n in zip(part.offsets, part.sizes, strict=True)) for part in entry.chunks]
        if any(not 0 <= first <= end <= size for part in parts for (first, end), size in zip(part, shape, strict=True)):
            raise ValueError(f"{name!r}: a part is outside of {list(shape)}")
        wrong = misfit(shape, parts)
        if wrong is not None:
            raise ValueError(f"{name!r}: element {list(wrong[0])} of {list(shape)} is in {wrong[1]} parts")
        if not isinstance(name, str) or not isinstance(entry.properties.dtype, torch.dtype):
            raise TypeError(f"{name!r} has no dtype")
        return in_one_file(name, shape, entry.properties.dtype, METADATA)

    @override
    def tensors(self) -> Mapping[str, StoredTensor]:
        return self._tensors

    @override
    def opened(self, tensor: StoredTensor, part: Slice) -> ReadRange:
        if self._last is None or self._last[0] != part.key:
            self._last = None  # before memory is allocated
            self._last = (part.key, self._load(self._tensors[part.key]))
        return functools.partial(copy_range, self._last[1].view(-1))

    def _load(self, tensor: StoredTensor) -> torch.Tensor:
        import torch.distributed.checkpoint as dcp

        metadata, folder = self._metadata, os.path.abspath(self.path)

        class Reader(dcp.FileSystemReader):
            def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
                return metadata

        values = torch.empty(tensor.shape, dtype=tensor.torch_dtype, device="cpu")
        with _using_torch(f"{self.path}: {tensor.name!r} cannot be read"):
            for index, place in metadata.storage_data.items():
                # Names come from the metadata: only files of the checkpoint's own directory are opened.
                if index.fqn == tensor.name and os.path.basename(place.relative_path) != place.relative_path:
                    raise ValueError(f"{METADATA} names the file {place.relative_path!r}, which is elsewhere")
            size = sum(os.path.getsize(os.path.join(folder, name)) for name in os.listdir(folder))
            if values.nbytes > size:
                raise ValueError(f"{values.nbytes} bytes in files of {size}")
            dcp.load({tensor.name: values}, storage_reader=Reader(folder), no_dist=True)
        return values

    @override
    def close(self) -> None:
        self._last = None


@contextlib.contextmanager
def _using_torch(failure: str) -> Iterator[None]:
    """Turn exceptions into CheckpointError: damage may raise anything in torch's reader, and a full disk raises
    CheckpointException, a BaseException.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the absent process group
            yield
    except (Exception, CheckpointException) as error:
        reason = str(error).strip().splitlines()
        raise CheckpointError(f"{failure}: {reason[-1] if reason else type(error).__name__}") from error


def _metadata(path: str) -> Any:
    from torch.distributed.checkpoint.metadata import Metadata

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
    if not isinstance(found, Metadata):
        raise CheckpointError(
            f"{path}: expected the metadata of torch.distributed.checkpoint, found {type(found).__name__}"
        )
    return found


class DcpWriter:
    """Writes a directory for `torch.distributed.checkpoint.load`, new or empty, which appears atomically (a
    `WeightsWriter`). A tied tensor is written under each of its names. Tensors are read in `finish`, one at a time.
    """

    def __init__(self, path: str, entries: Sequence[Entry]) -> None:
        self._path = os.path.abspath(path)
        if os.path.lexists(path) and not (os.path.isdir(path) and not os.listdir(path)):
            raise CheckpointPathError(
                f"{path}: exists; a directory for torch.distributed.checkpoint must be new or empty"
            )
        self._names = {name: entry for entry in entries for name in (entry.name, *entry.aliases)}
        self._pieces: dict[str, Pieces] = {}
        parent, name = os.path.split(self._path)
        self._draft = directory.StagingDirectory(parent, name, tidy=False)

    def write(self, name: str, pieces: Pieces) -> None:
        """Announce the pieces of a tensor."""
        self._pieces[name] = pieces

    def _read(self, entry: Entry) -> torch.Tensor:
        values = torch.empty(entry.spec.shape, dtype=entry.spec.dtype, device="cpu")
        for start, piece in self._pieces[entry.name]:
            values.view(-1)[start : start + piece.numel()] = piece
        return values

    def finish(self) -> list[str]:
        """Write and publish the directory; return no names of files, which torch chooses."""
        import torch.distributed.checkpoint as dcp

        names, whole = self._names, functools.lru_cache(1)(self._read)  # a tied tensor has several names

        class Planner(dcp.DefaultSavePlanner):
            def lookup_object(self, index: Any) -> Any:
                return whole(names[index.fqn])

        held = self._names.items()
        described = {name: torch.empty(e.spec.shape, dtype=e.spec.dtype, device="meta") for name, e in held}
        # A file for each tensor, because torch's writer holds all tensors of a file until it is complete.
        writer = dcp.FileSystemWriter(
            self._draft.path, single_file_per_rank=False, thread_count=1, per_thread_copy_ahead=0
        )
        with _using_torch(f"{self._path}: cannot be written"):
            dcp.save(described, storage_writer=writer, planner=Planner(), no_dist=True)
        self._draft.publish(replace=False)  # an empty directory may be there
        return []

    def abandon(self) -> None:
        """Remove everything written; after `finish` nothing."""
        self._draft.discard()
