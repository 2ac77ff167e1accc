"""Steps whose numbers are read later, as on a device that the host does not wait for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from shardwise.engine.step import TrainStep


@contextlib.contextmanager
def late_reads(late: bool = True) -> Iterator[None]:
    """Have engines read the numbers of a step in the next one; `late`: False changes nothing."""
    read = TrainStep._read
    changed = mock.patch.object(TrainStep, "_read", lambda self, *values, now: read(self, *values, now=False))
    with changed if late else contextlib.nullcontext():
        yield
