"""Directories of checkpoints: a checkpoint appears whole or not at all, and `latest` always names a whole one.

New files are written into a hidden directory next to the target, flushed to disk, and published by one rename.
Where a checkpoint of that tag exists, the new data files (whose names are unique) are moved in beside the old ones and
then the manifest is replaced by one rename: at every moment the manifest that is there belongs to complete files.
The process that writes holds a lock, so that directories left behind by killed ones can be told and removed: those
whose name and marker are ours. Nothing else in the directory is touched, and no time is looked at.
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
DATA = re.compile(r"rank\d+of\d+-[0-9a-f]{8}\.safetensors")
_PARTIAL = ".partial"
_GONE = f".gone{_PARTIAL}"
"""Ending of what is being removed."""
_HIDDEN = re.compile(r"\.(?P<tag>.+)\.[0-9a-f]{8}(?P<gone>\.gone)?\.partial", re.DOTALL)
"""Names of drafts and of what is being removed."""
_NEW_LATEST = re.compile(rf"\.{LATEST}\.[0-9a-f]{{8}}-(?P<pid>[0-9]+)-(?P<machine>[0-9a-f]{{8}})\.partial")
"""Names of a `latest` that is about to be renamed."""
_LOCK = "writer.lock"
"""File in a draft that its writer has locked. Network file systems know locks of files, and not of directories."""
_REPLACED = ".replaced"
"""Ending of the second name of a manifest that was replaced, under which its readers' locks can be seen."""
_MARK = b"This directory is a draft of a checkpoint of shardwise.\n"
"""Content of that file."""
_WRITTEN = "user.shardwise.latest"
"""Extended attribute of `latest`: what was written into it."""
_NUMBER = "user.shardwise.sequence"
"""Extended attribute of `latest`: number of the state that was saved when it was written."""
_TAG = re.compile(r"[^/\\\x00-\x1f\x7f]+")
_LOCK_TRIES, _LOCK_PAUSE_S = 100, 0.01
_LONGEST_TAG = 200
"""Bytes. File systems take names of 255, of which those of drafts need some more than the tag."""


def check_tag(tag: Any) -> str:
    """Return the tag as a string that can name a directory.

    Raises:
        CheckpointPathError: it cannot.
    """
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
    """Return a path as a string.

    Raises:
        CheckpointPathError: it is empty, not a path, or a file.
    """
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
    """A checkpoint that is being written (made by rank 0; other ranks write files into `path`).

    Args:
        parent: directory that will hold the checkpoint; created if needed.
        tag: its name.
        tidy: remove what killed writers have left of all tags, not only of this one.

    Attributes:
        published: the checkpoint stands under its tag.

    Raises:
        OSError: the directory cannot be made.
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
        """Return a draft that another process has made and handed over, with the descriptor of its lock."""
        draft = cls.__new__(cls)
        draft.parent, draft.token, draft.published = parent, token, False
        draft.target = os.path.join(parent, tag)
        draft.path = os.path.join(parent, f".{tag}.{token}{_PARTIAL}")
        draft._lock, draft._moved = lock, []
        return draft

    def hand_over(self) -> int | None:
        """Return the lock's descriptor for another process, and let go of it: from now on it is that one's draft.

        The receiver holds the lock as soon as it has the descriptor, and the caller closes its own.
        """
        lock, self._lock = self._lock, None
        return lock

    def publish(self) -> None:
        """Make the checkpoint appear under its tag; the manifest is in `path` already.

        Raises:
            OSError: it could not be done; what was there before is still there, unless `published` is set.
        """
        sync_directory(self.path)
        if not os.path.lexists(self.target):
            os.rename(self.path, self.target)
            self.published = True
            with contextlib.suppress(OSError):  # not before: nobody may take it for abandoned
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
        with contextlib.suppress(OSError):  # where there is no old manifest, or files cannot have two names
            os.link(os.path.join(self.target, manifests.NAME), self._moved[-1])
        os.replace(os.path.join(self.path, manifests.NAME), os.path.join(self.target, manifests.NAME))
        self.published = True
        self._moved = []
        sync_directory(self.target)
        # The new checkpoint stands; old files that cannot be removed now go with the next one of this tag.
        with contextlib.suppress(OSError):
            if not _old_one_is_read(self.target):
                for name in old:
                    os.unlink(os.path.join(self.target, name))
        _remove_draft(self.path)
        with contextlib.suppress(OSError):  # of a writer that was killed when the old one had just appeared
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
    """Hold a lock on a directory of this machine until the descriptor is closed or the process ends.

    Returns:
        The descriptor, or None if the lock cannot be had.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def lock_file(path: str, content: bytes = b"") -> int:
    """Create a file and lock it; the lock holds until the descriptor returned, and every copy of it, is closed.

    Raises:
        OSError: the file cannot be created. That the file system has no locks is not an error: see `is_locked`.
    """
    new = f"{path}.new"
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        os.write(descriptor, content)
        os.rename(new, path)  # who sees it sees it locked
    except OSError:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise
    return descriptor


