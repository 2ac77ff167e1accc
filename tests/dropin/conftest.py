"""Every test here leaves the process without a drop-in, as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import shardwise
from tests.dropin.clients import plainly, ranks

__all__ = ["ranks"]


@pytest.fixture
def plain() -> Iterator[None]:
    """Put sys.meta_path, sys.modules and the log level back afterwards."""
    with plainly():
        yield


@pytest.fixture
def installed(plain: None) -> None:
    """`import deepspeed` gives shardwise during the test."""
    shardwise.install_as_deepspeed()
