"""From options and devices to a number of processes and CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.errors import CommandLineError
from shardwise.launch import hosts
from shardwise.launch.placement import Devices, Host, Placement, Resources, find_devices, hosts_of, place
from tests.harness.tables import tables

TABLES = tables(__file__)

CPU, FOUR = Devices(), Devices(("0", "1", "2", "3"))
CHOSEN, UUIDS = Devices(("4", "6"), restricted=True), Devices(("GPU-aa", "GPU-bb"), restricted=True)
DEVICES = {"CPU": CPU, "FOUR": FOUR, "CHOSEN": CHOSEN, "UUIDS": UUIDS}


@pytest.fixture(autouse=True)
def _no_default_hostfile(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(hosts, "DEFAULT_HOSTFILE", str(tmp_path / "none"))


@pytest.mark.parametrize(("resources", "devices", "count", "names"), TABLES["place"])
def test_place(resources: dict[str, Any], devices: str, count: int, names: list[str] | None) -> None:
    found = place(Resources(**resources), DEVICES[devices])
    assert found == Placement(count, None if names is None else tuple(names))


@pytest.mark.parametrize(("resources", "devices", "message"), TABLES["contradictions"])
def test_contradictions(resources: dict[str, Any], devices: str, message: str) -> None:
    with pytest.raises(CommandLineError, match=message):
        place(Resources(**resources), DEVICES[devices])


def _with_hosts(tmp_path, text: str, **options) -> Resources:
    (tmp_path / "hosts").write_text(text)
    return Resources(hostfile=str(tmp_path / "hosts"), **options)


def test_hostfile_of_this_machine(tmp_path) -> None:
    assert place(_with_hosts(tmp_path, "localhost slots=3"), CPU) == Placement(3, None)
    assert place(_with_hosts(tmp_path, "localhost slots=3", nproc=2), CPU) == Placement(2, None)
    assert place(_with_hosts(tmp_path, "localhost slots=2"), FOUR) == Placement(2, ("0", "1"))
    # CUDA_VISIBLE_DEVICES narrows what the hostfile offers.
    assert place(_with_hosts(tmp_path, "localhost slots=8"), CHOSEN) == Placement(2, ("4", "6"))


def test_hostfile_with_more_than_there_is(tmp_path) -> None:
    with pytest.raises(CommandLineError, match="only 3 slots in the hostfile"):
        place(_with_hosts(tmp_path, "localhost slots=3", nproc=4), CPU)
    with pytest.raises(CommandLineError, match=r"slots 0, 1, 2, 3, 4, but it has 4 CUDA devices"):
        place(_with_hosts(tmp_path, "localhost slots=5"), FOUR)
    with pytest.raises(CommandLineError, match="CUDA_VISIBLE_DEVICES allows only 4, 6"):
        place(_with_hosts(tmp_path, "localhost slots=8", include="localhost:0,4"), CHOSEN)


def test_machines_of_a_hostfile(tmp_path) -> None:
    two = "localhost slots=2\nworker-1 slots=3"
    both = [Host("localhost", (0, 1)), Host("worker-1", (0, 1, 2))]
    assert hosts_of(Resources()) is None
    assert hosts_of(_with_hosts(tmp_path, two)) == both
    assert hosts_of(_with_hosts(tmp_path, two, num_nodes=1)) == both[:1]
    assert hosts_of(_with_hosts(tmp_path, two, include="worker-1:1,2")) == [Host("worker-1", (1, 2))]
    assert hosts_of(_with_hosts(tmp_path, two, exclude="worker-1@localhost:0")) == [Host("localhost", (1,))]
    for resources, message in (
        (Resources(num_nodes=2), "--num_nodes 2: the machines are not known"),
        (_with_hosts(tmp_path, two, num_nodes=3), "only 2 machines: localhost, worker-1"),
    ):
        with pytest.raises(CommandLineError, match=message):
            hosts_of(resources)
    # The devices of each machine are known there.
    assert place(Resources(nproc=2), CPU, both[1]) == Placement(2, None)
    assert place(Resources(), FOUR, Host("worker-1", (1, 3))) == Placement(2, ("1", "3"))
    with pytest.raises(CommandLineError, match="has 4 CUDA devices"):
        place(Resources(), FOUR, Host("worker-1", (3, 4)))


@pytest.mark.parametrize(("count", "env", "names", "restricted"), TABLES["devices"])
def test_find_devices(monkeypatch, count: int, env: dict[str, str], names: list[str], restricted: bool) -> None:
    import torch

    monkeypatch.setattr(torch, "cuda", SimpleNamespace(is_available=lambda: count > 0, device_count=lambda: count))
    found = find_devices(env)
    assert found == Devices(tuple(names), restricted) and place(Resources(), found).nproc == max(1, count)