def _lock_alone(path: str) -> int | None:
    """Lock a file that exists; None if somebody else has, if it cannot be opened, or if there are no locks."""
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
    """Whether a process holds the lock of a file; False also where the file or the file system's locks are not there.

    Where locks do not reach other machines, those of their processes are not seen.
    """
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
    """Keeps a checkpoint from being removed, and its files from being replaced, while it is read.

    It is a shared lock on the manifest. Where that is missing or cannot be locked nothing is held. It ends with
    `release` or the object.
    """

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
                    time.sleep(_LOCK_PAUSE_S)  # somebody is just removing or replacing it
                    continue
                self._held = os.fstat(descriptor)
                self.release = weakref.finalize(self, os.close, descriptor)
                return

    def is_current(self) -> bool:
        """Whether the manifest that is held is the one that is there; True if nothing is held."""
        try:
            return self._held is None or os.path.samestat(self._held, os.stat(self._path))
        except OSError:
            return False


def _old_one_is_read(target: str) -> bool:
    """Whether somebody reads a checkpoint that was replaced; what only tells of those that are not read is removed."""
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
    """Remove a checkpoint: it disappears in one step, and its files after that. Return whether it was done.

    It is not where somebody reads it (`Hold`) or writes one of this tag, or where the file system has no locks, so that
    this cannot be known.

    Raises:
        OSError: it cannot be renamed.
    """
    path = os.path.join(parent, tag)
    drafts = filter(None, map(_HIDDEN.fullmatch, os.listdir(parent)))
    if any(draft["tag"] == tag and not draft["gone"] for draft in drafts):
        return False
    lock = _lock_alone(os.path.join(path, manifests.NAME))
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
    """Return a name for a draft or a checkpoint that is being removed."""
    parent, name = os.path.split(path)
    draft = name.removesuffix(_PARTIAL) if name.endswith(_PARTIAL) else f".{name}.{secrets.token_hex(4)}"
    return os.path.join(parent, draft + _GONE)


def _remove_draft(path: str) -> None:
    """Remove a draft as far as it can be: first its name, so that nobody adds files to it."""
    hidden = _hidden(path)
    try:
        os.rename(path, hidden)
    except OSError:
        hidden = path
    _remove_hidden(hidden)


def _remove_hidden(path: str) -> None:
    """Remove a hidden directory as far as it can be, its markers last: the next call finishes it."""
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
    """Whether a hidden directory is a draft of ours, or was a checkpoint of ours."""
    for name, expected in ((_LOCK, _MARK), (manifests.NAME, manifests.BEGINNING)):
        try:
            with open(open_to_read(os.path.join(path, name)), "rb") as file:
                if file.read(len(expected)) == expected:
                    return True
        except (OSError, CheckpointError):
            continue
    return False


def _machine() -> str:
    """Return what tells this machine from others, as letters that a file's name may have."""
    return hashlib.blake2b(platform.node().encode(), digest_size=4).hexdigest()


def _is_dead(process: int) -> bool:
    """Whether a process of this machine has ended."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def remove_leftovers(parent: str, tag: str | None = None) -> None:
    """Remove what killed writers have left: drafts of all tags, or of one, and a `latest` that was not renamed.

    That are directories with a name and a marker of ours whose lock is free, and files with a name of ours whose
    process, which the name gives, was one of this machine and has ended.
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
                        os.rmdir(path)  # if it is empty: a removal was interrupted at its end
                    continue
                if hidden["gone"]:
                    _remove_hidden(path)
                    continue
                # The lock of a living writer cannot be had; that of a dead one is gone with it.
                descriptor = _lock_alone(os.path.join(path, _LOCK))
                if descriptor is not None:
                    try:
                        _remove_draft(path)
                    finally:
                        os.close(descriptor)


def write_file(path: str, data: bytes) -> None:
    """Write a small file; it is on disk when this returns."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: str) -> None:
    """Bring the names in a directory to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # file systems that cannot do this keep names in order by themselves
            raise
    finally:
        os.close(descriptor)


def write_latest(parent: str, tag: str, number: int | None = None) -> None:
    """Let `latest` name another checkpoint, in one step; `number` is that of its state."""
    temporary = os.path.join(parent, f".{LATEST}.{secrets.token_hex(4)}-{os.getpid()}-{_machine()}{_PARTIAL}")
    try:
        write_file(temporary, tag.encode())
        with contextlib.suppress(OSError, AttributeError):  # where files have no attributes, it is not checked
            os.setxattr(temporary, _WRITTEN, tag.encode())
            if number is not None:
                os.setxattr(temporary, _NUMBER, str(number).encode())
        os.replace(temporary, os.path.join(parent, LATEST))
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_directory(parent)


def read_latest(parent: str) -> str | None:
    """Return the tag that `latest` names, or None if there is no such file.

    It is the first line of a text, which people and other programs may change. That it is not what was written is
    logged.

    Raises:
        CheckpointError: the file cannot be read or does not hold a tag.
    """
    path = os.path.join(parent, LATEST)
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
    """Return the number of the state that was saved when `latest` was written.

    None: it was changed by hand since, or the file system has no extended attributes.
    """
    path = os.path.join(parent, LATEST)
    try:
        with open(open_to_read(path), "rb") as file:
            found = file.read(1000)
        return int(os.getxattr(path, _NUMBER)) if os.getxattr(path, _WRITTEN) == found else None
    except (OSError, AttributeError, ValueError, CheckpointError):
        return None


def tags(parent: str) -> list[str]:
    """Return the names of all directories that may be checkpoints.

    Raises:
        OSError: it cannot be told which there are.
    """
    return sorted(
        name
        for name in os.listdir(parent)
        if not name.startswith(".") and os.path.isfile(os.path.join(parent, name, manifests.NAME))
    )


def other_tags(parent: str) -> list[str]:
    """Return the same, and none where it cannot be told."""
    with contextlib.suppress(OSError):
        return tags(parent)
    return []
