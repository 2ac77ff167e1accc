"""Merged timeline of all ranks, and a time breakdown of each rank.

Each moment of a rank belongs to the first active entry of `SHARES`: waiting precedes moving, and moving precedes the
step and compute ranges that contain both; the rest is idle.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shardwise.comm.stragglers import Part, Shares, Stragglers, blame, lateness
from shardwise.errors import TimelineError
from shardwise.profile.timeline import FLIGHTS_TRACK, FORMAT, TRACKS, Event, write

# categories of a rank's time breakdown, in order of precedence
SHARES = ("gather waits", "reduction waits", "other waits", "moves", "step", "compute", "idle")

LEAST_WAIT_US = 50.0  # minimum wait for another rank that is drawn as an arrow

Interval = tuple[float, float]


@dataclass
class Timeline:
    """The timeline file of one rank: its machine, metadata and events."""

    rank: int
    host: str
    about: Mapping[str, Any]
    events: list[Event]


@dataclass
class RankTimes:
    """Time breakdown of one rank, in seconds.

    Attributes:
        whole: duration of the recording.
        shares: by the names of `SHARES`; their sum is `whole`.
        under_way: time with all-gathers or reductions in flight: launched, not yet waited for.
        hidden: part of `under_way` in which the rank did not wait for them.
        moved: time with state transfers between tiers.
        moves_hidden: part of `moved` in which the rank did not wait for them.
    """

    rank: int
    whole: float = 0.0
    shares: dict[str, float] = field(default_factory=dict)
    under_way: float = 0.0
    hidden: float = 0.0
    moved: float = 0.0
    moves_hidden: float = 0.0


@dataclass
class Summary:
    """Time breakdown of each rank, and the stragglers, from a merged trace."""

    ranks: list[RankTimes]
    stragglers: Stragglers

    def as_dict(self) -> dict[str, Any]:
        """Return the summary as JSON values."""
        return {"ranks": [asdict(times) for times in self.ranks], "stragglers": self.stragglers.as_dict()}


def read(directory: str | Path) -> list[Timeline]:
    """Return the timelines in a directory, in rank order; raises a TimelineError if there are none, or invalid ones."""
    directory = Path(directory)
    if not directory.is_dir():
        raise TimelineError(f"{directory}: there is no such directory; it is `timeline.path` of the configuration")
    files = sorted(directory.glob("timeline-*.json"))
    if not files:
        raise TimelineError(
            f"{directory}: there is no timeline-*.json. Ranks write them after the last step of the section "
            "`timeline`, or when the engine is destroyed before that"
        )
    return [_checked(file) for file in files]


def _checked(file: Path) -> Timeline:
    try:
        content = json.loads(file.read_bytes())
        about, events = content["otherData"], content["traceEvents"]
        if about["format"] != FORMAT:
            raise ValueError(f"its format is {about['format']!r}, and not {FORMAT!r}")
        for event in events:
            if event["ph"] == "X":
                start, length, args = event["ts"], event["dur"], event["args"]
                numbers = all(isinstance(number, (int, float)) for number in (start, length))
                if not numbers or length < 0 or not isinstance(args, dict) or not isinstance(event["cat"], str):
                    raise ValueError(f"{event['name']!r} is no event of a timeline")
        return Timeline(int(about["rank"]), str(about["host"]), about, events)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise TimelineError(f"{file}: this is not a timeline that shardwise has written: {reason}") from None


def merge(timelines: Sequence[Timeline]) -> list[Event]:
    """Return the events of all ranks, with arrows from the last rank in a collective to the ranks it blocked.

    Tracks of pipeline stages are moved to a process of their own, in the order of stages.
    """
    found = _with_stages_together([event for timeline in timelines for event in timeline.events])
    number = 0
    for together in _met(timelines):
        parts = {rank: _part(event) for rank, event in together.items()}
        late = lateness(parts)
        waited = {rank: seconds for rank, seconds in late.blocked.items() if 1e6 * seconds >= LEAST_WAIT_US}
        for rank in waited:
            number += 1
            first, second = together[late.last], together[rank]
            arrow = {"name": "came last", "cat": "straggler", "id": number}
            begin = {"ph": "s", "ts": first["ts"], "pid": first["pid"], "tid": first["tid"]}
            end = {
                "ph": "f",
                "bp": "e",
                "ts": second["ts"] + second["dur"] - min(1.0, second["dur"] / 2),
                "pid": rank,
                "tid": second["tid"],
            }
            found += [{**arrow, **begin}, {**arrow, **end}]
    return found


def _with_stages_together(events: list[Event]) -> list[Event]:
    of_stages = [event for event in events if "stage" in event.get("args", {})]
    if not of_stages:
        return events
    order = sorted({(event["args"]["stage"], event["pid"]) for event in of_stages})
    tracks = {track: number for number, track in enumerate(order, 1)}
    process = 1 + max(event["pid"] for event in events)

    def metadata(name: str, tid: int, /, **args: Any) -> Event:
        return {"name": name, "ph": "M", "pid": process, "tid": tid, "args": args}

    found = [metadata("process_name", 0, name="pipeline"), metadata("process_sort_index", 0, sort_index=-1)]
    for (stage, rank), tid in tracks.items():
        found.append(metadata("thread_name", tid, name=f"stage {stage}, rank {rank}"))
        found.append(metadata("thread_sort_index", tid, sort_index=tid))
    found += [{**event, "pid": process, "tid": tracks[event["args"]["stage"], event["pid"]]} for event in of_stages]
    return found + [event for event in events if event["tid"] < TRACKS["stage"][0]]  # with no names of moved tracks


def write_merged(timelines: Sequence[Timeline], path: str | Path) -> None:
    """Write one trace of all ranks; raises an OSError if the file cannot be written."""
    write(Path(path), merge(timelines), ranks=[timeline.rank for timeline in timelines])


def _met(timelines: Sequence[Timeline]) -> Iterator[dict[int, Event]]:
    met: dict[str, dict[int, Event]] = defaultdict(dict)
    for timeline in timelines:
        for event in _complete(timeline.events):
            if event["args"].get("id"):
                met[event["args"]["id"]][timeline.rank] = event
    return (together for together in met.values() if len(together) > 1)


def _complete(events: Iterable[Event]) -> Iterator[Event]:
    return (event for event in events if event["ph"] == "X")


def _part(event: Event) -> Part:
    args, start = event["args"], event["ts"] / 1e6
    return Part(args["id"], args["op"], start, args["waited"] / 1e6, start + event["dur"] / 1e6)


def summarize(timelines: Sequence[Timeline]) -> Summary:
    """Return the time breakdown of each rank, and the stragglers."""
    parts = {
        timeline.rank: [_part(event) for event in _complete(timeline.events) if event["args"].get("id")]
        for timeline in timelines
    }
    unknown = max((float(timeline.about.get("clock_uncertainty_us", 0.0)) for timeline in timelines), default=0.0)
    return Summary([_times(timeline) for timeline in timelines], blame(parts, unknown / 1e6))


def _times(timeline: Timeline) -> RankTimes:
    of: dict[str, list[Interval]] = defaultdict(list)
    flights: list[Interval] = []
    for event in _complete(timeline.events):
        interval = event["ts"], event["ts"] + event["dur"]
        if event["tid"] >= FLIGHTS_TRACK[0] and event["cat"] == "move":
            flights.append(interval)
        else:
            of[_share(event)].append(interval)
    found = RankTimes(timeline.rank)
    ends = [end for share in SHARES for interval in of[share] for end in interval]
    if not ends:
        return found
    found.whole = (max(ends) - min(ends)) / 1e6
    taken: list[Interval] = []
    for share in SHARES:
        before = _length(taken)
        taken = union([*taken, *of[share]])
        found.shares[share] = (_length(taken) - before) / 1e6
    found.shares["idle"] += max(0.0, found.whole - sum(found.shares.values()))
    under_way = union([*of["gather"], *of["reduce"]])
    waits = union([*of["gather waits"], *of["reduction waits"]])
    found.under_way = _length(under_way) / 1e6
    found.hidden = found.under_way - _length(common(under_way, waits)) / 1e6
    moved = union(flights)
    found.moved = _length(moved) / 1e6
    found.moves_hidden = found.moved - _length(common(moved, union(of["moves"]))) / 1e6
    return found


def _share(event: Event) -> str:
    category = event["cat"]
    if category == "wait":
        what = event["args"].get("what", "")
        return {"wait for gather": "gather waits", "wait for reduction": "reduction waits"}.get(what, "other waits")
    return "moves" if category == "move" else str(category)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals, as sorted disjoint intervals.

    >>> union([(3, 4), (0, 2), (1, 3)])
    [(0, 4)]
    """
    found: list[Interval] = []
    for start, stop in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


