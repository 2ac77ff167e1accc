"""Opening weights on disk by the first format that recognises a path."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from shardwise.checkpoint import directory, manifest
from shardwise.checkpoint.formats import dcp, deepspeed, huggingface
from shardwise.checkpoint.listing import CheckpointDirectory
from shardwise.checkpoint.reader import Checkpoint
from shardwise.checkpoint.source import find_checkpoint
from shardwise.checkpoint.weights_reader import WeightsReader
from shardwise.errors import CheckpointError, CheckpointPathError


def find_deepspeed(path: str, tag: str | None = None) -> str | None:
    """Return the directory of a checkpoint of DeepSpeed: the path itself, or in it that of the tag, else the one that
    `latest` or `latest_universal` names. None without any.
    """
    if tag is None and not deepspeed.recognised(path):
        there = CheckpointDirectory(path)
        tag = there.latest() or there.latest(directory.LATEST_UNIVERSAL)
    found = path if tag is None else os.path.join(path, directory.check_tag(tag))
    return found if deepspeed.recognised(found) else None


def _open(path: str, tag: str | None) -> WeightsReader | None:
    """Open a path by the first format that recognises it."""
    if os.path.isdir(path):
        if (found := find_checkpoint(path, tag)) is not None:
            return Checkpoint(found)
        with contextlib.suppress(CheckpointError):  # of a damaged `latest`
            found = find_deepspeed(path, tag)
        if found is not None:
            return deepspeed.DeepSpeedCheckpoint(found)
    if tag is not None:
        return None
    return dcp.DcpReader(path) if dcp.recognises(path) else huggingface.open_files(path)


def open_source(path: Any, tag: str | int | None = None) -> WeightsReader:
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
        ...         print(name, tensor.shape, source.read(tensor).sum())
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
    source = _open(text, name)
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
