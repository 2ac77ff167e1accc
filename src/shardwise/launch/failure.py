"""Root cause of a failed job: finds the rank that failed first and its message.

When one rank fails, others fail too: their collectives lose a peer, or the launcher stops them. The root cause is the
rank with the earliest of: the error file of torch's `@record`, the last traceback on standard error, the exit. Ranks
that only report a lost peer, or a save or load that failed on another rank, are ranked last, because a dying process
closes its connections before the system reports its exit. If all failures wait for a rank that has not failed (it
hangs, or exited with code 0 too early), that rank is the root cause.
"""

from __future__ import annotations

import json
import re
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.launch.output import OutputChannel
from shardwise.launch.processes import STOPPED, Exit

LAST_LINES = 20

_HEADER = re.compile(r"^\s*(\+ Exception Group )?Traceback \(most recent call last\)")
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_FATAL = re.compile(r"^(Fatal Python error|terminate called|\*\*\* )")
_LOST_PEER = re.compile(
    r"^[\w.]*(PeerLostError|DistNetworkError)\b|connection (was )?(closed|reset|refused)|closed by peer|broken pipe"
    r"|socket closed|remote process exited|failed to recv|recvValue failed",
    re.IGNORECASE,
)
_WAITED = re.compile(
    r"^[\w.]*(DesyncError|DistStoreError)\b|has not come to the (meeting|making)"
    r"|timed out waiting \d+ms for (recv|send)"
    rf"|{_LOST_PEER.pattern}",
    re.IGNORECASE | re.MULTILINE,
)
"""Errors of a rank that has waited in vain for another one."""
_SILENT = re.compile(r"has waited [\d.]+ s for rank (\d+)|rank (\d+) has not come to the (?:meeting|making)")
_ELSEWHERE = re.compile(r"\bon rank (\d+): ")
"""Part of an error that all ranks raise because one of them has failed."""
_HINTS: dict[int, str] = {
    signal.SIGKILL: (
        "Something outside the job killed it; most often the kernel, because memory ran out. See `dmesg` "
        "or the memory limit of the container; use fewer processes, a smaller micro-batch, or a "
        "higher ZeRO stage."
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
        elapsed: seconds from the start of the attempt to the beginning of its trouble.
        report, has_traceback: its traceback, or the last lines of its standard error; may be empty.
        failed: number of ranks that failed by themselves.
        root_cause_rank, root_cause: rank that caused the failure by its absence, if known, and its state.
    """

    exit: Exit
    elapsed: float
    report: str
    has_traceback: bool
    failed: int
    world_size: int
    root_cause_rank: int | None = None
    root_cause: str = ""

    @property
    def rank(self) -> int:
        """Rank of the root cause."""
        return self.exit.rank if self.root_cause_rank is None else self.root_cause_rank

    @property
    def exit_code(self) -> int:
        """The job's exit code: the rank's own, or 128 + signal as in a shell."""
        return self.exit.code if self.exit.code >= 0 else 128 - self.exit.code

    def cause(self) -> str:
        """Return how the rank ended, in a few words."""
        if self.exit.code >= 0:
            return f"exit code {self.exit.code}"
        number = -self.exit.code
        known = {int(sig): sig.name for sig in signal.Signals}
        return f"killed by {known.get(number, 'signal')} (signal {number})"

    def message(self) -> str:
        """Return the final message of the job: rank, cause, host, hint, and last the traceback."""
        others = f" ({self.failed} of {self.world_size} ranks failed)" if self.failed > 1 else ""
        if self.root_cause_rank is None:
            begin = f"rank {self.exit.rank} failed first{others}"
        else:
            begin = f"rank {self.root_cause_rank} {self.root_cause}. Without it rank {self.exit.rank} failed{others}"
        lines = [
            f"shardwise run: {begin}: {self.cause()}, pid "
            f"{self.exit.pid} on {self.exit.host or socket.gethostname()}, {self.elapsed:.1f} s after the start."
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


@dataclass(frozen=True)
class Trouble:
    """One rank that failed by itself.

    Attributes:
        began: beginning of the trouble, in seconds since the epoch.
        report, has_traceback: its traceback, or the last lines of its standard error.
        lost_peer: whether it only reports that another rank is gone.
    """

    exit: Exit
    began: float
    report: str
    has_traceback: bool
    lost_peer: bool


def troubles(
    exits: Mapping[int, Exit],
    errors: Mapping[int, OutputChannel],
    error_files: Mapping[int, Path],
    stop_began: float,
) -> list[Trouble]:
    """Return the ranks of this machine that failed by themselves.

    `error_files` are those of torch's `@record`. `stop_began`, when the launcher began to stop the ranks, is in seconds
    since the epoch.
    """
    found = []
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
            # It raised but was stopped before its exit: its code would have been that of an
            # exception.
            end = replace(end, code=1)
        report, has_traceback = (recorded[1], True) if recorded else last_traceback(errors[rank].text())
        lost_peer = end.code > 0 and bool(_LOST_PEER.search(_last_exception(report)))
        found.append(Trouble(end, began, report, has_traceback, lost_peer))
    return found


def first_failure(
    candidates: Sequence[Trouble], exits: Mapping[int, Exit], started: float, frozen: Sequence[int] = ()
) -> Failure:
    """Find the rank that failed first among the troubles of all machines, of which there is at least one.

    `started` is the start of the attempt, in seconds since the epoch. `frozen` ranks had a stopped process at the end.
    """
    chosen = min(candidates, key=lambda one: (one.lost_peer, one.began, one.exit.rank))
    named = _ELSEWHERE.search(_last_exception(chosen.report))
    cause = None if named is None else int(named[1])
    chosen = next((candidate for candidate in candidates if candidate.exit.rank == cause), chosen)
    end, report = chosen.exit, chosen.report
    elapsed = max(0.0, chosen.began - started)
    failure = Failure(end, elapsed, report, chosen.has_traceback, len(candidates), len(exits))
    if cause is not None and cause in exits and cause != end.rank:
        return replace(failure, root_cause_rank=cause, root_cause="has failed, as the other ranks say")
    if end.code < 0 or not _WAITED.search(_last_exception(report)):
        return failure
    early = [other for other in exits.values() if other.code == 0 and other.at <= end.at]
    silent = _SILENT.search(report)
    if frozen:
        root_cause = f"stands still: its process, pid {exits[frozen[0]].pid}, was stopped (SIGSTOP, or a debugger)"
        return replace(failure, root_cause_rank=frozen[0], root_cause=root_cause)
    if early:
        first = min(early, key=lambda other: other.at)
        root_cause = f"ended with exit code 0 {max(0.0, first.at - started):.1f} s after the start, before the others"
        return replace(failure, root_cause_rank=first.rank, root_cause=root_cause)
    if silent and int(silent[1] or silent[2]) not in {candidate.exit.rank for candidate in candidates}:
        return replace(failure, root_cause_rank=int(silent[1] or silent[2]), root_cause="did not answer")
    return failure


@dataclass(frozen=True)
class ShutdownResult:
    """Result of a job that was ended by a signal; `killed` has the process states of ranks that were killed."""

    signal: signal.Signals
    exits: Mapping[int, Exit]
    killed: Mapping[int, str]
    grace: float

    @property
    def exit_code(self) -> int:
        """128 + the signal if all ranks ended in order; 137 if some were killed, or the code of a failed one. After
        Ctrl-C always 130, because no save is expected then.
        """
        if self.signal is not signal.SIGINT:
            if self.killed:
                return 128 + signal.SIGKILL
            if self._failed():
                return Failure(self._failed()[0], 0.0, "", False, 1, len(self.exits)).exit_code
        return 128 + int(self.signal)

    def message(self) -> str:
        """Return the final message of the job."""
        parts = [f"received {self.signal.name}"]
        if self.killed:
            who = ranks_in_words(list(self.killed))
            parts.append(
                f"{who} did not end within {self.grace:g} s and had to be killed, so nothing more was saved there"
            )
            stopped = [rank for rank, state in self.killed.items() if state in STOPPED]
            if stopped:
                parts.append(f"{ranks_in_words(stopped)} stood still: stopped by SIGSTOP, or by a debugger")
        elif self.signal is not signal.SIGINT and self._failed():
            failed = ", ".join(f"rank {end.rank} with exit code {end.code}" for end in self._failed())
            parts.append(f"not in order ended {failed}, so it is not certain that anything was saved: see the output")
        return "; ".join([*parts, "all processes have ended."])

    def _failed(self) -> list[Exit]:
        in_order = (0, -int(self.signal), 128 + int(self.signal))
        return [end for end in self.exits.values() if end.code not in in_order and end.rank not in self.killed]


def ranks_in_words(ranks: Sequence[int]) -> str:
    """List ranks in words.

    >>> ranks_in_words([1]), ranks_in_words([0, 2, 1])
    ('rank 1', 'ranks 0, 1 and 2')
    """
    *most, last = sorted(ranks)
    return f"ranks {', '.join(map(str, most))} and {last}" if most else f"rank {last}"


def last_traceback(text: str) -> tuple[str, bool]:
    """Return the last traceback in standard error with its chained ones, and True; else the last lines and False."""
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
    """Return the part of a traceback that names the exception, after the last indented line."""
    lines = report.splitlines()
    headers = [number for number, line in enumerate(lines) if _HEADER.match(line)]
    after = lines[headers[-1] + 1 :] if headers else lines
    for number, line in enumerate(after):
        if line and not line[0].isspace():
            return "\n".join(after[number:])
    return ""


def _recorded(path: Path) -> tuple[float, str] | None:
    try:
        at = path.stat().st_mtime
        message = json.loads(path.read_text(encoding="utf-8"))["message"]
        stack = message["extraInfo"]["py_callstack"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (at, stack.rstrip()) if isinstance(stack, str) else None
