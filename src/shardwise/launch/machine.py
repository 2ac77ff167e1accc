"""The process of an agent on one of several machines: `python -m shardwise.launch.machine`.

It gets one line on standard input, or in a variable: the job, the launcher's addresses and the job's secret. It
reports the facts of its machine, and does what the coordinator decides. If the launcher is lost, it ends its ranks.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.errors import LaunchError, ShardwiseError
from shardwise.launch import facts, local, reach, wire
from shardwise.launch.agent import Agent
from shardwise.launch.coordinator import GRACE_S, Plan
from shardwise.launch.hosts import is_this_machine
from shardwise.launch.interfaces import interfaces, of_address
from shardwise.launch.interrupts import Interrupts
from shardwise.launch.job import Job, check_script
from shardwise.launch.output import standard_screens
from shardwise.launch.placement import Host, find_devices, place
from shardwise.launch.runners import ASSIGNMENT, NODE, NUMBERS
from shardwise.launch.workers import worker_environment

POLL_S = 0.05
CONNECT_S = 20.0


def main() -> None:
    """Run the agent to the end of the job."""
    line = os.environ.pop(ASSIGNMENT, "") or sys.stdin.readline()
    # Nothing on this machine reads the line again, and standard input is no terminal.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    try:
        given = json.loads(line)
        secret, machines = bytes.fromhex(given["secret"]), given["machines"]
    except (ValueError, KeyError, TypeError):
        sys.exit("shardwise agent: this command is for `shardwise run`, which starts it on each machine.")
    try:
        here = machines[_number([machine["name"] for machine in machines], given["job"]["launcher"])]
        number = here["number"]
        os.environ.update(given["variables"])
        given["job"]["setup"] = None  # the runner has sourced it
        prepare()
        connection, own = wire.connect(here["address"], here["port"], secret, CONNECT_S)
    except ShardwiseError as error:
        sys.exit(f"shardwise agent: {error}")
    messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    channel = wire.Channel(connection, messages.put, lambda reason: messages.put(None))
    channel.begin()
    try:
        host = Host(here["name"], tuple(here["slots"]))
        sys.exit(0 if serve(given, number, host, own, channel, messages) is not None else 1)
    except ShardwiseError as error:
        channel.send({"node": number, "refused": str(error)})
        messages.get()  # until the launcher has read it
        sys.exit(1)


def prepare() -> None:
    """Import torch and look for devices. Call it before the connection is made: both can hold the GIL for seconds, in
    which no beat is sent, and the other end would count this one as lost.
    """
    local.import_torch()
    find_devices()


def _number(names: Sequence[str], launcher: str) -> int:
    """Return the number of this machine: that of ssh, or by name, else that of the runner, which may sort names."""
    own = os.environ.pop(NODE, "")  # not for the ranks
    if own.isdigit():
        return int(own)
    given = os.environ.get(NUMBERS.get(launcher, ""), "")
    if given.isdigit() and is_this_machine(names[int(given)]):
        return int(given)  # the other names are not looked up
    here = [number for number, name in enumerate(names) if is_this_machine(name)]
    if len(here) == 1:
        return here[0]
    if given.isdigit():
        return int(given)
    raise LaunchError(f"{socket.gethostname()} is {len(here)} of the machines {', '.join(names)}; expected one.")


def serve(
    given: Mapping[str, Any],
    number: int,
    host: Host,
    own: str,
    channel: wire.Channel,
    messages: queue.SimpleQueue[dict[str, Any] | None],
) -> dict[str, Any] | None:
    """Run the ranks of this machine as the launcher decides; return its last message, or None if it is lost.

    Args:
        given: the fields of the job, its variables, and its name (`run_id`).
        number: of this machine in the job.
        host: name and slots of this machine.
        own: address of this machine on the way to the launcher.
        channel: connection to the launcher.
        messages: messages of the launcher; None: it is lost.

    Raises:
        ShardwiseError: the ranks cannot be started here.
    """
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in given["job"].items()
    }
    # Some runners give one of their processes a terminal.
    wanted = Job(**{**fields, "tags": "always" if fields["tags"] == "auto" else fields["tags"]})
    check_script(wanted)
    placement = place(wanted.resources, find_devices(), host)
    cores = local.cores_of(wanted, placement)
    known = interfaces()
    interface = of_address(own, known)
    secret = bytes.fromhex(given["secret"])
    echo = reach.EchoServer(own, secret)
    out, err = standard_screens()
    with (
        local.display_of(wanted, out, err) as display,
        local.surroundings(wanted, display, interface, given["run_id"]) as around,
    ):
        agent = Agent(wanted, placement, cores, around)
        found = facts.facts_of(
            wanted,
            worker_environment(wanted, placement, interface=""),
            interface=interface,
            address=own,
            port=echo.port,
            speed=next((one.speed for one in known if one.name == interface), None),
            devices=list(placement.devices or ()),
            processes=placement.nproc,
        )
        channel.send({"node": number, "facts": dataclasses.asdict(found)})

        def tell(kind: str, content: Any = None) -> None:
            channel.send({"event": kind, "content": content})

        def received(message: dict[str, Any]) -> None:
            if message["do"] == "skip_grace_period":
                agent.skip_grace_period()  # at once, because the main thread may be in a grace period
            else:
                messages.put(message)

        channel.on_message = received
        leaving: list[signal.Signals] = []
        try:
            with Interrupts(leaving.append, agent.skip_grace_period, agent.forward):
                while True:
                    while leaving:
                        tell("leaving", int(leaving.pop()))
                    try:
                        message = messages.get(timeout=POLL_S)
                    except queue.Empty:
                        for kind, content in agent.poll():
                            tell(kind, _plain(content))
                        continue
                    if message is None:  # the launcher is lost
                        agent.stop(signal.SIGTERM, GRACE_S)
                        return None
                    if message["do"] == "end":
                        return message
                    if message["do"] == "reach":
                        tell("reached", [reach.reach(secret=secret, **one) for one in message["machines"]])
                    else:
                        echo.close()
                        _obey(message, agent, tell)
        finally:
            agent.stop(signal.SIGKILL, 0.0)
            agent.close()
            echo.close()


def _obey(message: dict[str, Any], agent: Agent, tell: Any) -> None:
    kind = message["do"]
    if kind == "serve":
        tell("serving", [message["address"], agent.serve(message["address"], message["port"])])
    elif kind == "start":
        plan = message["plan"]
        agent.start(Plan(**{**plan, "slots": tuple(plan["slots"])}))
    elif kind == "stop":
        tell("stopped", _plain(agent.stop(signal.Signals(message["signal"]), message["grace"])))
    elif kind == "note_ended":
        agent.note_ended(message["attempt"], message["rank"], message["how"])
    elif kind == "forward":
        agent.forward(signal.Signals(message["signal"]))


def _plain(content: Any) -> Any:
    if isinstance(content, list):
        return [_plain(item) for item in content]
    return dataclasses.asdict(content) if dataclasses.is_dataclass(content) else content  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
