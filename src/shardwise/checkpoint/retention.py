"""Retention: older checkpoints of a series are removed after a new one was published.

A series consists of tags with the same words and different numbers: `global_step100`, `global_step200`. A tag belongs
to one if it ends in the number of steps of its checkpoint. Other checkpoints, such as `best`, were named by hand: they
are never removed, and saving one removes nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from shardwise.checkpoint import directory, manifest, manifestfile
from shardwise.checkpoint.newest import head_of
from shardwise.errors import CheckpointError

_NUMBERED = re.compile(r"(|.*\D)(\d+)")


def series(tag: str) -> tuple[str, int] | None:
    """Return the words and the number of a tag, or None if it does not end in a number.

    >>> series("global_step100"), series("007"), series("best")
    (('global_step', 100), ('', 7), None)
    """
    match = _NUMBERED.fullmatch(tag)
    return None if match is None else (match.group(1), int(match.group(2)))


def prune(
    parent: str,
    tag: str,
    counters: Mapping[str, int],
    keep_last: int | None,
    keep_every: int | None,
    *,
    finite: bool = True,
) -> list[str]:
    """Remove checkpoints of the published tag's series, except the `keep_last` newest, this one included (None: all),
    and those at a multiple of `keep_every` steps (None: none). Return notes on removed ones and failed removals.

    Never removed: the checkpoint that `latest` names, the newest with finite values, one that is being read or written,
    one that is incomplete or damaged, other directories, and links. Failed removals are repeated next time. `finite`
    describes the published checkpoint.
    """
    own = series(tag)
    if keep_last is None or own is None or own[1] != counters.get("global_steps"):
        return []
    try:
        latest = directory.read_latest(parent)
    except CheckpointError as error:
        return [f"{error}; no older checkpoint is removed as long as it is not known which one `latest` names"]
    removed: list[str] = []
    notes: list[str] = []
    kept = 1
    for name in _newest_first(parent, own[0]):
        steps = _steps(name)
        stays = name in (tag, latest) or (keep_every is not None and steps % keep_every == 0)
        if name == tag or (stays and kept >= keep_last and finite):
            continue
        whole = _complete(parent, name, steps)
        if whole is None:
            continue
        needed = not finite and whole.finite
        finite = finite or whole.finite
        if kept < keep_last:
            kept += 1
            continue
        if stays or needed:
            continue
        try:
            if directory.remove(parent, name):
                removed.append(name)
            else:
                notes.append(
                    f"{os.path.join(parent, name)}: kept for now, because it is being read or written, or its "
                    "file system has no locks"
                )
        except OSError as error:
            notes.append(f"{os.path.join(parent, name)}: cannot be removed: {error.strerror} (errno {error.errno})")
    if removed:
        notes.insert(0, f"{parent}: removed {', '.join(removed)} (checkpoint.keep_last is {keep_last})")
    return notes


def _steps(name: str) -> int:
    found = series(name)
    assert found is not None
    return found[1]


def _newest_first(parent: str, words: str) -> list[str]:
    heads = []
    for name in directory.other_tags(parent):
        found = series(name)
        if found is not None and found[0] == words and not os.path.islink(os.path.join(parent, name)):
            heads.append(head_of(parent, name))
    return [head.tag for head in sorted(heads, key=lambda head: head.order, reverse=True) if head.sequence >= 0]


def _complete(parent: str, tag: str, steps: int) -> manifest.Manifest | None:
    path = os.path.join(parent, tag)
    try:
        found = manifestfile.load(path, read_later=False)
        sizes = {name: os.path.getsize(os.path.join(path, name)) for name in found.files}
    except (CheckpointError, OSError):
        return None
    whole = all(sizes[name] == facts.size for name, facts in found.files.items())
    return found if whole and found.tag == tag and found.counters.get("global_steps") == steps else None
