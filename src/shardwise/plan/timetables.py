"""Events of a step at many settings, to which a page gives their seconds: sizes are formulas of batch and ranks.

Of the forward and the backward pass FLOPs and bytes are polynomials in the sequences and the tokens of a micro-batch,
or constant. Bytes of operators on a rank's ranges, as those of the update, go with the elements that a rank has.
Collectives carry whole messages, of which only the padding changes with the ranks.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardwise.errors import UsageError
from shardwise.plan.events import Event, Launch, Operator, Pass, Wait

OPERATOR, SHARED, LAUNCH, WAIT, PHASE = range(5)
"""Kinds of rows: [OPERATOR, type, polynomial of FLOPs, polynomial of bytes], [SHARED, bytes for each element of all
ranges], [LAUNCH, operation, bytes], [WAIT, operation] for the oldest one in flight, [WAIT, ""] for the oldest
collective of the step before, [PHASE, place in `PHASES`].
"""
PHASES = ("forward", "backward", "step")
Kind = tuple[int, int]
"""What an event is: equal for equal events of dry runs with as many ranks and other batches."""
SMALL = 4096
"""Bytes up to which the sizes of constant operators do not count for their kinds."""
Part = tuple[int, bool, int, int]
"""How often events come, whether they are those of the longer model, and their place there."""
Runs = list[tuple[int, list[int]]]
"""Numbers of the rows of a pass, each list so many times in turn."""


def functions(micro_batch: int, length: int) -> np.ndarray:
    """Return the values of which polynomials are sums."""
    return np.array([m * n for m in (1, micro_batch) for n in (1, length, length**2)], dtype=np.int64)


def fitted(values: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the integers by which the columns of `values` add up to each column of `sizes`, one row for each of these.

    Raises UsageError if there are none.
    """
    scale = values.max(axis=0).astype(float)  # else squares of lengths leave no digits for the constants
    found = np.linalg.lstsq(values / scale, sizes.astype(float), rcond=None)[0] / scale[:, None]
    rounded = np.rint(found).astype(np.int64)
    if (values @ rounded != sizes).any():
        raise UsageError("sizes of operators and activations are not polynomials in sequences and tokens")
    return rounded.T


