"""Warnings about scripts that run without an error but do not train as their author expects."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shardwise.comm.ledger import user_line
from shardwise.errors import UsageError
from shardwise.pipeline.module import PipelineModule
from shardwise.utils.logging import warn_once
from shardwise.zero.units import released

if TYPE_CHECKING:
    from shardwise.config import Config

_WRAPPERS = frozenset({"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"})
"""Classes of torch that reduce gradients or move parameters themselves."""

_DTYPES = re.compile(r"dtype|scalar type|BFloat16|Half\b")
_MISMATCH = re.compile(r"mixed dtype|(same|but (got|found)).*(BFloat16|Half)|(BFloat16|Half).*(same|but (got|found))")
"""Messages of torch about two tensors of different dtypes, one of 16 bits."""


def check_unwrapped(model: nn.Module) -> None:
    """Raise a UsageError if the model or a submodule is wrapped for distributed training."""
    parts = model.built_stages if isinstance(model, PipelineModule) else [model]
    for name, module in (item for part in parts for item in part.named_modules()):
        for kind in type(module).__mro__:
            if kind.__name__ in _WRAPPERS and kind.__module__.startswith("torch."):
                where = f"its module {name!r} is" if name else "it is"
                raise UsageError(
                    f"initialize(model=...): {where} wrapped in {kind.__name__}, which would distribute the same "
                    "parameters a second time. Pass the module inside of the wrapper (.module)"
                )


def warn_of_arguments(settings: Config, optimizer: Any, lr_scheduler: Any, model: nn.Module, *, trains: bool) -> None:
    """Warn of sections that arguments of `initialize` override, and of an optimizer without trainable parameters."""
    for name, argument, section in (
        ("optimizer", optimizer, settings.optimizer),
        ("lr_scheduler", lr_scheduler, settings.scheduler),
    ):
        if argument is not None and section is not None and section.type is not None:
            key = "optimizer" if name == "optimizer" else "scheduler"
            warn_once(
                f"initialize({name}=...) overrides the `{key}` section of the configuration, whose {section.type} is "
                "not used. Remove one of them"
            )
    asked = optimizer is not None or (settings.optimizer is not None and settings.optimizer.type is not None)
    if asked and not trains:
        name = type(model).__name__
        has = "has no parameters"
        if next(model.parameters(), None) is not None:
            has = "has no parameter that requires a gradient (of those in model_parameters, if they are given)"
        warn_once(
            f"initialize(): there is an optimizer and nothing to train: {name} {has}. The engine can evaluate only; "
            "step() will raise"
        )


def warn_of_batch_norm(model: nn.Module, ranks: int) -> None:
    """Warn of batch normalization with separate running statistics on each data-parallel rank."""
    found = [
        (name, type(module).__name__)
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        and not isinstance(module, nn.SyncBatchNorm)
        and module.training
        and module.track_running_stats
    ]
    if found and ranks > 1:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        warn_once(
            f"module {found[0][0]!r} ({found[0][1]}){more}: each of {ranks} ranks normalizes with its own micro-batch, "
            "and its running statistics differ from the other ranks'. On GPUs convert the model with "
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before initialize(); or average running_mean and "
            "running_var over the ranks before evaluation"
        )


def warn_of_memory_format(model: nn.Module) -> None:
    """Warn of parameters in another memory format than row-major, which flat parameters lose."""
    found = [name for name, parameter in model.named_parameters() if not parameter.is_contiguous()]
    if found:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        warn_once(
            f"parameter {found[0]!r}{more}: the engine stores parameters in row-major memory, and channels_last or "
            "other strides are lost. Convolutions with channels_last inputs give the same values and convert such "
            "weights in each forward pass"
        )


def warn_of_clipping(parameters: list[torch.Tensor]) -> None:
    """Warn of `clip_grad_norm_` on an engine's parameters, because `.grad` does not hold their gradients."""
    own = [parameter for parameter in parameters if released.owner_of(parameter) is not None]
    if own and all(parameter.grad is None for parameter in own):
        warn_once(
            f"torch.nn.utils.clip_grad_norm_ at {user_line()}: nothing is clipped, because the engine holds the "
            "gradients of its parameters, and their .grad is None. Set `gradient_clipping` in the configuration, which "
            "clips in engine.step(), and remove the call; engine.get_global_grad_norm() returns the norm"
        )


def explain_dtype(error: Exception, inputs: Any, dtype: torch.dtype | None, module: nn.Module) -> str | None:
    """Return a hint where a forward pass has failed on tensors of another floating dtype than the parameters'."""
    if dtype not in (torch.bfloat16, torch.float16) or not _DTYPES.search(str(error)):
        return None
    section = "bf16" if dtype is torch.bfloat16 else "fp16"
    cast = ', or set "fp16": {"auto_cast": true}' if dtype is torch.float16 else ""
    given = {tensor.dtype for tensor in inputs if tensor.is_floating_point()} - {dtype}
    buffers = [(name, b) for name, b in module.named_buffers() if b.is_floating_point() and b.dtype != dtype]
    if given:
        what = f"inputs are {', '.join(sorted(map(_short, given)))}"
        advice = f"Cast the inputs (x.to({dtype})){cast}"
    elif not _MISMATCH.search(str(error)):
        return None
    elif buffers:
        what = f"buffer {buffers[0][0]!r} is {_short(buffers[0][1].dtype)}"
        advice = f'Set "data_types": {{"buffer_dtype": "{section}"}}, or cast the buffer where the model uses it'
    else:
        what = "a tensor that the forward pass makes has another dtype"
        advice = f"Make the tensor with dtype={dtype}, or cast it where the model uses it"
    return (
        f"the engine's forward(): {what}, and `{section}` makes the parameters {section} "
        f"({str(error).splitlines()[0]}). {advice}; or replace the `{section}` section by "
        f'"torch_autocast": {{"enabled": true, "dtype": "{_short(dtype)}"}}, which keeps fp32 '
        "parameters and casts in each operation"
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
