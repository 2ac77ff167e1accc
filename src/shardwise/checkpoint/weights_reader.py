"""The interface of readers: tensors by name, read by range. Reading cannot run code. A format is a subclass of
`WeightsReader` and a line in `shardwise.checkpoint.opening`, for export, import and inspection.
"""

from __future__ import annotations

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from typing_extensions import Self

from shardwise.boxes import Patch
from shardwise.checkpoint.manifest import PARAMETER, Slice, StoredTensor, by_any_name, name_of

PIECE = 8 << 20
"""Bytes that are read, converted or written at a time."""

Progress = Callable[[int, int], None]
"""Called with processed bytes and total bytes."""

ReadRange = Callable[[int, torch.Tensor], None]
"""Reads elements of a slice, from a given one on, into a 1-D tensor of any dtype and device."""


Run = tuple[StoredTensor, int, torch.Tensor]
"""(tensor, start, 1-D tensor): elements of a stored tensor from `start` on, and their destination."""


class WeightsReader(ABC):
    """Weights on disk, opened for reading. `what` is the format."""

    what: str = ""
    path: str

    @property
    def excluded(self) -> list[str]:
        """Frozen parameters that the save left out."""
        return []

    @abstractmethod
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Return all parameters and buffers by name (aliases are not keys)."""

    @abstractmethod
    def opened(self, tensor: StoredTensor, part: Slice) -> ReadRange:
        """Return a function that reads from a slice of a tensor. Raises CheckpointError if it is not there."""

    @abstractmethod
    def close(self) -> None:
        """Close all files."""

    def check(self, tensors: Iterable[StoredTensor], progress: Progress | None = None) -> bool:
        """Compare bytes with checksums; return False if the format has none. Raises CheckpointError for damage."""
        return False

    def read_into(self, tensor: StoredTensor, start: int, out: torch.Tensor) -> None:
        """Read elements of the flattened tensor, from `start` on, into a 1-D tensor of any dtype and device. Only their
        bytes are read, if the format allows it. Raises CheckpointError if they are not there, or cannot be read.
        """
        for part, patch in tensor.runs(start, start + out.numel()):
            read_patch(patch, tensor.torch_dtype, self.opened(tensor, part), out)

    def read_all(self, runs: Sequence[Run]) -> None:
        """Call `read_into` for several (tensor, start, out)."""
        for run in runs:
            self.read_into(*run)

    def read(self, tensor: StoredTensor) -> torch.Tensor:
        """Return an unsharded tensor, on the CPU."""
        for part in tensor.slices:
            self.opened(tensor, part)  # before memory is allocated for a missing tensor
        values = torch.empty(tensor.shape, dtype=tensor.torch_dtype, device="cpu")
        self.read_into(tensor, 0, values.view(-1))
        return values

    def pieces(self, tensor: StoredTensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first element, 1-D values) of a tensor, `PIECE` bytes at a time, overwritten by the next iteration."""
        step = PIECE // tensor.torch_dtype.itemsize
        values = torch.empty(min(step, tensor.numel), dtype=tensor.torch_dtype, device="cpu")
        for start in range(0, tensor.numel, step):
            values = values[: tensor.numel - start]
            self.read_into(tensor, start, values)
            yield start, values

    def by_any_name(self) -> dict[str, StoredTensor]:
        """Return all tensors by name and by every alias."""
        return {**by_any_name(self.tensors().values()), **self.tensors()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class StateDictReader(WeightsReader):
    """A state dict in memory; `path` names it in messages."""

    what = "state dict"

    def __init__(self, values: Mapping[str, torch.Tensor], path: str = "the state dict") -> None:
        self.path = path
        self._values = dict(values)
        self._tensors = {n: in_one_file(n, tuple(v.shape), v.dtype, path) for n, v in values.items()}

    def tensors(self) -> Mapping[str, StoredTensor]:
        """Return the tensors by name."""
        return self._tensors

    def opened(self, tensor: StoredTensor, part: Slice) -> ReadRange:
        """Return a function that copies from a tensor."""
        return functools.partial(copy_range, self._values[part.key].detach().reshape(-1))

    def close(self) -> None:
        """Drop the values."""
        self._values = {}


def in_one_file(name: str, shape: tuple[int, ...], dtype: torch.dtype, file: str) -> StoredTensor:
    """Return the description of a tensor that is unsharded in a file."""
    numel = torch.Size(shape).numel()
    return StoredTensor(name, PARAMETER, shape, name_of(dtype), (Slice(file, name, 0, numel),))


def copy_range(values: torch.Tensor, start: int, out: torch.Tensor) -> None:
    """Copy elements of 1-D values, from `start` on (a `ReadRange`)."""
    out.detach().copy_(values[start : start + out.numel()])


# -- patches: few reads, and little memory -----------------------------------------------------------------------------

LIMIT = 8 << 20
"""Bytes on the host at a time if values are not contiguous in the file or in memory."""

GAP = 4096
"""Bytes between two runs that are read with them, because the system reads entire pages anyway."""


def read_patch(patch: Patch, dtype: torch.dtype, read: ReadRange, out: torch.Tensor) -> None:
    """Read a patch with a file as its first memory, in `dtype`, into `out`: its second memory, 1-D, of any dtype and
    device. `read` reads contiguous elements of the file, from a given one on, into a 1-D tensor.
    """
    shape, strides, size = patch.shape, patch.source_strides, dtype.itemsize
    last = len(shape) - 1
    # For each dimension, elements of the file from the first to the last of the inner dimensions.
    spans = [1]
    for count, stride in zip(reversed(shape), reversed(strides), strict=True):
        spans.insert(0, spans[0] + (count - 1) * stride)
    # Dimensions from `level` on are read together; outer ones are iterated over.
    level = len(shape)
    while level and (strides[level - 1] - spans[level]) * size <= GAP and spans[level] * size <= LIMIT:
        level -= 1
    outer = [range(count) for count in shape[:level]]
    rows = 1 if level > last else min(shape[level], max(1, LIMIT // size // strides[level]))
    straight = level > last or (level == last and strides[last] == patch.target_strides[last] == 1)
    stage = torch.empty(0 if straight else (rows - 1) * strides[level] + spans[level + 1], dtype=dtype, device="cpu")
    for place in itertools.product(*outer, range(0, shape[level] if level <= last else 1, rows)):
        first = patch.source + sum(index * stride for index, stride in zip(place, strides, strict=False))
        begin = patch.target + sum(index * stride for index, stride in zip(place, patch.target_strides, strict=False))
        count = 1 if level > last else min(rows, shape[level] - place[level])
        if straight:
            read(first, out[begin : begin + count])
            continue
        some = stage[: (count - 1) * strides[level] + spans[level + 1]]
        read(first, some)
        part = (count, *shape[level + 1 :])
        into = [stride * out.stride(0) for stride in patch.target_strides[level:]]
        view = out.detach().as_strided(part, into, out.storage_offset() + begin * out.stride(0))
        view.copy_(some.as_strided(part, strides[level:]))
