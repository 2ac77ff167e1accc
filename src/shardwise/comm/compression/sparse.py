"""Sparse reductions: of each rank's range of the gradient only the largest entries are sent, with their positions.

Every rank selects the same number of entries of each range: message sizes are known beforehand, and the owner adds
received entries in rank order. The error (entries not sent) is added to the next gradient (Stich et al., "Sparsified
SGD with memory", 2018); otherwise small steady entries never arrive. `DGC` (Lin et al., "Deep gradient compression",
2018) accumulates momentum instead of gradients: late entries arrive with their momentum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy
import torch
from typing_extensions import override

from shardwise.comm.compression.base import Compressor, Flat, Running, working_dtype
from shardwise.compat import has_values

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator
    from shardwise.config.schema import gradients

_CHUNK = 1 << 17  # elements of which a CPU computes magnitudes at a time, to stay in the cache
_FEW = 1 << 14  # elements up to which all are ranked at once
_ALIGN = 8  # alignment in bytes of the parts of a message


def largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices of the `count` entries of a 1-D tensor with the largest magnitudes, unordered; NaN is largest.

    On a CPU a sample gives a threshold that probably a few more than `count` entries reach, and only these are ranked.
    If fewer entries reach the threshold, all are ranked.

    >>> largest(torch.tensor([0.0, -3.0, 1.0, 2.0]), 2).sort().values
    tensor([1, 3])
    """
    size = values.numel()
    if count >= size:
        return torch.arange(size, device=values.device)
    if values.device.type != "cpu" or size <= _FEW:
        return values.abs().topk(count, sorted=False).indices
    sample = values[:: max(1, size >> 14)].abs()
    wanted = math.ceil(1.25 * count / size * sample.numel()) + 16
    threshold = float(sample.topk(min(wanted, sample.numel())).values[-1])
    found = _above(values, threshold, wanted * (size // sample.numel()))
    if found.numel() < count:
        return values.abs().topk(count, sorted=False).indices
    return found[values[found].abs().topk(count, sorted=False).indices]


def _above(values: torch.Tensor, threshold: float, expected: int) -> torch.Tensor:
    scratch = torch.empty(min(_CHUNK, values.numel()), dtype=values.dtype, device=values.device)
    found = []
    for start in range(0, values.numel(), _CHUNK):
        chunk = values[start : start + _CHUNK]
        magnitudes = torch.abs(chunk, out=scratch[: chunk.numel()])
        # Several times faster than torch's nonzero on a CPU.
        large = (magnitudes < threshold).logical_not_()
        if not has_values(values):  # a dry run, without values for NumPy
            return torch.empty(min(expected, values.numel()), dtype=torch.int64, device=values.device)
        reached = numpy.flatnonzero(large.numpy())
        found.append(torch.from_numpy(reached).add_(start))
    return torch.cat(found)


@dataclass(frozen=True)
class _Part:
    """Place of a flat parameter in a message: `count` int32 positions, then as many values of `dtype`.

    `positions`, `values` and `stop` (the end) are byte offsets, in the last dimension of messages.
    """

    count: int
    dtype: torch.dtype
    positions: int
    values: int
    stop: int

    def positions_in(self, messages: torch.Tensor) -> torch.Tensor:
        return messages[..., self.positions : self.positions + 4 * self.count].view(torch.int32)

    def values_in(self, messages: torch.Tensor) -> torch.Tensor:
        return messages[..., self.values : self.values + self.dtype.itemsize * self.count].view(self.dtype)


def _parts(shards: Sequence[int], dtypes: Sequence[torch.dtype], ratio: float) -> list[_Part]:
    """Return the layout of a message for flat parameters of `shards` elements a rank."""
    parts, stop = [], 0
    for shard, dtype in zip(shards, dtypes, strict=True):
        count = min(shard, math.ceil(ratio * shard))
        values = stop + _aligned(4 * count)
        parts.append(_Part(count, dtype, stop, values, values + _aligned(dtype.itemsize * count)))
        stop = parts[-1].stop
    return parts


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


class Sparse(Compressor):
    """Base of sparse reductions: selects, sends and adds up entries."""

    @property
    def ratio(self) -> float:
        """Part of the entries that is sent now."""
        raise NotImplementedError

    def gather(self, flat: Flat, scale: float, first: bool) -> torch.Tensor:
        """Return the candidates: gradient plus error feedback state; `first`: the first reduction in a step."""
        raise NotImplementedError

    def sent(self, flat: Flat, first: int, positions: torch.Tensor) -> None:
        """Called when entries of a flat parameter are sent: `positions` from element `first` on."""

    @override
    def reduce(
        self, flats: Sequence[Flat], label: str, *, accumulate: bool, scale: float, wire_dtype: torch.dtype | None
    ) -> Running:
        world = self.comm.world
        dtypes = [wire_dtype or working_dtype(flat.full.dtype) for flat in flats]
        shards = [flat.own.numel() for flat in flats]
        parts = _parts(shards, dtypes, self.ratio)
        size = parts[-1].stop
        everybody = flats[0].whole is not None and _spreads(world, size, shards)
        messages = self.buffer(world, size)
        for flat, part in zip(flats, parts, strict=True):
            values = self.gather(flat, scale, not accumulate)
            shard = flat.own.numel()
            for rank, message in enumerate(messages):
                self._fill(flat, rank * shard, values[rank * shard : (rank + 1) * shard], part, message)
        if everybody:
            received = self.buffer(world, world, size)
            handle = self.comm.all_gather([(received.view(-1), messages.view(-1))], label, kind="reduce")
        else:
            received, handle = self.exchange(messages, label)

        def add_up() -> None:
            for flat, part in zip(flats, parts, strict=True):
                out = flat.whole if flat.whole is not None and everybody else flat.own
                if not accumulate:
                    out.zero_()
                for message in received:
                    _add(out, part.positions_in(message), part.values_in(message), flat.own.numel())
            wholes = [(flat.whole, flat.own) for flat in flats if flat.whole is not None and not everybody]
            if wholes:
                self.comm.all_gather(wholes, label, kind="replicate").wait()

        return Running([handle], add_up, [messages, received])

    def _fill(self, flat: Flat, first: int, values: torch.Tensor, part: _Part, message: torch.Tensor) -> None:
        positions = largest(values, part.count)
        chosen = values.index_select(0, positions)
        sending = part.values_in(message)
        sending.copy_(chosen)
        part.positions_in(message).copy_(positions)
        self.sent(flat, first, positions)
        # The rounding error of a narrower dtype stays.
        values.index_copy_(0, positions, chosen.sub_(sending))


def _spreads(world: int, size: int, shards: Sequence[int]) -> bool:
    """Return True if all-gathering all messages takes fewer bytes than all-gathering the owners' sums (fp32)."""
    # To each other rank: all `world` messages, or one of them and then the sums.
    return world * size <= size + 4 * sum(shards)


def _add(out: torch.Tensor, positions: torch.Tensor, values: torch.Tensor, shard: int) -> None:
    """Add one rank's entries, for this rank (1-D) or each (2-D), in any order: positions in a message differ."""
    if positions.dim() == 2:
        positions = positions + shard * torch.arange(len(positions), device=out.device).unsqueeze(1)
    out.index_add_(0, positions.reshape(-1), values.reshape(-1).to(out.dtype))


class TopK(Sparse):
    """The largest entries of the gradient plus the error (Stich et al. 2018)."""

    def __init__(
        self, parameters: gradients.TopKOptions, comm: Communicator, hold: Callable[[torch.Tensor], None]
    ) -> None:
        super().__init__(comm, parameters.start_compressing_after_step, hold)
        self._parameters = parameters

    @override
    @property
    def ratio(self) -> float:
        return self._parameters.ratio

    @override
    def gather(self, flat: Flat, scale: float, first: bool) -> torch.Tensor:
        dtype = working_dtype(flat.full.dtype)
        if not self._parameters.use_error_feedback:
            if flat.full.dtype is not dtype:
                self.hold(wide := flat.full.to(dtype))
                return wide
            return flat.full
        return self.kept.at(f"{flat.name}.error", flat.full.numel(), dtype, scale).add_(flat.full)


class DGC(Sparse):
    """Deep Gradient Compression (Lin et al. 2018): each rank applies momentum before it sends.

    With gradient g: u = momentum * u + g and v = v + u. The largest entries of v are sent, and become zero in v (and in
    u, with `momentum_factor_masking`). A late entry therefore arrives as momentum SGD would have applied it by then.
    Plain SGD steps the received sum. Of several micro-batches reduced in one step, the first reduction applies the
    momentum.
    """

    _FIRST_RATIO = 0.25

    def __init__(
        self, parameters: gradients.DGCOptions, comm: Communicator, hold: Callable[[torch.Tensor], None]
    ) -> None:
        super().__init__(comm, parameters.start_compressing_after_step, hold)
        self._parameters = parameters

    @override
    @property
    def ratio(self) -> float:
        done, warmup, last = self.steps - self.start, self._parameters.warmup_steps, self._parameters.ratio
        first = max(last, self._FIRST_RATIO)
        return last if done >= warmup else first * (last / first) ** (done / warmup)

    @override
    def gather(self, flat: Flat, scale: float, first: bool) -> torch.Tensor:
        numel, dtype = flat.full.numel(), working_dtype(flat.full.dtype)
        total = self.kept.at(f"{flat.name}.accumulated", numel, dtype, scale)
        clip = self._parameters.local_clipping * scale / math.sqrt(self.comm.world)
        if clip:
            for gradient in _parameters_of(flat):
                norm = torch.linalg.vector_norm(gradient, dtype=dtype)
                # Non-finite values stay, because all ranks must find them.
                gradient.mul_((clip / norm).nan_to_num(1.0).clamp_(max=1.0))
        if not self._parameters.momentum:
            return total.add_(flat.full)
        velocity = self.kept.at(f"{flat.name}.momentum", numel, dtype, scale)
        if first:
            total.add_(velocity.mul_(self._parameters.momentum).add_(flat.full))
        else:
            velocity.add_(flat.full)
            total.add_(flat.full)
        return total

    @override
    def sent(self, flat: Flat, first: int, positions: torch.Tensor) -> None:
        velocity = self.kept.get(f"{flat.name}.momentum")
        if velocity is not None and self._parameters.momentum_factor_masking:
            velocity.index_fill_(0, first + positions, 0.0)


def _parameters_of(flat: Flat) -> Iterator[torch.Tensor]:
    for start, shape in flat.shapes:
        yield flat.full[start : start + shape.numel()]
