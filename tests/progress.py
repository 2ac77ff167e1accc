"""How far a run of the tests is: a line now and then, and a line for each test that fails, when it does.

Used with `--progress`, which the Makefile gives. With pytest-xdist the reports of all processes arrive in one.
"""

from __future__ import annotations

import sys
import time

import pytest

SECONDS = 15.0
"""From one line to the next."""


class Progress:
    """A plugin of the process that collects the reports."""

    def __init__(self) -> None:
        self.began = self.told = time.monotonic()
        self.total = self.done = self.failed = 0
        self.seen: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._of(len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._of(len(ids))

    def _of(self, count: int) -> None:
        if count > self.total:
            self.total, self.began = count, time.monotonic()
            self._say(f"{count} tests")

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """No letter for each test."""
        if report.passed and report.when == "call":
            return "passed", "", ""
        return None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed += report.nodeid not in self.seen
            self.seen.add(report.nodeid)
            self._say(f"FAILED {report.nodeid}")
        if report.when != "teardown":
            return
        self.done += 1
        now = time.monotonic()
        if now - self.told < SECONDS and self.done < self.total:
            return
        self.told = now
        minutes = (now - self.began) / 60
        failed = f", {self.failed} failed" if self.failed else ""
        self._say(
            f"{self.done} of {self.total} tests ({100 * self.done // max(self.total, 1)} %), {minutes:.1f} min{failed}"
        )

    @staticmethod
    def _say(line: str) -> None:
        print(f"tests: {line}", file=sys.__stdout__, flush=True)
