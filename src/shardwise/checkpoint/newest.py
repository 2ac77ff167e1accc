"""The newest checkpoint of a run: for resuming without being told which."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from shardwise.checkpoint import directory, manifest, manifestfile
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


class Made(NamedTuple):
    """Who has made the checkpoint that `latest` names.

    Attributes:
        tag: its name.
        created: when its state was taken, in seconds since 1970.
        job: random name of the job; None if it does not say.
    """

    tag: str
    created: float
    job: str | None


_HEAD = 4096
"""Bytes at a manifest's beginning in which it says when and by whom it was made; a tag has at most 200 characters."""
_CREATED = re.compile(rb'^"created": ([0-9.]+),$', re.MULTILINE)
_JOB = re.compile(rb'^"job":"([0-9a-f]{8})"', re.MULTILINE)


def head_of(path: str) -> tuple[float, str | None] | None:
    """Return when a checkpoint was made and by which job, without reading all of its manifest; None if it says not."""
    try:
        with open(os.path.join(path, manifest.NAME), "rb") as file:
            head = file.read(_HEAD)
    except OSError:
        return None
    created, job = _CREATED.search(head), _JOB.search(head)
    return None if created is None else (float(created.group(1)), None if job is None else job.group(1).decode())


def made_by(parent: str) -> Made | None:
    """Return who has made the checkpoint that `latest` names; None if that cannot be told."""
    try:
        tag = directory.read_latest(parent)
    except CheckpointError:
        return None
    found = None if tag is None else head_of(os.path.join(parent, tag))
    return None if tag is None or found is None else Made(tag, *found)


def newest(parent: str) -> OnDisk | None:
    """Return the checkpoints of a directory, the newest first; None if there is nothing.

    The newest is the one that `latest` names, unless others were made since then: a job that ends after a checkpoint
    has appeared and before `latest` names it has saved it. The number of steps does not count: whoever goes back to an
    earlier checkpoint, and on from there, does not want to go on from where the former way has led. Checkpoints of
    values that are infinite or NaN come after all others.

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
            f"{parent}: cannot be listed: {error.strerror}. Whether there is a state to resume from is unknown, so "
            "no new run is started"
        ) from error
    found: dict[str, manifest.Manifest] = {}
    for tag in names:
        try:
            found[tag] = manifestfile.load(os.path.join(parent, tag))
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
    good = [tag for tag in order if found[tag].finite]
    if good and good[0] != order[0]:
        passed = order[: order.index(good[0])]
        logger.warning(
            "%s: %s has values that are infinite or NaN (%s); %s is the newest checkpoint without",
            parent,
            ", ".join(passed),
            manifest.outline(found[order[0]].layout.get("not_finite") or ["no names are given"]),
            good[0],
        )
        order = good + [tag for tag in order if not found[tag].finite]
    first = found[order[0]]
    return OnDisk(order, first.counters.get("global_steps", 0), first.created)
