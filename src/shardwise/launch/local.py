"""Runs a job on this machine."""

from __future__ import annotations

import contextlib
import gc
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from shardwise.comm.environment import LOOPBACK, is_loopback
from shardwise.errors import CommandLineError, LaunchError
from shardwise.launch.agent import Agent, Surroundings
from shardwise.launch.attempt import Display
from shardwise.launch.coordinator import Coordinator, Node, Outcome, Plan, Policy
from shardwise.launch.cores import Cores, available, deal, nodes_of_gpus, parse_list
from shardwise.launch.interrupts import Interrupts
from shardwise.launch.job import Job
from shardwise.launch.jobmemory import JobDirectory
from shardwise.launch.output import OutputReader, Tags, Terminal, standard_screens
from shardwise.launch.pidfile import pid_file
from shardwise.launch.placement import Placement, find_devices, place

POLL_S = 0.05
"""Seconds between looks at the processes of this machine."""


def run_here(job: Job) -> int:
    """Run a job on this machine to its end; return its exit code. Raises as `shardwise.launch.start.run_job`."""
    import_torch()
    placement = place(job.resources, find_devices())
    if job.min_nproc is not None and job.min_nproc > placement.nproc:
        raise CommandLineError(f"--min-nproc {job.min_nproc}: the job has only {placement.nproc} processes.")
    return _run(job, placement, cores_of(job, placement))


def cores_of(job: Job, placement: Placement) -> Cores | None:
    """Return the cores of this machine that the ranks are bound to; None: they are not bound. Raises CommandLineError
    if there are too few.
    """
    if not job.bind_cores and job.core_list is None:
        return None
    listed = None if job.core_list is None else parse_list(job.core_list, "--core-list")
    cores = available(listed, f"--core-list {job.core_list}")
    devices = placement.devices if job.core_list is None else None
    deal(cores, placement.nproc, None if devices is None else nodes_of_gpus(devices))  # before anything is started
    return cores


def import_torch() -> None:
    """Import torch without garbage collection, which would take a third of the launcher's time."""
    if "torch" in sys.modules:
        return
    collecting = gc.isenabled()
    gc.disable()
    try:
        import torch.distributed  # noqa: F401
    finally:
        if collecting:
            gc.enable()
    gc.freeze()  # also when the process ends


@contextlib.contextmanager
def surroundings(job: Job, display: Display, interface: str, run_id: str) -> Iterator[Surroundings]:
    """Make the directories of a job on this machine; remove them at the end."""
    with JobDirectory(Path(tempfile.gettempdir()), "shardwise-run-") as temporary, JobDirectory() as memory:
        if temporary.path is None:
            raise LaunchError(f"Cannot make a directory in {tempfile.gettempdir()}. Set TMPDIR to a writable one.")
        yield Surroundings(display, temporary.path, memory.path, interface, run_id)


@contextlib.contextmanager
def display_of(job: Job, out: Terminal, err: Terminal) -> Iterator[Display]:
    """Make the display of the ranks' output, and the directory of logs. Raises LaunchError if that fails."""
    log_dir = None if job.log_dir is None else Path(job.log_dir)
    if log_dir is not None:
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(f"--log-dir {log_dir}: cannot make the directory: {error.strerror}.") from error
    display = Display(OutputReader(), out, err, cast(Tags, job.tags), log_dir)
    try:
        yield display
    finally:
        display.pump.stop()


def policy_of(job: Job) -> Policy:
    """Return the rules of a job on one machine."""
    return Policy(job.max_restarts, job.min_nproc, master_addr=job.master_addr or LOOPBACK, master_port=job.master_port)


def sayer(job: Job, err: Terminal) -> Callable[[str], None]:
    """Return a function that prints a line for the user, unless the job is quiet."""

    def say(line: str) -> None:
        if not job.quiet:
            err.write(f"shardwise run: {line}\n".encode())

    return say


def end(outcome: Outcome, err: Terminal) -> int:
    """Print the last message; return the exit code."""
    if outcome.message:
        err.write((outcome.message + "\n").encode())
    return outcome.exit_code


class _LocalLink:
    """The agent in this process, as the coordinator sees it."""

    def __init__(self, agent: Agent) -> None:
        self.events: deque[tuple[str, Any]] = deque()
        self._agent = agent

    def serve(self, address: str, port: int | None) -> None:
        self.events.append(("serving", (address, self._agent.serve(address, port))))

    def start(self, plan: Plan) -> None:
        self._agent.start(plan)

    def stop(self, sig: signal.Signals, grace: float | None) -> None:
        self.events.append(("stopped", self._agent.stop(sig, grace)))

    def note_ended(self, attempt: int, rank: int, how: str) -> None:
        self._agent.note_ended(attempt, rank, how)


def _run(job: Job, placement: Placement, cores: Cores | None) -> int:
    out, err = standard_screens()
    with pid_file(job.pid_file, sayer(job, err)) as pids, display_of(job, out, err) as display:
        interface = "lo" if is_loopback(job.master_addr or LOOPBACK) else ""
        with surroundings(job, display, interface, uuid.uuid4().hex) as around:
            agent = Agent(job, placement, cores, around)
            link = _LocalLink(agent)
            node = Node(socket.gethostname(), link, list(range(placement.nproc)), LOOPBACK)
            coordinator = Coordinator([node], policy_of(job), sayer(job, err), pids)
            interrupts = Interrupts(
                lambda sig: link.events.append(("leaving", sig)), agent.skip_grace_period, agent.forward
            )
            try:
                with interrupts:
                    coordinator.begin()
                    while coordinator.outcome is None:
                        link.events.extend(agent.poll())
                        if not link.events:
                            time.sleep(POLL_S)
                        while link.events and coordinator.outcome is None:
                            coordinator.handle(node, *link.events.popleft())
            finally:
                agent.stop(signal.SIGKILL, 0.0)
                agent.close()
    return end(coordinator.outcome, err)
