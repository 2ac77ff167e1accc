"""Directories on disk: a checkpoint appears atomically, and is removed only if no process uses it.

Files are written into a hidden staging directory next to the target, flushed to disk, and published by one rename. If
the tag exists, the new data files (with unique names) are moved into it, and one rename replaces the manifest. Hence a
manifest always belongs to complete files. The writer holds a lock. A staging directory with a free lock was left by a
killed writer, and is removed if name and marker are shardwise's, or if it is empty. No other file is touched, and no
times are compared.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import time
import weakref
from collections.abc import Callable
from typing import Any

from shardwise.checkpoint import manifest as manifests
from shardwise.checkpoint.checksums import open_to_read
from shardwise.errors import CheckpointError, CheckpointPathError

LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"
"""File that names a universal checkpoint, as DeepSpeed writes it."""
DATA = re.compile(r"rank\d+of\d+-[0-9a-f]{8}\.safetensors")
PARTIAL = ".partial"
HIDDEN = re.compile(r"\.(?P<tag>.+)\.[0-9a-f]{8}\.partial", re.DOTALL)
_LOCK = "writer.lock"
"""File in a staging directory, locked by its writer, because network file systems lock files only."""
_MARK = b"This directory is a draft of a checkpoint of shardwise.\n"
_TAG = re.compile(r"[^/\\\x00-\x1f\x7f\ud800-\udfff]+")
_LOCK_TRIES, _LOCK_PAUSE_S = 100, 0.01
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_LONGEST_TAG = 200
"""Bytes; staging directories add to the tag, and file systems allow names of 255."""


def check_tag(tag: Any) -> str:
    """Return the tag as a string that can name a directory. Raises CheckpointPathError if it cannot."""
    text = str(tag)
    plain = _TAG.fullmatch(text) is not None and not text.startswith(".") and text != LATEST and text == text.strip()
    if not plain or len(text.encode()) > _LONGEST_TAG:
        raise CheckpointPathError(
            f"checkpoint tag {text!r:.300}: a tag names a directory, so it must be text of 1 to {_LONGEST_TAG} bytes "
            "without slashes, control characters, or space around it, and neither begin with a dot nor be "
            f"{LATEST!r}; for example 'global_step100'"
        )
    return text


def text_of(path: Any) -> str:
    """Return a path as a string, or an empty one if it is no path."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
    return text if isinstance(text, str) else ""


def check_directory(path: Any, argument: str) -> str:
    """Return a path as a string. Raises CheckpointPathError if it is empty, not a path, or a file."""
    text = text_of(path)
    if not text:
        raise CheckpointPathError(f"{argument}: expected the path of a directory, found {path!r}")
    if os.path.exists(text) and not os.path.isdir(text):
        raise CheckpointPathError(f"{argument}: {text} is a file; give a directory")
    return text


def holds_checkpoint(path: str) -> bool:
    """Return True if a directory is a checkpoint of shardwise: its manifest begins like one, or is cut short or cannot
    be read, or data files have shardwise's names.
    """
    file = os.path.join(path, manifests.NAME)
    if not os.path.isfile(file):
        return False
    with contextlib.suppress(OSError), open(file, "rb") as opened:
        begins = manifests.BEGINNING.startswith(opened.read(len(manifests.BEGINNING)))
        return begins or any(map(DATA.fullmatch, os.listdir(path)))
    return True


def wrong_level(path: str) -> CheckpointPathError:
    """Return the error for a checkpoint where a directory of checkpoints is expected."""
    parent, tag = os.path.split(os.path.abspath(path))
    return CheckpointPathError(
        f"{path}: is a checkpoint itself, and a directory of checkpoints is expected; give {parent!r}, and for this "
        f"checkpoint the tag {tag!r}"
    )


