"""The checkpoints of a directory: their order, the file `latest`, and retention.

Every saved or copied state has a number: one more than the highest that its engine has seen. Numbers order states,
because clocks jump and differ between machines. Manifests of earlier versions have none: they are older than the
others, and in the order of their steps. Without a tag, checkpoints are tried in this order:

1. the checkpoint that `latest` names, if its values are finite
2. all others with finite values, the highest number first
3. those with infinite or NaN values, in the same order
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.checkpoint import directory, manifestfile
from shardwise.checkpoint import manifest as manifests
from shardwise.checkpoint.checksums import open_to_read
from shardwise.checkpoint.reader import complete_manifest
from shardwise.errors import CheckpointError, CheckpointPathError

_HEAD = 8192
"""Bytes at a manifest's beginning that hold the ordering keys; a tag takes at most 2,400 of them."""
_LAYOUT = '"layout": '
_NUMBERED = re.compile(r"(|.*\D)(\d+)")


@dataclass(frozen=True)
class Head:
    """Ordering keys, from the first lines of a manifest. `sequence` is the number of the state; 0 in manifests of
    earlier versions, which have `steps` (`global_steps`), and -1 if the manifest cannot be read. `finite` is False with
    infinite or NaN values. `job` is a random name of the job, `copy` the number of the copy in memory of the same
    state, or None.
    """

    tag: str
    sequence: int
    steps: int = 0
    finite: bool = True
    job: str | None = None
    copy: int | None = None

    @property
    def order(self) -> tuple[int, int, str]:
        """Sort key, larger for a newer state."""
        return self.sequence, self.steps, self.tag


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


