"""Sequence-parallel attention for models of transformers.

The registries `AttentionInterface` and `AttentionMaskInterface` of transformers get an entry each. The mask function
passes on pattern and padding. The attention function builds the mask of the whole sequence
(`shardwise.parallel.masks`) if padding, packed samples or sliding windows need one.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn

from shardwise.compat import has_values, local_of
from shardwise.errors import UsageError
from shardwise.parallel.attention import shared_attention
from shardwise.parallel.eager import share_scores
from shardwise.parallel.masks import Pattern, WholeMask, carried, carried_pattern, is_placeholder, pattern_of
from shardwise.parallel.positions import count_positions
from shardwise.parallel.ring import ring_attention
from shardwise.parallel.sequence import Layout, SequenceGroup, active, current
from shardwise.parallel.ulysses import query_runs
from shardwise.utils.logging import warn_once

PREFIX = "shardwise_"  # of the registered names
_IN_TRAINING = "_in_training"  # end of the names that have unsplit sequences in evaluation, as other models may not

EAGER = "eager"  # the plain torch attention in each model's file

BLOCK_SPARSE = "block_sparse"  # of `shardwise.attention.sparsify`

# Attentions that can be sequence-parallel.
CORES = ("sdpa", EAGER, "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4", BLOCK_SPARSE)

RING = "ring"  # ring attention (`shardwise.parallel.ring`); `sdpa` without sequence parallelism

# Sequence-parallel models, by the identity of their configuration, which several may share.
_models: dict[int, weakref.WeakSet[nn.Module]] = {}


def share_attention(model: nn.Module, core: str | None = None, *, in_eval: bool = True) -> nn.Module:
    """Make a model of transformers sequence-parallel.

    Call before or after `initialize`. Without a sequence-parallel group the model is unchanged.

    Args:
        model: a `PreTrainedModel`; it is returned.
        core: single-process attention: `sdpa`, `flex_attention` or `flash_attention_2` to `4`; None: the model's. Or
            `ring`, which allows more ranks than heads and supports only causal masks.
        in_eval: also in evaluation mode. False: there each rank has unsplit sequences.

    Raises:
        UsageError: the object is no such model, or its attention is not supported.
    """
    config: Any = getattr(model, "config", None)
    choose: Any = getattr(model, "set_attn_implementation", None)
    if config is None or choose is None:
        raise UsageError(
            f"share_attention(model) expects a model of transformers, got {type(model).__name__}; wrap the attention "
            "of other models in shardwise.parallel.DistributedAttention"
        )
    before = str(getattr(config, "_attn_implementation", None) or "sdpa")
    chosen = core or before.removeprefix(PREFIX).removesuffix(_IN_TRAINING)
    _check(model, chosen)
    name = f"{PREFIX}{chosen}{'' if in_eval else _IN_TRAINING}"
    register(chosen, name, in_eval=in_eval)
    shared_here = functools.partial(shares, in_eval)
    if model._can_set_attn_implementation():  # type: ignore[operator]
        choose(name)
    elif chosen == EAGER and share_scores(model, functools.partial(attending, in_eval), whole_mask):
        config._attn_implementation = name
    else:
        raise UsageError(
            f"{type(model).__name__} does not let others compute its attention ({chosen}), so sequences cannot be "
            "shared among ranks: set sequence_parallel_size to 1"
        )
    count_positions(model, shared_here)
    for part in model.modules():
        if getattr(part, "config", None) is not None:
            _models.setdefault(id(part.config), weakref.WeakSet()).add(model)
    return model


def _check(model: nn.Module, core: str) -> None:
    config: Any = model.config
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
    why = None
    if getattr(config, "attention_chunk_size", None):
        why = "it attends in chunks (attention_chunk_size)"
    elif getattr(config, "is_encoder_decoder", False):
        why = "an encoder and a decoder have different sequences"
    elif any(hasattr(module, "relative_attention_bias") for module in model.modules()):
        why = "it adds a bias by relative positions to scores (relative_attention_bias)"
    if why is not None:
        raise UsageError(
            f"{type(model).__name__} does not work on sequences that ranks share: {why}. Set sequence_parallel_size "
            "to 1"
        )
    if getattr(config, "output_router_logits", False) and getattr(config, "router_aux_loss_coef", 0):
        warn_once(
            f"{type(model).__name__} adds a loss of imbalance of its experts (output_router_logits). With shared "
            "sequences that loss is of each rank's tokens, and differs from one process's; set router_aux_loss_coef to "
            "0 to be exact"
        )


def register(core: str, name: str, *, in_eval: bool = True) -> None:
    """Register the sequence-parallel form of `core` with transformers; as `core` it replaces `core` for all models."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    local = "sdpa" if core == RING else core
    attention = None if local == EAGER else _core_of(ALL_ATTENTION_FUNCTIONS[local])
    mask = ALL_MASK_ATTENTION_FUNCTIONS[local]
    AttentionInterface.register(name, _attention(attention, core, in_eval))
    AttentionMaskInterface.register(name, _mask(_core_of(mask), in_eval))


