"""Ways to start the agents of a job on several machines, one class each."""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
from collections.abc import Callable, Sequence
from typing import Protocol

from shardwise.errors import CommandLineError

RUNNERS = ("ssh", "pdsh", "slurm", "openmpi", "mpich", "impi")
"""Names of `--launcher`."""

MODULE = "shardwise.launch.machine"
"""Module of the agent."""

ASSIGNMENT = "SHARDWISE_AGENT"
"""Variable with the line of `Runner.start`, where a runner passes on no standard input (pdsh)."""

NODE = "SHARDWISE_NODE"
"""Variable with the number of an agent's machine, where each one is started by itself (ssh)."""

NUMBERS = {
    "slurm": "SLURM_PROCID",
    "openmpi": "OMPI_COMM_WORLD_RANK",
    "mpich": "PMI_RANK",
    "impi": "PMI_RANK",
}
"""Variables with this number by `--launcher`; the machine's name overrules it. No others are read, because a job of
Slurm has SLURM_PROCID also where mpirun starts the agents."""


class Started(Protocol):
    """The started agents, as far as this machine sees them."""

    def ended(self) -> dict[int, str]:
        """Return, by machine, how its agent or the connection to it has ended, in words; running ones are left out."""

    def close(self) -> None:
        """End what is left of the runner on this machine."""


Show = Callable[[int, int, int], None]
"""Takes over a descriptor to read output from: the machine's number, the descriptor, and 1 (output) or 2 (errors)."""


class Runner(Protocol):
    """Starts an agent on each machine at once."""

    def start(self, machines: Sequence[str], line: str, show: Show) -> Started:
        """Start the agents of machines by name. `line` is for the standard input of each, or the variable `ASSIGNMENT`.

        Raises LaunchError if the runner's program is missing.
        """


@dataclasses.dataclass(frozen=True)
class AgentCommand:
    """The command of an agent, and options of the runner.

    Attributes:
        python: interpreter on all machines.
        directory: current directory there.
        variables: environment of the command itself, as NAME=VALUE; visible to users of the machines.
        port: of the ssh servers; None: as configured.
        args: further arguments of the runner's program.
        setup: shell script to source first; None: none.
    """

    python: str
    directory: str
    variables: tuple[str, ...] = ()
    port: int | None = None
    args: tuple[str, ...] = ()
    setup: str | None = None

    def shell(self, *variables: str) -> str:
        """Return the agent's command line of the shell, with further variables."""
        parts = [f"cd {shlex.quote(self.directory)}"]
        if self.setup is not None:  # a name without a slash would be looked up in PATH
            parts.append(f". {shlex.quote(os.path.join(self.directory, self.setup))}")
        command = ("exec", "env", *variables, *self.variables, self.python, "-u", "-m", MODULE)
        return " && ".join([*parts, shlex.join(command)])


def local_shell() -> str:
    """Return bash if this machine has it, because most scripts to source are written for it; else sh."""
    return "bash" if shutil.which("bash") else "sh"


def runner_of(name: str, command: AgentCommand) -> Runner:
    """Return a runner by its name. Raises CommandLineError if there is none of that name."""
    from shardwise.launch.runners.programs import PROGRAMS, ProgramRunner
    from shardwise.launch.runners.ssh import SshRunner

    if name == "ssh":
        return SshRunner(command)
    if name in PROGRAMS:
        return ProgramRunner(name, command)
    raise CommandLineError(f"--launcher {name}: expected one of {', '.join(RUNNERS)}.")
