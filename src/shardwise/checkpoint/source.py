"""Weights on disk, in any format: tensors by name, read by range. Reading cannot run code. A format is a subclass of
`Source` and a line in `shardwise.checkpoint.opening`, for export, import and inspection.
"""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType

import torch
from typing_extensions import override

from shardwise.boxes import Region, overlap, whole
from shardwise.checkpoint import directory, manifest, manifestfile
from shardwise.checkpoint.listing import CheckpointDirectory
from shardwise.checkpoint.manifest import BUFFER, PARAMETER, StoredTensor
from shardwise.checkpoint.reader import Checkpoint
from shardwise.checkpoint.safetensors_reader import Spec
from shardwise.checkpoint.strided import read_patch
from shardwise.errors import CheckpointError, CheckpointPathError
from shardwise.utils.logging import logger

PIECE = 8 << 20
"""Bytes that are read, converted or sent at a time."""

Progress = Callable[[int, int], None]
"""Called with processed bytes and total bytes."""


@dataclass(frozen=True)
class SourceTensor:
    """A tensor of the model on disk; `aliases` are further names of a tied parameter. `kind` is `parameter` (always in
    formats without the distinction) or `buffer`; `trainable` is None if the format lacks it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    aliases: tuple[str, ...] = ()
    kind: str = PARAMETER
    trainable: bool | None = None

    @property
    def spec(self) -> Spec:
        """Dtype and shape."""
        return Spec(self.dtype, self.shape)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.spec.nbytes // self.dtype.itemsize


class Source(ABC):
    """Weights opened for reading: the format (`what`), and frozen parameters that the save left out (`excluded`)."""

    what: str = ""

    def __init__(self, path: str) -> None:
        self.path = path
        self.excluded: list[str] = []
        self._piece: torch.Tensor | None = None

    @abstractmethod
    def tensors(self) -> Mapping[str, SourceTensor]:
        """Return all parameters and buffers by name (aliases are not keys)."""

    @abstractmethod
    def read_into(self, name: str, start: int, out: torch.Tensor) -> None:
        """Read elements of a flattened tensor into a 1-D tensor of any dtype and device. Raises CheckpointError."""

    def read_part(self, name: str, box: Region | None, start: int, out: torch.Tensor) -> None:
        """Read as `read_into` from a box of a tensor, flattened; None: the entire tensor."""
        tensor = self.tensors()[name]
        if box is None:
            self.read_into(name, start, out)
            return
        for patch in overlap(whole(tensor.shape), 0, tensor.numel, box, start, start + out.numel()):
            read_patch(patch, tensor.dtype, functools.partial(self.read_into, name), out)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return elements `[start, stop)` of a flattened tensor: 1-D, on the CPU, in the dtype of the file."""
        tensor = self.tensors()[name]
        stop = tensor.numel if stop is None else stop
        out = torch.empty(stop - start, dtype=tensor.dtype, device="cpu")
        self.read_into(name, start, out)
        return out

    def pieces(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first element, 1-D values) of a tensor, `PIECE` bytes at a time, overwritten by the next iteration."""
        tensor = self.tensors()[name]
        step = PIECE // tensor.dtype.itemsize
        if self._piece is None:
            self._piece = torch.empty(PIECE, dtype=torch.uint8, device="cpu")
        for start in range(0, tensor.numel, step):
            count = min(step, tensor.numel - start)
            values = self._piece[: count * tensor.dtype.itemsize].view(tensor.dtype)
            self.read_into(name, start, values)
            yield start, values

    def verify(self, names: Iterable[str], progress: Progress | None = None) -> bool:
        """Compare bytes with checksums; return False if the format has none. Raises CheckpointError for damage."""
        return False

    def by_any_name(self) -> dict[str, SourceTensor]:
        """Return all tensors by name and by every alias."""
        found = dict(self.tensors())
        for tensor in self.tensors().values():
            for alias in tensor.aliases:
                found.setdefault(alias, tensor)
        return found

    @abstractmethod
    def close(self) -> None:
        """Close all files."""

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class CheckpointSource(Source):
    """The weights of a checkpoint of shardwise: master weights if there are any; rank 0's buffers."""

    what = "checkpoint of shardwise"

    def __init__(self, path: str, opened: Callable[[str], Checkpoint] = Checkpoint) -> None:
        super().__init__(path)
        self.saved = opened(path)
        self.excluded = list(self.saved.manifest.excluded)
        held = [*self.saved.manifest.of_kind(PARAMETER), *self.saved.manifest.of_kind(BUFFER)]
        self._stored = {tensor.name: tensor for tensor in held if tensor.rank is None}
        self._tensors = {name: _described(tensor) for name, tensor in self._stored.items()}

    @override
    def tensors(self) -> Mapping[str, SourceTensor]:
        return self._tensors

    @override
    def read_into(self, name: str, start: int, out: torch.Tensor) -> None:
        stored = self._stored[name]
        step = PIECE // stored.torch_dtype.itemsize
        for first in range(0, out.numel(), step):
            self.saved.read_into(stored, start + first, out[first : first + step])

    @override
    def verify(self, names: Iterable[str], progress: Progress | None = None) -> bool:
        wanted = [self._stored[name] for name in names]
        self.saved.check_sizes(sorted({part.file for tensor in wanted for part in tensor.slices}))
        verify_blocks(self.saved, self.saved.blocks(wanted), progress)
        return True

    @override
    def close(self) -> None:
        self.saved.close()


