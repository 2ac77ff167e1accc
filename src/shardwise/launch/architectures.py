"""Decoders of known sizes, for plans: their parameters, and what they compute for one sequence after the other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder.

    Attributes:
        layers, width, heads, vocabulary: see the papers.
        groups: heads of keys and values; None: as many as of queries.
        inner: width inside of the feed-forward networks; None: four times the width.
        llama: root-mean-square norms, gated networks, fused attention, no biases, and a head of its own; otherwise
            BLOOM's layer norms, GELU, attention scores that are formed, biases, and the embedding as head.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int
    groups: int | None = None
    inner: int | None = None
    llama: bool = False


SHAPES = {
    "bloom-560m": Shape(24, 1024, 16, 250880),
    "bloom-1b1": Shape(24, 1536, 16, 250880),
    "bloom-7b1": Shape(30, 4096, 32, 250880),
    "llama-7b": Shape(32, 4096, 32, 32000, inner=11008, llama=True),
    "llama-13b": Shape(40, 5120, 40, 32000, inner=13824, llama=True),
    "llama-70b": Shape(80, 8192, 64, 32000, groups=8, inner=28672, llama=True),
}
"""By name. Le Scao et al., "BLOOM", 2022, arXiv 2211.05100, table 3; Touvron et al., "Llama 2", 2023, arXiv 2307.09288.
"""


class Decoder(nn.Module):
    """Returns the cross entropy of the next tokens.

    Args:
        shape: its sizes.
        recompute: keep only the inputs of layers for the backward pass.
    """

    def __init__(self, shape: Shape, *, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.first = nn.Identity() if shape.llama else nn.LayerNorm(shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.last = _norm(shape)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if not shape.llama:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute the loss of (sequences, tokens)."""
        values = self.first(self.tokens(tokens))
        for layer in self.layers:
            values = checkpoint(layer, values, use_reentrant=False) if self.recompute else layer(values)
        logits = self.head(self.last(values))[:, :-1].float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Layer(nn.Module):
    """Attention and feed-forward network of one layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, biased = shape.width, not shape.llama
        inner, groups = shape.inner or 4 * width, shape.groups or shape.heads
        self.heads, self.sizes = shape.heads, [width, *([width // shape.heads * groups] * 2)]
        self.before, self.between = _norm(shape), _norm(shape)
        self.qkv = nn.Linear(width, sum(self.sizes), bias=biased)
        self.out = nn.Linear(width, width, bias=biased)
        self.gate = nn.Linear(width, inner, bias=False) if shape.llama else None
        self.up = nn.Linear(width, inner, bias=biased)
        self.down = nn.Linear(inner, width, bias=biased)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Compute (sequences, tokens, width) from as much."""
        rows, length, width = values.shape
        size = width // self.heads
        parts = self.qkv(self.before(values)).split(self.sizes, -1)
        query, key, value = (part.view(rows, length, -1, size).transpose(1, 2) for part in parts)
        if self.gate is None:
            later = torch.ones(length, length, dtype=torch.bool, device=values.device).triu(1)
            scores = (query @ key.transpose(2, 3)).mul_(size**-0.5).masked_fill(later, -torch.inf)
            mixed = scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value
        else:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        values = values + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        given = self.between(values)
        raised = F.gelu(self.up(given)) if self.gate is None else F.silu(self.gate(given)) * self.up(given)
        return values + self.down(raised)


def _norm(shape: Shape) -> nn.Module:
    return nn.RMSNorm(shape.width) if shape.llama else nn.LayerNorm(shape.width)
