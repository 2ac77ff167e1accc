"""Decisions about the attempts of a job on several machines, with imagined agents."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

from shardwise.launch.coordinator import Coordinator, Node, Plan, Policy, Report
from shardwise.launch.failure import Trouble
from shardwise.launch.processes import Exit

BUG, LOST = "ValueError: bad batch", "RuntimeError: Connection closed by peer [10.0.0.1]"


class Imagined:
    """An agent that keeps the coordinator's messages."""

    def __init__(self) -> None:
        self.messages: list[tuple[Any, ...]] = []

    def serve(self, address: str, port: int | None) -> None:
        self.messages.append(("serve", address, port))

    def start(self, plan: Plan) -> None:
        self.messages.append(("start", plan))

    def stop(self, sig: signal.Signals, grace: float | None) -> None:
        self.messages.append(("stop", sig, grace))

    def note_ended(self, attempt: int, rank: int, how: str) -> None:
        self.messages.append(("note_ended", attempt, rank, how))

    @property
    def last(self) -> Any:
        """The last message."""
        return self.messages[-1]


class Job:
    """A coordinator with imagined machines a, b, c ... of some slots each."""

    def __init__(self, slots: list[int], **policy: Any) -> None:
        self.lines: list[str] = []
        self.agents = [Imagined() for _ in slots]
        nodes = [
            Node(chr(ord("a") + number) if number < 26 else f"n{number}", agent, list(range(count)), f"10.0.0.{number}")
            for number, (agent, count) in enumerate(zip(self.agents, slots, strict=True))
        ]
        self.run = Coordinator(nodes, Policy(**policy), self.lines.append)
        self.run.begin()
        self.serve()

    @property
    def nodes(self) -> list[Node]:
        """The machines."""
        return self.run.nodes

    def serve(self) -> None:
        """Serve the store of the attempt on the machine that is to."""
        node = next(node for node in self.run.used if node.link.last[0] == "serve")  # type: ignore[attr-defined]
        self.run.handle(node, "serving", (node.address, 29500))

    def plans(self) -> list[Plan]:
        """Return the plans of the attempt."""
        return [node.link.last[1] for node in self.run.used if node.link.last[0] == "start"]  # type: ignore[attr-defined]

    def report(self, node: Node, *, code: int = -15, text: str = "", began: float = 0.0) -> None:
        """Report that a machine's ranks were stopped, of which the first failed by itself if there is a text."""
        exits = [
            Exit(rank, 100 + rank, code if rank == node.ranks[0] or not code else -15, 2e9, True, node.name)
            for rank in node.ranks
        ]
        found = [Trouble(exits[0], began, text, True, "peer" in text)] if text else []
        self.run.handle(node, "stopped", Report(tuple(exits), {}, tuple(found)))


def test_ranks_are_numbered_over_machines() -> None:
    job = Job([2, 1, 3], master_port=1234)
    assert job.agents[0].messages[0] == ("serve", "10.0.0.0", 1234)
    assert [(plan.first_rank, plan.slots, plan.node) for plan in job.plans()] == [
        (0, (0, 1), 0),
        (2, (0,), 1),
        (3, (0, 1, 2), 2),
    ]
    assert {(plan.world_size, plan.nodes, plan.master_addr, plan.master_port) for plan in job.plans()} == {
        (6, 3, "10.0.0.0", 29500)
    }
    job.run.handle(job.nodes[1], "ended", 2)
    assert job.agents[0].last == ("note_ended", 0, 2, "exit code 0")
    for node in job.nodes:
        assert job.run.outcome is None
        job.run.handle(node, "finished", [Exit(rank, 1, 0, 1.0, False) for rank in node.ranks])
    assert job.run.outcome is not None and job.run.outcome.exit_code == 0


