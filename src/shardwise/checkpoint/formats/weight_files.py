"""The protocol of writers of unsharded weights and optimizer state (a format is one class with it), and files of plain
weights, with the names and formats that other programs expect.

    hf   model.safetensors, or model-00001-of-00003.safetensors and so on with model.safetensors.index.json
    pt   pytorch_model.bin, as `torch.save` writes a state dict; in parts with pytorch_model.bin.index.json

Values come in pieces and are written at once, into a hidden directory in the target. When all files are on disk they
are renamed, the index last. A reader finds the old weights, the new ones, or briefly no index, but never a mixture.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from shardwise.checkpoint import directory
from shardwise.checkpoint.formats.torch_save_writer import StateFileWriter
from shardwise.checkpoint.safetensors_reader import Spec
from shardwise.checkpoint.safetensors_writer import TensorWriter
from shardwise.errors import CheckpointError, CheckpointPathError
from shardwise.units import parse_size

Pieces = Iterable[tuple[int, torch.Tensor]]
"""(first element, 1-D values) of a flattened tensor, in order; a value is valid until the next iteration."""


@dataclass(frozen=True)
class Entry:
    """A tensor to be written: its name, dtype and shape in the files. Formats that cannot write one tensor under
    several names note `aliases`, if they can.
    """

    name: str
    spec: Spec
    aliases: tuple[str, ...] = ()


class WeightsWriter(Protocol):
    """Writes announced tensors. Nothing is visible to readers before `finish`."""

    def write(self, name: str, pieces: Pieces) -> None:
        """Write a tensor. A writer may read `pieces` in `finish`. Raises OSError."""

    def finish(self) -> list[str]:
        """Publish the files; return their names. Raises OSError if that fails."""

    def abandon(self) -> None:
        """Remove everything written; after `finish` nothing."""


@contextlib.contextmanager
def writing(path: str, needed: str = "") -> Iterator[contextlib.ExitStack]:
    """Close what the block enters or calls back (`WeightsWriter.abandon`), and turn OSError into CheckpointError.

    `needed` describes what writing to `path` needs.
    """
    try:
        with contextlib.ExitStack() as closing:
            yield closing
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or path}: cannot be written: {error.strerror} (errno {error.errno}); {needed}what was "
            "there before is unchanged"
        ) from error


FORMATS = {"hf": "model.safetensors", "pt": "pytorch_model.bin"}
"""Name of a single file of each format."""

PICKLED = (".bin", ".pt", ".pth")
"""Suffixes of files in the format of `torch.save`."""


def shard_bytes(size: int | str, name: str = "max_shard_size") -> int:
    """Return the bytes, at least 1, of argument `name`. Raises CheckpointError."""
    found = 0
    with contextlib.suppress(ValueError):
        found = parse_size(size)
    if found < 1:
        raise CheckpointError(f"{name}: expected a size such as '5GB', '512MiB' or a number of bytes, found {size!r}")
    return found


@dataclass
class _File:
    name: str
    entries: list[Entry] = field(default_factory=list)
    size: int = 0


class WeightFiles:
    """Writes the weights of one model (`entries`, in the order of writing) into a directory, created if needed. A
    `WeightsWriter`: aliases of entries are noted in the header of safetensors files, as
    `safetensors.torch.save_model` does; a file of `torch.save` has the tensor under all of them.

    The suffix of `name`, that of a single file, gives the format; several files have `-00001-of-00002` in it.
    `limit` is in bytes of tensors in one file, unless a single tensor is larger; None: one file. `overwrite`
    replaces existing weights.
    """

    def __init__(
        self, parent: str, entries: Sequence[Entry], name: str, *, limit: int | None = None, overwrite: bool = False
    ) -> None:
        self._parent = parent
        self._stem, self._ending = os.path.splitext(name)
        self._index = f"{name}.index.json"
        self._files = self._split(entries, limit)
        there = self._existing()
        if there and not overwrite:
            raise CheckpointPathError(
                f"{parent}: holds weights already ({', '.join(there[:3])}); choose another directory, or replace them "
                "(overwrite=True, --overwrite)"
            )
        self._place = {entry.name: number for number, file in enumerate(self._files) for entry in file.entries}
        # A checkpoint may be published into the same directory: its files are not touched.
        self._draft = directory.StagingDirectory(parent, "weights", tidy=False)
        self._writer: TensorWriter | StateFileWriter | None = None
        self._current = -1

    def _split(self, entries: Sequence[Entry], limit: int | None) -> list[_File]:
        files = [_File("")]
        for entry in entries:
            if files[-1].entries and limit is not None and files[-1].size + entry.spec.nbytes > limit:
                files.append(_File(""))
            files[-1].entries.append(entry)
            files[-1].size += entry.spec.nbytes
        for number, file in enumerate(files, 1):
            part = f"-{number:05d}-of-{len(files):05d}" if len(files) > 1 else ""
            file.name = f"{self._stem}{part}{self._ending}"
        return files

    def _existing(self) -> list[str]:
        mine = re.compile(re.escape(self._stem) + r"(-\d{5}-of-\d{5})?" + re.escape(self._ending))
        names = os.listdir(self._parent) if os.path.isdir(self._parent) else []
        return sorted(name for name in names if mine.fullmatch(name) or name == self._index)

    def write(self, name: str, pieces: Pieces) -> None:
        """Write a tensor; tensors and their pieces come in order. Raises OSError."""
        self._begin(self._place[name])
        assert self._writer is not None
        for start, values in pieces:
            self._writer.write_part(name, start, values)

    def _begin(self, number: int) -> None:
        while self._current < number:
            if self._writer is not None:
                self._writer.close()
            self._current += 1
            self._writer = self._open(self._files[self._current])

    def _open(self, file: _File) -> TensorWriter | StateFileWriter:
        path = os.path.join(self._draft.path, file.name)
        specs = {entry.name: entry.spec for entry in file.entries}
        if self._ending in PICKLED:
            return StateFileWriter(path, specs, {entry.name: entry.aliases for entry in file.entries})
        shared = {alias: entry.name for entry in file.entries for alias in entry.aliases}
        return TensorWriter(path, specs, {**shared, "format": "pt"})

    def finish(self) -> list[str]:
        """Finish the last file and rename all of them; return their names. Raises OSError if that fails."""
        self._begin(len(self._files) - 1)
        assert self._writer is not None
        self._writer.close()
        self._writer = None
        names = [file.name for file in self._files]
        if len(names) > 1:
            directory.write_file(os.path.join(self._draft.path, self._index), self._index_text())
        directory.sync_directory(self._draft.path)
        old = self._existing()
        if len(names) > 1 and self._index in old:
            os.unlink(os.path.join(self._parent, self._index))
        for name in names:
            os.replace(os.path.join(self._draft.path, name), os.path.join(self._parent, name))
        for name in old:
            if name not in names and name != self._index:
                os.unlink(os.path.join(self._parent, name))
        directory.sync_directory(self._parent)
        if len(names) > 1:
            os.replace(os.path.join(self._draft.path, self._index), os.path.join(self._parent, self._index))
            names.append(self._index)
        elif self._index in old:
            os.unlink(os.path.join(self._parent, self._index))
        directory.sync_directory(self._parent)
        self._draft.discard()
        return names

    def _index_text(self) -> bytes:
        places: dict[str, str] = {}
        for file in self._files:
            for entry in file.entries:
                aliases = entry.aliases if self._ending in PICKLED else ()
                places.update(dict.fromkeys((entry.name, *aliases), file.name))
        index = {"metadata": {"total_size": sum(file.size for file in self._files)}, "weight_map": places}
        return (json.dumps(index, indent=2) + "\n").encode()

    def abandon(self) -> None:
        """Remove everything written; after `finish` nothing."""
        if self._writer is not None:
            self._writer.abandon()
            self._writer = None
        self._draft.discard()
