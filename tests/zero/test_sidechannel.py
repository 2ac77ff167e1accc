"""The side channel: where it listens, how long it waits, what it keeps, and what happens when its thread fails."""

from __future__ import annotations

import contextlib
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.comm import rendezvous
from shardwise.comm.communicator import Communicator
from shardwise.comm.ledger import Ledger
from shardwise.errors import PeerLostError
from shardwise.zero import sidechannel
from shardwise.zero.sidechannel import SideChannel
from tests.harness import run_ranks
from tests.models import CASES
from tests.zero.training import Setting, start

CPU = torch.device("cpu")


def listening(port: int) -> set[str]:
    """Local addresses (hexadecimal) on which this machine listens at a port."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port}


def step(engine: Any, number: int) -> None:
    case = CASES["gpt"]
    engine.backward(case.loss(engine, case.data(number, 0, dist.get_rank(), torch.float32)))
    engine.step()


# -- where -------------------------------------------------------------------------------------------------------------


def address_of_an_engine() -> tuple[tuple[str, int], set[str]]:
    engine = start(CASES["gpt"], Setting(stage=3))
    address = engine.sharded.channel._address
    found = address, listening(address[1])
    engine.destroy()
    return found


def test_one_machine_listens_on_loopback_only() -> None:
    for (host, _), addresses in run_ranks(address_of_an_engine, 2):
        assert host == "127.0.0.1"
        assert addresses == {"0100007F"}


def on_several_machines() -> tuple[str, str]:
    """Ranks that do not share a loopback interface, as far as they can tell."""
    sidechannel.machine = lambda: f"machine {dist.get_rank()}"  # type: ignore[assignment]
    sidechannel.own_address = lambda: f"127.0.0.{2 + dist.get_rank()}"  # type: ignore[assignment]
    try:
        comm = Communicator(None, Ledger(), CPU)
        channel = SideChannel(comm, [])
        channel.close()
        comm.destroy()
    finally:
        sidechannel.machine, sidechannel.own_address = rendezvous.machine, rendezvous.own_address
    return channel._address[0]


def test_rank_0_announces_its_own_address_to_other_machines() -> None:
    assert run_ranks(on_several_machines, 2) == ["127.0.0.2"] * 2


def test_the_own_address_is_the_near_end_of_the_way_to_the_meeting_place(monkeypatch) -> None:
    def address(meeting: str | None) -> str:
        monkeypatch.setattr(rendezvous, "store_host", lambda: meeting)
        return rendezvous.own_address()

    assert address(None) == address("127.0.0.1") == address("localhost") == socket.gethostname()
    here = socket.gethostbyname(socket.gethostname())
    if not here.startswith("127."):
        assert address(here) == here
    # A name that leads back to loopback, or nowhere, is still the one that the others know.
    found = [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.1.1", 9))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert address("node0") == "node0"

    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert address("node0") == "node0"


def test_processes_of_one_machine_know_each_other() -> None:
    assert len({*run_ranks(rendezvous.machine, 2), rendezvous.machine()}) == 1


# -- how long, and what stays ------------------------------------------------------------------------------------------


class Silent(SideChannel):
    """Its thread answers nobody."""

    def _answer(self, number: int, message: dict[str, Any]) -> bool:
        return super()._answer(number, message) if message["kind"] == "stop" else True


def fetch_from_nobody() -> tuple[str, float]:
    engine = start(CASES["gpt"], Setting(stage=3))
    comm = engine._comm
    comm.timeout = timedelta(seconds=0.5)
    channel = Silent(comm, [unit for unit in engine.sharded.units if unit.sharded])
    begin = time.monotonic()
    message = ""
    if comm.rank == 0:
        unit = engine.sharded.units[0]
        for section in unit.sections:
            section.allocate()
        with pytest.raises(PeerLostError) as caught:
            channel.fetch(unit)
        message = str(caught.value)
    waited = time.monotonic() - begin
    comm.barrier()
    channel.close()
    engine.destroy()
    return message, waited


def test_a_peer_that_does_not_answer_is_named_within_the_groups_limit() -> None:
    message, waited = run_ranks(fetch_from_nobody, 2)[0]
    assert "rank 0 of 2 has waited 0.5 s for rank 1 in fetch 'tokens'" in message
    assert "and rank 1 has not answered" in message
    assert 0.4 < waited < 30


def keys_after_many_messages() -> int:
    comm = Communicator(None, Ledger(), CPU)
    channel = SideChannel(comm, [])
    for number in range(20):
        channel.want(number, 0)
    comm.barrier()
    deadline = time.monotonic() + 10
    while channel._client.num_keys() > 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    kept = channel._client.num_keys()
    comm.barrier()
    channel.close()
    comm.destroy()
    return kept


def test_messages_that_all_have_read_are_deleted() -> None:
    # What remains is the number of messages, and what torch itself keeps.
    assert max(run_ranks(keys_after_many_messages, 3)) <= 3


# -- failures ----------------------------------------------------------------------------------------------------------


def fail_to_help() -> tuple[str, list[int]]:
    """Rank 1's thread runs out of memory when rank 0 asks for a gather."""
    engine = start(CASES["gpt"], Setting(stage=3))
    step(engine, 0)
    channel = engine.sharded.channel
    asked: list[int] = []

    def no_memory(number: int, place: int) -> None:
        if number == 99:  # not what the step before may still ask for
            asked.append(place)
        if asked == [2]:
            raise torch.OutOfMemoryError("no memory for the gather")

    channel.on_want = no_memory
    dist.barrier()
    message = ""
    if dist.get_rank() == 0:
        channel.want(99, 2)
        channel.want(99, 3)
    else:
        deadline = time.monotonic() + 10
        while len(asked) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    try:
        with torch.no_grad():
            engine(CASES["gpt"].data(0, 0, 1, torch.float32)["tokens"][:, :-1])
    except torch.OutOfMemoryError as error:
        message = str(error)
    engine.destroy()
    return message, asked


