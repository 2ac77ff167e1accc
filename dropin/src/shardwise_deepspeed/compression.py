"""Functions of `deepspeed.compression`, with DeepSpeed's names of arguments."""

from __future__ import annotations

from typing import Any

from torch import nn

from shardwise import compression
from shardwise.config import accept
from shardwise_deepspeed.helpers import recursive_setattr


def init_compression(
    model: nn.Module, deepspeed_config: Any, teacher_model: nn.Module | None = None, mpu: Any = None
) -> Any:
    """Do as `shardwise.compression.init_compression`; `mpu` has no effect, because `initialize` divides layers."""
    return compression.init_compression(model, accept(deepspeed_config), teacher_model)


def redundancy_clean(model: nn.Module, deepspeed_config: Any, mpu: Any = None) -> Any:
    """Do as `shardwise.compression.redundancy_clean`; `mpu` has no effect."""
    return compression.redundancy_clean(model, accept(deepspeed_config))


def student_initialization(student_model: nn.Module, teacher_model: nn.Module, deepspeed_config: Any) -> nn.Module:
    """Do as `shardwise.compression.student_initialization`."""
    return compression.student_initialization(student_model, teacher_model, accept(deepspeed_config))


def convert_conv1d_to_linear(model: nn.Module, convert_type: type[nn.Module]) -> nn.Module:
    """Replace modules of a class like transformers' `Conv1D`, whose weight is (inputs, outputs), by `nn.Linear` with
    equal outputs; return the model. Compression takes both.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, convert_type):
            weight, bias = module.get_parameter("weight"), module._parameters.get("bias")
            inputs, outputs = weight.shape
            layer = nn.Linear(inputs, outputs, bias=bias is not None, device="meta")
            layer.weight = nn.Parameter(weight.detach().t().contiguous(), weight.requires_grad)
            layer.register_parameter("bias", bias)
            recursive_setattr(model, name, layer)
    return model
