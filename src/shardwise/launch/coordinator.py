"""Decides about the attempts of a job: start, stop, restart, and the end.

The coordinator runs in the launcher. An agent on each machine starts and stops ranks, and reports events. The same
rules hold on one machine and on many: if a rank fails or a machine is lost, all other ranks are stopped. When all
machines have reported, or are lost, the rank or machine that failed first is known. Then all ranks start again, or the
job ends. Invariant: each attempt has a new store, because Gloo writes the ranks' addresses into the store, and
restarted ranks would find those of dead ranks.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from shardwise.launch.failure import Failure, ShutdownResult, Trouble, first_failure, ranks_in_words
from shardwise.launch.pidfile import PidFile
from shardwise.launch.processes import Exit
from shardwise.launch.recovery import describe_recovery

GRACE_S = 5.0
"""Grace period in seconds for processes without a handler for the signal, and for all after a failure."""

_ENDED_ON = {
    128 + int(sig): sig
    for sig in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
}


@dataclass(frozen=True)
class Plan:
    """One machine's part of an attempt.

    Attributes:
        attempt: number of the attempt, from 0.
        slots: positions of the machine's devices, one for each rank, in the placement of its agent.
        first_rank, world_size: global number of the first of these ranks, and of all ranks.
        node, nodes: number of the machine among those of the attempt, and their number.
        master_addr, master_port: store of the attempt.
        restarted: whether an attempt has failed before.
    """

    attempt: int
    slots: tuple[int, ...]
    first_rank: int
    world_size: int
    node: int
    nodes: int
    master_addr: str
    master_port: int
    restarted: bool


@dataclass(frozen=True)
class Report:
    """How the ranks of one machine have ended, after a stop: `killed` with process states, `frozen` with a process that
    was stopped by a signal, `grace` in seconds.
    """

    exits: tuple[Exit, ...] = ()
    killed: Mapping[int, str] = field(default_factory=dict)
    troubles: tuple[Trouble, ...] = ()
    frozen: tuple[int, ...] = ()
    grace: float = 0.0


class Link(Protocol):
    """An agent, as the coordinator sees it. Methods return at once; answers are events of the coordinator."""

    def serve(self, address: str, port: int | None) -> None:
        """Serve a new store; answered by `serving`."""

    def start(self, plan: Plan) -> None:
        """Start the ranks of a plan."""

    def stop(self, sig: signal.Signals, grace: float | None) -> None:
        """Stop all ranks: the signal, then SIGKILL after `grace` seconds (None: by the signal); answered by
        `stopped`.
        """

    def note_ended(self, attempt: int, rank: int, how: str) -> None:
        """Tell ranks in rendezvous, through the store that the agent serves, that a rank has ended."""


@dataclass
class Node:
    """One machine of the job: its name, address for the others, and slots that are in use."""

    name: str
    link: Link
    slots: list[int]
    address: str
    ranks: range = range(0)
    exits: tuple[Exit, ...] | None = None
    report: Report | None = None
    lost: str = ""
    lost_at: float = 0.0
    lost_in: int = -1
    leaves: bool = False


@dataclass(frozen=True)
class Policy:
    """Rules of a job.

    Attributes:
        max_restarts: number of restarts after failures; those for machines that come or leave do not count.
        min_ranks: least number of ranks of a restarted attempt; None: all.
        min_nodes: least number of machines; None: all of the start, and no machine is replaced.
        max_nodes: most machines; further ones are spares. None: any number.
        wait_s: seconds to wait for machines if fewer than `min_nodes` are left.
        master_addr: address of the store while the first machine has not changed; None: that machine's.
        master_port: port of the store; None: any.
    """

    max_restarts: int = 0
    min_ranks: int | None = None
    min_nodes: int | None = None
    max_nodes: int | None = None
    wait_s: float = 0.0
    master_addr: str | None = None
    master_port: int | None = None


@dataclass(frozen=True)
class Outcome:
    """End of the job: its exit code, and the last message."""

    exit_code: int
    message: str = ""


class Coordinator:
    """State of a job with these machines. `say` prints a line for the user, `pids` takes the process ids of the ranks.
    `outcome` is set at the end of the job.
    """

    def __init__(
        self, nodes: Sequence[Node], policy: Policy, say: Callable[[str], None], pids: PidFile | None = None
    ) -> None:
        self.nodes = list(nodes)
        self._first = self.nodes[0]
        self.outcome: Outcome | None = None
        self.attempt = -1
        self.failure: Failure | None = None
        self._policy = policy
        self._say = say
        self._pids = pids
        self._phase: Literal["waiting", "serving", "running", "stopping"] = "serving"
        self._least = policy.min_nodes or len(self.nodes)
        self._restarts = 0
        self._spares: list[Node] = []
        self._change = ""
        self._again: tuple[str, int, float, bool] = "", 0, 0.0, False
        self._deadline = 0.0
        self._signal: signal.Signals | None = None
        self._started = 0.0
        self._noticed = 0.0
        self._suspect: tuple[str, int] | None = None
        self._recovering: tuple[str, float] | None = None

    @property
    def used(self) -> list[Node]:
        """Machines that are not lost and have slots."""
        return [node for node in self.nodes if not node.lost and node.slots]

    def begin(self) -> None:
        """Begin the next attempt."""
        self.attempt += 1
        self._phase, self._change = "serving", ""
        self.nodes = self.used
        for node in self.nodes:
            node.exits = node.report = None
            node.ranks = range(0)
        first = self.used[0]
        own = self._policy.master_addr if first is self._first else None
        first.link.serve(own or first.address, self._policy.master_port)

    # -- events ------------------------------------------------------------------------------------------------------

    def handle(self, node: Node, kind: str, content: Any = None) -> None:
        """Handle an event of a machine: the name of a method here, and its argument."""
        if kind == "say":
            self._say(content)
        elif kind == "serving":
            self.serving(node, *content)
        elif kind == "started" and self._pids is not None:
            self._pids.note(node.name, *content)
        elif kind == "failing":
            self.failing()
        elif kind == "ended":
            self.ended(content)
        elif kind == "recovered":
            self.recovered(content)
        elif kind in ("finished", "stopped", "lost", "leaving"):
            getattr(self, kind)(node, content)

    def serving(self, node: Node, address: str, port: int) -> None:
        """Handle that an agent serves the store of the attempt."""
        if self._phase != "serving" or self._signal is not None:
            return
        used = self.used
        world_size = sum(len(one.slots) for one in used)
        rank = 0
        self._phase, self._started = "running", time.time()
        for number, one in enumerate(used):
            one.ranks = range(rank, rank + len(one.slots))
            rank += len(one.slots)
            slots = tuple(one.slots)
            plan = Plan(
                self.attempt, slots, one.ranks.start, world_size, number, len(used), address, port, self.attempt > 0
            )
            one.link.start(plan)

    def ended(self, rank: int) -> None:
        """Handle that a rank has ended with exit code 0 while others run."""
        self.used[0].link.note_ended(self.attempt, rank, "exit code 0")

    def finished(self, node: Node, exits: Sequence[Exit]) -> None:
        """Handle that all ranks of a machine have ended with exit code 0."""
        node.exits = tuple(exits)
        if self._phase == "running" and all(one.exits is not None for one in self.used):
            self.failure = None
            self.outcome = Outcome(0)
        elif self._phase == "stopping":
            self._conclude()

    def failing(self) -> None:
        """Handle that a rank has failed."""
        self._stop_all(signal.SIGTERM, GRACE_S)

    def lost(self, node: Node, reason: str) -> None:
        """Handle that a machine is lost: its agent has ended, or does not answer."""
        if node.lost:
            return
        node.lost, node.lost_at, node.lost_in = reason, time.time(), self.attempt
        if self._phase == "stopping":
            self._conclude()
        elif self._phase == "running" and node.exits is not None:
            return  # its ranks had ended in order
        else:
            self._phase = "running"
            self._stop_all(signal.SIGTERM, GRACE_S)

    def join(self, node: Node) -> None:
        """Handle that a machine has come, or has returned: all ranks start again with it, unless the job has all of its
        machines. Then the machine is a spare, and takes the place of the next that is lost.
        """
        self._spares.append(node)
        if self._phase == "waiting":
            self._restart(*self._again)
        elif self._policy.max_nodes is None or len(self.used) < self._policy.max_nodes:
            self._restart_with_others(f"machine {node.name} has come", signal.SIGTERM)

    def leaving(self, node: Node, sig: signal.Signals) -> None:
        """Handle a signal to the agent of a machine: the machine leaves, or the job ends if it needs the machine."""
        if self._policy.min_nodes is None:
            self.signalled(sig)
            return
        node.leaves = True
        if self._phase == "waiting":
            node.lost = "has left"
            return
        self._restart_with_others(f"machine {node.name} leaves on {sig.name}", sig)

    def _restart_with_others(self, what: str, sig: signal.Signals) -> None:
        if self._phase == "stopping":  # the cause of the stop counts; the restart uses the machines of then
            return
        self._change = what
        if self._phase == "serving":  # the store is started before the ranks
            self._phase = "running"
        self._stop_all(sig, None)

    def look(self) -> None:
        """End a job that has waited too long for machines."""
        if self._phase == "waiting" and time.monotonic() > self._deadline and self.outcome is None:
            self.outcome = Outcome(
                1,
                f"shardwise run: {self._too_few()}, and no other has come within {self._policy.wait_s:.0f} s.",
            )

    def stopped(self, node: Node, report: Report) -> None:
        """Handle that all ranks of a machine are stopped."""
        node.report = report
        if self._phase == "stopping":
            self._conclude()

    def signalled(self, sig: signal.Signals) -> None:
        """Handle a signal to the launcher that ends the job."""
        self._signal = sig
        if self._phase != "stopping":
            self._phase = "running"
            self._stop_all(sig, None)

    def recovered(self, record: Mapping[str, Any]) -> None:
        """Handle the recovery report of a rank: its first step after a restart."""
        if self._recovering is not None:
            cause, failed = self._recovering
            self._recovering = None
            self._say(describe_recovery(record, cause, failed, self._noticed, self._started))

    # -- decisions ---------------------------------------------------------------------------------------------------

    def _stop_all(self, sig: signal.Signals, grace: float | None) -> None:
        if self._phase != "running":
            return
        self._phase, self._noticed = "stopping", time.time()
        for node in self.used:
            node.link.stop(sig, grace)
        self._conclude()

    def _conclude(self) -> None:
        if self.outcome is not None or any(node.report is None for node in self.used):
            return
        reports = [node.report for node in self.nodes if node.report is not None]
        exits = {end.rank: end for report in reports for end in report.exits}
        for node in self.used:
            node.lost = "has left" if node.leaves else ""
        if self._signal is not None:
            killed = {rank: state for report in reports for rank, state in report.killed.items()}
            end = ShutdownResult(self._signal, exits, killed, max((report.grace for report in reports), default=0.0))
            self.outcome = Outcome(end.exit_code, f"shardwise run: {end.message()}")
            return
        lost = [node for node in self.nodes if node.lost_in == self.attempt and node.exits is None]
        # A machine that goes down may end its ranks before its agent.
        gone = {rank for node in lost for rank in node.ranks}
        troubles = [trouble for report in reports for trouble in report.troubles if trouble.exit.rank not in gone]
        own = [trouble for trouble in troubles if not trouble.lost_peer]
        if lost and not (own and min(trouble.began for trouble in own) < min(node.lost_at for node in lost)):
            self._lost_machines(lost)
            return
        if self._change:
            if exits and all(end.code == 0 for end in exits.values()):
                self.outcome = Outcome(0)  # the script has ended at this moment
            elif not self._restart(self._change, 0, 0.0, counted=False):
                self.outcome = Outcome(1, f"shardwise run: {self._change}; {self._too_few()}.")
            return
        self.failure = first_failure(troubles, exits, self._started, [r for report in reports for r in report.frozen])
        received = _ENDED_ON.get(self.failure.exit.code)
        if received is not None:
            words = f"rank {self.failure.exit.rank} was sent {received.name}; all processes have ended."
            self.outcome = Outcome(128 + int(received), f"shardwise run: {words}")
            return
        failure = self.failure
        what = failure.root_cause if failure.root_cause_rank is not None else f"failed first ({failure.cause()})"
        without = self._leave_out(failure.rank) if self._restarts < self._policy.max_restarts else ""
        if not self._restart(f"rank {failure.rank} {what}{without}", failure.rank, failure.exit.at, counted=True):
            self.outcome = Outcome(failure.exit_code, failure.message())

    def _lost_machines(self, lost: Sequence[Node]) -> None:
        first = min(lost, key=lambda node: node.lost_at)
        ranks = f" ({ranks_in_words(list(first.ranks))})" if first.ranks else ""  # none before the start
        what = f"machine {first.name}{ranks} is lost: {first.lost}"
        self.failure = Failure(
            Exit(first.ranks.start, 0, 1, first.lost_at, False, first.name),
            max(0.0, first.lost_at - self._started),
            "",
            False,
            sum(len(node.ranks) for node in lost),
            sum(len(node.ranks) for node in self.nodes),
        )
        if not self._restart(what, first.ranks.start, first.lost_at, counted=self._policy.min_nodes is None):
            left = f"; all other processes have ended, {self.failure.elapsed:.1f} s after the start." if ranks else ""
            self.outcome = Outcome(1, f"shardwise run: {what}{left}")

    def _restart(self, what: str, rank: int, failed: float, counted: bool) -> bool:
        """Start again, at once or when enough machines have come, if the rules allow it; return whether they do."""
        policy = self._policy
        if counted and self._restarts >= policy.max_restarts:
            return False
        while self._spares and (policy.max_nodes is None or len(self.used) < policy.max_nodes):
            self.nodes.append(self._spares.pop(0))
        used = self.used
        ranks = sum(len(node.slots) for node in used)
        if len(used) < self._least:
            if policy.wait_s and self._phase != "waiting":
                self._say(f"{what}; {self._too_few()}: waiting for others, up to {policy.wait_s:.0f} s")
                self._phase, self._deadline = "waiting", time.monotonic() + policy.wait_s
                self._again = what, rank, failed, counted
            return bool(policy.wait_s)
        self._restarts += counted
        among = f" on {len(used)} machine{'s' * (len(used) > 1)}" if len(self.nodes) > 1 or policy.min_nodes else ""
        number = f" (restart {self._restarts} of {policy.max_restarts})" if counted else ""
        self._say(f"{what}; starting all {ranks} processes again{among}{number}")
        cause = f"the failure of rank {rank}" if failed else "a change of machines"
        self._recovering = cause, failed or self._noticed
        self.begin()
        return True

    def _too_few(self) -> str:
        return f"{len(self.used)} of at least {self._least} machines are left"

    def _leave_out(self, rank: int) -> str:
        """Drop a slot that has failed first twice in a row, which points to its device; return a note."""
        node = next(one for one in self.nodes if rank in one.ranks)
        slot = node.slots[rank - node.ranks.start]
        again, self._suspect = self._suspect == (node.name, slot), (node.name, slot)
        ranks = sum(len(one.slots) for one in self.used)
        if not again or self._policy.min_ranks is None or ranks <= self._policy.min_ranks:
            return ""
        self._suspect = None
        node.slots.remove(slot)
        where = f" of {node.name}" if len(self.nodes) > 1 else ""
        return f", as in the attempt before; slot {slot}{where} is left out from now on"


def renumbered(report: Report, host: str, ahead: float) -> Report:
    """Return a report of another machine with its name, and times of this machine's clock, which is `ahead` seconds
    ahead of the other's.
    """

    def moved(end: Exit) -> Exit:
        return replace(end, at=end.at + ahead, host=host)

    troubles = [replace(one, exit=moved(one.exit), began=one.began + ahead) for one in report.troubles]
    return replace(report, exits=tuple(map(moved, report.exits)), troubles=tuple(troubles))
