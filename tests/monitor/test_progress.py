"""How progress is shown: when, what, and what becomes of a bar when something else is printed."""

from __future__ import annotations

import io
import logging
import sys
from typing import Any

import pytest

from shardwise.monitor.pending import Pending
from shardwise.monitor.progress import BAR_S, Memory, Progress, State
from shardwise.utils.logging import logger


class Late(Pending):
    """A loss that arrives when it is told to."""

    there = False

    def arrived(self) -> bool:
        return self.there


def lines(out: io.StringIO) -> list[str]:
    found = out.getvalue().splitlines()
    out.seek(0)
    out.truncate()
    return found


def test_a_line_at_once_then_after_each_interval_and_at_the_end() -> None:
    out = io.StringIO()
    progress = Progress("lines", 40, 10.0, out)
    shown = []
    for step in range(1, 41):
        if progress.due(step, float(step)):
            progress.show(State(step, float(step), 8 * step, 4000 * step, Pending([("loss", 1.5, step)])))
            shown.append(step)
    assert shown == [1, 11, 21, 31, 40]
    found = lines(out)
    assert found[0] == "step 1/40 | loss 1.5"
    assert found[1] == "step 11/40 | loss 1.5 | 1 s/step | 4,000 tokens/s | 29 s left"
    assert found[-1].startswith("step 40/40") and "left" not in found[-1]
    assert not progress.due(41, 1000.0)


def test_a_loss_on_a_device_is_not_waited_for() -> None:
    out = io.StringIO()
    progress = Progress("lines", None, 10.0, out)
    late = Late([("loss", 2.5, 1)])
    assert progress.due(1, 1.0)
    progress.show(State(1, 1.0, 8, loss=late, memory=[Memory("device", 3 << 30, 4 << 30)]))
    assert not progress.due(2, 2.0) and not lines(out)
    late.there = True
    assert not progress.due(3, 3.0)
    assert lines(out) == ["step 1 | loss 2.5 | device 3.00 GiB of 4.00 GiB"]
    progress.show(State(12, 12.0, 96, loss=Late([("loss", 2.0, 12)])))
    progress.close()
    progress.close()
    assert lines(out) == ["step 12 | loss 2 | 1 s/step | 8 samples/s"]


def test_nobody_reads_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    progress = Progress("lines", None, 10.0, out)
    out.close()
    progress.show(State(1, 1.0))
    progress.close()


def test_what_is_printed_goes_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal: lines of the script and of the log stay whole, each behind an erased bar."""
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    handler: Any = next(one for one in logger.handlers if type(one) is logging.StreamHandler)
    before = handler.setStream(terminal)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        patch.setattr(sys, "stdout", terminal)
        progress = Progress("bar", 4, 10.0)
        for step in range(1, 5):
            progress.show(State(step, step * BAR_S, 8 * step, loss=Pending([("loss", 1.0, step)])))
            print(f"line {step}")
            logger.warning("warning %d", step)
        assert handler.stream is terminal
        progress.close()
        print("the end")
    handler.setStream(before or sys.stderr)
    shown = [line.rpartition("\x1b[2K")[2].strip() for line in terminal.getvalue().splitlines()]
    plain = [line.partition("[WARNING] ")[2] or line for line in shown if line and "━" not in line]
    said = [line for line in plain if line.startswith(("line", "warning", "the end"))]
    assert said == [*(f"{what} {step}" for step in range(1, 5) for what in ("line", "warning")), "the end"]
    assert "step 4/4" in terminal.getvalue() and "loss 1" in terminal.getvalue()
    assert "\x1b[?25l" not in terminal.getvalue()  # the cursor is not hidden
