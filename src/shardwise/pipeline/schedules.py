"""Generators of pipeline schedules and their registry.

A generator is a pure function of the placement (the rank of each stage) and the number of micro-batches. It returns the
computations of each rank, in order. Each generator proves that its ranks never wait for each other: it sorts by times
that respect all dependencies, or it deletes micro-batches from an order that is known to end.

Papers: GPipe (arXiv 1811.06965); 1F1B (PipeDream-Flush, 2006.09503); interleaved 1F1B (2104.04473); breadth-first
pipelines (2211.05953); ZB-H1 and ZBV (Zero Bubble, 2401.10241); V-Half and V-Min (2405.15362); DualPipe (2412.19437).
"""

from __future__ import annotations

import difflib
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from math import inf
from operator import itemgetter

from shardwise.errors import ConfigError
from shardwise.pipeline.actions import Action, Op, Schedule, loop_placement, v_placement

RankOf = tuple[int, ...]
Orders = list[list[Action]]
Generator = Callable[[RankOf, int], Orders]

_F, _B, _I, _W = Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT
_OPS = {"F": _F, "B": _B, "I": _I, "W": _W}


def _stages_by_rank(rank_of: RankOf) -> list[list[int]]:
    """Return the ascending stages of each rank; the i-th stage of a rank is its chunk i."""
    found: list[list[int]] = [[] for _ in range(max(rank_of) + 1)]
    for stage, rank in enumerate(rank_of):
        found[rank].append(stage)
    return found


def naive(rank_of: RankOf, micro_batches: int) -> Orders:
    """Order each micro-batch through all stages, forward and backward, before the next one."""
    orders: Orders = []
    for stages in _stages_by_rank(rank_of):
        steps = [(_F, stage) for stage in stages] + [(_B, stage) for stage in reversed(stages)]
        orders.append([Action(op, stage, n) for n in range(micro_batches) for op, stage in steps])
    return orders


def inference(rank_of: RankOf, micro_batches: int) -> Orders:
    """Order forwards only: all micro-batches through a stage before the rank's next stage."""
    return [[Action(_F, s, n) for s in stages for n in range(micro_batches)] for stages in _stages_by_rank(rank_of)]


def gpipe(rank_of: RankOf, micro_batches: int) -> Orders:
    """Order all forwards before all backwards; breadth first if a rank has several chunks."""
    backwards = [
        [Action(_B, s, n) for s in reversed(stages) for n in range(micro_batches)]
        for stages in _stages_by_rank(rank_of)
    ]
    return [first + second for first, second in zip(inference(rank_of, micro_batches), backwards, strict=True)]


