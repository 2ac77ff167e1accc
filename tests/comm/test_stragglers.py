"""Who has waited for whom: by hand, and for a rank that is made late."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest

import shardwise
from shardwise.comm.ledger import Record
from shardwise.comm.stragglers import Part, Shares, Stragglers, blame, key_of, parts_of
from shardwise.parallel import split
from tests.harness import on_ranks, run_ranks, thorough
from tests.models import language_loss
from tests.parallel.models import data, gpt, loss_of, sharing
from tests.profile.test_engine import BATCH, engine_of, window

LATE_S, TIMES = 0.05, 7


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


def test_records_without_an_order_or_an_end_have_no_part() -> None:
    ended = Record(0, "all_gather", "dp", 8, 4, "a", "", 1.0, 0.5, 2.0, kind="gather", members=[0, 1], turn=3)
    others = [
        Record(1, "share_object", "dp", 0, 0, "b", "", 1.0, 0.5, 2.0),
        Record(2, "all_gather", "dp", 8, 4, "c", "", 1.0, kind="gather", members=[0, 1], turn=4),
        Record(3, "all_gather", "dp", 8, 4, "clocks", "", 1.0, 0.5, 2.0, kind="explicit", members=[0, 1]),
        Record(4, "all_gather", "dp", 8, 4, "d", "", 1.0, 0.5, 2.0, kind="gather", members=[1]),
    ]
    assert key_of(ended) != key_of(replace(ended, members=[2, 3]))
    assert parts_of([ended, *others], lambda at: at + 10) == [Part(key_of(ended), "all_gather", 11.0, 0.5, 12.0)]


@on_ranks(2)
def test_collectives_of_each_mesh_dimension_meet() -> None:
    engine = sharing(gpt(shared=True), 1)
    since = engine.ledger.sequence
    loss, tokens = loss_of(engine, split(data(0, 1)))
    engine.backward(loss, weight=tokens)
    engine.step()
    assert engine.stragglers(since).by_op.keys() >= {"reduce_scatter", "all_to_all"}


# -- a rank that is late -----------------------------------------------------------------------------------------------


Steps = list[tuple[Stragglers, float]]
"""What each step's collectives show, and when the rank came to its backward pass."""


def trained(stage: int, log: bool, config: dict[str, Any]) -> tuple[Steps, Any]:
    """Steps in which rank 1 comes late to its backward passes."""
    engine = engine_of(stage, comms_logger={"enabled": log}, **config)
    window(engine)
    shardwise.comm.reset_log()
    steps: Steps = []
    for _ in range(TIMES):
        loss = language_loss(engine, BATCH)
        engine.job.barrier()  # what the ranks are late by in the forward pass is not what is tested
        since = engine.ledger.sequence
        if engine.global_rank == 1:
            time.sleep(LATE_S)
        came = time.perf_counter()
        engine.backward(loss)
        engine.step()
        steps.append((engine.stragglers(since), came))
    logged = shardwise.comm.log_summary(show_straggler=True, return_dict=True) if log else None
    return steps, logged


TWO_LEVELS = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "mics_shard_size": 1},
}


@pytest.mark.parametrize(
    ("world", "stage", "config"),
    [thorough(2, 3, {}), thorough(3, 3, {}), thorough(2, 0, {}), (2, 3, TWO_LEVELS)],
    ids=["2 ranks", "3 ranks", "stage 0", "replicas"],
)
def test_a_late_rank_is_named(world: int, stage: int, config: dict[str, Any]) -> None:
    results = [steps for steps, _ in run_ranks(trained, world, stage, False, config)]
    others = sorted(set(range(world)) - {1})
    wrong: list[float] = []
    for number in range(TIMES):
        found = results[0][number][0]
        assert all(steps[number][0] == found for steps in results) and found.uncertainty < 0.05
        # Ranks of one machine have one clock. Sleeps are longer than asked for where the machine is busy.
        late = {rank: results[1][number][1] - results[rank][number][1] for rank in others}
        differ = [abs(found.ranks[rank].waited - late[rank]) for rank in others]
        wrong.append(max(differ) + abs(found.ranks[1].caused - sum(late.values())))
    # A busy machine holds ranks up as well, at any place. In the quietest step only the sleep is seen.
    assert min(wrong) <= 0.1 * LATE_S * world
    caused = [sum(found.ranks[rank].caused for found, _ in results[0]) for rank in range(world)]
    assert caused[1] == max(caused) and caused[1] >= 0.7 * LATE_S * TIMES * len(others)


def test_the_log_names_it_too() -> None:
    (steps, logged), (_, other) = run_ranks(trained, 2, 3, True, {})
    again = json.loads(json.dumps(logged))["stragglers"]
    caused = sum(found.ranks[1].caused for found, _ in steps)
    # The log has the forward passes and the barriers, too.
    assert again["ranks"]["1"]["caused"] >= 0.9 * caused >= 0.7 * LATE_S * TIMES
    assert set(again) == {"ranks", "by_op", "collectives", "uncertainty"}
    assert again["collectives"] > sum(found.collectives for found, _ in steps)
    assert other["stragglers"] == logged["stragglers"]
    assert len(logged["straggler_analysis"]) == 2
    first = steps[0][0]
    assert json.loads(json.dumps(first.as_dict()))["ranks"]["0"]["waited"] == first.ranks[0].waited
