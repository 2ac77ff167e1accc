"""Starting, adopting and ending the default process group."""

from __future__ import annotations

import itertools
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.comm import rendezvous, setup
from shardwise.comm.api import get_local_rank
from shardwise.comm.environment import RankPlace
from shardwise.comm.rendezvous import serve
from shardwise.comm.setup import destroy, init_distributed, is_initialized, local_rank, timeout_from_environment
from shardwise.device import choose_device
from shardwise.errors import LaunchError
from tests.harness import run_ranks
from tests.harness.jobs import free_port

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")


@pytest.fixture
def alone(monkeypatch):
    """No launcher, and no process group before or after."""
    for name in (*LAUNCHER, "GLOO_SOCKET_IFNAME", "SHARDWISE_TIMEOUT", "DEEPSPEED_TIMEOUT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    assert not is_initialized()
    yield
    destroy()
    assert not is_initialized()


def _listening() -> set[str]:
    """Local addresses (hexadecimal, with port) on which this machine listens beyond loopback."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    loopback = ("0100007F", "00000000000000000000000001000000")
    return {row[1] for row in rows if row[3] == "0A" and row[1].split(":")[0] not in loopback}


def _sum() -> float:
    x = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(x)
    return x.item()


def test_attempts_with_other_numbers_of_machines_have_keys_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    store, found = dist.HashStore(), []
    for restarts, machines in (("1", "2"), ("1", "3"), ("2", "3"), ("1", "2")):
        monkeypatch.setattr(rendezvous, "_groups_opened", itertools.count())  # as in a new process
        env = {"TORCHELASTIC_RESTART_COUNT": restarts, "WORLD_SIZE": machines, "GROUP_WORLD_SIZE": machines}
        own = rendezvous.private_keys(store, env)
        found.append(own.check(["address"]))
        own.set("address", restarts + machines)
    assert found == [False, False, False, True]


@pytest.mark.parametrize("served", [True, False])
def test_agents_that_count_restarts_apart_meet(monkeypatch: pytest.MonkeyPatch, served: bool) -> None:
    limit = timedelta(seconds=20)
    server = serve("127.0.0.1", 0, limit) if served else None
    monkeypatch.setattr(rendezvous, "_attempt", "")
    env = {"TORCHELASTIC_USE_AGENT_STORE": str(served), "WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}
    kept = []  # stores of rank 0, which serves them without an agent

    def attempt(rank: int, port: int) -> bool:
        place = RankPlace(rank, 2, 0, 1, "127.0.0.1", port, "torchrun")
        store = rendezvous.join(place, port, limit, env | {"TORCHELASTIC_RESTART_COUNT": str(rank)})
        kept.append(store)
        rendezvous.meet(store, rank, range(2), limit)
        found = store.check(["address"])
        rendezvous.meet(dist.PrefixStore("checked", store), rank, range(2), limit)
        store.set("address", "")
        return found

    if server is not None:
        dist.PrefixStore("shardwise/drawn", server).add("last", 1)  # a rank that has ended before
    with ThreadPoolExecutor(2) as ranks:
        for _ in range(2):
            ports = [free_port() if server is None else server.port] * 2
            assert list(ranks.map(attempt, range(2), ports)) == [False, False]
            assert rendezvous.attempt() != "0"


def test_a_rank_that_waits_for_the_name_of_an_attempt_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous, "NOTICE_S", 0.1)
    monkeypatch.setattr(logging.getLogger("shardwise"), "propagate", True)
    env = {"TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}
    servers = [serve("127.0.0.1", 0, timedelta(seconds=20))]
    port = servers[0].port
    place = RankPlace(1, 2, 0, 1, "127.0.0.1", port, "torchrun")
    with pytest.raises(LaunchError, match=r"rank 0 has not come to .*SHARDWISE_TIMEOUT"):
        rendezvous.join(place, port, timedelta(seconds=1), env)
    assert "rank 0 has not come to the meeting" in caplog.text
    caplog.clear()
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(rendezvous.join, place, port, timedelta(seconds=60), env)
        while not caplog.text:
            time.sleep(0.02)
        servers.clear()
        with pytest.raises(LaunchError, match="rank 1 has lost the store"):
            waiting.result()


def test_single_process_without_a_launcher(alone) -> None:
    before = _listening()
    init_distributed()
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
    assert _sum() == 1.0
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert _listening() <= before
    group = dist.group.WORLD
    init_distributed()  # again: nothing happens
    init_distributed(rank=0, world_size=1)
    assert dist.group.WORLD is group


def _adopt() -> tuple[float, str]:
    before = dist.group.WORLD
    init_distributed(dist_backend="gloo")
    assert dist.group.WORLD is before
    try:
        init_distributed(rank=0, world_size=dist.get_world_size() + 1)
    except LaunchError as error:
        return _sum(), str(error)
    return _sum(), ""


def test_an_existing_process_group_is_adopted() -> None:
    for value, error in run_ranks(_adopt, 2):
        assert value == 3.0
        assert "already is rank" in error


def _start_anew(env: dict[str, str], arguments: dict[str, object]) -> tuple[list[float], str]:
    """Leave the harness's group and start own ones, twice, as this rank of the same world."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    for name in LAUNCHER:
        os.environ.pop(name, None)
    os.environ.update({name: value.format(rank=rank, world=world) for name, value in env.items()})
    if "init_method" in arguments:
        arguments = {**arguments, "rank": rank, "world_size": world}
    seen = []
    for last in (False, True):
        init_distributed(**arguments)  # type: ignore[arg-type]
        seen.append(_sum())
        backend = dist.get_backend()
        dist.barrier()
        destroy()
        if rank and not last:
            time.sleep(1.0)  # rank 0 serves the store: whoever is back before it has left finds the old one
    return seen, backend


def test_torchrun_variables_without_an_agent() -> None:
    env = {
        "RANK": "{rank}",
        "WORLD_SIZE": "{world}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    assert run_ranks(_start_anew, 2, env, {}) == [([3.0, 3.0], "gloo")] * 2


def test_mpi_variables_and_the_port_argument() -> None:
    names = {"RANK": "{rank}", "SIZE": "{world}", "LOCAL_RANK": "{rank}", "LOCAL_SIZE": "{world}"}
    env = {f"OMPI_COMM_WORLD_{name}": value for name, value in names.items()}
    arguments = {"distributed_port": free_port(), "timeout": timedelta(seconds=30)}
    assert run_ranks(_start_anew, 2, env, arguments) == [([3.0, 3.0], "gloo")] * 2


def _own_number(extra: dict[str, str]) -> tuple[int, int]:
    """What a process that no launcher has started takes for its number on its machine, in a group of its own."""
    for name in LAUNCHER:
        os.environ.pop(name, None)
    os.environ.update(extra)
    return local_rank(), get_local_rank()


def test_without_a_launcher_the_rank_is_the_number_on_the_machine() -> None:
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert run_ranks(_own_number, 2, {}) == [(0, 0), (1, 1)]
    assert run_ranks(_own_number, 2, meeting) == [(0, 0), (1, 1)]
    assert run_ranks(_own_number, 2, {"LOCAL_RANK": "7"}) == [(7, 7)] * 2
    slurm = {
        "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }
    assert run_ranks(_own_number, 2, slurm | {"SLURM_STEP_NODELIST": "n[1-2]"}) == [(0, 0)] * 2
    names = {"RANK": "{rank}", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
    mpi = {f"OMPI_COMM_WORLD_{name}": value.format(rank=1) for name, value in names.items()}
    assert run_ranks(_own_number, 2, mpi | {"MASTER_ADDR": "n1"}) == [(0, 0)] * 2


def test_init_method(tmp_path) -> None:
    for url in (f"file://{tmp_path}/store", f"tcp://127.0.0.1:{free_port()}"):
        assert run_ranks(_start_anew, 2, {}, {"init_method": url})[0][0] == [3.0, 3.0]


def test_a_served_store_listens_on_loopback_only_and_refuses_a_taken_port() -> None:
    before = _listening()
    store = serve("127.0.0.1", 0, timedelta(seconds=5))
    assert _listening() <= before
    store.set("key", "value")
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=5))
    assert client.get("key") == b"value"
    with pytest.raises(LaunchError, match=rf"Port {store.port} on 127\.0\.0\.1 is taken"):
        serve("127.0.0.1", store.port, timedelta(seconds=5))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 0}, "give both or neither"),
        ({"world_size": 2}, "give both or neither"),
        ({"dist_init_required": False}, "there is no process group"),
        ({"dist_backend": "carrier_pigeon"}, "has no backend 'carrier_pigeon'"),
        ({"init_method": "tcp://127.0.0.1:1"}, "not which rank this is"),
        ({"rank": 1, "world_size": 2}, "Not set: MASTER_ADDR, MASTER_PORT"),
    ],
)
def test_wrong_arguments(alone, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        init_distributed(**arguments)  # type: ignore[arg-type]


def test_arguments_against_the_environment(alone, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LaunchError, match="rank=1 was given, but RANK=0 is set"):
        init_distributed(rank=1, world_size=2)


def test_backend_follows_the_devices(monkeypatch) -> None:
    place = RankPlace(1, 4, 1, 2, "node0", 1, "torchrun")
    assert setup._backend(None, place) == "gloo"
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(is_available=lambda: True, device_count=lambda: 2))
    assert setup._backend(None, place) == "nccl"
    place = RankPlace(3, 4, 3, 4, "node0", 1, "torchrun")
    with pytest.raises(LaunchError, match=r"Rank 3 is process 3 of its machine, which has 2 CUDA"):
        setup._backend(None, place)
    assert setup._backend("gloo", place) == "gloo"


