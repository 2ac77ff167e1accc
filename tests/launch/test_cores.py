"""Cores of a machine, dealt out to processes that stay on them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from shardwise.errors import CommandLineError
from shardwise.launch import cores
from tests.harness.jobs import run_job, script
from tests.harness.tables import tables

TELL = """
import json, os, threading
seen = []
thread = threading.Thread(target=lambda: seen.append(sorted(os.sched_getaffinity(0))))
thread.start()
thread.join()
print(json.dumps([int(os.environ["RANK"]), sorted(os.sched_getaffinity(0)), seen[0], os.environ["OMP_NUM_THREADS"]]))
"""


def machine(directory: Path, cpus: dict[int, tuple[int, int, int]]) -> Path:
    """Describe a machine as the kernel does: (NUMA node, package, core) by CPU."""
    for cpu, (node, package, core) in cpus.items():
        topology = directory / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{package}\n")
        (topology / "core_id").write_text(f"{core}\n")
        (directory / f"cpu{cpu}" / f"node{node}").mkdir()
    return directory


# Two nodes of two cores with two hyperthreads each, numbered in turn as many machines do.
TWO_NODES = {cpu: (cpu % 2, cpu % 2, cpu // 2 % 2) for cpu in range(8)}


def test_cores_are_those_of_the_machine_node_by_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    system = machine(tmp_path, TWO_NODES)
    found = cores.available(system=system)
    assert found == ((0, 4), (2, 6), (1, 5), (3, 7))
    assert cores.deal(found, 2) == [((0, 4), (2, 6)), ((1, 5), (3, 7))]
    assert cores.deal(found, 3) == [((0, 4),), ((2, 6),), ((1, 5),)]
    # What is listed is taken in its own order, and hyperthreads of one core stay together.
    assert cores.available((3, 0, 7), "--core-list 3,0,7", system) == ((3, 7), (0,))
    # A process that is confined has fewer; a kernel that says nothing is taken to have plain cores.
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 5})
    assert cores.available(system=system) == ((2,), (5,))
    assert cores.available(system=tmp_path / "none") == ((2,), (5,))
    with pytest.raises(CommandLineError, match="--core-list 5-6: this process may not use CPU 6; it has 2, 5"):
        cores.available((5, 6), "--core-list 5-6", system)


GPUS = {
    "0000:1a:00.0": ("H100", "GPU-aaaa", 1),
    "0000:5d:00.0": ("H100", "GPU-bbbb", 0),
    "0000:9a:00.0": ("H100", "GPU-bbcc", 1),
}
"""PCI addresses, models, UUIDs and NUMA nodes."""


def gpus(directory: Path, devices: dict[str, tuple[str, str, int]]) -> dict[str, Path]:
    """Describe GPUs as NVIDIA's driver and the kernel do."""
    for address, (model, uuid, node) in devices.items():
        for kind, name, text in (
            ("driver", "information", f"Model: \t\t {model}\nIRQ:   \t\t 16\nGPU UUID: \t {uuid}\n"),
            ("pci", "numa_node", f"{node}\n"),
        ):
            (directory / kind / address).mkdir(parents=True)
            (directory / kind / address / name).write_text(text)
    return {"driver": directory / "driver", "pci": directory / "pci"}


def test_processes_get_cores_of_the_node_of_their_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    system = machine(tmp_path / "cpu", TWO_NODES)
    found = cores.available(system=system)
    nodes = cores.nodes_of_gpus(("0", "1"), {}, **gpus(tmp_path, GPUS))
    assert nodes == [1, 0]
    assert cores.deal(found, 2, nodes, system) == [((1, 5), (3, 7)), ((0, 4), (2, 6))]
    assert cores.deal(found, 3, [1, 0, 1], system) == [((1, 5),), ((0, 4),), ((3, 7),)]
    # A node without cores for its processes: as if nothing were known.
    assert cores.deal(found, 2, [1, 2], system) == cores.deal(found, 2)
    assert cores.deal(found, 3, [1, 1, 1], system) == cores.deal(found, 3)


@pytest.mark.parametrize(("names", "changes", "order", "nodes"), tables(__file__)["nodes"])
def test_nodes_of_gpus(
    tmp_path: Path,
    names: tuple[str, ...],
    changes: dict[str, tuple[str, str, int]],
    order: str,
    nodes: list[int] | None,
) -> None:
    assert cores.nodes_of_gpus(names, {"CUDA_DEVICE_ORDER": order}, **gpus(tmp_path, GPUS | changes)) == nodes
    assert cores.nodes_of_gpus(names, {}, driver=tmp_path / "none") is None


@pytest.mark.parametrize("text", ["", "a", "1-", "3-1", "1;2", "-1", "1,,2"])
def test_lists_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(CommandLineError, match="neither a number nor a range"):
        cores.parse_list(text, "--core-list")


def test_lists() -> None:
    assert cores.parse_list(" 4-6, 0,5", "--core-list") == (4, 5, 6, 0)


def test_the_launcher_stays_where_it_was() -> None:
    before = os.sched_getaffinity(0)
    one = min(before)
    with pytest.raises(ZeroDivisionError), cores.bound(((one,),)):
        assert os.sched_getaffinity(0) == {one}
        _ = 1 / 0
    assert os.sched_getaffinity(0) == before


def test_processes_and_their_threads_stay_on_their_cores(tmp_path: Path) -> None:
    usable = cores.available()
    if len(usable) < 2:
        pytest.skip("one core cannot be divided")
    path, without = script(tmp_path, TELL), ["OMP_NUM_THREADS"]

    def run(*options: str) -> tuple[list[list[object]], str]:
        done = run_job("--nproc", 2, "--tag-output", "never", *options, path, without=without)
        assert done.returncode == 0, done.stderr
        return sorted(json.loads(line) for line in done.stdout.splitlines()), done.stderr

    expected = []
    for rank, own in enumerate(cores.deal(usable, 2)):
        cpus = sorted(cpu for core in own for cpu in core)
        expected.append([rank, cpus, cpus, str(len(own))])
    found, said = run("--bind_cores_to_rank")
    assert found == expected
    assert f"each bound to {len(usable) // 2} core" in said
    first, second = usable[1][0], usable[0][0]
    found, _ = run("--core-list", f"{first},{second}")
    assert found == [[0, [first], [first], "1"], [1, [second], [second], "1"]]
