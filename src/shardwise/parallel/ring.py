"""Ring attention (Liu et al., 2310.01889): keys and values travel from rank to rank, queries stay.

In each of P steps a rank attends to the keys of one rank while sending them to the next rank. The outputs are merged by
their log-sum-exp, as in flash attention. The backward pass sends keys and values around again with their gradients,
which return to their rank in one further step. A rank sends its keys and values P - 1 times; Ulysses sends each tensor
once. So ring attention is for models with fewer heads than ranks.

Under a causal mask the tokens of a rank are exchanged first, and its output afterwards: of 2 P chunks of the sequence
rank r then has numbers r and 2 P - 1 - r, and all ranks have equally much to do in each step (as in Brandon et al.,
"Striped attention", 2311.09431). Each step is one call of flash attention without a mask, or with a causal one. Other
masks, and other dtypes on CUDA than 16-bit, use plain operators.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from shardwise.comm.communicator import Handle
from shardwise.compat import flash_attention, flash_attention_applies, flash_attention_backward, has_values
from shardwise.errors import UsageError
from shardwise.parallel.masks import Pattern, WholeMask
from shardwise.parallel.sequence import Layout, SequenceGroup, active, group_of, needed, shares

_QUERIES = 512  # queries in a block of scores

_Range = tuple[int, int]  # positions [first, end) in the sequence


class _Block(NamedTuple):
    """Queries and keys, by their places on their ranks; `causal`: the same tokens, under a causal mask."""

    queries: slice
    keys: slice
    causal: bool


class RingOrder:
    """The tokens of each rank during ring attention, and the scores that a rank computes.

    Args:
        lengths: tokens of each rank outside, in order of the sequence.
        causal: under a causal mask.
        balanced: each rank has an early and a late chunk; otherwise its own tokens.
    """

    def __init__(self, lengths: Sequence[int], causal: bool, balanced: bool) -> None:
        ranks = len(lengths)
        self._causal, self.balanced = causal, balanced
        self._runs = _ranges(lengths)
        chunks = _ranges(shares(sum(lengths), 2 * ranks))
        self.ranges = [[chunks[n], chunks[-1 - n]] for n in range(ranks)] if balanced else [[run] for run in self._runs]
        self.tokens = [sum(end - first for first, end in ranges) for ranges in self.ranges]

    def blocks(self, rank: int, source: int) -> list[_Block]:
        """Return the blocks of scores of a rank's queries and the keys of `source`; empty ones are left out."""
        queries, keys = slice(0, self.tokens[rank]), slice(0, self.tokens[source])
        if self._causal and source < rank and self.balanced:  # its late chunk follows both chunks here
            keys = slice(0, _size(self.ranges[source][0]))
        elif self._causal and source > rank:  # both its chunks precede only the late chunk here
            queries = slice(_size(self.ranges[rank][0]), queries.stop)
        empty = queries.start == queries.stop or keys.start == keys.stop
        return [] if empty else [_Block(queries, keys, self._causal and source == rank)]

    def positions(self, rank: int, device: torch.device) -> torch.Tensor:
        """Return the positions of a rank's tokens, which increase."""
        return torch.cat([torch.arange(*found, device=device) for found in self.ranges[rank]])

    def shared(self, rank: int, other: int) -> list[_Range]:
        """Return the positions outside on `rank` that `other` has during ring attention."""
        first, end = self._runs[rank]
        return [(max(first, a), max(first, a, min(end, b))) for a, b in self.ranges[other]]

    def start(self, rank: int) -> int:
        """Return the position of a rank's first token outside."""
        return self._runs[rank][0]


def _ranges(sizes: Sequence[int]) -> list[_Range]:
    return [(end - size, end) for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]


def _size(of: _Range) -> int:
    return of[1] - of[0]


class _Hop:
    def __init__(self, group: SequenceGroup, sent: torch.Tensor, coming: int, label: str) -> None:
        self._sent = sent
        self._received = sent.new_empty(coming)
        self._handle: Handle | None = None
        if group.carries(sent):
            gives, takes = [0] * group.size, [0] * group.size
            gives[(group.rank + 1) % group.size] = sent.numel()
            takes[(group.rank - 1) % group.size] = coming
            self._handle = group.comm.all_to_all(self._received, sent, takes, gives, label)

    def wait(self) -> torch.Tensor:
        if self._handle is not None:
            self._handle.wait()
        return self._received


