"""Sparse reductions: of each rank's range of the gradient only the largest entries are sent, with their positions.

Every rank selects the same number of entries of each range: message sizes are known beforehand, and the owner adds
received entries in rank order. The error (entries not sent) is added to the next gradient (Stich et al., "Sparsified
SGD with memory", 2018); otherwise small steady entries never arrive. `DGC` (Lin et al., "Deep gradient compression",
2018) accumulates momentum instead of gradients: late entries arrive with their momentum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy
import torch
from typing_extensions import override

from shardwise.comm.compression.base import Configured, Flat, Running, working_dtype
from shardwise.compat import has_values

if TYPE_CHECKING:
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
    if values.device.type == "cpu" and size > _FEW and has_values(values):  # a dry run has no values for NumPy
        sample = values[:: size >> 14].abs()
        wanted = min(math.ceil(1.25 * count / size * sample.numel()) + 16, sample.numel())
        threshold = float(sample.topk(wanted).values[-1])
        del sample
        scratch = torch.empty(min(size, _CHUNK), dtype=values.dtype, device=values.device)
        found = []
        for number, chunk in enumerate(values.split(_CHUNK)):
            large = (torch.abs(chunk, out=scratch[: chunk.numel()]) < threshold).logical_not_()
            # Several times faster than torch's nonzero on a CPU.
            found.append(torch.from_numpy(numpy.flatnonzero(large.numpy())).add_(number * _CHUNK))
        del scratch, large
        reached = torch.cat(found)
        if reached.numel() >= count:
            return reached[values[reached].abs().topk(count, sorted=False).indices]
    return values.abs().topk(count, sorted=False).indices


@dataclass(frozen=True)
class _Part:
    """Bytes of a flat parameter in a message: int32 positions, then as many values of `dtype`."""

    dtype: torch.dtype
    count: int
    start: int

    @property
    def middle(self) -> int:
        return self.start + _aligned(4 * self.count)

    @property
    def stop(self) -> int:
        return self.middle + _aligned(self.dtype.itemsize * self.count)

    def of(self, messages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the views of positions and values in messages."""
        positions = messages[..., self.start : self.middle].view(torch.int32)[..., : self.count]
        return positions, messages[..., self.middle : self.stop].view(self.dtype)[..., : self.count]


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


class Sparse(Configured):
    """Base of sparse reductions: selects, sends and adds up entries."""

    @property
    def ratio(self) -> float:
        """Part of the entries that is sent now."""
        return float(self.parameters.ratio)

    def gather(self, flat: Flat, scale: float, first: bool) -> list[torch.Tensor]:
        """Return the candidates, gradient plus error feedback state; `first`: the first reduction in a step.

        Further tensors become zero where entries are sent.
        """
        raise NotImplementedError

    @override
    def reduce(
        self, flats: Sequence[Flat], label: str, *, accumulate: bool, scale: float, wire_dtype: torch.dtype | None
    ) -> Running:
        world, shards = self.comm.world, [flat.own.numel() for flat in flats]
        parts: list[_Part] = []
        for flat, shard in zip(flats, shards, strict=True):
            dtype, count = wire_dtype or working_dtype(flat.full.dtype), min(shard, math.ceil(self.ratio * shard))
            parts.append(_Part(dtype, count, parts[-1].stop if parts else 0))
        size = parts[-1].stop
        # To each other rank: all `world` messages, or one of them and then the owners' sums (fp32).
        everybody = flats[0].whole is not None and world * size <= size + 4 * sum(shards)
        messages = self.buffer(world, size)
        for flat, part in zip(flats, parts, strict=True):
            found = [tensor.view(world, -1) for tensor in self.gather(flat, scale, not accumulate)]
            for message, values, *cleared in zip(messages, *found, strict=True):
                self._fill(message, part, values, cleared)
        if everybody:
            received = self.buffer(world, world, size)
            handle = self.comm.all_gather([(received.view(-1), messages.view(-1))], label, kind="reduce")
        else:
            received, handle = self.exchange(messages, label)

        def add_up() -> None:
            ranks = torch.arange(world, device=received.device).unsqueeze(1)
            for flat, part, shard in zip(flats, parts, shards, strict=True):
                out = flat.whole if flat.whole is not None and everybody else flat.own
                if not accumulate:
                    out.zero_()
                for message in received:  # in rank order; positions in one message differ
                    positions, values = part.of(message)
                    positions = positions + shard * ranks if everybody else positions
                    out.index_add_(0, positions.reshape(-1), values.reshape(-1).to(out.dtype))
            wholes = [(flat.whole, flat.own) for flat in flats if flat.whole is not None and not everybody]
            if wholes:
                self.comm.all_gather(wholes, label, kind="replicate").wait()

        return Running(handle, add_up, [messages, received])

    @staticmethod
    def _fill(message: torch.Tensor, part: _Part, values: torch.Tensor, cleared: Sequence[torch.Tensor]) -> None:
        chosen = largest(values, part.count)
        exact = values.index_select(0, chosen)
        positions, sent = part.of(message)
        positions.copy_(chosen)
        sent.copy_(exact)
        for tensor in cleared:
            tensor.index_fill_(0, chosen, 0.0)
        # The rounding error of a narrower dtype stays.
        values.index_copy_(0, chosen, exact.sub_(sent))


