"""Memory of a model at many settings, as maxima of a few formulas that a page can evaluate.

The accountant of a dry run sees each allocation and release. Their sequence is the same for all batches and for all
numbers of ranks above one; only sizes differ. A size is a polynomial in the sequences and the tokens of a micro-batch,
or some bytes for each element of a rank's range, or of a whole flat parameter. So some dry runs give the formula of
each size, and sums of formulas give the formula of each moment. Only moments that can be a peak are kept.

Layers that are alike are left out of the dry runs: the events that one more layer adds are repeated.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from torch import nn

from shardwise.engine.dryrun import MOST_PASSES
from shardwise.engine.plans import Offload, Planner, Setting, planners_of
from shardwise.errors import UsageError
from shardwise.memory import Category, Journal, Tier
from shardwise.plan.clock import step_time
from shardwise.plan.cluster import Cluster
from shardwise.plan.events import Pass, Recorder
from shardwise.plan.time import between_card_and_host
from shardwise.plan.timetables import Part, Runs, Work, fitted, functions
from shardwise.zero.units.layout import FlatParam, alignment, round_up

FACTS = 4096
"""Bytes of tensors of "other" that are left out even if they stay: what ranks exchange about a step."""
CLOSE = 1 << 20
"""Scratch memory of up to so many bytes is left out: it depends on the size of a range in steps. So plans of tables are
less than the dry runs' by up to about this.
"""
LATE = 2e-3
"""Seconds by which a step may differ, besides 2 %: how many short operators the norm has depends on the ranks."""
FEW = 3
"""Layers of the shortened models; one more is tried, too."""
LINES = [*(category for category in Category), Tier.HOST, Tier.DISK]
"""Lines of a plan: categories on the device, and other tiers."""


@dataclass(frozen=True)
class Point:
    """Numbers on which sizes depend: ranks, sequences of a micro-batch, tokens of a sequence."""

    ranks: int
    micro_batch: int
    length: int


_SIZES = ((3, 509), (5, 331))
"""Sequences and tokens of two dry runs."""
_RANKS = range(101, 600, 2)
"""Numbers of ranks for both: the first one is taken with which no two formulas have the same size. Many ranks have
small ranges, of which the steps of optimizers are soon run.
"""
_BATCHES = ((3, 509), (5, 509), (3, 331), (5, 331), (3, 127), (5, 127), (2, 257))
"""Sequences and tokens that determine the formulas of activations."""


class Basis:
    """Functions of a point, of which formulas are sums: products of batch and length, and sizes of parameters."""

    def __init__(self, flats: Sequence[tuple[int, int]]) -> None:
        self.flats = sorted(flats)

    def values(self, point: Point) -> np.ndarray:
        """Return the values of all functions at a point."""
        shards = self.shards(point.ranks)
        return np.concatenate([functions(point.micro_batch, point.length), shards, point.ranks * shards])

    def shards(self, ranks: int) -> np.ndarray:
        """Return the elements of a rank's range of each flat parameter."""
        return np.array([align * -(-numel // (align * ranks)) for numel, align in self.flats], dtype=np.int64)

    def __len__(self) -> int:
        return 6 + 2 * len(self.flats)

    def of_ranks(self) -> Iterator[np.ndarray]:
        """Yield formulas of 2, 4 or 8 bytes for each element of a rank's range, or of all ranges."""
        for place, size in itertools.product(range(6, len(self)), (2, 4, 8)):
            formula = np.zeros(len(self), dtype=np.int64)
            formula[place] = size
            yield formula

    def ordered(self, formulas: np.ndarray) -> np.ndarray:
        """Return coefficients of functions that are never negative, so that a formula that is nowhere below another
        one has the larger coefficients.
        """
        # m = 1 + (m - 1), n = 1 + (n - 1), n^2 = 1 + 2 (n - 1) + (n - 1)^2
        square = np.array([[1, 0, 0], [1, 1, 0], [1, 2, 1]])
        batch = formulas[:, :6] @ np.kron(np.array([[1, 0], [1, 1]]), square)
        count = len(self.flats)
        shards, whole = formulas[:, 6 : 6 + count], formulas[:, 6 + count :]
        # r s = 2 s + (r - 2) s; the larger one's size is at least that of the smaller one
        rising = [np.cumsum(part[:, ::-1], axis=1) for part in (shards + 2 * whole, whole)]
        return np.concatenate([batch, *rising], axis=1)


def flats_of(sections: Sequence[FlatParam]) -> set[tuple[int, int]]:
    """Return elements before padding to ranks, and elements between aligned boundaries, of flat parameters."""
    found = set()
    for section in sections:
        align = alignment(section.dtype, "cpu")
        found.add((sum(round_up(slot.numel, align) for slot in section.slots), align))
    return found


class Formulas:
    """Formulas of sizes, by number.

    Attributes:
        known: numbers by coefficients.
    """

    def __init__(self, basis: Basis, of_batches: Sequence[np.ndarray]) -> None:
        self.basis = basis
        self.known: dict[bytes, int] = {}
        self._rows: list[np.ndarray] = []
        self._of_batches = [self.number(np.pad(formula, (0, len(basis) - 6))) for formula in of_batches]
        self._of_ranks = [self.number(formula) for formula in basis.of_ranks()]

    def number(self, formula: np.ndarray) -> int:
        """Return the number of a formula."""
        if formula.tobytes() not in self.known:
            self.known[formula.tobytes()] = len(self._rows)
            self._rows.append(formula)
        return self.known[formula.tobytes()]

    @property
    def rows(self) -> np.ndarray:
        """All formulas, one in a row."""
        return np.stack(self._rows)

    def at(self, point: Point) -> dict[int, int]:
        """Return the numbers of formulas by their size at a point; -1 if several have it."""
        found: dict[int, int] = {}
        values = self.basis.values(point)
        for number in (*self._of_batches, *(self._of_ranks if point.ranks > 1 else ())):
            size = int(self._rows[number] @ values)
            found[size] = number if found.get(size, number) == number else -1
        return found

    def read(self, events: Sequence[tuple[int, int]], known: dict[int, int], point: Point) -> list[tuple[int, int]]:
        """Return pairs of lines and numbers of formulas, negative ones (~number) for releases. `known`: `at(point)`.

        Raises UsageError for a size that several formulas have.
        """
        found = []
        constant = np.zeros(len(self.basis), dtype=np.int64)
        for line, size in events:
            number = known.get(abs(size))
            if number is None:
                constant[0] = abs(size)
                number = self.number(constant.copy())
            if number < 0:
                raise UsageError(f"formulas have equal sizes: {abs(size)} bytes at {point}")
            found.append((line, number if size > 0 else ~number))
        return found


class _Marks(Recorder):
    """Records a dry run, and marks its passes among the moves of its journal."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self._moves = journal.moves

    @contextlib.contextmanager
    def phase(self, name: str, stage: int | None = None) -> Iterator[None]:
        """Record a phase, and mark the beginning of a pass."""
        if name == "forward":
            self._moves.append(None)
        with super().phase(name, stage):
            yield


@dataclass
class Window:
    """Events of a dry run as (line, bytes): those before the window that counts, and those in it.

    `moves`: by pass, (place, bytes): read from the host, written to it, read from a disk, written to it. `passes`: what
    is computed and exchanged.
    """

    before: list[tuple[int, int]]
    events: list[tuple[int, int]]
    moves: list[list[tuple[int, int]]]
    flats: set[tuple[int, int]]
    passes: list[Pass]

    @classmethod
    def of(cls, planner: Planner, setting: Setting) -> Window:
        """Run a dry run."""
        journal = Journal()
        recorder = _Marks(journal)
        _, sharded = planner.record(setting, recorder, journal)
        counts = Counter(event for event in journal.events if event is not None and event[0] is Category.OTHER)
        scratch = {
            (category, tier, size)
            for (category, tier, size), count in counts.items()
            # Buffers of modules stay.
            if abs(size) <= FACTS or (abs(size) <= CLOSE and counts[category, tier, -size] == count)
        }
        parts: list[list[tuple[int, int]]] = [[]]
        for event in journal.events:
            if event is None:
                parts.append([])
            elif event[2] and event not in scratch:
                category, tier, size = event
                parts[-1].append((LINES.index(category if tier is Tier.DEVICE else tier), size))
        moves: list[list[tuple[int, int]]] = [[]]
        for move in journal.moves:
            if move is None:
                moves.append([])
            elif move[0] is not Tier.DEVICE:
                moves[-1] += [(2 * (move[0] is Tier.DISK) + side, size) for side, size in enumerate(move[1:]) if size]
        before, events = [event for part in parts[:-1] for event in part], parts[-1]
        passes = min(setting.accumulation, MOST_PASSES)
        flats = flats_of([section.layout for unit in sharded.units for section in unit.sections])
        return cls(before, events, moves[-passes:], flats, recorder.passes)


def matched(short: Sequence[tuple[int, int]], long: Sequence[tuple[int, int]], times: int) -> list[Part]:
    """Return the parts of `short` with what `long` has besides, so many times: how often each part comes, whether it is
    of `long`, and its place there. Raises UsageError if they differ otherwise.
    """
    one, two = (np.array(list(each), dtype=np.int64).reshape(-1, 2) for each in (short, long))

    def alike(i: int, j: int) -> int:
        count = min(len(one) - i, len(two) - j)
        differs = (one[i : i + count] != two[j : j + count]).any(axis=1)
        return int(differs.argmax()) if differs.any() else count

    found = []
    i = j = 0
    while True:
        same = alike(i, j)
        found.append((1, False, i, i + same))
        i, j = i + same, j + same
        more = (len(two) - j) - (len(one) - i)
        if not more:
            break
        added = more if i == len(one) else max(range(1, more + 1), key=lambda count: alike(i, j + count), default=0)
        if more < 0 or (i < len(one) and not alike(i, j + added)):
            break
        found.append((times, True, j, j + added))
        j += added
    if i < len(one) or j < len(two):
        raise UsageError(f"events of dry runs cannot be matched: {len(one)} and {len(two)}, up to {i} and {j}")
    return found


def stretched(short: Sequence[tuple[int, int]], long: Sequence[tuple[int, int]], times: int) -> list[tuple[int, int]]:
    """Return `short` with what `long` has besides, so many times. Raises UsageError if they differ otherwise."""
    parts = matched(short, long, times)
    return [one for count, longer, begin, end in parts for one in list((short, long)[longer][begin:end]) * count]


@dataclass
class Table:
    """Peaks of a plan as maxima of formulas.

    Attributes:
        peaks: of each line: numbers of formulas, of which the largest is the peak.
        totals: moments that can be the peak of all categories: the number of the formula of each one.
        moved: of each pass, formulas of the bytes that are read from the host, written to it, read from a disk and
            written to it.
        passes: what is computed and exchanged in each pass; see `shardwise.plan.timetables`.
        transfers: bytes of all ranks between cards and hosts in a step: those that do not depend on the accumulation,
            and those of each micro-batch.
    """

    peaks: list[list[int]]
    totals: list[list[int]]
    moved: list[list[int]]
    passes: list[Runs]
    transfers: list[float]

    def at(self, sizes: np.ndarray) -> tuple[list[int], int]:
        """Return the peak of each line, and the peak of the sum on the device, from the value of each formula."""
        peaks = [int(sizes[numbers].max()) for numbers in self.peaks]
        return peaks, max(int(sizes[numbers].sum()) for numbers in self.totals)


def largest(formulas: np.ndarray, basis: Basis) -> np.ndarray:
    """Return the places of formulas that can be the largest: one of equal ones, none that another one exceeds."""
    unique, places = np.unique(formulas, axis=0, return_index=True)
    ranked = basis.ordered(unique)
    order = np.argsort(-ranked.sum(axis=1), kind="stable")
    kept: list[int] = []
    for place in order:
        if not (ranked[kept] >= ranked[place]).all(axis=1).any():
            kept.append(int(place))
    return np.sort(places[kept])


def table_of(
    formulas: Formulas,
    before: Sequence[tuple[int, int]],
    events: Sequence[tuple[int, int]],
    moves: Sequence[Sequence[tuple[int, int]]],
    passes: list[Runs],
    transfers: list[float],
) -> Table:
    """Return the peaks of events after others; `moves` and `passes`: of each pass."""
    rows, number = formulas.rows, formulas.number

    def changes(of: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        numbers = np.array(of, dtype=np.int64).reshape(-1, 2)
        released = numbers[:, 1] < 0
        found = rows[np.where(released, ~numbers[:, 1], numbers[:, 1])]
        return numbers[:, 0], np.where(released[:, None], -found, found)

    at, size = changes(before)
    begun = np.stack([size[at == line].sum(axis=0) for line in range(len(LINES))])
    lines, sizes = changes(events)

    def moments(counted: np.ndarray, first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return states that no allocation follows, and the numbers of events before each."""
        places = np.flatnonzero(counted)
        grows = np.array([number >= 0 for _, number in events], dtype=bool)[places]
        last = np.flatnonzero(grows & ~np.append(grows[1:], False))
        states = first + np.cumsum(sizes[places], axis=0)
        return np.concatenate([first[None], states[last]]), np.append(0, places[last] + 1)

    peaks = []
    for line, first in enumerate(begun):
        states, _ = moments(lines == line, first)
        peaks.append([number(states[place]) for place in largest(states, formulas.basis)])
    count = len(Category)
    states, after = moments(lines < count, begun[:count].sum(axis=0))
    totals = []
    for place in largest(states, formulas.basis):
        done = slice(int(after[place]))
        parts = (begun[line] + sizes[done][lines[done] == line].sum(axis=0) for line in range(count))
        totals.append([number(part) for part in parts])
    moved = []
    for one in moves:
        at, size = changes(one)
        moved.append([number(size[at == place].sum(axis=0)) for place in range(4)])
    return Table(peaks, totals, moved, passes, transfers)


WAYS = (
    (0, Offload()),
    (1, Offload()),
    (1, Offload("cpu")),
    (2, Offload()),
    (2, Offload("cpu")),
    (3, Offload()),
    (3, Offload("cpu")),
    (3, Offload("cpu", "cpu")),
)
"""ZeRO stages with the tiers of state."""


def shortened(model: nn.Module) -> tuple[int, nn.Module, nn.Module]:
    """Return a model with a few of its like layers, the same with one more, and how many more the model has than the
    first. A model without a long list of like layers is returned as it is.
    """
    found, most = "", 0
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > FEW + 1:
            kinds = {(type(layer), tuple(parameter.shape for parameter in layer.parameters())) for layer in module}
            size = sum(parameter.numel() for parameter in module.parameters())
            if len(kinds) == 1 and size > most:
                found, most = name, size
    if not found:
        return 0, model, model
    layers = model.get_submodule(found)
    assert isinstance(layers, (nn.ModuleList, nn.Sequential))

    def first(count: int) -> nn.Module:
        short = copy.deepcopy(model)
        kept = short.get_submodule(found)
        assert isinstance(kept, (nn.ModuleList, nn.Sequential))
        del kept[count:]
        return short

    return len(layers) - FEW, first(FEW), first(FEW + 1)


class Exporter:
    """Makes the tables of a model in one precision, with or without recomputation.

    Args:
        model: parameters may be on the meta device.
        config: without batch sizes, stage and offload.
        batch: returns a micro-batch of so many sequences and tokens.

    Raises UsageError where formulas do not describe the dry runs.
    """

    def __init__(self, model: nn.Module, config: dict[str, Any], batch: Callable[[int, int], Any]) -> None:
        self._model, self._config, self._batch = model, config, batch
        self._more, *self._models = shortened(model)
        flats = self._window(Point(_RANKS[0], *_SIZES[0]), 0, Offload(), 1).flats
        windows = [self._window(Point(_RANKS[0], *sizes), 3, Offload(), 1) for sizes in _BATCHES]
        self.formulas = Formulas(Basis(sorted(flats)), self._of_batches(windows))
        self.work = Work([window.passes for window in windows], _BATCHES)
        pairs = ([Point(ranks, *sizes) for sizes in _SIZES] for ranks in _RANKS)
        clear = (pair for pair in pairs if all(-1 not in self.formulas.at(point).values() for point in pair))
        points = next(clear, None)
        if points is None:
            raise UsageError("the sizes of this model's flat parameters are too alike")
        self._points = points

    def _planner(self, model: nn.Module, point: Point) -> Planner:
        config = {**self._config, "train_micro_batch_size_per_gpu": point.micro_batch}
        batch = self._batch(point.micro_batch, point.length)
        (planner, *others), _ = planners_of(model, config, point.ranks, batch)
        if others:
            raise UsageError("it is a pipeline")
        return planner

    def _window(self, point: Point, stage: int, offload: Offload, accumulation: int, *, longer: bool = False) -> Window:
        setting = Setting(stage, point.micro_batch, accumulation, point.ranks, offload)
        return Window.of(self._planner(self._models[longer], point), setting)

    def _of_batches(self, windows: Sequence[Window]) -> list[np.ndarray]:
        """Return the formulas of sizes that depend on the batch."""
        lines = [[line for line, _ in (*window.before, *window.events)] for window in windows]
        if any(each != lines[0] for each in lines):
            raise UsageError("the model does not allocate the same tensors for all sizes of batches")
        sizes = np.abs([[size for _, size in (*window.before, *window.events)] for window in windows])
        sizes = np.unique(sizes[:, (sizes != sizes[0]).any(axis=0)], axis=1)
        return list(fitted(np.stack([functions(*batch) for batch in _BATCHES]), sizes))

    def table(self, stage: int, offload: Offload, accumulation: int, *, single: bool) -> Table:
        """Return the table of a setting, of one rank or for any number above."""
        points = [replace(point, ranks=1) if single else point for point in self._points]
        if accumulation > 1:
            accumulation = MOST_PASSES  # passes in the middle move other bytes than the first and the last
        read, worked = [], []
        for longer, point in enumerate(points):
            window = self._window(point, stage, offload, accumulation, longer=bool(longer))
            known = self.formulas.at(point)
            parts = (window.before, window.events, *window.moves)
            read.append([self.formulas.read(part, known, point) for part in parts])
            ranges = self.formulas.basis.shards(point.ranks)
            worked.append(self.work.read(window.passes, (point.micro_batch, point.length), ranges, shared=stage > 0))
        before, events, *moves = (stretched(short, long, self._more) for short, long in zip(*read, strict=True))
        passes = []
        for (kinds, numbers), (more_kinds, more_numbers) in zip(*worked, strict=True):
            layers = matched(kinds, more_kinds, self._more)
            passes.append(self.work.joined(numbers, more_numbers, self._more, layers))
        return table_of(self.formulas, before, events, moves, passes, self._transfers(stage, offload))

    def _transfers(self, stage: int, offload: Offload) -> list[float]:
        planner = self._planner(self._model, Point(1, *_SIZES[0]))
        one, two = (
            between_card_and_host(planner, Setting(stage, 1, accumulation, 1, offload), offload)
            for accumulation in (1, 2)
        )
        return [2 * one - two, two - one]

    def check(self, table: Table, setting: Setting, length: int) -> None:
        """Compare a table with a dry run of the whole model. Raises UsageError if more than `CLOSE` bytes differ, or
        more than 2 % and `LATE` of the time.
        """
        point, recorder = Point(setting.ranks, setting.micro_batch, length), Recorder()
        plan, _ = self._planner(self._model, point).record(setting, recorder)
        peaks, total = table.at(self.formulas.rows @ self.formulas.basis.values(point))
        planned = {**plan.peaks, **plan.elsewhere, "total": plan.total}
        for line, size in zip([*(line.value for line in LINES), "total"], [*peaks, total], strict=True):
            if abs(size - planned[line]) > CLOSE:
                raise UsageError(
                    f"{setting}, sequences of {length} tokens need {planned[line]:,} bytes ({line}) by a dry run, "
                    f"{size:,} by the tables"
                )
        batch, elements = (setting.micro_batch, length), int(self.formulas.basis.shards(setting.ranks).sum())
        costs = Cluster.of("h100", "infiniband-ndr", 8).costs(setting.ranks)
        wanted, found = (
            step_time(passes, setting.accumulation, costs).total
            for passes in (recorder.passes, self.work.passes(table.passes, batch, elements, setting.ranks))
        )
        if abs(found - wanted) > 0.02 * wanted + LATE:
            raise UsageError(f"{setting} takes {wanted:.4f} s by a dry run, {found:.4f} s by the tables")

    def tables(self) -> dict[str, Any]:
        """Return all tables as JSON values."""
        found = {}
        for (stage, offload), accumulation, single in itertools.product(WAYS, (1, 2), (False, True)):
            if not single or stage == offload.stage:  # one rank shards nothing
                key = f"{'one' if single else stage}/{'/'.join(offload.devices)}/{accumulation}"
                table = self.table(stage, offload, accumulation, single=single)
                if (stage, single, offload.parameters) == (3, False, "cpu"):
                    for sequences, ranks in ((1, 64), (2, 2)):  # with one sequence some views need no copy
                        self.check(table, Setting(stage, sequences, accumulation, ranks, offload), 384)
                found[key] = asdict(table)
        formulas = [[[place, int(row[place])] for place in np.flatnonzero(row).tolist()] for row in self.formulas.rows]
        work = {"rows": self.work.rows, "polynomials": self.work.polynomials}
        return {"flats": self.formulas.basis.flats, "formulas": formulas, "work": work, "tables": found}
