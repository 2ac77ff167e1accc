"""Models of transformers whose attention works on sequences that several ranks share.

transformers looks attention up by name in a registry (`AttentionInterface`), and what makes its masks in another one
(`AttentionMaskInterface`). Both get an entry: the mask of a rank's tokens is of no use, so the second one hands on
which tokens are padding, and the first one makes the mask of the whole sequence where one is needed: for padding, for
several samples in a row, and for sliding windows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwise.compat import has_values
from shardwise.errors import UsageError
from shardwise.parallel.attention import shared_attention
from shardwise.parallel.ring import ring_attention
from shardwise.parallel.sequence import Layout, SequenceGroup, current

PREFIX = "shardwise_"
"""Before the name of an attention, that of the same over shared sequences."""

CORES = ("sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")
"""Attentions that can be shared: they make no mask of their own, or can do without."""

RING = "ring"
"""Name of ring attention (`shardwise.parallel.ring`); without ranks to share a sequence it is `sdpa`."""

_models: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
"""Models whose attention is shared, by the identity of their configuration."""


def share_attention(model: nn.Module, core: str | None = None, *, in_eval: bool = True) -> nn.Module:
    """Let a model of transformers work on sequences that several ranks share.

    Before or after `initialize`; without a group of ranks the model works as before.

    Args:
        model: a `PreTrainedModel`.
        core: the attention of one process: `sdpa`, `flex_attention` or `flash_attention_2` to `4`; None: the model's.
            Or `ring`, which needs no heads to divide, and knows no masks but causal ones.
        in_eval: also in evaluation mode. False: there each rank has whole sequences of its own.

    Returns:
        The model.

    Raises:
        UsageError: it is no such model, or its attention cannot be shared.
    """
    config: Any = getattr(model, "config", None)
    choose: Any = getattr(model, "set_attn_implementation", None)
    if config is None or choose is None:
        raise UsageError(
            f"share_attention(model) expects a model of transformers, got {type(model).__name__}; wrap the attention "
            "of other models in shardwise.parallel.DistributedAttention"
        )
    chosen = core or str(getattr(config, "_attn_implementation", None) or "sdpa").removeprefix(PREFIX)
    _check(chosen, config)
    register(chosen, PREFIX + chosen, in_eval=in_eval)
    choose(PREFIX + chosen)
    for part in model.modules():
        if getattr(part, "config", None) is not None:
            _models[id(part.config)] = model
    return model


def _check(core: str, config: Any) -> None:
    if core not in (*CORES, RING):
        raise UsageError(
            f"the attention {core!r} cannot work on shared sequences; choose one of {', '.join(CORES)}, ring "
            '(from_pretrained(..., attn_implementation="sdpa"))'
        )
    heads = getattr(config, "num_attention_heads", None)
    group = current()
    if core != RING and group is not None and isinstance(heads, int) and heads < group.size:
        raise UsageError(
            f"sequence parallelism over {group.size} ranks needs at least as many attention heads, the model has "
            f"{heads}; share_attention(model, {RING!r}) needs none"
        )
    if getattr(config, "attention_chunk_size", None):
        raise UsageError("attention in chunks (attention_chunk_size) does not work on shared sequences yet")


def register(core: str, name: str, *, in_eval: bool = True) -> None:
    """Put the shared form of an attention into the registries of transformers.

    Args:
        core: the attention of one process.
        name: under which it is called; that of the core itself replaces it for all models.
        in_eval: see `share_attention`.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    local = "sdpa" if core == RING else core
    attention, mask = ALL_ATTENTION_FUNCTIONS[local], ALL_MASK_ATTENTION_FUNCTIONS[local]
    AttentionInterface.register(name, _attention(_core_of(attention), core, in_eval))
    AttentionMaskInterface.register(name, _mask(_core_of(mask), in_eval))


def _core_of(function: Any) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(function, "core", function)
    return found


def _shares(in_eval: bool, training: bool) -> SequenceGroup | None:
    group = current()
    return group if group is not None and group.size > 1 and (in_eval or training) else None


def _mask(core: Callable[..., Any], in_eval: bool) -> Callable[..., Any]:
    def mask(*args: Any, **kwargs: Any) -> Any:
        model = _models.get(id(kwargs.get("config")))
        training = torch.is_grad_enabled() if model is None else model.training
        if _shares(in_eval, training) is None:
            return core(*args, **kwargs)
        if kwargs.get("use_vmap"):
            raise UsageError(
                "this model makes a mask of its own kind (tokens that see each other both ways, images), which cannot "
                "be made of a rank's tokens alone: sequence_parallel_size has to be 1"
            )
        return kwargs.get("attention_mask")

    mask.core = core  # type: ignore[attr-defined]
    return mask


