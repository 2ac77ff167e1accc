"""Ring attention (Liu et al., 2310.01889): keys and values travel from rank to rank, queries stay.

In each of P steps a rank attends to the keys of one rank while sending them to the next rank. Softmax sums combine
partial results, as in flash attention. The backward pass sends keys and values around again with their gradients,
which return to their rank in one further step. A rank sends its keys and values P - 1 times; Ulysses sends each tensor
once. So ring attention is for models with fewer heads than ranks. With a causal mask later ranks attend to more tokens
than earlier ones, which wait for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.comm.communicator import Handle
from shardwise.compat import has_values
from shardwise.errors import UsageError
from shardwise.parallel.masks import Pattern, WholeMask
from shardwise.parallel.sequence import Layout, SequenceGroup, active, group_of, needed

_QUERIES = 512  # queries in a block of scores


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
        self.group, self.lengths, self.mask, self.scale = group, list(lengths), mask, scale
        self.causal = mask.pattern.causal
        self.starts = [sum(lengths[:rank]) for rank in range(len(lengths))]

    def source(self, step: int) -> int:
        """Return the rank of the keys present in a step."""
        return (self.group.rank - step) % self.group.size

    def seen(self, source: int) -> bool:
        return not self.causal or source <= self.group.rank

    def scores(self, q: torch.Tensor, k: torch.Tensor, first: int, source: int) -> torch.Tensor:
        """Return (rows, key heads, queries of each, q, k) for queries from local position `first` on."""
        found = torch.einsum("bhgqd,bhkd->bhgqk", q, k) * self.scale
        if not self.mask.plain or (self.causal and source == self.group.rank):
            first += self.starts[self.group.rank]
            start = self.starts[source]
            seen = self.mask.dense(slice(first, first + q.shape[3]), slice(start, start + k.shape[2]), q.device)
            found = found.masked_fill(~seen.unsqueeze(1), float("-inf"))
        return found


def _pieces(tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    first = 0
    for piece in tensor.split(_QUERIES, dim=3):
        yield first, piece
        first += piece.shape[3]


class _RingAttention(torch.autograd.Function):
    """Queries: (rows, key heads, queries of each, tokens, width); keys and values: (rows, heads, tokens, width)."""

    @staticmethod
    def forward(ctx: Any, ring: _Ring, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = ring.group
        wide = torch.promote_types(q.dtype, torch.float32)
        total = torch.zeros(q.shape, dtype=wide, device=q.device)
        sums = torch.zeros(q.shape[:-1], dtype=wide, device=q.device)
        most = torch.full_like(sums, float("-inf"))
        here = torch.stack([k, v])
        for step in range(group.size):
            source, last = ring.source(step), step + 1 == group.size
            hop = None if last else _travel(ring, here, step)
            if ring.seen(source):
                keys, values = here.to(wide)
                for first, piece in _pieces(q.to(wide)):
                    part = slice(first, first + piece.shape[3])
                    scores = ring.scores(piece, keys, first, source)
                    higher = torch.maximum(most[..., part], scores.amax(-1))
                    level = higher.masked_fill(higher.isinf(), 0.0)  # for queries without a visible key so far
                    shrunk = torch.exp(most[..., part] - level)
                    weights = torch.exp(scores - level.unsqueeze(-1))
                    sums[..., part] = sums[..., part] * shrunk + weights.sum(-1)
                    total[..., part, :] *= shrunk.unsqueeze(-1)
                    total[..., part, :] += torch.einsum("bhgqk,bhkd->bhgqd", weights, values)
                    most[..., part] = higher
            if hop is not None:
                here = hop.wait().view(2, *k.shape[:2], ring.lengths[ring.source(step + 1)], k.shape[3])
        group.exchanges += 1
        blind = sums == 0  # padding without visible keys: the output is zero
        sums.masked_fill_(blind, 1.0)
        out = (total / sums.unsqueeze(-1)).to(q.dtype)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, most.masked_fill(blind, 0.0) + sums.log())
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ring: _Ring = ctx.ring
        group = ring.group
        q, k, v, out, norms = ctx.saved_tensors
        wide = norms.dtype
        dots = (grad.to(wide) * out.to(wide)).sum(-1)
        of_q = torch.zeros(q.shape, dtype=wide, device=q.device)
        here = torch.stack([k, v])
        of_here = torch.zeros(here.shape, dtype=wide, device=q.device)
        for step in range(group.size):
            source, last = ring.source(step), step + 1 == group.size
            hop = None if last else _travel(ring, here, step)
            if ring.seen(source):
                keys, values = here.to(wide)
                for first, piece in _pieces(q.to(wide)):
                    part = slice(first, first + piece.shape[3])
                    given = grad[..., part, :].to(wide)
                    weights = torch.exp(ring.scores(piece, keys, first, source) - norms[..., part].unsqueeze(-1))
                    of_here[1] += torch.einsum("bhgqk,bhgqd->bhkd", weights, given)
                    weights *= torch.einsum("bhgqd,bhkd->bhgqk", given, values) - dots[..., part].unsqueeze(-1)
                    weights *= ring.scale
                    of_q[..., part, :] += torch.einsum("bhgqk,bhkd->bhgqd", weights, keys)
                    of_here[0] += torch.einsum("bhgqk,bhgqd->bhkd", weights, piece)
            shape = (2, *k.shape[:2], ring.lengths[ring.source(step + 1)], k.shape[3])
            if hop is not None:
                here = hop.wait().view(shape)
            if group.size > 1:
                of_here = _travel(ring, of_here, step).wait().view(shape)
        return None, of_q.to(q.dtype), of_here[0].to(k.dtype), of_here[1].to(v.dtype)


def _travel(ring: _Ring, here: torch.Tensor, step: int) -> _Hop:
    each = here.numel() // ring.lengths[ring.source(step)]
    coming = each * ring.lengths[ring.source(step + 1)]
    return _Hop(ring.group, here.reshape(-1), coming, "sequence_ring")


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
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], tokens, width)
    found: torch.Tensor = _RingAttention.apply(ring, grouped, key, value)
    return found.reshape(query.shape)


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
            lengths = group.lengths(own) if has_values(query) else [own] * group.size
        return ring_attention(group, query, key, value, lengths, causal=is_causal, scale=scale)
