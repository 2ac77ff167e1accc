"""The order of the checkpoints of a directory: one rule for loading, resuming, exporting, inspecting and retention.

Every state that is saved or copied has a number, one more than the highest that its engine has seen in the directory,
in the copies in memory, or given itself. Numbers order states; clocks do not: they jump, and differ between machines.
Manifests of earlier versions have no number and come before those that have one, by their steps.

Without a tag, checkpoints are tried in this order:

1. checkpoints that were to become `latest` and were completed after `latest` was written: the job ended between these
2. the checkpoint that `latest` names
3. all others, the highest number first

Within this order checkpoints with infinite or NaN values come after all others. The first that is whole is taken.
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
"""Bytes at a manifest's beginning that hold what orders it; a tag takes at most 2,400 of them."""
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
    """What the first lines of a manifest say.

    Attributes:
        tag: name of the checkpoint.
        sequence: number of its state; 0 in manifests of earlier versions, -1 if the manifest cannot be read.
        steps: `global_steps`; known, and needed, only if `sequence` is 0.
        latest: it was saved in order to become `latest`.
        finite: its values are finite, or nothing is said about that.
        job: random name of the job; None if the manifest does not say.
        copy: number of the copy in memory of the same state; None if there was none.
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
        """Key that is larger for a newer state."""
        return self.sequence, self.steps, self.tag


def head_of(parent: str, tag: str) -> Head:
    """Return what orders a checkpoint, from the first lines of its manifest."""
    path = os.path.join(parent, tag)
    try:
        with open(os.path.join(path, manifest.NAME), "rb") as file:
            layout = _LAYOUT.search(file.read(_HEAD))
    except OSError:
        return Head(tag, -1)
    said: dict[str, bytes] = {}
    if layout is not None:
        found = {name: pattern.search(layout.group(1)) for name, pattern in _FACT.items()}
        said = {name: match.group(1) for name, match in found.items() if match is not None}
    if "sequence" not in said:
        return _earlier(path, tag)
    return Head(
        tag,
        int(said["sequence"]),
        latest=said.get("latest") != b"false",
        finite=said.get("finite") != b"false",
        job=said["job"][1:-1].decode() if "job" in said else None,
        copy=int(said["copy"]) if "copy" in said else None,
    )


def _earlier(path: str, tag: str) -> Head:
    """Return the same of a manifest of an earlier version, or one whose layout is longer than `_HEAD`."""
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
class Listing:
    """The checkpoints of a directory, in the order in which they are to be tried.

    Attributes:
        heads: of each checkpoint; that which `latest` names has one even if it is not there or of another library.
        latest: what `latest` names; None: it names nothing.
        notes: what people should know of the choice.
    """

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


def listing(parent: str) -> Listing:
    """Return the checkpoints of a directory in the order in which they are to be tried (see the module).

    Only the first lines of manifests are read: whether a checkpoint is whole is found out when it is tried.

    Raises:
        CheckpointError: the directory cannot be listed, or holds nothing but a `latest` that is damaged.

    >>> import tempfile
    >>> listing(tempfile.mkdtemp()).tags
    []
    """
    try:
        names = directory.tags(parent)
    except FileNotFoundError:
        return Listing()
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
        return Listing(notes=notes)
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
    return Listing(found, latest, notes)


def _names(parent: str, tag: str) -> str:
    """Return which values of a checkpoint are infinite or NaN, in words."""
    try:
        names = manifestfile.load(os.path.join(parent, tag), read_later=False).layout.get("not_finite")
    except CheckpointError:
        names = None
    return manifest.outline(names or ["no names are given"])


def latest_head(parent: str) -> Head | None:
    """Return the head of the checkpoint that `latest` names; None if there is none of ours."""
    try:
        tag = directory.read_latest(parent)
    except CheckpointError:
        return None
    found = None if tag is None else head_of(parent, tag)
    return None if found is None or found.sequence < 0 else found


class StateNumbers:
    """Gives the states of one engine their numbers. All ranks have the same `value`.

    Attributes:
        value: the highest number that is known.
    """

    def __init__(self) -> None:
        self.value = 0
        self._copy: tuple[int, dict[str, int]] | None = None
        self._read: dict[str, tuple[tuple[int, ...], int]] = {}

    def see(self, number: int) -> None:
        """Take note of a number that another engine has given."""
        self.value = max(self.value, number)

    def next(self) -> int:
        """Return the number of a state that is taken now."""
        self.value += 1
        return self.value

    def after(self, parent: str) -> int:
        """Return the number of a state that is saved into a directory (rank 0; it is noted with `see`)."""
        read: dict[str, tuple[tuple[int, ...], int]] = {}
        for tag in directory.other_tags(parent):
            path = os.path.join(os.path.abspath(parent), tag, manifest.NAME)
            try:
                found = os.stat(path)
            except OSError:
                continue
            # Other jobs may save here, too; what has not changed need not be read again.
            file = (found.st_ino, found.st_size, found.st_mtime_ns)
            before = self._read.get(path)
            read[path] = before if before is not None and before[0] == file else (file, head_of(parent, tag).sequence)
        self._read = read
        return max(self.value, *(number for _, number in read.values())) + 1 if read else self.value + 1

    def copied(self, number: int, counters: Mapping[str, int]) -> None:
        """A copy in memory has been made of the state with these counters."""
        self._copy = number, dict(counters)

    def loaded(self) -> None:
        """Another state has been loaded."""
        self._copy = None

    def layout(self, counters: Mapping[str, int]) -> dict[str, Any]:
        """Return what the manifest of the state with these counters says of the copy in memory of it."""
        return {"copy": self._copy[0]} if self._copy is not None and self._copy[1] == dict(counters) else {}
