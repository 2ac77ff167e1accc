"""Timelines: valid traces of real steps, on one clock, which change nothing and cost nothing when they are off."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from shardwise.comm.clocks import Clock
from shardwise.device import ranges
from shardwise.errors import ConfigError, UsageError
from shardwise.profile.timeline import TRACKS, Recorder, file_of
from shardwise.profile.trace import Timeline, read, summarize
from tests.harness import run_ranks, thorough
from tests.harness.logs import logged
from tests.profile.test_engine import engine_of, hooks, window

STEPS = 2


def recorded(
    stage: int, accumulation: int, path: str, ahead: float = 0.0, config: dict[str, Any] | None = None
) -> tuple[list[torch.Tensor], list[Any]]:
    """Train; return the parameters, and what was installed before, in and after the recorded steps."""
    clock = time.perf_counter
    shift = ahead * torch.distributed.get_rank() if torch.distributed.is_initialized() else 0.0
    with mock.patch("time.perf_counter", lambda: clock() + shift):
        section = {"enabled": bool(path), "path": path or "unused", "start_step": 1, "steps": STEPS}
        engine = engine_of(stage, accumulation, **{"timeline": section, **(config or {})})
        installed = []
        for _ in range(STEPS + 2):
            window(engine, accumulation)
            installed.append((len(ranges._listeners), engine.ledger.watcher is not None, hooks(engine)))
        state = engine.module_state_dict()
        engine.destroy()
    return [state[name] for name in sorted(state)], installed


def of(events: list[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    """The complete events whose fields, or arguments, have these values."""
    found = [event for event in events if event["ph"] == "X"]
    return [e for e in found if all(e.get(k, e["args"].get(k)) == value for k, value in wanted.items())]


def check_format(events: list[dict[str, Any]], rank: int) -> None:
    """What viewers ask of a trace, and our own promises on top."""
    kinds = Counter(event["ph"] for event in events)
    assert set(kinds) == {"X", "M", "C"}
    names = {(e["name"], e["tid"]): e["args"] for e in events if e["ph"] == "M"}
    assert names["process_name", 0]["name"].startswith(f"rank {rank} on ")
    tracks: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        assert event["pid"] == rank and isinstance(event["tid"], int) and event["name"]
        if event["ph"] == "X":
            assert event["cat"] in TRACKS
            assert event["dur"] >= 0 and isinstance(event["ts"], (int, float))
            assert {"unit", "bytes", "line", "step"} <= set(event["args"])
            assert names["thread_name", event["tid"]]["name"]
            tracks[event["tid"]].append(event)
        elif event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
    for track in tracks.values():  # side by side, or in one another
        open_until: list[float] = []
        for event in sorted(track, key=lambda event: (event["ts"], -event["dur"])):
            start, stop = event["ts"], event["ts"] + event["dur"]
            while open_until and open_until[-1] <= start + 5e-4:
                open_until.pop()
            assert not open_until or stop <= open_until[-1] + 2e-3, event
            open_until.append(stop)


def check_clocks(timelines: list[Timeline]) -> int:
    """No rank has the result of a collective before all have come to it; return how many were looked at."""
    met: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for timeline in timelines:
        for event in timeline.events:
            if event["ph"] == "X" and event["args"].get("id"):
                met[event["args"]["id"]].append(event)
    unknown = sum(timeline.about["clock_uncertainty_us"] for timeline in timelines)
    for events in met.values():
        assert len(events) == len(timelines)
        assert len({(e["name"], e["cat"], e["args"]["bytes"], e["args"]["turn"]) for e in events}) == 1
        first_end = min(event["ts"] + event["dur"] for event in events)
        assert first_end >= max(event["ts"] for event in events) - unknown - 1.0
    return len(met)


@pytest.mark.parametrize(("stage", "accumulation"), [(3, 2), thorough(3, 1), thorough(1, 2)])
def test_the_timelines_of_two_ranks(stage: int, accumulation: int, tmp_path: Path) -> None:
    # The second rank's clock is far from the first one's, as on another machine.
    results = run_ranks(recorded, 2, stage, accumulation, str(tmp_path), 7000.0)
    timelines = read(tmp_path)
    assert [timeline.rank for timeline in timelines] == [0, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == [file_of(0), file_of(1)]
    for timeline in timelines:
        check_format(timeline.events, timeline.rank)
        assert {key: timeline.about[key] for key in ("first_step", "steps", "world", "left_out")} == {
            "first_step": 1,
            "steps": STEPS,
            "world": 2,
            "left_out": 0,
        }
        events = timeline.events
        for unit in ("blocks.0", "blocks.1"):
            assert len(of(events, name=f"forward {unit}")) == STEPS * accumulation
        assert len(of(events, name="backward")) == STEPS * accumulation
        reducing = STEPS * (accumulation if stage > 1 else 1)
        assert len(of(events, name="backward blocks.1")) == STEPS * accumulation
        assert len(of(events, name="reduce_scatter blocks.0")) == reducing
        assert len(of(events, name="step")) == STEPS
        assert {event["args"]["step"] for event in of(events, name="step")} == {1, 2}
        gathers = [event for event in of(events, cat="gather") if event["args"]["unit"] == "blocks.0"]
        # One of the units is kept between the passes; the others are gathered twice.
        assert len(gathers) == (2 * STEPS * accumulation if stage == 3 else STEPS)
        assert all(event["args"]["bytes"] == 5120 for event in gathers)
        assert any("test_engine.py" in event["args"]["line"] for event in of(events, cat="step"))
        backward = of(events, name="backward")[0]
        inside = of(events, name="backward blocks.1")[0]
        assert backward["ts"] <= inside["ts"]
        assert inside["ts"] + inside["dur"] <= backward["ts"] + backward["dur"] + 0.01
        memory = [event for event in events if event["ph"] == "C"]
        assert len(memory) == STEPS * (2 * accumulation + 1)
        assert all(event["args"]["parameters"] > 0 for event in memory)
    assert check_clocks(timelines) > 10
    plain = run_ranks(recorded, 2, stage, accumulation, "")
    for (state, installed), (other, off) in zip(results, plain, strict=True):
        assert all(map(torch.equal, state, other))
        assert [on[:2] for on in installed] == [(1, True), (1, True), (0, False), (0, False)]
        assert {on[:2] for on in off} == {(0, False)}
        assert {on[2] for on in installed} == {on[2] for on in off}


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_what_is_moved_is_shown(device: str, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    place = {"device": device, **({"nvme_path": str(disk)} if device == "nvme" else {})}
    config = {"zero_optimization": {"stage": 2, "offload_optimizer": place}}
    run_ranks(recorded, 2, 2, 1, str(tmp_path / "out"), 0.0, config)
    timelines = read(tmp_path / "out")
    for timeline in timelines:
        check_format(timeline.events, timeline.rank)
        moves = of(timeline.events, cat="move")
        steps = of(timeline.events, name="step blocks.1")
        if device == "cpu":  # the memory of the host is where a CPU computes
            assert not moves and not steps
            continue
        assert len(steps) == STEPS
        shown = Counter(event["args"]["what"] for event in moves if event["args"]["unit"] == "blocks.1")
        assert shown["bring"] == shown["take"] == shown["acquire"] == STEPS
        brought = of(timeline.events, name="bring blocks.1")[0]
        assert brought["args"]["bytes"] == 7680  # master weights and two moments of half of the unit
        assert brought["ts"] + brought["dur"] <= steps[0]["ts"]
    times = summarize(timelines).ranks[0]
    assert (times.moved > 0) == (times.shares["moves"] > 0) == (device == "nvme")
    assert 0 <= times.moves_hidden <= times.moved


def span(cat: str, start: float, stop: float, tid: int = 0, **args: Any) -> dict[str, Any]:
    return {
        "name": cat,
        "cat": cat,
        "ph": "X",
        "ts": start * 1e6,
        "dur": (stop - start) * 1e6,
        "tid": tid,
        "args": args,
    }


def test_each_moment_is_counted_once() -> None:
    events = [
        span("compute", 0, 10),
        span("gather", 1, 6, tid=40),
        span("wait", 4, 6, what="wait for gather"),
        span("step", 10, 14),
        span("move", 11, 12, what="wait for tensors"),
        span("move", 8, 12, tid=80, what="bring"),
        span("wait", 13, 14, what="wait for collective"),
        span("idle", 14, 16),
        span("compute", 16, 17),
    ]
    (times,) = summarize([Timeline(0, "here", {}, events)]).ranks
    assert times.whole == 17
    assert times.shares == {
        "gather waits": 2,
        "reduction waits": 0,
        "other waits": 1,
        "moves": 1,
        "step": 2,
        "compute": 9,
        "idle": 2,
    }
    assert (times.under_way, times.hidden, times.moved, times.moves_hidden) == (5, 3, 4, 3)


# -- what ends early, and what does not fit ----------------------------------------------------------------------------


def ends_early(path: str, how: str) -> None:
    rank, more = torch.distributed.get_rank(), {}
    if how == "destroyed":
        more["timeline"] = {"enabled": True, "path": path, "start_step": 0, "steps": 50}
    engine = engine_of(3, **more)
    with logged() as kept:
        if how == "destroyed":
            window(engine)
            engine.destroy()
        elif how == "raises":
            with pytest.raises(RuntimeError, match="of the script"), engine.record_timeline(path):
                window(engine)
                raise RuntimeError("of the script")
        elif how == "some ranks":
            with engine.record_timeline(Path(path), ranks=[1]):
                window(engine)
        elif how == "too much":
            with engine.record_timeline(path, max_events=20):
                window(engine)
        elif how == "twice":
            with engine.record_timeline(path):
                window(engine)
                with pytest.raises(UsageError, match="being recorded already"), engine.record_timeline(path):
                    pass
                engine.destroy()  # before the block has ended: what there is is written, once
        elif how == "no place":
            file = Path(path).parent / f"file{rank}"
            file.write_text("")
            with engine.record_timeline(file):
                window(engine)
    text = "\n".join(kept.lines)
    assert how != "too much" or ("has left out" in text and "max_events" in text)
    assert how != "no place" or ("cannot write" in text and f"file{rank}" in text)
    assert not ranges._listeners and engine.ledger.watcher is None


@pytest.mark.parametrize("how", ["destroyed", "raises", "some ranks", "too much", "twice", "no place"])
def test_a_recording_that_ends_early(how: str, tmp_path: Path) -> None:
    path = tmp_path / "out"
    run_ranks(ends_early, 2, str(path), how)
    if how == "no place":
        assert not path.exists()
        return
    timelines = read(path)
    assert [timeline.rank for timeline in timelines] == ([1] if how == "some ranks" else [0, 1])
    for timeline in timelines:
        if how == "too much":
            kept = [event for event in of(timeline.events) if event["cat"] not in ("idle", "wait")]
            assert timeline.about["left_out"] > 20 and len(kept) <= 20
        else:
            check_format(timeline.events, timeline.rank)
            assert timeline.about["steps"] == 1


def test_ranks_that_are_not_there_are_refused() -> None:
    with pytest.raises(UsageError, match=r"timeline\.ranks: there are no ranks \[1, 4\]"):
        engine_of(0, timeline={"enabled": True, "ranks": [0, 1, 4]})
    with pytest.raises(ConfigError, match=r"timeline\.steps"):
        engine_of(0, timeline={"steps": 0})


# -- ranges ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 3])
def test_profilers_show_the_same_ranges(stage: int) -> None:
    engine = engine_of(stage)
    window(engine)
    with torch.profiler.profile() as profile:
        window(engine)
    engine.destroy()
    shown = Counter(event.name for event in profile.events() if event.name.startswith("shardwise::"))
    for name in ("forward blocks.0", "backward blocks.1", "backward", "boundary", "step", "reduce blocks.0"):
        assert shown[f"shardwise::{name}"] == 1


def test_where_nobody_looks_no_range_is_made() -> None:
    engine = engine_of(3)
    with mock.patch.object(torch.profiler, "record_function", side_effect=AssertionError("made")):
        window(engine)
        engine.destroy()
    assert ranges.named("forward", "a") is ranges.named("backward", "b")


def test_a_device_that_runs_ahead_is_brought_to_the_hosts_clock() -> None:
    class Mark:
        """An event of a device whose clock is a thousandth too fast."""

        def __init__(self, at: float) -> None:
            self.at = at

        def elapsed_time(self, other: Mark) -> float:
            return (other.at - self.at) * 1e3 * 1.001

    recorder = Recorder(cuda=False, most=10, step=lambda: 0, sizes={}, memory=dict)
    recorder._first, recorder._last = (100.0, Mark(100.0)), (110.0, Mark(110.0))
    assert recorder._on_host(Mark(105.0)) == pytest.approx(105.0)


def test_a_recording_ends_after_all_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        """An event of a stream for which the host has not waited."""

        complete = False

        def __init__(self, enable_timing: bool) -> None:
            self.at = time.perf_counter()

        def record(self) -> None:
            pass

        def synchronize(self) -> None:
            self.complete = True

        def elapsed_time(self, other: Event) -> float:
            if not (self.complete and other.complete):
                raise RuntimeError("device not ready")
            return 1e3 * (other.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: setattr(Event, "complete", True))
    recorder = Recorder(cuda=True, most=10, step=lambda: 0, sizes={}, memory=dict)
    with recorder.around("forward", "a", 1):
        pass
    recorder.finish()
    found = recorder.events(0, "host", Clock(), None)
    assert [event["name"] for event in found if event.get("cat") == "compute"] == ["forward a"]