def test_a_single_visible_device_is_the_process_s_own(monkeypatch) -> None:
    """As Slurm's --gpus-per-task=1 gives them; the same device for two processes is a mistake of who starts them."""
    given = SimpleNamespace(name="H100", uuid="GPU-1")
    cuda = SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 1, get_device_properties=lambda _: given, set_device=lambda _: 0
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    place, store = RankPlace(3, 4, 3, 4, "node0", 1, "Slurm"), dist.HashStore()
    assert setup._backend(None, place) == "nccl"
    assert choose_device(3) == torch.device("cuda", 0)
    setup._check_own_device(store, place)
    setup._check_own_device(store, place)  # the script has started its group anew
    given.uuid = "GPU-2"
    setup._check_own_device(store, RankPlace(2, 4, 2, 4, "node0", 1, "Slurm"))
    with pytest.raises(LaunchError, match=r"Rank 3 .* sees one CUDA device \(H100, GPU-2\), which rank 2 has taken"):
        setup._check_own_device(store, place)


class Started(Exception):
    pass


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_every_backend_with_nccl_is_bound_to_the_rank_s_device(backend: str, alone, monkeypatch) -> None:
    bound: list[tuple[str, torch.device]] = []

    def start(backend: str, **how: Any) -> None:
        bound.append((backend, how["device_id"]))
        raise Started

    monkeypatch.setattr(dist, "is_backend_available", lambda name: True)
    monkeypatch.setattr(dist, "init_process_group", start)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(setup, "_take_own_device", lambda place: torch.device("cuda", place.local_rank))
    with pytest.raises(Started):
        init_distributed(backend)
    assert bound == [(backend, torch.device("cuda", 0))]


