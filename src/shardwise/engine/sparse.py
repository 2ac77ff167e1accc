"""The section `sparse_attention` when an engine is built."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch import nn

from shardwise.attention import SparseSelfAttention, is_sparse, sparsify
from shardwise.attention.huggingface import remove_layout
from shardwise.errors import ConfigError
from shardwise.pipeline.module import PipelineModule
from shardwise.utils.logging import warn_once

if TYPE_CHECKING:
    from shardwise.config.schema.attention import SparseAttention


def sparse_copy(model: nn.Module, section: SparseAttention | None) -> nn.Module:
    """Return a model that `use_sparse_attention` would change as a changed copy with the same tensors; others as is."""
    if section is None or section.mode == "dense" or isinstance(model, PipelineModule):
        return model
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    found: nn.Module = copy.deepcopy(model, shared)
    use_sparse_attention(found, section, ExitStack(), of_deepspeed=False)
    return found


def use_sparse_attention(
    model: nn.Module, section: SparseAttention | None, undo: ExitStack, *, of_deepspeed: bool
) -> None:
    """Give a model of transformers the section's layout, unless some of its layers have one; `undo` removes it.

    `of_deepspeed`: DeepSpeed, whose configuration this is, leaves the section to the script; a warning names the call.
    Raises a ConfigError if no layer of the model can have the layout.
    """
    if section is None or section.mode == "dense":
        return
    parts = model.built_stages if isinstance(model, PipelineModule) else [model]
    if any(isinstance(module, SparseSelfAttention) or is_sparse(module) for part in parts for module in part.modules()):
        return
    name = type(model).__name__
    if of_deepspeed or isinstance(model, PipelineModule):
        warn_once(
            f"`sparse_attention`: the engine leaves this section to the script, and no layer of {name} is known to use "
            'it. Call shardwise.attention.sparsify(model, config["sparse_attention"]), or build SparseSelfAttention'
        )
        return
    if not hasattr(model, "set_attn_implementation"):
        raise ConfigError(
            f"sparse_attention: {name} is no model of transformers, and has no SparseSelfAttention layer. Build one "
            'with shardwise.attention.layout_of(config["sparse_attention"], num_heads), or remove the section'
        )
    configs: dict[int, Any] = {id(one.config): one.config for one in model.modules() if hasattr(one, "config")}
    before = [(one, one._attn_implementation) for one in configs.values() if hasattr(one, "_attn_implementation")]
    sparsify(model, section)
    undo.callback(remove_layout, model, before)
