"""Every test here leaves the process without a drop-in, as it was."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import pytest

from shardwise_deepspeed import attributes, parameters
from shardwise_deepspeed.modules import Finder
from tests.dropin.clients import ranks

__all__ = ["ranks"]


@pytest.fixture
def plain() -> Iterator[None]:
    """Put sys.meta_path, sys.modules and the log level back afterwards."""
    path, level = list(sys.meta_path), logging.getLogger("shardwise").level
    held = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "deepspeed"}
    assert not held and not any(isinstance(finder, Finder) for finder in path)
    yield
    sys.meta_path[:] = path
    logging.getLogger("shardwise").setLevel(level)
    parameters.detach()
    attributes.detach()
    for name in [name for name in sys.modules if name.split(".")[0] == "deepspeed"]:
        del sys.modules[name]


@pytest.fixture
def installed(plain: None) -> None:
    """`import deepspeed` gives shardwise during the test."""
    import shardwise

    shardwise.install_as_deepspeed()
