"""Times on cards and links from data sheets."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from shardwise.errors import UsageError
from shardwise.launch.cli import app
from shardwise.plan.cluster import Cluster, Efficiencies, sheets
from shardwise.plan.events import Launch, Operator
from shardwise.plan.time import plan_times
from tests.models import GPT
from tests.plan.test_time import batch, config_of

GB = 10**9
WHOLE = Efficiencies(compute=1, memory=1, links=1, host=0)
HALF = Efficiencies(compute=0.5, memory=0.5, links=0.5, host=0)


def launch(op: str, members: tuple[int, ...], size: int = GB) -> Launch:
    return Launch(0, op, "group", len(members), members, size, 0, "")


def seconds(cluster: Cluster, op: str, *members: int) -> float:
    return cluster.costs(16).collective(launch(op, members))


@pytest.mark.parametrize(("efficiencies", "times"), [(WHOLE, 1), (HALF, 2)])
def test_an_operator_takes_its_flops_or_its_bytes(efficiencies: Efficiencies, times: float) -> None:
    costs = Cluster.of("h100", None, 8, efficiencies).costs(8)
    product = Operator("", "mm", int(989.5e9), GB, "bf16")
    assert costs.operator(product) == pytest.approx(1e-3 * times)
    assert costs.operator(Operator("", "add", 0, int(3.35e9), "bf16")) == pytest.approx(1e-3 * times)
    assert costs.asynchronous


@pytest.mark.parametrize(
    ("op", "members", "expected"),
    [
        # Three of four parts arrive over NVLink 4, 450 GB/s.
        ("all_gather", (0, 1, 2, 3), 3 * 1.9e-6 + 0.75 / 450),
        ("reduce_scatter", (0, 1, 2, 3), 3 * 1.9e-6 + 0.75 / 450),
        ("all_reduce", (4, 5, 6, 7), 2 * (3 * 1.9e-6 + 0.75 / 450)),
        ("broadcast", (0, 1), 1.9e-6 + 1 / 450),
        # One ring through both machines has the whole adapter, 50 GB/s.
        ("all_gather", tuple(range(16)), 14 * 1.9e-6 + 4e-6 + 15 / 16 / 50),
        # Eight groups of one rank a machine share it; so do the eight ranks that send to all.
        ("all_gather", (0, 8), 4e-6 + 0.5 / (50 / 8)),
        ("all_gather", (0, 1, 8, 9), 2 * 1.9e-6 + 4e-6 + 0.75 / (50 / 4)),
        ("all_to_all", tuple(range(16)), 14 * 1.9e-6 + 4e-6 + 15 / 16 / (50 / 8)),
    ],
)
def test_a_collective_is_a_ring(op: str, members: tuple[int, ...], expected: float) -> None:
    assert seconds(Cluster.of("h100", "infiniband-ndr", 8, WHOLE), op, *members) == pytest.approx(expected)


def test_faster_is_never_slower() -> None:
    for op in ("all_gather", "all_reduce", "broadcast", "all_to_all"):
        for members in ((0, 1), (0, 8), tuple(range(16))):
            names = ("ethernet-10", "ethernet-100", "infiniband-hdr", "infiniband-ndr", "8xinfiniband-ndr")
            times = [seconds(Cluster.of("a100-80", name, 8, WHOLE), op, *members) for name in names]
            assert times == sorted(times, reverse=True)
    outer = Cluster.of("h100", "8xinfiniband-ndr", 8, WHOLE).path((0, 8))
    assert (outer.link, outer.bandwidth) == ("InfiniBand NDR", 50e9)
    assert Cluster.of("l4", "64xinfiniband-ndr", 8, WHOLE).path(tuple(range(16))).link == "PCIe 4 x16"


def test_sheets() -> None:
    known = sheets()
    for card in known.cards.values():
        assert card.source and {card.inside, card.host} <= known.links.keys() and "f32" in card.flops
    assert all(link.source for link in known.links.values())


def test_a_plan_is_made_of_data_sheets() -> None:
    options = ["--ranks", "16", "--stages", "0,3", "--length", "6", "--card", "a100-80", "--link", "efa"]
    done = CliRunner().invoke(app, ["plan", "tests.models:GPT", *options])
    assert done.exit_code == 0, done.output
    assert "all_gather (data_parallel, Elastic Fabric Adapter)" in done.output
    assert (
        "rates of data sheets, not measured: NVIDIA A100 SXM 80 GB" in done.output
        and "70% of the FLOP/s" in done.output
    )
    done = CliRunner().invoke(app, ["plan", "tests.models:GPT", *options, "--json"])
    whole = json.loads(done.output)["tests.models:GPT"]
    assert [one["stage"] for one in whole["times"]] == [0, 3] and "A100" in whole["rates"]
    for one in whole["times"]:
        assert one["total"] == pytest.approx(sum(one["phases"].values())) and one["total"] > 0
        assert {each["link"] for each in one["collectives"]} == {"Elastic Fabric Adapter"}


def test_the_slowest_rank_holds_up_all() -> None:
    cluster = Cluster.of("h100", None, 8, WHOLE)
    given: dict[str, Any] = {"ranks": 2, "stages": [3], "batch": batch()}
    (usual,) = plan_times(GPT(), config_of(3), cluster, **given)
    (held,) = plan_times(GPT(), config_of(3), cluster, **given, slowest=3)
    assert held.time.computing == pytest.approx(3 * usual.time.computing)
    assert held.time.communicating == usual.time.communicating


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--card", "h101"], "known are v100-16, "),
        (["--card", "h100", "--link", "2xinfiniband"], "infiniband-hdr, infiniband-ndr"),
        (["--card", "h100", "--link", "0xefa"], "1 adapter or more"),
        (["--card", "h100", "--time", "machine.json"], "give one of them"),
        (["--link", "efa"], "give --card"),
        (["--card", "h100", "--slowest", "0.5"], "--slowest 0.5"),
        (["--card", "h100", "--ranks", "16"], "on 2 machines of 8 ranks: give the link"),
        (["--card", "v100-16", "--precision", "bf16"], "no rate of bf16 .* only of f64, f32, f16"),
    ],
)
def test_what_is_refused(options: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["plan", "tests.models:GPT", "--length", "6", "--stages", "1", *options])
    with pytest.raises(UsageError, match=message):
        raise UsageError(str(done.exception) + done.output)
