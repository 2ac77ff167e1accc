"""Directories of checkpoints: a checkpoint appears atomically, and `latest` always names a complete one.

Files are written into a hidden staging directory next to the target, flushed to disk, and published by one rename. If
the tag exists, the new data files (with unique names) are moved into it, and one rename replaces the manifest. Hence a
manifest always belongs to complete files. The writer holds a lock. A staging directory without a locked file was left
by a killed writer, and is removed if name and marker are shardwise's. Nothing else is touched; no times are compared.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import platform
import re
import secrets
import shutil
import stat
import time
import weakref
from collections.abc import Callable
from typing import Any

from shardwise.checkpoint import manifest as manifests
from shardwise.checkpoint.checksums import open_to_read
from shardwise.errors import CheckpointError, CheckpointPathError
from shardwise.utils.logging import logger

LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"
"""File that names a universal checkpoint, as DeepSpeed writes it."""
DATA = re.compile(r"rank\d+of\d+-[0-9a-f]{8}\.safetensors")
_PARTIAL = ".partial"
_GONE = f".gone{_PARTIAL}"
_HIDDEN = re.compile(r"\.(?P<tag>.+)\.[0-9a-f]{8}(?P<gone>\.gone)?\.partial", re.DOTALL)
_NEW_LATEST = re.compile(rf"\.{LATEST}\.[0-9a-f]{{8}}-(?P<pid>[0-9]+)-(?P<machine>[0-9a-f]{{8}})\.partial")
_LOCK = "writer.lock"
"""File in a staging directory, locked by its writer, because network file systems lock files only."""
_REPLACED = ".replaced"
"""Suffix of the second name of a replaced manifest, which shows its readers' locks."""
_MARK = b"This directory is a draft of a checkpoint of shardwise.\n"
_WRITTEN = "user.shardwise.latest"
"""Extended attribute of `latest`: its content when written."""
_NUMBER = "user.shardwise.sequence"
"""Extended attribute of `latest`: number of the saved state."""
_TAG = re.compile(r"[^/\\\x00-\x1f\x7f]+")
_LOCK_TRIES, _LOCK_PAUSE_S = 100, 0.01
_LONGEST_TAG = 200
"""Bytes; staging directories add to the tag, and file systems allow names of 255."""


def check_tag(tag: Any) -> str:
    """Return the tag as a string that can name a directory. Raises CheckpointPathError if it cannot."""
    text = str(tag)
    plain = _TAG.fullmatch(text) is not None and not text.startswith(".") and text != LATEST and text == text.strip()
    try:
        fits = len(text.encode()) <= _LONGEST_TAG
    except UnicodeEncodeError:
        fits = False
    if not plain or not fits:
        raise CheckpointPathError(
            f"checkpoint tag {text!r:.300}: a tag names a directory, so it must be text of 1 to {_LONGEST_TAG} bytes "
            "without slashes, control characters, or space around it, and neither begin with a dot nor be "
            f"{LATEST!r}; for example 'global_step100'"
        )
    return text


def check_directory(path: Any, argument: str) -> str:
    """Return a path as a string. Raises CheckpointPathError if it is empty, not a path, or a file."""
    try:
        text = os.fspath(path)
    except TypeError:
        text = ""
    if not isinstance(text, str) or not text:
        raise CheckpointPathError(f"{argument}: expected the path of a directory, found {path!r}")
    if os.path.exists(text) and not os.path.isdir(text):
        raise CheckpointPathError(f"{argument}: {text} is a file; give a directory")
    return text


