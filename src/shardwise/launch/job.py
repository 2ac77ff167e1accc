"""The options of a job, and their checks."""

from __future__ import annotations

import dataclasses
import difflib
import shlex
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args, get_type_hints

import typer
from typer.models import OptionInfo

from shardwise.comm.environment import LOOPBACK
from shardwise.errors import CommandLineError
from shardwise.launch.console import parse_bytes
from shardwise.launch.hosts import has_hostfile, is_address, is_this_machine
from shardwise.launch.placement import Resources


@dataclass(frozen=True)
class Job:
    """A job; the options of `shardwise run` are made from these fields.

    `progress` is the progress display of the ranks: "auto", "off" (overrides the configuration), or None (not set).
    """

    script: Annotated[str, typer.Argument(help="Script to run.", metavar="SCRIPT")]
    args: Annotated[
        tuple[str, ...], typer.Argument(help="Everything after the script is the script's.", metavar="[ARGS]...")
    ] = ()
    nproc: Annotated[
        int | None,
        typer.Option(
            "--nproc",
            "--num-gpus",
            "--num-accelerators",
            metavar="N",
            help="Number of processes on each machine. Default: one for each slot of the hostfile, or visible CUDA "
            "device, or one.",
        ),
    ] = None
    nodes: Annotated[
        str | None,
        typer.Option(
            "--num-nodes",
            "--nnodes",
            metavar="N|MIN:MAX",
            help="Number of machines: the first N of the hostfile, or without a hostfile N that are started by hand. "
            "MIN:MAX: start with MIN or more, go on without lost ones, and take in those that come or return.",
        ),
    ] = None
    node_rank: Annotated[
        int | None,
        typer.Option(
            "--node-rank",
            metavar="R",
            help="Number of this machine, where the command is started by hand on each; 0 has the --master-addr.",
        ),
    ] = None
    include: Annotated[
        str | None, typer.Option("--include", "-i", metavar="SPEC", help="Slots to use: NAME[:slot,slot]@NAME...")
    ] = None
    exclude: Annotated[
        str | None, typer.Option("--exclude", "-e", metavar="SPEC", help="Slots not to use, in the same form.")
    ] = None
    hostfile: Annotated[
        str | None, typer.Option("--hostfile", "-H", metavar="PATH", help="Machines, one a line: `host slots=N`.")
    ] = None
    master_addr: Annotated[
        str | None,
        typer.Option(
            "--master-addr",
            metavar="ADDRESS",
            help="Address at which the ranks meet. Default: loopback, or the address of the first of several machines.",
        ),
    ] = None
    master_port: Annotated[
        int | None,
        typer.Option("--master-port", metavar="PORT", help="Port of the rendezvous. Default: 29500, or any free one."),
    ] = None
    module: Annotated[bool, typer.Option("--module", help="SCRIPT is a module: python -m SCRIPT.")] = False
    no_python: Annotated[bool, typer.Option("--no-python", help="SCRIPT is an executable, not a Python script.")] = (
        False
    )
    local_rank: Annotated[
        bool,
        typer.Option("--local-rank/--no-local-rank", help="Append --local_rank=N to the script's arguments, or not."),
    ] = False
    max_restarts: Annotated[
        int,
        typer.Option("--max-restarts", metavar="K", help="After a failure start all processes again, up to K times."),
    ] = 0
    min_nproc: Annotated[
        int | None,
        typer.Option(
            "--min-nproc",
            metavar="M",
            help="Restart without a slot whose process has failed first twice in a row, down to M "
            "processes. Default: always restart all.",
        ),
    ] = None
    bind_cores: Annotated[
        bool,
        typer.Option(
            "--bind-cores",
            "--bind-cores-to-rank",
            help="Divide each machine's cores among its processes, and bind each process to its share.",
        ),
    ] = False
    core_list: Annotated[
        str | None,
        typer.Option("--core-list", "--bind-core-list", metavar="LIST", help="Bind, and to these CPUs only: 0,4-6."),
    ] = None
    log_dir: Annotated[
        str | None,
        typer.Option(
            "--log-dir",
            "--enable-each-rank-log",
            metavar="DIR",
            help="Also write the output to DIR/rank_N.out and DIR/rank_N.err (appending).",
        ),
    ] = None
    pid_file: Annotated[
        str | None,
        typer.Option(
            "--pid-file",
            metavar="PATH",
            help="Write the process ids of the launcher and the ranks to PATH, as JSON; removed at the end of the job.",
        ),
    ] = None
    tags: Annotated[
        str,
        typer.Option(
            "--tag-output",
            metavar="auto|always|never",
            help="Lines that get `[rank N]` in front. auto: all, but on a terminal not those of rank 0.",
        ),
    ] = "auto"
    grace: Annotated[
        float | None,
        typer.Option(
            "--grace",
            metavar="SECONDS",
            help="Time to end after SIGTERM or Ctrl-C, before SIGKILL. Default: 60 where the ranks handle SIGTERM "
            "(to save a checkpoint), else 5.",
        ),
    ] = None
    device_limit: Annotated[
        str | None,
        typer.Option(
            "--device-limit",
            metavar="SIZE",
            help="Memory limit of each rank's device, as the library counts it, such as 2GiB. Overrules "
            "memory_limits.device of the configuration.",
        ),
    ] = None
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print only the script's output, warnings and errors.")
    ] = False
    launcher: Annotated[
        str, typer.Option("--launcher", metavar="NAME", help="Program that starts on several machines: ssh.")
    ] = "ssh"
    launcher_args: Annotated[
        str, typer.Option("--launcher-args", metavar="ARGS", help="Further arguments of that program, in one string.")
    ] = ""
    ssh_port: Annotated[
        int | None, typer.Option("--ssh-port", metavar="PORT", help="Port of the ssh servers. Default: as configured.")
    ] = None
    python: Annotated[
        str | None, typer.Option("--python", metavar="PATH", help="Interpreter on all machines. Default: this one.")
    ] = None
    setup: Annotated[
        str | None,
        typer.Option("--venv-script", metavar="PATH", help="Shell script to source on each machine before the start."),
    ] = None
    export: Annotated[
        tuple[str, ...],
        typer.Option(
            "--export",
            metavar="NAME[=VALUE]",
            help="Further variable for all machines; may be repeated. Those of NCCL, Gloo, torch, Python and others "
            "are passed on anyway, with those of .deepspeed_env.",
        ),
    ] = ()
    slurm: Annotated[
        bool,
        typer.Option(
            "--slurm", help="Submit the job by sbatch; inside an allocation of Slurm, run on its nodes through srun."
        ),
    ] = False
    sbatch_args: Annotated[
        str,
        typer.Option("--sbatch-args", metavar="ARGS", help="With --slurm: further options of sbatch, in one string."),
    ] = ""
    time: Annotated[
        str | None,
        typer.Option(
            "--time",
            metavar="LIMIT",
            help="With --slurm: time limit, as MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS. The ranks get "
            "SIGTERM before.",
        ),
    ] = None
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --slurm: print the batch script, and submit nothing.")
    ] = False
    unchecked: Annotated[
        bool, typer.Option("--no-check", help="Do not compare versions, files and environments of the machines.")
    ] = False
    autotuning: Annotated[
        str | None,
        typer.Option(
            "--autotuning",
            metavar="tune|run",
            help="Search for the fastest ZeRO stage and micro-batch size, by the section `autotuning` of the "
            "configuration. run: then run the job with the best configuration.",
        ),
    ] = None
    progress: Literal["auto", "off"] | None = None

    @property
    def resources(self) -> Resources:
        """Requested resources."""
        most = None if self.machines is None else self.machines[1]
        return Resources(self.nproc, most, self.include or None, self.exclude or None, self.hostfile)

    @property
    def machines(self) -> tuple[int, int | None] | None:
        """Least and largest number of machines (None: all of the hostfile); None if not given.

        Raises CommandLineError if the option cannot be read.
        """
        if self.nodes is None:
            return None
        least, colon, most = self.nodes.partition(":")
        if not least.isdigit() or not (most.isdigit() or (colon and not most) or not colon):
            raise CommandLineError(f"--nnodes {self.nodes}: give a number of machines, or MIN:MAX.")
        found = int(least), int(most) if most else None if colon else int(least)
        if found[0] < 1 or (found[1] is not None and found[1] < found[0]):
            raise CommandLineError(f"--nnodes {self.nodes}: expected 1 <= MIN <= MAX.")
        return found


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
    split_arguments(job.launcher_args, "--launcher-args")
    if job.tags not in ("auto", "always", "never"):
        raise CommandLineError(f"--tag-output {job.tags}: choose auto, always or never.")
    if job.master_port is not None and not 1 <= job.master_port < 2**16:
        raise CommandLineError(
            f"--master_port {job.master_port} is not a TCP port (1 to 65535). Leave it out to take a free one."
        )
    if job.autotuning not in (None, "tune", "run"):
        raise CommandLineError(f"--autotuning {job.autotuning}: choose tune or run.")
    if job.autotuning is not None and by_hand(job):
        raise CommandLineError(
            "--autotuning starts many jobs, and machines that are started by hand run one. Name the machines with "
            "--hostfile."
        )
    if job.node_rank is not None and job.hostfile is not None:
        raise CommandLineError(
            f"--node-rank {job.node_rank}: for a job that is started by hand on each machine. Leave out --hostfile, or "
            "--node-rank."
        )
    if by_hand(job):
        if job.master_addr is None:
            raise CommandLineError(
                f"--nnodes {job.nodes}: the machines are not known. Name them with --hostfile; or start this command "
                "on each machine, with --master-addr ADDRESS of the first."
            )
        if job.node_rank is not None and job.node_rank < 0:
            raise CommandLineError(f"--node-rank {job.node_rank}: give 0 or more.")
        # `meet` waits for a name.
        if job.node_rank == 0 and is_address(job.master_addr) and not is_this_machine(job.master_addr):
            raise CommandLineError(
                f"--node-rank 0: --master-addr {job.master_addr} is not an address of this machine "
                f"({socket.gethostname()})."
            )
    elif job.master_addr is not None and not _several(job) and not is_this_machine(job.master_addr):
        raise CommandLineError(
            f"--master_addr {job.master_addr} is not an address of this machine ({socket.gethostname()}). "
            f"Leave it out to meet on {LOOPBACK}, or name the machines of the job with --hostfile."
        )
    if job.log_dir is not None and Path(job.log_dir).exists() and not Path(job.log_dir).is_dir():
        raise CommandLineError(f"--log-dir {job.log_dir} is a file. Give a directory.")
    check_script(job)