class StagingDirectory:
    """A checkpoint that is being written: rank 0 makes it, all ranks write into `path`.
    `parent` is created if needed. `tidy` removes leftovers of killed writers of all tags, not only of this one.
    `published` is True once the checkpoint exists under its tag. `given_up`, set by another thread, prevents what the
    writer has not done yet.
    """

    def __init__(self, parent: str, tag: str, *, tidy: bool = True) -> None:
        self.parent = parent
        self.target = os.path.join(parent, tag)
        self.token = secrets.token_hex(4)
        self.path = os.path.join(parent, f".{tag}.{self.token}{PARTIAL}")
        self.published = self.given_up = False
        self._moved: list[str] = []
        os.makedirs(parent, exist_ok=True)
        remove_leftovers(parent, None if tidy else tag)
        self._lock: int | None = None
        try:
            self._make()
        except BaseException:
            self.discard()
            raise

    def _make(self) -> None:
        """Make the directory and its locked marker, which is written last: other writers remove marked directories."""
        while self._lock is None:
            os.mkdir(self.path)
            with contextlib.suppress(FileNotFoundError):  # because other writers remove empty ones of killed writers
                self._lock = os.open(os.path.join(self.path, _LOCK), _NEW, 0o666)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.write(self._lock, _MARK)

    def check(self) -> None:
        """Raise CheckpointError if this save was given up: a newer one may have been published since."""
        if self.given_up:
            end = "complete, but older than others" if self.published else "not published"
            raise CheckpointError(f"{self.target}: this save was given up, because it took too long; it is {end}")

    def publish(self, *, replace: bool = True) -> None:
        """Publish the checkpoint under its tag, or without `replace` under a new one; the manifest is in `path`
        already. Raises OSError if publication failed, and CheckpointError if it was given up; the previous state
        remains unless `published` is set.
        """
        sync_directory(self.path)
        self.check()
        if not replace or not os.path.lexists(self.target):
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
        old = [name for name in os.listdir(self.target) if DATA.fullmatch(name)]
        for name in sorted(os.listdir(self.path)):
            if name not in (manifests.NAME, _LOCK):
                self._moved.append(os.path.join(self.target, name))
                os.rename(os.path.join(self.path, name), self._moved[-1])
        sync_directory(self.target)
        there = os.path.join(self.target, manifests.NAME)
        unread = None if not os.path.lexists(there) else lock_exclusive(there)
        old = old if unread is not None or not os.path.lexists(there) else []
        os.replace(os.path.join(self.path, manifests.NAME), there)
        self.published = True
        self._moved = []
        sync_directory(self.target)
        # Old files that are being read, or cannot be removed now, go with the next checkpoint of this tag.
        for name in old:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self.target, name))
        if unread is not None:
            os.close(unread)
        remove_hidden(self.path)
        with contextlib.suppress(OSError):  # of a writer that was killed after publication
            os.unlink(os.path.join(self.target, _LOCK))

    def discard(self) -> None:
        """Remove everything that has been written of this checkpoint."""
        for path in self._moved:
            with contextlib.suppress(OSError):
                os.unlink(path)
        remove_hidden(self.path)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def lock_exclusive(path: str) -> int | None:
    """Lock an existing file exclusively; None if it is locked, cannot be opened or was replaced, or without locks."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.lstat(path)):
            return descriptor
    os.close(descriptor)
    return None


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


def remove_hidden(path: str) -> None:
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
    if not os.path.isdir(path) or os.path.islink(path):
        return False
    for name, expected in ((_LOCK, _MARK), (manifests.NAME, manifests.BEGINNING)):
        try:
            with open(open_to_read(os.path.join(path, name)), "rb") as file:
                if file.read(len(expected)) == expected:
                    return True
        except (OSError, CheckpointError):
            continue
    return False


def remove_leftovers(parent: str, tag: str | None = None) -> None:
    """Remove staging directories of all tags, or of one, with shardwise's name that are empty or have its marker and a
    free lock.
    """
    for name in os.listdir(parent):
        hidden, path = HIDDEN.fullmatch(name), os.path.join(parent, name)
        if hidden is None or (tag is not None and hidden["tag"] != tag):
            continue
        with contextlib.suppress(OSError):
            os.rmdir(path)  # left by a writer that was killed before the first file, or after the removal of the last
            continue
        if not _is_marked(path):
            continue
        descriptor = lock_exclusive(os.path.join(path, _LOCK))  # that of a living writer is held
        if descriptor is not None or not os.path.lexists(os.path.join(path, _LOCK)):
            remove_hidden(path)
        if descriptor is not None:
            os.close(descriptor)


def write_file(path: str, data: bytes) -> None:
    """Write a small file, and flush it to disk."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(parent: str, name: str, data: bytes, check: Callable[[], None] = lambda: None) -> None:
    """Write a small file, new or in place of another, by one rename. `check` may prevent the rename by an exception."""
    draft = StagingDirectory(parent, name, tidy=False)
    try:
        new = os.path.join(draft.path, name)
        write_file(new, data)
        check()
        os.replace(new, os.path.join(parent, name))
    finally:
        draft.discard()
    sync_directory(parent)


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
