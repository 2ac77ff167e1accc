"""The agent of one machine: serves the store of an attempt, starts, watches and stops its ranks.

The coordinator decides; the agent of the launcher's own machine runs in the launcher, others in a process of their own.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwise.comm.environment import MEMORY_DIRECTORY, RECOVERY_FILE
from shardwise.errors import LaunchError
from shardwise.launch.attempt import Attempt, Display
from shardwise.launch.coordinator import GRACE_S, Plan, Report
from shardwise.launch.cores import Cores, deal, nodes_of_gpus
from shardwise.launch.failure import ranks_in_words
from shardwise.launch.job import Job
from shardwise.launch.placement import Placement, remaining
from shardwise.launch.processes import STOPPED
from shardwise.launch.recovery import read_recovery
from shardwise.launch.workers import worker_command, worker_environment

if TYPE_CHECKING:
    import torch.distributed as dist


SAVING_GRACE_S = 60.0
"""Grace period in seconds for processes that handle the signal, for example to save a checkpoint."""

LATE_S, LATE_STOPPED_S = 60.0, 10.0
"""Seconds after the last exit with code 0 before running, or stopped, ranks are logged; then doubled."""


_SHOWN = 8
"""Machines that show how they start their processes; of more, only the first one does."""


class Event(NamedTuple):
    """An event for the coordinator: the name of its method, and its argument."""

    kind: str
    content: Any = None


@dataclass(frozen=True)
class Surroundings:
    """Surroundings of the ranks on this machine.

    Attributes:
        display: shows and logs their output.
        scratch: private directory for error files.
        memory: directory in memory that lives as long as the job; None: there is none.
        interface: network interface of the job; empty: torch's choice.
        run_id: random name of the job.
    """

    display: Display
    scratch: Path
    memory: Path | None
    interface: str
    run_id: str


class Agent:
    """Runs the ranks of one machine. `cores` are divided among them; None: they are not bound."""

    def __init__(self, job: Job, placement: Placement, cores: Cores | None, around: Surroundings) -> None:
        self.attempt: Attempt | None = None
        self._job, self._placement, self._cores, self._around = job, placement, cores, around
        self._server: dist.TCPStore | None = None
        self._plan: Plan | None = None
        self._ranks: dict[int, int] = {}
        self._noted: set[int] = set()
        self._over = True
        self._recovery: Path | None = None
        self._late = 1.0
        self._notices: list[str] = []
        self._started: list[Event] = []

    # -- the store ---------------------------------------------------------------------------------------------------

    def serve(self, address: str, port: int | None) -> int:
        """Serve a new store at an address of this machine, on the default port or a free one if `port` is None; return
        its port. Raises LaunchError if the port is taken.
        """
        from shardwise.comm.rendezvous import serve
        from shardwise.comm.setup import DEFAULT_PORT, DEFAULT_TIMEOUT

        self._server = None  # closes the last attempt's store, to free its port
        try:
            self._server = serve(address, DEFAULT_PORT if port is None else port, DEFAULT_TIMEOUT)
        except LaunchError:
            if port is not None:
                raise
            self._server = serve(address, 0, DEFAULT_TIMEOUT)
        return int(self._server.port)

    def note_ended(self, attempt: int, rank: int, how: str) -> None:
        """Publish that a rank has ended, for ranks that are still in rendezvous."""
        from shardwise.comm.rendezvous import ended_key

        if self._server is not None:
            self._server.set(ended_key(str(attempt), rank), how)

    def close(self) -> None:
        """Close the store."""
        self._server = None

    # -- the ranks ---------------------------------------------------------------------------------------------------

    def start(self, plan: Plan) -> None:
        """Start the ranks of a plan. Raises LaunchError if a process cannot be started."""
        job, around = self._job, self._around
        placement = remaining(self._placement, plan.slots)
        dealt = None
        if self._cores is not None:
            devices = placement.devices if job.core_list is None else None
            dealt = deal(self._cores, placement.nproc, None if devices is None else nodes_of_gpus(devices))
        each = None if dealt is None else len(dealt[0])
        common = worker_environment(job, placement, cores=each, interface=around.interface)
        if around.memory is not None:  # without a directory, in-memory copies raise an error
            common[MEMORY_DIRECTORY] = str(around.memory)
        self._recovery = around.scratch / f"attempt_{plan.attempt}_recovered.json" if plan.restarted else None
        env = {}
        for local, rank in enumerate(range(plan.first_rank, plan.first_rank + placement.nproc)):
            env[rank] = {**common, **self._variables(plan, local, rank, placement.nproc)}
        argv = {rank: worker_command(job, int(own["LOCAL_RANK"])) for rank, own in env.items()}
        cores = None if dealt is None else dict(zip(argv, dealt, strict=True))
        if plan.attempt == 0 and (plan.node == 0 or plan.nodes <= _SHOWN):
            self._notices.append(_summary(placement, common, f"{plan.master_addr}:{plan.master_port}", each))
        self._plan, self._over, self._late, self._noted = plan, False, 1.0, set()
        self.attempt = Attempt(plan.attempt, argv, env, cores, around.display, around.scratch, plan.world_size)
        pids = self.attempt.start()
        if job.pid_file is not None:
            self._started.append(Event("started", [plan.attempt, list(pids.items())]))

    def _variables(self, plan: Plan, local: int, rank: int, count: int) -> dict[str, str]:
        found: dict[str, Any] = {
            "RANK": rank,
            "LOCAL_RANK": local,
            "WORLD_SIZE": plan.world_size,
            "LOCAL_WORLD_SIZE": count,
            "LOCAL_SIZE": count,
            "CROSS_RANK": plan.node,
            "CROSS_SIZE": plan.nodes,
            "GROUP_RANK": plan.node,
            "GROUP_WORLD_SIZE": plan.nodes,
            "ROLE_NAME": "default",
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": plan.world_size,
            "MASTER_ADDR": plan.master_addr,
            "MASTER_PORT": plan.master_port,
            "TORCHELASTIC_RESTART_COUNT": plan.attempt,
            "TORCHELASTIC_MAX_RESTARTS": self._job.max_restarts,
            "TORCHELASTIC_RUN_ID": self._around.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": True,
        }
        if self._recovery is not None:
            found[RECOVERY_FILE] = self._recovery
        return {name: str(value) for name, value in found.items()}

    def forward(self, sig: signal.Signals) -> None:
        """Send a signal to the ranks that handle it; safe in a signal handler."""
        if self.attempt is None or not self.attempt.gang.forward(sig):
            self._notices.append(f"received {sig.name}, for which no rank has a handler; nothing is done")

    def skip_grace_period(self) -> None:
        """End a grace period at once; safe in a signal handler."""
        if self.attempt is not None:
            self.attempt.gang.skip_grace_period = True

    def poll(self) -> list[Event]:
        """Return what has happened since the last call."""
        found, self._started = self._started, []
        while self._notices:
            found.append(Event("say", self._notices.pop(0)))
        record = None if self._recovery is None else read_recovery(self._recovery)
        if record is not None:
            self._recovery = None
            found.append(Event("recovered", record))
        attempt = self.attempt
        if attempt is None or self._over:
            return found
        if attempt.failed():
            self._over = True
            return [*found, Event("failing")]
        if attempt.gang.finished():
            self._over = True
            return [*found, Event("finished", list(attempt.gang.exits.values()))]
        for rank in attempt.ended() - self._noted:
            self._noted.add(rank)
            found.append(Event("ended", rank))  # ranks still in rendezvous would wait for it
        late = self._describe_late(attempt)
        return [*found, Event("say", late)] if late else found

    def _describe_late(self, attempt: Attempt) -> str:
        """Describe ranks that run long after others have ended, because a stopped rank blocks the job forever."""
        exits = list(attempt.gang.exits.values())
        since = time.time() - max((end.at for end in exits), default=time.time())
        if since < LATE_STOPPED_S * self._late:
            return ""
        states, pids = attempt.gang.states(), attempt.gang.pids()
        stopped = [rank for rank, state in states.items() if state in STOPPED]
        if not states or since < (LATE_STOPPED_S if stopped else LATE_S) * self._late:
            return ""
        self._late *= 2
        message = f"{ranks_in_words(list(states))} still {'run' if len(states) > 1 else 'runs'}, {since:.0f} s after "
        message += f"{ranks_in_words([end.rank for end in exits])} ended with exit code 0"
        for rank in stopped:
            message += f"; rank {rank} is stopped (SIGSTOP, or a debugger): `kill -CONT {pids[rank]}` lets it go on"
        return message

    def stop(self, sig: signal.Signals, grace: float | None = None) -> Report:
        """Stop all ranks: the signal, then SIGKILL after `grace` seconds; None: `SAVING_GRACE_S` if a rank handles the
        signal, else `GRACE_S`. The user's grace period takes precedence, after a failure if it is shorter.
        """
        self._over = True
        if self.attempt is None:
            return Report()
        own = self._job.grace
        if grace is not None:
            grace = grace if own is None else min(own, grace)
        elif own is not None:
            grace = own
        else:
            # Every Python process handles SIGINT.
            saves = sig is not signal.SIGINT and self.attempt.gang.handles(sig)
            grace = SAVING_GRACE_S if saves else GRACE_S
        return self.attempt.stop(sig, grace)


def _summary(placement: Placement, env: Mapping[str, str], address: str, cores: int | None) -> str:
    devices = "the CPU" if placement.devices is None else "CUDA devices " + ", ".join(placement.devices)
    return (
        f"{placement.nproc} process{'es' * (placement.nproc > 1)} on {devices}, meeting at {address}, "
        f"OMP_NUM_THREADS={env['OMP_NUM_THREADS']}"
        + ("" if cores is None else f", each bound to {cores} core{'s' * (cores > 1)} of its own")
    )
