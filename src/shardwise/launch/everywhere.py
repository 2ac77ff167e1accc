"""Runs one command line on all machines of a hostfile at once.

A signal to this process ends the ssh clients. A remote command then ends when it next writes to its output.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence

from shardwise.launch.hosts import is_this_machine
from shardwise.launch.interrupts import Interrupts
from shardwise.launch.output import OutputChannel, OutputReader, standard_screens
from shardwise.launch.runners.ssh import client, explain, need, started

NOT_REACHED = 255
"""Exit code of the ssh client if it does not reach a machine."""

_POLL_S = 0.05
_DRAIN_S = 2.0
_END_S = 2.0


def run_everywhere(
    hosts: Sequence[str],
    command: str,
    port: int | None = None,
    args: Sequence[str] = (),
    name: str = "shardwise hosts run",
) -> int:
    """Run a command line of the shell on hosts, in the home directory and without input; show its output by host.

    Args:
        hosts: names; this machine is used without ssh.
        command: command line.
        port: of the ssh servers; None: as configured.
        args: further arguments of ssh.
        name: of the command that the user has given, for messages.

    Returns:
        0, or the exit code of the first host in the list on which the command failed (128 + signal if killed), or
            `NOT_REACHED`, or 128 + the signal that ended this function.

    Raises:
        LaunchError: ssh is missing.
    """
    here = [is_this_machine(host) for host in hosts]
    if not all(here):
        need("ssh")
    out, err = standard_screens()
    reader = OutputReader()
    width = max(map(len, hosts))
    channels: dict[tuple[int, int], OutputChannel] = {}
    received: list[signal.Signals] = []

    def show(number: int, descriptor: int, stream: int) -> None:
        screen, tag = out if stream == 1 else err, f"[{hosts[number]:<{width}}] "
        channels[number, stream] = OutputChannel(-1, screen, tag.encode())
        reader.add(descriptor, channels[number, stream])

    processes = []
    with Interrupts(received.append, lambda: None, lambda sig: None):
        try:
            for number, host in enumerate(hosts):
                argv = ["sh", "-c", f"cd; {command}"] if here[number] else client(host, command, port, args)
                processes.append(started(argv, {}, None, number, show))
            while not received and _running(processes):
                time.sleep(_POLL_S)
        finally:
            for sig in (signal.SIGTERM, signal.SIGKILL):
                _end(processes, sig)
            deadline = time.monotonic() + _DRAIN_S
            for channel in channels.values():
                channel.closed.wait(max(0.0, deadline - time.monotonic()))
            reader.stop()
    if received:
        return 128 + received[0]
    first = 0
    for number, (host, process) in enumerate(zip(hosts, processes, strict=True)):
        code = process.returncode if process.returncode >= 0 else 128 - process.returncode
        text = channels[number, 2].text().strip()
        meaning = explain(text) if code == NOT_REACHED else ""
        if code:
            how = f"not reached: {text.splitlines()[-1].rstrip('.')}. {meaning}" if meaning else f"exit code {code}"
            err.write(f"{name}: {host}: {how}.\n".encode())
        first = first or code
    return first


def _running(processes: Sequence[subprocess.Popen[bytes]]) -> list[subprocess.Popen[bytes]]:
    return [process for process in processes if process.poll() is None]


def _end(processes: Sequence[subprocess.Popen[bytes]], sig: signal.Signals) -> None:
    """Send a signal to the process groups that still run, and wait for them."""
    for process in _running(processes):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sig)
    deadline = time.monotonic() + _END_S
    while _running(processes) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
