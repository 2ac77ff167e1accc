"""Models of known sizes, for plans."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardwise.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from shardwise.recompute import checkpoint


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder; see the papers.

    Attributes:
        groups: key and value heads; None: as many as query heads.
        inner: width of the feed-forward networks; None: four times the width.
        llama: RMS norms, gated networks, fused attention, no biases, separate head. Otherwise BLOOM's layer norms,
            GELU, unfused attention scores, biases, and the embedding as head.
        dropout: share of the attention probabilities, and of the results of attention and network, that is dropped.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int
    groups: int | None = None
    inner: int | None = None
    llama: bool = False
    dropout: float = 0.0


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

_BERT = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_T5 = {"model_type": "t5", "d_model": 1024, "num_layers": 24, "decoder_start_token_id": 0}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2"},
    "gpt2-medium": {"model_type": "gpt2", "n_layer": 24, "n_embd": 1024, "n_head": 16},
    "gpt2-large": {"model_type": "gpt2", "n_layer": 36, "n_embd": 1280, "n_head": 20},
    "gpt2-xl": {"model_type": "gpt2", "n_layer": 48, "n_embd": 1600, "n_head": 25},
    "bert-large": {"model_type": "bert", **_BERT},
    "t5-large": {**_T5, "d_ff": 4096, "num_heads": 16},
    "t5-3b": {**_T5, "d_ff": 16384, "d_kv": 128, "num_heads": 32},
    "mixtral-8x7b": {"model_type": "mixtral"},
}
"""Configurations of transformers, where they differ from its defaults. Radford et al., "Language models are
unsupervised multitask learners", 2019; Devlin et al., "BERT", 2018, arXiv 1810.04805; Raffel et al., "Exploring the
limits of transfer learning", 2019, arXiv 1910.10683; Jiang et al., "Mixtral of experts", 2024, arXiv 2401.04088.
"""


class Decoder(nn.Module):
    """Decoder that returns the next-token cross entropy; `recompute`: with activation checkpointing of layers."""

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
        """Return the loss of (sequences, tokens)."""
        values = self.first(self.tokens(tokens))
        values = _through(self.layers, values, self.recompute)
        logits = self.head(self.last(values))[:, :-1].float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Layers(nn.Module):
    """Only the layers of a decoder, without embedding and head; returns the mean of its output."""

    def __init__(self, shape: Shape, *, recompute: bool = False) -> None:
        super().__init__()
        self.width, self.recompute = shape.width, recompute
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean for (sequences, tokens, width)."""
        return _through(self.layers, values, self.recompute).mean()


def _through(layers: nn.ModuleList, values: torch.Tensor, recompute: bool) -> torch.Tensor:
    for layer in layers:
        values = checkpoint(layer, values) if recompute else layer(values)
    return values


def decoder_pipeline(shape: Shape, *, recompute: bool = False) -> PipelineModule:
    """Return a `Decoder` as layers of a pipeline."""
    last = LayerSpec(nn.RMSNorm if shape.llama else nn.LayerNorm, shape.width)
    head: Any = LayerSpec(nn.Linear, shape.width, shape.vocabulary, bias=False)
    first: list[Any] = [LayerSpec(nn.Embedding, shape.vocabulary, shape.width)]
    if not shape.llama:
        tokens = partial(TiedLayerSpec, "tokens", nn.Embedding, shape.vocabulary, shape.width)
        first, head = [tokens(), LayerSpec(nn.LayerNorm, shape.width)], tokens(forward_fn=_logits)
    return PipelineModule(
        [*first, *(LayerSpec(Layer, shape) for _ in range(shape.layers)), last, head],
        loss_fn=_loss,
        activation_checkpoint_interval=int(recompute),
        checkpointable_layers=["Layer"],
    )


def _logits(embedding: nn.Module, values: torch.Tensor) -> torch.Tensor:
    return F.linear(values, embedding.get_parameter("weight"))


def _loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


class Layer(nn.Module):
    """A transformer layer: attention and feed-forward network."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.before, self.attention = _norm(shape), Attention(shape)
        self.between, self.network = _norm(shape), Network(shape)
        self.dropout = shape.dropout

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Map (sequences, tokens, width) to the same shape."""
        values = values + self._drop(self.attention(self.before(values)))
        return values + self._drop(self.network(self.between(values)))

    def _drop(self, values: torch.Tensor) -> torch.Tensor:
        return F.dropout(values, self.dropout, self.training) if self.dropout else values


class Attention(nn.Module):
    """Causal attention, with names of layers and attributes that tensor parallelism recognises."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.fused, self.dropout = shape.llama, shape.dropout
        self.num_heads, self.num_key_value_heads = shape.heads, shape.groups or shape.heads
        self.head_dim = shape.width // shape.heads
        heads = self.num_heads + 2 * self.num_key_value_heads
        self.qkv_proj = nn.Linear(shape.width, heads * self.head_dim, bias=not shape.llama)
        self.o_proj = nn.Linear(shape.width, shape.width, bias=not shape.llama)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Apply attention to (sequences, tokens, width)."""
        rows, length, _ = values.shape
        sizes = [heads * self.head_dim for heads in (self.num_heads, *([self.num_key_value_heads] * 2))]
        parts = self.qkv_proj(values).split(sizes, -1)
        query, key, value = (part.view(rows, length, -1, self.head_dim).transpose(1, 2) for part in parts)
        if self.fused:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        else:
            later = torch.ones(length, length, dtype=torch.bool, device=values.device).triu(1)
            scores = (query @ key.transpose(2, 3)).mul_(self.head_dim**-0.5).masked_fill(later, -torch.inf)
            shares = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
            if self.dropout:
                shares = F.dropout(shares, self.dropout, self.training)
            mixed = shares @ value
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Network(nn.Module):
    """Feed-forward network, gated or not."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        inner = shape.inner or 4 * shape.width
        self.gate_proj = nn.Linear(shape.width, inner, bias=False) if shape.llama else None
        self.up_proj = nn.Linear(shape.width, inner, bias=not shape.llama)
        self.down_proj = nn.Linear(inner, shape.width, bias=not shape.llama)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Map (sequences, tokens, width) to the same shape."""
        raised = self.up_proj(values)
        gated = F.gelu(raised) if self.gate_proj is None else F.silu(self.gate_proj(values)) * raised
        return self.down_proj(gated)


def _norm(shape: Shape) -> nn.Module:
    return nn.RMSNorm(shape.width) if shape.llama else nn.LayerNorm(shape.width)