class _Ring:
    def __init__(self, group: SequenceGroup, lengths: Sequence[int], mask: WholeMask, scale: float) -> None:
        self.group, self.mask, self.scale = group, mask, scale
        causal = mask.pattern.causal
        # A window leaves all ranks about the same work in the order of the sequence.
        self.order = RingOrder(lengths, causal, causal and mask.window is None and group.size > 1)

    def source(self, step: int) -> int:
        """Return the rank of the keys present in a step."""
        return (self.group.rank - step) % self.group.size

    def blocks(self, step: int) -> list[_Block]:
        return self.order.blocks(self.group.rank, self.source(step))

    def core(self, query: torch.Tensor, key: torch.Tensor) -> _Flash | _Plain:
        """Return how a block is computed."""
        groups = query.shape[1] // key.shape[1]
        if self.mask.plain and flash_attention_applies(query):
            return _Flash(groups, self.scale)
        return _Plain(groups, self.scale)

    def seen(self, block: _Block, step: int, device: torch.device) -> Callable[[int, int], torch.Tensor] | None:
        """Return a function of a range of the block's queries, True where they see its keys; None: everywhere."""
        if self.mask.plain and not block.causal:
            return None
        queries = self.order.positions(self.group.rank, device)[block.queries]
        keys = self.order.positions(self.source(step), device)[block.keys]
        return lambda first, end: self.mask.dense(queries[first:end], keys)

    def deal(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Exchange (rows, heads, this rank's tokens, width) tensors for those of the rank's tokens in the ring."""
        if not self.order.balanced:
            return list(tensors)
        rows, sizes = _rows_of(tensors)
        rank, ranks = self.group.rank, range(self.group.size)
        first = self.order.start(rank)
        given = [self.order.shared(rank, other) for other in ranks]
        # Tokens arrive in order of their positions, because ranks have runs of the sequence outside.
        sent = torch.cat([rows[a - first : b - first] for ranges in given for a, b in ranges])
        takes = [sum(map(_size, self.order.shared(other, rank))) for other in ranks]
        got = self._exchange(sent, takes, [sum(map(_size, ranges)) for ranges in given])
        return _tensors_of(got, tensors, sizes)

    def collect(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Undo `deal`."""
        if not self.order.balanced:
            return list(tensors)
        rows, sizes = _rows_of(tensors)
        rank, ranks = self.group.rank, range(self.group.size)
        taken = [self.order.shared(rank, other) for other in ranks]
        gives = [sum(map(_size, self.order.shared(other, rank))) for other in ranks]
        got = self._exchange(rows, [sum(map(_size, ranges)) for ranges in taken], gives)
        ranges = [found for ranges in taken for found in ranges]
        pieces = zip(ranges, got.split([_size(found) for found in ranges]), strict=True)
        in_order = torch.cat([piece for _, piece in sorted(pieces, key=lambda pair: pair[0])])
        return _tensors_of(in_order, tensors, sizes)

    def _exchange(self, sent: torch.Tensor, takes: list[int], gives: list[int]) -> torch.Tensor:
        width = sent.shape[1]
        received = sent.new_empty(sum(takes), width)
        if self.group.carries(sent):
            sizes = [n * width for n in takes], [n * width for n in gives]
            self.group.comm.all_to_all(received.view(-1), sent.view(-1), *sizes, "sequence_ring_order").wait()
        return received


def _rows_of(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
    """Return (rows, heads, tokens, width) tensors of one dtype as (tokens, other numbers), and the numbers of each."""
    rows = [x.permute(2, 0, 1, 3).flatten(1) for x in tensors]
    return torch.cat(rows, dim=1), [x.shape[1] for x in rows]


def _tensors_of(rows: torch.Tensor, like: Sequence[torch.Tensor], sizes: list[int]) -> list[torch.Tensor]:
    parts = zip(rows.split(sizes, dim=1), like, strict=True)
    return [
        part.unflatten(1, (x.shape[0], x.shape[1], x.shape[3])).permute(1, 2, 0, 3).contiguous() for part, x in parts
    ]


class _Flash:
    """Blocks by torch's flash attention."""

    def __init__(self, groups: int, scale: float) -> None:
        self._groups, self._scale = groups, scale
        self._more: Any = ()

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, seen: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output, and the log-sum-exp of the scores (rows, heads, queries)."""
        out, sums, self._more = flash_attention(q, self._wide(k), self._wide(v), causal, self._scale)
        return out, sums

    def backward(
        self, grad: Any, out: Any, sums: Any, q: Any, k: Any, v: Any, causal: bool, seen: Any
    ) -> tuple[torch.Tensor, ...]:
        """Return the gradients of q, k and v, given output and log-sum-exp over all blocks."""
        given = tuple(x.contiguous() for x in (grad, q, self._wide(k), self._wide(v), out, sums))
        of_q, *others = flash_attention_backward(given, causal, self._scale, self._more)
        return of_q, *(x.unflatten(1, (-1, self._groups)).sum(2, dtype=sums.dtype) for x in others)

    def _wide(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(self._groups, dim=1) if self._groups > 1 else x


class _Plain:
    """Blocks by plain operators in fp32 or fp64, some queries at a time; queries that see no key have zeros."""

    def __init__(self, groups: int, scale: float) -> None:
        self._groups, self._scale = groups, scale

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, seen: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output, and the log-sum-exp of the scores (rows, heads, queries)."""
        wide = torch.promote_types(q.dtype, torch.float32)
        k, v = k.to(wide), v.to(wide)
        outs, all_sums = [], []
        for part, piece in self._pieces(q.to(wide)):
            scores = self._scores(piece, k, part, seen)
            most = scores.amax(-1, keepdim=True)
            weights = torch.exp(scores - most.masked_fill_(most.isinf(), 0.0))
            sums = weights.sum(-1, keepdim=True)
            outs.append(torch.einsum("bhgqk,bhkd->bhgqd", weights, v) / sums.masked_fill(sums == 0, 1.0))
            all_sums.append((most + sums.log()).squeeze(-1))
        return torch.cat(outs, 3).flatten(1, 2), torch.cat(all_sums, 3).flatten(1, 2)

    def backward(
        self, grad: Any, out: Any, sums: Any, q: Any, k: Any, v: Any, causal: bool, seen: Any
    ) -> tuple[torch.Tensor, ...]:
        """Return the gradients of q, k and v, given output and log-sum-exp over all blocks."""
        wide = sums.dtype
        q, k, v, grad, out, sums = (x.to(wide) for x in (q, k, v, grad, out, sums))
        dots = self._grouped((grad * out).sum(-1, keepdim=True))
        grad, sums = self._grouped(grad), self._grouped(sums.unsqueeze(-1))
        of_q, of_k, of_v = [], torch.zeros_like(k), torch.zeros_like(v)
        for part, piece in self._pieces(q):
            given = grad[..., part, :]
            weights = torch.exp(self._scores(piece, k, part, seen) - sums[..., part, :])
            of_v += torch.einsum("bhgqk,bhgqd->bhkd", weights, given)
            weights *= torch.einsum("bhgqd,bhkd->bhgqk", given, v) - dots[..., part, :]
            weights *= self._scale
            of_q.append(torch.einsum("bhgqk,bhkd->bhgqd", weights, k))
            of_k += torch.einsum("bhgqk,bhgqd->bhkd", weights, piece)
        return torch.cat(of_q, 3).flatten(1, 2), of_k, of_v

    def _grouped(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, (-1, self._groups))

    def _pieces(self, q: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        first = 0
        for piece in self._grouped(q).split(_QUERIES, dim=3):
            yield slice(first, first + piece.shape[3]), piece
            first += piece.shape[3]

    def _scores(self, q: torch.Tensor, k: torch.Tensor, part: slice, seen: Any) -> torch.Tensor:
        found = torch.einsum("bhgqd,bhkd->bhgqk", q, k) * self._scale
        return found if seen is None else found.masked_fill(~seen(part.start, part.stop).unsqueeze(1), float("-inf"))


class _RingAttention(torch.autograd.Function):
    """Queries: (rows, heads, tokens, width); keys and values may have fewer heads."""

    @staticmethod
    def forward(ctx: Any, ring: _Ring, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = ring.group
        wide = torch.promote_types(q.dtype, torch.float32)
        q, k, v = ring.deal([q, k, v])
        core = ring.core(q, k)
        out = torch.zeros(q.shape, dtype=wide, device=q.device)
        sums = torch.full(q.shape[:-1], float("-inf"), dtype=wide, device=q.device)
        here = torch.stack([k, v])
        for step in range(group.size):
            hop = None if step + 1 == group.size else _travel(ring, here, step)
            for block in ring.blocks(step):
                queries, keys = block.queries, block.keys
                seen = ring.seen(block, step, q.device)
                inputs = q[:, :, queries], here[0][:, :, keys], here[1][:, :, keys]
                _merge(out[:, :, queries], sums[:, :, queries], *core.forward(*inputs, block.causal, seen))
            if hop is not None:
                here = hop.wait().view(2, *k.shape[:2], ring.order.tokens[ring.source(step + 1)], k.shape[3])
        group.exchanges += 1
        sums.masked_fill_(sums.isinf(), 0.0)  # of padding without visible keys, whose output is zero
        out = out.to(q.dtype)
        ctx.ring, ctx.core = ring, core
        ctx.save_for_backward(q, k, v, out, sums)
        return ring.collect([out])[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ring: _Ring = ctx.ring
        group = ring.group
        q, k, v, out, sums = ctx.saved_tensors
        (grad,) = ring.deal([grad])
        wide = sums.dtype
        of_q = torch.zeros(q.shape, dtype=wide, device=q.device)
        here = torch.stack([k, v])
        summed: _Hop | None = None  # gradients of the last steps on their way, while this step computes its own
        for step in range(group.size):
            hop = None if step + 1 == group.size else _travel(ring, here, step)
            of_here = torch.zeros(here.shape, dtype=wide, device=q.device)
            for block in ring.blocks(step):
                queries, keys = block.queries, block.keys
                seen = ring.seen(block, step, q.device)
                given = (x[:, :, queries] for x in (grad, out, sums, q))
                found = ctx.core.backward(*given, *here[:, :, :, keys], block.causal, seen)
                of_q[:, :, queries] += found[0]
                of_here[0][:, :, keys] += found[1]
                of_here[1][:, :, keys] += found[2]
            if summed is not None:
                of_here += summed.wait().view(here.shape)
                summed = None  # frees its buffers before those of the next hop are allocated
            if group.size > 1:
                summed = _travel(ring, of_here, step)
            shape = (2, *k.shape[:2], ring.order.tokens[ring.source(step + 1)], k.shape[3])
            if hop is not None:
                here = hop.wait().view(shape)
        if summed is not None:
            of_here = summed.wait().view(shape)
        return None, *ring.collect([of_q.to(q.dtype), of_here[0].to(k.dtype), of_here[1].to(v.dtype)])


def _merge(out: torch.Tensor, sums: torch.Tensor, more: torch.Tensor, more_sums: torch.Tensor) -> None:
    """Add the attention to more keys to `out` and its log-sum-exp `sums`, in place."""
    total = torch.logaddexp(sums, more_sums)
    level = total.masked_fill(total.isinf(), 0.0)  # for queries without a visible key so far
    out.mul_(torch.exp(sums - level).unsqueeze(-1)).add_(more * torch.exp(more_sums - level).unsqueeze(-1))
    sums.copy_(total)


def _travel(ring: _Ring, here: torch.Tensor, step: int) -> _Hop:
    following = ring.order.tokens[ring.source(step + 1)]
    each = math.prod((*here.shape[:3], here.shape[4]))
    return _Hop(ring.group, here.reshape(-1), each * following, "sequence_ring")


def ring_attention(
    group: SequenceGroup,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Sequence[int],
    *,
    causal: bool = True,
    scale: float | None = None,
    mask: WholeMask | None = None,
) -> torch.Tensor:
    """Return the attention of this rank's tokens to the whole sequence (all ranks of the group call).

    Tensors are (rows, heads, this rank's tokens, width); key heads divide the query heads. The default `scale` of the
    scores is 1 / sqrt(width). `mask`, of the whole sequence, replaces `causal`.
    """
    rows, heads, tokens, width = query.shape
    if key.shape != value.shape or heads % key.shape[1] or key.shape[2] != tokens or key.shape[3] != width:
        raise UsageError(
            f"ring attention: query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} do not "
            "fit: expected (rows, heads, tokens, width) with the same tokens and width, and query heads that are a "
            "multiple of key heads"
        )
    mask = mask or WholeMask(Layout(list(lengths)), Pattern(causal), rows)
    ring = _Ring(group, lengths, mask, width**-0.5 if scale is None else scale)
    kind = query.device.type
    autocast = kind != "meta" and torch.is_autocast_enabled(kind)
    if autocast:  # as torch's attention does; the backward pass is without autocast
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = (x if x.dtype == torch.float64 else x.to(dtype) for x in (query, key, value))
    with torch.autocast(kind, enabled=False) if autocast else contextlib.nullcontext():
        found: torch.Tensor = _RingAttention.apply(ring, query, key, value)
    return found


class RingAttention(nn.Module):
    """Sequence-parallel attention without a limit of ranks by heads (`shardwise.parallel.ring`).

    Supports a causal mask or none; no dropout, no padding.

    Args:
        sequence_process_group: the ranks; None: the group of the engine, or of `shardwise.parallel.begin`.

    Example:
        >>> import torch
        >>> from shardwise.parallel import RingAttention, begin, end
        >>> group = begin(1)
        >>> q = torch.randn(2, 1, 8, 16)  # rows, heads, tokens, width
        >>> expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        >>> torch.testing.assert_close(RingAttention()(q, q, q), expected)
        >>> end()
    """

    def __init__(self, sequence_process_group: SequenceGroup | dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self._group = group_of(sequence_process_group)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        is_causal: bool = True,
        scale: float | None = None,
        lengths: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Return the attention output of this rank's tokens. Without `lengths` the ranks exchange them."""
        group = active(self._group or needed())
        own = query.shape[2]
        if lengths is None:
            lengths = group.lengths(own, query.shape[0]) if has_values(query) else [own] * group.size
        return ring_attention(group, query, key, value, lengths, causal=is_causal, scale=scale)
