"""Starts agents through the OpenSSH client, with connection reuse; on this machine directly.

The client never asks for a password, and checks host keys as the user's configuration says.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from typing_extensions import override

from shardwise.errors import LaunchError
from shardwise.launch.hosts import is_this_machine
from shardwise.launch.runners import NODE, AgentCommand, Runner, Show, Started, local_shell

CONNECT_S = 10
_MEANINGS = {
    "permission denied": "Its ssh server asks for a password or refuses the key: set up a key without a passphrase, or "
    "an ssh agent, for example by `shardwise hosts setup-keys`",
    "host key verification failed": "Its host key is not the known one, or not known: compare it, then `ssh-keyscan "
    "HOST >> ~/.ssh/known_hosts`, or `ssh-keygen -R HOST` if the machine was installed anew",
    "could not resolve hostname": "The name is not known: write its address into the hostfile, or a line into "
    "/etc/hosts",
    "connection refused": "No ssh server listens there: start it, or give its port with --ssh-port",
    "timed out": "It does not answer: it is down, or a firewall drops the packets",
    "no route to host": "There is no route to it: it is down, or in another network",
    "no such file or directory": "The interpreter or the directory is not there: all machines need the same paths; "
    "--python names another interpreter",
    "not found": "The interpreter is not there: give its path on all machines with --python",
    "no module named": "Its Python lacks shardwise: install the same environment on all machines",
}
"""Parts of messages, in small letters, and what they mean."""


def explain(text: str) -> str:
    """Return what a message of ssh or a remote shell means, and what to do; empty if it is not known."""
    small = text.lower()
    return next((meaning for part, meaning in _MEANINGS.items() if part in small), "")


class _Connections(Started):
    """One process of ssh, or the agent itself, for each machine."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self._processes = processes

    @override
    def ended(self) -> dict[int, str]:
        codes = {number: process.poll() for number, process in enumerate(self._processes)}
        return {number: f"ended with exit code {code}" for number, code in codes.items() if code is not None}

    @override
    def close(self) -> None:
        for process in self._processes:
            with contextlib.suppress(OSError):
                process.terminate()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=2.0)
            process.kill()


class SshRunner(Runner):
    """Runs one client for each machine."""

    def __init__(self, command: AgentCommand) -> None:
        self._command = command

    def argv(self, host: str, number: int) -> list[str]:
        """Return the command that starts the agent on a machine."""
        command = self._command
        line = command.shell(f"{NODE}={number}")
        if is_this_machine(host):
            return [local_shell(), "-c", line]
        folder = Path.home() / ".ssh"
        shared = ("ControlMaster=auto", f"ControlPath={folder}/shardwise-%C", "ControlPersist=60")
        # A longer path is an error of ssh: 107 bytes with the 40 of %C and 17 that ssh adds.
        fits = len(os.fsencode(f"{folder}/shardwise-")) + 40 + 17 <= 107
        settings = shared if fits and folder.is_dir() else ()
        return client(host, line, command.port, command.args, settings)

    @override
    def start(self, machines: Sequence[str], line: str, show: Show) -> Started:
        if not all(map(is_this_machine, machines)):
            need("ssh")
        return _Connections(
            [started(self.argv(name, number), {}, line, number, show) for number, name in enumerate(machines)]
        )


def need(program: str) -> None:
    """Raise LaunchError if a program of OpenSSH is missing."""
    if shutil.which(program) is None:
        raise LaunchError(f"There is no program {program} here. Install the OpenSSH client, or use another --launcher.")


def host_of_alias(name: str, args: Sequence[str]) -> str:
    """Return the host name or address that the configuration of ssh has for a name; the name if it has none."""
    try:
        done = subprocess.run(["ssh", "-G", *args, name], capture_output=True, text=True, timeout=CONNECT_S)
    except (OSError, subprocess.TimeoutExpired):
        return name
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    return next((line[1] for line in lines if line[0] == "hostname" and len(line) == 2), name)


def client(host: str, remote: str, port: int | None, args: Sequence[str], settings: Sequence[str] = ()) -> list[str]:
    """Return the command of the ssh client that runs a command line of the remote shell on a host.

    `port` None: as configured. `args` are further arguments of the client, `settings` further options.
    """
    alive = ("BatchMode=yes", f"ConnectTimeout={CONNECT_S}", "ServerAliveInterval=5", "ServerAliveCountMax=2")
    flags = [part for setting in (*alive, *settings) for part in ("-o", setting)]
    return ["ssh", "-T", *([] if port is None else ["-p", str(port)]), *flags, *args, host, remote]


def started(
    argv: Sequence[str], variables: dict[str, str], line: str | None, number: int, show: Show
) -> subprocess.Popen[bytes]:
    """Start a process on this machine, in a session of its own because Ctrl-C is the launcher's. It gets a line on
    standard input (None: the input is empty), and its output is shown.
    """
    pipe, source = subprocess.PIPE, subprocess.DEVNULL if line is None else subprocess.PIPE
    environment = {**os.environ, **variables}
    process = subprocess.Popen(argv, stdin=source, stdout=pipe, stderr=pipe, env=environment, start_new_session=True)
    assert process.stdout is not None and process.stderr is not None
    for stream, file in ((1, process.stdout), (2, process.stderr)):
        show(number, os.dup(file.fileno()), stream)
        file.close()
    if line is None:
        return process
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it has ended; the reason is in its output
        process.stdin.write(line.encode() + b"\n")
        process.stdin.close()
    return process
