"""Engines whose state is divided over one rank, too."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from shardwise.zero.units.plan import Plan


@contextmanager
def forced() -> Iterator[None]:
    """Have engines divide state over one rank, too."""
    with mock.patch.object(Plan, "of", functools.partial(Plan.of, forced=True)):
        yield
