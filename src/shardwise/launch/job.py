"""Runs a script as a job of several processes on this machine, and returns its exit code.

Invariant: at any end of the job (a rank fails or is killed, an interrupt, a signal to the launcher), the call returns
within the grace period and leaves no process behind. The exit code is that of the rank that failed first, or 128 + the
signal. A rank that hangs while no other fails is waited for, and logged.
"""

from __future__ import annotations

import difflib
import gc
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shardwise.comm.environment import (
    DEVICE_LIMIT,
    LOOPBACK,
    MEMORY_DIRECTORY,
    PROGRESS,
    RECOVERY_FILE,
    is_loopback,
)
from shardwise.errors import CommandLineError, LaunchError
from shardwise.launch.console import parse_bytes
from shardwise.launch.cores import Cores, available, deal, nodes_of_gpus, parse_list
from shardwise.launch.hosts import is_this_machine
from shardwise.launch.jobmemory import JobDirectory
from shardwise.launch.output import Tags
from shardwise.launch.placement import Placement, Resources, check_resources, find_devices, place, remaining


@dataclass(frozen=True)
class Job:
    """Options of a job.

    Attributes:
        script: path of the script; a module's name with `module`, a program with `no_python`.
        master_addr, master_port: rendezvous on this machine; port None: 29500 if free, otherwise any free port.
        local_rank: append --local_rank=N to the script's arguments.
        max_restarts: number of restarts of all processes after failures.
        min_nproc: restarts may leave out the slot of a rank that failed first twice in a row, down to this number of
            processes; None: never.
        bind_cores, core_list: bind each process to its own part of the machine's cores; of these CPUs only ("0,4-6").
        log_dir: directory for every rank's output.
        quiet: print only the ranks' output, warnings and errors.
        tags: lines with the prefix `[rank N]`; "auto": all but those of rank 0 on a terminal.
        grace: seconds between the first signal and SIGKILL; None: 60 s for processes that handle it, else 5 s.
        device_limit: most bytes of each rank on its device; None: as configured.
        progress: progress display of the ranks: "auto", "off" (overrides the configuration), or None (not set).
    """

    script: str
    args: tuple[str, ...] = ()
    resources: Resources = field(default_factory=Resources)
    master_addr: str = LOOPBACK
    master_port: int | None = None
    module: bool = False
    no_python: bool = False
    local_rank: bool = False
    max_restarts: int = 0
    min_nproc: int | None = None
    bind_cores: bool = False
    core_list: str | None = None
    log_dir: str | None = None
    quiet: bool = False
    tags: Tags = "auto"
    grace: float | None = None
    device_limit: str | None = None
    progress: Literal["auto", "off"] | None = None


def run_job(job: Job) -> int:
    """Run the job to its end.

    Returns:
        0, or the exit code of the rank that failed first (128 + signal if killed), or 128 + the signal that ended the
            launcher. After a signal other than SIGINT: 137 if ranks had to be killed; the code of a rank that failed
            during shutdown.

    Raises:
        CommandLineError: an option or the script's name is wrong.
        NotBuiltError: the job would need another machine.
        LaunchError: the port is taken, or processes cannot be started.
    """
    check(job)
    check_resources(job.resources)
    _import_torch()
    placement = place(job.resources, find_devices())
    if job.min_nproc is not None and job.min_nproc > placement.nproc:
        raise CommandLineError(f"--min-nproc {job.min_nproc}: the job has only {placement.nproc} processes.")
    cores = None
    if job.bind_cores or job.core_list is not None:
        listed = None if job.core_list is None else parse_list(job.core_list, "--core-list")
        cores = available(listed, f"--core-list {job.core_list}")
        _deal(job, placement, cores)  # before anything is started
    return _supervise(job, placement, cores)


def _deal(job: Job, placement: Placement, cores: Cores) -> list[Cores]:
    devices = placement.devices if job.core_list is None else None
    return deal(cores, placement.nproc, None if devices is None else nodes_of_gpus(devices))


