"""All-gather of weights of float8 layers in 8 bits, as they are computed with.

A first small collective gathers the largest magnitude of each rank's part of each weight, which gives the scale of the
whole weight. Every rank rounds its part with it, as the layer would round the gathered weight. Because scales are
powers of two, the decoded values are exact in the dtype of the parameters, and the layer's own rounding changes none:
results are equal to those of an exact all-gather. Other parameters are sent exactly.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from typing_extensions import override

from shardwise.comm.collective_queue import Launch
from shardwise.comm.communicator import Handle
from shardwise.memory import Accountant, Category
from shardwise.registry import Registry
from shardwise.zero.units.flat_param import FlatParamStorage
from shardwise.zero.units.layout import ParamSlot, ShardSlice
from shardwise.zero.units.quantized_weights import UnitCodes


class Float8Codes(UnitCodes):
    """Rounds, gathers and decodes the flat parameters of one unit.

    `weights` are the indices of the weights in the registry, `dtype` is the float8 dtype. All ranks call.
    """

    def __init__(
        self,
        weights: Collection[int],
        dtype: torch.dtype,
        sections: Sequence[FlatParamStorage],
        registry: Registry,
        accountant: Accountant,
    ) -> None:
        self._weights, self._dtype = weights, dtype
        super().__init__(sections, registry, accountant)
        memories = [part.memory for part in self._parts if part.exact_part is not None]
        slots = [(memory, slot) for memory in memories for slot in memory.layout.slots]
        self._slots = [(memory, slot) for memory, slot in slots if slot.index in weights]
        self._places = {slot.index: place for place, (_, slot) in enumerate(self._slots)}
        self._largest: torch.Tensor | None = None  # magnitude of each rank's part of each weight
        self._scales = torch.ones(0, device=sections[0].device)
        if self.coded:
            self._comm.connect("gather_on")

    @override
    def launches(self, label: str, kind: str = "gather") -> Sequence[Launch]:
        if not self.coded:
            return super().launches(label, kind)
        later = "gather_on" if kind == "gather" else "reduce_on"
        return [lambda: self._start_scales(label, kind), lambda: self._start(label, later)]

    def _start_scales(self, label: str, kind: str) -> Handle:
        first = self._parts[0].memory
        with first.domain.allocating():
            largest = torch.zeros(self._world, len(self._places), dtype=torch.float32, device=first.device)
        self._accountant.hold(Category.BUFFERS, largest)
        own = largest[self._rank]
        for part in self._parts:
            if part.exact_part is not None:
                values = part.memory.tiered_shard.read(part.memory.shard)
                for piece, place in self._pieces(part.memory, self._rank):
                    own[place] = _largest(_values_of(values, piece))
        self._largest = largest
        return self._comm.all_gather([(largest.view(-1), own)], label, kind=kind)

    @override
    def _start(self, label: str, kind: str) -> Handle:
        if self._largest is not None:
            self._set_scales(self._largest.amax(0))
        return super()._start(label, kind)

    @override
    def finish(self) -> None:
        super().finish()
        self._largest = None

    @override
    def round(self) -> None:
        self._set_scales(torch.stack([_largest(_whole(memory, slot)).float() for memory, slot in self._slots]))
        super().round()

    def _set_scales(self, largest: torch.Tensor) -> None:
        from torchao.float8.float8_utils import amax_to_scale

        self._scales = amax_to_scale(largest, self._dtype, round_scales_to_power_of_2=True)

    def _pieces(self, memory: FlatParamStorage, rank: int) -> list[tuple[ShardSlice, int]]:
        size = memory.layout.size(1)
        pieces = memory.layout.pieces(rank * size, (rank + 1) * size)
        return [(piece, self._places[piece.index]) for piece in pieces if piece.index in self._places]

    # -- the code ------------------------------------------------------------------------------------------------------

    @override
    def _is_exact(self, index: int) -> bool:
        return index not in self._weights

    @override
    def _nbytes(self, count: int) -> int:
        return count

    @override
    def _encode_codes(self, part: Any, values: torch.Tensor, codes: torch.Tensor, rank: int) -> None:
        from torchao.float8.float8_utils import to_fp8_saturated

        for piece, place in self._pieces(part.memory, rank):
            scaled = _values_of(values, piece).float() * self._scales[place]
            _values_of(codes[0], piece).view(self._dtype).copy_(to_fp8_saturated(scaled, self._dtype))

    @override
    def _decode_codes(self, part: Any, codes: torch.Tensor, rows: torch.Tensor) -> None:
        rows.copy_(codes.view(self._dtype))
        for memory, slot in self._slots:
            if memory is part.memory:
                place = self._places[slot.index]
                # Exact, by a power of two. Of one dimension: CUDA would cast a scalar to fp16, where it may be 0.
                _whole(memory, slot).mul_(1 / self._scales[place : place + 1])
        for first, end in part.memory.layout.gaps:
            part.memory.full[first:end].zero_()


def _values_of(values: torch.Tensor, piece: ShardSlice) -> torch.Tensor:
    return values[piece.offset : piece.offset + piece.stop - piece.start]


def _whole(memory: FlatParamStorage, slot: ParamSlot) -> torch.Tensor:
    return memory.full[slot.offset : slot.offset + slot.numel]


def _largest(values: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(values, float("inf"))
