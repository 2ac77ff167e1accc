"""Forwards the workers' output to the terminal, log files and memory.

One thread reads every worker's standard output and error from a pipe. Rank 0 on a terminal has a pseudo-terminal:
progress bars and colours behave as without a launcher. Whole lines are written with the rank as prefix, and lines of
ranks never mix. Invariant: every byte is shown, except overwritten states of a progress bar (by a carriage return, or a
line of another rank), and torch's `[rankN]: ` before tracebacks where the prefix repeats it.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import selectors
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from shardwise.errors import LaunchError

PROGRESS_S = 1.0
"""Seconds between states of a progress bar that is shown as lines; the last state is always shown."""
LONGEST_LINE = 1 << 20
KEPT_LINES = 2000
CHUNK = 1 << 16
_LAST_CHUNKS = 16
"""Most chunks that the end of the job reads from a stream, because a process may go on writing into it."""

_ERASED = b"\r\x1b[2K"
_LINE_END = re.compile(rb"(\r*\n|\r+)")
_TRACEBACK = (b"Traceback (most recent call last)", b"+ Exception Group Traceback (most recent call last)")

Tags = Literal["auto", "always", "never"]


@dataclass
class Cursor:
    """State of the terminal's last line: an unfinished line of rank 0, and whether it is a progress bar."""

    mid_line: bool = False
    bar: bool = False


class Terminal:
    """Standard output or error of the launcher, a binary file; streams of the same terminal share `cursor`."""

    def __init__(self, file: BinaryIO, cursor: Cursor | None = None) -> None:
        self._file = file
        self._cursor = cursor or Cursor()
        self._broken = False

    def write(self, data: bytes, raw: bool = False) -> None:
        """Write whole lines, or raw bytes of rank 0. Never raises, because a closed reader must not end the job."""
        if self._broken or not data:
            return
        # Other lines go below an unfinished line, or replace a progress bar, which redraws itself below.
        start = b""
        if self._cursor.mid_line and not raw:
            start = _ERASED if self._cursor.bar else b"\n"
        unfinished = data[data.rfind(b"\n") + 1 :]
        self._cursor.bar = raw and (b"\r" in unfinished or (self._cursor.bar and b"\n" not in data))
        self._cursor.mid_line = raw and not data.endswith(b"\n")
        try:
            self._write_all(start + data)
        except (OSError, ValueError):
            self._broken = True

    def _write_all(self, data: bytes) -> None:
        """Write all bytes, also to a file that another process has set not to block."""
        left = memoryview(data)
        while True:
            try:
                if left:
                    left = left[self._file.write(left) or 0 :]
                self._file.flush()
                if not left:
                    return
            except BlockingIOError as error:
                left = left[error.characters_written :]
            select.select([], [self._file], [])


