"""Elastic agent of one machine: torch's agent with shardwise's start, watch and shutdown of workers.

torch documents `SimpleElasticAgent` as the class to extend: it assigns ranks and decides about restarts. Invariant:
each attempt has a new store, served by the agent on a loopback address, because Gloo writes the ranks' addresses into
the store. In a reused store restarted ranks find the addresses of dead ranks, and hang or are refused.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from shardwise.comm.environment import RECOVERY_FILE
from shardwise.comm.rendezvous import ended_key, serve
from shardwise.comm.setup import DEFAULT_PORT, DEFAULT_TIMEOUT
from shardwise.errors import LaunchError
from shardwise.launch.attempt import Attempt
from shardwise.launch.failure import Failure, ShutdownResult, ranks_in_words
from shardwise.launch.processes import STOPPED
from shardwise.launch.recovery import Recovery

GRACE_S = 5.0
"""Grace period in seconds for processes without a handler for the signal, and for all after a failure."""

SAVING_GRACE_S = 60.0
"""Grace period in seconds for processes that handle the signal, for example to save a checkpoint."""

LATE_S, LATE_STOPPED_S = 60.0, 10.0
"""Seconds after the last exit with code 0 before running, or stopped, ranks are logged; then doubled."""

_ENDED_ON = {
    128 + int(sig): sig
    for sig in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
}


class EndedOnRequest(Exception):
    """Raised when a rank has ended in order after a signal: the job is over and is not restarted."""

    def __init__(self, rank: int, received: signal.Signals) -> None:
        super().__init__(f"rank {rank} was sent {received.name}")
        self.rank = rank
        self.signal = received


class LocalRendezvousHandler(RendezvousHandler):
    """Rendezvous of a single agent at an address for the ranks; `port` None: 29500 if free, else any free one."""

    def __init__(self, run_id: str, address: str, port: int | None) -> None:
        self._run_id = run_id
        self._address = address
        self._port = port
        self._server: dist.TCPStore | None = None

    @property
    def use_agent_store(self) -> bool:
        """True: ranks connect to the agent's store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Serve a new store."""
        self._server = None  # closes the last attempt's store, to free its port
        self._server = self._serve()
        meeting = RendezvousStoreInfo(self._address, self._server.port)
        # The agent's own keys are not shared with ranks.
        return RendezvousInfo(dist.HashStore(), 0, 1, meeting)

    def tell_ended(self, attempt: int, rank: int, how: str) -> None:
        """Publish that a rank has ended, for ranks that are still in rendezvous."""
        if self._server is not None:
            self._server.set(ended_key(str(attempt), rank), how)

    def _serve(self) -> dist.TCPStore:
        if self._port is not None:
            return serve(self._address, self._port, DEFAULT_TIMEOUT)
        try:
            return serve(self._address, DEFAULT_PORT, DEFAULT_TIMEOUT)
        except LaunchError:
            return serve(self._address, 0, DEFAULT_TIMEOUT)

    def get_backend(self) -> str:
        """Return the name of this rendezvous backend."""
        return "one-machine"

    def is_closed(self) -> bool:
        """Return False: further attempts are always possible."""
        return False

    def set_closed(self) -> None:
        """Do nothing: there is no other agent."""

    def num_nodes_waiting(self) -> int:
        """Return the number of agents that want to join."""
        return 0

    def get_run_id(self) -> str:
        """Return the name of the job."""
        return self._run_id

    def shutdown(self) -> bool:
        """Close the store."""
        self._server = None
        return True


