"""Opening weights on disk by the first format that recognises a path."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from shardwise.checkpoint import dcp, deepspeed, directory, huggingface, manifest
from shardwise.checkpoint.listing import CheckpointDirectory
from shardwise.checkpoint.source import CheckpointSource, DeepSpeedSource, Source, find_checkpoint
from shardwise.errors import CheckpointError, CheckpointPathError


def _open_checkpoint(path: str, tag: str | None) -> Source | None:
    found = find_checkpoint(path, tag) if os.path.isdir(path) else None
    return None if found is None else CheckpointSource(found)


def _open_deepspeed(path: str, tag: str | None) -> Source | None:
    if not os.path.isdir(path):
        return None
    chosen = tag
    if chosen is None and not deepspeed.recognised(path):
        try:
            there = CheckpointDirectory(path)
            chosen = there.latest() or there.latest(directory.LATEST_UNIVERSAL)
        except CheckpointError:
            return None
    found = path if chosen is None else os.path.join(path, directory.check_tag(chosen))
    return DeepSpeedSource(found) if deepspeed.recognised(found) else None


def _open_distributed(path: str, tag: str | None) -> Source | None:
    return dcp.DcpSource(path) if tag is None and dcp.recognises(path) else None


def _open_hugging_face(path: str, tag: str | None) -> Source | None:
    return huggingface.open_files(path) if tag is None else None


_OPENERS: tuple[Callable[[str, str | None], Source | None], ...] = (
    _open_checkpoint,
    _open_deepspeed,
    _open_distributed,
    _open_hugging_face,
)
"""Each returns the opened source, or None if the path is not of its format; tried in this order."""


def open_source(path: Any, tag: str | int | None = None) -> Source:
    """Open weights on disk.

    Args:
        path: a checkpoint of shardwise or DeepSpeed, or a directory of them; a directory of
            torch.distributed.checkpoint; weights of Hugging Face (a directory, or a file .safetensors, .index.json,
            .bin, .pt, .pth).
        tag: tag of a checkpoint in a directory of checkpoints; None: see `find_checkpoint`.

    Raises:
        CheckpointPathError: the path is none of these.
        CheckpointError: it is one, but cannot be read.

    Example:
        >>> with open_source("runs/a") as source:  # doctest: +SKIP
        ...     for name, tensor in source.tensors().items():
        ...         print(name, tensor.shape, source.read(name, 0, 3))
    """
    try:
        text = os.fspath(path)
    except TypeError:
        text = ""
    if not isinstance(text, str) or not text:
        raise CheckpointPathError(f"expected the path of a checkpoint or of weights, found {path!r}")
    if not os.path.exists(text):
        raise CheckpointPathError(f"{text}: there is no such file or directory")
    name = None if tag is None else str(tag)
    for opener in _OPENERS:
        source = opener(text, name)
        if source is not None:
            return source
    if name is not None:
        others = manifest.outline(CheckpointDirectory(text).tags_if_any()) or "none"
        raise CheckpointPathError(f"{text}: there is no checkpoint of the tag {name!r}. Checkpoints there: {others}")
    if os.path.isfile(text):
        raise CheckpointPathError(
            f"{text}: expected a directory, or a file that ends in .safetensors, .index.json, .bin, .pt or .pth"
        )
    raise CheckpointPathError(
        f"{text}: neither a checkpoint ({manifest.NAME}), nor a directory of checkpoints, nor one that "
        "torch.distributed.checkpoint has written (.metadata), nor weights in files of Hugging Face's names "
        "(model.safetensors, model.safetensors.index.json, pytorch_model.bin, ...)"
    )
