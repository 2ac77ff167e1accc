"""Order of the checkpoints of a directory, for loading, resuming, exporting, inspecting and retention.

Every saved or copied state has a number: one more than the highest that its engine has seen. Numbers order states,
because clocks jump and differ between machines. Manifests of earlier versions have none; they come before the others,
by steps.

Without a tag, the first complete checkpoint is taken in this order, those with infinite or NaN values last:

1. checkpoints that were to become `latest` and were completed after `latest` was written: the job ended between these
2. the checkpoint that `latest` names
3. all others, the highest number first
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.checkpoint import directory, manifest, manifestfile
from shardwise.errors import CheckpointError

_HEAD = 8192
"""Bytes at a manifest's beginning that hold the ordering keys; a tag takes at most 2,400 of them."""
_LAYOUT = re.compile(rb'^"layout": \{\n(.*?)\},?\n"config"', re.MULTILINE | re.DOTALL)
_FACT = {
    name: re.compile(rb'^"%b":(%b)(?:,|\}|$)' % (name.encode(), value), re.MULTILINE)
    for name, value in {
        "sequence": rb"[0-9]{1,16}",
        "latest": rb"true|false",
        "job": rb'"[0-9a-f]{8}"',
        "finite": rb"true|false",
        "copy": rb"[0-9]{1,16}",
    }.items()
}


@dataclass(frozen=True)
class Head:
    """Ordering keys, from the first lines of a manifest. `sequence` is the number of the state; 0 in manifests of
    earlier versions, which have `steps` (`global_steps`), and -1 if the manifest cannot be read. `latest` is True if
    the file of this name was to name the checkpoint, `finite` if values are finite or not checked. `job` is a random
    name of the job, `copy` the number of the copy in memory of the same state, or None.
    """

    tag: str
    sequence: int
    steps: int = 0
    latest: bool = True
    finite: bool = True
    job: str | None = None
    copy: int | None = None

    @property
    def order(self) -> tuple[int, int, str]:
        """Sort key, larger for a newer state."""
        return self.sequence, self.steps, self.tag


def head_of(parent: str, tag: str) -> Head:
    """Return the ordering keys of a checkpoint, from the first lines of its manifest."""
    path = os.path.join(parent, tag)
    try:
        with open(os.path.join(path, manifest.NAME), "rb") as file:
            layout = _LAYOUT.search(file.read(_HEAD))
    except OSError:
        return Head(tag, -1)
    fields: dict[str, bytes] = {}
    if layout is not None:
        found = {name: pattern.search(layout.group(1)) for name, pattern in _FACT.items()}
        fields = {name: match.group(1) for name, match in found.items() if match is not None}
    if "sequence" not in fields:
        return _earlier(path, tag)
    return Head(
        tag,
        int(fields["sequence"]),
        latest=fields.get("latest") != b"false",
        finite=fields.get("finite") != b"false",
        job=fields["job"][1:-1].decode() if "job" in fields else None,
        copy=int(fields["copy"]) if "copy" in fields else None,
    )


def _earlier(path: str, tag: str) -> Head:
    try:
        found = manifestfile.load(path, read_later=False)
    except CheckpointError:
        return Head(tag, -1)
    layout = found.layout
    return Head(
        tag,
        found.sequence,
        found.counters.get("global_steps", 0),
        latest=layout.get("latest") is not False,
        finite=found.finite,
        job=layout.get("job"),
        copy=layout.get("copy"),
    )


@dataclass(frozen=True)
class CheckpointListing:
    """Checkpoints in the order to try them, with notes; `heads` has that of `latest` even if it is missing."""

    heads: list[Head] = field(default_factory=list)
    latest: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def tags(self) -> list[str]:
        """Names of the checkpoints."""
        return [head.tag for head in self.heads]

    @property
    def highest(self) -> int:
        """The highest number; 0 if there is none."""
        return max((head.sequence for head in self.heads), default=0)


