"""Linear layers with matrix products in float8 (Micikevicius et al., "FP8 formats for deep learning", 2209.05433).

The layers are torchao's. They cast inputs, weights and gradients with scales of the moment; parameters keep identity,
dtype and name.
"""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.errors import ConfigError, UsageError
from shardwise.utils.logging import logger

if TYPE_CHECKING:
    from shardwise.config.schema.precision import Float8

_MULTIPLE = 16  # of inputs and outputs, which the products of devices need


def train_in_float8(model: nn.Module, section: Float8, device: torch.device | None, undo: ExitStack) -> None:
    """Replace the linear layers of a model by torchao's `Float8Linear` in place; their parameters stay the same.

    `undo` puts them back. `device` None: the model is planned, and computes nothing.

    Left as they are: the model itself, the output head, subclasses of `nn.Linear`, layers with hooks, layers whose
    weight another module uses or whose sizes are no multiples of 16, and those of `section.filter_fqns`. A layer needs
    at least one row of input.

    Raises:
        UsageError: torchao cannot be imported, or the device has no float8.
        ConfigError: no layer is left.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise UsageError(f"float8: needs torchao ({error}). Install shardwise[quantization]") from error
    if device is not None and not section.emulate and not _computes_float8(device):
        raise UsageError(
            f"float8: {device} has no products in float8; expected a CUDA device of compute capability 8.9 or higher. "
            'Switch float8 off, or write "emulate": true, which is slow'
        )
    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(section.recipe),
        emulate=section.emulate,
        pad_inner_dim=True,  # rows of the input, in the gradient of the weight
        **({"round_scales_to_power_of_2": True} if section.all_gather else {}),
    )
    chosen = {
        name: layer
        for name, layer in own_linear_layers(model).items()
        if name
        and type(layer) is nn.Linear
        and not _has_hooks(layer)
        and not any(size % _MULTIPLE for size in layer.weight.shape)
        and not any(text in name for text in section.filter_fqns)
    }
    if not chosen and not float8_layers(model):
        raise ConfigError(
            f"float8: {type(model).__name__} has no linear layer (nn.Linear) whose sizes are multiples of {_MULTIPLE} "
            "and that `float8.filter_fqns` leaves. Switch float8 off"
        )
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name in chosen)
    for name, layer in chosen.items():
        undo.callback(model.set_submodule, name, layer)
    if device is not None:
        logger.info("float8: %d linear layers, recipe %s", len(chosen), section.recipe)


def float8_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers of torchao that train in float8, by name, also those that the script has converted."""
    try:
        from torchao.float8.float8_linear import Float8Linear
    except ImportError:
        return {}
    return {name: layer for name, layer in own_linear_layers(model).items() if isinstance(layer, Float8Linear)}


def weights_to_gather(model: nn.Module) -> tuple[list[nn.Parameter], torch.dtype]:
    """Return the weights of a model's float8 layers, and the dtype in which they may travel.

    Raises ConfigError if the scale of a weight is not one power of two: what was rounded would be rounded again.
    """
    from torchao.float8.config import ScalingGranularity

    weights, dtypes = [], set()
    for name, layer in float8_layers(model).items():
        cast = layer.config.cast_config_weight
        one = cast == layer.config.cast_config_weight_for_grad_input
        dtypes.add(cast.target_dtype)
        powers = layer.config.round_scales_to_power_of_2
        if not (one and powers and cast.scaling_granularity is ScalingGranularity.TENSORWISE) or len(dtypes) > 1:
            raise ConfigError(
                f"float8.all_gather: {name} was converted with other scales than one power of two for its weight, or "
                "to another dtype than other layers. Leave the conversion to `float8`, or switch all_gather off"
            )
        weights.append(layer.weight)
    return weights, dtypes.pop()


def own_linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers, by name, whose weights are used in one place, without the output head."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    users: dict[int, int] = {}
    for _, module in model.named_modules(remove_duplicate=False):
        for parameter in module._parameters.values():
            if parameter is not None:
                users[id(parameter)] = users.get(id(parameter), 0) + 1
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module is not head
        and users.get(id(module._parameters.get("weight"))) == 1  # a reparametrised weight is no parameter
    }


def _has_hooks(layer: nn.Module) -> bool:
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(layer, name) for name in names)


def _computes_float8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
