"""Sparse attention of models of transformers.

The registries `AttentionInterface` and `AttentionMaskInterface` get the entry "block_sparse". The mask function passes
on the padding mask, because a mask of all pairs of tokens would need the memory that sparse attention saves. The layout
is an attribute of the model's modules; their parameters and names stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.attention.layouts import ONE_WAY, DenseSparsityConfig, SparsityConfig, layout_of
from shardwise.attention.sparse import IMPLEMENTATIONS, check_implementation, hidden_by, plan_of
from shardwise.compat import never_compiled
from shardwise.errors import UsageError
from shardwise.registry.heads import heads_of, set_heads

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shardwise.config.schema.attention import SparseAttention

NAME = "block_sparse"  # attention implementation of transformers
_LAYOUT = "shardwise_sparsity"
_IMPLEMENTATION = "shardwise_sparse_implementation"

# Mask functions of transformers that a layout can be combined with.
_MASKS = ("causal_mask_function", "bidirectional_mask_function")
# Arguments of attention that a layout cannot be combined with.
_REFUSED = ("sliding_window", "softcap", "s_aux", "position_bias")


def sparsify(
    model: nn.Module, layout: SparsityConfig | SparseAttention | Mapping[str, Any], *, implementation: str = "blocks"
) -> nn.Module:
    """Give all self-attention of a model of transformers a block-sparse layout, in place; return the model.

    Padding masks, causal models, dropout of weights, grouped key heads, tensor and sequence parallelism
    (`shardwise.parallel.share_attention` after this call) and activation checkpointing work as before.

    Args:
        model: a `PreTrainedModel` whose attention can be chosen by `attn_implementation`.
        layout: for the model's heads; or the section `sparse_attention` of a configuration.
        implementation: "blocks", "flex" or "dense", as `SparseSelfAttention`.

    Raises:
        UsageError: the model's attention cannot be replaced, or the layout is for another number of heads.

    Example:
        >>> from transformers import BertConfig, BertForMaskedLM
        >>> from shardwise.attention import BSLongformerSparsityConfig, sparsify
        >>> size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
        >>> model = BertForMaskedLM(BertConfig(**size))
        >>> _ = sparsify(model, BSLongformerSparsityConfig(num_heads=2, block=4))
    """
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(model, "set_attn_implementation"):
        raise UsageError(
            f"sparsify(model): {type(model).__name__} is no model of transformers; build its attention with "
            "shardwise.attention.SparseSelfAttention"
        )
    text = config.get_text_config()
    why = None
    if getattr(config, "is_encoder_decoder", False):
        why = "its decoder attends to another sequence"
    elif not model._can_set_attn_implementation():  # type: ignore[operator]
        why = "it does not let others compute its attention"
    elif str(config._attn_implementation).startswith("shardwise_"):
        why = "its sequences are shared already; call sparsify before share_attention"
    if why is not None:
        raise UsageError(f"sparsify(model): {type(model).__name__} cannot have sparse attention: {why}")
    sparsity = layout if isinstance(layout, SparsityConfig) else layout_of(layout, text.num_attention_heads)
    if sparsity.num_heads != text.num_attention_heads:
        raise UsageError(
            f"sparsify(model): the layout has {sparsity.num_heads} heads, and {type(model).__name__} has "
            f"{text.num_attention_heads}; pass num_heads={text.num_attention_heads}"
        )
    register()
    set_layout(model.modules(), sparsity, implementation)
    model.set_attn_implementation(NAME)  # type: ignore[operator]
    return model


def set_layout(modules: Iterable[nn.Module], sparsity: SparsityConfig, implementation: str = "blocks") -> None:
    """Set the layout that "block_sparse" attention of these modules uses."""
    check_implementation(implementation)
    for module in modules:
        if getattr(module, "config", None) is not None:
            setattr(module, _LAYOUT, sparsity)
            setattr(module, _IMPLEMENTATION, implementation)
            set_heads(module, None)  # tensor parallelism restores attributes that exist, in its whole copies


def remove_layout(model: nn.Module, before: Iterable[tuple[Any, str | None]]) -> None:
    """Undo `sparsify`: give the configurations of a model, outer ones first, the attention that they had before."""
    for module in model.modules():
        for name in (_LAYOUT, _IMPLEMENTATION):
            vars(module).pop(name, None)
    for config, implementation in before:
        config._attn_implementation = implementation  # also of the configurations in it


def is_sparse(module: nn.Module) -> bool:
    """Return True if a module has a layout from `sparsify`."""
    return isinstance(getattr(module, _LAYOUT, None), SparsityConfig)


def register() -> None:
    """Register "block_sparse" with transformers."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)


def _mask(*args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor | None:
    function = kwargs.get("mask_function")
    name = getattr(function, "__qualname__", _MASKS[0]).partition(".")[0]
    if name not in _MASKS:
        raise UsageError(
            f"sparse attention: the model's mask ({name}) is more than causal or padding. Packed samples and sliding "
            "windows have no layout: pass attention_mask, and no position_ids that restart"
        )
    if attention_mask is None or name == _MASKS[0]:
        return attention_mask
    return attention_mask[:, None, None, :]  # its shape shows that no mask of pairs, also no causal one, is needed


@never_compiled
def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    given = [name for name in _REFUSED if kwargs.get(name) is not None]
    if given:
        raise UsageError(f"sparse attention: {type(module).__name__} passes {given[0]}, which has no sparse form here")
    sparsity = getattr(module, _LAYOUT, None) or DenseSparsityConfig(query.shape[1])
    plan = plan_of(sparsity, query.shape[2]).of_heads(heads_of(module, query.shape[1], sparsity.num_heads))
    causal = _is_causal(module, attention_mask, is_causal) or getattr(sparsity, "attention", None) == ONE_WAY
    bias = padding = None
    if attention_mask is not None:
        mask = hidden_by(attention_mask, "mul" if attention_mask.dim() == 2 else "add")
        if mask.dim() == 2 or mask.shape[-2] == 1 < query.shape[2]:
            padding = mask.reshape(len(mask), -1).expand(len(query), -1)
        else:
            bias = mask
    attend: Any = IMPLEMENTATIONS[getattr(module, _IMPLEMENTATION, "blocks")]
    found = attend(query, key, value, plan, causal=causal, scale=scaling, bias=bias, padding=padding, dropout=dropout)
    return found.transpose(1, 2).contiguous(), None


def _is_causal(module: Any, mask: torch.Tensor | None, given: bool | None) -> bool:
    found = getattr(module, "is_causal", None) if given is None else given
    if found is None and mask is not None and mask.dim() == 4:
        return False  # the mask has all that the model hides, as in transformers
    if found is None:
        raise UsageError(
            f"sparse attention: {type(module).__name__} does not have is_causal, which says whether a token sees later "
            "ones. Set the attribute to True or False, or pass attention_mask to an encoder"
        )
    return bool(found)
