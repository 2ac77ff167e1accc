"""Which rank failed first, and what to tell about it.

When one rank of a job fails, the others fail too: their collectives lose a peer, or the launcher stops them.
The rank to name is the one whose own trouble began first. Its beginning is the earliest of: the error file
that torch's `@record` writes, the last traceback on its standard error, its end. Ranks that only report a
lost peer come after all others, because a dying process closes its connections some time before the system
reports its end.
"""

from __future__ import annotations

import json
import re
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.launch.output import Channel
from shardwise.launch.processes import Exit

LAST_LINES = 20

_HEADER = re.compile(r"^\s*(\+ Exception Group )?Traceback \(most recent call last\)")
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_FATAL = re.compile(r"^(Fatal Python error|terminate called|\*\*\* )")
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)|closed by peer|broken pipe|socket closed|remote process exited"
    r"|failed to recv|recvValue failed",
    re.IGNORECASE,
)
_HINTS: dict[int, str] = {
    signal.SIGKILL: (
        "Something outside the job killed it; most often the kernel, because memory ran out. See `dmesg` "
        "or the memory limit of the container; use fewer processes, a smaller micro-batch, or offload to "
        "disk."
    ),
    signal.SIGBUS: (
        "Often /dev/shm is full: use fewer data-loader workers, or give more shared memory (docker --shm-size)."
    ),
    signal.SIGSEGV: "Native code crashed. Run again with PYTHONFAULTHANDLER=1 to see the line of Python.",
}
_TERMINATE = "terminate called without an active exception"
_NOT_DESTROYED = (
    "torch aborts like this when a process ends without having ended its Gloo process group. Start the "
    "group with shardwise.init_distributed(), or call torch.distributed.destroy_process_group() at the "
    "script's end."
)


@dataclass(frozen=True)
class Failure:
    """The rank that failed first.

    Attributes:
        exit: how it ended.
        elapsed: seconds from the start of the job's attempt to the beginning of its trouble.
        report: its traceback, or the last lines of its standard error; may be empty.
        has_traceback: whether `report` is a traceback.
        failed: number of ranks that failed by themselves.
        world_size: number of ranks.
    """

    exit: Exit
    elapsed: float
    report: str
    has_traceback: bool
    failed: int
    world_size: int

    @property
    def exit_code(self) -> int:
        """The job's exit code: the rank's own, or 128 + signal as a shell has it."""
        return self.exit.code if self.exit.code >= 0 else 128 - self.exit.code

    def cause(self) -> str:
        """How the rank ended, in a few words."""
        if self.exit.code >= 0:
            return f"exit code {self.exit.code}"
        number = -self.exit.code
        known = {int(sig): sig.name for sig in signal.Signals}
        return f"killed by {known.get(number, 'signal')} (signal {number})"

    def message(self) -> str:
        """What is printed at the end of the job: who, how, where, the hint, and last the traceback."""
        others = f" ({self.failed} of {self.world_size} ranks failed)" if self.failed > 1 else ""
        lines = [
            f"shardwise run: rank {self.exit.rank} failed first{others}: {self.cause()}, pid "
            f"{self.exit.pid} on {socket.gethostname()}, {self.elapsed:.1f} s after the start."
        ]
        hint = _NOT_DESTROYED if _TERMINATE in self.report else _HINTS.get(-self.exit.code)
        if hint:
            lines.append(hint)
        if self.report and not self.has_traceback:
            lines.append(f"It printed no traceback; the last lines of its standard error:\n{self.report}")
        elif self.report:
            lines.append(self.report)
        else:
            lines.append("It printed nothing on its standard error.")
        return "\n".join(lines)


def first_failure(
    exits: Mapping[int, Exit],
    errors: Mapping[int, Channel],
    error_files: Mapping[int, Path],
    started: float,
    stop_began: float,
) -> Failure:
    """Find the rank that failed first in an attempt of which at least one rank has failed.

    Args:
        exits: how every rank ended.
        errors: the standard error of every rank.
        error_files: where torch's `@record` would have written each rank's exception.
        started: when the attempt began, in seconds since the epoch.
        stop_began: when the launcher began to stop the others.
    """
    candidates = []
    for rank, end in exits.items():
        if end.code == 0:
            continue
        recorded = _recorded(error_files[rank])
        began = min(
            end.at,
            recorded[0] if recorded else end.at,
            (errors[rank].traceback_at or end.at) if end.code > 0 else end.at,
        )
        if end.stopped:
            if began >= stop_began:
                continue
            # It raised, and had not ended yet when it was stopped: its code would have been that of an
            # exception.
            end = replace(end, code=1)
        report, has_traceback = (recorded[1], True) if recorded else last_traceback(errors[rank].text())
        lost_peer = end.code > 0 and bool(_LOST_PEER.search(_last_exception(report)))
        candidates.append((lost_peer, began, rank, end, report, has_traceback))
    _, began, _, end, report, has_traceback = min(candidates, key=lambda c: c[:3])
    return Failure(end, max(0.0, began - started), report, has_traceback, len(candidates), len(exits))


def last_traceback(text: str) -> tuple[str, bool]:
    """The last traceback in a rank's standard error with all that it is chained to, and True.

    If there is none, the last lines and False.
    """
    lines = text.rstrip().splitlines()
    headers = [number for number, line in enumerate(lines) if _HEADER.match(line)]
    if headers:
        begin = headers.pop()
        while headers and any(line.strip().startswith(_CHAINED) for line in lines[max(0, begin - 3) : begin]):
            begin = headers.pop()
        return "\n".join(lines[begin:]), True
    fatal = next((number for number, line in enumerate(lines) if _FATAL.match(line)), None)
    return "\n".join(lines[fatal:] if fatal is not None else lines[-LAST_LINES:]), False


def _last_exception(report: str) -> str:
    """The part of a traceback that names the exception: what follows the last indented line of code."""
    lines = report.splitlines()
    headers = [number for number, line in enumerate(lines) if _HEADER.match(line)]
    after = lines[headers[-1] + 1 :] if headers else lines
    for number, line in enumerate(after):
        if line and not line[0].isspace():
            return "\n".join(after[number:])
    return ""


def _recorded(path: Path) -> tuple[float, str] | None:
    """When and what torch's `@record` has written, if it has."""
    try:
        at = path.stat().st_mtime
        message = json.loads(path.read_text(encoding="utf-8"))["message"]
        stack = message["extraInfo"]["py_callstack"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (at, stack.rstrip()) if isinstance(stack, str) else None
