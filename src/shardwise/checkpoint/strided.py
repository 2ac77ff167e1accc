"""Reading n-dimensional patches of files into memory, with few reads and little memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from shardwise.boxes import Patch

LIMIT = 8 << 20
"""Bytes on the host at a time if values are not contiguous in the file or in memory."""

GAP = 4096
"""Bytes between two runs that are read with them, because the system reads entire pages anyway."""


def read_patch(patch: Patch, dtype: torch.dtype, read: Callable[[int, torch.Tensor], None], out: torch.Tensor) -> None:
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