def test_the_first_failure_over_machines_ends_the_job_or_starts_it_again() -> None:
    job = Job([1, 1], max_restarts=1)
    for attempt in range(2):
        job.run.handle(job.nodes[1], "failing")
        assert [agent.last for agent in job.agents] == [("stop", signal.SIGTERM, 5.0)] * 2
        job.report(job.nodes[0], code=1, text=LOST, began=1.0)  # earlier, and only a consequence
        assert job.run.outcome is None
        job.report(job.nodes[1], code=3, text=BUG, began=2.0)
        if attempt == 0:
            assert "rank 1 failed first (exit code 3); starting all 2 processes again on 2 machines" in job.lines[-1]
            job.serve()
            assert [plan.attempt for plan in job.plans()] == [1, 1] and all(plan.restarted for plan in job.plans())
    assert job.run.outcome is not None and job.run.outcome.exit_code == 3
    assert "rank 1 failed first (2 of 2 ranks failed): exit code 3, pid 101 on b" in job.run.outcome.message


@pytest.mark.parametrize("first", ["the machine", "a rank"])
def test_a_lost_machine_is_the_cause_unless_a_rank_failed_before(first: str) -> None:
    job = Job([1, 1, 1], max_restarts=2, min_nodes=2)
    job.run.handle(job.nodes[0], "failing")
    job.report(job.nodes[0], code=1, text=LOST if first == "the machine" else BUG, began=1.0)
    job.report(job.nodes[1])
    assert job.run.outcome is None  # the third machine has not answered
    job.run.handle(job.nodes[2], "lost", "no message for 6 s")
    cause = "machine c (rank 2) is lost: no message for 6 s" if first == "the machine" else "rank 0 failed first"
    assert job.lines[-1].startswith(cause) and "all 2 processes again on 2 machines" in job.lines[-1]
    job.serve()
    assert [plan.world_size for plan in job.plans()] == [2, 2]
    # One machine is less than there have to be.
    job.run.handle(job.nodes[0], "lost", "connection closed")
    job.report(job.nodes[1])
    assert job.run.outcome is not None and job.run.outcome.exit_code == 1
    assert "machine a (rank 0) is lost: connection closed; all other processes have ended" in job.run.outcome.message


def test_a_machine_that_goes_down_may_end_its_ranks_before_its_agent() -> None:
    job = Job([1, 1, 1], min_nodes=2)
    job.run.handle(job.nodes[2], "failing")
    job.report(job.nodes[2], code=-9, text="killed", began=1.0)
    job.run.handle(job.nodes[2], "lost", "connection closed")
    for node in job.nodes[:2]:
        job.report(node, code=1, text=LOST, began=2.0)
    assert job.run.outcome is None
    assert job.lines[-1].startswith("machine c (rank 2) is lost: connection closed; starting all 2 processes again")


def test_the_store_moves_when_its_machine_is_lost() -> None:
    job = Job([1, 1, 1], max_restarts=1, min_nodes=1)
    job.run.handle(job.nodes[0], "lost", "connection closed")
    for node in job.nodes[1:]:
        job.report(node)
    assert job.agents[1].last == ("serve", "10.0.0.1", None)
    job.serve()
    assert [(plan.first_rank, plan.master_addr) for plan in job.plans()] == [(0, "10.0.0.1"), (1, "10.0.0.1")]


def test_the_address_that_a_user_has_given_is_that_of_the_first_machine() -> None:
    job = Job([1, 1], min_nodes=1, master_addr="192.0.2.1", master_port=1234)
    assert job.agents[0].messages[0] == ("serve", "192.0.2.1", 1234)
    job.run.handle(job.nodes[0], "lost", "connection closed")
    job.report(job.nodes[1])
    assert job.agents[1].last == ("serve", "10.0.0.1", 1234)


def test_a_machine_that_cannot_serve_the_store_is_named() -> None:
    job = Job([1, 1])
    job.run.begin()  # another attempt, whose store is not served yet
    job.run.handle(job.nodes[0], "lost", "Port 1 is taken.")
    job.run.handle(job.nodes[1], "stopped", Report())
    assert job.run.outcome is not None
    assert job.run.outcome.message == "shardwise run: machine a is lost: Port 1 is taken."


def test_a_slot_that_fails_twice_in_a_row_is_left_out() -> None:
    job = Job([2, 2], max_restarts=3, min_ranks=3)
    for _ in range(2):
        job.run.handle(job.nodes[1], "failing")
        job.report(job.nodes[0])
        job.report(job.nodes[1], code=1, text=BUG)
        job.serve()
    assert "slot 0 of b is left out from now on" in job.lines[-1]
    assert [(plan.slots, plan.world_size) for plan in job.plans()] == [((0, 1), 3), ((1,), 3)]


