"""Recovery time after a restart, reported to the log and the launcher."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass
from typing import Literal

from shardwise.comm.environment import RECOVERY_FILE
from shardwise.utils.logging import logger

_ready: float | None = None


def note_ready() -> None:
    """Record the time at which the process was ready for `initialize`; only the first call counts."""
    global _ready
    if _ready is None:
        _ready = time.time()


@dataclass(frozen=True)
class Resumed:
    """Result of `engine.resume()`; `path`: directory of the in-memory copies or of the checkpoint."""

    source: Literal["memory", "disk"]
    path: str
    steps: int
    seconds: float


class FirstStep:
    """Reports the first step after a restart or `engine.resume()`; `rank` is the global rank, and rank 0 reports."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._file = os.environ.get(RECOVERY_FILE) or None
        self._resumed: Resumed | None = None
        self._restored: float | None = None
        self._asked = False

    @property
    def awaited(self) -> bool:
        """Whether a first step is still to be reported."""
        return self._file is not None or self._restored is not None

    def restored(self, resumed: Resumed) -> None:
        """Record that the state has been restored."""
        self._resumed = resumed
        self._restored = time.time()

    def found_nothing(self) -> None:
        """Record that no saved state was found."""
        self._asked = True

    def taken(self, steps: int) -> None:
        """Report the first step; `steps` is `global_steps` after it."""
        now = time.time()
        if self._rank == 0 and self._restored is not None:
            logger.info("the first step after resuming ended %.2f s after the state was back", now - self._restored)
        if self._rank == 0 and self._file is not None:
            told = {
                "ready": _ready,
                "restored": self._restored,
                "asked": self._asked,
                "source": None if self._resumed is None else self._resumed.source,
                "steps": steps - 1,
                "stepped": now,
            }
            # Another engine of this process may have reported already, or the launcher may have exited.
            temporary = f"{self._file}.{os.getpid()}"
            with contextlib.suppress(OSError):
                if not os.path.exists(self._file):
                    with open(temporary, "w", encoding="utf-8") as stream:
                        json.dump(told, stream)
                    os.replace(temporary, self._file)
        self._file = self._restored = None
