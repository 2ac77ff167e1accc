"""Ulysses (Jacobs et al., "DeepSpeed Ulysses", 2309.14509): all-to-all between token and head sharding.

Outside of attention a rank has some tokens of a sequence with all heads. An all-to-all gives the rank all tokens with
some heads, and another one reverses this. With P ranks each moves 1 / P of a tensor, for any sequence length.

Heads need not divide evenly: each rank has a range of query heads, and their key and value heads. With fewer key heads
than ranks, a head is sent only to the ranks that need it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from shardwise.errors import UsageError
from shardwise.parallel.sequence import SequenceGroup, run_of

Run = tuple[int, int]  # range [first, end) of heads


def query_runs(heads: int, ranks: int) -> list[Run]:
    """Return the query heads of each rank; raises a UsageError with fewer heads than ranks."""
    if heads < ranks:
        raise UsageError(
            f"sequence parallelism over {ranks} ranks needs at least as many attention heads, the model has {heads}: "
            f"set sequence_parallel_size to {heads} or less, or use shardwise.parallel.RingAttention"
        )
    return [run_of(heads, ranks, rank) for rank in range(ranks)]


def key_runs(heads: int, keys: int, runs: Sequence[Run]) -> list[Run]:
    """Return the key (and value) heads for each rank's query heads.

    >>> key_runs(8, 2, [(0, 2), (2, 4), (4, 6), (6, 8)])
    [(0, 1), (0, 1), (1, 2), (1, 2)]
    """
    if keys < 1 or heads % keys:
        raise UsageError(f"attention has {heads} query heads and {keys} key heads; the first must be a multiple")
    group = heads // keys
    return [(first // group, (end - 1) // group + 1) for first, end in runs]


def repeats(heads: int, keys: int, run: Run) -> int | list[int]:
    """Return the number of query heads of each of a rank's key heads; the key head of each query head if irregular.

    >>> repeats(8, 4, (0, 4)), repeats(6, 2, (2, 4)), repeats(6, 2, (0, 4))
    (2, 1, [0, 0, 0, 1])
    """
    group = heads // keys
    wanted = [head // group - run[0] // group for head in range(*run)]
    each = len(wanted) // (wanted[-1] + 1)
    return each if wanted == [place // each for place in range(len(wanted))] else wanted


class _Swap:
    def __init__(self, group: SequenceGroup, given: torch.Tensor, sent: list[int], got: list[int], label: str) -> None:
        self.received = given.new_empty(sum(got))
        self.sizes = got
        self._sent = given
        self._handle = group.comm.all_to_all(self.received, given, got, sent, label) if group.carries(given) else None

    def wait(self) -> list[torch.Tensor]:
        if self._handle is not None:
            self._handle.wait()
        return list(self.received.split(self.sizes))


def _send_heads(group: SequenceGroup, x: torch.Tensor, lengths: Sequence[int], runs: Sequence[Run]) -> _Swap:
    rows, tokens = x.shape[:2]
    each = rows * x[0, 0, 0].numel()
    sent = [tokens * (end - first) * each for first, end in runs]
    given = x.new_empty(sum(sent))
    for part, (first, end) in zip(given.split(sent), runs, strict=True):
        piece = x[:, :, first:end]
        part.view(piece.shape).copy_(piece)
    own = runs[group.rank][1] - runs[group.rank][0]
    return _Swap(group, given, sent, [length * own * each for length in lengths], "sequence_to_heads")


def _take_tokens(swap: _Swap, like: torch.Tensor, lengths: Sequence[int], heads: int) -> torch.Tensor:
    rows, _, _, *rest = like.shape
    parts = swap.wait()
    if rows == 1:  # the parts are contiguous
        return swap.received.view(1, sum(lengths), heads, *rest)
    views = [part.view(rows, length, heads, *rest) for part, length in zip(parts, lengths, strict=True)]
    return torch.cat(views, dim=1)


def _send_tokens(group: SequenceGroup, x: torch.Tensor, lengths: Sequence[int], runs: Sequence[Run]) -> _Swap:
    rows, _, heads = x.shape[:3]
    each = rows * x[0, 0, 0].numel()
    sent = [length * heads * each for length in lengths]
    given = x.new_empty(sum(sent))
    for part, piece in zip(given.split(sent), x.split(list(lengths), dim=1), strict=True):
        part.view(piece.shape).copy_(piece)
    own = lengths[group.rank]
    return _Swap(group, given, sent, [own * (end - first) * each for first, end in runs], "sequence_to_tokens")


def _take_heads(swap: _Swap, like: torch.Tensor, tokens: int, heads: int, runs: Sequence[Run]) -> torch.Tensor:
    """Add up heads that several ranks have, in rank order."""
    rows, _, _, *rest = like.shape
    parts = [part.view(rows, tokens, end - first, *rest) for part, (first, end) in zip(swap.wait(), runs, strict=True)]
    if all(end == first for (_, end), (first, _) in itertools.pairwise(runs)):
        return torch.cat(parts, dim=2)
    wide = torch.promote_types(like.dtype, torch.float32)
    total = torch.zeros(rows, tokens, heads, *rest, dtype=wide, device=like.device)
    for part, (first, end) in zip(parts, runs, strict=True):
        total[:, :, first:end] += part
    return total.to(like.dtype)


class _ToHeads(torch.autograd.Function):
    """From (rows, own tokens, all heads) to (rows, all tokens, own heads), for several tensors."""

    @staticmethod
    def forward(ctx: Any, group: SequenceGroup, lengths: list[int], runs: list[list[Run]], *given: torch.Tensor) -> Any:
        ctx.group, ctx.lengths, ctx.runs = group, lengths, runs
        ctx.heads = [x.shape[2] for x in given]
        swaps = [_send_heads(group, x, lengths, run) for x, run in zip(given, runs, strict=True)]
        own = [run[group.rank][1] - run[group.rank][0] for run in runs]
        taken = [_take_tokens(s, x, lengths, n) for s, x, n in zip(swaps, given, own, strict=True)]
        group.exchanges += 1
        return tuple(taken)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        group, lengths = ctx.group, ctx.lengths
        swaps = [_send_tokens(group, g, lengths, run) for g, run in zip(grads, ctx.runs, strict=True)]
        own = lengths[group.rank]
        back = [
            _take_heads(swap, g, own, heads, run)
            for swap, g, heads, run in zip(swaps, grads, ctx.heads, ctx.runs, strict=True)
        ]
        return None, None, None, *back


class _ToTokens(torch.autograd.Function):
    """From (rows, all tokens, own heads) to (rows, own tokens, all heads)."""

    @staticmethod
    def forward(ctx: Any, group: SequenceGroup, lengths: list[int], run: list[Run], x: torch.Tensor) -> Any:
        ctx.group, ctx.lengths, ctx.run, ctx.own = group, lengths, run, x.shape[2]
        swap = _send_tokens(group, x, lengths, run)
        return _take_heads(swap, x, lengths[group.rank], run[-1][1], run)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        swap = _send_heads(ctx.group, grad, ctx.lengths, ctx.run)
        return None, None, None, _take_tokens(swap, grad, ctx.lengths, ctx.own)


def to_heads(
    group: SequenceGroup, tensors: Sequence[torch.Tensor], lengths: Sequence[int], runs: Sequence[Sequence[Run]]
) -> tuple[torch.Tensor, ...]:
    """All-to-all to all tokens of this rank's heads; `runs` has, for each tensor, the heads of each rank."""
    given = [list(run) for run in runs]
    found: tuple[torch.Tensor, ...] = _ToHeads.apply(group, list(lengths), given, *tensors)
    return found


def to_tokens(group: SequenceGroup, tensor: torch.Tensor, lengths: Sequence[int], run: Sequence[Run]) -> torch.Tensor:
    """All-to-all to all heads of this rank's tokens: inverse of `to_heads`; ranges share no head."""
    found: torch.Tensor = _ToTokens.apply(group, list(lengths), list(run), tensor)
    return found