class StagingDirectory:
    """A checkpoint that is being written. Rank 0 creates it; other ranks write files into `path`.

    `parent` is created if needed. `tidy` removes leftovers of killed writers of all tags, not only of this one.
    `published` is True once the checkpoint exists under its tag.
    """

    def __init__(self, parent: str, tag: str, *, tidy: bool = True) -> None:
        self.parent = parent
        self.target = os.path.join(parent, tag)
        self.token = secrets.token_hex(4)
        os.makedirs(parent, exist_ok=True)
        remove_leftovers(parent, None if tidy else tag)
        self.path = os.path.join(parent, f".{tag}.{self.token}{_PARTIAL}")
        os.mkdir(self.path)
        self.published = False
        try:
            self._lock: int | None = lock_file(os.path.join(self.path, _LOCK), _MARK)
        except OSError:
            with contextlib.suppress(OSError):
                os.rmdir(self.path)
            raise
        self._moved: list[str] = []

    @classmethod
    def taken_over(cls, parent: str, tag: str, token: str, lock: int | None) -> StagingDirectory:
        """Return a staging directory that another process has made, with the descriptor of its lock."""
        draft = cls.__new__(cls)
        draft.parent, draft.token, draft.published = parent, token, False
        draft.target = os.path.join(parent, tag)
        draft.path = os.path.join(parent, f".{tag}.{token}{_PARTIAL}")
        draft._lock, draft._moved = lock, []
        return draft

    def hand_over(self) -> int | None:
        """Return the lock's descriptor for the process that becomes the owner; the caller closes its own."""
        lock, self._lock = self._lock, None
        return lock

    def publish(self) -> None:
        """Publish the checkpoint under its tag; the manifest is in `path` already. Raises OSError if publication
        failed; the previous state remains unless `published` is set.
        """
        sync_directory(self.path)
        if not os.path.lexists(self.target):
            os.rename(self.path, self.target)
            self.published = True
            with contextlib.suppress(OSError):  # not before: without it the directory looks abandoned
                os.unlink(os.path.join(self.target, _LOCK))
        else:
            self._replace()
        sync_directory(self.parent)
        self._unlock()

    def _replace(self) -> None:
        if not os.path.isdir(self.target):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), self.target)
        old = {name for name in os.listdir(self.target) if DATA.fullmatch(name)}
        for name in sorted(os.listdir(self.path)):
            if name not in (manifests.NAME, _LOCK):
                self._moved.append(os.path.join(self.target, name))
                os.rename(os.path.join(self.path, name), self._moved[-1])
        sync_directory(self.target)
        self._moved.append(os.path.join(self.target, f".{self.token}{_REPLACED}"))
        with contextlib.suppress(OSError):  # without an old manifest, or without hard links
            os.link(os.path.join(self.target, manifests.NAME), self._moved[-1])
        os.replace(os.path.join(self.path, manifests.NAME), os.path.join(self.target, manifests.NAME))
        self.published = True
        self._moved = []
        sync_directory(self.target)
        # The new checkpoint is published; old files that cannot be removed now go with the next one of this tag.
        with contextlib.suppress(OSError):
            if not _old_one_is_read(self.target):
                for name in old:
                    os.unlink(os.path.join(self.target, name))
        _remove_draft(self.path)
        with contextlib.suppress(OSError):  # of a writer that was killed after publication
            os.unlink(os.path.join(self.target, _LOCK))

    def discard(self) -> None:
        """Remove everything that has been written of this checkpoint."""
        for path in self._moved:
            with contextlib.suppress(OSError):
                os.unlink(path)
        _remove_draft(self.path)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def lock_directory(path: str) -> int | None:
    """Lock a directory of this machine until the descriptor is closed; None if it is locked."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def lock_file(path: str, content: bytes = b"") -> int:
    """Create a file locked until every copy of the returned descriptor is closed; without locks, an unlocked one."""
    new = f"{path}.new"
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        os.write(descriptor, content)
        os.rename(new, path)  # visible only when locked
    except OSError:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise
    return descriptor


def _lock_exclusive(path: str) -> int | None:
    """Lock an existing file exclusively; None if it is locked, cannot be opened, or there are no locks."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def is_locked(path: str) -> bool:
    """Return True if a process holds the lock; False without the file or locks. Other machines' may be invisible."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EWOULDBLOCK, errno.EACCES)
    finally:
        os.close(descriptor)
    return False


class Hold:
    """A shared lock on the manifest, if it exists: prevents removal of the checkpoint and replacement of its files."""

    def __init__(self, path: str) -> None:
        self.release: Callable[[], object] = lambda: None
        self._path = os.path.join(path, manifests.NAME)
        self._held: os.stat_result | None = None
        with contextlib.suppress(OSError, CheckpointError):
            for _ in range(_LOCK_TRIES):
                descriptor = open_to_read(self._path)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except OSError as error:
                    os.close(descriptor)
                    if error.errno != errno.EWOULDBLOCK:
                        return
                    time.sleep(_LOCK_PAUSE_S)  # a process is removing or replacing it
                    continue
                self._held = os.fstat(descriptor)
                self.release = weakref.finalize(self, os.close, descriptor)
                return

    def is_current(self) -> bool:
        """Return True if the held manifest is still in place, or nothing is held."""
        try:
            return self._held is None or os.path.samestat(self._held, os.stat(self._path))
        except OSError:
            return False


def _old_one_is_read(target: str) -> bool:
    """Return True if a replaced checkpoint has readers; remove second names of manifests without readers."""
    read = False
    for name in os.listdir(target):
        if re.fullmatch(rf"\.[0-9a-f]{{8}}{re.escape(_REPLACED)}", name):
            path = os.path.join(target, name)
            if is_locked(path):
                read = True
            else:
                os.unlink(path)
    return read


def remove(parent: str, tag: str) -> bool:
    """Remove a checkpoint: one rename hides it, then its files are removed. Return False if it was kept: while a
    process reads it (`Hold`) or writes its tag, and without locks, because readers are unknown. Raises OSError if the
    rename fails.
    """
    path = os.path.join(parent, tag)
    drafts = filter(None, map(_HIDDEN.fullmatch, os.listdir(parent)))
    if any(draft["tag"] == tag and not draft["gone"] for draft in drafts):
        return False
    lock = _lock_exclusive(os.path.join(path, manifests.NAME))
    if lock is None:
        return False
    try:
        if _old_one_is_read(path):
            return False
        hidden = _hidden(path)
        os.rename(path, hidden)
        sync_directory(parent)
        _remove_hidden(hidden)
    finally:
        os.close(lock)
    return True


def _hidden(path: str) -> str:
    parent, name = os.path.split(path)
    draft = name.removesuffix(_PARTIAL) if name.endswith(_PARTIAL) else f".{name}.{secrets.token_hex(4)}"
    return os.path.join(parent, draft + _GONE)


def _remove_draft(path: str) -> None:
    """Remove a staging directory as far as possible: its name first, because a writer may still add files."""
    hidden = _hidden(path)
    try:
        os.rename(path, hidden)
    except OSError:
        hidden = path
    _remove_hidden(hidden)


def _remove_hidden(path: str) -> None:
    """Remove a hidden directory as far as possible, its markers last, because the next call then continues."""
    markers = (manifests.NAME, _LOCK)
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(path)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name not in markers:
                os.unlink(entry.path)
        if set(os.listdir(path)) <= set(markers):
            for name in markers:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(path, name))
        os.rmdir(path)


def _is_marked(path: str) -> bool:
    for name, expected in ((_LOCK, _MARK), (manifests.NAME, manifests.BEGINNING)):
        try:
            with open(open_to_read(os.path.join(path, name)), "rb") as file:
                if file.read(len(expected)) == expected:
                    return True
        except (OSError, CheckpointError):
            continue
    return False


def _machine() -> str:
    return hashlib.blake2b(platform.node().encode(), digest_size=4).hexdigest()


def _is_dead(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def remove_leftovers(parent: str, tag: str | None = None) -> None:
    """Remove leftovers of killed writers: staging directories of all tags, or of one, with shardwise's name and marker
    and a free lock; and a `latest` before its rename, with an ended process of this machine in its name.
    """
    for name in os.listdir(parent):
        path = os.path.join(parent, name)
        new_latest, hidden = _NEW_LATEST.fullmatch(name), _HIDDEN.fullmatch(name)
        with contextlib.suppress(OSError):
            if new_latest is not None and tag is None:
                is_file = stat.S_ISREG(os.lstat(path).st_mode)
                if is_file and new_latest["machine"] == _machine() and _is_dead(int(new_latest["pid"])):
                    os.unlink(path)
            elif hidden is not None and (tag is None or hidden["tag"] == tag):
                if not stat.S_ISDIR(os.lstat(path).st_mode):
                    continue
                if not _is_marked(path):
                    if hidden["gone"]:
                        os.rmdir(path)  # empty after an interrupted removal
                    continue
                if hidden["gone"]:
                    _remove_hidden(path)
                    continue
                # The lock of a living writer is held; that of a dead one is free.
                descriptor = _lock_exclusive(os.path.join(path, _LOCK))
                if descriptor is not None:
                    try:
                        _remove_draft(path)
                    finally:
                        os.close(descriptor)


def write_file(path: str, data: bytes) -> None:
    """Write a small file, and flush it to disk."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: str) -> None:
    """Flush the names of a directory to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # file systems without support keep names in order themselves
            raise
    finally:
        os.close(descriptor)


def write_latest(parent: str, tag: str, number: int | None = None) -> None:
    """Let `latest` name another checkpoint, by one rename; `number` is that of its state."""
    temporary = os.path.join(parent, f".{LATEST}.{secrets.token_hex(4)}-{os.getpid()}-{_machine()}{_PARTIAL}")
    try:
        write_file(temporary, tag.encode())
        with contextlib.suppress(OSError, AttributeError):  # without extended attributes changes are not detected
            os.setxattr(temporary, _WRITTEN, tag.encode())
            if number is not None:
                os.setxattr(temporary, _NUMBER, str(number).encode())
        os.replace(temporary, os.path.join(parent, LATEST))
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_directory(parent)


def read_latest(parent: str, name: str = LATEST) -> str | None:
    """Return the tag in `latest`, or None without the file; log other programs' changes. Raises CheckpointError."""
    path = os.path.join(parent, name)
    try:
        with open(open_to_read(path), encoding="utf-8") as file:
            tag = file.read(1000).partition("\n")[0].strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    try:
        checked = check_tag(tag)
    except CheckpointPathError as error:
        raise CheckpointError(f"{path}: damaged: {error}") from error
    with contextlib.suppress(OSError, AttributeError, UnicodeDecodeError):
        written = os.getxattr(path, _WRITTEN).decode()
        if written != checked:
            logger.warning(
                "%s names %r, and was written as %r: it was changed by hand, or is damaged. %r is used",
                path,
                checked,
                written,
                checked,
            )
    return checked


def number_of_latest(parent: str) -> int | None:
    """Return the number of the state that `latest` names; None if changed by hand, or without extended attributes."""
    path = os.path.join(parent, LATEST)
    try:
        with open(open_to_read(path), "rb") as file:
            found = file.read(1000)
        return int(os.getxattr(path, _NUMBER)) if os.getxattr(path, _WRITTEN) == found else None
    except (OSError, AttributeError, ValueError, CheckpointError):
        return None


def tags(parent: str) -> list[str]:
    """Return the names of all directories that may be checkpoints. Raises OSError if the directory cannot be listed."""
    return sorted(
        name
        for name in os.listdir(parent)
        if not name.startswith(".") and os.path.isfile(os.path.join(parent, name, manifests.NAME))
    )


def other_tags(parent: str) -> list[str]:
    """Return the names as `tags`; none if the directory cannot be listed."""
    with contextlib.suppress(OSError):
        return tags(parent)
    return []
