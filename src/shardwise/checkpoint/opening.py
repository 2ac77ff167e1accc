"""Opening weights on disk by the first format that recognises a path."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from shardwise.checkpoint import directory, manifest, manifestfile
from shardwise.checkpoint.directory import holds_checkpoint
from shardwise.checkpoint.formats import dcp, deepspeed, huggingface
from shardwise.checkpoint.listing import CheckpointDirectory
from shardwise.checkpoint.reader import Checkpoint, complete_manifest
from shardwise.checkpoint.weights_reader import WeightsReader
from shardwise.errors import CheckpointError, CheckpointPathError
from shardwise.utils.logging import logger


def looks_interrupted(path: str) -> bool:
    """Return True if a directory without a manifest has data files of shardwise."""
    try:
        return any(map(directory.DATA.fullmatch, os.listdir(path))) and not holds_checkpoint(path)
    except OSError:
        return False


def find_checkpoint(path: str, tag: str | None = None) -> str | None:
    """Return the directory of the checkpoint at a path or in a directory of checkpoints; None without any of shardwise.

    Without `tag` it is the first complete one in the order of `shardwise.checkpoint.listing`; others are logged.
    Raises CheckpointPathError for a tag and the path of a checkpoint itself, CheckpointError if none is complete.
    """
    if tag is not None and holds_checkpoint(path):
        raise CheckpointPathError(
            f"{path}: is a checkpoint itself, so there is none of the tag {tag!r} in it; leave the tag out, or give "
            "the directory that holds the checkpoints"
        )
    chosen = path if tag is None else os.path.join(path, directory.check_tag(tag))
    if holds_checkpoint(chosen):
        return chosen
    if looks_interrupted(chosen):
        manifestfile.load(chosen)  # raises that it is incomplete
    if tag is not None or not CheckpointDirectory(path).tags_if_any():
        return None
    there = CheckpointDirectory(path).newest_first()
    for note in there.notes:
        logger.warning("%s", note)
    skipped: list[str] = []
    for tag in there.tags:
        try:
            complete_manifest(os.path.join(path, tag))
        except CheckpointError as error:
            skipped.append(str(error))
            logger.warning("%s", error)
            continue
        if skipped and there.latest is not None:
            logger.warning("%s: %r names %r; %s is taken instead", path, directory.LATEST, there.latest, tag)
        return os.path.join(path, tag)
    raise CheckpointError(f"{path}: no checkpoint is complete. " + " | ".join(skipped))


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
    text = directory.text_of(path)
    if not text:
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
