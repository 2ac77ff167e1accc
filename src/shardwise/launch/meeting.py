"""A job whose machines come by themselves: the same command is started on each, by hand or by a scheduler.

The machine with the address `--master-addr` runs the launcher, which listens there; the others connect to it. All of
them know one secret: that of the variable `SECRET_VARIABLE`, or of a file in the home directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import queue
import secrets
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from shardwise.comm.environment import is_loopback
from shardwise.comm.setup import DEFAULT_PORT
from shardwise.errors import CommandLineError, LaunchError, ShardwiseError
from shardwise.launch import local, machine, wire
from shardwise.launch.facts import exported
from shardwise.launch.hosts import is_this_machine
from shardwise.launch.interfaces import interfaces
from shardwise.launch.job import Job
from shardwise.launch.machines import JOIN_S, NOTICE_S, command_of, run_on_machines
from shardwise.launch.placement import Host, check_resources, find_devices, place

SECRET_VARIABLE = "SHARDWISE_SECRET"
"""Variable with the secret of a job."""

NAMED_S = 60.0
"""Seconds within which the first machine must have the name of --master-addr."""

_SHORTEST = 16


def meet(job: Job) -> int:
    """Run this machine's part of the job to its end; return the exit code of the job.

    Raises:
        CommandLineError: there is no secret.
        LaunchError: the launcher cannot listen, or be reached, or a machine cannot be used.
    """
    assert job.master_addr is not None
    local.import_torch()
    host = Host(socket.gethostname(), ())
    check_resources(dataclasses.replace(job.resources, num_nodes=None))
    place(job.resources, find_devices(), host)  # an error comes before the others are waited for
    port = DEFAULT_PORT if job.master_port is None else job.master_port
    first = job.node_rank == 0 if job.node_rank is not None else is_this_machine(job.master_addr)
    secret = _secret(create=first)
    if first:
        return run_on_machines(job, [host], (_own_address(job, job.master_addr), port, secret))
    os.environ.update(exported(job.export))
    elastic = job.machines is not None and job.machines[0] != job.machines[1]
    while True:
        found = _join(job, host, port, secret)
        if found is not None:
            if found.get("message"):
                _say(found["message"])
            return int(found.get("exit_code", 0))
        _say(f"the connection to {job.master_addr}:{port} was lost")
        if not elastic:
            return 1


def _own_address(job: Job, name: str) -> str:
    """Return the address of a name of this machine for the other machines; wait for the name.

    Because Kubernetes publishes the name of a pod after its start, and may still give the address of the pod before it.
    Because some systems give a machine's own name a loopback address, the machine's only other address counts then.

    Raises:
        LaunchError: the name does not come, or this machine has not exactly one address for the others.
    """
    deadline = time.monotonic() + NAMED_S
    if not is_this_machine(name):
        _say(f"waiting for {name} to be a name of this machine, at most {NAMED_S:.0f} s")
    while not is_this_machine(name):
        if time.monotonic() > deadline:
            raise LaunchError(
                f"--node-rank 0: --master-addr {name} is no name of this machine ({socket.gethostname()}). Name the "
                "first machine; in Kubernetes by a headless Service with publishNotReadyAddresses."
            )
        time.sleep(0.2)
    address = socket.gethostbyname(name)
    if not is_loopback(address) or is_loopback(name) or job.machines in (None, (1, 1)):
        return address
    others = [one.address for one in interfaces() if one.address and not one.loopback]
    if len(others) != 1:
        raise LaunchError(
            f"--master-addr {name} is {address} on this machine, which other machines do not reach. Give an address of "
            f"their network; this machine has {', '.join(others) or 'none'}."
        )
    return others[0]


def _join(job: Job, host: Host, port: int, secret: bytes) -> dict[str, Any] | None:
    """Join the job; return the last message of the launcher, or None if it is lost."""
    assert job.master_addr is not None
    where = f"{job.master_addr}:{port}"
    machine.prepare()
    notice = threading.Timer(NOTICE_S, _say, [f"waiting for the launcher at {where}, which is not there yet"])
    notice.daemon = True
    notice.start()
    try:
        connection, own = wire.connect(job.master_addr, port, secret, JOIN_S)
    finally:
        notice.cancel()
    messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    channel = wire.Channel(connection, messages.put, lambda reason: messages.put(None))
    channel.begin()
    try:
        channel.send({"join": {"name": host.name, "rank": job.node_rank, "command": command_of(job)}})
        answer = messages.get()
        if answer is None or answer["do"] == "end":
            return answer
        given = {
            "job": dataclasses.asdict(dataclasses.replace(job, nodes=None, node_rank=None)),
            "variables": {},
            "run_id": answer["run_id"],
            "secret": secret.hex(),
        }
        host = Host(answer["name"], host.slots)
        try:
            return machine.serve(given, int(answer["number"]), host, own, channel, messages)
        except ShardwiseError as error:
            channel.send({"node": int(answer["number"]), "refused": str(error)})
            with contextlib.suppress(queue.Empty):
                messages.get(timeout=2.0)  # until the launcher has read it
            raise
    finally:
        channel.close()


def _say(line: str) -> None:
    print(f"shardwise run: {line.removeprefix('shardwise run: ')}", file=sys.stderr, flush=True)


def _secret(create: bool) -> bytes:
    """Return the secret of the job; make the file if there is none and `create` is set."""
    given = os.environ.pop(SECRET_VARIABLE, "")  # not for the ranks
    path = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "shardwise" / "secret"
    if not given:
        if create and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError), open(path, "x", opener=_private) as file:
                file.write(secrets.token_hex(32))
        try:
            given = path.read_text().strip()
        except OSError:
            raise CommandLineError(
                f"This machine has no secret of the job: {path} does not exist. Copy it from the machine with the "
                f"--master-addr, or set {SECRET_VARIABLE} to the same text on all machines."
            ) from None
    if len(given) < _SHORTEST:
        raise CommandLineError(f"{SECRET_VARIABLE} has {len(given)} characters; give {_SHORTEST} or more.")
    return hashlib.sha256(given.encode()).digest()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
