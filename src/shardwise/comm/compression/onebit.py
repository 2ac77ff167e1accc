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

import bisect
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
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


_GROUPS = 8
"""Groups of ranks whose ranges are encoded together: more need less memory, and launch more kernels."""


@dataclass
class _Runs:
    """Runs of the ranges of some ranks.

    Attributes:
        ranks: these ranks.
        lengths: of each run, up to the next run's first value.
        weights: from the norm of each run to its scale; 0: no values.
        words: of each run, the place of its scale among the 32-bit words of the messages.
        repeats, counts: lengths of the runs, and of the padding between them, which stays zero.
        sources: run of each of these; padding has the number behind the last one.
    """

    ranks: slice
    lengths: list[int]
    weights: torch.Tensor
    words: torch.Tensor
    repeats: list[int]
    counts: torch.Tensor
    sources: torch.Tensor


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
        starts = [start for start, _ in runs]
        inside = [self._inside(rank, runs, starts) for rank in range(comm.world)]
        self.scales = 1 if joined else max(len(own) or 1 for own in inside)
        self.message_bytes = message_bytes(self._shard, self.scales)
        self._most = -(-comm.world // _GROUPS)
        self._groups = [self._runs(rank, inside[rank : rank + self._most]) for rank in range(0, comm.world, self._most)]
        self._own = self._runs(comm.rank, inside[comm.rank : comm.rank + 1])

    def _inside(self, rank: int, runs: Sequence[tuple[int, int]], starts: Sequence[int]) -> list[tuple[int, int]]:
        """Return the parts of the runs inside of a rank's range."""
        size, start = self._shard, rank * self._shard
        begin = max(bisect.bisect_right(starts, start) - 1, 0)
        some = runs[begin : bisect.bisect_left(starts, start + size)]
        cut = [(max(low - start, 0), min(high - start, size)) for low, high in some]
        return [(low, high) for low, high in cut if low < high]

    def _runs(self, first: int, ranges: Sequence[Sequence[tuple[int, int]]]) -> _Runs:
        size, server = self._shard, self.errors["server"]
        lengths, weights, words, repeats, sources = list[int](), list[float](), list[int](), list[int](), list[int]()
        padding = sum(1 if self._joined else len(inside) or 1 for inside in ranges)
        for number, inside in enumerate(ranges):
            before, counts = len(lengths), [high - low for low, high in inside]
            for place, (low, high) in enumerate([*inside, (size, size)]):
                repeats += [low - inside[place - 1][1] if place else low, high - low]
                sources += [padding, before if self._joined else before + place]
            if self._joined or not inside:
                lengths.append(size)
                counts = [sum(counts)]
            else:
                lengths += [high - low for low, high in pairwise([0, *(low for low, _ in inside[1:]), size])]
            weights += [count and count ** (-1 / self._order) for count in counts]
            words += [number * self.message_bytes // _SCALE_BYTES + place for place in range(len(counts))]
            sources[-1] = padding
        device = server.device
        return _Runs(
            slice(first, first + len(ranges)),
            lengths,
            torch.tensor(weights, dtype=server.dtype, device=device),
            torch.tensor(words, device=device),
            repeats,
            torch.tensor(repeats, dtype=torch.int32, device=device),
            torch.tensor(sources, device=device),
        )

    @override
    def average(self, values: torch.Tensor) -> Iterator[Sequence[torch.Tensor]]:
        size, comm, shape = self.message_bytes, self._comm, (self._comm.world, -1)
        worker, server = self.errors.values()
        worker.add_(values)
        sent = torch.zeros(comm.world, size, dtype=torch.uint8, device=values.device)
        for runs in self._groups:
            self._encode(worker.view(shape)[runs.ranks], runs, sent[runs.ranks])
        received, sizes = torch.empty_like(sent), [size] * comm.world
        handle = comm.all_to_all(received.view(-1), sent.view(-1), sizes, sizes, self._label, kind="reduce")
        yield received, sent
        handle.wait()
        server.add_(self._total(received).div_(comm.world))
        received = torch.empty_like(sent)
        sent = received[comm.rank]
        self._encode(server, self._own, sent.unsqueeze(0))
        handle = comm.all_gather([(received.view(-1), sent)], self._label, kind="reduce")
        yield received, sent
        handle.wait()
        for runs in self._groups:
            self._decode(received[runs.ranks].view(1, -1), runs, values.view(shape)[runs.ranks])

    def _total(self, messages: torch.Tensor) -> torch.Tensor:
        """Return the sum of the values of this rank's range in messages, one a row."""
        own, total = self.errors["server"], None
        for some in messages.split(self._most):
            values = self._decode(some, self._own, own.new_empty(len(some), self._shard)).sum(0)
            total = values if total is None else total.add_(values)
        assert total is not None
        return total

    def _encode(self, values: torch.Tensor, runs: _Runs, messages: torch.Tensor) -> None:
        """Write signs and scales of some ranges into messages, one a row; leave the error in `values`."""
        values = values.view(-1)
        norms = torch.stack(torch._foreach_norm(list(values.split(runs.lengths)), self._order))
        scales = norms.mul_(runs.weights).to(torch.float32)
        messages.view(-1).view(torch.float32).index_copy_(0, runs.words, scales)
        self._signs(messages).copy_(pack_signs(values).view(len(messages), -1))
        values.sub_(self._decode(messages.view(1, -1), runs, torch.empty_like(values)))

    def _decode(self, messages: torch.Tensor, runs: _Runs, out: torch.Tensor) -> torch.Tensor:
        """Write the values of messages into `out`. Each row has a message of each of the ranks of `runs`."""
        scales = messages.view(torch.float32).index_select(1, runs.words).to(out.dtype)
        unpack_signs(self._signs(messages.view(-1, self.message_bytes)).reshape(-1), out.dtype, out.view(-1))
        rows = out.view(len(messages), -1)
        each = nn.functional.pad(scales, (0, 1)).index_select(1, runs.sources)
        if rows.is_cpu:
            torch._foreach_mul_(list(rows.split(runs.repeats, 1)), list(each.split(1, 1)))
        else:  # Because that would launch a kernel for each run. Numbers of runs as int64 would need twice the memory.
            numbers = torch.repeat_interleave(runs.counts, output_size=rows.shape[1])
            rows.mul_(each.index_select(1, numbers))
        return out

    def _signs(self, messages: torch.Tensor) -> torch.Tensor:
        """Return the view of the signs in messages, one a row."""
        head = _SCALE_BYTES * self.scales
        return messages[:, head : head + self._shard // 8]


def message_bytes(shard: int, scales: int) -> int:
    """Return the bytes of each of the 2 * (world - 1) messages for a range of `shard` elements with `scales` scales.

    >>> message_bytes(1 << 20, 12)
    131120
    """
    return _SCALE_BYTES * scales + -(-shard // (8 * _SCALE_BYTES)) * _SCALE_BYTES
