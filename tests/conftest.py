"""Settings of the whole test run: one thread a process, fixed hypothesis seeds, one pool of ranks."""

from __future__ import annotations

import os
import signal

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
os.environ["GLOO_SOCKET_IFNAME"] = "lo"

import faulthandler
import gc
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.harness import close_pool, run_ranks
from tests.progress import Progress

torch.set_num_threads(1)

# For the processes that tests start. This one may have begun with it as well (pytest-xdist starts processes): here, and
# in the pool, Python's own setting holds.
STARTUP = str(Path(__file__).parent / "startup")
DROP_IN = str(Path(__file__).parents[1] / "dropin" / "src")
for path in (DROP_IN, STARTUP):
    if path not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH")]))
sys.path[:] = [path for path in sys.path if path != STARTUP]  # some tests make a PYTHONPATH of it
gc.disable()  # until all tests are imported

# A shell without job control starts background jobs with SIGINT ignored, and all their children inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "default", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], max_examples=10
)
settings.register_profile("thorough", settings.get_profile("default"), max_examples=40)
settings.register_profile("search", settings.get_profile("default"), derandomize=False, max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


LIMIT_S = 300
"""Seconds until a test is ended; `@pytest.mark.limit(seconds)` sets another limit. Calls of ranks have their own."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Tests of machines need root and change the network: they run where they are named (`make test-machines`)."""
    unnamed = collection_path.name == "machines" and not any("machines" in argument for argument in config.args)
    return True if unnamed else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="run thorough cases as well")
    parser.addoption("--progress", action="store_true", help="say now and then how far the run is (tests/progress.py)")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--exhaustive") and "HYPOTHESIS_PROFILE" not in os.environ:
        settings.load_profile("thorough")
    if config.getoption("--progress") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out thorough cases, unless the command line names a case or asks for all."""
    if config.getoption("--exhaustive") or any("::" in argument for argument in config.args):
        return
    left_out = [item for item in items if item.get_closest_marker("thorough")]
    config.hook.pytest_deselected(items=left_out)
    config.stash[LEFT_OUT] = len(left_out), len({item.nodeid.partition("[")[0] for item in left_out})
    items[:] = [item for item in items if not item.get_closest_marker("thorough")]


def pytest_collection_finish() -> None:
    """Collect garbage as Python does from now on, but look at nothing that imports have left."""
    gc.freeze()
    gc.set_threshold(700, 10, 10)
    gc.enable()


LEFT_OUT = pytest.StashKey[tuple[int, int]]()
"""How many thorough cases are left out, and of how many tests."""


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say how many cases were left out."""
    cases, tests = config.stash.get(LEFT_OUT, (0, 0))
    if cases:
        terminalreporter.write_line(
            f"{cases} thorough cases of {tests} tests were left out; `make exhaustive` runs them"
        )


class TestTooLongError(BaseException):
    """A test has not ended within its limit. No `except Exception` of the code under test takes it for its own."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """End a test that hangs in Python code; one that hangs outside of it takes its process with it."""
    mark = item.get_closest_marker("limit")
    limit = mark.args[0] if mark else LIMIT_S

    def end(number: int, frame: FrameType | None) -> None:
        raise TestTooLongError(
            f"not over after {limit} s; the process was here:\n{''.join(traceback.format_stack(frame))}"
        )

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, limit)
    faulthandler.dump_traceback_later(limit + 60, exit=True, file=sys.__stderr__)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


MISSING_PACKAGE = re.compile(r"could not import '(?!triton)|not installed: |No module named '(?!triton)")
"""Reasons of skips that `SHARDWISE_TESTS_NEED_EXTRAS` makes failures. Builds of torch for CPUs come without Triton."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """Make a skip because of a missing package a failure where all extras have to be installed."""
    report = yield
    return _needs_extras(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Iterator[None]:
    """Do the same for files that are skipped as a whole."""
    report = yield
    return _needs_extras(report)


def _needs_extras(report: Any) -> Any:
    needed = os.environ.get("SHARDWISE_TESTS_NEED_EXTRAS") == "1"
    if needed and report.outcome == "skipped" and MISSING_PACKAGE.search(str(report.longrepr)):
        report.outcome = "failed"
        report.longrepr = f"A package of an extra is missing, and all have to be installed here. {report.longrepr}"
    return report


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
