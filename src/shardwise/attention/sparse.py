"""Sparse self-attention as a module, and how it finds the plan of a call."""

from __future__ import annotations

import hashlib
import math
import weakref
from typing import Any

import numpy as np
import torch
from torch import nn

from shardwise.attention.blocks import BlockPlan, block_attention, recent
from shardwise.attention.layouts import ONE_WAY, SparsityConfig
from shardwise.attention.masked import flex, masked_attention
from shardwise.compat import has_values, never_compiled, without_modes
from shardwise.errors import UsageError
from shardwise.registry.heads import heads_of

IMPLEMENTATIONS = {"blocks": block_attention, "flex": flex, "dense": masked_attention}

_plans: weakref.WeakKeyDictionary[SparsityConfig, dict[int, BlockPlan]] = weakref.WeakKeyDictionary()


class _Plans(dict[int, BlockPlan]):
    """Plans by number of blocks, which all layers of one layout share."""

    def __deepcopy__(self, memo: Any) -> _Plans:
        return self


_shared: weakref.WeakValueDictionary[Any, _Plans] = weakref.WeakValueDictionary()


def _plans_with(layout: Any, block: int) -> _Plans:
    key = block, layout.shape, hashlib.blake2b(np.packbits(layout).tobytes()).digest()
    return _shared.setdefault(key, _Plans())


