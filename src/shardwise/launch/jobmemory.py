"""Directories that live as long as a job: longer than its processes, and no longer than its launcher.

In the one in memory the ranks keep copies of their state, from which they go on after a restart. Invariant: they are
gone when the job is over, however that has ended. A launcher that is killed cannot remove its own; the next one of the
same user does. The lock on a directory tells whether its launcher lives.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

from shardwise.checkpoint.directory import lock_directory

MEMORY = Path("/dev/shm")
_OWNED = "owned"


class JobDirectory:
    """Makes the directory, and removes it at the end of the block.

    Args:
        root: where it is made: a tmpfs, or the system's place for temporary files.
        prefix: of its name; the user's number follows.

    Attributes:
        path: the directory; None if `root` cannot be written.
    """

    def __init__(self, root: Path = MEMORY, prefix: str = "shardwise-") -> None:
        self._root = root
        self._prefix = f"{prefix}{os.getuid()}-"
        self._lock: int | None = None
        self.path: Path | None = None

    def __enter__(self) -> JobDirectory:
        try:
            self._remove_abandoned()
            path = Path(tempfile.mkdtemp(prefix=self._prefix, dir=self._root))
            self._lock = lock_directory(str(path))
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
                # Without the mark its launcher is between making and locking it.
                if path.stat().st_uid != os.getuid() or not (path / _OWNED).exists():
                    continue
                lock = lock_directory(str(path))
                if lock is not None:
                    shutil.rmtree(path, ignore_errors=True)
                    os.close(lock)
