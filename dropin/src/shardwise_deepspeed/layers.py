"""The transformer layer of BERT with DeepSpeed's arguments and parameter names, of torch operators."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise.errors import UsageError


@dataclass
class DeepSpeedTransformerConfig:
    """Sizes and options of a `DeepSpeedTransformerLayer`.

    `batch_size`, `local_rank`, `seed` and `fp16` are accepted without effect: layers take any batch, device, random
    generator and dtype of torch. So is `stochastic_mode`, which trades exact sums for speed in other kernels.

    Attributes:
        attn_dropout_ratio: dropout of attention weights.
        hidden_dropout_ratio: dropout of both outputs.
        initializer_range: standard deviation of weights.
        adjust_init_range: output weights have initializer_range / sqrt(2 num_hidden_layers).
        pre_layer_norm: norms come before attention and MLP; False: after the sums.
        normalize_invertible: outputs of norms are recomputed in the backward pass.
        gelu_checkpoint: the output of GELU is recomputed in the backward pass.
        attn_dropout_checkpoint: attention is recomputed in the backward pass, with the same dropout.
        return_tuple: the layer returns a tuple.
        training: the layer begins in training mode.
    """

    batch_size: int = -1
    hidden_size: int = -1
    intermediate_size: int = -1
    heads: int = -1
    attn_dropout_ratio: float = 0.0
    hidden_dropout_ratio: float = 0.0
    num_hidden_layers: int = -1
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    local_rank: int = -1
    seed: int = -1
    fp16: bool = False
    pre_layer_norm: bool = True
    normalize_invertible: bool = False
    gelu_checkpoint: bool = False
    adjust_init_range: bool = True
    attn_dropout_checkpoint: bool = False
    stochastic_mode: bool = False
    return_tuple: bool = False
    training: bool = True

    def __post_init__(self) -> None:
        if self.intermediate_size <= 0:
            self.intermediate_size = 4 * self.hidden_size
        for name in ("attn_dropout_ratio", "hidden_dropout_ratio"):
            setattr(self, name, max(0.0, getattr(self, name)))  # -1 stands for none
        if self.initializer_range < 0:
            self.initializer_range = 0.02
        if self.hidden_size < 1 or self.heads < 1 or self.hidden_size % self.heads:
            raise UsageError(
                f"DeepSpeedTransformerConfig: hidden_size={self.hidden_size} and heads={self.heads}; expected positive "
                "numbers of which the second divides the first"
            )
        if self.adjust_init_range and self.num_hidden_layers < 1:
            raise UsageError("DeepSpeedTransformerConfig: adjust_init_range needs num_hidden_layers")

    @classmethod
    def from_dict(cls, json_object: Mapping[str, Any]) -> DeepSpeedTransformerConfig:
        """Return the configuration of a dictionary; other keys than arguments are left out."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in json_object.items() if name in names})

    @classmethod
    def from_json_file(cls, json_file: str | Path) -> DeepSpeedTransformerConfig:
        """Return the configuration of a JSON file."""
        return cls.from_dict(json.loads(Path(json_file).read_text(encoding="utf-8")))


