"""All-gather of a unit's parameters as 8-bit codes (qwZ of Wang et al., "ZeRO++", 2023, arXiv 2306.10209, section 3.1).

Every rank quantises its shard in blocks, and one collective gathers codes and scales. Every rank computes with the
decoded values, also of its own range: all ranks have the same values. Shards and master weights stay exact.

Parameters with fewer than two dimensions (biases, gains of normalisations) are sent exactly, behind the codes. Because
they are small, the model is sensitive to them, and their magnitudes would coarsen the blocks of adjacent matrices. Flat
parameters of integers and of fp64 are sent exactly.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from typing_extensions import override

from shardwise.comm.collective_queue import Launch
from shardwise.comm.communicator import Handle
from shardwise.comm.compression import BlockCode
from shardwise.memory import Accountant, Category
from shardwise.registry import Registry
from shardwise.zero.units.flat_param import FlatParamStorage
from shardwise.zero.units.layout import FlatParam, round_up
from shardwise.zero.units.sources import GatherSource

CODED = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that are quantised."""

EXACT_MOST = 1 << 16
"""Elements of the largest vector that is sent exactly."""

_ALIGNMENT = 8
"""Bytes; a flat parameter's part of a message can be viewed in any dtype."""


def travels_exactly(shape: Sequence[int]) -> bool:
    """Return True if a parameter of this shape is sent exactly."""
    return len(shape) < 2 and math.prod(shape) <= EXACT_MOST


@dataclass(frozen=True)
class Exact:
    """Elements of a quantised flat parameter that are sent exactly.

    Attributes:
        runs: of each rank that has some, offset in its range, and number of elements, of each run; they follow one
            another in the exact part of its message.
        most: number of elements that the exact part of each message has room for.
    """

    runs: Mapping[int, Sequence[tuple[int, int]]]
    most: int

    @classmethod
    def of(cls, section: FlatParam, is_exact: Callable[[int], bool]) -> Exact | None:
        """Find the exact elements, by index of the parameter; return None if most are exact: then all are."""
        count = sum(slot.numel for slot in section.slots if is_exact(slot.index))
        if section.dtype not in CODED or 2 * count >= sum(slot.numel for slot in section.slots):
            return None
        size, runs = section.size(1), defaultdict[int, list[tuple[int, int]]](list)
        for slot in section.slots:
            start, end = slot.offset, slot.offset + slot.numel
            while is_exact(slot.index) and start < end:
                rank, offset = divmod(start, size)
                stop = min(end, (rank + 1) * size)
                runs[rank].append((offset, stop - start))
                start = stop
        return cls(dict(runs), max((sum(count for _, count in own) for own in runs.values()), default=0))

    def of_range(self, values: torch.Tensor, rank: int) -> list[torch.Tensor]:
        """Return views of the exact elements in a rank's range."""
        return [values[offset : offset + count] for offset, count in self.runs[rank]]

    def of_message(self, exact: torch.Tensor, rank: int) -> list[torch.Tensor]:
        """Return views of the exact part of a rank's message, as `of_range`."""
        counts = [count for _, count in self.runs[rank]]
        return list(exact[: sum(counts)].split(counts))


@dataclass(frozen=True)
class _Part:
    """Position of a flat parameter in a message: codes from `begin`, then exact values; or exact values only."""

    memory: FlatParamStorage
    exact_part: Exact | None
    begin: int
    codes: int
    exact: int
    end: int

    def codes_in(self, messages: torch.Tensor) -> torch.Tensor:
        return messages[:, self.begin : self.codes]

    def exact_in(self, messages: torch.Tensor) -> torch.Tensor:
        layout = self.memory.layout
        count = layout.size(1) if self.exact_part is None else self.exact_part.most
        return messages[:, self.exact : self.end].view(layout.dtype)[:, :count]


