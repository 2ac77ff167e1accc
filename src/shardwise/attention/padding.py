"""Longer sequences for models with learned positions, and lengths that are a multiple of a block."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
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
        for name, start in (("position_ids", torch.arange(len(more))), ("token_type_ids", torch.zeros(len(more)))):
            buffer = getattr(part, name, None)
            if isinstance(buffer, torch.Tensor):
                setattr(part, name, start.to(buffer)[None])
        for config in {id(c): c for c in (getattr(part, "config", None), getattr(model, "config", None)) if c}.values():
            config.max_position_embeddings = len(more)
    return model


def pad_to_block_size(
    block_size: int,
    input_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None = None,
    token_type_ids: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    inputs_embeds: torch.Tensor | None = None,
    pad_token_id: int = 0,
    model_embeddings: Any = None,
) -> tuple[int, Any, Any, Any, Any, Any]:
    """Pad a model's inputs at their ends to a multiple of `block_size` tokens.

    Args:
        block_size: tokens of a block.
        input_ids: (samples, tokens), or None with `inputs_embeds`.
        attention_mask: (samples, tokens), 0 for padding; None: all tokens count, and a mask is made if tokens are
            added.
        token_type_ids: (samples, tokens), or None.
        position_ids: (samples, tokens), or None.
        inputs_embeds: (samples, tokens, width), or None.
        pad_token_id: the added tokens and their positions.
        model_embeddings: module that embeds the added tokens for `inputs_embeds`.

    Returns:
        Number of added tokens; then the first five tensors, padded.

    Raises:
        UsageError: there are no inputs, or `inputs_embeds` are to be padded without `model_embeddings`.
    """
    given = input_ids if input_ids is not None else inputs_embeds
    if given is None:
        raise UsageError("pad_to_block_size(): pass input_ids or inputs_embeds")
    samples, tokens = given.shape[:2]
    more = -tokens % block_size
    if more == 0:
        return 0, input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds
    if attention_mask is None:
        attention_mask = torch.ones(samples, tokens, dtype=torch.int64, device=given.device)
    if inputs_embeds is not None:
        if model_embeddings is None:
            raise UsageError("pad_to_block_size(inputs_embeds=...): pass model_embeddings, which embeds added tokens")
        added = torch.full((samples, more), pad_token_id, dtype=torch.int64, device=given.device)
        inputs_embeds = torch.cat([inputs_embeds, model_embeddings(added)], dim=1)

    def padded(tensor: torch.Tensor | None, value: int) -> torch.Tensor | None:
        return None if tensor is None else F.pad(tensor, (0, more), value=value)

    return (
        more,
        padded(input_ids, pad_token_id),
        padded(attention_mask, 0),
        padded(token_type_ids, 0),
        padded(position_ids, pad_token_id),
        inputs_embeds,
    )


def unpad_sequence_output(pad_len: int, sequence_output: torch.Tensor) -> torch.Tensor:
    """Return a model's output, (samples, tokens, ...), without the last `pad_len` tokens."""
    return sequence_output[:, : sequence_output.shape[1] - pad_len]
