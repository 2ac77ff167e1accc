"""The newest checkpoint of a run, by how far training had come: for resuming without being told which."""

from __future__ import annotations

import os
from typing import NamedTuple

from shardwise.checkpoint import directory, manifest
from shardwise.errors import CheckpointError
from shardwise.utils.logging import logger


class OnDisk(NamedTuple):
    """A checkpoint with a manifest; its files have not been looked at.

    Attributes:
        tag: its name.
        steps: `global_steps` when it was saved.
        latest: `latest` names it.
        others: `latest` names another one.
    """

    tag: str
    steps: int
    latest: bool
    others: bool


def newest(parent: str) -> OnDisk | None:
    """Return the checkpoint with the most steps, of several the one that was saved last; None if there is none.

    >>> import tempfile
    >>> newest(tempfile.mkdtemp()) is None
    True
    """
    found = []
    for tag in directory.other_tags(parent):
        try:
            saved = manifest.load(os.path.join(parent, tag))
        except CheckpointError as error:
            logger.warning("%s", error)
            continue
        found.append((saved.counters.get("global_steps", 0), saved.created, tag))
    if not found:
        return None
    steps, _, tag = max(found)
    try:
        latest = directory.read_latest(parent)
    except CheckpointError:
        latest = None  # loading says what is wrong with it
        return OnDisk(tag, steps, False, True)
    return OnDisk(tag, steps, latest == tag, latest not in (None, tag))
