"""All-reduce with one bit per element and error feedback.

Error-compensated 1-bit compression (Seide et al., 2014; in the two-sided form of Tang et al., "1-bit Adam:
Communication Efficient Large-Scale Training with Adam's Convergence Speed", 2021, arXiv 2102.02888). Every rank adds
its error to its values, and sends each other rank the signs of that rank's range, 8 to a byte, with one fp32 scale per
run of values. The owner of a range averages the received values, adds its error, and sends signs and scales to all.
Both keep the difference between the intended and the sent values. Every rank, the owner too, uses the sent values: the
result has the same bits everywhere.

The scales preserve the L2 norm of a run (1-bit Adam, 1-bit LAMB), or the mean of its magnitudes (0/1 Adam: Lu et al.,
2022, arXiv 2202.06009).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch

from shardwise.comm.communicator import Communicator, Handle
from shardwise.compat import has_values

Scale = Literal["norm", "mean"]
"""Preserved by a scale: the L2 norm of its run, or the mean magnitude."""

_MAGIC = 0x0102040810204080  # factor that collects the lowest bits of eight bytes of a number in its highest byte

_SCALE_BYTES = 4


def pack_signs(values: torch.Tensor) -> torch.Tensor:
    """Return one bit per value of a 1-D tensor of a multiple of 8 elements, set where it is not negative, 8 to a byte.

    >>> packed = pack_signs(torch.tensor([1.0, -2.0, 0.0, -1.0, -1.0, -1.0, -1.0, -1.0]))
    >>> packed.dtype, packed.numel(), unpack_signs(packed, torch.float32)[:4].tolist()
    (torch.uint8, 1, [1.0, -1.0, 1.0, -1.0])
    """
    # A boolean is a byte of 0 or 1.
    return (values >= 0).view(torch.int64).mul_(_MAGIC).bitwise_right_shift_(56).to(torch.uint8)


def unpack_signs(packed: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return 1 for each set bit and -1 for each other one: 8 values of `dtype` per byte; `out`: 1-D, contiguous."""
    # Tensors of a dry run have no values, and must not be kept.
    table = (_signs if has_values(packed) else _signs.__wrapped__)(dtype, packed.device)
    rows = None if out is None else out.view(-1, 8)
    return torch.index_select(table, 0, packed.to(torch.int32), out=rows).view(-1)


