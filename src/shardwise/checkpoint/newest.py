"""The newest checkpoint of a run: for resuming without being told which."""

from __future__ import annotations

import os
from typing import NamedTuple

from shardwise.checkpoint import directory, manifest
from shardwise.errors import CheckpointError
from shardwise.utils.logging import logger


class OnDisk(NamedTuple):
    """The checkpoints of a directory that have a manifest; their files have not been looked at.

    Attributes:
        tags: their names, in the order in which they are to be tried; none if what is there has no manifest of ours.
        steps: `global_steps` of the first.
        created: when its state was taken, in seconds since 1970.
    """

    tags: list[str]
    steps: int
    created: float


def newest(parent: str) -> OnDisk | None:
    """Return the checkpoints of a directory, the newest first; None if there is nothing.

    The newest is the one that `latest` names, unless others were made since then: a job that ends after a checkpoint
    has appeared and before `latest` names it has saved it. The number of steps does not count: whoever goes back to an
    earlier checkpoint, and on from there, does not want to go on from where the former way has led.

    Raises:
        CheckpointError: it cannot be told what is there.

    >>> import tempfile
    >>> newest(tempfile.mkdtemp()) is None
    True
    """
    try:
        names = directory.tags(parent)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(
            f"{parent}: cannot be listed: {error.strerror}. Whether there is something to go on from is not known, so "
            "nothing is begun"
        ) from error
    found: dict[str, manifest.Manifest] = {}
    for tag in names:
        try:
            found[tag] = manifest.load(os.path.join(parent, tag))
        except CheckpointError as error:
            logger.warning("%s", error)
    latest, named = None, 0.0
    try:
        latest = directory.read_latest(parent)
        if latest in found:
            named = max(found[latest].created, os.stat(os.path.join(parent, directory.LATEST)).st_mtime)
    except (CheckpointError, OSError) as error:
        logger.warning("%s", error)
        latest = directory.LATEST  # there is one
    if not found:
        return OnDisk([], 0, 0.0) if names or latest is not None else None
    order = sorted(found, key=lambda tag: (found[tag].created > named, tag == latest, found[tag].created), reverse=True)
    first = found[order[0]]
    return OnDisk(order, first.counters.get("global_steps", 0), first.created)