class Agent(SimpleElasticAgent):
    """Runs the attempts of a job until one succeeds or none is left.

    `spec` has the number of workers and restarts; `open_attempt` builds an attempt from its number and its workers'
    variables by rank. `grace` are the seconds between the first signal and SIGKILL; None: `GRACE_S` or
    `SAVING_GRACE_S`. `say` prints one line for the user. `scratch` is a private directory for the recovery report of a
    restarted rank. `least` is the minimum number of workers when slots are left out; None: none is. `slots` are the
    initial slots that still have a worker.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        open_attempt: Callable[[int, dict[int, dict[str, str]]], Attempt],
        grace: float | None,
        say: Callable[[str], None],
        scratch: Path,
        least: int | None = None,
    ) -> None:
        super().__init__(spec)
        self.slots = list(range(spec.local_world_size))
        self._least = spec.local_world_size if least is None else least
        self._suspect: int | None = None
        self.failure: Failure | None = None
        """Failure of the last failed attempt."""
        self.attempt: Attempt | None = None
        self._open_attempt = open_attempt
        self._grace = grace
        self._say = say
        self._scratch = scratch
        self._attempts = 0
        self._given = 0.0
        self._noticed = 0.0
        self._recovery: Recovery | None = None
        self._notices: list[str] = []
        self._notified: set[int] = set()
        self._late = 1.0

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec = worker_group.spec
        variables = {}
        for worker in worker_group.workers:
            variables[worker.global_rank] = {
                "RANK": str(worker.global_rank),
                "LOCAL_RANK": str(worker.local_rank),
                "WORLD_SIZE": str(worker.world_size),
                "LOCAL_WORLD_SIZE": str(spec.local_world_size),
                "LOCAL_SIZE": str(spec.local_world_size),
                "CROSS_RANK": str(worker_group.group_rank),
                "CROSS_SIZE": str(worker_group.group_world_size),
                "GROUP_RANK": str(worker_group.group_rank),
                "GROUP_WORLD_SIZE": str(worker_group.group_world_size),
                "ROLE_NAME": spec.role,
                "ROLE_RANK": str(worker.role_rank),
                "ROLE_WORLD_SIZE": str(worker.role_world_size),
                "MASTER_ADDR": str(worker_group.master_addr),
                "MASTER_PORT": str(worker_group.master_port),
                "TORCHELASTIC_RESTART_COUNT": str(self._attempts),
                "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
                "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
                "TORCHELASTIC_USE_AGENT_STORE": str(spec.rdzv_handler.use_agent_store),
            }
            if self.failure is not None:
                variables[worker.global_rank][RECOVERY_FILE] = str(self._recovery_file())
        self.attempt = self._open_attempt(self._attempts, variables)
        pids = self.attempt.start()
        if self.failure is not None:
            end = self.failure.exit
            started = self.attempt.started
            self._recovery = Recovery(self.failure.rank, end.at, self._noticed, started, self._recovery_file())
        self._attempts += 1
        self._notified.clear()
        self._late = 1.0
        return {worker.local_rank: pids[worker.global_rank] for worker in worker_group.workers}

    def _recovery_file(self) -> Path:
        return self._scratch / f"attempt_{self._attempts}_recovered.json"

    def forward(self, sig: signal.Signals) -> None:
        """Send a signal to the ranks that handle it; called from a signal handler."""
        if self.attempt is None or not self.attempt.gang.forward(sig):
            self._notices.append(f"received {sig.name}, for which no rank has a handler; nothing is done")

    def _report_recovery(self) -> None:
        while self._notices:
            self._say(self._notices.pop(0))
        recovered = None if self._recovery is None else self._recovery.describe()
        if recovered is not None:
            self._say(recovered)
            self._recovery = None

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        attempt = self.attempt
        assert attempt is not None
        self._report_recovery()
        if attempt.failed():
            self._noticed = time.time()
            self._recovery = None
            # Short grace period: without the failed rank the others cannot save.
            self.failure = attempt.end_after_failure(GRACE_S if self._grace is None else min(self._grace, GRACE_S))
            received = _ENDED_ON.get(self.failure.exit.code)
            if received is not None:
                raise EndedOnRequest(self.failure.exit.rank, received)
            left = worker_group.spec.max_restarts - self._attempts + 1
            if left > 0:
                without = self._leave_out(self.failure.rank, worker_group.spec)
                failure = self.failure
                what = (
                    failure.root_cause if failure.root_cause_rank is not None else f"failed first ({failure.cause()})"
                )
                self._say(
                    f"rank {self.failure.rank} {what}{without}; starting all "
                    f"{worker_group.spec.local_world_size} processes again (restart {self._attempts} of "
                    f"{worker_group.spec.max_restarts})"
                )
            end = self.failure.exit
            return RunResult(
                state=WorkerState.FAILED,
                failures={end.rank: ProcessFailure(end.rank, end.pid, end.code, error_file="")},
            )
        if attempt.gang.finished():
            self.failure = None
            return RunResult(
                state=WorkerState.SUCCEEDED,
                return_values=dict.fromkeys(worker.global_rank for worker in worker_group.workers),
            )
        for rank in attempt.ended() - self._notified:
            # Ranks still in rendezvous would wait for it.
            worker_group.spec.rdzv_handler.tell_ended(self._attempts - 1, rank, "exit code 0")  # type: ignore[attr-defined]
            self._notified.add(rank)
        self._report_late(attempt)
        return RunResult(state=WorkerState.HEALTHY)

    def _report_late(self, attempt: Attempt) -> None:
        """Log ranks that run long after others have ended, because a stopped rank blocks the job forever."""
        exits = list(attempt.gang.exits.values())
        since = time.time() - max((end.at for end in exits), default=time.time())
        if since < LATE_STOPPED_S * self._late:
            return
        states, pids = attempt.gang.states(), attempt.gang.pids()
        stopped = [rank for rank, state in states.items() if state in STOPPED]
        if not states or since < (LATE_STOPPED_S if stopped else LATE_S) * self._late:
            return
        self._late *= 2
        message = f"{ranks_in_words(list(states))} still {'run' if len(states) > 1 else 'runs'}, {since:.0f} s after "
        message += f"{ranks_in_words([end.rank for end in exits])} ended with exit code 0"
        for rank in stopped:
            message += f"; rank {rank} is stopped (SIGSTOP, or a debugger): `kill -CONT {pids[rank]}` lets it go on"
        self._say(message)

    def _leave_out(self, rank: int, spec: WorkerSpec) -> str:
        """Drop a slot that has failed first twice in a row, which points to its device; return a note."""
        slot = self.slots[rank]
        again, self._suspect = self._suspect == slot, slot
        if not again or len(self.slots) <= self._least:
            return ""
        self._suspect = None
        self.slots.remove(slot)
        spec.local_world_size = len(self.slots)
        return f", as in the attempt before; slot {slot} is left out from now on"

    def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int | None = None) -> None:
        # The user's grace period replaces torch's (`timeout`, 30 s).
        if self.attempt is None:
            return
        grace = self._grace
        if grace is None:
            # Every Python process handles SIGINT.
            saves = death_sig is not signal.SIGINT and self.attempt.gang.handles(death_sig)
            grace = SAVING_GRACE_S if saves else GRACE_S
        if self.attempt.gang.stop_began is None:
            self._given = grace
        self.attempt.end(death_sig, grace)

    def stopped(self, sig: signal.Signals) -> ShutdownResult:
        """Return how the ranks ended after the signal that ended `run`."""
        if self.attempt is None:
            return ShutdownResult(sig, {}, {}, 0.0)
        return ShutdownResult(sig, self.attempt.gang.exits, self.attempt.gang.killed, self._given)
