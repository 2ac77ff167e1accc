"""Longer sequences for models with learned positions."""

from __future__ import annotations

import torch
from torch import nn

from shardwise.errors import UsageError


def extend_positions(model: nn.Module, max_position: int) -> nn.Module:
    """Repeat the learned positions of a BERT or RoBERTa model up to `max_position` tokens, in place; return the model.

    Call before `initialize`. As in Longformer (2004.05150) the new positions are copies of the old ones.

    Raises:
        UsageError: no part of the model has `position_embeddings`, or the model has as many positions already.
    """
    found = [part for part in model.modules() if isinstance(getattr(part, "position_embeddings", None), nn.Embedding)]
    if not found:
        raise UsageError(
            f"extend_positions(model): {type(model).__name__} has no nn.Embedding named position_embeddings, as BERT "
            "and RoBERTa have"
        )
    for part in found:
        table: nn.Embedding = part.position_embeddings  # type: ignore[assignment]
        first = 0 if table.padding_idx is None else table.padding_idx + 1  # RoBERTa counts from there
        old = table.num_embeddings - first
        if max_position <= old:
            raise UsageError(f"extend_positions(max_position={max_position}): the model has {old} positions already")
        weight = table.weight.detach()
        places = torch.arange(max_position, device=weight.device) % old + first
        more = torch.cat([weight[:first], weight[places]])
        table.weight = nn.Parameter(more, requires_grad=table.weight.requires_grad)
        table.num_embeddings = len(more)
        for name, made in (("position_ids", torch.arange), ("token_type_ids", torch.zeros)):
            buffer = getattr(part, name, None)
            if isinstance(buffer, torch.Tensor):
                start = made(len(more), device=buffer.device, dtype=buffer.dtype)
                setattr(part, name, start[None])
        for config in {id(c): c for c in (getattr(part, "config", None), getattr(model, "config", None)) if c}.values():
            config.max_position_embeddings = len(more)
    return model