def listing(parent: str) -> CheckpointListing:
    """Return the checkpoints of a directory in the order to try them. Only the first lines of manifests are read;
    completeness is checked when a checkpoint is tried. Raises CheckpointError if the directory cannot be listed, or
    holds only a damaged `latest`.

    >>> import tempfile
    >>> listing(tempfile.mkdtemp()).tags
    []
    """
    try:
        names = directory.tags(parent)
    except FileNotFoundError:
        return CheckpointListing()
    except OSError as error:
        raise CheckpointError(
            f"{parent}: cannot be listed: {error.strerror}. Whether there is a state to go on from is unknown, so "
            "no new run is started"
        ) from error
    heads = {tag: head_of(parent, tag) for tag in names}
    notes: list[str] = []
    latest, written = None, None
    try:
        latest = directory.read_latest(parent)
        written = directory.number_of_latest(parent)
    except CheckpointError as error:
        if not heads:
            raise
        notes.append(f"{error}; the newest complete checkpoint is looked for")
    if latest is not None:
        heads.setdefault(latest, Head(latest, -1))

    def place(head: Head) -> tuple[bool, bool, tuple[int, int, str]]:
        later = written is not None and head.latest and head.sequence > written
        return later, head.tag == latest, head.order

    found = sorted(heads.values(), key=place, reverse=True)
    if not found:
        return CheckpointListing(notes=notes)
    first = found[0]
    if latest is None and not notes:
        notes.append(f"{parent}: there is no file {directory.LATEST!r}; the newest checkpoint, {first.tag}, is taken")
    elif latest is not None and first.tag != latest:
        notes.append(
            f"{parent}: {first.tag} was completed after {directory.LATEST!r} was made to name {latest}, so it is taken"
        )
    good = [head for head in found if head.finite]
    if good and not first.finite:
        passed = [head.tag for head in found[: found.index(good[0])]]
        notes.append(
            f"{parent}: {', '.join(passed)} has values that are infinite or NaN ({_names(parent, passed[0])}); "
            f"{good[0].tag} is the newest checkpoint without"
        )
        found = good + [head for head in found if not head.finite]
    return CheckpointListing(found, latest, notes)


def _names(parent: str, tag: str) -> str:
    try:
        names = manifestfile.load(os.path.join(parent, tag), read_later=False).layout.get("not_finite")
    except CheckpointError:
        names = None
    return manifest.outline(names or ["no names are given"])


def latest_head(parent: str) -> Head | None:
    """Return the head of the checkpoint that `latest` names; None if there is none of shardwise."""
    try:
        tag = directory.read_latest(parent)
    except CheckpointError:
        return None
    found = None if tag is None else head_of(parent, tag)
    return None if found is None or found.sequence < 0 else found


class StateNumbers:
    """Numbers of the states of one engine, the same on all ranks; `value` is the highest known number."""

    def __init__(self) -> None:
        self.value = 0
        self._copy: tuple[int, dict[str, int]] | None = None
        self._read: dict[str, tuple[tuple[int, ...], int]] = {}

    def see(self, number: int) -> None:
        """Record a number of another engine."""
        self.value = max(self.value, number)

    def next(self) -> int:
        """Return the number of a new state."""
        self.value += 1
        return self.value

    def after(self, parent: str) -> int:
        """Return the number of a state to be saved into a directory (rank 0; the caller records it with `see`)."""
        read: dict[str, tuple[tuple[int, ...], int]] = {}
        for tag in directory.other_tags(parent):
            path = os.path.join(os.path.abspath(parent), tag, manifest.NAME)
            try:
                found = os.stat(path)
            except OSError:
                continue
            # Other jobs may save here, too; unchanged manifests are not read again.
            file = (found.st_ino, found.st_size, found.st_mtime_ns)
            before = self._read.get(path)
            read[path] = before if before is not None and before[0] == file else (file, head_of(parent, tag).sequence)
        self._read = read
        return max(self.value, *(number for _, number in read.values())) + 1 if read else self.value + 1

    def copied(self, number: int, counters: Mapping[str, int]) -> None:
        """Record a copy in memory of the state with these counters."""
        self._copy = number, dict(counters)

    def loaded(self) -> None:
        """Record that another state was loaded."""
        self._copy = None

    def layout(self, counters: Mapping[str, int]) -> dict[str, Any]:
        """Return the manifest's fields on the copy in memory of the state with these counters."""
        return {"copy": self._copy[0]} if self._copy is not None and self._copy[1] == dict(counters) else {}
