"""Timelines of a pipeline: a track of actions for each stage, in the order of the schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.pipe import make_schedule
from shardwise.pipeline.idle import text_of
from shardwise.pipeline.lowering import with_communication
from shardwise.profile.trace import merge, read, summarize
from tests.harness import run_ranks
from tests.pipeline.training import MICRO_BATCHES, Setting, data, engine_of


def recorded(setting: Setting, directory: str) -> None:
    engine = engine_of(setting)
    engine.train_batch(data(setting, 0))
    with engine.record_timeline(directory):
        engine.train_batch(data(setting, 1))
    engine.destroy()


def tracks(events: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the names of events in the order of time, by the name of the track, of tracks of stages."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    found: dict[str, list[str]] = {}
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda event: event["ts"]):
        if "stage" in event["args"]:
            assert event["cat"] == ("stage" if event["name"][0] in "FBIW" else "message")
            found.setdefault(names[event["pid"], event["tid"]], []).append(event["name"])
    return found


@pytest.mark.parametrize("schedule", ["zb-h1", "zbv"])
def test_a_timeline_has_a_track_of_actions_for_each_stage(schedule: str, tmp_path: Path) -> None:
    run_ranks(recorded, 2, Setting(2, schedule, options={"partition_method": "uniform"}), str(tmp_path))
    made = with_communication(make_schedule(schedule, 2, MICRO_BATCHES))
    expected: dict[int, list[str]] = {}
    for action in made:
        expected.setdefault(action.stage, []).append(text_of(action).rpartition(" stage ")[0])
    timelines = read(tmp_path)
    for rank, timeline in enumerate(timelines):
        own = {stage for stage, of in enumerate(made.rank_of) if of == rank}
        assert tracks(timeline.events) == {f"stage {stage}": expected[stage] for stage in own}
        # Ranges of actions contain those of compute: the table of times counts neither twice.
        times = summarize([timeline]).ranks[0]
        assert sum(times.shares.values()) == pytest.approx(times.whole)
    merged = merge(timelines)
    assert tracks(merged) == {f"stage {n}, rank {made.rank_of[n]}": names for n, names in expected.items()}
    processes = {e["pid"]: e["args"]["name"].split(" on ")[0] for e in merged if e["name"] == "process_name"}
    assert processes == {0: "rank 0", 1: "rank 1", 2: "pipeline"}