class TopK(Sparse):
    """The largest entries of the gradient plus the error (Stich et al. 2018)."""

    parameters: gradients.TopKOptions

    @override
    def gather(self, flat: Flat, scale: float, first: bool) -> list[torch.Tensor]:
        dtype = working_dtype(flat.full.dtype)
        if self.parameters.use_error_feedback:
            return [self.kept.at(f"{flat.name}.error", flat.full.numel(), dtype, scale).add_(flat.full)]
        wide = flat.full.to(dtype)
        if wide is not flat.full:
            self.hold(wide)
        return [wide]


class DGC(Sparse):
    """Deep Gradient Compression (Lin et al. 2018): each rank applies momentum before it sends.

    With gradient g: u = momentum * u + g and v = v + u. The largest entries of v are sent, and become zero in v (and in
    u, with `momentum_factor_masking`). A late entry therefore arrives as momentum SGD would have applied it by then.
    Plain SGD steps the received sum. Of several micro-batches reduced in one step, the first reduction applies the
    momentum.
    """

    _FIRST_RATIO = 0.25

    parameters: gradients.DGCOptions

    @override
    @property
    def ratio(self) -> float:
        done, warmup, last = self.steps - self.start, self.parameters.warmup_steps, self.parameters.ratio
        first = max(last, self._FIRST_RATIO)
        return last if done >= warmup else first * (last / first) ** (done / warmup)

    @override
    def gather(self, flat: Flat, scale: float, first: bool) -> list[torch.Tensor]:
        given, dtype = flat.full, working_dtype(flat.full.dtype)
        total = self.kept.at(f"{flat.name}.accumulated", given.numel(), dtype, scale)
        clip = self.parameters.local_clipping * scale / math.sqrt(self.comm.world)
        for start, shape in flat.shapes if clip else ():
            gradient = given[start : start + shape.numel()]
            norm = torch.linalg.vector_norm(gradient, dtype=dtype)
            # Non-finite values stay, because all ranks must find them.
            gradient.mul_((clip / norm).nan_to_num(1.0).clamp_(max=1.0))
        if not self.parameters.momentum:
            return [total.add_(given)]
        velocity = self.kept.at(f"{flat.name}.momentum", given.numel(), dtype, scale)
        if first:
            given = velocity.mul_(self.parameters.momentum).add_(given)
        else:
            velocity.add_(given)
        total.add_(given)
        return [total, velocity] if self.parameters.momentum_factor_masking else [total]
