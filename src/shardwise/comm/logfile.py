"""The communication log as a file of JSON lines (`comms_logger.path`): one object for each collective, on each rank.

The thread that trains only puts something into a queue; a thread of the file makes lines of them, once a second,
and gives whole lines to the system at once. So the file outlives the process, but for what is younger than that. The
queue has a limit: what does not fit is dropped, and counted in the log.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import threading
from collections import deque
from pathlib import Path
from typing import NamedTuple, Protocol

from shardwise.errors import ConfigError
from shardwise.utils.logging import logger, warn_once

_MOST = 1 << 16
"""Collectives that wait to be written."""
_EVERY_S = 1.0


class Line(NamedTuple):
    """What is written of one collective.

    Attributes:
        time: seconds since 1970, at the end of waiting for it.
        step: optimizer steps that had been taken when it was launched; None: not of an engine.
        rank: of this process.
        op, group: operation, and name of the group of ranks.
        unit: whose parameters or gradients they are, or a purpose.
        bytes: of the whole message.
        sent: bytes that this rank has sent; None: not known.
        waited_ms: how long the host was blocked; None: not known.
        ms: from launch to the end of waiting, on a device by its events; None: not known.
        busbw_gbps: see `shardwise.comm.logger`.
        line: of the script.
    """

    time: float
    step: int | None
    rank: int
    op: str
    group: str
    unit: str
    bytes: int
    sent: int | None
    waited_ms: float | None
    ms: float | None
    busbw_gbps: float | None
    line: str


class Late(Protocol):
    """What makes a line by itself, when it is written."""

    def known(self) -> bool:
        """Whether nobody would have to wait for it."""

    def line(self, rank: int) -> Line:
        """Return the line of a rank, waiting for what is not known yet."""


_quoted = functools.lru_cache(maxsize=4096)(json.dumps)


def as_json(line: Line) -> str:
    """Return a line of the file; a third of the time that the json module takes for it.

    >>> given = Line(1.5, 3, 0, "all_gather", "data", "layers.0", 8, None, None, 0.25, 1.0, "train.py:3")
    >>> print(as_json(given), end="")
    {"time": 1.500000, "step": 3, "rank": 0, "op": "all_gather", "group": "data", "unit": "layers.0", "bytes": 8, \
"sent": null, "waited_ms": null, "ms": 0.2500, "busbw_gbps": 1.0000, "line": "train.py:3"}
    """
    step = "null" if line.step is None else line.step
    sent = "null" if line.sent is None else line.sent
    waited = "null" if line.waited_ms is None else f"{line.waited_ms:.4f}"
    ms = "null" if line.ms is None else f"{line.ms:.4f}"
    speed = "null" if line.busbw_gbps is None else f"{line.busbw_gbps:.4f}"
    return (
        f'{{"time": {line.time:.6f}, "step": {step}, "rank": {line.rank}, "op": {_quoted(line.op)}, '
        f'"group": {_quoted(line.group)}, "unit": {_quoted(line.unit)}, "bytes": {line.bytes}, "sent": {sent}, '
        f'"waited_ms": {waited}, "ms": {ms}, "busbw_gbps": {speed}, "line": {_quoted(line.line)}}}\n'
    )


class LogFile:
    """Appends lines to `rank_N.jsonl` in a directory.

    Args:
        directory: is made if it is not there.
        rank: of this process.

    Attributes:
        path: of the file.
        dropped: lines that came faster than they could be written.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, directory: str, rank: int) -> None:
        self.path = Path(directory) / f"rank_{rank}.jsonl"
        self.rank = rank
        self.dropped = 0
        self._failed = False
        self._queue: deque[Line | Late] = deque()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"comms_logger.path: {self.path} cannot be written: {error.strerror}") from error
        self._writing = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardwise-comms-log", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def put(self, line: Line | Late) -> None:
        """Have a line written."""
        if len(self._queue) >= _MOST:
            self.dropped += 1
            return
        self._queue.append(line)

    def flush(self, *, wait: bool = True) -> None:
        """Give to the system what waits; a disk that fails is told of once, and written to no more.

        Args:
            wait: for lines that are not known yet; otherwise they, and what comes behind them, are left.
        """
        with self._writing:
            lines = []
            for _ in range(len(self._queue)):
                first = self._queue[0]
                if not (wait or isinstance(first, Line) or first.known()):
                    break
                self._queue.popleft()
                lines.append(first if isinstance(first, Line) else first.line(self.rank))
            if not lines or self._failed:
                return
            rest = memoryview("".join(map(as_json, lines)).encode())
            try:
                while rest:
                    rest = rest[os.write(self._file, rest) :]
            except OSError as error:
                self._failed = True
                logger.warning("comms_logger.path: %s: %s; it is written no further", self.path, error.strerror)
        if self.dropped:
            warn_once(f"comms_logger.path: {self.path}: collectives come faster than lines; some are missing")

    def close(self) -> None:
        """Write what waits, and end. Closing twice does nothing."""
        self._end.set()
        self._thread.join()
        self.flush()
        with self._writing:
            if self._file >= 0:
                os.close(self._file)
            self._file, self._failed = -1, True
        atexit.unregister(self.close)

    def _run(self) -> None:
        while not self._end.wait(_EVERY_S):
            self.flush(wait=False)
