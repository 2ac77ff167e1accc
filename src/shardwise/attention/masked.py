"""Sparse attention by other means: flex attention of torch, and plain attention with a mask of all pairs of tokens."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from shardwise.attention.blocks import BlockPlan, keep
from shardwise.errors import UsageError

_FLEX = 128  # block masks of flex attention have blocks of a multiple of this


def dense_mask(plan: BlockPlan, tokens: int, causal: bool, device: torch.device) -> torch.Tensor:
    """Return True where a query sees a key, (heads, tokens, tokens)."""
    mask = torch.from_numpy(plan.layout).to(device)
    for dim in (1, 2):
        mask = mask.repeat_interleave(plan.block, dim)
    mask = mask[:, :tokens, :tokens]
    return mask.tril() if causal else mask


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: BlockPlan,
    *,
    causal: bool = False,
    scale: float | None = None,
    bias: torch.Tensor | None = None,
    padding: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Return what `block_attention` returns, by a mask of all pairs of tokens; time and memory are of dense attention.

    Dropout draws other random numbers.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.matmul(query * scale, key.mT).to(torch.promote_types(query.dtype, torch.float32))
    for added in (bias, None if padding is None else padding[:, None, None, :]):
        scores = scores if added is None else scores + added
    scores = scores.masked_fill(~dense_mask(plan, query.shape[2], causal, query.device), -math.inf)
    blind = (scores == -math.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)
    return torch.matmul(F.dropout(weights, dropout).to(value.dtype), value)


def block_mask(plan: BlockPlan, tokens: int, causal: bool, device: torch.device) -> Any:
    """Return the layout as a `torch.nn.attention.flex_attention.BlockMask`; its blocks cover several of the layout."""
    from torch.nn.attention.flex_attention import BlockMask

    size = math.lcm(plan.block, _FLEX)
    each = size // plan.block
    more = -plan.blocks % each
    coarse = -(-plan.blocks // each)
    tiles = np.pad(plan.layout, ((0, 0), (0, more), (0, more))).reshape(plan.heads, coarse, each, coarse, each)
    used, full = tiles.any((2, 4)), tiles.all((2, 4))
    if causal:
        used, full = np.tril(used), np.tril(full, -1)
    parts: list[torch.Tensor] = []
    for blocks in (used & ~full, full):
        order = np.argsort(~blocks, axis=-1, kind="stable")
        for values in (blocks.sum(-1), order):
            parts.append(torch.from_numpy(values.astype(np.int32))[None].to(device))
    layout, block = torch.from_numpy(plan.layout).to(device), plan.block

    def sees(sample: Any, head: Any, query: Any, key: Any) -> Any:
        found = layout[head, query // block, key // block]
        return found & (query >= key) if causal else found

    counts, numbers, full_counts, full_numbers = parts
    return BlockMask.from_kv_blocks(
        counts, numbers, full_counts, full_numbers, BLOCK_SIZE=size, mask_mod=sees, seq_lengths=(tokens, tokens)
    )


@cache
def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def flex(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: BlockPlan,
    *,
    causal: bool = False,
    scale: float | None = None,
    bias: torch.Tensor | None = None,
    padding: torch.Tensor | None = None,
    dropout: float = 0.0,
    compiled: bool = True,
) -> torch.Tensor:
    """Return what `block_attention` returns, by flex attention of torch (Dong et al., 2412.05496).

    `compiled`: by torch.compile, which needs Triton on CUDA and a C++ compiler on a CPU. Raises a UsageError for
    dropout, and for gradients on a CPU, which flex attention lacks.
    """
    from torch.nn.attention.flex_attention import flex_attention

    training = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if dropout or (training and query.device.type == "cpu"):
        lacks = "dropout" if dropout else "gradients on a CPU"
        raise UsageError(f'implementation="flex": flex attention of torch has no {lacks}; choose "blocks"')

    def score(scores: Any, sample: Any, head: Any, q: Any, k: Any) -> Any:
        if bias is not None:
            scores = scores + bias[sample if len(bias) > 1 else 0, head if bias.shape[1] > 1 else 0, q, k]
        return scores if padding is None else scores + padding[sample, k]

    if not training:  # a CPU refuses tensors that could have a gradient
        query, key, value = query.detach(), key.detach(), value.detach()
    run = _compiled() if compiled else flex_attention
    tokens, device = query.shape[2], query.device
    mask = keep(plan.masks, (tokens, causal, device), query, lambda: block_mask(plan, tokens, causal, device))
    found: torch.Tensor = run(
        query,
        key,
        value,
        score_mod=None if bias is None and padding is None else score,
        block_mask=mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return found
