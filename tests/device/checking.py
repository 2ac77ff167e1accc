"""Race, lifetime and deadlock checks for the traces of recorded devices.

- Order: CUDA streams, events and the host must order two uses of the same bytes if one use writes. Each stream has a
  vector clock (Fidge 1988, Mattern 1989): the count of its kernels, and the latest kernel of each other stream that it
  waits for. An earlier use that is not in the clock of a later use may run concurrently.
- Memory: kernels of the stream that owns released memory can reuse it at once. They must run after all uses of it.
- Progress: the checker simulates hosts and streams of all ranks together. A collective runs when each rank of its group
  has reached it. If no host or stream can proceed, the ranks are deadlocked.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tests.device.recording import COMPUTE, Event, Span, Trace

Clock = dict[str, int]

_GROUP = "group "  # prefix of the stream names of process groups


@dataclass(frozen=True)
class Problem:
    """A defect of a rank (-1: all): "race" (unordered uses), "early" (memory released before its last use), "order"
    (ranks launch different collectives) or "stuck" (deadlock).
    """

    kind: str
    rank: int
    text: str

    def __str__(self) -> str:
        where = "all ranks" if self.rank < 0 else f"rank {self.rank}"
        return f"{self.kind} on {where}: {self.text}"


def check(traces: Sequence[Trace]) -> list[Problem]:
    """Return the defects in the traces of all ranks, in rank order."""
    found = [problem for rank, trace in enumerate(traces) for problem in check_order(trace, rank)]
    return found + check_progress(traces)


# -- order and memory --------------------------------------------------------------------------------------------------


@dataclass
class _Use:
    span: Span
    stream: str
    count: int
    writes: bool
    what: str


def _join(clock: Clock, other: Clock) -> None:
    for stream, count in other.items():
        if count > clock.get(stream, 0):
            clock[stream] = count


class _Order:
    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._clocks: dict[str, Clock] = defaultdict(dict)
        self._host: Clock = {}
        self._marks: dict[int, Clock] = {}
        self._ended: dict[tuple[str, int], Clock] = {}
        self._uses: dict[int, list[_Use]] = defaultdict(list)
        self._owner: dict[int, str] = {}
        self._given: dict[str, dict[str, _Use]] = defaultdict(dict)  # last use on each stream, by owner
        self._born: dict[int, dict[str, _Use]] = {}
        self.problems: list[Problem] = []

    def take_in(self, event: Event) -> None:
        kind, stream = event.kind, event.stream
        if kind == "kernel":
            self._use(event, stream, self._launch(stream))
        elif kind == "collective":
            queue = _GROUP + event.group
            _join(self._clocks[queue], self._clocks[stream])
            self._use(event, queue, self._launch(queue))
            self._ended[event.group, event.number] = dict(self._clocks[queue])
        elif kind == "arrive":
            _join(self._clocks[stream], self._ended[event.group, event.number])
        elif kind == "mark":
            _join(self._clocks[stream], self._host)
            self._marks[event.number] = dict(self._clocks[stream])
        elif kind == "wait":
            _join(self._clocks[stream], self._marks[event.number])
        elif kind == "block":
            _join(self._host, self._marks[event.number])
        elif kind == "read":
            _join(self._host, self._clocks[stream])
        elif kind == "take":
            self._owner[event.number] = stream
            self._born[event.number] = dict(self._given[stream])
        elif kind == "give":
            given = self._given[self._owner.get(event.number, stream)]
            for use in self._uses.pop(event.number, []):
                last = given.get(use.stream)
                if last is None or use.count > last.count:
                    given[use.stream] = use

    def clock(self, stream: str) -> Clock:
        return dict(self._clocks[stream])

    def _launch(self, stream: str) -> Clock:
        clock = self._clocks[stream]
        _join(clock, self._host)
        clock[stream] = clock.get(stream, 0) + 1
        return clock

    def _use(self, event: Event, stream: str, clock: Clock) -> None:
        what = f"{event.name} on {stream!r}"
        for spans, writes in ((event.reads, False), (event.writes, True)):
            for span in spans:
                if span.start == span.stop:
                    continue
                for use in self._born.pop(span.memory, {}).values():
                    if clock.get(use.stream, 0) < use.count:
                        self._report(
                            "early",
                            f"memory of {use.what} was given back to {self._owner[span.memory]!r} and may be taken by "
                            f"{what}, which does not wait for it",
                        )
                self._compare(span, stream, clock, writes, what)

    def _compare(self, span: Span, stream: str, clock: Clock, writes: bool, what: str) -> None:
        uses, kept = self._uses[span.memory], []
        for use in uses:
            behind = clock.get(use.stream, 0) >= use.count
            if not behind and (writes or use.writes) and use.span.start < span.stop and span.start < use.span.stop:
                verb = "writes" if writes else "reads"
                self._report("race", f"{what} {verb} what {use.what} {'writes' if use.writes else 'reads'}")
            covered = span.start <= use.span.start and use.span.stop <= span.stop
            # A kernel ordered after this use is ordered after the covered use. A read does not replace a read of
            # another stream.
            if not (covered and behind and (writes or (not use.writes and use.stream == stream))):
                kept.append(use)
        kept.append(_Use(span, stream, clock[stream], writes, what))
        self._uses[span.memory] = kept

    def _report(self, kind: str, text: str) -> None:
        problem = Problem(kind, self._rank, text)
        if problem not in self.problems:
            self.problems.append(problem)


def check_order(trace: Trace, rank: int = 0) -> list[Problem]:
    """Return unordered memory uses of one rank, and memory that is released too early."""
    order = _Order(rank)
    for event in trace.events:
        order.take_in(event)
    return order.problems


# -- overlap -----------------------------------------------------------------------------------------------------------


def overlaps(trace: Trace, chosen: Callable[[Event], bool], stream: str = COMPUTE) -> list[tuple[Event, int]]:
    """Return the selected kernels and collectives, each with the number of kernels of `stream` that may overlap it.

    Overlapping kernels are ordered neither before nor after the selected one. A copy on the same stream has none.
    """
    order = _Order(0)
    found: list[tuple[Event, str, int, int]] = []
    known: list[Clock] = []
    for event in trace.events:
        order.take_in(event)
        if event.kind not in ("kernel", "collective"):
            continue
        queue = event.stream if event.kind == "kernel" else _GROUP + event.group
        clock = order.clock(queue)
        if queue == stream:
            known.append(clock)
        if chosen(event):
            found.append((event, queue, clock[queue], clock.get(stream, 0)))
    result = []
    for event, queue, count, before in found:
        later = sum(1 for clock in known if clock.get(queue, 0) >= count)
        result.append((event, max(0, len(known) - later - before)))
    return result


# -- progress ----------------------------------------------------------------------------------------------------------


class _Player:
    """Simulates the host and the streams of one rank. "say" events that it interprets:

    - "launch" pass, place ... "launched": the all-gather at a place of a pass; helper threads may launch it earlier.
    - "want" pass, place: request to the peers for that all-gather.
    - "park" pass, "unpark": bounds of a block in which helper threads may launch all-gathers of that pass only.
    - "written" version, mark: the event after which the shards are written.
    - "fetch" version: the host waits until helpers of all other ranks have copied theirs, on the event's stream.
    """

    def __init__(self, rank: int, trace: Trace) -> None:
        self.rank = rank
        self.events = deque(trace.events)
        self.queues: dict[str, deque[Event]] = defaultdict(deque)
        self.reached: set[int] = set()
        self.ended: set[tuple[str, int]] = set()
        self.parked: int | None = None
        self.queried: set[tuple[int, int]] = set()
        self.versions: dict[int, int] = {}
        self.waits: Event | None = None
        self.answers: list[tuple[_Player, int]] | None = None
        self.fetches = 0

    def host(self, players: Sequence[_Player]) -> bool:
        moved = False
        while self.events:
            event = self.events[0]
            if event.kind == "block" and event.number not in self.reached:
                self.waits = event
                return moved
            if event.kind == "read" and self.queues[event.stream]:
                self.waits = event
                return moved
            if event.kind == "say" and not self._hears(event, players):
                self.waits = event
                return moved
            self.waits = None
            self.events.popleft()
            self._launch(event)
            moved = True
        return moved

    def _launch(self, event: Event) -> None:
        if event.kind in ("mark", "wait", "arrive", "kernel", "collective"):
            self.queues[event.stream].append(event)

    def _hears(self, event: Event, players: Sequence[_Player]) -> bool:
        if event.name == "park":
            (self.parked,) = event.numbers
        elif event.name == "unpark":
            self.parked = None
        elif event.name == "written":
            version, mark = event.numbers
            self.versions[version] = mark
        elif event.name == "want":
            number, place = event.numbers
            for player in players:
                if player is not self:
                    player.queried.add((number, place))
        elif event.name == "fetch":
            (version,) = event.numbers
            peers = [player for player in players if player is not self]
            if self.answers is None and all(version in peer.versions for peer in peers):
                self.answers = []
                for number, peer in enumerate(peers):
                    copied = -1 - (self.fetches * len(players) + number) * len(players) - self.rank
                    peer.queues[event.stream].append(Event("wait", stream=event.stream, number=peer.versions[version]))
                    peer.queues[event.stream].append(Event("mark", stream=event.stream, number=copied))
                    self.answers.append((peer, copied))
            if self.answers is None or any(copied not in peer.reached for peer, copied in self.answers):
                return False
            self.answers, self.fetches = None, self.fetches + 1
        return True

    def device(self) -> bool:
        moved = False
        for stream, queue in list(self.queues.items()):
            while queue and not stream.startswith(_GROUP):
                event = queue[0]
                if event.kind == "wait" and event.number not in self.reached:
                    break
                if event.kind == "arrive" and (event.group, event.number) not in self.ended:
                    break
                queue.popleft()
                moved = True
                if event.kind == "mark":
                    self.reached.add(event.number)
                elif event.kind == "collective":
                    self.queues[_GROUP + event.group].append(event)
        return moved

    def help(self) -> bool:
        if self.parked is None or self.waits is None:
            return False
        moved = False
        for number, place in sorted(one for one in self.queried if one[0] == self.parked):
            early: list[Event] = []
            for bracket in _brackets(self.events):
                if bracket[0].numbers[0] == number and bracket[0].numbers[1] <= place:
                    early += bracket
            for event in early:
                self._launch(event)
                moved = True
            taken = set(map(id, early))
            self.events = deque(event for event in self.events if id(event) not in taken)
        return moved

    def where(self) -> str:
        heads = [
            f"{stream!r} for {queue[0].kind} {queue[0].name} {queue[0].group} {queue[0].number}".replace("  ", " ")
            for stream, queue in self.queues.items()
            if queue
        ]
        host = f"host for {self.waits.kind} {self.waits.name} {self.waits.number}" if self.waits else "host has ended"
        return f"rank {self.rank}: {'; '.join([host, *heads])}"


def _brackets(events: deque[Event]) -> Iterator[list[Event]]:
    inside: list[Event] | None = None
    for event in events:
        if event.kind == "say" and event.name == "launch":
            inside = []
        if inside is not None:
            inside.append(event)
        if event.kind == "say" and event.name == "launched" and inside is not None:
            yield inside
            inside = None


def check_progress(traces: Sequence[Trace]) -> list[Problem]:
    """Simulate the traces of all ranks together; return the cause of a deadlock, or an empty list."""
    players = [_Player(rank, trace) for rank, trace in enumerate(traces)]
    while True:
        moved = False
        for player in players:
            moved |= player.host(players)
            moved |= _run(player)
        problem = _meet(players)
        if isinstance(problem, Problem):
            return [problem]
        if moved or problem or any(player.help() for player in players):
            continue
        break
    if all(not p.events and not any(p.queues.values()) for p in players):
        return []
    return [Problem("stuck", -1, "\n".join(player.where() for player in players))]


def _run(player: _Player) -> bool:
    moved = False
    while player.device():
        moved = True
    return moved


def _meet(players: Sequence[_Player]) -> Problem | bool:
    """Run the collectives that all ranks of a group have reached; return True if any ran, or their difference."""
    groups = {stream for player in players for stream in player.queues if stream.startswith(_GROUP)}
    moved = False
    for group in sorted(groups):
        members = [players[rank] for rank in members_of(group)]
        while all(player.queues[group] for player in members):
            heads = [player.queues[group][0] for player in members]
            if len({head.name for head in heads}) > 1:
                names = ", ".join(f"rank {p.rank} {head.name}" for p, head in zip(members, heads, strict=True))
                return Problem("order", -1, f"collective {heads[0].number} of {group} differs: {names}")
            for player in members:
                event = player.queues[group].popleft()
                player.ended.add((event.group, event.number))
            moved = True
    return moved


def members_of(group: str) -> list[int]:
    """Return the ranks of a group from its recorded name (`tests.device.recording.name_of`)."""
    return [int(rank) for rank in group.rpartition("@")[2].split(",")]
