"""Gradients of embedding tables as rows: what is sent is the rows that a batch has used, with their numbers.

`nn.Embedding(sparse=True)` and `nn.EmbeddingBag(sparse=True)` give autograd only the rows of the table that were looked
up. A table of which this is so has a section of its own in its unit (`Section.table`), and its rows travel to the ranks
that own them. Before, the ranks tell each other how many rows they have for whom, so that all of them choose alike: the
rows, or the dense reduction where that takes no more (`affordable`).

Invariant: the same bits as the dense reduction. A rank's rows are summed before they are sent, each row once; what the
ranks have sent for a row is added in rank order, from zero, in the dtype of sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from shardwise.comm.communicator import Communicator, Handle
from shardwise.comm.compression import Reduction

if TYPE_CHECKING:
    from shardwise.zero.units.unit import SectionMemory

INDEX_BYTES = 8
"""Of the number of a row."""

DENSE = -1
"""Told in the place of a number of rows by a rank whose gradient is dense."""


def find_tables(module: nn.Module) -> tuple[list[nn.Parameter], dict[str, str]]:
    """Return the parameters whose gradients are rows, and why those of other embeddings are not.

    Args:
        module: the whole model.

    Returns:
        (trainable tables that only embeddings with `sparse=True` have, reason by the name of each other table).

    >>> model = nn.ModuleDict({"words": nn.Embedding(9, 2, sparse=True), "places": nn.Embedding(5, 2)})
    >>> tables, reasons = find_tables(model)
    >>> [tuple(table.shape) for table in tables]
    [(9, 2)]
    >>> reasons
    {'places.weight': 'the embedding is built with sparse=False; with sparse=True its gradients are rows'}
    """
    homes: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    for name, part in module.named_modules():
        for own, parameter in part._parameters.items():
            if parameter is not None:
                homes.setdefault(parameter, []).append((f"{name}.{own}" if name else own, part))
    tables, reasons = [], {}
    for parameter, users in homes.items():
        embeddings = [part for _, part in users if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
        if not embeddings or not parameter.requires_grad or parameter.dim() != 2:
            continue
        others = [name for name, part in users if part not in embeddings]
        if not all(part.sparse for part in embeddings):
            reasons[users[0][0]] = "the embedding is built with sparse=False; with sparse=True its gradients are rows"
        elif others:
            reasons[users[0][0]] = f"it is tied to {others[0]}, whose gradient is dense"
        else:
            tables.append(parameter)
    return tables, reasons


def warnings_about(module: nn.Module) -> list[str]:
    """Say which embeddings will be reduced densely although `sparse_gradients` is on, and what to do."""
    tables, reasons = find_tables(module)
    found = [f"sparse_gradients: {name} is reduced densely: {reason}" for name, reason in reasons.items()]
    if not tables and not reasons:
        found.append(
            "sparse_gradients: has no effect, because the model has no nn.Embedding or nn.EmbeddingBag that is trained"
        )
    return found


def most_rows(table: tuple[int, int], itemsize: int) -> int:
    """Return how many rows of a table may be kept as rows: as many as take half of what the dense gradient does.

    Args:
        table: rows and elements of a row.
        itemsize: bytes of an element.

    >>> most_rows((100, 8), 4)
    40
    """
    rows, width = table
    return rows * width * itemsize // (2 * (INDEX_BYTES + width * itemsize))


@dataclass
class Rows:
    """Rows of a gradient.

    Attributes:
        index: numbers of the rows, int64, ascending, each once.
        values: the rows, one for each number.
    """

    index: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, gradient: torch.Tensor, dtype: torch.dtype) -> Rows:
        """Take the rows of a coalesced sparse gradient."""
        return cls(_compact(gradient.indices()[0]), _compact(gradient.values().to(dtype)))

    def plus(self, other: Rows, most: int) -> Rows | None:
        """Add other rows; what is here comes first in each sum. None if that would be more than `most` rows."""
        index, place = torch.unique(torch.cat([self.index, other.index]), return_inverse=True)
        if len(index) > most:
            return None
        values = self.values.new_zeros(len(index), self.values.shape[1])
        # Within each part every row is there once, so that there is nothing whose order could differ.
        values.index_add_(0, place[: len(self.index)], self.values)
        values.index_add_(0, place[len(self.index) :], other.values)
        return Rows(index, values)

    def write(self, out: torch.Tensor) -> None:
        """Fill a whole table with the rows, and zeros elsewhere."""
        out.zero_()
        out.index_copy_(0, self.index, self.values)

    def spans(self, bounds: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return where, among the rows, those lie whose numbers are in each range `[first, last)`."""
        edges = torch.tensor(bounds, dtype=torch.int64, device=self.index.device)
        return [(first, last) for first, last in torch.searchsorted(self.index, edges).tolist()]


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that fills its memory: coalescing leaves that of the rows which have become one."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