class UnitCodes(GatherSource):
    """Encodes, gathers and decodes the flat parameters of one unit. `coded`: any of them is quantised."""

    fills = False

    def __init__(self, sections: Sequence[FlatParamStorage], registry: Registry, accountant: Accountant) -> None:
        self._comm = ranks = sections[0].domain.dimensions[0]
        self._rank, self._world = ranks.rank, ranks.world
        self._registry, self._accountant = registry, accountant
        self._hold = functools.partial(accountant.hold, Category.BUFFERS)
        self._code = BlockCode(8, hold=self._hold)
        self._parts: list[_Part] = []
        self._messages: torch.Tensor | None = None
        end = 0
        for memory in sections:
            begin, layout = end, memory.layout
            exact_part = Exact.of(layout, self._is_exact)
            codes = exact = begin
            if exact_part is not None:
                codes = begin + self._nbytes(layout.size(1))
                exact = round_up(codes, _ALIGNMENT)
            count = layout.size(1) if exact_part is None else exact_part.most
            end = exact + round_up(count * layout.dtype.itemsize, _ALIGNMENT)
            self._parts.append(_Part(memory, exact_part, begin, codes, exact, end))
        self._size = end
        self.coded = any(part.exact_part is not None for part in self._parts)

    @override
    def launches(self, label: str, kind: str = "gather") -> Sequence[Launch]:
        return [lambda: self._start(label, kind)]

    def _start(self, label: str, kind: str) -> Handle:
        """Encode this rank's range and launch the all-gather. The thread of the side channel may call this."""
        first = self._parts[0].memory
        with first.domain.allocating():
            messages = torch.empty(self._world, self._size, dtype=torch.uint8, device=first.device)
        self._hold(messages)
        own = messages[self._rank : self._rank + 1]
        for part in self._parts:
            self._encode(part, part.memory.tiered_shard.read(part.memory.shard), own, self._rank)
        self._messages = messages
        return self._comm.all_gather([(messages.view(-1), own.view(-1))], label, kind=kind)

    @override
    def finish(self) -> None:
        assert self._messages is not None
        with self._accountant.owning(Category.BUFFERS):
            for part in self._parts:
                self._decode(part, self._messages)
        self._messages = None

    @override
    def round(self) -> None:
        with self._accountant.owning(Category.BUFFERS):
            messages = torch.empty(self._world, self._size, dtype=torch.uint8, device=self._parts[0].memory.device)
            for part in self._parts:
                for rank, values in enumerate(part.memory.full.split(part.memory.layout.size(1) or 1)):
                    self._encode(part, values, messages[rank : rank + 1], rank)
                self._decode(part, messages)

    def _encode(self, part: _Part, values: torch.Tensor, message: torch.Tensor, rank: int) -> None:
        exact = part.exact_in(message)[0]
        if part.exact_part is None:
            exact.copy_(values)
            return
        if rank in part.exact_part.runs:
            torch._foreach_copy_(part.exact_part.of_message(exact, rank), part.exact_part.of_range(values, rank))
        self._encode_codes(part, values, part.codes_in(message), rank)

    def _decode(self, part: _Part, messages: torch.Tensor) -> None:
        exact, values = part.exact_in(messages), part.memory.full
        rows = values.view(self._world, part.memory.layout.size(1))
        if part.exact_part is None:
            rows.copy_(exact)
            return
        self._decode_codes(part, part.codes_in(messages), rows)
        if part.exact_part.most:
            own = part.exact_part
            to = [view for rank in own.runs for view in own.of_range(rows[rank], rank)]
            torch._foreach_copy_(to, [view for rank in own.runs for view in own.of_message(exact[rank], rank)])

    # -- the code ------------------------------------------------------------------------------------------------------

    def _is_exact(self, index: int) -> bool:
        return travels_exactly(self._registry[index].shape)

    def _nbytes(self, count: int) -> int:
        return self._code.nbytes(count)

    def _encode_codes(self, part: _Part, values: torch.Tensor, codes: torch.Tensor, rank: int) -> None:
        assert part.exact_part is not None
        if rank in part.exact_part.runs:
            values = values.clone()
            self._hold(values)
            torch._foreach_zero_(part.exact_part.of_range(values, rank))
        self._code.encode(values.unsqueeze(0), codes)

    def _decode_codes(self, part: _Part, codes: torch.Tensor, rows: torch.Tensor) -> None:
        self._code.decode(codes, rows)
