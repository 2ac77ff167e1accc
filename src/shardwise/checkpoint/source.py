"""Directories of checkpoints: the one that is read."""

from __future__ import annotations

import os

from shardwise.checkpoint import directory, manifest, manifestfile
from shardwise.checkpoint.listing import CheckpointDirectory
from shardwise.checkpoint.reader import complete_manifest
from shardwise.errors import CheckpointError, CheckpointPathError
from shardwise.utils.logging import logger


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
            complete_manifest(os.path.join(path, tag))
        except CheckpointError as error:
            skipped.append(str(error))
            continue
        for line in skipped:
            logger.warning("%s", line)
        if skipped and there.latest is not None:
            logger.warning("%s: %r names %r; %s is taken instead", path, directory.LATEST, there.latest, tag)
        return os.path.join(path, tag)
    raise CheckpointError(f"{path}: no checkpoint is complete. " + " | ".join(skipped))
