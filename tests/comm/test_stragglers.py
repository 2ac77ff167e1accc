"""Who has waited for whom: by hand, and for a rank that is made late."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

import shardwise
from shardwise.comm.ledger import Record
from shardwise.comm.stragglers import Part, Shares, Stragglers, blame, key_of, parts_of
from tests.harness import run_ranks
from tests.models import language_loss
from tests.profile.test_engine import BATCH, engine_of, window

LATE_S, TIMES = 0.02, 10


def part(launched: float, waited: float, finished: float, key: str = "gather:0@dp:0") -> Part:
    return Part(key, "all_gather", launched, waited, finished)


def test_blocked_time_before_the_last_rank_came_is_waiting_and_the_rest_is_transfer() -> None:
    # Rank 2 comes last, at 5. Rank 0 is blocked from 1 to 7, rank 1 from 6 to 7 only: it has had other work.
    found = blame({0: [part(1.0, 6.0, 7.0)], 1: [part(0.0, 1.0, 7.0)], 2: [part(5.0, 2.0, 7.0)]})
    assert found.ranks == {
        0: Shares(waited=4.0, caused=0.0, transfer=2.0),
        1: Shares(waited=0.0, caused=0.0, transfer=1.0),
        2: Shares(waited=0.0, caused=4.0, transfer=2.0),
    }
    assert found.by_op == {"all_gather": found.ranks}
    assert found.collectives == 1


def test_what_is_launched_early_and_waited_for_nowhere_costs_nothing() -> None:
    found = blame({0: [part(0.0, 0.0, 9.0)], 1: [part(8.0, 0.5, 9.0)]})
    assert found.ranks == {0: Shares(), 1: Shares(transfer=0.5)}


def test_what_has_ended_before_the_last_rank_came_is_waited_for_no_longer_than_that() -> None:
    # A broadcast's source goes on before the others have come.
    found = blame({0: [part(0.0, 1.0, 1.0)], 1: [part(5.0, 0.0, 5.0)]})
    assert found.ranks[0] == Shares(waited=1.0)


def test_only_collectives_that_several_ranks_have_are_compared() -> None:
    found = blame({0: [part(0.0, 3.0, 3.0)], 1: [part(2.0, 1.0, 3.0, key="gather:1@dp:0")]})
    assert found.collectives == 0 and found.ranks == {0: Shares(), 1: Shares()}


def test_records_without_an_order_or_an_end_have_no_part() -> None:
    ended = Record(0, "all_gather", "dp", 8, 4, "a", "", 1.0, 0.5, 2.0, kind="gather", ranks=2, turn=3)
    others = [
        Record(1, "share_object", "dp", 0, 0, "b", "", 1.0, 0.5, 2.0),
        Record(2, "all_gather", "dp", 8, 4, "c", "", 1.0, kind="gather", ranks=2, turn=4),
        Record(3, "all_gather", "dp", 8, 4, "clocks", "", 1.0, 0.5, 2.0, kind="explicit", ranks=2),
        Record(4, "all_gather", "gone", 8, 4, "d", "", 1.0, 0.5, 2.0, kind="gather", ranks=2),
    ]
    assert key_of(ended, [2, 3]) != key_of(ended, [0, 1])
    assert parts_of([ended, *others], {"dp": [0, 1]}, lambda at: at + 10) == [
        Part("gather:3@dp:0", "all_gather", 11.0, 0.5, 12.0)
    ]


# -- a rank that is late -----------------------------------------------------------------------------------------------


def trained(stage: int, log: bool, config: dict[str, Any]) -> tuple[Stragglers, list[float], Any]:
    """Steps in which rank 1 comes late to its backward passes; also returned is when each rank came to them."""
    engine = engine_of(stage, comms_logger={"enabled": log}, **config)
    window(engine)
    since = engine.ledger.sequence
    shardwise.comm.reset_log()
    came: list[float] = []
    for _ in range(TIMES):
        loss = language_loss(engine, BATCH)
        engine.job.barrier()  # what the ranks are late by in the forward pass is not what is tested
        if engine.global_rank == 1:
            time.sleep(LATE_S)
        came.append(time.perf_counter())
        engine.backward(loss)
        engine.step()
    found = engine.stragglers(since)
    logged = shardwise.comm.log_summary(show_straggler=True, return_dict=True) if log else None
    engine.destroy()
    return found, came, logged


TWO_LEVELS = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "mics_shard_size": 1},
}


@pytest.mark.parametrize(
    ("world", "stage", "config"),
    [(2, 3, {}), (3, 3, {}), (2, 0, {}), (2, 3, TWO_LEVELS)],
    ids=["2 ranks", "3 ranks", "stage 0", "replicas"],
)
def test_a_late_rank_is_named(world: int, stage: int, config: dict[str, Any]) -> None:
    results = run_ranks(trained, world, stage, False, config)
    found = results[0][0]
    assert all(other == found for other, _, _ in results)
    came = [times for _, times, _ in results]
    others = set(range(world)) - {1}
    # Ranks of one machine have one clock. Sleeps are longer than asked for where the machine is busy.
    late = {rank: sum(max(0.0, b - a) for a, b in zip(came[rank], came[1], strict=True)) for rank in others}
    assert all(seconds >= 0.9 * LATE_S * TIMES for seconds in late.values())
    # So much, at any place, is the fault of ranks that nobody has made late.
    noise = sum(found.ranks[rank].caused for rank in others)
    assert found.ranks[1].caused == pytest.approx(sum(late.values()), rel=0.1, abs=3 * noise + 0.02)
    for rank in others:
        assert found.ranks[rank].waited == pytest.approx(late[rank], rel=0.1, abs=3 * noise + 0.02)
        assert found.ranks[rank].caused < found.ranks[1].caused
    assert found.uncertainty < 0.05


def test_the_log_names_it_too() -> None:
    (found, _, logged), (_, _, other) = run_ranks(trained, 2, 3, True, {})
    again = json.loads(json.dumps(logged))["stragglers"]
    assert again["ranks"]["1"]["caused"] == pytest.approx(found.ranks[1].caused, rel=0.1)
    assert set(again) == {"ranks", "by_op", "collectives", "uncertainty"}
    assert other["stragglers"] == logged["stragglers"]
    assert len(logged["straggler_analysis"]) == 2
    assert json.loads(json.dumps(found.as_dict()))["ranks"]["0"]["waited"] == found.ranks[0].waited


def test_one_rank_waits_for_nobody() -> None:
    engine = engine_of(3)
    window(engine)
    found = engine.stragglers()
    engine.destroy()
    assert found.ranks == {0: Shares()} and found.collectives == 0
    assert found.table().splitlines()[1].split() == ["0", "0.0", "0.0", "0.0"]