def check(job: Job) -> None:
    """Check a job before torch is imported; raise a CommandLineError with option, value and fix."""
    if job.module and job.no_python:
        raise CommandLineError("--module runs a Python module, --no_python no Python at all. Give one of them.")
    if job.max_restarts < 0:
        raise CommandLineError(f"--max-restarts {job.max_restarts}: give 0 or more.")
    if job.min_nproc is not None and job.min_nproc < 1:
        raise CommandLineError(f"--min-nproc {job.min_nproc}: a job has at least one process.")
    if job.min_nproc is not None and not job.max_restarts:
        raise CommandLineError(f"--min-nproc {job.min_nproc}: says how restarts may be; give --max-restarts too.")
    if job.grace is not None and job.grace < 0:
        raise CommandLineError(f"--grace {job.grace}: give 0 or more seconds.")
    if job.device_limit is not None:
        parse_bytes(job.device_limit, "--device-limit")
    if job.tags not in ("auto", "always", "never"):
        raise CommandLineError(f"--tag-output {job.tags}: choose auto, always or never.")
    if job.master_port is not None and not 1 <= job.master_port < 2**16:
        raise CommandLineError(
            f"--master_port {job.master_port} is not a TCP port (1 to 65535). Leave it out to take a free one."
        )
    if not is_loopback(job.master_addr) and not is_this_machine(job.master_addr):
        raise CommandLineError(
            f"--master_addr {job.master_addr} is not an address of this machine ({socket.gethostname()}). "
            f"Leave it out to meet on {LOOPBACK}. For several machines run torchrun or srun on each: this command "
            "starts processes on one."
        )
    if job.log_dir is not None and Path(job.log_dir).exists() and not Path(job.log_dir).is_dir():
        raise CommandLineError(f"--log-dir {job.log_dir} is a file. Give a directory.")
    if not job.module:
        _check_script(job)


def _import_torch() -> None:
    """Import torch without garbage collection, which would take a third of the launcher's time."""
    if "torch" in sys.modules:
        return
    collecting = gc.isenabled()
    gc.disable()
    try:
        import shardwise.launch.agent  # noqa: F401
    finally:
        if collecting:
            gc.enable()
    gc.freeze()  # also when the process ends


def _check_script(job: Job) -> None:
    path = Path(job.script)
    if job.no_python:
        if shutil.which(job.script) is None:
            raise CommandLineError(f"--no_python {job.script}: no executable program of that name{_close_names(path)}")
        return
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise CommandLineError(f"{job.script} is a directory without a __main__.py. Name the script.")
    if not path.exists():
        raise CommandLineError(f"No such file {job.script}{_close_names(path)}")


def _close_names(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.is_file()]
    except OSError:
        return f": the directory {path.parent} does not exist."
    # nope.py and loop.py are 0.71 alike, train.py and trian.py 0.88.
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.8)
    found = f" in {path.parent.resolve()}."
    return f"{found} Did you mean {path.parent / close[0]}?" if close else found


def command(job: Job, local_rank: int) -> list[str]:
    """Return program and arguments of one process.

    >>> command(Job("train.py", ("--lr", "1"), local_rank=True), 3)[1:]
    ['-u', 'train.py', '--lr', '1', '--local_rank=3']
    """
    if job.no_python:
        # Resolve a bare name on the search path; otherwise it is a file here.
        program = [shutil.which(job.script) or job.script]
    else:
        # Unbuffered, because buffered output is late, and lost when the process is killed.
        program = [sys.executable, "-u", *(["-m"] if job.module else []), job.script]
    return [*program, *job.args, *([f"--local_rank={local_rank}"] if job.local_rank else [])]


