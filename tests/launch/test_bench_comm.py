"""`shardwise bench comm`: results are checked, times and links are told, and what is in the way is named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.comm.communicator import Communicator
from shardwise.comm.ledger import Ledger
from shardwise.launch import start
from shardwise.launch.comm_measure import OPS, Exchange, Plan, measure
from shardwise.launch.commbench import CommWanted, link_speed, share_of_link, show, verdicts
from shardwise.launch.job import Job
from tests.harness import run_ranks, thorough
from tests.harness.tables import tables
from tests.launch.conftest import Call

CPU = torch.device("cpu")
SMALL = Plan(sizes=(1000, 20_000), dtypes=(torch.float32, torch.bfloat16), trials=2, warmups=1)


def measured(transport: str) -> dict[str, Any]:
    os.environ["SHARDWISE_TRANSPORT"] = transport
    comm = Communicator(None, Ledger(), CPU)
    try:
        return measure(comm, SMALL)
    finally:
        comm.destroy()


@pytest.mark.parametrize(("world", "transport"), [(2, "memory"), thorough(3, "messages")])
def test_all_collectives_on_all_ranks(world: int, transport: str) -> None:
    answers = run_ranks(measured, world, transport)
    found = answers[0]
    assert all(answer == found for answer in answers)
    assert [(row["op"], row["dtype"]) for row in found["rows"][::2]] == [
        (op, dtype) for op in OPS for dtype in ("float32", "bfloat16")
    ]
    for row in found["rows"]:
        assert not row["wrong"] and row["bytes"] % world == 0 and row["bytes"] >= 1000
        way = row["torch" if row["op"] == "pt2pt" else "ours"]
        assert 0 < way["min_us"] <= way["median_us"] <= way["p95_us"]
        assert len(way["rank_median_us"]) == world and ("ours" in row) == (row["op"] != "pt2pt")
        assert row["refused_by_torch"] or "torch" in row
    links = found["links"]
    assert links["transport"] == transport and links["machines"] == [0] * world
    assert len(links["copy"]) == len(links["compute_ms"]) == world and min(links["copy"]) > 0
    assert [one["ranks"] for one in links["streams"]] == [[0, peer] for peer in range(1, world)]
    assert all(min(one["there"], one["back"], one["trip_us"]) > 0 for one in links["streams"])
    assert {one["used"] for one in links["interfaces"]} == {"lo"}
    speed, what = link_speed(found)
    expected = "plain copies in memory, all ranks at once" if transport == "memory" else "streams through sockets"
    assert what == expected and speed


def spoiled(op: str) -> tuple[list[str], list[str]]:
    """What is said of a result in which one rank has a wrong number."""
    comm = Communicator(None, Ledger(), CPU)
    exchange = Exchange(comm, op, torch.float32, 4096)
    exchange.fill()
    before = comm.exchange(exchange.wrong(), "before")
    (exchange.torchs if op == "pt2pt" else exchange.ours)()
    right = comm.exchange(exchange.wrong(), "right")
    if comm.rank == 1:
        result = {"reduce_scatter": exchange._own, "all_to_all": exchange._other}.get(op, exchange._full)
        result[17] = 99.0
    wrong = comm.exchange(exchange.wrong(), "wrong")
    comm.destroy()
    assert right == ["", ""] and before[1]  # what has not run is wrong
    return before, wrong


@pytest.mark.parametrize("op", OPS)
def test_a_wrong_number_is_found(op: str) -> None:
    for _, wrong in run_ranks(spoiled, 2, op):
        assert wrong[0] == "" and wrong[1].startswith("element 17 is 99, expected ")


# -- what is said of the table's figures: four ranks on one machine, without trouble -----------------------------------


def test_without_trouble_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    found = tables(__file__)
    assert verdicts(found) == [] and share_of_link(found["rows"][0], found) == pytest.approx(0.5)
    assert show(found, CommWanted()) == 0
    shown = capsys.readouterr().out
    assert "4 ranks on 1 machine, gloo, cpu, transport: memory" in shown and "50%" in shown
    assert shown.rstrip().endswith("Results are right on all ranks.")


def test_a_wrong_result_is_named_and_is_the_exit_code(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = tables(__file__)
    found["rows"][0]["wrong"] = {"ours": {"2": "element 5 is 1, expected 3"}}
    file = tmp_path / "found.json"
    assert show(found, CommWanted(file=str(file))) == 1
    assert "WRONG RESULT: shardwise's all_gather of 4194304 bytes (float32) on rank 2" in capsys.readouterr().out
    told = json.loads(file.read_text())
    assert told["right"] is False and "element 5" in told["verdicts"][0]


# -- the command -------------------------------------------------------------------------------------------------------


def test_an_interface_that_is_not_there(call: Call, monkeypatch: Any) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    code, _, error = call("bench", "comm")
    assert code == 2 and "GLOO_SOCKET_IFNAME=eth77" in error


def test_the_command_starts_the_ranks(call: Call, monkeypatch: Any) -> None:
    jobs: list[Job] = []

    def run(job: Job) -> int:
        jobs.append(job)
        Path(job.args[1]).write_text(json.dumps(tables(__file__)))
        return 0

    monkeypatch.setattr(start, "run_job", run)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    code, out, error = call("bench", "comm", "--nproc", "2")
    assert code == 0 and "Results are right on all ranks." in out, error
    assert [(job.nproc, job.nodes, job.module) for job in jobs] == [(2, None, True)]
