"""Runs a job on several machines: starts an agent on each, compares the machines, and lets the coordinator decide."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import queue
import secrets
import shlex
import signal
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from typing_extensions import override

from shardwise.comm.environment import is_loopback
from shardwise.errors import LaunchError
from shardwise.launch import facts, wire
from shardwise.launch.coordinator import Coordinator, Node, Outcome, Plan, Policy, Report, renumbered
from shardwise.launch.failure import Trouble
from shardwise.launch.interrupts import Interrupts
from shardwise.launch.job import Job
from shardwise.launch.local import end, sayer
from shardwise.launch.output import OutputChannel, OutputReader, Terminal, standard_screens
from shardwise.launch.pidfile import PidFile, pid_file
from shardwise.launch.placement import Host
from shardwise.launch.processes import Exit
from shardwise.launch.runners import AgentCommand, Started, runner_of
from shardwise.launch.runners.ssh import explain, host_of_alias

NOTICE_S = 5.0
"""Seconds after which machines that have not answered are named; then after twice as many, and so on."""
START_S = 120.0
"""Seconds after which a machine that has not answered is given up."""
JOIN_S = 600.0
"""Seconds to wait for machines that a user or a scheduler starts."""
LAST_CALL_S = 10.0
"""Seconds to wait for further machines when the least number has come."""
RETRY_S = 10.0
"""Seconds between attempts to start an agent on a lost machine again."""
_END_S = 5.0
"""Seconds for the agents to end after the last message."""

_LOOK_S = 0.1
_NAMED = 3
"""Machines that are named of those that have the same problem."""


class _RemoteLink:
    """The agent of another machine, as the coordinator sees it."""

    def __init__(self, channel: wire.Channel) -> None:
        self._channel = channel

    def serve(self, address: str, port: int | None) -> None:
        self._channel.send({"do": "serve", "address": address, "port": port})

    def start(self, plan: Plan) -> None:
        self._channel.send({"do": "start", "plan": dataclasses.asdict(plan)})

    def stop(self, sig: signal.Signals, grace: float | None) -> None:
        self._channel.send({"do": "stop", "signal": int(sig), "grace": grace})

    def note_ended(self, attempt: int, rank: int, how: str) -> None:
        self._channel.send({"do": "note_ended", "attempt": attempt, "rank": rank, "how": how})


@dataclasses.dataclass
class _Machine:
    """A machine of the job, as far as the launcher knows it. `rank` is its number, if a user has given one. `lost`: it
    had come by itself, and was lost before the start; another may come in its place.
    """

    host: Host
    address: str
    rank: int | None = None
    joined: bool = False
    node: Node | None = None
    start: tuple[Started, int] | None = None
    tried: float = 0.0
    errors: OutputChannel | None = None
    error: bytes = b""
    channel: wire.Channel | None = None
    facts: facts.Facts | None = None
    arrived: float = 0.0
    refused: str = ""
    lost: bool = False
    ended_at: float = 0.0
    adjacent: list[_Machine] = dataclasses.field(default_factory=list)
    reached: list[dict[str, Any]] | None = None


class _Errors(Terminal):
    """Standard error for the agent of a machine: a failed start that ends as the one before is not shown again."""

    def __init__(self, terminal: Terminal, machine: _Machine) -> None:
        self._terminal, self._machine = terminal, machine

    @override
    def write(self, data: bytes, raw: bool = False) -> None:
        machine = self._machine
        if not data or (machine.facts is None and data == machine.error):
            return
        machine.error = data
        self._terminal.write(data, raw)


Event = tuple[int, str, Any]


class Launcher:
    """One run of a job on several machines.

    With `meeting` (the address and port of the launcher, and the job's secret), `hosts` is this machine only, and
    others join by themselves.
    """

    def __init__(
        self,
        job: Job,
        hosts: Sequence[Host],
        out: Terminal,
        err: Terminal,
        meeting: tuple[str, int, bytes] | None = None,
    ) -> None:
        self._job, self._out, self._err = job, out, err
        self._say = sayer(job, err)
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._joins = meeting is not None
        self._least, most = job.machines or (len(hosts), len(hosts))
        self._most = most or len(hosts)
        if meeting is None:
            self._secret, port = secrets.token_bytes(32), 0
            self.machines = [_Machine(host, _address(host, hosts, job)) for host in hosts]
        else:
            address, port, self._secret = meeting
            self.machines = [_Machine(host, address, job.node_rank) for host in hosts]
        self._reader = OutputReader()
        self._listener = wire.Listener([machine.address for machine in self.machines], self._secret, port)
        self._run_id = uuid.uuid4().hex
        self._stopping: signal.Signals | None = None
        self._noted: list[dict[str, Any]] = []
        self._outcome: Outcome | None = None

    # -- the start ---------------------------------------------------------------------------------------------------

    def start(self, numbers: Sequence[int] | None = None) -> None:
        """Start an agent on each machine, or on those of some numbers."""
        job = self._job
        variables = facts.exported(job.export)
        python = job.python or sys.executable
        visible = tuple(f"{name}={value}" for name, value in variables.items() if name.startswith("PYTHON"))
        args = tuple(shlex.split(job.launcher_args))
        command = AgentCommand(python, os.getcwd(), visible, job.ssh_port, args, job.setup)
        given: dict[str, Any] = {
            "secret": self._secret.hex(),
            "run_id": self._run_id,
            "variables": variables,
            "job": dataclasses.asdict(job),
        }
        chosen = list(range(len(self.machines))) if numbers is None else list(numbers)
        before = self._starts
        for machine in (self.machines[number] for number in chosen):
            machine.start, machine.errors = None, None
            machine.channel, machine.facts, machine.node, machine.refused = None, None, None, ""
            machine.tried, machine.ended_at = time.monotonic(), 0.0
        given["machines"] = [
            {
                "number": number,
                "name": machine.host.name,
                "slots": machine.host.slots,
                "address": machine.address,
                "port": self._listener.port(machine.address),
            }
            for number, machine in ((number, self.machines[number]) for number in chosen)
        ]
        names = [self.machines[number].host.name for number in chosen]

        def show(position: int, descriptor: int, stream: int) -> None:
            self._show(chosen[position], descriptor, stream)

        started = runner_of("ssh" if self._joins else job.launcher, command).start(names, json.dumps(given), show)
        for position, number in enumerate(chosen):
            self.machines[number].start = started, position
        for old in before:
            if old not in self._starts:
                old.close()

    @property
    def _starts(self) -> list[Started]:
        """The last start of each machine."""
        return list(dict.fromkeys(machine.start[0] for machine in self.machines if machine.start is not None))

    def _ended(self) -> list[str]:
        """Return by machine how its agent has ended, as far as it is known here; empty: it has not."""
        found = {started: started.ended() for started in self._starts}
        return [
            "" if machine.start is None else found[machine.start[0]].get(machine.start[1], "")
            for machine in self.machines
        ]

    def _show(self, number: int, descriptor: int, stream: int) -> None:
        machine = self.machines[number]
        if stream == 1:
            channel = OutputChannel(-1, self._out)
        else:
            channel = machine.errors = OutputChannel(-1, _Errors(self._err, machine))
        self._reader.add(descriptor, channel)

    def gather(self) -> None:
        """Wait until all machines have reported their facts, or cannot."""
        began, notice = time.monotonic(), NOTICE_S
        enough: float | None = None
        limit = JOIN_S if self._joins else START_S
        while True:
            self._look()
            ready = [machine for machine in self.machines if machine.facts is not None and not machine.refused]
            missing = [machine for machine in self.machines if machine.facts is None and not machine.refused]
            present = sum(not machine.lost for machine in self.machines)
            to_come = self._most - present if self._joins else 0
            if not missing and to_come <= 0:
                return
            waited = time.monotonic() - began
            if len(ready) >= self._least < self._most and not missing:
                enough = enough or waited
                if waited - enough >= LAST_CALL_S:
                    return
            if self._stopping is not None:
                return
            if waited >= notice:
                notice *= 2
                names = [machine.host.name for machine in missing]
                names += [f"{to_come} that have not come"] if to_come > 0 else []
                more = max(0, to_come)
                self._say(
                    f"waiting for {len(missing) + more} of {present + more} machines after {waited:.0f} s: "
                    f"{', '.join(names)}"
                )
            if waited >= limit:
                for machine in missing:
                    machine.refused = f"has not answered within {limit:.0f} s"
                if to_come > 0 and len(ready) < self._least:
                    raise LaunchError(
                        f"{len(ready)} of at least {self._least} machines have come within {limit:.0f} s: "
                        f"{', '.join(machine.host.name for machine in ready)}."
                    )
                return
            self._handle(_LOOK_S)

    def reach(self, *, measure: bool = False) -> None:
        """Let each machine that has reported connect to the next and the last one of them."""
        ready = [machine for machine in self.machines if machine.facts is not None and not machine.refused]
        count = len(ready)
        if count == 1:
            return
        for number, machine in enumerate(ready):
            near = dict.fromkeys(((number + 1) % count, (number - 1) % count))
            machine.adjacent = [ready[other] for other in near]
            assert machine.channel is not None
            places = [(other.facts.address, other.facts.port) for other in machine.adjacent if other.facts]
            requested = [
                {"address": address, "port": port, "measure": measure and not place}
                for place, (address, port) in enumerate(places)
            ]
            machine.channel.send({"do": "reach", "machines": requested})
        deadline = time.monotonic() + START_S
        while any(machine.reached is None and not machine.refused for machine in ready):
            if self._stopping is not None:
                return
            if time.monotonic() > deadline:
                raise LaunchError("the machines have not tried their connections to each other.")
            self._handle(_LOOK_S, until=lambda: all(machine.reached is not None for machine in ready))

    def problems(self) -> list[str]:
        """Return why machines cannot be used, and their differences."""
        closed = [
            f"{machine.host.name}: cannot reach {other.host.name} at {other.facts.address}:{other.facts.port}: "
            f"{found['error']}. Ranks connect to each other: open TCP between the machines, in both directions."
            for machine in self.machines
            for other, found in zip(machine.adjacent, machine.reached or (), strict=False)
            if not machine.refused and not other.refused and other.facts is not None and found["error"]
        ]
        unusable = [machine for machine in self.machines if machine.refused]
        if self._least <= len(self.machines) - len(unusable):
            for machine in unusable:
                if not machine.lost:
                    self._say(f"{machine.host.name}: {machine.refused}. The job starts without this machine.")
            unusable = []
        refused = [f"{machine.host.name}: {machine.refused}" for machine in unusable]
        known = [(m.host.name, m.facts, m.arrived) for m in self.machines if m.facts is not None and not m.refused]
        differences = facts.differences(known) if len(known) > 1 and not self._job.unchecked else []
        return _together(refused + closed + differences)

    def _look(self) -> None:
        """Take in new connections, and notice runners that have ended before their agent has reported."""
        with contextlib.suppress(queue.Empty):
            while True:
                connection, _ = self._listener.arrived.get_nowait()
                self._admit(connection)
        for machine, how in zip(self.machines, self._ended(), strict=True):
            if not how:
                continue
            machine.ended_at = machine.ended_at or time.monotonic()
            quiet = machine.errors is None or machine.errors.closed.is_set()
            if machine.channel is None and not machine.refused and (quiet or time.monotonic() > machine.ended_at + 2):
                text = "" if machine.errors is None else machine.errors.text().strip()
                last = text.splitlines()[-1] if text else ""
                machine.refused = ". ".join(part for part in (how, last.rstrip("."), explain(text)) if part)

    def _admit(self, connection: Any) -> None:
        mine: list[int] = []

        def message(content: dict[str, Any]) -> None:
            if "join" in content:
                self._events.put((-1, "join", (content["join"], channel)))
            elif "node" in content:
                mine[:] = [int(content["node"])]
                kind = "refused" if "refused" in content else "facts"
                self._events.put((mine[0], kind, (content[kind], channel, time.time())))
            elif mine:
                self._events.put((mine[0], content["event"], content.get("content")))

        def ended(reason: str) -> None:
            self._events.put((-1, "lost", (channel, reason)))

        channel = wire.Channel(connection, message, ended)
        channel.begin()

    def _handle(
        self, wait: float, coordinator: Coordinator | None = None, until: Callable[[], bool] = lambda: False
    ) -> None:
        """Handle events until there are none for `wait` seconds, or `until` is true."""
        while not until():
            try:
                number, kind, content = self._events.get(timeout=wait)
            except queue.Empty:
                return
            if kind == "join":
                self._take_in(*content)
                continue
            if kind == "lost":
                channel, content = content
                number = next((n for n, one in enumerate(self.machines) if one.channel is channel), -1)
                if number < 0:
                    continue  # it has not joined, or has left
            machine = self.machines[number]
            if kind == "refused":
                machine.refused = content[0]
                content[1].send({"do": "end", "message": content[0]})
                if coordinator is not None and machine.node is not None:  # its ranks or store could not be started
                    coordinator.lost(machine.node, content[0])
            elif kind == "facts":
                machine.facts, machine.channel = facts.Facts(**content[0]), content[1]
                machine.arrived = content[2]
                if coordinator is not None:
                    self._join(machine, coordinator)
            elif kind == "reached":
                machine.reached = content
            elif kind == "lost" and machine.node is None:
                if not machine.refused:
                    machine.refused = f"the connection to its agent was lost: {content}"
                    machine.lost = machine.joined
                    self._say(f"{machine.host.name}: {machine.refused}")
            elif coordinator is not None:
                node = machine.node
                if node is None:
                    continue
                if kind == "say":
                    content = f"{machine.host.name}: {content}"
                coordinator.handle(node, kind, self._decoded(machine, kind, content))
                if coordinator.outcome is not None:
                    return

    def _take_in(self, given: Mapping[str, Any], channel: wire.Channel) -> None:
        """Give a machine that has come by itself its number, or refuse it."""
        name, rank = str(given["name"]), given["rank"]
        present = [machine for machine in self.machines if not _gone(machine)]
        same = next((machine for machine in present if rank is not None and machine.rank == rank), None)
        if same is not None and same.node is not None and same.host.name.partition("#")[0] == name:
            # Its connection broke, and it has noticed before the launcher has.
            assert same.channel is not None
            # The event first: the end closes the connection, which would otherwise be the reason.
            self._events.put((-1, "lost", (same.channel, "it has come again")))
            same.channel.send({"do": "end", "message": "this machine has come again", "exit_code": 1})
            present.remove(same)
            same = None
        if given["command"] != command_of(self._job):
            why = f"its command is `{given['command']}`, and that of the first machine `{command_of(self._job)}`"
        elif same is not None:
            why = f"another machine has --node-rank {rank}"
        elif not self._joins or (len(present) >= self._most and self._least == self._most):
            why = f"the job has its {len(present)} machines"
        else:
            number = len(self.machines)
            if any(machine.host.name == name for machine in present):
                name = f"{name}#{number}"
            self.machines.append(_Machine(Host(name, ()), "", rank, joined=True, channel=channel))
            channel.send({"do": "take", "number": number, "run_id": self._run_id, "name": name})
            return
        self._say(f"{name} is refused: {why}.")
        channel.send({"do": "end", "message": f"the job refuses this machine: {why}", "exit_code": 1})

    def _join(self, machine: _Machine, coordinator: Coordinator) -> None:
        """Compare a machine that has come during the job with the others, and let the coordinator use it."""
        known = [one for one in self.machines if one.facts is not None and one is not machine and not _gone(one)]
        assert machine.facts is not None and machine.channel is not None
        both = [(one.host.name, one.facts, one.arrived) for one in (*known[:1], machine) if one.facts is not None]
        found = facts.differences(both) if len(both) > 1 and not self._job.unchecked else []
        if found:
            machine.refused = found[0]
            for line in found:
                self._say(f"not taken in: {line}")
            machine.channel.send({"do": "end", "message": "not taken in: " + " ".join(found), "exit_code": 1})
            return
        machine.node = _node(machine)
        coordinator.join(machine.node)

    def _retry(self) -> None:
        """Start agents again on lost machines of the hostfile, and release those of machines that have left."""
        for machine in self.machines:
            if machine.node is not None and machine.node.leaves and machine.node.lost and machine.channel is not None:
                machine.channel.send({"do": "end", "message": "this machine has left the job", "exit_code": 143})
                machine.channel = None
        if self._least < self._most and self._job.launcher == "ssh":
            late = time.monotonic() - RETRY_S
            again = [n for n, one in enumerate(self.machines) if _gone(one) and not one.joined and one.tried < late]
            if again:
                self.start(again)

    def _decoded(self, machine: _Machine, kind: str, content: Any) -> Any:
        assert machine.facts is not None
        ahead, host = machine.arrived - machine.facts.clock, machine.host.name
        if kind == "finished":
            return renumbered(Report(tuple(Exit(**one) for one in content)), host, ahead).exits
        if kind == "stopped":
            exits = tuple(Exit(**one) for one in content["exits"])
            troubles = tuple(Trouble(**{**one, "exit": Exit(**one["exit"])}) for one in content["troubles"])
            killed = {int(rank): state for rank, state in content["killed"].items()}
            report = Report(exits, killed, troubles, tuple(content["frozen"]), content["grace"])
            return renumbered(report, host, ahead)
        if kind == "leaving":
            return signal.Signals(content)
        if kind == "recovered":
            times = {name: content[name] for name in ("ready", "restored", "stepped")}
            return content | {name: None if value is None else value + ahead for name, value in times.items()}
        return content

    # -- the job -----------------------------------------------------------------------------------------------------

    def run(self, pids: PidFile | None = None) -> Outcome:
        """Start the job and run it to its end; `pids` takes the process ids of the ranks.

        Raises LaunchError if a machine cannot be used.
        """
        self.start()
        self.gather()
        if not self._job.unchecked and self._stopping is None:
            self.reach()
        if self._stopping is None:
            problems = self.problems()
            if problems:
                raise LaunchError("The job is not started.\n" + "\n".join(f"  {line}" for line in problems))
            self._outcome = self._run_ranks(pids)
        else:
            text = f"shardwise run: received {self._stopping.name} before the start of the job."
            self._outcome = Outcome(128 + self._stopping, text)
        return self._outcome

    def _run_ranks(self, pids: PidFile | None) -> Outcome:
        job = self._job
        nodes = []
        ready = [machine for machine in self.machines if machine.facts is not None and not machine.refused]
        for machine in sorted(ready, key=lambda one: self._most if one.rank is None else one.rank):
            machine.node = _node(machine)
            nodes.append(machine.node)
        elastic = self._least < self._most
        policy = Policy(
            job.max_restarts,
            job.min_nproc,
            self._least if elastic else None,
            self._most,
            JOIN_S if elastic else 0.0,
            self.machines[0].address if self._joins else job.master_addr,
            None if self._joins else job.master_port,
        )
        coordinator = Coordinator(nodes, policy, self._say, pids)
        coordinator.begin()
        while coordinator.outcome is None:
            self._look()
            self._handle(_LOOK_S, coordinator)
            if self._stopping is not None:
                sig, self._stopping = self._stopping, None
                coordinator.signalled(sig)
            while self._noted:
                self._send_all(self._noted.pop(0))
            self._retry()
            coordinator.look()
        return coordinator.outcome

    def _send_all(self, message: dict[str, Any]) -> None:
        for machine in self.machines:
            if machine.channel is not None:
                machine.channel.send(message)

    def stop(self, sig: signal.Signals) -> None:
        """Note that a signal ends the job; safe in a signal handler."""
        self._stopping = sig

    def note(self, message: dict[str, Any]) -> None:
        """Note a message for all agents while the job runs; safe in a signal handler."""
        self._noted.append(message)

    def close(self) -> None:
        """End all agents, and show the rest of their output."""
        how = self._outcome or Outcome(1, "the job is not started; the first machine says why.")
        self._send_all({"do": "end", "message": how.message, "exit_code": how.exit_code})
        deadline = time.monotonic() + _END_S
        count = sum(machine.start is not None for machine in self.machines)
        while sum(map(bool, self._ended())) < count and time.monotonic() < deadline:
            time.sleep(0.02)
        for started in self._starts:
            started.close()
        self._listener.close()
        for machine in self.machines:
            if machine.channel is not None:
                machine.channel.close()
        self._reader.stop()


def run_on_machines(job: Job, hosts: Sequence[Host], meeting: tuple[str, int, bytes] | None = None) -> int:
    """Run a job on several machines; return its exit code. Arguments as of `Launcher`.

    Raises LaunchError if a machine cannot be used.
    """
    out, err = standard_screens()
    launcher = Launcher(job, hosts, out, err, meeting)
    interrupts = Interrupts(
        launcher.stop,
        functools.partial(launcher.note, {"do": "skip_grace_period"}),
        lambda sig: launcher.note({"do": "forward", "signal": int(sig)}),
    )
    with interrupts, contextlib.ExitStack() as stack:
        try:
            pids = stack.enter_context(pid_file(job.pid_file, sayer(job, err)))
            outcome = launcher.run(pids)
        finally:
            launcher.close()
    return end(outcome, err)


class Compared(NamedTuple):
    """A machine: name, facts, its clock minus that of this machine in seconds; of the connection to the next machine
    the bytes per second and the round trip in seconds (None: not measured).
    """

    name: str
    facts: facts.Facts | None
    ahead: float
    rate: float | None = None
    trip: float | None = None


def compare(job: Job, hosts: Sequence[Host]) -> tuple[list[Compared], list[str]]:
    """Return the machines, and why they cannot be used together."""
    out, err = standard_screens()
    launcher = Launcher(job, hosts, out, err)
    try:
        launcher.start()
        launcher.gather()
        launcher.reach(measure=True)
        rows = []
        for machine in launcher.machines:
            ahead = 0.0 if machine.facts is None else machine.facts.clock - machine.arrived
            measured = dict(machine.reached[0]) if machine.reached else {}
            rows.append(Compared(machine.host.name, machine.facts, ahead, measured.get("rate"), measured.get("trip")))
        return rows, launcher.problems()
    finally:
        launcher.close()


def _together(lines: Sequence[str]) -> list[str]:
    """Return lines of the form "machine: problem", one for each problem.

    >>> _together(["a: is down", "b: is full", "c: is down", "d: is down", "e: is down", "f: is down"])
    ['a, c, d and 2 others: is down', 'b: is full']
    """
    names: dict[str, list[str]] = {}
    for line in lines:
        name, _, problem = line.partition(": ")
        names.setdefault(problem, []).append(name)
    found = []
    for problem, some in names.items():
        more = len(some) - _NAMED
        listed = some if more <= 1 else some[:_NAMED]
        text = ", ".join(listed) + (f" and {more} others" if more > 1 else "")
        found.append(f"{text}: {problem}")
    return found


def _gone(machine: _Machine) -> bool:
    """Whether a machine was refused, is lost, or has left."""
    return bool(machine.refused or (machine.node is not None and machine.node.lost))


def _node(machine: _Machine) -> Node:
    assert machine.channel is not None and machine.facts is not None
    slots = list(range(machine.facts.processes))
    return Node(machine.host.name, _RemoteLink(machine.channel), slots, machine.facts.address)


def command_of(job: Job) -> str:
    """Return the command of the ranks, to compare machines that come by themselves."""
    return shlex.join([job.script, *job.args])


def _address(host: Host, hosts: Sequence[Host], job: Job) -> str:
    """Return the address of this machine for the agent of a host."""
    found = _near(host, job)
    if is_loopback(found) and len(hosts) > 1:
        others = [near for near in (_near(other, job) for other in hosts) if not is_loopback(near)]
        if not others:
            raise LaunchError(f"{host.name}: has a loopback address only. Name the machines by addresses of a network.")
        return others[0]
    return found


def _near(host: Host, job: Job) -> str:
    """Return the address of this machine on the route to a host, whose name may be one of ssh's configuration only."""
    try:
        return wire.near_address(host.name)
    except LaunchError:
        known = host_of_alias(host.name, shlex.split(job.launcher_args)) if job.launcher in ("ssh", "pdsh") else ""
        if known in ("", host.name):
            raise
        return wire.near_address(known)