@pytest.mark.parametrize("when", ["running", "after a failure"])
def test_a_signal_ends_the_job_without_a_restart(when: str) -> None:
    job = Job([1, 1], max_restarts=1)
    if when == "after a failure":
        job.run.handle(job.nodes[0], "failing")
    job.run.handle(job.nodes[0], "leaving", signal.SIGTERM)
    for node in job.nodes:
        job.report(node)
    assert job.run.outcome is not None and job.run.outcome.exit_code == 143
    assert job.run.outcome.message == "shardwise run: received SIGTERM; all processes have ended."


def _stopped(job: Job) -> None:
    for node in list(job.nodes):
        job.report(node)


def test_machines_come_leave_and_stand_by() -> None:
    job = Job([1, 1], min_nodes=1, max_nodes=2, wait_s=9.0)
    spare = Imagined()
    job.run.join(Node("spare", spare, [0, 1], "10.0.0.9"))
    assert not spare.messages and [agent.last[0] for agent in job.agents] == ["start", "start"]
    # Machine b leaves in order, and the spare takes its place without a restart that counts.
    job.run.handle(job.nodes[1], "leaving", signal.SIGTERM)
    assert all(agent.last == ("stop", signal.SIGTERM, None) for agent in job.agents)  # all may save a checkpoint
    _stopped(job)
    assert job.lines[-1] == "machine b leaves on SIGTERM; starting all 3 processes again on 2 machines"
    job.serve()
    assert [(plan.first_rank, plan.world_size) for plan in job.plans()] == [(0, 3), (1, 3)]
    # All are lost but one that comes: all ranks start with it.
    for node in list(job.nodes):
        job.run.handle(node, "lost", "no message for 6 s")
    assert "0 of at least 1 machines are left: waiting for others, up to 9 s" in job.lines[-1]
    job.run.join(Node("c", Imagined(), [0], "10.0.0.7"))
    job.serve()
    assert [plan.world_size for plan in job.plans()] == [1] and job.plans()[0].restarted
    # A machine that comes while the ranks stop because of a failure does not hide the failure.
    job.run.handle(job.nodes[0], "failing")
    job.run.join(Node("late", Imagined(), [0], "10.0.0.6"))
    job.report(job.nodes[0], code=1, text=BUG)
    assert job.run.outcome is not None and job.run.outcome.exit_code == 1 and BUG in job.run.outcome.message
    job.run.outcome = None
    job.run.begin()
    job.serve()
    # Otherwise all ranks start again with it.
    job.run.join(Node("d", Imagined(), [0], "10.0.0.8"))
    _stopped(job)
    assert job.lines[-1] == "machine d has come; starting all 2 processes again on 2 machines"
    assert job.run.outcome is None


def test_the_end_of_a_wait_and_of_a_script_during_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job([1, 1], min_nodes=2, max_nodes=3, wait_s=9.0)
    job.run.handle(job.nodes[1], "lost", "connection closed")
    job.report(job.nodes[0])
    job.run.look()
    assert job.run.outcome is None
    later = time.monotonic() + 10
    monkeypatch.setattr(time, "monotonic", lambda: later)
    job.run.look()
    assert job.run.outcome is not None and job.run.outcome.exit_code == 1
    assert "1 of at least 2 machines are left, and no other has come within 9 s" in job.run.outcome.message
    monkeypatch.undo()

    job = Job([1], min_nodes=1, max_nodes=2, wait_s=9.0)
    job.run.join(Node("b", Imagined(), [0], "10.0.0.8"))
    job.report(job.nodes[0], code=0)  # the script has ended as the machine came
    assert job.run.outcome is not None and job.run.outcome.exit_code == 0


def test_messages_grow_with_machines() -> None:
    counts = []
    for machines in (8, 1024):
        job = Job([8] * machines, max_restarts=1)
        job.run.handle(job.nodes[5], "failing")
        for node in job.nodes:
            job.report(node, code=1, text=BUG if node is job.nodes[5] else "")
        job.serve()
        counts.append(sum(len(agent.messages) for agent in job.agents))
        assert job.plans()[-1].first_rank == 8 * (machines - 1)
    assert counts == [3 * 8 + 2, 3 * 1024 + 2]  # start, stop and start; the stores of two attempts
