"""Sequence parallelism for attention modules of transformers that compute scores themselves.

The module's class is replaced by a subclass that exchanges heads around the scores; parameters stay. Distance biases
(ALiBi) refer to the whole sequence.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardwise.errors import UsageError
from shardwise.parallel.attention import shared_attention
from shardwise.parallel.masks import WholeMask
from shardwise.parallel.sequence import SequenceGroup
from shardwise.parallel.tensor.copies import change_class
from shardwise.parallel.tensor.layers import Parallel, len_of
from shardwise.parallel.ulysses import query_runs

Shares = Callable[[bool, Any], SequenceGroup | None]
"""Returns the group of an attention call, by training mode and mask; None: unsharded sequences."""

MaskOf = Callable[..., WholeMask]  # `shardwise.parallel.huggingface.whole_mask`

Bias = Callable[[int, int], torch.Tensor | None]
"""Returns the bias of the scores for a range of heads: (rows or 1, heads, 1, tokens)."""


class SharedScores(nn.Module):
    """Base class of the subclasses; `share_scores` sets `shares` and `mask_of`."""

    shares: Shares
    mask_of: MaskOf

    def _group(self, mask: Any, cache: Any, other: Any = None) -> SequenceGroup | None:
        group = self.shares(self.training, mask)
        # An empty cache in training is never read; a cache with tokens cannot be split.
        if group is not None and (other is not None or (cache is not None and cache.get_seq_length() > 0)):
            raise UsageError(
                f"sequence parallelism: {type(self).__name__} has been given a cache or another sequence to attend to, "
                "which cannot be divided among ranks. Pass use_cache=False, or set sequence_parallel_size to 1"
            )
        return group

    def _heads(self, own: int) -> tuple[int, int]:
        """Return the first of this rank's heads, and the number of heads of its tensor-parallel group."""
        owner: Any = self
        if not isinstance(owner, Parallel):
            return 0, own
        ((start, _),) = owner.cut.runs[owner.group.place]
        return start, len_of(owner.cut.runs)

    def _attend(
        self,
        group: SequenceGroup,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float,
        dropout: float,
        bias: Callable[[WholeMask], Bias] | None = None,
    ) -> torch.Tensor:
        """Return (rows, this rank's tokens, heads * width)."""
        whole = self.mask_of(group, self, q, k, mask)
        dense = whole.of_kind("eager", q.dtype, q.device)
        first, end = query_runs(q.shape[1], group.size)[group.rank]
        added = None if bias is None else bias(whole)(first, end)

        def local(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            scores = q @ k.transpose(2, 3) * scale
            if added is not None:
                scores = scores + added
            if dense is not None:
                scores = self._masked(scores, dense)
            weights = F.softmax(scores, dim=-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(v.dtype)
            return (F.dropout(weights, dropout, self.training) @ v).transpose(1, 2)

        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return shared_attention(local, group, q, k, v, whole.layout.lengths, grouped=False).flatten(2)

    def _masked(self, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Apply a mask of zeros and minimum values, as the model family does."""
        return scores + mask


class SharedBloom(SharedScores):
    """BLOOM: ALiBi counts the tokens that are no padding."""

    def forward(
        self, hidden_states: Any, residual: Any, alibi: Any, attention_mask: Any, layer_past: Any = None, **kwargs: Any
    ) -> Any:
        """Return the output of `BloomAttention`."""
        group = self._group(attention_mask, layer_past)
        if group is None:
            return super().forward(hidden_states, residual, alibi, attention_mask, layer_past, **kwargs)
        owner: Any = self
        q, k, v = owner._reshape(owner.query_key_value(hidden_states))

        def bias(whole: WholeMask) -> Bias:
            tokens = sum(whole.layout.lengths)
            kept = whole.kept
            kept = torch.ones(whole.rows, tokens, dtype=torch.long, device=q.device) if kept is None else kept.long()
            start, heads = self._heads(owner.num_heads)
            made = sys.modules[type(self).__module__].build_alibi_tensor(kept, heads, q.dtype)
            return lambda first, end: made.view(whole.rows, heads, 1, tokens)[:, start + first : start + end]

        found = self._attend(group, q, k, v, attention_mask, owner.inv_norm_factor, owner.attention_dropout.p, bias)
        return residual + F.dropout(owner.dense(found), owner.hidden_dropout, self.training), None


class SharedMpt(SharedScores):
    """MPT: ALiBi counts all tokens, up to the longest sequence."""

    def forward(
        self, hidden_states: Any, position_bias: Any, past_key_values: Any = None, attention_mask: Any = None, **kw: Any
    ) -> Any:
        """Return the output of `MptAttention`."""
        group = self._group(attention_mask, past_key_values)
        if group is None:
            return super().forward(hidden_states, position_bias, past_key_values, attention_mask, **kw)
        owner: Any = self
        mixed = owner.Wqkv(hidden_states)
        if owner.clip_qkv:
            mixed = mixed.clamp(min=-owner.clip_qkv, max=owner.clip_qkv)
        q, k, v = (x.unflatten(2, (owner.n_heads, -1)).transpose(1, 2) for x in mixed.chunk(3, dim=2))

        def bias(whole: WholeMask) -> Bias:
            tokens = sum(whole.layout.lengths)
            start, heads = self._heads(owner.n_heads)
            if position_bias is None or len(position_bias) < heads:  # `OwnBiases` has taken this rank's
                start = 0
            return lambda first, end: (
                None if position_bias is None else position_bias[None, start + first : start + end, :, -tokens:]
            )

        found = self._attend(group, q, k, v, attention_mask, owner.softmax_scale, owner.attn_dropout_p, bias)
        return owner.out_proj(found), None

    def _masked(self, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill(mask != 0, torch.finfo(scores.dtype).min)


class SharedXglm(SharedScores):
    """XGLM: clamps masked scores."""

    def forward(
        self,
        hidden_states: Any,
        key_value_states: Any = None,
        past_key_values: Any = None,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Return the output of `XGLMAttention`."""
        group = self._group(attention_mask, past_key_values, key_value_states)
        if group is None:
            return super().forward(hidden_states, key_value_states, past_key_values, attention_mask, **kwargs)
        owner: Any = self
        projected = (project(hidden_states) for project in (owner.q_proj, owner.k_proj, owner.v_proj))
        q, k, v = (x.unflatten(2, (owner.num_heads, -1)).transpose(1, 2) for x in projected)
        found = self._attend(group, q, k, v, attention_mask, owner.scaling, owner.dropout)
        return owner.out_proj(found), None

    def _masked(self, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        least = torch.full((), torch.finfo(scores.dtype).min, dtype=scores.dtype, device=scores.device)
        return torch.max(scores + mask, least)


class SharedMethod(SharedScores):
    """GPT-J, GPT-Neo, CodeGen: the method `_attn` computes the scores of all heads."""

    def _attn(self, query: Any, key: Any, value: Any, attention_mask: Any = None) -> Any:
        group = self._group(attention_mask, None)
        scores = super()._attn  # type: ignore[misc]
        if group is None:
            return scores(query, key, value, attention_mask)
        whole = self.mask_of(group, self, query, key, attention_mask)
        dense = whole.of_kind("eager", torch.float32, query.device)

        def local(*heads: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = scores(*(x.transpose(1, 2) for x in heads), dense)[0]
            return found.transpose(1, 2)

        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return shared_attention(local, group, q, k, v, whole.layout.lengths, grouped=False).transpose(1, 2), None


# class name of transformers -> its sequence-parallel subclass
_KINDS: dict[str, type[SharedScores]] = {
    "BloomAttention": SharedBloom,
    "MptAttention": SharedMpt,
    "XGLMAttention": SharedXglm,
    "GPTJAttention": SharedMethod,
    "GPTNeoSelfAttention": SharedMethod,
    "CodeGenAttention": SharedMethod,
}


_subclasses: dict[type[nn.Module], type[nn.Module]] = {}


def _subclass(kind: type[SharedScores], of: type[nn.Module]) -> type[nn.Module]:
    if of not in _subclasses:
        _subclasses[of] = type(of.__name__, (kind, of), {"__module__": of.__module__})
    return _subclasses[of]


def share_scores(model: nn.Module, shares: Shares, mask_of: MaskOf) -> bool:
    """Make attention modules that compute scores themselves sequence-parallel; return whether the model has any."""
    found = False
    for module in model.modules():
        before = type(module)
        kind = _KINDS.get(before.__name__)
        if kind is None or not before.__module__.startswith("transformers."):
            continue
        if not isinstance(module, SharedScores):
            change_class(module, functools.partial(_subclass, kind))
        module.shares, module.mask_of = shares, mask_of  # type: ignore[assignment]
        found = True
    return found