def plan_of(sparsity: SparsityConfig, tokens: int) -> BlockPlan:
    """Return the plan of a layout for so many tokens. Layouts may not be changed after their first use."""
    blocks = -(-tokens // sparsity.block)

    def made() -> BlockPlan:
        with without_modes():
            layout = checked(sparsity, sparsity.make_layout(blocks * sparsity.block))
        return BlockPlan(layout, sparsity.block)

    found: BlockPlan = recent(_plans.setdefault(sparsity, {}), blocks, made)
    return found


def checked(sparsity: SparsityConfig, layout: torch.Tensor) -> Any:
    """Return a layout as a boolean array; raises a UsageError if it is not (heads, blocks, blocks)."""
    if layout.dim() != 3 or len(layout) != sparsity.num_heads or layout.shape[1] != layout.shape[2]:
        raise UsageError(
            f"{type(sparsity).__name__}.make_layout() returned shape {tuple(layout.shape)}; expected "
            f"({sparsity.num_heads} heads, blocks, blocks)"
        )
    return layout.detach().cpu().numpy() != 0


def check_implementation(name: str) -> str:
    """Return the name; raises a UsageError for an unknown one."""
    if name not in IMPLEMENTATIONS:
        raise UsageError(f"implementation={name!r}: choose one of {', '.join(IMPLEMENTATIONS)}")
    return name


def hidden_by(mask: torch.Tensor, mode: str) -> torch.Tensor:
    """Return a mask as a number to add to scores: as it is in the mode "add"; in "mul" -inf where it is 0 or False."""
    if mode == "add" and mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill_(mask == 0, -math.inf)


class SparseSelfAttention(nn.Module):
    """Self-attention with a block-sparse layout.

    Args:
        sparsity_config: the layout.
        key_padding_mask_mode: "add": the mask is added to scores; "mul": 0 hides a key, other values do not. Boolean
            masks are True for visible keys in both.
        attn_mask_mode: the same for `attn_mask`.
        max_seq_length: most tokens. Shorter sequences have the first blocks of the layout for so many tokens.
        implementation: "blocks" (plain torch operators), "flex" (flex attention of torch), "dense" (a mask of all
            pairs of tokens, as a reference).

    Attributes:
        master_layout: the layout for `max_seq_length` tokens, (heads, blocks, blocks), boolean. Checkpoints have it.

    Example:
        >>> import torch
        >>> from shardwise.attention import FixedSparsityConfig, SparseSelfAttention
        >>> attention = SparseSelfAttention(FixedSparsityConfig(num_heads=2, block=4), max_seq_length=64)
        >>> q = torch.randn(1, 2, 61, 8)  # samples, heads, tokens, width
        >>> attention(q, q, q).shape
        torch.Size([1, 2, 61, 8])
    """

    def __init__(
        self,
        sparsity_config: SparsityConfig,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "mul",
        max_seq_length: int = 2048,
        *,
        implementation: str = "blocks",
    ) -> None:
        super().__init__()
        for mode in (key_padding_mask_mode, attn_mask_mode):
            if mode not in ("add", "mul"):
                raise UsageError(f'SparseSelfAttention: the mode of a mask is {mode!r}; choose "add" or "mul"')
        self.sparsity_config = sparsity_config
        self.key_padding_mask_mode, self.attn_mask_mode = key_padding_mask_mode, attn_mask_mode
        self.max_seq_length, self.implementation = max_seq_length, check_implementation(implementation)
        with without_modes():
            layout = checked(sparsity_config, sparsity_config.make_layout(max_seq_length))
        self.register_buffer("master_layout", torch.from_numpy(layout.copy()))
        self._layout, self._read = layout, self._version_now()
        self._known = _plans_with(layout, sparsity_config.block)

    def get_layout(self, tokens: int) -> torch.Tensor:
        """Return the layout of so many tokens, (heads, blocks, blocks), boolean, on the CPU."""
        return torch.from_numpy(self._plan(tokens).layout)

    def _version_now(self) -> tuple[int, int] | None:
        """Return the buffer's version and place; None if the buffer has no values."""
        layout = self.get_buffer("master_layout")
        return (layout._version, layout.data_ptr()) if has_values(layout) and not layout.is_meta else None

    def _plan(self, tokens: int) -> BlockPlan:
        block = self.sparsity_config.block
        if tokens > self.max_seq_length:
            raise UsageError(
                f"SparseSelfAttention: a sequence has {tokens} tokens, and max_seq_length is {self.max_seq_length}; "
                "pass a larger max_seq_length"
            )
        now = self._version_now()
        if now not in (None, self._read):
            self._layout, self._read = checked(self.sparsity_config, self.get_buffer("master_layout")), now
            self._known = _plans_with(self._layout, block)
        blocks = -(-tokens // block)
        found: BlockPlan = recent(self._known, blocks, lambda: BlockPlan(self._layout[:, :blocks, :blocks], block))
        return found

    @never_compiled
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rpe: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
        attn_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return attention, (samples, heads, tokens, width), with scores scaled by width ** -0.5.

        Args:
            query: (samples, heads, tokens, width). Key and value have the same shape, or fewer heads.
            rpe: relative positions, added to scores; (tokens, tokens), (heads, tokens, tokens) or with samples before.
            key_padding_mask: (samples, tokens), or with dimensions of 1 between.
            attn_mask: as `rpe`, by `attn_mask_mode`.

        Raises:
            UsageError: a shape does not fit, or a sequence is longer than `max_seq_length`.
        """
        config, (samples, count, tokens, _) = self.sparsity_config, query.shape
        plan = self._plan(tokens).of_heads(heads_of(self, count, config.num_heads))
        bias = None if rpe is None else self._pairs("rpe", rpe, query)
        if attn_mask is not None:
            hidden = self._pairs("attn_mask", hidden_by(attn_mask, self.attn_mask_mode), query)
            bias = hidden if bias is None else bias + hidden
        padding = key_padding_mask
        if padding is not None:
            if padding.numel() != samples * tokens or padding.shape[-1] != tokens:
                raise UsageError(
                    f"SparseSelfAttention: key_padding_mask has shape {tuple(padding.shape)}; expected "
                    f"({samples}, {tokens})"
                )
            padding = hidden_by(padding.reshape(samples, tokens), self.key_padding_mask_mode)
        causal = getattr(config, "attention", None) == ONE_WAY
        attend: Any = IMPLEMENTATIONS[self.implementation]
        found: torch.Tensor = attend(query, key, value, plan, causal=causal, bias=bias, padding=padding)
        return found

    @staticmethod
    def _pairs(name: str, given: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        samples, heads, tokens, _ = query.shape
        found = given.reshape((1,) * (4 - given.dim()) + given.shape) if given.dim() < 4 else given
        if (
            found.shape[-2:] != (tokens, tokens)
            or found.shape[0] not in (1, samples)
            or found.shape[1] not in (1, heads)
        ):
            raise UsageError(
                f"SparseSelfAttention: {name} has shape {tuple(given.shape)}; expected ({tokens}, {tokens}), "
                f"({heads}, {tokens}, {tokens}) or ({samples}, {heads}, {tokens}, {tokens})"
            )
        return found