@pytest.mark.parametrize(
    ("before", "runtime", "driver", "after"),
    [
        (None, "12.8", 12040, "1"),
        (None, "13.0", 13000, "1"),
        ("0", "12.8", 12040, "0"),
        (None, "12.8", 12020, None),
        (None, "12.1", 12040, None),
        (None, "12.8", 0, None),
    ],
)
def test_nccl_runs_collectives_in_the_order_of_launches_where_they_may_overlap(
    before: str | None, runtime: str, driver: int, after: str | None, monkeypatch
) -> None:
    def version(found: Any) -> None:
        found._obj.value = driver

    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", before or "")
    if before is None:
        monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", runtime)
    monkeypatch.setattr(setup.ctypes, "CDLL", lambda name: SimpleNamespace(cuDriverGetVersion=version))
    monkeypatch.setattr(setup, "ordered_kernels_overlap", setup.ordered_kernels_overlap.__wrapped__)
    warned: list[Any] = []
    monkeypatch.setattr(setup._log, "warning", lambda *text: warned.append(text))
    setup._order_launches()
    assert os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT") == after
    assert bool(warned) == (after is None)


def test_timeouts() -> None:
    assert timeout_from_environment({}) == timedelta(minutes=10)
    assert timeout_from_environment({"DEEPSPEED_TIMEOUT": "2"}) == timedelta(minutes=2)
    assert timeout_from_environment({"DEEPSPEED_TIMEOUT": "2", "SHARDWISE_TIMEOUT": "0.5"}) == timedelta(seconds=30)
    for text in ("0", "-1", "soon", "inf", "nan"):
        with pytest.raises(LaunchError, match=f"SHARDWISE_TIMEOUT='{text}'"):
            timeout_from_environment({"SHARDWISE_TIMEOUT": text})


@pytest.mark.parametrize(
    ("visible", "current", "chosen"),
    [(4, None, [3]), (1, None, [0]), (4, 0, [3]), (4, 3, [3]), (4, 2, [])],
    ids=["own", "only", "touched", "same", "script's"],
)
def test_a_rank_on_nccl_has_its_device_before_its_first_tensor(
    visible: int, current: int | None, chosen: list[int], monkeypatch
) -> None:
    taken: list[int] = []
    cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: visible,
        is_initialized=lambda: current is not None,
        current_device=lambda: current,
        set_device=taken.append,
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    device = setup._take_own_device(RankPlace(3, 4, 3, 4, "127.0.0.1", 1, "a test"))
    assert taken == chosen
    assert device == (torch.device("cuda", chosen[0]) if chosen else None)
