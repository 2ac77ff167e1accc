"""Losses under sequence parallelism.

A rank's loss is the mean over its own tokens. `engine.backward(loss, weight=tokens)` gives the exact gradient of the
mean over all tokens of all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from shardwise.parallel.data import IGNORED
from shardwise.parallel.sequence import SequenceGroup, needed
from shardwise.precision.weights import ignore_nonfinite


def token_loss(
    logits: torch.Tensor, labels: torch.Tensor, ignore_index: int = IGNORED
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean cross entropy over this rank's labelled tokens, and their number.

    Without labelled tokens the loss and its gradients are 0.

    Args:
        logits: (rows, tokens, vocabulary).
        labels: (rows, tokens), at the same positions: `shift_labels` of `split`.
        ignore_index: label of unlabelled tokens.

    >>> loss, tokens = token_loss(torch.zeros(1, 3, 4), torch.tensor([[1, 2, -100]]))
    >>> round(float(loss), 3), int(tokens)
    (1.386, 2)
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    total = F.cross_entropy(
        logits.flatten(0, -2).to(wide), labels.flatten(), ignore_index=ignore_index, reduction="sum"
    )
    tokens = (labels != ignore_index).sum()
    return total / tokens.clamp(min=1), tokens


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, tokens: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
        own = torch.where(tokens > 0, loss.detach().double() * tokens, 0.0)
        sums = torch.stack([own, tokens.double()])
        group.comm.all_reduce(sums, "sequence_loss").wait()
        total = sums[1].clamp(min=1)
        ctx.save_for_backward(tokens * group.size / total)
        return (sums[0] / total).to(loss.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (share,) = ctx.saved_tensors
        return (grad * share).to(grad.dtype), None, None


def mean_loss(loss: torch.Tensor, tokens: torch.Tensor | int, group: SequenceGroup | None = None) -> torch.Tensor:
    """Return the mean loss over the tokens of a whole sequence, the same on all its ranks (they call together).

    Each rank calls `engine.backward` on it without a weight. The engine's mean over ranks is then the mean over
    sequences of each one's token mean. DeepSpeed's scripts use a differentiable all-gather for this.

    Args:
        loss: mean over this rank's tokens; ignored if it has none.
        tokens: their number.
        group: the ranks; None: the process's group.
    """
    if isinstance(tokens, torch.Tensor):
        count = tokens.to(loss.device)
    else:
        count = torch.full((), tokens, dtype=torch.int64, device=loss.device)
    if loss.requires_grad:
        ignore_nonfinite(loss, count == 0)
    found: torch.Tensor = _Mean.apply(loss, count, group or needed())
    return found