def test_what_fails_in_the_thread_is_raised_by_the_next_pass_and_the_thread_goes_on() -> None:
    (nothing, unasked), (message, asked) = run_ranks(fail_to_help, 2, timeout=60)
    assert (nothing, unasked, asked) == ("", [], [2, 3])
    assert message.startswith("rank 1 has run out of memory in the engine's forward(): no memory for the gather\n")


class Stream(contextlib.AbstractContextManager):  # type: ignore[type-arg]
    """Stands for `torch.cuda.stream(...)`."""

    entered: list[str] = []  # noqa: RUF012

    def __init__(self, name: str) -> None:
        self.name = name

    def __exit__(self, *_: Any) -> None:
        Stream.entered.append(self.name)


def test_help_is_given_on_the_stream_of_the_pass(monkeypatch) -> None:
    channel = SideChannel.__new__(SideChannel)
    channel.comm = type("Comm", (), {"device": torch.device("cuda", 0)})()
    channel._error = channel._stream = None
    current = ["first"]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    monkeypatch.setattr(torch.cuda, "stream", Stream)
    channel.attend()
    with channel._on_stream():
        pass
    current[0] = "second"
    channel.attend()
    with channel._on_stream():
        pass
    assert Stream.entered == ["first", "second"]


# -- engines that leave ------------------------------------------------------------------------------------------------


def wrap_twice() -> tuple[int, int, list[int]]:
    before = len(dist.distributed_c10d._world.pg_map)
    model = CASES["gpt"].make()
    counts = []
    engines = []
    addresses = []
    for _ in range(3):
        engines.append(start(CASES["gpt"], Setting(stage=3), model))
        step(engines[-1], 0)
        counts.append(len(dist.distributed_c10d._world.pg_map))
        addresses.append(engines[-1].sharded.channel._address)
    ports = [len(listening(port)) for _, port in addresses]
    for engine in engines:  # the old ones once more
        engine.destroy()
    return before, len(dist.distributed_c10d._world.pg_map), counts + ports


def test_a_model_that_is_wrapped_again_leaves_no_groups_and_no_servers() -> None:
    for before, after, counts in run_ranks(wrap_twice, 2, timeout=60):
        assert counts == [before + 1] * 3 + [0, 0, 1]
        assert after == before
