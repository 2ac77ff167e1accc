"""From options and devices to a number of processes and CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from shardwise.errors import CommandLineError
from shardwise.launch import hosts, placement
from shardwise.launch.placement import Devices, Host, Placement, Resources, find_devices, hosts_of, place

CPU = Devices()
FOUR = Devices(("0", "1", "2", "3"))
CHOSEN = Devices(("4", "6"), restricted=True)
UUIDS = Devices(("GPU-aa", "GPU-bb"), restricted=True)


@pytest.fixture(autouse=True)
def _no_default_hostfile(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(hosts, "DEFAULT_HOSTFILE", str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("resources", "devices", "expected"),
    [
        (Resources(), CPU, Placement(1, None)),
        (Resources(nproc=5), CPU, Placement(5, None)),
        (Resources(include="localhost:0,1"), CPU, Placement(2, None)),
        (Resources(include="localhost"), CPU, Placement(1, None)),
        (Resources(num_nodes=1, nproc=2), CPU, Placement(2, None)),
        (Resources(), FOUR, Placement(4, ("0", "1", "2", "3"))),
        (Resources(nproc=2), FOUR, Placement(2, ("0", "1"))),
        (Resources(include="localhost:1,3"), FOUR, Placement(2, ("1", "3"))),
        (Resources(exclude="localhost:0"), FOUR, Placement(3, ("1", "2", "3"))),
        (Resources(), CHOSEN, Placement(2, ("4", "6"))),
        (Resources(nproc=1), CHOSEN, Placement(1, ("4",))),
        (Resources(include="localhost:6"), CHOSEN, Placement(1, ("6",))),
        (Resources(include="localhost:1"), UUIDS, Placement(1, ("GPU-bb",))),
    ],
)
def test_place(resources: Resources, devices: Devices, expected: Placement) -> None:
    assert place(resources, devices) == expected


@pytest.mark.parametrize(
    ("resources", "devices", "message"),
    [
        (Resources(nproc=0), CPU, "--nproc 0: a job has at least one"),
        (Resources(nproc=-1), CPU, "--nproc -1"),
        (Resources(num_nodes=0), CPU, "--num_nodes 0"),
        (Resources(nproc=5), FOUR, r"5 processes .* only 4 CUDA devices here .*CUDA_VISIBLE_DEVICES= "),
        (Resources(nproc=3), CHOSEN, r"only 2 CUDA devices here \(4, 6\)"),
        (Resources(nproc=2, include="localhost"), FOUR, "--include chooses the slots itself"),
        (Resources(num_nodes=1, exclude="localhost:1"), FOUR, "--exclude chooses the slots itself"),
        (Resources(include="localhost:0"), CHOSEN, "no slot 0, only 4, 6"),
        (Resources(exclude="localhost:0"), CPU, "leaves no slot"),
        (Resources(include="elsewhere:0"), CPU, "no host 'elsewhere'"),
    ],
)
def test_contradictions(resources: Resources, devices: Devices, message: str) -> None:
    with pytest.raises(CommandLineError, match=message):
        place(resources, devices)


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


@pytest.mark.parametrize(
    ("count", "env", "expected"),
    [
        (0, {}, Devices()),
        (2, {}, Devices(("0", "1"))),
        (2, {"CUDA_VISIBLE_DEVICES": "5, 3"}, Devices(("5", "3"), restricted=True)),
        (1, {"CUDA_VISIBLE_DEVICES": "5,99"}, Devices(("5",), restricted=True)),
        (0, {"CUDA_VISIBLE_DEVICES": ""}, Devices((), restricted=True)),
    ],
)
def test_find_devices(monkeypatch, count: int, env: dict[str, str], expected: Devices) -> None:
    import torch

    monkeypatch.setattr(torch, "cuda", SimpleNamespace(is_available=lambda: count > 0, device_count=lambda: count))
    assert find_devices(env) == expected
    assert placement.place(Resources(), expected).nproc == max(1, count)