def one_forward_one_backward(rank_of: RankOf, micro_batches: int) -> Orders:
    """Order warm-up forwards, then forwards and backwards alternately; interleaved if a rank has several chunks.

    Several chunks take the micro-batches in groups, one for each rank. A last group with fewer is filled up, and the
    surplus is deleted, which adds no dependency.
    """
    placed = _stages_by_rank(rank_of)
    ranks, chunks = len(placed), len(placed[0])
    count = -(-micro_batches // ranks) * ranks * chunks
    orders: Orders = []
    for rank, stages in enumerate(placed):

        def action(op: Op, k: int, stages: list[int] = stages) -> Action:
            group, rest = divmod(k, ranks * chunks)
            chunk, member = divmod(rest, ranks)
            return Action(op, stages[chunk if op is _F else -1 - chunk], group * ranks + member)

        behind = ranks - 1 - rank
        warm_up = min(behind if chunks == 1 else 2 * behind + (chunks - 1) * ranks, count)
        order = [action(_F, k) for k in range(warm_up)]
        for k in range(warm_up, count):
            order += [action(_F, k), action(_B, k - warm_up)]
        order += [action(_B, k) for k in range(count - warm_up, count)]
        orders.append([a for a in order if a.micro_batch < micro_batches])
    return orders


def zb_h1(rank_of: RankOf, micro_batches: int) -> Orders:
    """Order 1F1B with delayed weight gradients, with the memory of 1F1B's first rank on each rank."""
    return _split(rank_of, one_forward_one_backward(rank_of, micro_batches), limit=len(rank_of))


def zbv(rank_of: RankOf, micro_batches: int) -> Orders:
    """Order a V without idle time between a rank's actions if F, B and W take equal times, with 1F1B's memory.

    Fewer than two micro-batches for each rank are filled up, and the surplus is deleted, which adds no dependency.
    """
    ranks = len(rank_of) // 2
    count = max(micro_batches, 2 * ranks)
    orders: Orders = []
    for rank, stages in enumerate(_stages_by_rank(rank_of)):
        behind, ahead = ranks - rank - 1, rank + 1
        steps = "F0 " + "F0 F0 " * behind + "F1 F0 " * rank + "F1 B1 " * (behind + 1)
        steps += "F0 B0 F1 B1 " * (count - 2 * ranks + ahead) + "B0 F1 B1 " * behind
        steps += "B0 B1 " * rank + "B0 " * (behind + 1)
        orders.append(_numbered(steps, stages, micro_batches))
    return _split(rank_of, orders, limit=len(rank_of))


def v_half(rank_of: RankOf, micro_batches: int) -> Orders:
    """Order a V with half of 1F1B's activations: those of (ranks + 2) // 2 micro-batches."""
    limit = (len(rank_of) // 2 + 2) // 2
    return _split(rank_of, _repeated(rank_of, micro_batches, (2, 1, 2, 1)), limit=2 * limit)


def v_min(rank_of: RankOf, micro_batches: int) -> Orders:
    """Order a V with a third of 1F1B's activations: those of (ranks + 4) // 3 micro-batches."""
    limit = (len(rank_of) // 2 + 4) // 3
    return _split(rank_of, _repeated(rank_of, micro_batches, (1, 1, 1, 1)), limit=2 * limit)


def dualpipe_v(rank_of: RankOf, micro_batches: int) -> Orders:
    """Order pairs of a forward of one chunk and a backward of the other one, which can hide each other's messages.

    The weight gradients are delayed at the start and at the end only. Fewer than two micro-batches for each rank are
    filled up, and the surplus is deleted, which adds no dependency.
    """
    ranks = len(rank_of) // 2
    count = max(micro_batches, 2 * ranks)
    orders: Orders = []
    for rank, stages in enumerate(_stages_by_rank(rank_of)):
        ahead, behind = rank + 1, ranks - rank - 1
        ending = [1, 0] * ahead  # chunks of the backwards after the last forward; the second half is split
        delayed = ending[ahead:] + [0] * behind
        steps = "F0 F0 " * behind + "F0 F1 " * ahead + "I1 W1 F1 " * behind
        steps += "F0 B1 F1 B0 " * (count - 2 * ranks + ahead) + "B1 F1 B0 " * behind
        steps += "".join(f"B{chunk} " for chunk in ending[:ahead]) + "".join(f"I{chunk} " for chunk in ending[ahead:])
        steps += "".join(f"W{chunk} I0 " for chunk in delayed[:behind])
        steps += "".join(f"W{chunk} " for chunk in delayed[behind:])
        orders.append(_numbered(steps, stages, micro_batches))
    return orders


def _numbered(steps: str, stages: list[int], micro_batches: int) -> list[Action]:
    """Return the actions of steps such as "F0 B1": each kind takes the micro-batches of a chunk in ascending order.

    A BACKWARD counts as an input and as a weight gradient. Actions of surplus micro-batches are left out.
    """
    done: Counter[str] = Counter()
    order: list[Action] = []
    for step in steps.split():
        kind, chunk = step[0], step[1]
        counted = [part + chunk for part in ("IW" if kind == "B" else kind)]
        order.append(Action(_OPS[kind], stages[int(chunk)], done[counted[0]]))
        done.update(counted)
    return [action for action in order if action.micro_batch < micro_batches]


def _repeated(rank_of: RankOf, micro_batches: int, delays: tuple[int, int, int, int]) -> Orders:
    """Return the order of F and B of a pattern of one micro-batch that is repeated after each six time steps.

    `delays` are the time steps between adjacent ranks: of forwards down the V and up, and of backwards down and up. The
    longer the delays, the more micro-batches are in flight. The steps at the three turns are the fewest that give the
    four computations of each rank different time steps modulo six; the other two steps of six are for weight gradients.
    """
    stages, ranks = len(rank_of), len(rank_of) // 2
    passes = [(_F, stage) for stage in range(stages)] + [(_B, stage) for stage in reversed(range(stages))]

    def timed(turns: tuple[int, ...]) -> list[int]:
        times = [0]
        for leg, delay in enumerate(delays):
            times += [times[-1] + delay * k for k in range(1, ranks)]
            times += [times[-1] + turn for turn in turns[leg : leg + 1]]
        return times

    def fits(times: list[int]) -> bool:
        return len({(rank_of[stage], time % 6) for (_, stage), time in zip(passes, times, strict=True)}) == 4 * ranks

    turns = sorted(product(range(1, 7), repeat=3), key=sum)
    times = next(times for times in map(timed, turns) if fits(times))
    orders: list[list[tuple[int, Action]]] = [[] for _ in range(ranks)]
    for (op, stage), time in zip(passes, times, strict=True):
        orders[rank_of[stage]] += [(time + 6 * n, Action(op, stage, n)) for n in range(micro_batches)]
    return [[action for _, action in sorted(order, key=itemgetter(0))] for order in orders]


def _split(rank_of: RankOf, orders: Orders, limit: int) -> Orders:
    """Return the orders of F and B with input and weight gradients, each as one time step.

    A rank computes a weight gradient while it waits for a tensor, and before a forward if it holds the activations of
    `limit` stages.
    """
    ends: dict[tuple[bool, int, int], int] = {}  # (is forward, stage, micro-batch) -> end of F or I
    queues = [deque(order) for order in orders]
    delayed: list[deque[Action]] = [deque() for _ in orders]
    held = [0 for _ in orders]
    plan: list[list[tuple[int, Action]]] = [[] for _ in orders]

    def ready(action: Action, time: int) -> bool:
        forward = action.op is _F
        if action.stage == (0 if forward else len(rank_of) - 1):
            return True
        return ends.get((forward, action.stage + (-1 if forward else 1), action.micro_batch), time + 1) <= time

    time = 0
    while any(queues) or any(delayed):
        for rank, queue in enumerate(queues):
            full = bool(delayed[rank]) and held[rank] >= limit
            if queue and ready(queue[0], time) and not (full and queue[0].op is _F):
                action = queue.popleft()
                stage, n = action.stage, action.micro_batch
                ends[action.op is _F, stage, n] = time + 1
                if action.op is _F:
                    held[rank] += 1
                else:
                    action = Action(_I, stage, n)
                    delayed[rank].append(Action(_W, stage, n))
            elif delayed[rank]:
                action = delayed[rank].popleft()
                held[rank] -= 1
            else:
                continue
            plan[rank].append((time, action))
        time += 1
    return [_merged(order, ends) for order in plan]


def _merged(order: list[tuple[int, Action]], ends: dict[tuple[bool, int, int], int]) -> list[Action]:
    """Join adjacent input and weight gradients into a backward where the stage before does not wait for the first."""
    merged: list[Action] = []
    for time, action in order:
        stage, n = action.stage, action.micro_batch
        adjacent = action.op is _W and merged[-1] == Action(_I, stage, n)
        if adjacent and (stage == 0 or ends[False, stage - 1, n] >= time + 2):
            merged[-1] = Action(_B, stage, n)
        else:
            merged.append(action)
    return merged


@dataclass(frozen=True)
class ScheduleKind:
    """An entry of the registry of schedules.

    Attributes:
        chunks: least and greatest number of stages of a rank; the least is the default.
        placements: "loop", "v" or both; the first is the default. A V has two stages on each rank.
        splits_weights: True if some weight gradients are computed after the input gradient, as separate actions.
        trains: False if the schedule has forwards only.
    """

    generator: Generator
    description: str
    chunks: tuple[int, float]
    placements: tuple[str, ...]
    splits_weights: bool = False
    trains: bool = True


_ANY = (1, inf), ("loop", "v")
_ONE = (1, 1), ("loop",)
_V = (2, 2), ("v",), True

SCHEDULES: dict[str, ScheduleKind] = {
    "naive": ScheduleKind(naive, "one micro-batch at a time: naive model parallelism", *_ANY),
    "gpipe": ScheduleKind(gpipe, "all forwards, then all backwards; most memory", *_ANY),
    "1f1b": ScheduleKind(one_forward_one_backward, "one forward, one backward; GPipe's idle time, less memory", *_ONE),
    "interleaved": ScheduleKind(
        one_forward_one_backward,
        "1F1B with several stages on a rank: less idle time, more messages",
        (2, inf),
        ("loop",),
    ),
    "zb-h1": ScheduleKind(zb_h1, "1F1B with delayed weight gradients: a third of its idle time", *_ONE, True),
    "zbv": ScheduleKind(zbv, "V with delayed weight gradients: least idle time, memory of 1F1B", *_V),
    "v-half": ScheduleKind(v_half, "V with half of 1F1B's activations, half of its idle time", *_V),
    "v-min": ScheduleKind(v_min, "V with a third of 1F1B's activations, two thirds of its idle time", *_V),
    "dualpipe-v": ScheduleKind(dualpipe_v, "V that pairs forwards with backwards, for models with all-to-alls", *_V),
    "inference": ScheduleKind(inference, "forwards only", *_ANY, False, False),
}
"""Pipeline schedules by name."""


def make_schedule(
    name: str, ranks: int, micro_batches: int, chunks: int | None = None, placement: str | None = None
) -> Schedule:
    """Return the computations of a schedule.

    Args:
        name: key of `SCHEDULES`.
        ranks: number of ranks of the pipeline.
        micro_batches: number of micro-batches of a batch, at least 1.
        chunks: number of stages on each rank; None: the fewest that the schedule allows.
        placement: "loop" or "v"; None: the schedule's first one.

    Raises:
        ConfigError: the name is unknown, or the schedule does not allow a value.

    >>> make_schedule("1f1b", ranks=2, micro_batches=2).actions[1][1]
    Action(op=<Op.BACKWARD: 'backward'>, stage=1, micro_batch=0)
    """
    rank_of = placement_of(name, ranks, chunks, placement)
    _check_positive(name, micro_batches=micro_batches)
    orders = SCHEDULES[name].generator(rank_of, micro_batches)
    return Schedule(name, ranks, len(rank_of), micro_batches, rank_of, tuple(map(tuple, orders)))


def placement_of(name: str, ranks: int, chunks: int | None = None, placement: str | None = None) -> RankOf:
    """Return the rank of each stage of a schedule. Arguments and errors are those of `make_schedule`.

    >>> placement_of("zbv", ranks=2)
    (0, 1, 1, 0)
    """
    kind = SCHEDULES.get(name)
    where = f"pipeline schedule {name!r}"
    if kind is None:
        close = difflib.get_close_matches(str(name).lower().replace("_", "-"), SCHEDULES, n=1)
        advice = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(SCHEDULES)}"
        raise ConfigError(f"{where} is unknown; {advice}")
    same = (ranks, chunks) == (1, 2) and placement in ("loop", "v")  # two stages of one rank are a loop and a V
    placement = kind.placements[0] if placement is None or same else placement
    if placement not in kind.placements:
        raise ConfigError(f"{where}: placement is {placement!r}, expected {' or '.join(map(repr, kind.placements))}")
    least, most = (2, 2) if placement == "v" else kind.chunks
    chunks = least if chunks is None else chunks
    _check_positive(name, ranks=ranks, chunks=chunks)
    if not least <= chunks <= most:
        expected = str(least) if most == least else f"at least {least}"
        fits = ", ".join(other for other, row in SCHEDULES.items() if row.chunks[0] <= chunks <= row.chunks[1])
        raise ConfigError(
            f"{where}: {chunks} stages on each rank, expected {expected} (placement {placement!r}). "
            f"Schedules for {chunks}: {fits}"
        )
    return v_placement(ranks) if placement == "v" else loop_placement(ranks, chunks)


def _check_positive(name: str, **values: int) -> None:
    for key, value in values.items():
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"pipeline schedule {name!r}: {key} is {value!r}, expected a whole number from 1 on")