def common(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the intersection of two unions.

    >>> common([(0, 4), (6, 9)], [(3, 7)])
    [(3, 4), (6, 7)]
    """
    found, place = [], 0
    for start, stop in one:
        while place < len(other) and other[place][1] <= start:
            place += 1
        at = place
        while at < len(other) and other[at][0] < stop:
            found.append((max(start, other[at][0]), min(stop, other[at][1])))
            at += 1
    return found


def _length(intervals: Iterable[Interval]) -> float:
    return sum(stop - start for start, stop in intervals)


def rows(summary: Summary) -> Iterator[list[str]]:
    """Yield the rows of a table, its header first."""
    late: Mapping[int, Shares] = summary.stragglers.ranks
    yield ["rank", *(f"{share} (s)" for share in SHARES), "whole (s)", "hidden", "waited for others (s)", "caused (s)"]
    for times in summary.ranks:
        parts = [times.shares.get(share, 0.0) for share in SHARES]
        cells = [f"{part:.3f} {part / times.whole if times.whole else 0:4.0%}" for part in parts]
        hidden = f"{times.hidden / times.under_way:.0%}" if times.under_way else "-"
        own = late.get(times.rank, Shares())
        yield [str(times.rank), *cells, f"{times.whole:.3f}", hidden, f"{own.waited:.3f}", f"{own.caused:.3f}"]