def _core_of(function: Any) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(function, "core", function)
    return found


def shares(in_eval: bool, training: bool) -> SequenceGroup | None:
    """Return the sequence-parallel group; None: this rank has unsplit sequences."""
    group = current()
    if group is None or not (in_eval or training or group.comparing) or active(group).size == 1:
        return None
    return group


def attending(in_eval: bool, training: bool, mask: Any) -> SequenceGroup | None:
    """Return the group of an attention call.

    A block that runs by itself inside `whole_sequences` may have the placeholder of a surrounding pass's mask: its
    group is this rank.
    """
    group = shares(in_eval, training)
    if group is None and is_placeholder(mask) and (surrounding := current()) is not None:
        return active(surrounding)
    return group


def _mask(core: Callable[..., Any], in_eval: bool) -> Callable[..., Any]:
    def mask(*args: Any, **kwargs: Any) -> Any:
        if shares(in_eval, _trains(kwargs.get("config"), sys._getframe(1))) is None:
            return core(*args, **kwargs)
        rows, own = kwargs["batch_size"], kwargs["q_length"]
        kept = kwargs.get("attention_mask")
        if kwargs.get("kv_length", own) != own or (kept is not None and kept.shape != (rows, own)):
            raise UsageError(
                f"sequence parallelism: a mask for {own} queries and {kwargs.get('kv_length')} keys"
                + ("" if kept is None else f", with padding of shape {tuple(kept.shape)}")
                + f"; expected as many of both, and padding of shape {(rows, own)} or none: caches (use_cache=True) "
                "and attention to another sequence cannot be divided among ranks"
            )
        positions = _packing_positions(sys._getframe(1)) if kept is None else None
        pattern = pattern_of(kwargs["mask_function"], kept is not None, positions is not None)
        return carried(pattern, kept, positions, rows, own, kwargs.get("device"))

    mask.core = core  # type: ignore[attr-defined]
    return mask


def _trains(config: Any, caller: FrameType | None) -> bool:
    """Return True if the model that makes a mask is in training mode."""
    modes = {model.training for model in _models.get(id(config), ())}
    if len(modes) < 2:
        return modes.pop() if modes else torch.is_grad_enabled()
    while caller is not None and not isinstance(module := local_of(caller, "self"), nn.Module):
        caller = caller.f_back
    return caller is not None and module.training


def _packing_positions(caller: FrameType) -> torch.Tensor | None:
    """Return the positions by which the mask function of transformers separates packed samples.

    It does so given positions, no padding mask and no cache. Positions of one sample do not show packing.
    """
    if local_of(caller, "past_key_values") is not None or local_of(caller, "mask_factory_function") is None:
        return None
    positions = local_of(caller, "position_ids")
    return positions if isinstance(positions, torch.Tensor) else None


