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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from typing_extensions import override

from shardwise.comm.communicator import Communicator
from shardwise.comm.compression.averaging import BlockMean
from shardwise.compat import has_values

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
    """The range of one rank. `gaps` are padding, which stays zero.

    Each run has a length, up to the next run's first value, and a weight, from its norm to its scale (0: no values).
    """

    lengths: list[int]
    weights: torch.Tensor
    gaps: list[tuple[int, int]]


class OnebitAllReduce(BlockMean):
    """The mean over ranks of one flat buffer with one bit per element.

    Args:
        comm: the ranks.
        numel: elements of the buffer: a multiple of 8 times the number of ranks.
        runs: (start, stop) of the ranges with values, in order; the rest is padding.
        dtype: of the values and of the errors.
        label: for records.
        order: of the norm of each run that its scale preserves: 2, or 1 (mean magnitude).
        joined: one scale for all runs of a range, instead of one each.

    The errors are "worker", of this rank's values, and "server", of the means of its range.

    Example:
        >>> from shardwise.comm.ledger import Ledger
        >>> single = Communicator(None, Ledger(), torch.device("cpu"))
        >>> mean = OnebitAllReduce(single, 8, [(0, 4)], torch.float32, "example")
        >>> values = torch.tensor([3.0, -3.0, 3.0, -3.0, 0.0, 0.0, 0.0, 0.0])
        >>> for messages in mean.average(values): pass
        >>> values.tolist()
        [3.0, -3.0, 3.0, -3.0, 0.0, 0.0, 0.0, 0.0]
    """

    def __init__(
        self,
        comm: Communicator,
        numel: int,
        runs: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        label: str,
        *,
        order: int = 2,
        joined: bool = False,
    ) -> None:
        super().__init__()
        self._comm, self._label, self._order, self._joined = comm, label, order, joined
        self._shard = numel // comm.world
        for name, size in (("worker", numel), ("server", self._shard)):
            self.errors[name] = torch.zeros(size, dtype=dtype, device=comm.device)
        self._chunks = [self._chunk(start, runs) for start in range(0, numel, self._shard)]
        self.scales = max(len(chunk.lengths) for chunk in self._chunks)
        self.message_bytes = message_bytes(self._shard, self.scales)

    def _chunk(self, start: int, runs: Sequence[tuple[int, int]]) -> _Chunk:
        size, server = self._shard, self.errors["server"]
        inside = [(max(low - start, 0), min(high - start, size)) for low, high in runs]
        inside = [(low, high) for low, high in inside if low < high]
        counts = [high - low for low, high in inside]
        edges = [0, *(edge for run in inside for edge in run), size]
        gaps = [(low, high) for low, high in zip(edges[::2], edges[1::2], strict=True) if low < high]
        lengths = [high - low for low, high in pairwise([0, *(low for low, _ in inside[1:]), size])]
        if self._joined or not inside:
            lengths, counts = [size], [sum(counts)]
        weights = [count and count ** (-1 / self._order) for count in counts]
        return _Chunk(lengths, torch.tensor(weights, dtype=server.dtype, device=server.device), gaps)

    @override
    def average(self, values: torch.Tensor) -> Iterator[Sequence[torch.Tensor]]:
        size, comm = self.message_bytes, self._comm
        worker, server = self.errors.values()
        worker.add_(values)
        sent = torch.zeros(comm.world * size, dtype=torch.uint8, device=values.device)
        for part, chunk, message in zip(worker.split(self._shard), self._chunks, sent.split(size), strict=True):
            self._encode(part, chunk, message)
        received, sizes = torch.empty_like(sent), [size] * comm.world
        handle = comm.all_to_all(received, sent, sizes, sizes, self._label, kind="reduce")
        yield received, sent
        handle.wait()
        own = self._chunks[comm.rank]
        first, *others = received.split(size)
        total, term = self._decode(first, own, torch.empty_like(server)), torch.empty_like(server)
        for message in others:
            total.add_(self._decode(message, own, term))
        server.add_(total.div_(comm.world))
        del first, others, message, total, term
        received = torch.empty_like(sent)
        sent = received.split(size)[comm.rank]
        self._encode(server, own, sent)
        handle = comm.all_gather([(received, sent)], self._label, kind="reduce")
        yield received, sent
        handle.wait()
        for part, chunk, message in zip(values.split(self._shard), self._chunks, received.split(size), strict=True):
            self._decode(message, chunk, part)

    def _encode(self, values: torch.Tensor, chunk: _Chunk, message: torch.Tensor) -> None:
        """Write signs and scales of a range into a message; leave the error in `values`."""
        norms = torch.stack(torch._foreach_norm(list(values.split(chunk.lengths)), self._order))
        scales, signs = self._fields(message, chunk)
        scales.copy_(norms.mul_(chunk.weights))
        signs.copy_(pack_signs(values))
        values.sub_(self._decode(message, chunk, torch.empty_like(values)))

    def _decode(self, message: torch.Tensor, chunk: _Chunk, out: torch.Tensor) -> torch.Tensor:
        scales, signs = self._fields(message, chunk)
        unpack_signs(signs, out.dtype, out)
        torch._foreach_mul_(list(out.split(chunk.lengths)), list(scales.to(out.dtype).unbind()))
        for start, stop in chunk.gaps:
            out[start:stop].zero_()
        return out

    def _fields(self, message: torch.Tensor, chunk: _Chunk) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the views of scales and signs in a message."""
        head = _SCALE_BYTES * self.scales
        scales = message[: _SCALE_BYTES * len(chunk.lengths)].view(torch.float32)
        return scales, message[head : head + self._shard // 8]


def message_bytes(shard: int, scales: int) -> int:
    """Return the bytes of each of the 2 * (world - 1) messages for a range of `shard` elements with `scales` scales.

    >>> message_bytes(1 << 20, 12)
    131120
    """
    return _SCALE_BYTES * scales + -(-shard // (8 * _SCALE_BYTES)) * _SCALE_BYTES
