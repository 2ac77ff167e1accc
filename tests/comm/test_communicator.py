"""The communicator: which backend it takes for its device, limits, and what ranks tell each other."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise
from shardwise.comm import native
from shardwise.comm.communicator import Communicator
from shardwise.comm.ledger import Ledger
from shardwise.compat import backend_of, timeout_of
from shardwise.errors import PeerLostError, UsageError
from tests.harness import on_ranks

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def communicator(**options: Any) -> Communicator:
    return Communicator(None, Ledger(), CPU, **options)


def start(backend: str | None, timeout: timedelta = timedelta(seconds=60)) -> None:
    """Start the process group of a test that runs without the harness's."""
    dist.init_process_group(backend, timeout=timeout)


# -- backends ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [None, "gloo", "cpu:gloo", "cpu:gloo,cuda:gloo"])
@on_ranks(3, init=False)
def test_the_backend_is_the_one_for_the_device_however_the_group_was_asked_for(backend: str | None) -> None:
    start(backend)
    comm = communicator()
    # Added in rank order the large numbers cancel first, whatever the rank that adds.
    full = torch.tensor([1e8, -1e8, 1.0])[comm.rank].repeat(6)
    out = torch.zeros(2)
    comm.reduce_scatter([(out, full)], "sum").wait()
    assert {dist.get_backend_config(group) for group in comm._cache._made.values()} == {"cpu:gloo,cuda:gloo"}
    assert comm.waits_on_host and comm.transport in ("memory", "messages")
    comm.destroy()
    assert backend_of(None, CPU) == "gloo" and out.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("backend", "device", "message"),
    [
        ("cuda:gloo", CPU, r"\(cuda:gloo\) has no backend for .* on cpu\. "),
        ("cpu:gloo", CUDA, r"\(cpu:gloo\) has no backend for .* on cuda:0\. "),
        ("gloo", CUDA, "no backend for .* on cuda:0, where Gloo is not supported"),
    ],
)
@on_ranks(2, init=False)
def test_a_group_that_does_not_serve_the_device_is_refused(backend: str, device: torch.device, message: str) -> None:
    start(backend)
    with pytest.raises(UsageError, match=message):
        Communicator(None, Ledger(), device)


EXCHANGED, REDUCED = ["all"], ["reduce"]


@pytest.mark.parametrize(
    ("ordered", "size", "expected"),
    [
        (False, None, (EXCHANGED, EXCHANGED, EXCHANGED)),  # one node
        (False, 4, (REDUCED, EXCHANGED, EXCHANGED)),  # a row is a node, a column has one rank of each
        (False, 8, (REDUCED, EXCHANGED, EXCHANGED)),
        (True, 4, (EXCHANGED, EXCHANGED, EXCHANGED)),
    ],
)
@on_ranks(1, init=False)
def test_reductions_go_by_what_nodes_send(ordered: bool, size: int | None, expected: tuple[list[str], ...]) -> None:
    """The collectives that reduce bf16 gradients of 16 ranks in fp32: over all, over rows of 4, and across rows."""
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=16)
    seen: list[str] = []
    launch = native.launch_together

    def watch(op: Any, arguments: Any, group: Any, **how: Any) -> Any:
        if arguments:
            seen.append(op.__name__)
        return launch(op, arguments, group, **how)

    comm = communicator(ordered=ordered, nodes=None if size is None else [f"node {rank // size}" for rank in range(16)])
    rows = comm.part([range(first, first + 4) for first in range(0, 16, 4)], "rows")
    columns = comm.part([range(first, 16, 4) for first in range(4)], "columns")
    for one, names in zip((comm, rows, columns), expected, strict=True):
        out, full = torch.zeros(3), torch.ones(3 * one.world, dtype=torch.bfloat16)
        seen.clear()
        with mock.patch.object(native, "launch_together", watch):
            one.reduce_scatter([(out, full)], "sum").wait()
        assert [name.split("_")[0] for name in seen] == names
    dist.destroy_process_group()


@on_ranks(4)
def test_ranks_know_who_shares_a_node() -> None:
    """The variables of a launcher say nothing: it may deal ranks to machines in turn."""
    rank = dist.get_rank()
    comm = communicator()
    assert len(set(comm.nodes())) == 1
    comm.destroy()
    os.environ.update(SHARDWISE_MACHINE="ab"[rank % 2], LOCAL_RANK=str(rank // 2), LOCAL_WORLD_SIZE="2")
    comm = communicator()
    across = comm.part([[0, 1], [2, 3]], "across")
    assert comm.nodes() == ["a", "b", "a", "b"] and across.nodes() == ["a", "b"]
    comm.destroy()


# -- limits ------------------------------------------------------------------------------------------------------------


@on_ranks(2, init=False)
def test_the_groups_have_the_limit_of_the_one_they_are_made_from() -> None:
    start("gloo", timedelta(seconds=77))
    comm = communicator()
    found = {timeout_of(group, CPU) for group in comm._cache._made.values()} | {comm.timeout}
    assert found == {timedelta(seconds=77)}
    comm.destroy()


@on_ranks(2, init=False)
def test_the_environments_limit_holds_for_the_engines_collectives() -> None:
    """Rank 1 never takes part; rank 0 gives up after the limit that the environment has set."""
    os.environ["SHARDWISE_TIMEOUT"] = str(1 / 60)
    shardwise.init_distributed(verbose=False)
    comm, store = communicator(), dist.distributed_c10d._get_default_store()
    begin = time.monotonic()
    if comm.rank == 0:
        with pytest.raises(PeerLostError, match=r"has waited 1\.\d s for rank 1 in all_reduce .alone. #0"):
            comm.all_reduce(torch.ones(1), "alone").wait()
        assert 0.5 < time.monotonic() - begin < 3.5
        store.set("named", "")
    else:
        store.wait(["named"], timedelta(seconds=20))


# -- values ------------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_objects_are_shared_as_json() -> None:
    comm = communicator()
    value = {"names": ["a", "ü"], "pair": (1, 2.5), "nothing": None}
    told = comm.share_object(value if comm.rank == 1 else None, "told", src=1)
    nothing = comm.share_object([] if comm.rank == 0 else "x", "nothing")
    comm.barrier("end")
    comm.destroy()
    assert told == {"names": ["a", "ü"], "pair": [1, 2.5], "nothing": None} and nothing == []
    records = [f"{record.op} {record.label}" for record in comm.ledger.records()]
    assert records[:2] == ["broadcast told", "broadcast told"] and records[-1] == "all_reduce end"