class DeepSpeedSource(CheckpointSource):
    """The weights of a checkpoint of DeepSpeed: fp32 masters if there are any."""

    what = "checkpoint of DeepSpeed"

    def __init__(self, path: str) -> None:
        from shardwise.checkpoint.deepspeed import DeepSpeedCheckpoint

        super().__init__(path, DeepSpeedCheckpoint)


def _described(tensor: StoredTensor) -> SourceTensor:
    trainable = tensor.trainable if tensor.kind != BUFFER else None
    return SourceTensor(tensor.name, tensor.shape, tensor.torch_dtype, tensor.aliases, tensor.kind, trainable)


def verify_blocks(saved: Checkpoint, blocks: list[tuple[str, int]], progress: Progress | None = None) -> None:
    """Compare blocks with their checksums, and report progress. Raises CheckpointError if a file is damaged."""
    for first in range(0, len(blocks), 16):
        saved.verify(blocks[first : first + 16])
        if progress is not None:
            progress(min(len(blocks), first + 16), len(blocks))


def holds_checkpoint(path: str) -> bool:
    """Return True if a directory is a checkpoint of shardwise."""
    return os.path.isfile(os.path.join(path, manifest.NAME))


def looks_interrupted(path: str) -> bool:
    """Return True if a directory without a manifest has data files of shardwise."""
    try:
        return any(directory.DATA.fullmatch(name) for name in os.listdir(path)) and not holds_checkpoint(path)
    except OSError:
        return False


def find_checkpoint(path: str, tag: str | None = None) -> str | None:
    """Return the directory of the checkpoint at a path or in a directory of checkpoints; None without any of shardwise.

    Without `tag` it is the first complete one in the order of `shardwise.checkpoint.listing`; others are logged.
    Raises CheckpointPathError for a tag and the path of a checkpoint itself, CheckpointError if none is complete.
    """
    if holds_checkpoint(path):
        if tag is not None:
            raise CheckpointPathError(
                f"{path}: is a checkpoint itself, so there is none of the tag {tag!r} in it; leave the tag out, or "
                "give the directory that holds the checkpoints"
            )
        return path
    if tag is not None:
        found = os.path.join(path, directory.check_tag(tag))
        if looks_interrupted(found):
            manifestfile.load(found)  # raises that it is incomplete
        return found if holds_checkpoint(found) else None
    if looks_interrupted(path):
        manifestfile.load(path)
    if not CheckpointDirectory(path).tags_if_any():
        return None
    there = CheckpointDirectory(path).newest_first()
    for note in there.notes:
        logger.warning("%s", note)
    skipped: list[str] = []
    for tag in there.tags:
        try:
            with Checkpoint(os.path.join(path, tag)) as saved:
                saved.check_sizes(saved.manifest.files)
        except CheckpointError as error:
            skipped.append(str(error))
            continue
        for line in skipped:
            logger.warning("%s", line)
        if skipped and there.latest is not None:
            logger.warning("%s: %r names %r; %s is taken instead", path, directory.LATEST, there.latest, tag)
        return os.path.join(path, tag)
    raise CheckpointError(f"{path}: no checkpoint is complete. " + " | ".join(skipped))