@functools.lru_cache(maxsize=16)
def _signs(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the eight signs of every byte, by packing, because the order of bytes in a number must not matter."""
    bits = torch.arange(256, device=device).unsqueeze(1).bitwise_right_shift(torch.arange(8, device=device)) & 1
    rows = (bits * 2 - 1).to(dtype)
    table = torch.empty_like(rows)
    table[pack_signs(rows.view(-1)).to(torch.int64)] = rows
    return table


@dataclass
class _Chunk:
    """The range of one rank, from element `start`; `gaps` are padding, which stays zero.

    Each run has a length, up to the next run's first value, and a weight, from its norm to its scale (0: no values).
    """

    start: int
    lengths: list[int]
    weights: torch.Tensor
    gaps: list[tuple[int, int]]


class OnebitAllReduce:
    """The mean over ranks of one flat buffer with one bit per element, repeatedly (a `BlockMean`).

    Args:
        comm: the ranks.
        numel: elements of the buffer: a multiple of 8 times the number of ranks.
        runs: (start, stop) of the ranges with values, in order; the rest is padding.
        dtype: of the values and of the errors.
        device: of the values.
        label: for records.
        scale: preserved by scales.
        joined: one scale for all runs of a range, instead of one each.

    Attributes:
        worker_error: error of this rank's values: `numel` elements.
        server_error: error of the means of its range: `numel / world` elements.

    Example:
        >>> from shardwise.comm.ledger import Ledger
        >>> single = Communicator(None, Ledger(), torch.device("cpu"))
        >>> mean = OnebitAllReduce(single, 8, [(0, 4)], torch.float32, torch.device("cpu"), "example")
        >>> values = torch.tensor([3.0, -3.0, 3.0, -3.0, 0.0, 0.0, 0.0, 0.0])
        >>> mean.launch(values); mean.combine(); mean.finish(values)
        >>> values.tolist()
        [3.0, -3.0, 3.0, -3.0, 0.0, 0.0, 0.0, 0.0]
    """

    def __init__(
        self,
        comm: Communicator,
        numel: int,
        runs: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        device: torch.device,
        label: str,
        *,
        scale: Scale = "norm",
        joined: bool = False,
    ) -> None:
        self._comm = comm
        self._label = label
        self._order = 2 if scale == "norm" else 1
        self._shard = numel // comm.world
        starts = range(0, numel, self._shard)
        self._chunks = [_chunk(start, start + self._shard, runs, scale, joined, dtype, device) for start in starts]
        self._scales = max(len(chunk.lengths) for chunk in self._chunks)
        self.message_bytes = message_bytes(self._shard, self._scales)
        self.worker_error = torch.zeros(numel, dtype=dtype, device=device)
        self.server_error = torch.zeros(self._shard, dtype=dtype, device=device)
        self._received: torch.Tensor | None = None
        self._sent: torch.Tensor | None = None
        self._handle: Handle | None = None

    @property
    def scratch(self) -> list[torch.Tensor]:
        return [message for message in (self._received, self._sent) if message is not None]

    def launch(self, values: torch.Tensor) -> None:
        self.worker_error.add_(values)
        size, world = self.message_bytes, self._comm.world
        self._sent = torch.zeros(world * size, dtype=torch.uint8, device=values.device)
        for rank, (chunk, message) in enumerate(zip(self._chunks, self._sent.split(size), strict=True)):
            self._encode(self.worker_error[rank * self._shard : (rank + 1) * self._shard], chunk, message)
        self._received = torch.empty_like(self._sent)
        sizes = [size] * world
        self._handle = self._comm.all_to_all(self._received, self._sent, sizes, sizes, self._label, kind="reduce")

    def combine(self) -> None:
        assert self._handle is not None and self._received is not None
        self._handle.wait()
        size, world, rank = self.message_bytes, self._comm.world, self._comm.rank
        chunk = self._chunks[rank]
        total, term = torch.empty_like(self.server_error), torch.empty_like(self.server_error)
        for number, message in enumerate(self._received.split(size)):
            if number:
                total.add_(self._decode(message, chunk, term))
            else:
                self._decode(message, chunk, total)
        self.server_error.add_(total.div_(world))
        self._received = torch.empty(world * size, dtype=torch.uint8, device=total.device)
        self._sent = self._received[rank * size : (rank + 1) * size]
        self._encode(self.server_error, chunk, self._sent)
        self._handle = self._comm.all_gather([(self._received, self._sent)], self._label, kind="reduce")

    def finish(self, out: torch.Tensor) -> None:
        """Write the mean into `out`: 1-D, as long as the values, with zeros in the padding."""
        assert self._handle is not None and self._received is not None
        self._handle.wait()
        for rank, (chunk, message) in enumerate(
            zip(self._chunks, self._received.split(self.message_bytes), strict=True)
        ):
            self._decode(message, chunk, out[rank * self._shard : (rank + 1) * self._shard])
        self._handle = self._received = self._sent = None

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"worker": self.worker_error, "server": self.server_error}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.worker_error.copy_(state["worker"])
        self.server_error.copy_(state["server"])

    def _encode(self, values: torch.Tensor, chunk: _Chunk, message: torch.Tensor) -> None:
        """Write signs and scales of a range into a message; leave the error in `values`."""
        norms = torch.stack(torch._foreach_norm(list(values.split(chunk.lengths)), self._order))
        self._scales_in(message, chunk).copy_(norms.mul_(chunk.weights))
        message[self._head : self._head + values.numel() // 8] = pack_signs(values)
        values.sub_(self._decode(message, chunk, torch.empty_like(values)))

    def _decode(self, message: torch.Tensor, chunk: _Chunk, out: torch.Tensor) -> torch.Tensor:
        unpack_signs(message[self._head : self._head + out.numel() // 8], out.dtype, out)
        scales = self._scales_in(message, chunk).to(out.dtype)
        torch._foreach_mul_(list(out.split(chunk.lengths)), list(scales.unbind()))
        for start, stop in chunk.gaps:
            out[start:stop].zero_()
        return out

    @property
    def _head(self) -> int:
        return _SCALE_BYTES * self._scales

    def _scales_in(self, message: torch.Tensor, chunk: _Chunk) -> torch.Tensor:
        return message[: _SCALE_BYTES * len(chunk.lengths)].view(torch.float32)


def message_bytes(shard: int, scales: int) -> int:
    """Return the bytes of each of the 2 * (world - 1) messages for a range of `shard` elements with `scales` scales.

    >>> message_bytes(1 << 20, 12)
    131120
    """
    return _SCALE_BYTES * scales + -(-shard // (8 * _SCALE_BYTES)) * _SCALE_BYTES


def _chunk(
    start: int,
    stop: int,
    runs: Sequence[tuple[int, int]],
    scale: Scale,
    joined: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> _Chunk:
    inside = [(max(low, start) - start, min(high, stop) - start) for low, high in runs if low < stop and high > start]
    inside = [(low, high) for low, high in inside if low < high]
    firsts = [low for low, _ in inside]
    ends = [high for _, high in inside]
    size = stop - start
    gaps = [(high, low) for high, low in zip([0, *ends], [*firsts, size], strict=True) if high < low]
    counts = [high - low for low, high in inside]
    if not inside:
        return _Chunk(start, [size], torch.zeros(1, dtype=dtype, device=device), [])
    if joined:
        lengths, counts = [size], [sum(counts)]
    else:
        borders = [0, *firsts[1:], size]
        lengths = [high - low for low, high in pairwise(borders)]
    power = -0.5 if scale == "norm" else -1.0
    weights = torch.tensor([count**power for count in counts], dtype=dtype, device=device)
    return _Chunk(start, lengths, weights, gaps)
