"""Sparse attention under DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardwise.attention import SparseSelfAttention, SparsityConfig, extend_positions, sparsify
from shardwise.attention.huggingface import NAME, register, set_layout
from shardwise.config.schema.attention import SparseAttention
from shardwise.errors import UsageError
from shardwise_deepspeed.configuration import section_of


class BertSparseSelfAttention(nn.Module):
    """Self-attention of BERT with a layout: projections `query`, `key` and `value`, and `SparseSelfAttention`.

    Args:
        config: has `hidden_size` and `num_attention_heads`; `max_position_embeddings`, if present, is the longest
            sequence.
        sparsity_config: the layout.
    """

    def __init__(self, config: Any, sparsity_config: SparsityConfig) -> None:
        super().__init__()
        width, self.num_attention_heads = config.hidden_size, config.num_attention_heads
        if width % self.num_attention_heads:
            raise UsageError(
                f"BertSparseSelfAttention: hidden_size={width} is no multiple of "
                f"num_attention_heads={self.num_attention_heads}"
            )
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        longest = max(2048, getattr(config, "max_position_embeddings", 0))
        self.sparse_self_attention = SparseSelfAttention(sparsity_config, max_seq_length=longest)

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return (samples, tokens, width); the mask is added to scores of keys, (samples, 1, 1, tokens)."""
        shape = (*hidden_states.shape[:2], self.num_attention_heads, -1)
        q, k, v = (layer(hidden_states).view(shape).transpose(1, 2) for layer in (self.query, self.key, self.value))
        found: torch.Tensor = self.sparse_self_attention(q, k, v, key_padding_mask=attention_mask)
        return found.transpose(1, 2).flatten(2)


class SparseAttentionUtils:
    """Adapts pretrained models of transformers to sparse attention and longer sequences."""

    extend_position_embedding = staticmethod(extend_positions)

    @staticmethod
    def update_tokenizer_model_max_length(tokenizer: Any, max_position: int) -> Any:
        """Set a tokenizer's longest sequence, and return the tokenizer."""
        tokenizer.model_max_length = max_position
        tokenizer.init_kwargs["model_max_length"] = max_position
        return tokenizer

    @staticmethod
    def replace_model_self_attention_with_sparse_self_attention(
        model: nn.Module, max_position: int, sparsity_config: SparsityConfig
    ) -> nn.Module:
        """Give all attention a layout (`shardwise.attention.sparsify`); return the model. Parameters keep their names.

        Raises a UsageError if the model has fewer positions than `max_position`.
        """
        limit = getattr(getattr(model, "config", None), "max_position_embeddings", max_position)
        if max_position > limit:
            raise UsageError(
                f"replace_model_self_attention_with_sparse_self_attention(max_position={max_position}): the model has "
                f"{limit} positions; call extend_position_embedding first"
            )
        return sparsify(model, sparsity_config)

    @staticmethod
    def replace_self_attention_layer_with_sparse_self_attention_layer(
        config: Any, layers: Iterable[nn.Module], sparsity_config: SparsityConfig
    ) -> Iterable[nn.Module]:
        """Give the attention of some layers a layout; other layers of the model attend to all blocks.

        `config` is the model's, and chooses the attention of all its layers.
        """
        register()
        for layer in layers:
            set_layout(layer.modules(), sparsity_config)
        config._attn_implementation = NAME
        return layers

    @staticmethod
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
                raise UsageError(
                    "pad_to_block_size(inputs_embeds=...): pass model_embeddings, which embeds added tokens"
                )
            added = torch.full((samples, more), pad_token_id, dtype=torch.int64, device=given.device)
            inputs_embeds = torch.cat([inputs_embeds, model_embeddings(added)], dim=1)

        def padded(tensor: torch.Tensor | None, value: int) -> torch.Tensor | None:
            return None if tensor is None else F.pad(tensor, (0, more), value=value)

        ids, positions = padded(input_ids, pad_token_id), padded(position_ids, pad_token_id)
        return more, ids, padded(attention_mask, 0), padded(token_type_ids, 0), positions, inputs_embeds

    @staticmethod
    def unpad_sequence_output(pad_len: int, sequence_output: torch.Tensor) -> torch.Tensor:
        """Return a model's output, (samples, tokens, ...), without the last `pad_len` tokens."""
        return sequence_output[:, : sequence_output.shape[1] - pad_len]


def get_sparse_attention(param_dict: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return mode and arguments of the section `sparse_attention`; None without one.

    >>> get_sparse_attention({"sparse_attention": {"mode": "bigbird"}})["num_sliding_window_blocks"]
    3
    """
    given = param_dict.get("sparse_attention")
    section: SparseAttention | None = None if given is None else section_of("sparse_attention", given)
    return None if section is None else {"mode": section.mode, **section.arguments()}


def get_sparse_attention_mode(param_dict: Mapping[str, Any]) -> str:
    """Return `mode` of a section `sparse_attention`."""
    return str(param_dict.get("mode", "fixed"))


def get_sparse_attention_type(param_dict: Mapping[str, Any]) -> str:
    """Return `attention` of a section `sparse_attention`."""
    return str(param_dict.get("attention", "bidirectional"))
