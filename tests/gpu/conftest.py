"""These tests need a CUDA device, or `--rehearse`: a stand-in on the CPU (`tests/gpu/standin.py`)."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import standin

LIMIT_S, REHEARSED_LIMIT_S = 90, 270


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rehearse", action="store_true", help="try tests of CUDA devices on the CPU")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--rehearse", False):
        standin.install()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu" in item.path.as_posix() and not item.get_closest_marker("limit"):
            # One that hangs must not take the time of the others.
            item.add_marker(pytest.mark.limit(REHEARSED_LIMIT_S if standin.rehearsing() else LIMIT_S))
        if "tests/gpu" not in item.path.as_posix():
            continue
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        elif standin.rehearsing() and item.get_closest_marker("needs_device"):
            item.add_marker(pytest.mark.skip(reason="cannot be tried without a device"))