@dataclass(frozen=True)
class Table:
    """A section that is one embedding table.

    Attributes:
        rows: number of rows.
        width: elements of a row.
        ranges: first row and end (exclusive) of what each rank needs; a row that two ranks share is in both ranges.
        whole: every rank needs every row.
    """

    rows: int
    width: int
    ranges: tuple[tuple[int, int], ...]
    whole: bool

    @classmethod
    def of(cls, section: SectionMemory) -> Table:
        """Describe a section, which is divided over the ranks of its domain's innermost dimension."""
        layout = section.layout
        assert layout.table is not None
        rows, width = layout.table
        world = layout.sizes[0]
        if section.keeps_whole_gradient and len(layout.sizes) == 1:
            return cls(rows, width, ((0, rows),) * world, True)
        cuts = ((rank * layout.size(1), (rank + 1) * layout.size(1)) for rank in range(world))
        return cls(rows, width, tuple((min(rows, a // width), min(rows, -(-b // width))) for a, b in cuts), False)


def affordable(counts: Sequence[Sequence[int]], table: Table, itemsize: int, sum_itemsize: int) -> bool:
    """Whether rows take less memory, and so less traffic, than the dense gradient on every rank.

    Counted are the rows themselves, a copy of them that is sent, what is received, and its sum. A dense reduction holds
    the whole table and sends nearly as much, and where every rank needs everything twice that.

    Args:
        counts: rows that each rank has for each rank; `DENSE` from ranks whose gradient is dense.
        table: the table.
        itemsize: bytes of an element of the gradient.
        sum_itemsize: bytes of an element of the sum.

    >>> whole = Table(100, 8, ((0, 100), (0, 100)), True)
    >>> affordable([[5, 5], [3, 3]], whole, 4, 4), affordable([[5, 5], [60, 60]], whole, 4, 4)
    (True, False)
    """
    if any(count == DENSE for row in counts for count in row):
        return False
    world = len(counts)
    sent_row = INDEX_BYTES + table.width * itemsize
    summed_row = 2 * INDEX_BYTES + table.width * sum_itemsize
    most = 0
    for rank in range(world):
        if table.whole:
            padded = max(row[0] for row in counts)
            own, received = counts[rank][0] + padded, world * padded
        else:
            own, received = 2 * sum(counts[rank]), sum(row[rank] for row in counts)
        most = max(most, own * sent_row + received * (sent_row + summed_row))
    return most <= table.rows * table.width * itemsize


class RowReduction:
    """A reduction of rows under way: `target` = (itself if `accumulate` else 0) + sum over ranks of this rank's rows.

    Args:
        comm: the ranks.
        target: receives the sum: of the whole table where every rank needs everything, or of this rank's range.
        table: what is reduced.
        rows: this rank's, in the dtype of the wire; None if it has none.
        counts: rows that each rank has for each rank.
        label: for records.
        accumulate: see above.
        dtype: of the wire.

    Attributes:
        scratch: buffers that `wait()` gives back.
    """

    def __init__(
        self,
        comm: Communicator,
        target: torch.Tensor,
        table: Table,
        rows: Rows | None,
        counts: Sequence[Sequence[int]],
        label: str,
        *,
        accumulate: bool,
        dtype: torch.dtype,
    ) -> None:
        self._table, self._accumulate, self._target = table, accumulate, target
        self._first = 0 if table.whole else comm.rank * target.numel()
        self._counts = [row[comm.rank] for row in counts]
        self._handles: list[Handle] = []
        self.scratch: Sequence[torch.Tensor] = ()
        self._padded = 0
        self._index = torch.empty(0, dtype=torch.int64, device=target.device)
        self._values = torch.empty(0, dtype=dtype, device=target.device)
        if not any(map(any, counts)):
            return
        if rows is None:
            rows = Rows(self._index, self._values.view(0, table.width))
        if table.whole:
            self._gather(comm, rows, label)
        else:
            self._send(comm, rows, counts, label)

    def _gather(self, comm: Communicator, rows: Rows, label: str) -> None:
        """Give all rows to all ranks, as many as the rank with most has."""
        padded, width = max(self._counts), self._table.width
        numbers = rows.index.new_zeros(padded)
        values = self._values.new_zeros(padded * width)
        numbers[: len(rows.index)] = rows.index
        values[: rows.values.numel()] = rows.values.reshape(-1)
        self._index = numbers.new_empty(comm.world * padded)
        self._values = values.new_empty(comm.world * padded * width)
        pairs = [(self._index, numbers), (self._values, values)]
        self._handles = [comm.all_gather([pair], label, kind="rows") for pair in pairs]
        self.scratch = [numbers, values, self._index, self._values]
        self._padded = padded

    def _send(self, comm: Communicator, rows: Rows, counts: Sequence[Sequence[int]], label: str) -> None:
        """Give each rank the rows that it needs."""
        width = self._table.width
        spans = rows.spans(self._table.ranges)
        numbers = torch.cat([rows.index[first:last] for first, last in spans])
        values = torch.cat([rows.values[first:last] for first, last in spans]).to(self._values.dtype).reshape(-1)
        sent = counts[comm.rank]
        self._index = numbers.new_empty(sum(self._counts))
        self._values = values.new_empty(sum(self._counts) * width)
        self._handles = [
            comm.all_to_all(self._index, numbers, self._counts, sent, label, kind="rows"),
            comm.all_to_all(
                self._values, values, [n * width for n in self._counts], [n * width for n in sent], label, kind="rows"
            ),
        ]
        self.scratch = [numbers, values, self._index, self._values]

    def wait(self) -> None:
        """Block until the sum is in place."""
        for handle in self._handles:
            handle.wait()
        if not self._accumulate:
            self._target.zero_()
        if self._handles:
            self._add_up()
        self._handles, self.scratch = [], ()
        self._index = self._values = torch.empty(0, device="cpu")

    def _add_up(self) -> None:
        """Add what has come, in rank order, and put it where it belongs."""
        width = self._table.width
        starts = [
            rank * self._padded if self._padded else sum(self._counts[:rank]) for rank in range(len(self._counts))
        ]
        parts = [slice(start, start + count) for start, count in zip(starts, self._counts, strict=True)]
        values = self._values.view(-1, width)
        index, place = torch.unique(torch.cat([self._index[part] for part in parts]), return_inverse=True)
        total = torch.zeros(len(index), width, dtype=self._target.dtype, device=values.device)
        done = 0
        for part, count in zip(parts, self._counts, strict=True):
            total.index_add_(0, place[done : done + count], values[part].to(total.dtype))
            done += count
        self._put(index, total)

    def _put(self, index: torch.Tensor, total: torch.Tensor) -> None:
        """Add sums of rows to the gradient; the ends of its range may lie inside of rows."""
        width, low, target = self._table.width, -self._first, self._target
        first = min(self._table.rows, -(-self._first // width))
        last = max(first, min(self._table.rows, (self._first + target.numel()) // width))
        inside = (index >= first) & (index < last)
        if last > first:
            whole = target[low + first * width : low + last * width].view(-1, width)
            whole.index_add_(0, index[inside] - first, total[inside])
        for row, values in zip(index[~inside].tolist(), total[~inside], strict=True):
            start = low + row * width
            begin, end = max(start, 0), min(start + width, target.numel())
            target[begin:end] += values[begin - start : end - start]


class Together:
    """Several reductions of one unit, as one."""

    def __init__(self, reductions: Sequence[Reduction]) -> None:
        self._reductions = list(reductions)

    @property
    def scratch(self) -> Sequence[torch.Tensor]:
        """Buffers that `wait()` gives back."""
        return [buffer for reduction in self._reductions for buffer in reduction.scratch]

    def wait(self) -> None:
        """Block until the sums are in place."""
        for reduction in self._reductions:
            reduction.wait()