def by_hand(job: Job) -> bool:
    """Whether the command is started on each machine by a user or a scheduler."""
    if _several(job):
        return False
    return job.node_rank is not None or (job.machines is not None and job.machines != (1, 1))


def _several(job: Job) -> bool:
    return job.slurm or job.hostfile is not None or (job.node_rank is None and has_hostfile())


def split_arguments(text: str, option: str) -> list[str]:
    """Return the arguments in the value of an option. Raises CommandLineError if a quotation is open.

    >>> split_arguments("-o 'a b'", "--launcher-args")
    ['-o', 'a b']
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise CommandLineError(f"{option} {text}: {error}.") from None


def command_line(job: Job) -> list[str]:
    """Return the arguments of `shardwise run` that make a job.

    >>> command_line(Job("train.py", ("--lr", "1"), nproc=2, quiet=True, export=("A=1",)))
    ['--nproc', '2', '--quiet', '--export', 'A=1', 'train.py', '--lr', '1']
    """
    found: list[str] = []
    hints = get_type_hints(Job, include_extras=True)
    for field in dataclasses.fields(Job):
        value = getattr(job, field.name)
        settings = next((one for one in get_args(hints[field.name]) if isinstance(one, OptionInfo)), None)
        if settings is None or value == field.default:
            continue
        option = str(settings.default).partition("/")[0]  # in an annotation this is the first name
        if value is True:
            found.append(option)
        else:
            found += [part for one in (value if isinstance(value, tuple) else (value,)) for part in (option, str(one))]
    return [*found, job.script, *job.args]


def check_script(job: Job) -> None:
    """Check that the script of a job is there. Raises CommandLineError with names that are close."""
    if job.module:
        return
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
