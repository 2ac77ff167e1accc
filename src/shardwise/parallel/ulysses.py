"""Ulysses (Jacobs et al., "DeepSpeed Ulysses", 2309.14509): all-to-all between token and head sharding.

Outside of attention a rank has some tokens of a sequence with all heads. An all-to-all gives the rank all tokens with
some heads, and another one reverses this. With P ranks each moves 1 / P of a tensor, for any sequence length. Queries,
keys and values travel in one collective.

Heads need not divide evenly: each rank has a range of query heads, and their key and value heads. With fewer key heads
than ranks, a head is sent only to the ranks that need it.
"""

from __future__ import annotations

import itertools
import math
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


def _holders(runs: Sequence[Run], heads: int) -> int:
    """Return the number of ranks that have each head; 0 if ranks have different numbers of heads or parts of groups.

    >>> _holders([(0, 2), (2, 4)], 4), _holders([(0, 1), (0, 1), (1, 2), (1, 2)], 2), _holders([(0, 2), (2, 3)], 3)
    (1, 2, 0)
    """
    size = runs[0][1]
    times = max(1, len(runs) * size // heads)
    firsts = [rank // times * size for rank in range(len(runs))]
    return times if list(runs) == [(first, first + size) for first in firsts] else 0


def _joined(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    message = pieces[0].new_empty(sum(map(torch.numel, pieces)))
    for part, piece in zip(message.split([piece.numel() for piece in pieces]), pieces, strict=True):
        part.view(piece.shape).copy_(piece)
    return message


def _swapped(
    group: SequenceGroup,
    given: Sequence[torch.Tensor],
    sent: Sequence[list[int]],
    got: Sequence[list[int]],
    label: str,
) -> list[torch.Tensor]:
    """Run all-to-alls of several messages as one collective."""
    given = [x.contiguous() for x in given]  # an expanded number, as the gradient of a sum is, stays one when flattened
    received = [x.new_empty(sum(sizes)) for x, sizes in zip(given, got, strict=True)]
    if group.carries(given[0]):
        group.comm.all_to_alls(list(zip(received, given, got, sent, strict=True)), label).wait()
    return received


def _width(x: torch.Tensor) -> int:
    return math.prod(x.shape[3:])


def _send_heads(
    group: SequenceGroup, given: Sequence[torch.Tensor], lengths: Sequence[int], runs: Sequence[Sequence[Run]]
) -> list[torch.Tensor]:
    """Send each rank its heads of this rank's tokens; return all tokens of this rank's heads."""
    messages, sent, got = [], [], []
    for x, run in zip(given, runs, strict=True):
        rows, tokens, heads = x.shape[:3]
        each = rows * _width(x)
        sent.append([tokens * (end - first) * each for first, end in run])
        own = run[group.rank][1] - run[group.rank][0]
        if times := _holders(run, heads):  # one copy for any number of ranks
            parts = x.unflatten(2, (group.size // times, own)).movedim(2, 0).unsqueeze(1)
            messages.append(parts.expand(-1, times, *parts.shape[2:]).reshape(-1))
        else:
            messages.append(_joined([x[:, :, first:end] for first, end in run]))
        got.append([length * own * each for length in lengths])
    found = []
    arrived = _swapped(group, messages, sent, got, "sequence_to_heads")
    for received, x, run, sizes in zip(arrived, given, runs, got, strict=True):
        rows, _, _, *rest = x.shape
        own = run[group.rank][1] - run[group.rank][0]
        if rows == 1:
            found.append(received.view(1, sum(lengths), own, *rest))
        elif len(set(lengths)) == 1:
            parts = received.view(group.size, rows, lengths[0], own, *rest)
            found.append(parts.transpose(0, 1).reshape(rows, sum(lengths), own, *rest))
        else:
            pairs = zip(received.split(sizes), lengths, strict=True)
            found.append(torch.cat([part.view(rows, length, own, *rest) for part, length in pairs], dim=1))
    return found


def _send_tokens(
    group: SequenceGroup,
    given: Sequence[torch.Tensor],
    lengths: Sequence[int],
    runs: Sequence[Sequence[Run]],
    heads: Sequence[int],
) -> list[torch.Tensor]:
    """Send each rank its tokens of this rank's heads; return all heads of this rank's tokens."""
    messages, sent, got = [], [], []
    for x, run in zip(given, runs, strict=True):
        rows, _, own = x.shape[:3]
        each = rows * _width(x)
        sent.append([length * own * each for length in lengths])
        if rows == 1:
            messages.append(x.reshape(-1))
        elif len(set(lengths)) == 1:
            messages.append(x.unflatten(1, (group.size, lengths[0])).transpose(0, 1).reshape(-1))
        else:
            messages.append(_joined(x.split(list(lengths), dim=1)))
        got.append([lengths[group.rank] * (end - first) * each for first, end in run])
    arrived = _swapped(group, messages, sent, got, "sequence_to_tokens")
    return [
        _take_heads(received, x, lengths[group.rank], number, run)
        for received, x, number, run in zip(arrived, given, heads, runs, strict=True)
    ]


def _take_heads(
    received: torch.Tensor, like: torch.Tensor, tokens: int, heads: int, runs: Sequence[Run]
) -> torch.Tensor:
    """Add up heads that several ranks have, in rank order."""
    rows, _, _, *rest = like.shape
    wide = torch.promote_types(like.dtype, torch.float32)
    if times := _holders(runs, heads):
        groups = len(runs) // times
        total, *others = received.view(groups, times, rows, tokens, heads // groups, *rest).unbind(1)
        for part in others:
            total = total.to(wide) + part
        return total.movedim(0, 2).reshape(rows, tokens, heads, *rest).to(like.dtype)
    sizes = [rows * tokens * (end - first) * math.prod(rest) for first, end in runs]
    parts = [
        part.view(rows, tokens, end - first, *rest)
        for part, (first, end) in zip(received.split(sizes), runs, strict=True)
    ]
    if all(end == first for (_, end), (first, _) in itertools.pairwise(runs)):
        return torch.cat(parts, dim=2)
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
        group.exchanges += 1
        return tuple(_send_heads(group, given, lengths, runs))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, None, *_send_tokens(ctx.group, grads, ctx.lengths, ctx.runs, ctx.heads)


class _ToTokens(torch.autograd.Function):
    """From (rows, all tokens, own heads) to (rows, own tokens, all heads)."""

    @staticmethod
    def forward(ctx: Any, group: SequenceGroup, lengths: list[int], run: list[Run], x: torch.Tensor) -> Any:
        ctx.group, ctx.lengths, ctx.run = group, lengths, run
        return _send_tokens(group, [x], lengths, [run], [run[-1][1]])[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, None, None, *_send_heads(ctx.group, [grad], ctx.lengths, [ctx.run])


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