class DeepSpeedTransformerLayer(nn.Module):
    """Encoder layer of BERT: self-attention and an MLP with exact GELU, of torch's operators (fused where torch is).

    Parameters, by DeepSpeed's names: `attn_qkvw` and `attn_qkvb` (query, key and value), `attn_ow` and `attn_ob`
    (output of attention), `attn_nw` and `attn_nb` (norm before the MLP, or after attention), `inter_w`, `inter_b`,
    `output_w`, `output_b` (MLP), `norm_w` and `norm_b` (norm before attention, or after the MLP).

    Args:
        config: sizes and options.
        initial_weights: of query, key, value, attention output, its norm, both layers of the MLP, and the last norm.
        initial_biases: the same.
    """

    layer_id = 0

    def __init__(
        self,
        config: DeepSpeedTransformerConfig,
        initial_weights: Sequence[torch.Tensor] | None = None,
        initial_biases: Sequence[torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.config.layer_id = DeepSpeedTransformerLayer.layer_id  # type: ignore[attr-defined]
        DeepSpeedTransformerLayer.layer_id += 1
        width, inner = config.hidden_size, config.intermediate_size
        shapes = {"attn_qkv": (3 * width, width), "attn_o": (width, width), "attn_n": (width,)}
        shapes |= {"inter_": (inner, width), "output_": (width, inner), "norm_": (width,)}
        for name, shape in shapes.items():
            self.register_parameter(f"{name}w", nn.Parameter(torch.empty(shape)))
            self.register_parameter(f"{name}b", nn.Parameter(torch.empty(shape[:1])))
        self._initialize(list(shapes), initial_weights, initial_biases)
        self.train(config.training)

    @torch.no_grad()
    def _initialize(
        self, names: Sequence[str], weights: Sequence[torch.Tensor] | None, biases: Sequence[torch.Tensor] | None
    ) -> None:
        config = self.config
        for name in names:
            weight, bias = self.get_parameter(f"{name}w"), self.get_parameter(f"{name}b")
            outputs = config.adjust_init_range and name in ("attn_o", "output_")
            factor = (2 * config.num_hidden_layers) ** -0.5 if outputs else 1.0
            if weight.dim() == 1:
                weight.fill_(1.0)
            else:
                weight.normal_(0.0, config.initializer_range * factor)
            bias.zero_()
        for given, end in ((weights, "w"), (biases, "b")):
            if given is not None:
                for name, value in zip(names, (torch.cat(list(given[:3])), *given[3:]), strict=True):
                    self.get_parameter(f"{name}{end}").copy_(value)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        head_mask: torch.Tensor | None = None,
        layer_head_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_value: Any = None,
        output_attentions: bool = False,
        grads: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Return (samples, tokens, hidden_size), in a tuple with `return_tuple`.

        Args:
            hidden_states: (samples, tokens, hidden_size).
            attention_mask: added to scores, or boolean and True for visible keys; (samples, 1, 1 or tokens, tokens).
            head_mask: None, as all further arguments; a UsageError names another value.
        """
        others = {
            "head_mask": head_mask,
            "layer_head_mask": layer_head_mask,
            "encoder_hidden_states": encoder_hidden_states,
            "encoder_attention_mask": encoder_attention_mask,
            "past_key_value": past_key_value,
            "output_attentions": output_attentions or None,
            "grads": grads,
            **kwargs,
        }
        given = [name for name, value in others.items() if value is not None and value is not False]
        if given:
            raise UsageError(f"DeepSpeedTransformerLayer: {', '.join(given)} cannot be used; the layer is an encoder's")
        x, config = hidden_states, self.config
        p, drop, before = dict(self.named_parameters()), config.hidden_dropout_ratio, config.pre_layer_norm

        def linear(value: torch.Tensor, name: str) -> torch.Tensor:
            return F.linear(value, p[f"{name}w"], p[f"{name}b"])

        def norm(value: torch.Tensor, name: str) -> torch.Tensor:
            return F.layer_norm(value, (config.hidden_size,), p[f"{name}w"], p[f"{name}b"], config.layer_norm_eps)

        def norm_linear(value: torch.Tensor, first: str, second: str) -> tuple[torch.Tensor, torch.Tensor]:
            normed = norm(value, first)
            return normed, linear(normed, second)

        def recompute(on: bool, span: Callable[..., Any], *inputs: Any, random: bool = False) -> Any:
            if on and self.training:
                return checkpoint(span, *inputs, use_reentrant=False, preserve_rng_state=random)
            return span(*inputs)

        # Each recomputed span ends with the linear layer that saves the recomputed tensor as its input.
        inverted = config.normalize_invertible
        qkv = recompute(inverted, norm_linear, x, "norm_", "attn_qkv")[1] if before else linear(x, "attn_qkv")
        attended = recompute(
            config.attn_dropout_checkpoint,
            lambda qkv: linear(self._attention(qkv, attention_mask), "attn_o"),
            qkv,
            random=True,
        )
        x = x + F.dropout(attended, drop, self.training)
        normed, inner = recompute(inverted, norm_linear, x, "attn_n", "inter_")
        output = recompute(config.gelu_checkpoint, lambda inner: linear(F.gelu(inner), "output_"), inner)
        x = (x if before else normed) + F.dropout(output, drop, self.training)
        x = x if before else norm(x, "norm_")
        return (x,) if config.return_tuple else x

    def _attention(self, qkv: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        q, k, v = qkv.unflatten(-1, (3, self.config.heads, -1)).permute(2, 0, 3, 1, 4)
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(q.dtype)
        rate = self.config.attn_dropout_ratio if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=rate).transpose(1, 2).flatten(2)
