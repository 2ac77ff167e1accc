"""How a unit's parameters travel as 8-bit codes (qwZ of Wang et al., "ZeRO++", 2023, arXiv 2306.10209, section 3.1).

Every rank quantises its range in blocks, codes and scales are gathered in one collective, and every rank computes with
what comes out of them, its own range included: all ranks have the same values. Shards and masters stay exact.

Parameters with fewer than two dimensions (biases, gains of normalisations) travel exactly behind the codes: they are
small, the model is sensitive to them, and their magnitudes would coarsen the blocks of the matrices beside them.
Sections of integers and of fp64 travel exactly as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise.comm.communicator import Communicator, Handle
from shardwise.comm.compression import BlockCode
from shardwise.comm.wire import CPU
from shardwise.memory import Accountant, Category
from shardwise.registry import Registry
from shardwise.zero.layout import Section, round_up
from shardwise.zero.unit import SectionMemory

CODE = BlockCode(8)
CODED = (torch.float32, torch.bfloat16, torch.float16)
"""Types whose values travel as codes."""

EXACT_MOST = 1 << 16
"""Elements of the largest vector that travels exactly."""

_ALIGNMENT = 8
"""Bytes: a section's part of a message can be viewed in any type."""


def travels_exactly(shape: Sequence[int]) -> bool:
    """Whether a parameter of this shape travels exactly beside codes."""
    return len(shape) < 2 and math.prod(shape) <= EXACT_MOST


def exact_positions(section: Section, registry: Registry) -> torch.Tensor | None:
    """Return (rank, number) positions in each rank's range that travel exactly beside codes; None: all of them do.

    Ranks that have fewer than others repeat their last one, or the first of the range.
    """
    if section.dtype not in CODED or all(travels_exactly(registry[slot.index].shape) for slot in section.slots):
        return None
    found, any_of_them = [], False
    for rank in range(section.world):
        pieces = [p for p in section.pieces(*section.range_of(rank)) if travels_exactly(registry[p.index].shape)]
        any_of_them = any_of_them or bool(pieces)
        runs = [torch.arange(p.offset, p.offset + p.stop - p.start, device=CPU) for p in pieces]
        found.append(torch.cat(runs) if runs else torch.zeros(1, dtype=torch.int64, device=CPU))
    most = max(map(len, found)) if any_of_them else 0
    return torch.stack([torch.cat([run, run[-1:].expand(most - len(run))]) if most else run[:0] for run in found])


@dataclass(frozen=True)
class _Part:
    """Where a section lies in a message: codes, then exact values; or exact values only."""

    memory: SectionMemory
    positions: torch.Tensor | None
    begin: int
    exact: int
    end: int


class UnitCodes:
    """Encodes, gathers and decodes the sections of one unit; see the module docstring.

    Args:
        sections: the unit's.
        registry: knows the shapes.
        rank: this rank.
        accountant: is told of the buffers.

    Attributes:
        coded: whether there is anything to encode.
        gathered_bytes, kept_bytes, work_bytes: see `shardwise.zero.unit.Codes`.
    """

    def __init__(
        self, sections: Sequence[SectionMemory], registry: Registry, rank: int, accountant: Accountant
    ) -> None:
        self._rank = rank
        self._world = sections[0].layout.world
        self._accountant = accountant
        self._parts: list[_Part] = []
        self._handle: Handle | None = None
        self._messages: torch.Tensor | None = None
        end = 0
        for memory in sections:
            begin, layout = end, memory.layout
            positions = exact_positions(layout, registry)
            exact = begin
            if positions is not None:
                exact += round_up(CODE.nbytes(layout.shard), _ALIGNMENT)
                positions = positions.to(memory.device)
                accountant.hold(Category.BUFFERS, positions)
            count = layout.shard if positions is None else positions.shape[1]
            end = exact + round_up(count * layout.dtype.itemsize, _ALIGNMENT)
            self._parts.append(_Part(memory, positions, begin, exact, end))
        self._size = end
        self.coded = any(part.positions is not None for part in self._parts)
        self.gathered_bytes = self._world * end
        self.kept_bytes = sum(part.positions.nbytes for part in self._parts if part.positions is not None)
        self.work_bytes = max(
            CODE.scratch_bytes(self._world, memory.layout.shard, memory.device) // 2 for memory in sections
        )

    def start(self, comm: Communicator, label: str) -> None:
        """Encode this rank's range and launch the gather."""
        with self._accountant.owning(Category.BUFFERS):
            messages = torch.empty(self._world, self._size, dtype=torch.uint8, device=self._parts[0].memory.device)
            self._accountant.hold(Category.BUFFERS, messages)
            own = messages[self._rank : self._rank + 1]
            for part in self._parts:
                self._encode(part, part.memory.shard.unsqueeze(0), own, self._rank)
        self._messages = messages
        self._handle = comm.all_gather([(messages.view(-1), own.view(-1))], label)

    def finish(self) -> None:
        """Wait for the gather and write everybody's values into the whole buffers, which have memory."""
        assert self._handle is not None and self._messages is not None
        self._handle.wait()
        with self._accountant.owning(Category.BUFFERS):
            for part in self._parts:
                self._decode(part, part.memory.wire_view.view(self._world, part.memory.layout.shard), self._messages)
        self._handle = self._messages = None

    def round(self) -> None:
        """Make exact whole values what they would be had they been gathered as codes."""
        with self._accountant.owning(Category.BUFFERS):
            message = torch.empty(1, self._size, dtype=torch.uint8, device=self._parts[0].memory.device)
            for part in self._parts:
                for rank, values in enumerate(part.memory.wire_view.view(self._world, 1, part.memory.layout.shard)):
                    self._encode(part, values, message, rank)
                    self._decode(part, values, message, rank)

    def _encode(self, part: _Part, values: torch.Tensor, message: torch.Tensor, rank: int) -> None:
        """Write the range of a rank, (1, shard), into its message, (1, bytes)."""
        exact, size = self._exact(part, message)
        if part.positions is None:
            exact[:, :size].copy_(values)
            return
        positions = part.positions[rank : rank + 1]
        if positions.numel():
            exact[:, :size].copy_(values.gather(1, positions))
            values = values.scatter(1, positions, 0)
        CODE.encode(values, message[:, part.begin : part.begin + CODE.nbytes(values.shape[1])])

    def _decode(self, part: _Part, values: torch.Tensor, messages: torch.Tensor, rank: int | None = None) -> None:
        """Write the values of all ranks, or of one, into (ranks, shard)."""
        exact, size = self._exact(part, messages)
        if part.positions is None:
            values.copy_(exact[:, :size])
            return
        CODE.decode(messages[:, part.begin : part.begin + CODE.nbytes(values.shape[1])], values)
        if part.positions.numel():
            positions = part.positions if rank is None else part.positions[rank : rank + 1]
            values.scatter_(1, positions, exact[:, :size])

    @staticmethod
    def _exact(part: _Part, messages: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return what is left of the messages for exact values, in their type, and how many there are."""
        layout = part.memory.layout
        size = layout.shard if part.positions is None else part.positions.shape[1]
        return messages[:, part.exact : part.end].view(layout.dtype), size
