"""Weight-only quantisation of linear layers by torchao."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from shardwise.errors import ConfigError, UsageError
from shardwise.precision.float8 import own_linear_layers
from shardwise.registry import declare_as, part_of
from shardwise.utils.logging import logger

if TYPE_CHECKING:
    from shardwise.inference.config import QuantizedValues

_GROUPS = (128, 32)
"""Sizes of groups of 4-bit weights, the first that divides the inputs of all layers."""


def quantize_weights(model: nn.Module, section: QuantizedValues, device: torch.device) -> int:
    """Quantise the weights of a model's linear layers in place; return the bytes of weights that had been there.

    Output heads, and weights that are shared with an embedding, keep their dtype. Tensor-parallel ranks quantise their
    parts: the scales of an output feature (8 bits) are those of its inputs on the rank. On a CPU 4-bit weights take a
    byte each, because torchao packs them for CUDA devices only.

    Raises:
        UsageError: torchao cannot be imported.
        ConfigError: the model has no linear layer to quantise, or groups do not fit.
    """
    try:
        from torchao.quantization import (
            Int4WeightOnlyConfig,
            Int8WeightOnlyConfig,
            IntxWeightOnlyConfig,
            MappingType,
            PerAxis,
            PerGroup,
            quantize_,
        )
    except ImportError as error:
        raise UsageError(f"quant: needs torchao ({error}). Install shardwise[quantization]") from error
    layers = own_linear_layers(model)
    if not layers:
        raise ConfigError(
            f"quant: {type(model).__name__} has no linear layer (nn.Linear) whose weight could be quantised. Remove "
            "quant, or dtype int8"
        )
    inputs = {layer.weight.shape[1] for layer in layers.values()}
    size = section.group_size
    if size is None and section.num_bits == 4:
        size = next((one for one in _GROUPS if not any(number % one for number in inputs)), min(inputs))
    wrong = next((name for name, layer in layers.items() if size and layer.weight.shape[1] % size), None)
    if wrong is not None:
        raise ConfigError(
            f"quant.weight.group_size: {wrong} has {layers[wrong].weight.shape[1]} inputs on this rank, which {size} "
            "does not divide"
        )
    config: Any
    symmetric = section.q_type == "symmetric"
    if section.num_bits == 8 and symmetric and size is None:
        config = Int8WeightOnlyConfig()
    elif section.num_bits == 4 and device.type == "cuda" and not symmetric:
        config = Int4WeightOnlyConfig(group_size=size or 128, int4_packing_format="tile_packed_to_4d")
    else:
        config = IntxWeightOnlyConfig(
            weight_dtype=torch.int8 if section.num_bits == 8 else getattr(torch, "int4"),  # noqa: B009 (no stub)
            granularity=PerAxis(0) if size is None else PerGroup(size),
            mapping_type=MappingType.SYMMETRIC if symmetric else MappingType.ASYMMETRIC,
        )
    chosen = {id(layer) for layer in layers.values()}
    before = sum(layer.weight.nbytes for layer in layers.values())
    parts = {name: part_of(layer.weight) for name, layer in layers.items()}
    quantize_(model, config, filter_fn=lambda module, _: id(module) in chosen)
    for name, part in parts.items():
        if part.ranks is not None:
            declare_as(cast(nn.Parameter, layers[name].weight), part)
    rest = sum(p.nbytes for p in model.parameters() if type(p.data) is torch.Tensor and type(p) is nn.Parameter)
    logger.info(
        "quantised %d linear layers to %d bits; other weights have %d bytes", len(layers), section.num_bits, rest
    )
    return before