class LineCutter:
    """Splits a byte stream into lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[tuple[bytes, bool]]:
        """Return the lines that `data` completes, without ends; True: a carriage return, hence overwritten later."""
        text = self._rest + data
        open_end = text.rstrip(b"\r")  # carriage returns at the end may be the first half of a line end
        *pieces, rest = _LINE_END.split(open_end)
        lines = [(pieces[i], not pieces[i + 1].endswith(b"\n")) for i in range(0, len(pieces), 2)]
        if len(rest) > LONGEST_LINE:
            lines.append((rest, False))
            rest = b""
        self._rest = rest + text[len(open_end) :]
        return lines

    def close(self) -> list[tuple[bytes, bool]]:
        """Return the rest without a line end."""
        rest, self._rest = self._rest.rstrip(b"\r"), b""
        return [(rest, False)] if rest else []


class OutputChannel:
    """One output stream of a worker; `raw` bytes have no `prefix` of lines, `log` is a file of all bytes."""

    def __init__(
        self, rank: int, screen: Terminal, prefix: bytes = b"", raw: bool = False, log: BinaryIO | None = None
    ) -> None:
        self.closed = threading.Event()
        self.traceback_at: float | None = None
        """Time of the last Python traceback, in seconds since the epoch."""
        self._torch_prefix = f"[rank{rank}]: ".encode()
        self._screen = screen
        self._prefix = prefix
        self._raw = raw
        self._log = log
        self._cutter = LineCutter()
        self._kept: deque[bytes] = deque(maxlen=KEPT_LINES)
        self._progress_at = 0.0

    def feed(self, data: bytes) -> None:
        """Show, log and keep `data`."""
        self._write_log(data)
        if self._raw:
            self._screen.write(data, raw=True)
        self._take(self._cutter.feed(data))

    def close(self) -> None:
        """Show the rest."""
        self._take(self._cutter.close())
        if self._log is not None:
            self._log.close()
        self.closed.set()

    def text(self) -> str:
        """Return the last lines as text."""
        return b"\n".join(self._kept).decode("utf-8", errors="replace")

    def _take(self, lines: list[tuple[bytes, bool]]) -> None:
        shown = b""
        for line, superseded in lines:
            text = line.removeprefix(self._torch_prefix)
            if superseded:
                now = time.monotonic()
                if not text or now - self._progress_at < PROGRESS_S:
                    continue
                self._progress_at = now
            else:
                self._kept.append(text)
                if text.lstrip().startswith(_TRACEBACK):
                    self.traceback_at = time.time()
            shown += (self._prefix + text if self._prefix else line) + b"\n"
        if not self._raw:
            self._screen.write(shown)

    def _write_log(self, data: bytes) -> None:
        if self._log is None:
            return
        try:
            self._log.write(data)
            self._log.flush()
        except OSError as error:
            # A full disk must not end the job or block the worker.
            self._screen.write(f"shardwise run: no longer writing {self._log.name}: {error.strerror}\n".encode())
            self._log = None


class OutputReader:
    """Reads all channels in one thread until their end."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def add(self, descriptor: int, channel: OutputChannel) -> None:
        """Read `descriptor` into `channel` until its end, then close both."""
        os.set_blocking(descriptor, False)
        self._selector.register(descriptor, selectors.EVENT_READ, channel)

    def stop(self) -> None:
        """End the thread, read the rest of every channel, and close it, also if it is held open outside the workers'
        sessions.
        """
        self._ended = True
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            for _ in range(_LAST_CHUNKS):
                if not self._read(key.fd, key.data):
                    break
            self._finish(key.fd, key.data)
        self._selector.close()

    def _run(self) -> None:
        while not self._ended:
            for key, _ in self._selector.select(timeout=0.05):
                if self._read(key.fd, key.data) == b"":
                    self._finish(key.fd, key.data)

    def _read(self, descriptor: int, channel: OutputChannel) -> bytes | None:
        """Read a chunk into a channel, and return it; empty: the end, None: nothing is there."""
        try:
            data = os.read(descriptor, CHUNK)
        except BlockingIOError:
            return None
        except OSError:
            return b""  # a pseudo-terminal reports its end as an I/O error
        if data:
            channel.feed(data)
        return data

    def _finish(self, descriptor: int, channel: OutputChannel) -> None:
        self._selector.unregister(descriptor)
        os.close(descriptor)
        channel.close()


def open_pipe(terminal: int | None) -> tuple[int, int]:
    """Return a descriptor to read from and one for a worker: a pipe, or a pseudo-terminal of the size of `terminal`."""
    if terminal is None:
        return os.pipe()
    import fcntl
    import termios
    import tty

    reader, writer = os.openpty()
    tty.setraw(writer)  # the real terminal converts line ends
    with contextlib.suppress(OSError):
        size = fcntl.ioctl(terminal, termios.TIOCGWINSZ, b"\0" * 8)
        fcntl.ioctl(writer, termios.TIOCSWINSZ, size)
    return reader, writer


def is_raw(tags: Tags, rank: int, terminal: bool) -> bool:
    """Whether a rank's bytes are passed on unchanged: rank 0's on a terminal, unless all are tagged."""
    return rank == 0 and terminal and tags != "always"


def prefix(tags: Tags, rank: int, world_size: int) -> bytes:
    """Return the prefix of a rank's lines.

    >>> prefix("auto", 3, 16)
    b'[rank  3] '
    """
    if tags == "never":
        return b""
    return f"[rank {rank:>{len(str(world_size - 1))}}] ".encode()


def standard_screens() -> tuple[Terminal, Terminal]:
    """Return the launcher's standard output and error."""
    if sys.stdout.isatty() and sys.stderr.isatty():
        cursor = Cursor()
        return Terminal(sys.stdout.buffer, cursor), Terminal(sys.stderr.buffer, cursor)
    return Terminal(sys.stdout.buffer), Terminal(sys.stderr.buffer)


def open_log(directory: Path, rank: int, stream: str) -> BinaryIO:
    """Open a rank's log file to append, because an earlier job's log must be kept."""
    path = directory / f"rank_{rank}.{stream}"
    try:
        return path.open("ab")
    except OSError as error:
        raise LaunchError(f"--log-dir: cannot write {path}: {error.strerror}.") from error
