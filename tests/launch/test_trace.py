"""`shardwise trace`: timelines of all ranks in one file and one table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.profile.timeline import FORMAT, file_of
from tests.launch.conftest import Call

US = 1e6


def span(name: str, cat: str, start: float, stop: float, rank: int, tid: int, **args: Any) -> dict[str, Any]:
    """A complete event; times in seconds."""
    args = {"unit": "", "bytes": 0, "line": "", "step": 0, **args}
    times = {"ts": start * US, "dur": (stop - start) * US}
    return {"name": name, "cat": cat, "ph": "X", **times, "pid": rank, "tid": tid, "args": args}


def gather(rank: int, start: float, stop: float, waited: float) -> dict[str, Any]:
    named = {"unit": "a", "op": "all_gather", "kind": "gather", "turn": 4, "id": "gather:4@dp:0"}
    return span("all_gather a", "gather", start, stop, rank, 40, waited=waited * US, **named)


def put(directory: Path, rank: int, events: list[dict[str, Any]], **about: Any) -> None:
    other = {"format": FORMAT, "rank": rank, "world": 3, "host": "here", "left_out": 0, "clock_uncertainty_us": 250.0}
    directory.mkdir(exist_ok=True)
    content = {"otherData": {**other, **about}, "traceEvents": events}
    (directory / file_of(rank)).write_text(json.dumps(content))


def put_two(directory: Path) -> None:
    """Rank 1 comes two seconds late to a gather, for which rank 0 waits from its launch on."""
    waits = span("wait for gather a", "wait", 1, 4, 0, 30, what="wait for gather")
    put(directory, 0, [span("forward", "compute", 0, 5, 0, 10), waits, gather(0, 1, 4, 3)])
    put(directory, 1, [span("forward", "compute", 0, 5, 1, 10), gather(1, 3, 4, 0)], left_out=7)


def test_a_table_and_one_trace(tmp_path: Path, call: Call) -> None:
    put_two(tmp_path / "run")
    code, out, _ = call("trace", tmp_path / "run")
    assert code == 0
    head, _, first, second = [line.split() for line in out.splitlines() if line.strip()][:4]
    assert head[:4] == ["rank", "gather", "waits", "(s)"]
    assert first[:3] == ["0", "3.000", "60%"] and first[-4:] == ["5.000", "0%", "2.000", "0.000"]
    assert second[:3] == ["1", "0.000", "0%"] and second[-4:] == ["5.000", "100%", "0.000", "2.000"]
    assert "1 collectives compared; clocks are known to 0.250 ms" in out
    assert "rank 1: 7 ranges and collectives are left out" in out
    assert "there are no timelines of ranks 2" in out
    merged = json.loads((tmp_path / "run" / "merged.json").read_text())
    events = merged["traceEvents"]
    assert merged["otherData"]["ranks"] == [0, 1]
    assert {event["pid"] for event in events if event["ph"] == "X"} == {0, 1}
    begin, end = [event for event in events if event["ph"] in "sf"]
    assert (begin["ph"], begin["pid"], begin["ts"]) == ("s", 1, 3 * US)
    assert (end["ph"], end["pid"], end["id"]) == ("f", 0, begin["id"])
    assert 1 * US < end["ts"] < 4 * US  # inside of the event that it points to


def test_numbers_as_json_and_a_file_of_ones_own(tmp_path: Path, call: Call) -> None:
    put_two(tmp_path)
    target = tmp_path / "new" / "all.json"
    found = json.loads(call("trace", tmp_path, "-o", target, "--json")[1])
    assert found["file"] == str(target) and target.exists()
    assert found["ranks"][0]["shares"]["gather waits"] == 3.0
    assert found["stragglers"]["ranks"]["1"] == {"waited": 0.0, "caused": 2.0, "transfer": 0.0}
    assert call("trace", tmp_path)[0] == call("trace", tmp_path)[0] == 0  # merged.json is none of a rank


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no timeline-*.json"),
        ("{", "this is not a timeline"),
        ("[" * 100_000, "this is not a timeline"),
        ('{"otherData": {"format": "x"}, "traceEvents": []}', "its format is 'x'"),
        (json.dumps({"otherData": {"format": FORMAT}, "traceEvents": []}), "it has no 'rank'"),
    ],
)
def test_what_is_no_timeline_is_refused(content: str | None, message: str, tmp_path: Path, call: Call) -> None:
    if content is not None:
        (tmp_path / file_of(0)).write_text(content)
    code, _, error = call("trace", tmp_path)
    assert code == 1 and message in error and str(tmp_path) in error