class CheckpointDirectory:
    """A directory of checkpoints at `path`, each in a directory that its tag names.

    >>> import tempfile
    >>> CheckpointDirectory(tempfile.mkdtemp()).newest_first().tags
    []
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def tags(self) -> list[str]:
        """Return the names of all directories that may be checkpoints. Raises OSError if `path` cannot be listed."""
        inside = (name for name in os.listdir(self.path) if not name.startswith("."))
        return sorted(name for name in inside if directory.holds_checkpoint(os.path.join(self.path, name)))

    def tags_if_any(self) -> list[str]:
        """Return the names as `tags`; none if `path` cannot be listed."""
        with contextlib.suppress(OSError):
            return self.tags()
        return []

    def latest(self, name: str = directory.LATEST) -> str | None:
        """Return the tag in the first line of `latest`, or None without the file. Raises CheckpointError."""
        path = os.path.join(self.path, name)
        try:
            with open(open_to_read(path), encoding="utf-8") as file:
                return directory.check_tag(file.read(1000).partition("\n")[0].strip())
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error
        except CheckpointPathError as error:
            raise CheckpointError(f"{path}: damaged: {error}") from error

    def set_latest(self, tag: str, name: str = directory.LATEST, check: Callable[[], None] = lambda: None) -> None:
        """Let `latest` name another checkpoint, by one rename, which `check` may prevent by an exception."""
        directory.replace_file(self.path, name, tag.encode(), check)

    def head(self, tag: str) -> Head:
        """Return the ordering keys of a checkpoint, from the first lines of its manifest."""
        path = os.path.join(self.path, tag)
        steps = 0
        try:
            with open(os.path.join(path, manifests.NAME), "rb") as file:
                text = file.read(_HEAD).decode(errors="replace")
            layout = json.JSONDecoder().raw_decode(text, text.index(_LAYOUT) + len(_LAYOUT))[0]
        except OSError:
            return Head(tag, -1)
        except ValueError:
            layout = {}
        if "sequence" not in layout:  # of an earlier version, or with a long list of names
            try:
                found = manifestfile.load(path)
            except CheckpointError:
                return Head(tag, -1)
            layout, steps = {"sequence": 0, **found.layout}, found.counters.get("global_steps", 0)
        return Head(
            tag, layout["sequence"], steps, layout.get("finite") is not False, layout.get("job"), layout.get("copy")
        )

    def newest_first(self) -> CheckpointListing:
        """Return the checkpoints in the order to try them (see the module). Only the first lines of manifests are read;
        completeness is checked when a checkpoint is tried. Raises CheckpointError if the directory cannot be listed, or
        holds only a damaged `latest`, and CheckpointPathError if it is a checkpoint itself.
        """
        try:
            heads = {tag: self.head(tag) for tag in self.tags()}
        except FileNotFoundError:
            return CheckpointListing()
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: cannot be listed: {error.strerror}. Whether there is a state to go on from is unknown, "
                "so no new run is started"
            ) from error
        notes: list[str] = []
        latest = None
        try:
            latest = self.latest()
        except CheckpointError as error:
            if not heads:
                raise
            notes.append(f"{error}; the newest complete checkpoint is looked for")
        if latest is not None:
            heads.setdefault(latest, Head(latest, -1))
        if not heads and directory.holds_checkpoint(self.path):
            raise directory.wrong_level(self.path)
        found = sorted(heads.values(), key=lambda head: (head.finite, head.tag == latest, head.order), reverse=True)
        if found and latest is None and not notes:
            newest = found[0].tag
            notes.append(f"{self.path}: there is no file 'latest'; the newest checkpoint, {newest}, is taken")
        if found and latest is not None and found[0].tag != latest:
            names = manifests.outline(self._not_finite(latest) or ["no names are given"])
            notes.append(
                f"{self.path}: {latest} has values that are infinite or NaN ({names}); {found[0].tag} is the newest "
                "checkpoint without"
            )
        return CheckpointListing(found, latest, notes)

    def _not_finite(self, tag: str) -> list[str]:
        with contextlib.suppress(CheckpointError):
            return list(manifestfile.load(os.path.join(self.path, tag)).layout.get("not_finite", ()))
        return []

    def head_of_latest(self) -> Head | None:
        """Return the head of the checkpoint that `latest` names; None if there is none of shardwise."""
        try:
            tag = self.latest()
        except CheckpointError:
            return None
        found = None if tag is None else self.head(tag)
        return None if found is None or found.sequence < 0 else found

    def highest(self) -> int:
        """Return the highest number of a state; 0 if there is none."""
        return max((self.head(tag).sequence for tag in self.tags_if_any()), default=0)

    def remove(self, tag: str) -> bool:
        """Remove a checkpoint: one rename hides it, then its files are removed. Return False if it was kept: while a
        process reads it (`Hold`) or writes its tag, and without locks, because readers are unknown. Raises OSError if
        the rename fails.
        """
        path = os.path.join(self.path, tag)
        if any(draft["tag"] == tag for draft in filter(None, map(directory.HIDDEN.fullmatch, os.listdir(self.path)))):
            return False
        lock = directory.lock_exclusive(os.path.join(path, manifests.NAME))
        if lock is None:
            return False
        try:
            hidden = os.path.join(self.path, f".{tag}.{secrets.token_hex(4)}{directory.PARTIAL}")
            os.rename(path, hidden)
            directory.sync_directory(self.path)
            directory.remove_hidden(hidden)
        finally:
            os.close(lock)
        return True

    def prune(
        self, tag: str, counters: Mapping[str, int], keep_last: int | None, keep_every: int | None, finite: bool = True
    ) -> list[str]:
        """Remove older checkpoints of the published tag's series (`series`), except the `keep_last` newest, this one
        included (None: all), and those at a multiple of `keep_every` steps (None: none); return notes.

        Never removed: the checkpoint that `latest` names, the newest with finite values, one that is being read or
        written, one that is incomplete or damaged, other directories, and links. Failed removals are repeated next
        time. `finite` describes the published checkpoint.
        """
        own = series(tag)
        if keep_last is None or own is None or own[1] != counters.get("global_steps"):
            return []
        try:
            latest = self.latest()
        except CheckpointError as error:
            return [f"{error}; no older checkpoint is removed as long as it is not known which one `latest` names"]
        removed: list[str] = []
        notes: list[str] = []
        kept = 1
        for name, steps in self._series(own[0]):
            stays = name in (tag, latest) or (keep_every is not None and steps % keep_every == 0)
            if name == tag or (stays and kept >= keep_last and finite):
                continue
            whole = self._complete(name, steps)
            if whole is None:
                continue
            needed = not finite and whole.finite
            finite = finite or whole.finite
            if kept < keep_last:
                kept += 1
            elif not stays and not needed:
                path = os.path.join(self.path, name)
                try:
                    if self.remove(name):
                        removed.append(name)
                    else:
                        reason = "it is being read or written, or its file system has no locks"
                        notes.append(f"{path}: kept for now, because {reason}")
                except OSError as error:
                    notes.append(f"{path}: cannot be removed: {error.strerror} (errno {error.errno})")
        if removed:
            notes.insert(0, f"{self.path}: removed {', '.join(removed)} (checkpoint.keep_last is {keep_last})")
        return notes

    def _series(self, words: str) -> list[tuple[str, int]]:
        heads = []
        for name in self.tags_if_any():
            found = series(name)
            if found is not None and found[0] == words and not os.path.islink(os.path.join(self.path, name)):
                heads.append((self.head(name), found[1]))
        newest_first = sorted(heads, key=lambda pair: pair[0].order, reverse=True)
        return [(head.tag, steps) for head, steps in newest_first if head.sequence >= 0]

    def _complete(self, tag: str, steps: int) -> manifests.Manifest | None:
        try:
            found = complete_manifest(os.path.join(self.path, tag))
        except CheckpointError:
            return None
        return found if found.tag == tag and found.counters.get("global_steps") == steps else None


def series(tag: str) -> tuple[str, int] | None:
    """Return the words and the number of a tag, or None if it does not end in a number.

    A series consists of tags with the same words and different numbers: `global_step100`, `global_step200`. A tag
    belongs to one if it ends in the number of steps of its checkpoint. Other checkpoints, such as `best`, were named by
    hand: they are never removed, and saving one removes nothing.

    >>> series("global_step100"), series("007"), series("best")
    (('global_step', 100), ('', 7), None)
    """
    match = _NUMBERED.fullmatch(tag)
    return None if match is None else (match.group(1), int(match.group(2)))


class StateNumbers:
    """Numbers of the states of one engine, the same on all ranks; `value` is the highest known number. `copies` are the
    names of copies in memory that training has made or loaded since the last load of another state.
    """

    def __init__(self) -> None:
        self.value = 0
        self.copies: set[str] = set()
        self._copy: tuple[int, dict[str, int]] | None = None
        self._known: set[str] = set()

    def see(self, number: int) -> None:
        """Record a number of another engine."""
        self.value = max(self.value, number)

    def next(self) -> int:
        """Return the number of a new state."""
        self.value += 1
        return self.value

    def after(self, parent: str) -> int:
        """Return the number of a state to be saved into a directory (rank 0; the caller records it with `see`)."""
        there, path = CheckpointDirectory(parent), os.path.abspath(parent)
        latest = there.head_of_latest() if path in self._known else None
        highest = there.highest() if path not in self._known else 0 if latest is None else latest.sequence
        self._known.add(path)
        return max(self.value, highest) + 1

    def copied(self, name: str, number: int, counters: Mapping[str, int]) -> None:
        """Record a copy in memory of the state with these counters."""
        self._copy = number, dict(counters)
        self.copies.add(name)

    def loaded(self) -> None:
        """Record that another state, or other weights, were loaded."""
        self._copy = None
        self.copies.clear()

    def layout(self, counters: Mapping[str, int]) -> dict[str, Any]:
        """Return the manifest's fields on the copy in memory of the state with these counters."""
        return {"copy": self._copy[0]} if self._copy is not None and self._copy[1] == dict(counters) else {}