def _attention(core: Callable[..., Any] | None, kind: str, in_eval: bool) -> Callable[..., Any]:
    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        group = attending(in_eval, module.training, attention_mask)
        own_core = core or eager_core(module)
        if group is None:
            result: tuple[torch.Tensor, None] = own_core(module, query, key, value, attention_mask, *args, **kwargs)
            return result
        if kwargs.get("position_bias") is not None:
            raise UsageError(
                f"{type(module).__name__} adds a bias by relative positions of a rank's own tokens (as T5 does), which "
                "cannot be divided among ranks: set sequence_parallel_size to 1"
            )
        causal = kwargs.get("is_causal")
        causal = getattr(module, "is_causal", None) if causal is None else causal
        if causal is None and attention_mask is None:
            raise UsageError(
                f"sequence parallelism: {type(module).__name__} does not have is_causal, which says whether a token "
                "sees later ones. Set the attribute to True or False"
            )
        whole = whole_mask(
            group,
            module,
            query,
            key,
            attention_mask,
            causal=bool(causal),
            window=kwargs.get("sliding_window"),
            positions=kwargs.pop("position_ids", None),
        )
        if kind == RING:
            _check_ring(kwargs)
            out = ring_attention(
                group, query, key, value, whole.layout.lengths, mask=whole, scale=kwargs.get("scaling")
            )
            return out.transpose(1, 2).contiguous(), None
        if kind == BLOCK_SPARSE and (whole.samples is not None or whole.window is not None):
            raise UsageError(
                f"{type(module).__name__}: sparse attention of packed samples, or of a sliding window, has no layout; "
                "give each row one sample"
            )
        if kind.startswith("flash"):
            if whole.layout.positions is not None:
                kwargs["position_ids"] = whole.layout.positions
        else:
            kwargs["is_causal"] = whole.pattern.causal
        mask = whole.of_kind(kind, query.dtype, query.device)
        heads = OwnHeads(module, query.shape[1], key.shape[1], group)
        given = {name: heads.own_of(argument) for name, argument in kwargs.items()}

        def local(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            owner = heads.with_keys(k.shape[2], q.shape[2])
            found = own_core(owner, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, *args, **given)
            output: torch.Tensor = found[0]
            return output

        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return shared_attention(local, group, q, k, v, whole.layout.lengths), None

    attention.core = core  # type: ignore[attr-defined]
    return attention


def whole_mask(
    group: SequenceGroup,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    causal: bool = True,
    window: int | None = None,
    positions: torch.Tensor | None = None,
) -> WholeMask:
    """Return the attention mask of the whole sequence (all ranks call).

    `query` and `key` are (rows, heads, this rank's tokens, width). `mask` is the model's, or the placeholder of a
    pattern; None: pattern by `causal` and `window`.
    """
    rows, _, own, _ = query.shape
    pattern = Pattern(causal, window) if mask is None else carried_pattern(mask, rows, own)
    if key.shape[2] != own or pattern is None:
        raise UsageError(
            f"sequence parallelism: {type(module).__name__} has {own} queries, {key.shape[2]} keys"
            + ("" if mask is None else f" and a mask of shape {tuple(mask.shape)}")
            + "; expected as many of both, and a mask of padding or none: caches (use_cache=True), attention to "
            "another sequence and masks of pairs of tokens do not fit shared sequences"
        )
    layout = Layout([own] * group.size)  # a dry run
    if has_values(query):
        stands: torch.Tensor | None = positions
        kept: torch.Tensor | None = None
        if mask is not None and (pattern.padded or pattern.packed):
            stands, kept = mask, mask[..., 0] if pattern.padded else None
            positions = mask[..., 0] if pattern.packed else positions
        layout = group.layout(own, rows, positions, kept, query.device, key=stands)
    return WholeMask(layout, pattern, rows)


def _check_ring(kwargs: dict[str, Any]) -> None:
    if kwargs.get("dropout"):
        raise UsageError(
            "ring attention has no dropout: set the model's attention dropout to 0, or use as many ranks a sequence as "
            'there are heads, or fewer, and share_attention(model, "sdpa")'
        )


def eager_core(module: nn.Module) -> Callable[..., Any]:
    """Return the plain torch attention of a model's own file; raises a UsageError without one."""
    for kind in type(module).__mro__:
        found = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if found is not None:
            core: Callable[..., Any] = found
            return core
    raise UsageError(
        f'{type(module).__name__} has no eager attention that works on shared sequences: choose "sdpa", or set '
        "sequence_parallel_size to 1"
    )


class OwnHeads:
    """View of an attention module with this rank's heads and attention sinks; `heads` and `keys` count all ranks'."""

    def __init__(self, module: nn.Module, heads: int, keys: int, group: SequenceGroup) -> None:
        self._module, self._heads = module, heads
        self._run = slice(*query_runs(heads, group.size)[group.rank])
        self._groups = heads // keys

    def with_keys(self, keys: int, heads: int) -> OwnHeads:
        """Set the numbers of key and query heads on this rank, and return self."""
        self._groups = heads // keys
        return self

    def own_of(self, value: Any) -> Any:
        """Return this rank's part of a tensor with one number for each head; other values unchanged."""
        if isinstance(value, torch.Tensor) and value.shape == (self._heads,) and self._heads > 1:
            return value[self._run]
        return value

    def __getattr__(self, name: str) -> Any:
        if name == "num_key_value_groups":
            return self._groups
        return self.own_of(getattr(self._module, name))