class Work:
    """Rows of events, by number.

    Attributes:
        rows: see `OPERATOR` and the others.
        polynomials: coefficients of `functions`.

    Args:
        windows: passes of the same step at several batches.
        batches: their sequences and tokens.

    Raises UsageError if the windows differ in more than the sizes of operators.
    """

    def __init__(self, windows: Sequence[Sequence[Pass]], batches: Sequence[tuple[int, int]]) -> None:
        self.rows: list[list[Any]] = []
        self.polynomials: list[list[int]] = []
        self._known: dict[tuple[Any, ...], int] = {}
        self._kinds: dict[tuple[str | int, ...], int] = {}
        operators = [
            [event for one in passes for phase, event in one.events if phase != "step" and isinstance(event, Operator)]
            for passes in windows
        ]
        names = [[(one.name, one.dtype) for one in each] for each in operators]
        if any(each != names[0] for each in names):
            raise UsageError("the model does not run the same operators for all sizes of batches")
        sizes = np.array([[(one.flops, one.moved) for one in each] for each in operators], dtype=np.int64)
        pairs = np.unique(sizes[:, (sizes != sizes[0]).any(axis=(0, 2))], axis=1)
        values = np.stack([functions(*batch) for batch in batches])
        self._pairs = np.stack([fitted(values, pairs[:, :, which]) for which in range(2)], axis=1)

    def read(
        self, passes: Sequence[Pass], batch: tuple[int, int], ranges: np.ndarray, *, shared: bool
    ) -> list[tuple[list[Kind], list[int]]]:
        """Return of each pass the kind of each event and the number of its row.

        Args:
            batch: sequences and tokens.
            ranges: elements of a rank's range of each flat parameter.
            shared: whether ranks share the update.

        Raises UsageError if collectives of a kind are not waited for in their order.
        """
        at = functions(*batch)
        polynomials = {tuple((pair @ at).tolist()): place for place, pair in enumerate(self._pairs)}
        in_flight: dict[str, deque[int]] = defaultdict(deque)
        elements = int(ranges.sum())
        found = []
        for one in passes:
            kinds, numbers = [], []
            for phase, events in one.phases.items():
                kinds.append((-1, PHASES.index(phase)))
                numbers.append(self._number(PHASE, PHASES.index(phase)))
                for event in events:
                    place = -1
                    if isinstance(event, Launch):
                        in_flight[event.op].append(event.number)
                        number = self._number(LAUNCH, event.op, event.size)
                    elif isinstance(event, Wait):
                        number = self._number(WAIT, _awaited(event, in_flight))
                    else:
                        if phase != "step":
                            place = polynomials.get((event.flops, event.moved), -1)
                        of_range = event.name.startswith("aten._fused") or _of_range(event.moved, ranges)
                        if shared and place < 0 and of_range and event.moved:
                            number = self._number(SHARED, event.moved / elements)
                        else:
                            number = self._operator(event, place)
                    numbers.append(number)
                    kinds.append((self._kinds.setdefault(_kind(event, place), len(self._kinds)), place))
            found.append((kinds, numbers))
        return found

    def joined(self, short: Sequence[int], long: Sequence[int], times: int, parts: Sequence[Part]) -> Runs:
        """Return the rows of a pass from those of shorter models, of which `long` has one layer more.

        Args:
            times: layers that the model has more than `short`.
            parts: of `matched`.

        Raises UsageError if an event of one is of another kind in the other.
        """
        found: Runs = []
        place = 0  # in `long`
        for count, longer, begin, end in parts:
            if longer:
                found.append((count, list(long[begin:end])))
            else:
                pairs = zip(short[begin:end], long[place : place + end - begin], strict=True)
                found.append((1, [self._more(one, two, times) for one, two in pairs]))
            place += end - begin
        return found

    def _more(self, short: int, long: int, times: int) -> int:
        """Return the row of an event that deals with all layers at once: each adds as much."""
        if short == long:
            return short
        (kind, *one), (other, *two) = self.rows[short], self.rows[long]
        if kind != other:
            raise UsageError(f"events of dry runs cannot be matched: {self.rows[short]} and {self.rows[long]}")
        if kind == OPERATOR:
            values = [np.array([self.polynomials[number] for number in row[1:]]) for row in (one, two)]
            flops, moved = (values[0] + times * (values[1] - values[0])).tolist()
            return self._number(kind, one[0], self._polynomial(flops), self._polynomial(moved))
        *same, size = one
        return self._number(kind, *same, size + times * (two[-1] - size))

    def _operator(self, event: Operator, place: int) -> int:
        constant = ([event.flops, 0, 0, 0, 0, 0], [event.moved, 0, 0, 0, 0, 0])
        flops, moved = constant if place < 0 else self._pairs[place].tolist()
        return self._number(OPERATOR, event.dtype, self._polynomial(flops), self._polynomial(moved))

    def _polynomial(self, coefficients: list[int]) -> int:
        key = ("polynomial", *coefficients)
        if key not in self._known:
            self._known[key] = len(self.polynomials)
            self.polynomials.append(coefficients)
        return self._known[key]

    def _number(self, *row: Any) -> int:
        if row not in self._known:
            self._known[row] = len(self.rows)
            self.rows.append(list(row))
        return self._known[row]

    def passes(self, tables: Sequence[Runs], batch: tuple[int, int], elements: int, ranks: int) -> list[Pass]:
        """Return the events of passes at a batch and a number of ranks; `elements`: sum of `ranges`, see `read`."""
        at = functions(*batch)
        sizes = [int(np.array(one) @ at) for one in self.polynomials]
        in_flight: dict[str, deque[int]] = defaultdict(deque)
        found, launched = [], 0
        for runs in tables:
            one = Pass()
            into: list[Event] = []
            for number in (number for times, numbers in runs for _ in range(times) for number in numbers):
                kind, *row = self.rows[number]
                if kind == PHASE:
                    into = one.phases.setdefault(PHASES[row[0]], [])
                elif kind == LAUNCH:
                    launched += 1
                    in_flight[row[0]].append(launched)
                    into.append(Launch(launched, row[0], "", ranks, (), row[1], 0, ""))
                elif kind == WAIT:
                    into.append(Wait(in_flight[row[0]].popleft() if row[0] else 0))
                elif kind == SHARED:
                    into.append(Operator("", "", 0, round(row[0] * elements)))
                else:
                    into.append(Operator("", "", sizes[row[1]], sizes[row[2]], row[0]))
            found.append(one)
        return found


def _of_range(moved: int, ranges: np.ndarray) -> bool:
    """Whether bytes are those of a few tensors of a rank's range, and not of a whole flat parameter of many ranks."""
    times = moved // ranges
    return moved > SMALL and bool(((times * ranges == moved) & (times <= 32)).any())


def _kind(event: Event, place: int) -> tuple[str | int, ...]:
    if isinstance(event, Operator):
        # Sizes keep layers of other sizes from being mixed up. Fused operators, and small ones such as those on a list
        # of norms, deal with all layers.
        sized = place < 0 and event.moved > SMALL and not event.name.startswith(("aten._foreach", "aten._fused"))
        return event.name, event.dtype, *((event.flops, event.moved) if sized else ())
    return ("launch", event.op, event.size) if isinstance(event, Launch) else ("wait",)


def _awaited(event: Wait, in_flight: Mapping[str, deque[int]]) -> str:
    """Return the operation of the collective that is waited for; "": it is of the step before."""
    op = next((op for op, numbers in in_flight.items() if event.number in numbers), "")
    if op and in_flight[op].popleft() != event.number:
        raise UsageError(f"collectives ({op}) are not waited for in their order")
    return op
