"""Measured times of a pipeline's actions, and the idle time of each rank."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import override

from shardwise.comm.clocks import measure
from shardwise.comm.communicator import Communicator
from shardwise.device.clock import Instant, now, seconds_between
from shardwise.device.ranges import Listener, listening, named, watched
from shardwise.pipeline import picture
from shardwise.pipeline.actions import COMPUTATIONS, Action, Op
from shardwise.pipeline.simulator import Span

_NOTHING = nullcontext()

RANGE, MESSAGE = "action", "message"
"""Names of the ranges around each computation and each message of a pipeline rank (`shardwise.device.ranges`)."""

_LETTERS = {Op.FORWARD: "F", Op.BACKWARD: "B", Op.BACKWARD_INPUT: "I", Op.BACKWARD_WEIGHT: "W"}
_OPS = {letter: op for op, letter in _LETTERS.items()}


def range_of(action: Action) -> AbstractContextManager[Any]:
    """Return the range of a computation or message; a null context for other actions."""
    if action.micro_batch < 0 or not watched():
        return _NOTHING
    return named(RANGE if action.op in COMPUTATIONS else MESSAGE, text_of(action))


def text_of(action: Action) -> str:
    """Return an action as the unit of its range: letter or words, micro-batch and stage.

    >>> text_of(Action(Op.BACKWARD_INPUT, 2, 5)), text_of(Action(Op.RECV_BACKWARD, 2, 5))
    ('I5 stage 2', 'recv backward 5 stage 2')
    """
    name = _LETTERS.get(action.op) or f"{action.op.value.replace('_', ' ')} "
    return f"{name}{action.micro_batch} stage {action.stage}"


class _Recorder(Listener):
    ranges = frozenset({RANGE})

    def __init__(self, *, cuda: bool) -> None:
        self._cuda = cuda
        self.found: list[tuple[str, Instant, Instant]] = []

    @override
    @contextmanager
    def around(self, what: str, unit: str, size: int) -> Iterator[None]:
        begun = now(self._cuda)
        try:
            yield
        finally:
            self.found.append((unit, begun, now(self._cuda)))

    @override
    def flight(self, what: str, unit: str, size: int) -> Callable[[], None]:
        return lambda: None


@dataclass
class IdleTimes:
    """Times of all computations of a pipeline in some batches, in seconds of rank 0's clock.

    Attributes:
        spans: of each computation; `rank` is the position in the pipeline.
        uncertainty: largest error of a time, from the comparison of the ranks' clocks.

    `print(idle)` shows the table.
    """

    spans: list[Span] = field(default_factory=list)
    uncertainty: float = 0.0

    @property
    def duration(self) -> float:
        """Time from the first start of any rank to the last end."""
        return max(span.end for span in self.spans) - min(span.start for span in self.spans) if self.spans else 0.0

    def busy(self) -> dict[int, dict[Op, float]]:
        """Return the time in computations, by position and kind."""
        found: dict[int, dict[Op, float]] = defaultdict(lambda: defaultdict(float))
        for span in self.spans:
            found[span.rank][span.action.op] += span.end - span.start
        return {rank: dict(found[rank]) for rank in sorted(found)}

    def idle(self) -> dict[int, float]:
        """Return the share of the duration without a computation, by position."""
        return {rank: 1 - sum(times.values()) / self.duration for rank, times in self.busy().items()}

    @property
    def idle_share(self) -> float:
        """Mean of `idle` over all positions."""
        shares = self.idle().values()
        return sum(shares) / len(shares) if shares else 0.0

    def by_stage(self) -> dict[int, dict[Op, tuple[float, int]]]:
        """Return mean seconds and number of computations, by stage and kind."""
        found: dict[int, dict[Op, list[float]]] = defaultdict(lambda: defaultdict(list))
        for span in self.spans:
            found[span.action.stage][span.action.op].append(span.end - span.start)
        return {
            stage: {op: (sum(times) / len(times), len(times)) for op, times in found[stage].items()}
            for stage in sorted(found)
        }

    def __str__(self) -> str:
        kinds = [op for op in Op if op in COMPUTATIONS and any(span.action.op is op for span in self.spans)]
        head = ["rank", *(op.value.replace("_", " ") for op in kinds), "idle", "share"]
        rows = []
        for rank, times in self.busy().items():
            idle = self.duration - sum(times.values())
            rows.append([str(rank), *(_ms(times.get(op, 0.0)) for op in kinds), _ms(idle), f"{self.idle()[rank]:.1%}"])
        widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]]
        return "\n".join([*lines, f"batch: {_ms(self.duration)}, idle share of all ranks: {self.idle_share:.1%}"])

    def svg(self, path: str | Path | None = None, title: str = "") -> str:
        """Return a picture, and write it to a file."""
        text = picture.svg(self.spans, title, "s")
        if path is not None:
            Path(path).write_text(text)
        return text

    def chart(self, width: int = 120) -> str:
        """Return a picture for a terminal."""
        return picture.text_chart(self.spans, width)

    def trace_events(self) -> list[dict[str, Any]]:
        """Return events of the Trace Event Format, with a track for each rank (ui.perfetto.dev)."""
        return picture.trace_events(self.spans)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


@contextmanager
def recording(comm: Communicator) -> Iterator[IdleTimes]:
    """Record the computations of all ranks of a pipeline inside the block (all of its ranks call)."""
    cuda = comm.device.type == "cuda"
    recorder, times = _Recorder(cuda=cuda), IdleTimes()
    clock = measure(comm)
    anchor, at = now(cuda), time.perf_counter()
    if cuda:
        anchor.synchronize()
        at = time.perf_counter()
    with listening(recorder):
        yield times
    own = []
    for unit, begun, ended in recorder.found:
        first, last = (at + seconds_between(anchor, one) + clock.offset for one in (begun, ended))
        own.append([unit, first, last])
    gathered = comm.exchange([own, clock.uncertainty], "idle_times")
    times.uncertainty = max(uncertainty for _, uncertainty in gathered)
    for rank, (spans, _) in enumerate(gathered):
        for unit, first, last in spans:
            name, _, stage = unit.split()
            times.spans.append(Span(rank, Action(_OPS[name[0]], int(stage), int(name[1:])), first, last))
