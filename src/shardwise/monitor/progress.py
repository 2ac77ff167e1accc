"""Training progress on standard error: a bar on a terminal, or a periodic line.

The trainer passes a state a few times a second at most, without waiting: the loss appears after its copy from the
device, and a thread draws the bar.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import sys
from collections import deque
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Literal

from shardwise.units import format_count, format_duration, format_size
from shardwise.utils.logging import logger

from .pending import Pending

if TYPE_CHECKING:
    from rich.text import Text

Mode = Literal["bar", "lines", "off"]

BAR_S = 0.25  # minimum seconds between two updates of a bar
_MARKS = 16  # number of states over which speed is averaged
_WIDTH = 16  # cells of the bar


@dataclass(frozen=True)
class Memory:
    """Peak memory of one tier, "device" or "host", in bytes; `limit` is the total, None if unknown."""

    where: str
    size: int
    limit: int | None = None


@dataclass(frozen=True)
class State:
    """Progress of training; numbers so far, of all ranks. None: unknown."""

    step: int
    clock: float  # `time.perf_counter()` at the end of the last step
    samples: int = 0
    tokens: int | None = None  # None or 0: unknown
    loss: Pending | None = None  # of the last step
    memory: list[Memory] | tuple[Memory, ...] = ()  # peak memory of each tier


def mode_of(mode: str | None, launcher: str, *, own_output: bool, terminal: bool) -> Mode:
    """Return the display mode of progress; without a configured mode the launcher's choice: "auto", "off", or "".

    The launcher's "off" overrules the configuration. `own_output`: the script is known to print its progress.

    >>> mode_of(None, "", own_output=False, terminal=True), mode_of(None, "auto", own_output=False, terminal=True)
    ('off', 'bar')
    >>> mode_of("auto", "", own_output=True, terminal=False), mode_of("bar", "off", own_output=False, terminal=True)
    ('lines', 'off')
    """
    if launcher == "off":
        return "off"
    if mode is None:
        mode = "auto" if launcher == "auto" and not own_output else "off"
    if mode == "auto":
        return "bar" if terminal else "lines"
    return mode  # type: ignore[return-value]  # the schema has no others


class Progress:
    """Progress display, up to `total` steps (None: unknown), with `interval` seconds between two lines."""

    def __init__(
        self, mode: Literal["bar", "lines"], total: int | None, interval: float, out: IO[str] | None = None
    ) -> None:
        self._total = total
        self._every = BAR_S if mode == "bar" else interval
        self._view: _Bar | _Lines = _Bar(total, out) if mode == "bar" else _Lines(out)
        self._marks: deque[State] = deque(maxlen=_MARKS)
        self._next = 0.0
        self._closed = False
        self._loss: float | None = None
        self._waiting: State | None = None
        atexit.register(self.close)

    def due(self, step: int, clock: float) -> bool:
        """Draw a state if its loss has arrived; return True if a new state is due."""
        if self._closed:
            return False
        if self._waiting is not None and _arrived(self._waiting):
            self._draw(self._waiting)
        return clock >= self._next or step == self._total

    def show(self, state: State) -> None:
        """Draw a state once its loss has arrived."""
        self._next = state.clock + self._every
        if _arrived(state) or state.step == self._total:
            self._draw(state)
        else:
            self._waiting = state
        if state.step == self._total:
            self.close()

    def _draw(self, state: State) -> None:
        self._waiting = None
        if state.loss is not None:
            self._loss = state.loss.read()[0].value
        self._marks.append(state)
        self._view.show(state.step, self.words(state))

    def words(self, state: State) -> list[str]:
        """Return the texts of a state: progress first, the others in order of importance."""
        first, steps = self._marks[0], state.step - self._marks[0].step
        words = [f"step {state.step}" if self._total is None else f"step {state.step}/{self._total}"]
        if self._loss is not None:
            words.append(f"loss {self._loss:.4g}")
        if steps > 0:
            seconds = (state.clock - first.clock) / steps
            words.append(f"{format_duration(seconds)}/step")
            rate = 1.0 / max(state.clock - first.clock, 1e-9)
            if state.tokens and first.tokens is not None:
                words.append(f"{format_count((state.tokens - first.tokens) * rate)} tokens/s")
            else:
                words.append(f"{format_count((state.samples - first.samples) * rate)} samples/s")
            if self._total is not None and state.step < self._total:
                words.append(f"{format_duration((self._total - state.step) * seconds)} left")
        words += [_memory(each) for each in state.memory]
        return words

    def close(self) -> None:
        """Draw the last state and end the display. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        with contextlib.suppress(Exception):  # a failed device, or a closed stream at process exit
            if self._waiting is not None:
                self._draw(self._waiting)
        self._view.close()


def _arrived(state: State) -> bool:
    return state.loss is None or state.loss.arrived()


class _Lines:
    def __init__(self, out: IO[str] | None) -> None:
        self._out = out

    def show(self, step: int, words: list[str]) -> None:
        with contextlib.suppress(OSError, ValueError):  # the reader has closed the stream
            print(" | ".join(words), file=self._out or sys.stderr, flush=True)

    def close(self) -> None:
        pass


class _Bar:
    """A bar drawn by a thread, with the script's output above it."""

    def __init__(self, total: int | None, out: IO[str] | None) -> None:
        self._total = total
        self._out = out
        self._words: tuple[int, list[str]] = (0, [])
        self._live: Any = None
        self._handlers: list[tuple[logging.StreamHandler[Any], Any]] = []

    def show(self, step: int, words: list[str]) -> None:
        self._words = step, words
        if self._live is None:
            self._begin()

    def _begin(self) -> None:
        from rich.console import Console
        from rich.live import Live

        class Unhidden(Console):
            """A console with a visible cursor, because a killed process could not restore it."""

            def show_cursor(self, show: bool = True) -> bool:
                return False

        error = sys.stderr
        self._live = Live(
            get_renderable=self._picture,
            console=Unhidden(file=self._out, stderr=self._out is None, soft_wrap=False),
            refresh_per_second=4,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=self._out is None,
            vertical_overflow="crop",
        )
        self._live.start()
        # The log's handlers still refer to the original stream.
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is error:
                self._handlers.append((handler, handler.setStream(sys.stderr)))

    def _picture(self) -> Text:
        from rich.text import Text

        step, words = self._words
        text = Text(no_wrap=True, overflow="ellipsis")
        if self._total is not None:
            done = min(_WIDTH, round(_WIDTH * step / self._total))
            text.append("━" * done, "green").append("━" * (_WIDTH - done), "bright_black").append(" ")
        return text.append("  ".join(words))

    def close(self) -> None:
        for handler, stream in self._handlers:
            handler.setStream(stream)
        self._handlers = []
        if self._live is not None:
            with contextlib.suppress(OSError, ValueError):
                self._live.stop()
            self._live = None


def _memory(held: Memory) -> str:
    """Return peak and total memory of a tier.

    >>> _memory(Memory("device", 3 << 30, 8 << 30))
    'device 3.00 GiB of 8.00 GiB'
    """
    return f"{held.where} {format_size(held.size)}" + ("" if held.limit is None else f" of {format_size(held.limit)}")