def worker_environment(
    job: Job, placement: Placement, env: Mapping[str, str] = os.environ, cores: int | None = None
) -> dict[str, str]:
    """Return the launcher's environment with devices, threads (for bound `cores`) and Gloo's interface."""
    # Variables of an outer launcher are not for these ranks.
    variables = {name: value for name, value in env.items() if name not in (MEMORY_DIRECTORY, RECOVERY_FILE)}
    if placement.devices is not None:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(placement.devices)
    if job.device_limit is not None:
        variables[DEVICE_LIMIT] = job.device_limit
    if job.progress == "off":
        variables[PROGRESS] = "off"
    elif job.progress is not None:
        variables.setdefault(PROGRESS, job.progress)
    if job.quiet:
        variables.setdefault("SHARDWISE_LOG_LEVEL", "warning")
    # By default torch uses all cores in each process.
    variables.setdefault("OMP_NUM_THREADS", str(cores or max(1, _cores() // placement.nproc)))
    if is_loopback(job.master_addr) and any(name == "lo" for _, name in socket.if_nameindex()):
        variables.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return variables


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _supervise(job: Job, placement: Placement, cores: Cores | None) -> int:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing.api import SignalException

    from shardwise.launch.agent import Agent, EndedOnRequest, LocalRendezvousHandler
    from shardwise.launch.attempt import Attempt, Display
    from shardwise.launch.interrupts import Interrupts
    from shardwise.launch.output import OutputReader, standard_screens

    _silence_torch()
    out, err = standard_screens()

    def say(line: str) -> None:
        if not job.quiet:
            err.write(f"shardwise run: {line}\n".encode())

    def skip_grace_period() -> None:
        if agent.attempt is not None:
            agent.attempt.gang.skip_grace_period = True

    log_dir = None if job.log_dir is None else Path(job.log_dir)
    if log_dir is not None:
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(f"--log-dir {log_dir}: cannot make the directory: {error.strerror}.") from error
    with JobDirectory(Path(tempfile.gettempdir()), "shardwise-run-") as temporary, JobDirectory() as memory:
        scratch = temporary.path
        if scratch is None:
            raise LaunchError(f"Cannot make a directory in {tempfile.gettempdir()}. Set TMPDIR to a writable one.")
        # Without a directory, in-memory copies raise an error.
        added = {} if memory.path is None else {MEMORY_DIRECTORY: str(memory.path)}
        display = Display(OutputReader(), out, err, job.tags, log_dir)
        interrupts = Interrupts(
            lambda sig: SignalException(f"received {sig.name}", sig), skip_grace_period, lambda sig: agent.forward(sig)
        )

        def open_attempt(number: int, variables: dict[int, dict[str, str]]) -> Attempt:
            dealt = None if cores is None else _deal(job, remaining(placement, agent.slots), cores)
            each = None if dealt is None else len(dealt[0])
            common = {**worker_environment(job, remaining(placement, agent.slots), cores=each), **added}
            if number == 0:
                first = variables[0]
                say(_summary(placement, common, f"{first['MASTER_ADDR']}:{first['MASTER_PORT']}", each))
            argv = {rank: command(job, int(own["LOCAL_RANK"])) for rank, own in variables.items()}
            env = {rank: {**common, **own} for rank, own in variables.items()}
            own_cores = None if dealt is None else {rank: dealt[int(env[rank]["LOCAL_RANK"])] for rank in argv}
            return Attempt(number, argv, env, own_cores, display, scratch, interrupts.uninterrupted)

        spec = WorkerSpec(
            role="default",
            local_world_size=placement.nproc,
            rdzv_handler=LocalRendezvousHandler(uuid.uuid4().hex, job.master_addr, job.master_port),
            entrypoint=job.script,
            max_restarts=job.max_restarts,
            monitor_interval=0.05,
        )
        agent = Agent(spec, open_attempt, job.grace, say, scratch, job.min_nproc)
        try:
            with interrupts:
                agent.run()
        except SignalException as stopped:
            end = agent.stopped(signal.Signals(stopped.sigval))
            code = end.exit_code
            last_word = f"shardwise run: {end.message()}"
        except EndedOnRequest as ended:
            code = 128 + int(ended.signal)
            last_word = f"shardwise run: rank {ended.rank} was sent {ended.signal.name}; all processes have ended."
        else:
            code = agent.failure.exit_code if agent.failure else 0
            last_word = agent.failure.message() if agent.failure else ""
        finally:
            display.pump.stop()
        if last_word:
            err.write((last_word + "\n").encode())
        return code


def _summary(placement: Placement, env: Mapping[str, str], address: str, cores: int | None) -> str:
    devices = "the CPU" if placement.devices is None else "CUDA devices " + ", ".join(placement.devices)
    return (
        f"{placement.nproc} process{'es' * (placement.nproc > 1)} on {devices}, meeting at {address}, "
        f"OMP_NUM_THREADS={env['OMP_NUM_THREADS']}"
        + ("" if cores is None else f", each bound to {cores} core{'s' * (cores > 1)} of its own")
    )


def _silence_torch() -> None:
    """Silence the log of torch's agent; LOGLEVEL enables it."""
    if "LOGLEVEL" in os.environ:
        return
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
