"""Settings of the whole test run: one thread a process, fixed hypothesis seeds, one pool of ranks."""

from __future__ import annotations

import os
import signal

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
os.environ["GLOO_SOCKET_IFNAME"] = "lo"

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.harness import close_pool, run_ranks
from tests.sampling import is_sampled

torch.set_num_threads(1)

# A shell without job control starts background jobs with SIGINT ignored, and all their children inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "default", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], max_examples=25
)
settings.register_profile("search", settings.get_profile("default"), derandomize=False, max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="run every case of the files in tests/sampling.py")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out cases of large products; see `tests.sampling`."""
    if config.getoption("--exhaustive") or any("::" in argument for argument in config.args):
        return
    kept, seen, left_out = [], set(), []
    for item in items:
        file, _, case = item.nodeid.removeprefix("tests/").partition("::")
        function = (file, case.partition("[")[0])
        (kept if function not in seen or is_sampled(file, case) else left_out).append(item)
        seen.add(function)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


@pytest.fixture(scope="session", autouse=True)
def _rank_pool() -> Iterator[None]:
    """End the worker processes with the session."""
    yield
    close_pool()


@pytest.fixture(scope="module", autouse=True)
def _no_group_left() -> Iterator[None]:
    """Let no file of tests that makes an engine in this process decide what the next one finds."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def ranks():  # type: ignore[no-untyped-def]
    """`run_ranks`, for tests that prefer a fixture to an import."""
    return run_ranks