def _attention(core: Callable[..., Any], kind: str, in_eval: bool) -> Callable[..., Any]:
    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        group = _shares(in_eval, module.training)
        if group is None:
            result: tuple[torch.Tensor, None] = core(module, query, key, value, attention_mask, *args, **kwargs)
            return result
        rows, _, own, _ = query.shape
        if key.shape[2] != own or (attention_mask is not None and attention_mask.shape != (rows, own)):
            raise UsageError(
                f"sequence parallelism: {type(module).__name__} has {own} queries, {key.shape[2]} keys"
                + ("" if attention_mask is None else f" and a mask of shape {tuple(attention_mask.shape)}")
                + f"; expected as many of both and a mask of {(rows, own)}, or none: caches (use_cache=True) and masks "
                "of pairs of tokens do not fit shared sequences"
            )
        positions = kwargs.pop("position_ids", None)
        if has_values(query):
            layout = group.layout(own, rows, positions, attention_mask, query.device)
        else:  # a dry run
            layout = Layout([own] * group.size)
        causal = kwargs.get("is_causal")
        causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
        if kind == RING:
            _check_ring(layout, kwargs)
            out = ring_attention(group, query, key, value, layout.lengths, causal=causal, scale=kwargs.get("scaling"))
            return out.transpose(1, 2).contiguous(), None
        whole = _whole_mask(layout, kind, rows, causal, kwargs.get("sliding_window"), query.device)
        if kind.startswith("flash") and layout.positions is not None:
            kwargs["position_ids"] = layout.positions

        def local(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            owner = module
            if q.shape[2] == k.shape[2] and getattr(module, "num_key_value_groups", 1) > 1:
                owner = _Ungrouped(module)  # type: ignore[assignment]
            found = core(owner, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), whole, *args, **kwargs)
            output: torch.Tensor = found[0]
            return output

        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return shared_attention(local, group, q, k, v, layout.lengths), None

    attention.core = core  # type: ignore[attr-defined]
    return attention


def _check_ring(layout: Layout, kwargs: dict[str, Any]) -> None:
    window = kwargs.get("sliding_window")
    asks = {
        "several samples in a row": layout.positions is not None,
        "padding": layout.kept is not None,
        "a sliding window": window is not None and window < sum(layout.lengths),
        "dropout": bool(kwargs.get("dropout")),
    }
    if any(asks.values()):
        found = ", ".join(what for what, asked in asks.items() if asked)
        raise UsageError(
            f"ring attention knows no masks but causal ones, and no dropout; this batch or model has {found}. Use as "
            "many ranks a sequence as there are heads, or fewer, and share_attention(model, 'sdpa')"
        )


class _Ungrouped:
    """A module of attention with as many key heads as query heads."""

    num_key_value_groups = 1

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _whole_mask(layout: Layout, kind: str, rows: int, causal: bool, window: int | None, device: torch.device) -> Any:
    """Return the mask of the whole sequence in the form that an attention takes; None: it needs none."""
    if kind.startswith("flash"):
        return layout.kept
    tokens = sum(layout.lengths)
    window = window if window is not None and window < tokens else None
    key = (kind, rows, causal, window)
    if key not in layout.masks:
        layout.masks[key] = _made_mask(layout, kind, rows, causal, window, device)
    return layout.masks[key]


def _made_mask(layout: Layout, kind: str, rows: int, causal: bool, window: int | None, device: torch.device) -> Any:
    tokens = sum(layout.lengths)
    samples = None if layout.positions is None else _samples(layout.positions)
    kept = layout.kept

    def sees(row: Any, _: Any, query: Any, key: Any) -> Any:
        found = query >= key if causal else query >= 0
        if window is not None:
            found = found & (query - key < window)
        if samples is not None:
            found = found & (samples[row, query] == samples[row, key])
        if kept is not None:
            found = found & kept[row, key]
        return found | (query == key)  # padding sees itself: a row without anything would be no number

    if kind == "flex_attention":
        from torch.nn.attention.flex_attention import create_block_mask

        per_row = rows if samples is not None or kept is not None else None
        return create_block_mask(sees, per_row, None, tokens, tokens, device=str(device))
    if samples is None and kept is None and window is None:
        return None
    places = torch.arange(tokens, device=device)
    row = torch.arange(rows, device=device).view(-1, 1, 1, 1)
    return sees(row, None, places.view(1, 1, -1, 1), places.view(1, 1, 1, -1)).expand(rows, 1, tokens, tokens)


def _samples(positions: torch.Tensor) -> torch.Tensor:
    """Return the number of the sample that each token belongs to: one begins wherever positions do not go on."""
    return (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
