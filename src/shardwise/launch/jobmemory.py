"""Directories with the lifetime of a job: longer than its processes, not longer than its launcher.

Ranks keep in-memory checkpoints in the one on tmpfs, for restarts. Invariant: the directories are removed when the job
is over; those of a killed launcher by the same user's next launcher. A lock on the directory shows a living launcher.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

MEMORY = Path("/dev/shm")
_OWNED = "owned"


class JobDirectory:
    """Creates a directory `prefix` + user id in `root`, removed after the block; `path` None: not writable."""

    def __init__(self, root: Path = MEMORY, prefix: str = "shardwise-") -> None:
        self._root = root
        self._prefix = f"{prefix}{os.getuid()}-"
        self._lock: int | None = None
        self.path: Path | None = None

    def __enter__(self) -> JobDirectory:
        try:
            self._remove_abandoned()
            path = Path(tempfile.mkdtemp(prefix=self._prefix, dir=self._root))
            self._lock = _lock(str(path))
            (path / _OWNED).touch()
            self.path = path
        except OSError:
            self.path = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.path is not None:
            shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _remove_abandoned(self) -> None:
        for path in self._root.glob(f"{self._prefix}*"):
            with contextlib.suppress(OSError):
                # Without the mark its launcher is still between creating and locking.
                if path.stat().st_uid != os.getuid() or not (path / _OWNED).exists():
                    continue
                lock = _lock(str(path))
                if lock is not None:
                    shutil.rmtree(path, ignore_errors=True)
                    os.close(lock)


def _lock(path: str) -> int | None:
    """Lock a directory until the descriptor is closed; None if it is locked."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
