"""Vocabulary-parallel cross entropy: logits are never gathered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from shardwise.errors import UsageError
from shardwise.parallel.tensor.group import TensorGroup

_ROWS = 1024  # tokens whose logits are converted to fp32 at a time


def words_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    group: TensorGroup,
    sizes: Sequence[int],
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> torch.Tensor:
    """Return the fp32 cross entropy of vocabulary-parallel logits, the same on every rank.

    Each rank sends three numbers for each token: its largest logit, the sum of exponentials relative to it, and the
    label's logit if local. Gradients stay sharded. Sums are in fp32.

    Args:
        logits: of this rank's words; [..., own words].
        labels: of all words, the same on every rank; [...].
        sizes: number of words of each rank, in order.
        ignore_index: label of ignored tokens.

    Raises:
        UsageError: shapes do not fit.
        RuntimeError: a label is no word (on a GPU the device stops, as in `torch.nn.functional.cross_entropy`).
    """
    if logits.shape[:-1] != labels.shape or logits.shape[-1] != sizes[group.place]:
        raise UsageError(
            f"words_cross_entropy: expected logits of [*labels, {sizes[group.place]}], found {list(logits.shape)} with "
            f"labels of {list(labels.shape)}"
        )
    flat, wanted = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    losses = _CrossEntropy.apply(flat, wanted, group, sum(sizes[: group.place]), sum(sizes), ignore_index)
    if reduction == "none":
        return losses.view(labels.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / (wanted != ignore_index).sum()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, group: TensorGroup, first: int, total: int, ignore: int
    ) -> torch.Tensor:
        tokens, words = logits.shape
        told = torch.empty(3, tokens, dtype=torch.float32, device=logits.device)
        counted = labels != ignore
        here = counted & (labels >= first) & (labels < first + words)
        # A label that no rank has stays out of range: `gather` raises on every rank, as in one process.
        nowhere = counted & ((labels < 0) | (labels >= total))
        places = (labels - first).masked_fill(~(here | nowhere), 0).unsqueeze(-1)
        for begin in range(0, tokens, _ROWS):
            rows = slice(begin, begin + _ROWS)
            wide = logits[rows].to(torch.float32, copy=True)  # a copy, because the logits are shared
            told[0, rows] = most = wide.amax(-1)
            told[2, rows] = wide.gather(-1, places[rows]).squeeze(-1)
            finite = most.masked_fill(most == -torch.inf, 0)  # all words of this rank may be masked
            told[1, rows] = wide.sub_(finite.unsqueeze(-1)).exp_().sum(-1)
        told[2].masked_fill_(~here, 0)
        everybody = told.new_zeros(group.size, 3, tokens)
        if group.size == 1:
            everybody[0] = told
        elif group.carries(told):
            group.comm.all_gather([(everybody.view(-1), told.view(-1))], "words_cross_entropy", kind="explicit").wait()
        most = everybody[:, 0].amax(0)
        normaliser = most + (everybody[:, 1] * (everybody[:, 0] - most).exp()).sum(0).log()
        ctx.save_for_backward(logits, places, here, normaliser)
        ctx.counted = counted
        return (normaliser - everybody[:, 2].sum(0)).masked_fill(~counted, 0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, places, here, normaliser = ctx.saved_tensors
        factor = gradient.float().masked_fill(~ctx.counted, 0).unsqueeze(-1)
        found = torch.empty_like(logits)
        for begin in range(0, len(logits), _ROWS):
            rows = slice(begin, begin + _ROWS)
            wide = logits[rows].to(torch.float32, copy=True).sub_(normaliser[rows].unsqueeze(-1)).exp_()
            wide.scatter_add_(-1, places[rows], -here[rows].unsqueeze(-1).float())
            found[rows] = wide.mul_(factor[rows])
        return found, None, None, None, None, None
