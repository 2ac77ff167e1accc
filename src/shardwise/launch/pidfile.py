"""The file of `--pid-file`: the process ids of a job, as JSON, as long as the job runs."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from shardwise.errors import CommandLineError, LaunchError


class PidFile:
    """Holds the process ids of the launcher and of the ranks. `say` gets a message if the file cannot be written later.

    The content is `{"launcher": {"host", "pid"}, "attempt": N, "ranks": {"0": {"host", "pid"}, ...}}`.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path, self._say = path, say
        self._attempt = 0
        self._ranks: dict[int, dict[str, str | int]] = {}

    def note(self, host: str, attempt: int, pids: Sequence[tuple[int, int]]) -> None:
        """Add the ranks that an attempt has started on a host, as (rank, process id)."""
        if attempt < self._attempt:
            return
        if attempt > self._attempt:
            self._attempt, self._ranks = attempt, {}
        self._ranks |= {rank: {"host": host, "pid": pid} for rank, pid in pids}
        try:
            self.write()
        except OSError as error:  # the job does not depend on it
            self._say(f"--pid-file {self._path}: {error.strerror}; the file is not up to date")

    def write(self) -> None:
        """Replace the file at once, so that a reader sees the old content or the new. Raises OSError."""
        launcher = {"host": socket.gethostname(), "pid": os.getpid()}
        content = {"launcher": launcher, "attempt": self._attempt, "ranks": dict(sorted(self._ranks.items()))}
        with tempfile.NamedTemporaryFile(
            "w", dir=self._path.parent, prefix=f".{self._path.name}-", delete=False
        ) as file:
            try:
                json.dump(content, file, indent=2)
                file.close()
                os.replace(file.name, self._path)
            except BaseException:
                os.unlink(file.name)
                raise


@contextlib.contextmanager
def pid_file(path: str | None, say: Callable[[str], None]) -> Iterator[PidFile | None]:
    """Make the file, and remove it at the end of the block; without a path do nothing.

    Raises:
        CommandLineError: another file is there.
        LaunchError: the file belongs to another job, or cannot be written.
    """
    if path is None:
        yield None
        return
    made = PidFile(Path(path), say)
    _check_free(Path(path))
    try:
        made.write()
    except OSError as error:
        raise LaunchError(f"--pid-file {path}: {error.strerror}. Give a file in a writable directory.") from error
    try:
        yield made
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _check_free(path: Path) -> None:
    """Refuse a file that is not left over from a job that has ended."""
    if not os.path.lexists(path):
        return
    try:
        launcher = json.loads(path.read_text(encoding="utf-8"))["launcher"]
        host, pid = str(launcher["host"]), int(launcher["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        raise CommandLineError(
            f"--pid-file {path}: exists, and is no file of process ids. Give another name."
        ) from None
    if host == socket.gethostname() and (pid == os.getpid() or not psutil.pid_exists(pid)):
        return
    raise LaunchError(
        f"--pid-file {path}: belongs to the job of process {pid} on {host}. Give another name, or remove the file if "
        "that job has ended."
    )
